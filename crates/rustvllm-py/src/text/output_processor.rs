//! `_core.OutputProcessor` and `_core.RequestDelta`: thin faces of [`output::OutputProcessor`].

use std::sync::{Mutex, MutexGuard, PoisonError};

use ::scheduler::{FinishReason, PromptLogprobs, RequestError, RequestKey};
use output::{
    CandidateLogprob, Delivery, DetokenizeOptions, EventTemplate, News, OutputOptions, REPETITION_DETECTED,
    RequestFailure, StopReason, TurnEvents, Verdict,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::errors::blamed_param;
use crate::handle::{Emitted, EngineHandle};
use crate::text::response_events::PyResponseEvents;
use crate::text::stop_strings::StopArgument;
use crate::text::tokenizer::{PyTokenizer, request_error, valid_token_ids};
use crate::text::turn::PyTurnReading;
use crate::transport::client::PyEngineClient;

/// What is new for one request since the last poll.
#[pyclass(frozen, name = "RequestDelta", module = "rustvllm._core")]
pub(crate) struct PyRequestDelta {
    inner: output::RequestDelta,
}

#[pymethods]
impl PyRequestDelta {
    /// The request's number.
    #[getter]
    fn key(&self) -> u64 {
        self.inner.key.0
    }

    /// Text that became certain.
    #[getter]
    fn new_text(&self) -> &str {
        &self.inner.new_text
    }

    /// Tokens, whether or not their text is shown.
    #[getter]
    fn new_token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.inner.new_token_ids)
    }

    /// For each of these tokens its place in the text (characters before it) and its candidates, the sampled one first: id,
    /// log-probability, rank, and its bytes (None without text). Empty unless asked for.
    #[getter]
    fn new_logprobs<'py>(&self, py: Python<'py>) -> PyResult<Vec<(u32, Bound<'py, PyList>)>> {
        let candidate = |of: &CandidateLogprob| {
            (of.token_id, of.logprob, of.rank, of.bytes.as_ref().map(|bytes| PyBytes::new(py, bytes)))
        };
        let positions = self.inner.new_logprobs.iter();
        positions
            .map(|at| Ok((at.text_offset, PyList::new(py, at.candidates.iter().map(candidate))?)))
            .collect()
    }

    /// What became known of the prompt: of consecutive places the first, the number of candidates of each, and as bytes of
    /// machine numbers token ids (int32, the prompt's own first; −1 ends a row), log-probabilities (float32) and the rank
    /// (uint32) of each place's own token. Empty unless asked for.
    #[getter]
    fn new_prompt_logprobs<'py>(&self, py: Python<'py>) -> Vec<PromptChunk<'py>> {
        let chunk = |of: &PromptLogprobs| {
            let ids = bytes_of(py, &of.token_ids, i32::to_ne_bytes);
            let values = bytes_of(py, &of.logprobs, f32::to_ne_bytes);
            let ranks = bytes_of(py, &of.ranks, u32::to_ne_bytes);
            (of.first_position, of.num_columns, ids, values, ranks)
        };
        self.inner.new_prompt_logprobs.iter().map(chunk).collect()
    }

    /// The vector of a request that ends with one, as bytes of machine numbers (float32); else None.
    #[getter]
    fn pooled<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.inner.pooled.as_ref().map(|values| bytes_of(py, values, f32::to_ne_bytes))
    }

    /// Calls of tools in an answer whose events were rendered here, with its end; else 0.
    #[getter]
    fn num_calls(&self) -> u32 {
        self.inner.num_calls
    }

    /// `stop`, `length`, `abort`, `error`, `repetition`, or None while it runs.
    #[getter]
    fn finish_reason(&self) -> Option<&'static str> {
        self.inner.finish_reason.map(FinishReason::as_str)
    }

    /// The stop token's id, the stop string, `repetition_detected`, or None.
    #[getter]
    fn stop_reason<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        Ok(match &self.inner.stop_reason {
            None => None,
            Some(StopReason::Token(token_id)) => Some(token_id.into_pyobject(py)?.into_any()),
            Some(StopReason::Text(text)) => Some(text.into_pyobject(py)?.into_any()),
            Some(StopReason::Repetition) => Some(REPETITION_DETECTED.into_pyobject(py)?.into_any()),
        })
    }

    /// Why it failed; None unless the finish reason is `error`.
    #[getter]
    fn error(&self) -> Option<String> {
        let is_error = self.inner.finish_reason == Some(FinishReason::Error);
        is_error.then(|| match &self.inner.failure {
            Some(failure) => failure.to_string(),
            None => self.inner.error.to_string(),
        })
    }

    /// What kind of error: `invalid`, `refused`, `queue_full`, `queue_timeout`, `grammars_full`, `engine_dead` or `failed`; None
    /// unless the finish reason is `error`.
    #[getter]
    fn error_kind(&self) -> Option<&'static str> {
        let is_error = self.inner.finish_reason == Some(FinishReason::Error);
        is_error.then_some(match &self.inner.failure {
            None if self.inner.error == RequestError::QueueTimeout => "queue_timeout",
            None if self.inner.error == RequestError::GrammarsFull => "grammars_full",
            None if matches!(
                self.inner.error,
                RequestError::ProcessorRefused
                    | RequestError::GrammarFailed
                    | RequestError::GrammarRejected
                    | RequestError::AdapterMissing
                    | RequestError::NothingAllowed
            ) =>
            {
                "refused"
            }
            None => "failed",
            Some(RequestFailure::EngineDied(_)) => "engine_dead",
            Some(RequestFailure::Refused(error)) if blamed_param(error).is_none() => "queue_full",
            Some(RequestFailure::Refused(_)) => "invalid",
        })
    }

    /// Whether what a step raised last says why.
    #[getter]
    fn is_step_error(&self) -> bool {
        self.inner.finish_reason == Some(FinishReason::Error)
            && self.inner.failure.is_none()
            && self.inner.error.is_explained()
    }

    /// The parameter to blame for an `invalid` error.
    #[getter]
    fn error_param(&self) -> Option<&'static str> {
        match &self.inner.failure {
            Some(RequestFailure::Refused(error)) => blamed_param(error),
            _ => None,
        }
    }

    /// Prompt tokens that are computed, where that is news and was asked for; else 0.
    #[getter]
    fn num_computed_prompt_tokens(&self) -> u32 {
        self.inner.num_computed_prompt_tokens
    }

    /// Prompt tokens found in the prefix cache.
    #[getter]
    fn num_cached_tokens(&self) -> u32 {
        self.inner.num_cached_tokens
    }

    /// Drafts out of the request's own prediction that were kept, so far.
    #[getter]
    fn num_accepted_prediction_tokens(&self) -> u32 {
        self.inner.num_accepted_prediction_tokens
    }

    /// Those that were run in vain, so far.
    #[getter]
    fn num_rejected_prediction_tokens(&self) -> u32 {
        self.inner.num_rejected_prediction_tokens
    }

    /// When it was first scheduled (`time.monotonic` seconds; 0.0 while unknown).
    #[getter]
    fn first_scheduled_ts(&self) -> f64 {
        seconds(self.inner.first_scheduled_ns)
    }

    /// When its first token was made (`time.monotonic` seconds; 0.0 while unknown).
    #[getter]
    fn first_token_ts(&self) -> f64 {
        seconds(self.inner.first_token_ns)
    }

    /// When its last token was made (`time.monotonic` seconds; 0.0 while unknown).
    #[getter]
    fn last_token_ts(&self) -> f64 {
        seconds(self.inner.last_token_ns)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.inner)
    }
}

