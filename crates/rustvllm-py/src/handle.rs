//! `EngineHandle` for Python: add, abort, wait, read counters, from any thread.

use std::{
    os::fd::AsRawFd,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use ::scheduler::{
    EngineCoreOutput, EngineHandle as SharedHandle, ExtraKeys, FinishReason, PooledVector, PromptLogprobs,
    RequestKey, TokenLogprobs, egress::Consumer,
};
use ipc::Notifier;
use pyo3::{
    exceptions::{PyOSError, PyRuntimeError, PyValueError},
    prelude::*,
    types::PyDict,
};

use crate::errors::{SchedulerStateError, WrongThreadError, add_request_error};
use crate::metrics::metrics_dict;
use crate::request::arguments::RequestArguments;
use crate::request::token_ids::token_ids;

/// How long a parked main thread goes without looking for signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// What the scheduler emits.
pub(crate) enum Emitted {
    /// A token, an end, or both.
    Output(EngineCoreOutput),
    /// Log-probabilities of a token that follows.
    Logprobs(TokenLogprobs),
    /// Log-probabilities of places of a prompt.
    PromptLogprobs(PromptLogprobs),
    /// The vector of a request that ends.
    Pooled(PooledVector),
}

/// The shared side of the scheduler and the output side's end of its egress.
#[pyclass(frozen, name = "EngineHandle", module = "rustvllm._core")]
pub(crate) struct EngineHandle {
    inner: SharedHandle,
    /// One reader at a time; never waited for (`try_lock`). Gone when an `EngineServer` has it.
    consumer: Mutex<Option<Consumer>>,
    notifier: OnceLock<Arc<Notifier>>,
    seen_wakes: AtomicU32,
}

impl EngineHandle {
    pub(crate) fn new(inner: SharedHandle, consumer: Consumer) -> Self {
        Self {
            inner,
            consumer: Mutex::new(Some(consumer)),
            notifier: OnceLock::new(),
            seen_wakes: AtomicU32::new(0),
        }
    }

    /// Consume everything the scheduler emitted.
    pub(crate) fn drain_outputs(&self, mut receive: impl FnMut(Emitted)) {
        // Another thread is draining: what is left keeps the descriptor readable.
        let Ok(mut guard) = self.consumer.try_lock() else { return };
        let Some(consumer) = guard.as_mut() else { return };
        if let Some(notifier) = self.notifier.get() {
            notifier.clear();
        }
        consumer.look();
        consumer.take_logprobs(|logprobs| receive(Emitted::Logprobs(logprobs)));
        consumer.take_prompt_logprobs(|logprobs| receive(Emitted::PromptLogprobs(logprobs)));
        consumer.take_pooled(|vector| receive(Emitted::Pooled(vector)));
        consumer.drain_seen(|output| receive(Emitted::Output(output)));
        drop(guard);
        // There is room again: the parked scheduler hands over what it kept back. The count was stored before
        // `notify`, so a drain that misses it is followed by another one.
        if self.inner.num_held_back() > 0 {
            self.inner.wake();
        }
    }

    /// A stop string was found.
    pub(crate) fn stop_key(&self, key: RequestKey) {
        self.inner.stop_key(key);
    }

    /// Why a request has ended whose end was open: by a stop string, or for the engine's own reason.
    pub(crate) fn settle_end(&self, reason: FinishReason) {
        self.inner.settle_end(reason);
    }

    /// Make the eventfd readable, once per drain. Called by the scheduler's thread after it published.
    pub(crate) fn notify(&self) {
        if let Some(notifier) = self.notifier.get() {
            notifier.notify();
        }
    }

    /// What a server needs: the outputs are its from now on.
    pub(crate) fn give_to_server(&self) -> PyResult<(SharedHandle, Consumer, Arc<Notifier>)> {
        let notifier = self.notifier()?.clone();
        let consumer = self.consumer.lock().unwrap_or_else(PoisonError::into_inner).take();
        let consumer = consumer.ok_or_else(|| {
            SchedulerStateError::new_err("the outputs of this engine are taken by another EngineServer")
        })?;
        Ok((self.inner.clone(), consumer, notifier))
    }

    fn notifier(&self) -> PyResult<&Arc<Notifier>> {
        if self.notifier.get().is_none() {
            let notifier =
                Notifier::new().map_err(|error| PyOSError::new_err(format!("eventfd: {error}")))?;
            // Another thread may have been faster; then ours is closed again.
            let _ = self.notifier.set(Arc::new(notifier));
        }
        self.notifier.get().ok_or_else(|| PyRuntimeError::new_err("no eventfd"))
    }
}

#[pymethods]
impl EngineHandle {
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
        py.detach(|| self.inner.add_requests(arguments.into_requests()))
            .map_err(|error| add_request_error(&error))
    }

    fn grammar_ready(&self, key: u64) {
        self.inner.grammar_ready(RequestKey(key));
    }

    fn grammar_failed(&self, key: u64) {
        self.inner.grammar_failed(RequestKey(key));
    }

    /// There is no room for its grammar: the request ends with an error that says to try again.
    fn grammars_full(&self, key: u64) {
        self.inner.grammars_full(RequestKey(key));
    }

    #[pyo3(signature = (prompt_token_ids, *, cache_salt=None, lora_name=None))]
    fn prefix_hint(
        &self,
        py: Python<'_>,
        prompt_token_ids: &Bound<'_, PyAny>,
        cache_salt: Option<&str>,
        lora_name: Option<&str>,
    ) -> PyResult<u32> {
        let ids = token_ids(py, prompt_token_ids)?;
        let extra_keys = ExtraKeys::new(lora_name, cache_salt, Vec::new());
        Ok(py.detach(|| self.inner.prefix_hint(&ids, &extra_keys)))
    }

    pub(crate) fn abort_requests(&self, request_ids: Vec<String>) {
        self.inner.abort_requests(request_ids.iter().map(String::as_str));
    }

    #[pyo3(signature = (timeout=None))]
    fn wait_for_work(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let deadline = match timeout {
            Some(seconds) => {
                let timeout = Duration::try_from_secs_f64(seconds).map_err(|error| {
                    PyValueError::new_err(format!(
                        "timeout must be a number of seconds, got {seconds}: {error}"
                    ))
                })?;
                Instant::now().checked_add(timeout)
            }
            None => None,
        };
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let slice = left.map_or(SIGNAL_INTERVAL, |left| left.min(SIGNAL_INTERVAL));
            // Relaxed: only the waiting thread touches it.
            let mut seen_wakes = self.seen_wakes.load(Ordering::Relaxed);
            // A thread that is not the main one gets no signals and parks without waking up to look.
            let slice = if is_main_thread(py)? { Some(slice) } else { left };
            let woken = py
                .detach(|| self.inner.wait_for_work(&mut seen_wakes, slice))
                .map_err(|error| WrongThreadError::new_err(error.to_string()))?;
            self.seen_wakes.store(seen_wakes, Ordering::Relaxed);
            if woken {
                return Ok(true);
            }
            py.check_signals()?;
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
        }
    }

    fn wake(&self) {
        self.inner.wake();
    }

    #[getter]
    fn output_fd(&self) -> PyResult<i32> {
        let fd = self.notifier()?.as_raw_fd();
        // Outputs from before the descriptor was asked for must be announced too.
        self.notify();
        Ok(fd)
    }

    pub(crate) fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let mut entries = self.inner.stats().entries();
        entries.push(("num_queued", self.inner.num_queued().into()));
        entries.push(("num_queued_tokens", self.inner.num_queued_tokens()));
        stats_dict(py, entries.into_iter())
    }

    /// All that was counted.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        metrics_dict(py, &self.inner.metrics())
    }
}

/// Counters by name, with the share of the KV cache that is in use.
pub(crate) fn stats_dict<'py, 'a>(
    py: Python<'py>,
    entries: impl Iterator<Item = (&'a str, u64)>,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let (mut usable, mut free) = (0, 0);
    for (name, value) in entries {
        match name {
            "num_usable_blocks" => usable = value,
            "num_free_blocks" => free = value,
            _ => {}
        }
        dict.set_item(name, value)?;
    }
    dict.set_item("kv_cache_usage", usable.saturating_sub(free) as f64 / usable.max(1) as f64)?;
    Ok(dict)
}

fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import("threading")?;
    Ok(threading.call_method0("current_thread")?.is(&threading.call_method0("main_thread")?))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<EngineHandle>()
}
