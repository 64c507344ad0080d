//! `EngineClient` for Python: what [`crate::handle`] is for an engine in this process, for one or several in others.

use std::{net::ToSocketAddrs, os::fd::AsRawFd, path::PathBuf, time::Duration};

use ::scheduler::{FinishReason, RequestKey};
use ipc::{ClientOptions, ClientOutput, Endpoint, EndpointError, EngineRouter, Secret};
use output::{OutputProcessor, RequestFailure, Verdict};
use pyo3::{
    exceptions::{PyOSError, PyValueError},
    prelude::*,
    types::{PyBytes, PyDict},
};

use crate::{
    errors::{EngineDeadError, client_error, endpoint_error},
    handle::stats_dict,
    metrics::metrics_dict,
    request::{arguments::RequestArguments, sampling_extras::check_sendable},
};

/// Engines in other processes: add, abort, read counters, from any thread.
#[pyclass(frozen, name = "EngineClient", module = "rustvllm._core")]
pub(crate) struct PyEngineClient {
    inner: EngineRouter,
    /// For engines that are connected later.
    secret: Option<Secret>,
}

/// The sockets of one engine or of several.
#[derive(FromPyObject)]
enum Paths {
    One(PathBuf),
    Several(Vec<PathBuf>),
}

/// A host, whose port is another argument; or hosts and ports.
#[derive(FromPyObject)]
enum Hosts {
    One(String),
    Several(Vec<(String, u16)>),
}

/// Where a restarted engine listens: a socket, or host and port.
#[derive(FromPyObject)]
enum Place {
    Tcp((String, u16)),
    Unix(PathBuf),
}

impl PyEngineClient {
    /// Give the processor everything that has arrived, and tell engines why requests ended that they could not know it of.
    /// Returns requests that a stop string ended.
    pub(crate) fn process_outputs(&self, processor: &mut OutputProcessor) -> Vec<RequestKey> {
        let mut stopped = Vec::new();
        self.inner.drain_outputs(|output| match output {
            ClientOutput::Output(record) => match processor.process(&record) {
                Some(Verdict::Stop(key)) => stopped.push(key),
                Some(Verdict::Settle { key, reason }) => {
                    self.inner.settle_end(key, reason == FinishReason::Stop);
                }
                None => {}
            },
            ClientOutput::Logprobs(logprobs) => processor.add_logprobs(logprobs),
            ClientOutput::PromptLogprobs(logprobs) => processor.add_prompt_logprobs(logprobs),
            ClientOutput::Pooled(vector) => processor.add_pooled(vector),
            ClientOutput::Refused { key, error } => processor.fail(key, RequestFailure::Refused(error)),
            ClientOutput::Died { key, reason } => processor.fail(key, RequestFailure::EngineDied(reason)),
        });
        stopped
    }

    pub(crate) fn stop_keys(&self, keys: Vec<RequestKey>) {
        self.inner.stop_keys(keys);
    }
}

#[pymethods]
impl PyEngineClient {
    /// Connect to an engine's Unix socket, or to those of several, by rank; one that does not listen yet is waited for.
    #[staticmethod]
    #[pyo3(signature = (path, timeout=5.0, *, heartbeat_interval=0.2))]
    fn connect(py: Python<'_>, path: Paths, timeout: f64, heartbeat_interval: f64) -> PyResult<Self> {
        let options = options(timeout, heartbeat_interval)?;
        let paths = match path {
            Paths::One(path) => vec![path],
            Paths::Several(paths) => paths,
        };
        connect(py, paths.into_iter().map(Endpoint::Unix).collect(), None, options)
    }

