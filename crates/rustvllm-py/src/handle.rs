//! `EngineHandle` for Python: add, abort, wait, read counters, from any thread.

use std::{
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use ::scheduler::{
    EngineCoreOutput, EngineHandle as SharedHandle, ExtraKeys, MultimodalSpan, NewRequest, RequestKey,
    SamplingParams, egress::Consumer,
};
use pyo3::{
    exceptions::{PyOSError, PyRuntimeError, PyValueError},
    prelude::*,
    types::PyDict,
};
use rustix::event::{EventfdFlags, eventfd};

use crate::buffers::native_buffer;
use crate::errors::{WrongThreadError, add_request_error};

/// How long a parked main thread goes without looking for signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// The shared side of the scheduler and the output side's end of its egress.
#[pyclass(frozen, name = "EngineHandle", module = "rustvllm._core")]
pub(crate) struct EngineHandle {
    inner: SharedHandle,
    /// One reader at a time; never waited for (`try_lock`).
    consumer: Mutex<Consumer>,
    notifier: OnceLock<OwnedFd>,
    /// Whether the eventfd is readable and nobody has drained since.
    notified: AtomicBool,
    seen_wakes: AtomicU32,
}

impl EngineHandle {
    pub(crate) fn new(inner: SharedHandle, consumer: Consumer) -> Self {
        Self {
            inner,
            consumer: Mutex::new(consumer),
            notifier: OnceLock::new(),
            notified: AtomicBool::new(false),
            seen_wakes: AtomicU32::new(0),
        }
    }

    /// Consume everything the scheduler emitted.
    pub(crate) fn drain_outputs(&self, receive: impl FnMut(EngineCoreOutput)) {
        // Somebody else is draining: what is left keeps the descriptor readable.
        let Ok(mut consumer) = self.consumer.try_lock() else { return };
        if let Some(fd) = self.notifier.get() {
            let mut count = [0u8; 8];
            // Before the flag is cleared: a write that comes in between leaves the descriptor readable and
            // costs an empty drain; read afterwards, it would be swallowed and its records never announced.
            // EAGAIN (nothing was announced) is as good as a count.
            let _ = rustix::io::read(fd, &mut count);
        }
        // AcqRel: pairs with the swap in `notify`. If the scheduler's thread saw `true` and did not write,
        // its records were published before this swap and the drain below sees them.
        self.notified.swap(false, Ordering::AcqRel);
        consumer.drain(receive);
        drop(consumer);
        // There is room again: the parked scheduler hands over what it kept back. The count was stored before
        // `notify`, so a drain that misses it is followed by another one.
        if self.inner.num_held_back() > 0 {
            self.inner.wake();
        }
    }

    /// Abort from inside the core: a stop string was found.
    pub(crate) fn abort_key(&self, key: RequestKey) {
        self.inner.abort_key(key);
    }

    /// Make the eventfd readable, once per drain. Called by the scheduler's thread after it published.
    pub(crate) fn notify(&self) {
        let Some(fd) = self.notifier.get() else { return };
        // AcqRel: see `drain_outputs`.
        if !self.notified.swap(true, Ordering::AcqRel) {
            // The counter cannot overflow: one write per drain.
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }
}

#[pymethods]
impl EngineHandle {
    fn new_key(&self) -> u64 {
        self.inner.new_key().0
    }

    #[pyo3(signature = (key, request_id, prompt_token_ids, *, max_tokens, min_tokens=0, eos_token_id=None,
        stop_token_ids=Vec::new(), temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, presence_penalty=0.0,
        frequency_penalty=0.0, repetition_penalty=1.0, seed=0, num_logprobs=-1, priority=0, cache_salt=None,
        lora_name=None, multimodal=Vec::new(), skip_reading_prefix_cache=false, waits_for_grammar=false, fork_from=None,
        samples=Vec::new()))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python: one small call per request")]
    fn add_request(
        &self,
        py: Python<'_>,
        key: u64,
        request_id: &str,
        prompt_token_ids: &Bound<'_, PyAny>,
        max_tokens: u32,
        min_tokens: u32,
        eos_token_id: Option<i32>,
        stop_token_ids: Vec<i32>,
        temperature: f32,
        top_p: f32,
        top_k: i64,
        min_p: f32,
        presence_penalty: f32,
        frequency_penalty: f32,
        repetition_penalty: f32,
        seed: i64,
        num_logprobs: i64,
        priority: i32,
        cache_salt: Option<&str>,
        lora_name: Option<&str>,
        multimodal: Vec<(u32, u32, Vec<u8>)>,
        skip_reading_prefix_cache: bool,
        waits_for_grammar: bool,
        fork_from: Option<u64>,
        samples: Vec<(u64, String, i64)>,
    ) -> PyResult<()> {
        let params = SamplingParams {
            max_tokens,
            min_tokens,
            eos_token_id,
            stop_token_ids: stop_token_ids.into(),
            temperature,
            top_p,
            min_p,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            top_k,
            seed,
            num_logprobs,
        };
        let spans = multimodal.into_iter().map(|(offset, length, digest)| MultimodalSpan {
            offset,
            length,
            digest: digest.into(),
        });
        let request = NewRequest {
            key: RequestKey(key),
            request_id: request_id.into(),
            prompt_token_ids: token_ids(py, prompt_token_ids)?,
            params,
            priority,
            extra_keys: ExtraKeys::new(lora_name, cache_salt, spans.collect()),
            skip_reading_prefix_cache,
            waits_for_grammar,
            fork_from: fork_from.map(RequestKey),
        };
        let mut requests = Vec::with_capacity(1 + samples.len());
        requests.extend(samples.into_iter().map(|(sample_key, sample_id, seed)| NewRequest {
            key: RequestKey(sample_key),
            request_id: sample_id.into(),
            params: SamplingParams { seed, ..request.params.clone() },
            fork_from: Some(RequestKey(key)),
            ..request.clone()
        }));
        requests.insert(0, request);
        py.detach(|| self.inner.add_requests(requests)).map_err(|error| add_request_error(&error))
    }

    fn grammar_ready(&self, key: u64) {
        self.inner.grammar_ready(RequestKey(key));
    }

    fn grammar_failed(&self, key: u64) {
        self.inner.grammar_failed(RequestKey(key));
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
        if self.notifier.get().is_none() {
            let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|error| PyOSError::new_err(format!("eventfd: {error}")))?;
            // Another thread may have been faster; then ours is closed again.
            let _ = self.notifier.set(fd);
        }
        let fd = self.notifier.get().ok_or_else(|| PyRuntimeError::new_err("no eventfd"))?;
        // What was emitted before anybody listened must be announced too.
        self.notify();
        Ok(fd.as_raw_fd())
    }

    pub(crate) fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.inner.stats();
        let dict = PyDict::new(py);
        for (name, value) in stats.entries() {
            dict.set_item(name, value)?;
        }
        let used = stats.num_usable_blocks.saturating_sub(stats.num_free_blocks);
        dict.set_item("kv_cache_usage", used as f64 / stats.num_usable_blocks.max(1) as f64)?;
        dict.set_item("num_queued", self.inner.num_queued())?;
        Ok(dict)
    }
}

/// Ids from an int32 buffer (one copy) or from a sequence of ints.
pub(crate) fn token_ids(py: Python<'_>, object: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    match native_buffer::<i32>(object) {
        Ok(buffer) => buffer.to_vec(py),
        Err(_) => object.extract(),
    }
}

fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import("threading")?;
    Ok(threading.call_method0("current_thread")?.is(&threading.call_method0("main_thread")?))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<EngineHandle>()
}
