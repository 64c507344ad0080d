//! `EngineServer` for Python: the engine's side of the transport. Its I/O thread never needs the interpreter.

use std::{
    os::fd::BorrowedFd,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ipc::{EngineServer, Listener, MAX_INFO_BYTES, Queries, Query, Secret, ServerOptions};
use pyo3::{
    exceptions::PyValueError,
    prelude::*,
    types::{PyBytes, PyDict},
};

use crate::{
    errors::{SchedulerStateError, endpoint_error},
    handle::EngineHandle,
};

/// Serves the clients of an engine; dropped or stopped, it says goodbye to them.
#[pyclass(frozen, name = "EngineServer", module = "rustvllm._core")]
pub(crate) struct PyEngineServer {
    /// Taken only while the interpreter is released.
    inner: Mutex<EngineServer>,
    queries: Arc<Queries>,
    tcp_port: Option<u16>,
}

impl PyEngineServer {
    fn lock(&self) -> MutexGuard<'_, EngineServer> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl PyEngineServer {
    /// Listen and serve; the handle's outputs belong to the server from now on.
    #[new]
    #[pyo3(signature = (handle, path=None, *, fd=None, tcp_address=None, secret=None, info=Vec::new(), max_clients=1024))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
    fn new(
        py: Python<'_>,
        handle: &Bound<'_, EngineHandle>,
        path: Option<PathBuf>,
        fd: Option<i32>,
        tcp_address: Option<&str>,
        secret: Option<&[u8]>,
        info: Vec<u8>,
        max_clients: u32,
    ) -> PyResult<Self> {
        if info.len() > MAX_INFO_BYTES {
            let message = format!("info must have at most {MAX_INFO_BYTES} bytes, got {}", info.len());
            return Err(PyValueError::new_err(message));
        }
        let mut listeners = Vec::new();
        if let Some(path) = path {
            listeners.push(Listener::unix(&path).map_err(|error| endpoint_error(&error))?);
        }
        if let Some(fd) = fd {
            let wrong = |error: &dyn std::fmt::Display| {
                PyValueError::new_err(format!("fd must be a listening Unix socket, got {fd}: {error}"))
            };
            if fd < 0 {
                return Err(wrong(&"no descriptor is negative"));
            }
            // SAFETY: the number is used for one `dup`, which says so when nothing is open under it.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned();
            let fd = fd.map_err(|error| wrong(&error))?;
            listeners.push(Listener::inherited(fd).map_err(|error| wrong(&error))?);
        }
        if let Some(address) = tcp_address {
            let address = address.parse().map_err(|error| {
                PyValueError::new_err(format!(
                    "tcp_address must be like 127.0.0.1:9000, got {address:?}: {error}"
                ))
            })?;
            let secret = secret.ok_or_else(|| endpoint_error(&ipc::EndpointError::SecretMissing))?;
            let secret = Secret::new(secret).map_err(|error| endpoint_error(&error))?;
            listeners.push(Listener::tcp(address, secret).map_err(|error| endpoint_error(&error))?);
        }
        if listeners.is_empty() {
            return Err(PyValueError::new_err("an EngineServer needs a path, an fd or a tcp_address"));
        }
        let tcp_port = listeners.iter().find_map(Listener::tcp_address).map(|address| address.port());
        let (shared, consumer, notifier) = handle.get().give_to_server()?;
        let mut options = ServerOptions::new(shared, consumer, notifier);
        options.listeners = listeners;
        options.info = info.into();
        options.max_clients = max_clients;
        let inner = py.detach(|| EngineServer::start(options)).map_err(|error| endpoint_error(&error))?;
        Ok(Self { queries: inner.queries(), inner: Mutex::new(inner), tcp_port })
    }

    /// Say goodbye to every client and end, within half a second. Idempotent.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.lock().stop());
    }

    /// Tell every client why the engine died and end, within half a second.
    fn fail(&self, py: Python<'_>, message: &str) {
        py.detach(|| self.lock().fail(message));
    }

    /// Say why a step failed; to be called before `Scheduler.fail_step`.
    fn note_step_error(&self, py: Python<'_>, message: &str) {
        py.detach(|| self.lock().note_step_error(message));
    }

    /// What clients ask of the thread that steps the engine.
    fn take_queries(&self) -> Vec<PyEngineQuery> {
        self.queries.take().into_iter().map(PyEngineQuery::new).collect()
    }

    #[getter]
    fn is_alive(&self, py: Python<'_>) -> bool {
        py.detach(|| self.lock().is_alive())
    }

    #[getter]
    fn tcp_port(&self) -> Option<u16> {
        self.tcp_port
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.lock().stats());
        let dict = PyDict::new(py);
        for (name, value) in [
            ("num_clients", stats.num_clients),
            ("num_connections", stats.num_connections),
            ("num_refused", stats.num_refused),
            ("num_failed", stats.num_failed),
            ("num_requests", stats.num_requests),
            ("num_dropped_outputs", stats.num_dropped_outputs),
            ("num_bytes_sent", stats.num_bytes_sent),
        ] {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    /// Why connections were refused or cut since the last call, for the log.
    fn take_complaints(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| self.lock().take_complaints())
    }
}

/// A question of a client. Dropped without an answer, it tells its client so.
#[pyclass(frozen, name = "EngineQuery", module = "rustvllm._core")]
pub(crate) struct PyEngineQuery {
    kind: String,
    payload: Box<[u8]>,
    /// Held for as long as it takes to exchange a pointer.
    inner: Mutex<Option<Query>>,
}

impl PyEngineQuery {
    fn new(query: Query) -> Self {
        Self {
            kind: query.kind().to_owned(),
            payload: query.payload().into(),
            inner: Mutex::new(Some(query)),
        }
    }

    fn take(&self) -> PyResult<Query> {
        let query = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        query.ok_or_else(|| {
            SchedulerStateError::new_err(format!("the query {:?} has been answered already", self.kind))
        })
    }
}

#[pymethods]
impl PyEngineQuery {
    #[getter]
    fn kind(&self) -> &str {
        &self.kind
    }

    #[getter]
    fn payload<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.payload)
    }

    fn answer(&self, answer: Vec<u8>) -> PyResult<()> {
        self.take()?.answer(Ok(answer));
        Ok(())
    }

    fn fail(&self, message: String) -> PyResult<()> {
        self.take()?.answer(Err(message));
        Ok(())
    }
}

/// Adds the classes to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyEngineQuery>()?;
    module.add_class::<PyEngineServer>()
}
