//! What people look at, as Python objects: outputs, events and requests of a scheduler.

use ::scheduler::{
    EngineCoreOutput, FinishReason, RequestError, RequestEvent, RequestState, RequestStatus, RequestSummary,
};
use pyo3::{prelude::*, types::PyDict};

pub(crate) fn output_dict<'py>(
    py: Python<'py>,
    output: &EngineCoreOutput,
    request_id: Option<&str>,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("request_id", request_id)?;
    dict.set_item("key", output.key.0)?;
    dict.set_item("new_token_id", (output.new_token_id >= 0).then_some(output.new_token_id))?;
    dict.set_item("finish_reason", output.finish_reason.map(FinishReason::as_str))?;
    dict.set_item("stop_reason", (output.stop_reason >= 0).then_some(output.stop_reason))?;
    dict.set_item("num_cached_tokens", output.num_cached_tokens)?;
    dict.set_item("error", (output.error != RequestError::None).then(|| output.error.to_string()))?;
    Ok(dict)
}

pub(crate) fn event_dict<'py>(py: Python<'py>, event: &RequestEvent) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("kind", event.kind.as_str())?;
    dict.set_item("timestamp_ns", event.timestamp_ns)?;
    dict.set_item("step", event.step)?;
    dict.set_item("request_id", &event.request_id)?;
    dict.set_item("status", event.status.as_str())?;
    dict.set_item("num_scheduled_tokens", event.num_scheduled_tokens)?;
    dict.set_item("num_computed_tokens", event.num_computed_tokens)?;
    dict.set_item("num_tokens", event.num_tokens)?;
    dict.set_item("num_draft_tokens", event.num_draft_tokens)?;
    dict.set_item("num_accepted_tokens", event.num_accepted_tokens)?;
    dict.set_item("num_cached_tokens", event.num_cached_tokens)?;
    dict.set_item("num_blocks", event.num_blocks)?;
    dict.set_item("new_block_ids", block_ids(&event.new_block_ids))?;
    dict.set_item("token_id", event.token_id)?;
    Ok(dict)
}

pub(crate) fn block_ids(blocks: &[kvblocks::BlockId]) -> Vec<u32> {
    blocks.iter().map(|block| block.0).collect()
}

pub(crate) fn request_dict<'py>(py: Python<'py>, state: &RequestState) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("request_id", &state.request_id)?;
    dict.set_item("status", state.status.as_str())?;
    dict.set_item("num_tokens", state.num_tokens)?;
    dict.set_item("num_prompt_tokens", state.num_prompt_tokens)?;
    dict.set_item("num_computed_tokens", state.num_computed_tokens)?;
    dict.set_item("num_cached_tokens", state.num_cached_tokens)?;
    dict.set_item("num_preemptions", state.num_preemptions)?;
    dict.set_item("num_output_placeholders", state.num_output_placeholders)?;
    dict.set_item("num_steps_in_flight", state.num_steps_in_flight)?;
    dict.set_item("spec_token_ids", &state.spec_token_ids)?;
    dict.set_item("cpu_blocks", &state.cpu_blocks)?;
    dict.set_item("row", state.row)?;
    dict.set_item("block_table", block_ids(&state.block_table))?;
    dict.set_item("token_ids", &state.token_ids)?;
    dict.set_item("priority", state.priority)?;
    dict.set_item("fair_tag", state.fair_tag)?;
    dict.set_item("adapter", state.adapter)?;
    Ok(dict)
}

pub(crate) fn request_summary<'py>(py: Python<'py>, row: &RequestSummary) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("request_id", &row.request_id)?;
    dict.set_item("status", row.status.as_str())?;
    dict.set_item("num_tokens", row.num_tokens)?;
    dict.set_item("num_prompt_tokens", row.num_prompt_tokens)?;
    dict.set_item("num_computed_tokens", row.num_computed_tokens)?;
    dict.set_item("num_cached_tokens", row.num_cached_tokens)?;
    dict.set_item("num_blocks", row.num_blocks)?;
    dict.set_item("num_preemptions", row.num_preemptions)?;
    dict.set_item("adapter", row.adapter)?;
    Ok(dict)
}

/// Requests that the `repr` of a scheduler names.
const MOST_SHOWN: usize = 4;

/// A live request of a scheduler as it was when it was asked for.
#[pyclass(frozen, name = "RequestSummary", module = "rustvllm._core")]
pub(crate) struct PyRequestSummary {
    inner: RequestSummary,
}

impl From<RequestSummary> for PyRequestSummary {
    fn from(inner: RequestSummary) -> Self {
        Self { inner }
    }
}

impl PyRequestSummary {
    pub(crate) fn status(&self) -> RequestStatus {
        self.inner.status
    }
}

#[pymethods]
impl PyRequestSummary {
    #[getter]
    fn request_id(&self) -> &str {
        &self.inner.request_id
    }

    #[getter(status)]
    fn status_name(&self) -> &'static str {
        self.inner.status.as_str()
    }

    #[getter]
    fn num_tokens(&self) -> u32 {
        self.inner.num_tokens
    }

    #[getter]
    fn num_prompt_tokens(&self) -> u32 {
        self.inner.num_prompt_tokens
    }

    #[getter]
    fn num_output_tokens(&self) -> u32 {
        self.inner.num_tokens.saturating_sub(self.inner.num_prompt_tokens)
    }

    #[getter]
    fn num_computed_tokens(&self) -> u32 {
        self.inner.num_computed_tokens
    }

    #[getter]
    fn num_cached_tokens(&self) -> u32 {
        self.inner.num_cached_tokens
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.inner.num_blocks
    }

    #[getter]
    fn num_preemptions(&self) -> u32 {
        self.inner.num_preemptions
    }

    fn __repr__(&self) -> String {
        let RequestSummary { request_id, status, num_tokens, num_computed_tokens, num_blocks, .. } =
            &self.inner;
        format!(
            "<Request '{request_id}' {}: {num_computed_tokens} of {num_tokens} tokens computed, {num_blocks} blocks>",
            status.as_str()
        )
    }
}

/// How many requests these are, and the ids of the first.
pub(crate) fn first_ids(requests: &[PyRequestSummary]) -> String {
    let ids: Vec<&str> =
        requests.iter().take(MOST_SHOWN).map(|request| request.inner.request_id.as_str()).collect();
    let rest = if requests.len() > MOST_SHOWN { ", …" } else { "" };
    if ids.is_empty() { "0".to_owned() } else { format!("{} ({}{rest})", requests.len(), ids.join(", ")) }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyRequestSummary>()
}
