//! `SchedulerOutput` for Python: the scalars of a step, and its debug view under the field's names.

use ::scheduler::{SchedulerOutput, StepView};
use pyo3::{
    exceptions::PyAttributeError,
    prelude::*,
    types::{PyDict, PyList},
};

use crate::{errors::SchedulerStateError, scheduler::inspection::block_ids};

/// Asks a scheduler, as Python has it, for a step in people's terms; None when the step is in flight no more.
pub(crate) type ViewOfStep = fn(&Bound<'_, PyAny>, &SchedulerOutput) -> PyResult<Option<StepView>>;

/// Names of the debug view that are attributes, too; what is a scalar of every step has a getter of its own.
const DEBUG_FIELDS: [&str; 15] = [
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "resumed_req_ids",
    "num_scheduled_tokens",
    "sampled_req_ids",
    "scheduled_spec_decode_tokens",
    "scheduled_encoder_inputs",
    "num_common_prefix_blocks",
    "finished_req_ids",
    "free_encoder_mm_hashes",
    "preempted_req_ids",
    "has_structured_output_requests",
    "blocks_to_swap_out",
    "blocks_to_swap_in",
    "blocks_to_copy",
];
/// Requests that a `repr` names.
const MOST_SHOWN: usize = 8;

/// What one step runs: scalars here, the rest in the arrays of set `buffer_index`.
#[pyclass(frozen, name = "SchedulerOutput", module = "rustvllm._core")]
pub(crate) struct PySchedulerOutput {
    pub(crate) inner: SchedulerOutput,
    scheduler: Py<PyAny>,
    view_of_step: ViewOfStep,
}

impl PySchedulerOutput {
    pub(crate) fn new(
        inner: SchedulerOutput,
        scheduler: &Bound<'_, PyAny>,
        view_of_step: ViewOfStep,
    ) -> Self {
        Self { inner, scheduler: scheduler.clone().unbind(), view_of_step }
    }

    pub(crate) fn check_origin(&self, scheduler: &Bound<'_, PyAny>) -> PyResult<()> {
        if self.scheduler.is(scheduler) {
            return Ok(());
        }
        let step = self.inner.step;
        Err(SchedulerStateError::new_err(format!(
            "this SchedulerOutput (step {step}) was made by another Scheduler"
        )))
    }

    /// The step in people's terms; None when it is in flight no more.
    fn view(&self, py: Python<'_>) -> PyResult<Option<StepView>> {
        (self.view_of_step)(self.scheduler.bind(py), &self.inner)
    }
}

#[pymethods]
impl PySchedulerOutput {
    #[getter]
    fn step(&self) -> u64 {
        self.inner.step
    }

    #[getter]
    fn buffer_index(&self) -> u32 {
        self.inner.buffer_index
    }

    #[getter]
    fn num_reqs(&self) -> u32 {
        self.inner.num_reqs
    }

    #[getter]
    fn total_num_scheduled_tokens(&self) -> u32 {
        self.inner.total_num_scheduled_tokens
    }

    #[getter]
    fn max_num_scheduled_tokens(&self) -> u32 {
        self.inner.max_num_scheduled_tokens
    }

    #[getter]
    fn max_seq_len(&self) -> u32 {
        self.inner.max_seq_len
    }

    #[getter]
    fn num_sampled(&self) -> u32 {
        self.inner.num_sampled
    }

    #[getter]
    fn num_prompt_logprobs_reqs(&self) -> u32 {
        self.inner.num_prompt_logprobs_reqs
    }

    #[getter]
    fn num_prompt_logprobs(&self) -> u32 {
        self.inner.num_prompt_logprobs
    }

    #[getter]
    fn num_new_reqs(&self) -> u32 {
        self.inner.num_new_reqs
    }

    #[getter]
    fn num_block_table_updates(&self) -> u32 {
        self.inner.num_block_table_updates
    }

    #[getter]
    fn num_finished(&self) -> u32 {
        self.inner.num_finished
    }

    #[getter]
    fn num_preempted(&self) -> u32 {
        self.inner.num_preempted
    }

    #[getter]
    fn num_logits(&self) -> u32 {
        self.inner.num_logits
    }

    #[getter]
    fn num_structured_output_reqs(&self) -> u32 {
        self.inner.num_structured_output_reqs
    }

    #[getter]
    fn num_swap_out(&self) -> u32 {
        self.inner.num_swap_out
    }

    #[getter]
    fn num_swap_in(&self) -> u32 {
        self.inner.num_swap_in
    }

    #[getter]
    fn num_copies(&self) -> u32 {
        self.inner.num_copies
    }

    /// The same content under the field's names, while the step is in flight; for tests and people.
    fn debug_view<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        // The borrow of the scheduler ends before objects are made: making them may run other Python code.
        let view = self.view(py)?.ok_or_else(|| {
            let message = format!("step {} has been updated; its debug view is gone", self.inner.step);
            SchedulerStateError::new_err(message)
        })?;
        let (new, resumed, cached) = (PyList::empty(py), PyList::empty(py), PyList::empty(py));
        let (num_scheduled_tokens, drafts) = (PyDict::new(py), PyDict::new(py));
        let sampled = view.scheduled.iter().filter(|request| request.sampled);
        let sampled: Vec<&str> = sampled.map(|request| request.request_id.as_str()).collect();
        for request in &view.scheduled {
            let entry = PyDict::new(py);
            entry.set_item("req_id", &request.request_id)?;
            entry.set_item("num_computed_tokens", request.num_computed_tokens)?;
            entry.set_item("new_block_ids", block_ids(&request.new_block_ids))?;
            match (request.is_new, request.is_resumed) {
                (true, _) => new.append(entry)?,
                (_, true) => {
                    resumed.append(&request.request_id)?;
                    cached.append(entry)?;
                }
                _ => cached.append(entry)?,
            }
            num_scheduled_tokens.set_item(&request.request_id, request.num_scheduled_tokens)?;
            if !request.spec_token_ids.is_empty() {
                drafts.set_item(&request.request_id, &request.spec_token_ids)?;
            }
        }
        let dict = PyDict::new(py);
        dict.set_item("step", self.inner.step)?;
        dict.set_item("scheduled_new_reqs", new)?;
        dict.set_item("scheduled_cached_reqs", cached)?;
        dict.set_item("resumed_req_ids", resumed)?;
        dict.set_item("num_scheduled_tokens", num_scheduled_tokens)?;
        dict.set_item("total_num_scheduled_tokens", self.inner.total_num_scheduled_tokens)?;
        dict.set_item("sampled_req_ids", sampled)?;
        dict.set_item("scheduled_spec_decode_tokens", drafts)?;
        dict.set_item("scheduled_encoder_inputs", PyDict::new(py))?; // no model here has an encoder
        dict.set_item("num_common_prefix_blocks", [view.num_common_prefix_blocks])?; // one group of caches
        dict.set_item("finished_req_ids", view.finished_req_ids)?;
        dict.set_item("free_encoder_mm_hashes", PyList::empty(py))?;
        dict.set_item("preempted_req_ids", view.preempted_req_ids)?;
        dict.set_item("has_structured_output_requests", self.inner.num_structured_output_reqs > 0)?;
        dict.set_item("blocks_to_swap_out", view.blocks_to_swap_out)?;
        dict.set_item("blocks_to_swap_in", view.blocks_to_swap_in)?;
        dict.set_item("blocks_to_copy", view.blocks_to_copy)?;
        Ok(dict)
    }

    /// A field of the debug view.
    fn __getattr__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        if DEBUG_FIELDS.contains(&name) {
            return self.debug_view(py)?.as_any().get_item(name);
        }
        Err(PyAttributeError::new_err(format!("'SchedulerOutput' object has no attribute '{name}'")))
    }

    fn __dir__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyList>> {
        let names = slf.get_type().dir()?;
        for name in DEBUG_FIELDS {
            names.append(name)?;
        }
        Ok(names)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (step, num_tokens) = (self.inner.step, self.inner.total_num_scheduled_tokens);
        let Some(view) = self.view(py)? else {
            return Ok(format!(
                "SchedulerOutput(step={step}, num_reqs={}, total_num_scheduled_tokens={num_tokens}, updated)",
                self.inner.num_reqs
            ));
        };
        let mut shown: Vec<String> = view
            .scheduled
            .iter()
            .take(MOST_SHOWN)
            .map(|request| format!("'{}': {}", request.request_id, request.num_scheduled_tokens))
            .collect();
        if view.scheduled.len() > MOST_SHOWN {
            shown.push(format!("… {} more", view.scheduled.len() - MOST_SHOWN));
        }
        Ok(format!(
            "SchedulerOutput(step={step}, num_scheduled_tokens={{{}}}, total_num_scheduled_tokens={num_tokens}, num_new_reqs={}, \
             num_finished={}, num_preempted={})",
            shown.join(", "),
            self.inner.num_new_reqs,
            self.inner.num_finished,
            self.inner.num_preempted
        ))
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PySchedulerOutput>()
}