    /// Connect over TCP, to a host and port or to a list of such pairs; both sides prove that they know the secret.
    #[staticmethod]
    #[pyo3(signature = (host, port=None, secret=None, timeout=5.0, *, heartbeat_interval=0.2))]
    fn connect_tcp(
        py: Python<'_>,
        host: Hosts,
        port: Option<u16>,
        secret: Option<&[u8]>,
        timeout: f64,
        heartbeat_interval: f64,
    ) -> PyResult<Self> {
        let options = options(timeout, heartbeat_interval)?;
        let secret = secret.ok_or(EndpointError::SecretMissing).and_then(Secret::new);
        let secret = secret.map_err(|error| endpoint_error(&error))?;
        let hosts = match (host, port) {
            (Hosts::One(host), Some(port)) => vec![(host, port)],
            (Hosts::Several(hosts), None) => hosts,
            (Hosts::One(_), None) => return Err(PyValueError::new_err("a host needs a port")),
            (Hosts::Several(_), Some(_)) => {
                return Err(PyValueError::new_err(
                    "a list of (host, port) has its ports: leave the argument port out",
                ));
            }
        };
        let endpoints = py.detach(|| {
            hosts.iter().map(|(host, port)| tcp(host, *port, &secret)).collect::<PyResult<Vec<_>>>()
        })?;
        connect(py, endpoints, Some(secret), options)
    }

    /// Put a restarted engine into the place of `rank`; `path` is a socket, or (host, port).
    ///
    /// `first_query`, a kind and a payload, is answered before the engine gets a request from here.
    #[pyo3(signature = (rank, path, timeout=5.0, first_query=None))]
    fn reconnect(
        &self,
        py: Python<'_>,
        rank: usize,
        path: Place,
        timeout: f64,
        first_query: Option<(String, Vec<u8>)>,
    ) -> PyResult<()> {
        let timeout = seconds("timeout", timeout)?;
        py.detach(|| {
            let endpoint = match path {
                Place::Unix(path) => Endpoint::Unix(path),
                Place::Tcp((host, port)) => {
                    let secret = self.secret.as_ref().ok_or(EndpointError::SecretMissing);
                    tcp(&host, port, secret.map_err(|error| endpoint_error(&error))?)?
                }
            };
            let first_query = first_query.as_ref().map(|(kind, payload)| (kind.as_str(), payload.as_slice()));
            self.inner.reconnect(rank, endpoint, timeout, first_query).map_err(|error| client_error(&error))
        })
    }

    /// Leave the engine of one rank: what it has ends with `reason`, until another is connected in its place.
    fn abandon(&self, py: Python<'_>, rank: usize, reason: &str) -> PyResult<()> {
        py.detach(|| self.inner.abandon(rank, reason)).map_err(|error| client_error(&error))
    }

    #[getter]
    fn num_engines(&self) -> usize {
        self.inner.num_engines()
    }