/// First place, candidates per place; token ids, log-probabilities and ranks.
type PromptChunk<'py> = (u32, u32, Bound<'py, PyBytes>, Bound<'py, PyBytes>, Bound<'py, PyBytes>);

fn bytes_of<'py, T: Copy>(
    py: Python<'py>,
    values: &[T],
    bytes: impl Fn(T) -> [u8; 4],
) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &values.iter().flat_map(|&value| bytes(value)).collect::<Vec<u8>>())
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 * 1e-9
}

/// An engine in this process or a client of one in another.
#[derive(FromPyObject)]
enum EngineSide<'py> {
    Handle(Bound<'py, EngineHandle>),
    Client(Bound<'py, PyEngineClient>),
}

/// Tokens to text, for all requests of one front end.
#[pyclass(frozen, name = "OutputProcessor", module = "rustvllm._core")]
pub(crate) struct PyOutputProcessor {
    /// Taken only while the interpreter is released, and never held while waiting for it: the two cannot deadlock.
    inner: Mutex<output::OutputProcessor>,
}

impl PyOutputProcessor {
    fn lock(&self) -> MutexGuard<'_, output::OutputProcessor> {
        // A panic inside leaves the state of one request in doubt at worst; the others go on.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl PyOutputProcessor {
    /// Without a tokenizer, deltas carry token ids only.
    #[new]
    #[pyo3(signature = (tokenizer = None))]
    fn new(py: Python<'_>, tokenizer: Option<&Bound<'_, PyTokenizer>>) -> Self {
        let tokenizer = tokenizer.map(|tokenizer| tokenizer.get().inner.clone());
        Self { inner: Mutex::new(py.detach(|| output::OutputProcessor::new(tokenizer))) }
    }

    /// Expect outputs for `key`; call it before `EngineHandle.add_request`.
    #[pyo3(signature = (
        key, prompt_token_ids, *, detokenize = true, skip_special_tokens = true, spaces_between_special_tokens = true,
        stop = None, include_stop_str_in_output = false, min_tokens = 0, at_the_end = false, event_template = None,
        turn_reading = None, response_events = None, ends_after_call = None, stream_interval = 1, logprobs = false,
        prompt_logprobs = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python signature")]
    #[expect(clippy::fn_params_excessive_bools, reason = "keyword arguments of the Python signature")]
    fn add_request(
        &self,
        py: Python<'_>,
        key: u64,
        prompt_token_ids: &Bound<'_, PyAny>,
        detokenize: bool,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
        stop: Option<StopArgument>,
        include_stop_str_in_output: bool,
        min_tokens: u32,
        at_the_end: bool,
        event_template: Option<(&[u8], &[u8])>,
        turn_reading: Option<&Bound<'_, PyTurnReading>>,
        response_events: Option<&Bound<'_, PyResponseEvents>>,
        ends_after_call: Option<&Bound<'_, PyTurnReading>>,
        stream_interval: u32,
        logprobs: bool,
        prompt_logprobs: bool,
    ) -> PyResult<()> {
        let delivery = match (event_template, response_events) {
            (None, None) if at_the_end => Delivery::AtTheEnd,
            (None, None) => Delivery::Deltas,
            _ if at_the_end => {
                return Err(PyValueError::new_err(
                    "event_template and response_events are for streams, at_the_end is for the others",
                ));
            }
            (None, Some(events)) => Delivery::Response(events.get().shared()),
            (Some(_), Some(_)) => {
                return Err(PyValueError::new_err(
                    "response_events need no event_template: leave one of them out",
                ));
            }
            (Some((before, after)), None) => {
                let template = EventTemplate::new(before, after);
                match turn_reading {
                    None => Delivery::Events(template),
                    Some(reading) => {
                        Delivery::Turn(Box::new(TurnEvents::new(reading.get().shared(), template)))
                    }
                }
            }
        };
        let prompt_token_ids = valid_token_ids(prompt_token_ids)?;
        let detokenize =
            detokenize.then_some(DetokenizeOptions { skip_special_tokens, spaces_between_special_tokens });
        if (logprobs || prompt_logprobs) && !matches!(delivery, Delivery::AtTheEnd | Delivery::Deltas) {
            return Err(PyValueError::new_err("an event that the core renders has no place for logprobs"));
        }
        let options = OutputOptions {
            detokenize,
            stop: stop.map(StopArgument::into_shared).transpose()?.flatten(),
            include_stop_str_in_output,
            min_tokens,
            ends_after_call: ends_after_call.map(|reading| reading.get().shared()),
            delivery,
            stream_interval,
            logprobs,
            prompt_logprobs,
        };
        py.detach(|| self.lock().add_request(RequestKey(key), &prompt_token_ids, options))
            .map_err(|error| request_error(&error))
    }

    /// Forget a request whose reader has gone; its later outputs are dropped.
    fn discard(&self, py: Python<'_>, key: u64) {
        py.detach(|| self.lock().discard(RequestKey(key)));
    }

    /// Keep requests' news, merged, until `release`: their reader is busy.
    fn hold(&self, py: Python<'_>, keys: Vec<u64>) {
        py.detach(|| {
            let mut processor = self.lock();
            for key in keys {
                processor.hold(RequestKey(key));
            }
        });
    }

    /// End `hold`; whether there is news, which the next poll gives.
    fn release(&self, py: Python<'_>, keys: Vec<u64>) -> bool {
        py.detach(|| {
            let mut processor = self.lock();
            let mut has_news = false;
            for key in keys {
                has_news |= processor.release(RequestKey(key));
            }
            has_news
        })
    }

    /// Let tokens go out with the next poll that wait for others of their `stream_interval`: none may follow.
    fn flush(&self, py: Python<'_>) {
        py.detach(|| self.lock().flush());
    }

    /// Drain what the engine emitted: rendered events as pairs of key and bytes, and one delta per other request that
    /// changed. A stop string found, or the end of the one call, ends its request in the engine.
    fn poll<'py>(
        &self,
        py: Python<'py>,
        engine: EngineSide<'_>,
    ) -> PyResult<(Bound<'py, PyList>, Vec<PyRequestDelta>)> {
        let News { deltas, events } = match &engine {
            EngineSide::Handle(handle) => {
                let handle = handle.get();
                py.detach(|| {
                    let mut processor = self.lock();
                    let mut stopped = Vec::new();
                    handle.drain_outputs(|emitted| match emitted {
                        Emitted::Output(record) => match processor.process(&record) {
                            Some(Verdict::Stop(key)) => stopped.push(key),
                            Some(Verdict::Settle { reason, .. }) => handle.settle_end(reason),
                            None => {}
                        },
                        Emitted::Logprobs(logprobs) => processor.add_logprobs(logprobs),
                        Emitted::PromptLogprobs(logprobs) => processor.add_prompt_logprobs(logprobs),
                        Emitted::Pooled(vector) => processor.add_pooled(vector),
                    });
                    for key in stopped {
                        handle.stop_key(key);
                    }
                    processor.take()
                })
            }
            EngineSide::Client(client) => {
                let client = client.get();
                py.detach(|| {
                    let mut processor = self.lock();
                    let stopped = client.process_outputs(&mut processor);
                    if !stopped.is_empty() {
                        client.stop_keys(stopped);
                    }
                    processor.take()
                })
            }
        };
        let events = PyList::new(py, events.iter().map(|(key, event)| (key.0, PyBytes::new(py, event))))?;
        Ok((events, deltas.into_iter().map(|inner| PyRequestDelta { inner }).collect()))
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        py.detach(|| self.lock().len())
    }
}

/// Adds the classes to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyRequestDelta>()?;
    module.add_class::<PyOutputProcessor>()
}