    /// What is known of the engine of one rank.
    fn engine_health<'py>(&self, py: Python<'py>, rank: usize) -> PyResult<Bound<'py, PyDict>> {
        let engine = self.inner.engine(rank).map_err(|error| client_error(&error))?;
        let (health, counters) = (engine.health(), engine.stats());
        let counter =
            |name: &str| counters.iter().find(|(entry, _)| entry == name).map_or(0, |(_, value)| *value);
        // What a dead engine had at its last heartbeat has ended since.
        let now = |name: &str| if engine.is_alive() { counter(name) } else { 0 };
        let dict = PyDict::new(py);
        dict.set_item("is_alive", engine.is_alive())?;
        dict.set_item("death", engine.death())?;
        dict.set_item("last_heartbeat_age", health.heartbeat_age.as_secs_f64())?;
        dict.set_item("step_age", health.step_age.as_secs_f64())?;
        dict.set_item("num_steps", health.num_steps)?;
        dict.set_item("pid", engine.facts().pid)?;
        dict.set_item("num_running", now("num_running"))?;
        dict.set_item("num_waiting", now("num_waiting"))?;
        Ok(dict)
    }

    /// Counters of one engine: of the last heartbeat, or, when given a time to wait, of now.
    #[pyo3(signature = (rank, timeout=0.0))]
    fn engine_stats<'py>(&self, py: Python<'py>, rank: usize, timeout: f64) -> PyResult<Bound<'py, PyDict>> {
        let timeout = seconds("timeout", timeout)?;
        let engine = self.inner.engine(rank).map_err(|error| client_error(&error))?;
        let counters =
            if timeout.is_zero() { engine.stats() } else { py.detach(|| engine.fresh_stats(timeout)) };
        stats_dict(py, counters.iter().map(|(name, value)| (name.as_str(), *value)))
    }

    /// Ask the thread that steps the engine of one rank.
    #[pyo3(signature = (rank, kind, payload, timeout))]
    fn query<'py>(
        &self,
        py: Python<'py>,
        rank: usize,
        kind: &str,
        payload: &[u8],
        timeout: f64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let timeout = seconds("timeout", timeout)?;
        let engine = self.inner.engine(rank).map_err(|error| client_error(&error))?;
        let answer =
            py.detach(|| engine.query(kind, payload, timeout)).map_err(|error| client_error(&error))?;
        Ok(PyBytes::new(py, &answer))
    }

    fn new_key(&self) -> u64 {
        self.inner.new_key().0
    }

    #[pyo3(signature = (key, request_id, prompt_token_ids, **keywords))]
    fn add_request(
        &self,
        py: Python<'_>,
        key: u64,
        request_id: &str,
        prompt_token_ids: &Bound<'_, PyAny>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let arguments = RequestArguments::read(key, request_id, prompt_token_ids, keywords)?;
        arguments.extras().map_or(Ok(()), check_sendable)?;
        py.detach(|| self.inner.add_requests(&arguments.into_requests()))
            .map_err(|error| client_error(&error))
    }

    fn grammar_ready(&self, py: Python<'_>, key: u64) {
        py.detach(|| self.inner.grammar_ready(RequestKey(key)));
    }

    fn grammar_failed(&self, py: Python<'_>, key: u64) {
        py.detach(|| self.inner.grammar_failed(RequestKey(key)));
    }

    fn abort_requests(&self, py: Python<'_>, request_ids: Vec<String>) {
        py.detach(|| self.inner.abort_requests(request_ids.iter().map(String::as_str)));
    }

    #[getter]
    fn output_fd(&self) -> i32 {
        self.inner.notifier().as_raw_fd()
    }

    /// Counters of the living engines together: of the last heartbeats, or, when given a time to wait, of now.
    #[pyo3(signature = (timeout=0.0))]
    fn stats<'py>(&self, py: Python<'py>, timeout: f64) -> PyResult<Bound<'py, PyDict>> {
        let timeout = seconds("timeout", timeout)?;
        let counters = if timeout.is_zero() {
            self.inner.stats()
        } else {
            py.detach(|| self.inner.fresh_stats(timeout))
        };
        stats_dict(py, counters.iter().map(|(name, value)| (name.as_str(), *value)))
    }

    /// All that each engine has counted, by rank; `None` for one that has gone or does not answer in time.
    #[pyo3(signature = (timeout=0.5))]
    fn metrics<'py>(&self, py: Python<'py>, timeout: f64) -> PyResult<Vec<Option<Bound<'py, PyDict>>>> {
        let timeout = seconds("timeout", timeout)?;
        let all = py.detach(|| self.inner.metrics(timeout));
        all.iter().map(|one| one.as_ref().map(|one| metrics_dict(py, one)).transpose()).collect()
    }

    #[getter]
    fn is_alive(&self) -> bool {
        self.inner.is_alive()
    }

    #[getter]
    fn death(&self) -> Option<String> {
        self.inner.death()
    }

    #[getter]
    fn last_step_error(&self) -> Option<String> {
        self.inner.last_step_error().map(|message| message.to_string())
    }

    fn check_alive(&self) -> PyResult<()> {
        match self.inner.death() {
            None => Ok(()),
            Some(reason) => Err(EngineDeadError::new_err(reason)),
        }
    }

    #[getter]
    fn last_heartbeat_age(&self) -> f64 {
        self.inner.health().heartbeat_age.as_secs_f64()
    }

    #[getter]
    fn step_age(&self) -> f64 {
        self.inner.health().step_age.as_secs_f64()
    }

    #[getter]
    fn num_steps(&self) -> u64 {
        self.inner.health().num_steps
    }

    #[getter]
    fn client_index(&self) -> u32 {
        self.inner.client_index()
    }

    #[getter]
    fn max_model_len(&self) -> u32 {
        self.inner.facts().limits.max_model_len
    }

    #[getter]
    fn block_size(&self) -> u32 {
        self.inner.facts().limits.block_size
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.inner.facts().limits.num_blocks
    }

    #[getter]
    fn max_num_seqs(&self) -> u32 {
        self.inner.facts().max_num_seqs
    }

    #[getter]
    fn max_num_queued_reqs(&self) -> u32 {
        self.inner.facts().max_num_queued_reqs
    }

    #[getter]
    fn engine_pid(&self) -> PyResult<u32> {
        let engine = self.inner.engine(0).map_err(|error| client_error(&error))?;
        Ok(engine.facts().pid)
    }

    #[getter]
    fn info<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.facts().info)
    }

    /// Disconnect; what runs gets its last output. Idempotent.
    fn close(&self) {
        self.inner.close();
    }

    fn __repr__(&self) -> String {
        let state = self.inner.death().unwrap_or_else(|| "connected".to_owned());
        let pids: Vec<String> = (0..self.inner.num_engines())
            .filter_map(|rank| self.inner.engine(rank).ok())
            .map(|engine| engine.facts().pid.to_string())
            .collect();
        format!("EngineClient({}, engine {}: {state})", self.inner.client_index(), pids.join(", "))
    }
}

fn connect(
    py: Python<'_>,
    endpoints: Vec<Endpoint>,
    secret: Option<Secret>,
    options: ClientOptions,
) -> PyResult<PyEngineClient> {
    let inner = py.detach(|| EngineRouter::connect(endpoints, options));
    Ok(PyEngineClient { inner: inner.map_err(|error| client_error(&error))?, secret })
}

fn tcp(host: &str, port: u16, secret: &Secret) -> PyResult<Endpoint> {
    Ok(Endpoint::Tcp { address: resolve(host, port)?, secret: secret.clone() })
}

fn resolve(host: &str, port: u16) -> PyResult<std::net::SocketAddr> {
    let found = (host, port).to_socket_addrs().map(|mut addresses| addresses.next());
    match found {
        Ok(Some(address)) => Ok(address),
        Ok(None) => Err(PyOSError::new_err(format!("{host} has no address"))),
        Err(error) => Err(PyOSError::new_err(format!("{host}:{port}: {error}"))),
    }
}

fn options(timeout: f64, heartbeat_interval: f64) -> PyResult<ClientOptions> {
    let heartbeat_interval = seconds("heartbeat_interval", heartbeat_interval)?;
    if heartbeat_interval < Duration::from_millis(1) {
        return Err(PyValueError::new_err(format!(
            "heartbeat_interval must be at least 0.001 s, got {}",
            heartbeat_interval.as_secs_f64()
        )));
    }
    let connect_timeout = seconds("timeout", timeout)?;
    Ok(ClientOptions { connect_timeout, heartbeat_interval, ..ClientOptions::default() })
}

/// A time of at most ten years: a deadline that is further away cannot be computed.
fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    let longest = Duration::from_secs(10 * 365 * 86_400);
    Duration::try_from_secs_f64(value).map(|duration| duration.min(longest)).map_err(|error| {
        PyValueError::new_err(format!("{name} must be a number of seconds, got {value}: {error}"))
    })
}

/// Adds the class to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyEngineClient>()
}
