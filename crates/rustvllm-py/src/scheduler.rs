//! `Scheduler` and `SchedulerOutput` for Python: the owner's side, and the debug views.

pub(crate) mod buffers;
pub(crate) mod config;
pub(crate) mod drafter;
pub(crate) mod inspection;
mod logprobs;
pub(crate) mod output;

use std::{
    collections::{BTreeMap, HashMap},
    thread::{self, ThreadId},
};

use ::scheduler::{
    ExtraKeys, LogprobRows, PauseState, PooledRows, PromptLogprobRows, RequestStatus, Scheduler,
    SchedulerConfig, SchedulerOutput, StepBuffers, StepRows, StepView, TokenRows, monotonic_ns,
};
use pyo3::{
    exceptions::PyValueError,
    prelude::*,
    types::{PyBytes, PyDict, PyList, PyTuple},
};

use crate::{
    errors::{SchedulerStateError, WrongThreadError, scheduler_error},
    handle::{Emitted, EngineHandle},
    request::{sampling_extras::PySamplingExtras, token_ids::token_ids},
    scheduler::{
        buffers::{RegisteredViews, copy_rows, copy_vectors, register_set},
        config::PySchedulerConfig,
        inspection::{PyRequestSummary, event_dict, first_ids, output_dict, request_dict, request_summary},
        logprobs::{CopiedLogprobs, CopiedPromptLogprobs, LogprobArrays, PromptLogprobArrays},
        output::PySchedulerOutput,
    },
};

/// What Python calls the states of a pause.
const PAUSE_STATES: [(&str, PauseState); 3] = [
    ("unpaused", PauseState::Unpaused),
    ("paused_new", PauseState::PausedNew),
    ("paused_all", PauseState::PausedAll),
];

/// Offset, length, digest and content of a multimodal input.
type MultimodalInput<'py> = (u32, u32, Bound<'py, PyBytes>, Bound<'py, PyBytes>);

/// Makes a single-owner value acceptable to pyo3, which asks every class to be `Sync`.
struct Exclusive<T>(T);

// SAFETY: the value is only reached through `&mut Exclusive` (see `get`), and pyo3 hands out one `&mut`
// to a `#[pyclass]` at a time, raising an exception in the second caller. No `&T` is ever shared.
unsafe impl<T: Send> Sync for Exclusive<T> {}

impl<T> Exclusive<T> {
    fn get(&mut self) -> &mut T {
        &mut self.0
    }
}

/// The owner's side. One thread schedules and updates: the first that calls `schedule`.
#[pyclass(name = "Scheduler", module = "rustvllm._core")]
pub(crate) struct PyScheduler {
    inner: Exclusive<Scheduler>,
    handle: Py<EngineHandle>,
    config: Py<PySchedulerConfig>,
    owner: Option<ThreadId>,
    /// The ids of one update, copied out of Python's arrays.
    sampled: Vec<i32>,
    drafts: Vec<i32>,
    /// Ids of the requests that `add_request` handed in, until their last output is taken.
    request_ids: HashMap<u64, String>,
    /// When the last update had been done and not announced yet (monotonic nanoseconds).
    updated_ns: u64,
    /// The arrays that the sets were registered from.
    step_buffers: Py<PyList>,
    /// Views that keep the step arrays alive and in place; dropped after `inner` (declaration order).
    _views: RegisteredViews,
}

impl PyScheduler {
    fn check_owner(&mut self) -> PyResult<()> {
        let caller = thread::current().id();
        let owner = *self.owner.get_or_insert(caller);
        if owner == caller {
            return Ok(());
        }
        let message = format!(
            "the scheduler belongs to {owner:?}, the first thread that called it, not to {caller:?}; use one thread, or AsyncLLM"
        );
        Err(WrongThreadError::new_err(message))
    }

    /// The scheduler, for other classes that belong to the same thread.
    pub(crate) fn owned(&mut self) -> &mut Scheduler {
        self.inner.get()
    }

    /// The scheduler, with what has arrived in its queues.
    fn take_arrivals(&mut self) -> &mut Scheduler {
        self.inner.get().take_arrivals();
        self.announce();
        self.inner.get()
    }

    /// All live requests: running ones, those whose blocks are leaving, and those that wait, as they are tried.
    fn live_requests(&mut self) -> Vec<PyRequestSummary> {
        let rows = self.take_arrivals().request_summaries(usize::MAX);
        rows.into_iter().map(PyRequestSummary::from).collect()
    }

    fn live_with(&mut self, is_wanted: impl Fn(RequestStatus) -> bool) -> Vec<PyRequestSummary> {
        self.live_requests().into_iter().filter(|request| is_wanted(request.status())).collect()
    }

    fn announce(&mut self) {
        if self.inner.get().has_outputs() {
            self.handle.get().notify();
        }
    }
}

#[pymethods]
impl PyScheduler {
    #[new]
    #[pyo3(signature = (config, step_buffers=None))]
    fn new(
        py: Python<'_>,
        config: Py<PySchedulerConfig>,
        step_buffers: Option<Vec<Bound<'_, PyAny>>>,
    ) -> PyResult<Self> {
        let numbers = config.get().inner.clone();
        let step_buffers = match step_buffers {
            Some(given) => given,
            None => new_arrays(py, &numbers)?,
        };
        let mut views = RegisteredViews::default();
        let sets: Vec<StepBuffers> = step_buffers
            .iter()
            .map(|set| register_set(&numbers, set, &mut views))
            .collect::<PyResult<_>>()?;
        views.check_disjoint()?;
        let mut inner = Scheduler::new(numbers, sets).map_err(|error| scheduler_error(&error))?;
        let consumer =
            inner.take_consumer().ok_or_else(|| SchedulerStateError::new_err("the egress has been taken"))?;
        Ok(Self {
            handle: Py::new(py, EngineHandle::new(inner.handle(), consumer))?,
            inner: Exclusive(inner),
            config,
            owner: None,
            sampled: Vec::new(),
            drafts: Vec::new(),
            request_ids: HashMap::new(),
            updated_ns: 0,
            step_buffers: PyList::new(py, step_buffers)?.unbind(),
            _views: views,
        })
    }

    #[getter]
    fn step_buffers(&self, py: Python<'_>) -> Py<PyList> {
        self.step_buffers.clone_ref(py)
    }

    /// `EngineHandle.add_request` under a new key, which is returned.
    #[pyo3(signature = (request_id, prompt_token_ids, **params))]
    fn add_request(
        slf: &Bound<'_, Self>,
        request_id: &str,
        prompt_token_ids: &Bound<'_, PyAny>,
        params: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<u64> {
        let handle = slf.try_borrow()?.handle.clone_ref(slf.py()).into_bound(slf.py());
        let key: u64 = handle.call_method0("new_key")?.extract()?;
        handle.call_method("add_request", (key, request_id, prompt_token_ids), params)?;
        let samples = params.map(|params| params.get_item("samples")).transpose()?.flatten();
        let samples: Vec<(u64, String, i64)> =
            samples.map_or_else(|| Ok(Vec::new()), |samples| samples.extract())?;
        let request_ids = &mut slf.try_borrow_mut()?.request_ids;
        request_ids.insert(key, request_id.to_owned());
        request_ids.extend(samples.into_iter().map(|(key, request_id, _)| (key, request_id)));
        Ok(key)
    }

    fn abort_requests(&self, request_ids: Vec<String>) {
        self.handle.get().abort_requests(request_ids);
    }

    /// All that requests have become since the last call, when no front end takes it.
    fn take_outputs<'py>(slf: &Bound<'py, Self>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let mut outputs = Vec::new();
        {
            let this = &mut *slf.try_borrow_mut()?;
            while this.inner.get().hand_over() {
                let num_before = outputs.len();
                this.handle.get().drain_outputs(|emitted| {
                    if let Emitted::Output(output) = emitted {
                        let request_id = this.request_ids.get(&output.key.0).cloned();
                        outputs.push((output, request_id));
                    }
                });
                if outputs.len() == num_before {
                    break; // A front end takes them.
                }
            }
            for (output, request_id) in &mut outputs {
                if output.finish_reason.is_some() {
                    this.request_ids.remove(&output.key.0);
                }
                if request_id.is_none() {
                    *request_id = this.inner.get().request_id_of(output.key).map(str::to_owned);
                }
            }
        }
        outputs.iter().map(|(output, id)| output_dict(slf.py(), output, id.as_deref())).collect()
    }

    #[getter]
    fn handle(&self, py: Python<'_>) -> Py<EngineHandle> {
        self.handle.clone_ref(py)
    }

    #[getter]
    fn config(&self, py: Python<'_>) -> Py<PySchedulerConfig> {
        self.config.clone_ref(py)
    }

    fn schedule(slf: &Bound<'_, Self>) -> PyResult<Option<PySchedulerOutput>> {
        let mut this = slf.try_borrow_mut()?;
        this.check_owner()?;
        let output = this.inner.get().schedule().map_err(|error| scheduler_error(&error))?;
        this.announce();
        Ok(output.map(|inner| PySchedulerOutput::new(inner, slf, view_of_step)))
    }

    #[pyo3(signature = (scheduler_output, sampled_token_ids, draft_token_ids=None, logprobs=None, prompt_logprobs=None, pooled=None))]
    fn update_from_output(
        slf: &Bound<'_, Self>,
        scheduler_output: &PySchedulerOutput,
        sampled_token_ids: &Bound<'_, PyAny>,
        draft_token_ids: Option<&Bound<'_, PyAny>>,
        logprobs: Option<LogprobArrays<'_>>,
        prompt_logprobs: Option<PromptLogprobArrays<'_>>,
        pooled: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        scheduler_output.check_origin(slf)?;
        let this = &mut *slf.try_borrow_mut()?;
        this.check_owner()?;
        let num_columns = copy_rows("sampled_token_ids", sampled_token_ids, &mut this.sampled)?;
        this.drafts.clear();
        let num_draft_columns =
            draft_token_ids.map_or(Ok(0), |ids| copy_rows("draft_token_ids", ids, &mut this.drafts))?;
        let sampled = TokenRows { token_ids: &this.sampled, num_columns };
        let drafts = TokenRows { token_ids: &this.drafts, num_columns: num_draft_columns };
        let logprobs = logprobs.map(CopiedLogprobs::new).transpose()?;
        let prompt_logprobs = prompt_logprobs.map(CopiedPromptLogprobs::new).transpose()?;
        let pooled = pooled.map(copy_vectors).transpose()?;
        let (values, width) = pooled.as_ref().map_or((&[][..], 0), |(values, width)| (&values[..], *width));
        let rows = StepRows {
            sampled,
            drafts,
            logprobs: logprobs.as_ref().map_or(LogprobRows::NONE, CopiedLogprobs::rows),
            prompt_logprobs: prompt_logprobs
                .as_ref()
                .map_or(PromptLogprobRows::NONE, CopiedPromptLogprobs::rows),
            pooled: PooledRows { values, width },
        };
        let finished = this
            .inner
            .get()
            .update_from_output(&scheduler_output.inner, rows)
            .map_err(|error| scheduler_error(&error))?;
        this.updated_ns = monotonic_ns();
        this.announce();
        Ok(finished)
    }

    /// When each part of the step that was updated last began (monotonic nanoseconds); it ends now.
    fn record_step_times(
        slf: &Bound<'_, Self>,
        schedule_ns: u64,
        prepare_ns: u64,
        forward_ns: u64,
        sample_ns: u64,
        wait_ns: u64,
        update_ns: u64,
    ) -> PyResult<()> {
        let this = &mut *slf.try_borrow_mut()?;
        this.check_owner()?;
        let (output_ns, end_ns) = (this.updated_ns, monotonic_ns());
        let times_ns =
            [schedule_ns, prepare_ns, forward_ns, sample_ns, wait_ns, update_ns, output_ns, end_ns];
        this.inner.get().record_step_phases(&times_ns);
        Ok(())
    }

    fn truncate_drafts(
        slf: &Bound<'_, Self>,
        scheduler_output: &PySchedulerOutput,
        num_kept: Vec<u32>,
    ) -> PyResult<PySchedulerOutput> {
        scheduler_output.check_origin(slf)?;
        let mut this = slf.try_borrow_mut()?;
        this.check_owner()?;
        let shorter = this.inner.get().truncate_drafts(&scheduler_output.inner, &num_kept);
        let inner = shorter.map_err(|error| scheduler_error(&error))?;
        Ok(PySchedulerOutput::new(inner, slf, view_of_step))
    }

    fn fail_step(slf: &Bound<'_, Self>, scheduler_output: &PySchedulerOutput) -> PyResult<usize> {
        scheduler_output.check_origin(slf)?;
        let mut this = slf.try_borrow_mut()?;
        this.check_owner()?;
        let failed =
            this.inner.get().fail_step(&scheduler_output.inner).map_err(|error| scheduler_error(&error))?;
        this.announce();
        Ok(failed)
    }

    fn has_unfinished_requests(&mut self) -> bool {
        self.inner.get().has_unfinished_requests()
    }

    fn num_unfinished_requests(&mut self) -> usize {
        self.inner.get().num_unfinished_requests()
    }

    #[pyo3(signature = (*, preempt_running=false))]
    fn reset_prefix_cache(&mut self, preempt_running: bool) -> PyResult<bool> {
        self.check_owner()?;
        Ok(self.inner.get().reset_prefix_cache(preempt_running))
    }

    #[getter]
    fn pause_state(&mut self) -> &'static str {
        let pause_state = self.inner.get().pause_state();
        PAUSE_STATES.iter().find(|(_, state)| *state == pause_state).map_or("", |(name, _)| name)
    }

    fn set_pause_state(&mut self, pause_state: &str) -> PyResult<()> {
        self.check_owner()?;
        let Some((_, state)) = PAUSE_STATES.iter().find(|(name, _)| *name == pause_state) else {
            let names = PAUSE_STATES.map(|(name, _)| format!("{name:?}")).join(", ");
            return Err(PyValueError::new_err(format!(
                "pause_state must be one of {names}, got {pause_state:.80?}"
            )));
        };
        self.inner.get().set_pause_state(*state);
        Ok(())
    }

    fn is_at_rest(&mut self) -> bool {
        self.inner.get().is_at_rest()
    }

    fn abort_all(&mut self) -> PyResult<usize> {
        self.check_owner()?;
        let num_aborted = self.inner.get().abort_all();
        self.announce();
        Ok(num_aborted)
    }

    fn live_adapters(&mut self) -> PyResult<(Vec<i64>, Vec<i64>)> {
        self.check_owner()?;
        let adapters = self.inner.get().live_adapters();
        self.announce();
        Ok(adapters)
    }

    fn adapter_counts(&mut self) -> PyResult<BTreeMap<i64, (u32, u32)>> {
        self.check_owner()?;
        let counts = self.inner.get().adapter_counts();
        self.announce();
        Ok(counts)
    }

    fn add_adapter(&mut self, adapter: i64) -> PyResult<()> {
        self.check_owner()?;
        self.inner.get().add_adapter(adapter);
        Ok(())
    }

    fn remove_adapter(&mut self, adapter: i64) -> PyResult<bool> {
        self.check_owner()?;
        let is_removed = self.inner.get().remove_adapter(adapter);
        self.announce();
        Ok(is_removed)
    }

    #[pyo3(signature = (enabled, *, with_tokens=false))]
    fn set_trace(&mut self, enabled: bool, with_tokens: bool) -> PyResult<()> {
        self.check_owner()?;
        if enabled && with_tokens {
            self.inner.get().set_trace_with_tokens();
        } else {
            self.inner.get().set_trace(enabled);
        }
        Ok(())
    }

    fn take_events<'py>(slf: &Bound<'py, Self>) -> PyResult<(Vec<Bound<'py, PyDict>>, u64)> {
        let (events, num_dropped) = slf.try_borrow_mut()?.inner.get().take_events();
        let dicts = events.iter().map(|event| event_dict(slf.py(), event)).collect::<PyResult<_>>()?;
        Ok((dicts, num_dropped))
    }

    fn check_invariants(&mut self) {
        self.inner.get().check_invariants();
    }

    fn token_ids(&mut self, row: u32) -> PyResult<Vec<i32>> {
        let state = self.inner.get().request_in_row(row);
        state
            .map(|state| state.token_ids)
            .ok_or_else(|| PyValueError::new_err(format!("no running request has row {row}")))
    }

    fn sampling_extras(&mut self, row: u32) -> Option<PySamplingExtras> {
        self.inner.get().extras_in_row(row).map(PySamplingExtras::of)
    }

    fn multimodal<'py>(slf: &Bound<'py, Self>, row: u32) -> PyResult<Vec<MultimodalInput<'py>>> {
        let mut this = slf.try_borrow_mut()?;
        let bytes = |bytes: &[u8]| PyBytes::new(slf.py(), bytes);
        let spans = this.inner.get().multimodal_in_row(row).iter();
        Ok(spans.map(|span| (span.offset, span.length, bytes(&span.digest), bytes(&span.content))).collect())
    }

    fn queues<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        let (waiting, running, leaving) = {
            let mut this = slf.try_borrow_mut()?;
            let inner = this.take_arrivals();
            (inner.waiting_request_ids(), inner.running_request_ids(), inner.leaving_request_ids())
        };
        let dict = PyDict::new(slf.py());
        dict.set_item("leaving", leaving)?;
        dict.set_item("waiting", waiting)?;
        dict.set_item("running", running)?;
        Ok(dict)
    }

    #[getter]
    fn running(&mut self) -> Vec<PyRequestSummary> {
        self.live_with(|status| status == RequestStatus::Running)
    }

    #[getter]
    fn waiting(&mut self) -> Vec<PyRequestSummary> {
        self.live_with(|status| !matches!(status, RequestStatus::Running | RequestStatus::Swapped))
    }

    #[getter]
    fn swapped(&mut self) -> Vec<PyRequestSummary> {
        self.live_with(|status| status == RequestStatus::Swapped)
    }

    fn __repr__(&mut self) -> String {
        let [running, waiting, swapped] =
            [self.running(), self.waiting(), self.swapped()].map(|requests| first_ids(&requests));
        let stats: HashMap<_, _> = self.inner.get().handle().stats().entries().into_iter().collect();
        let count = |name| stats.get(name).copied().unwrap_or(0);
        format!(
            "<Scheduler after step {}: running {running}, waiting {waiting}, swapped {swapped}; {} of {} blocks free>",
            count("num_steps"),
            count("num_free_blocks"),
            count("num_usable_blocks"),
        )
    }

    fn request_state<'py>(slf: &Bound<'py, Self>, request_id: &str) -> PyResult<Option<Bound<'py, PyDict>>> {
        let state = slf.try_borrow_mut()?.take_arrivals().request_state(request_id);
        state.map(|state| request_dict(slf.py(), &state)).transpose()
    }

    fn block_states<'py>(slf: &Bound<'py, Self>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let py = slf.py();
        let states = slf.try_borrow_mut()?.inner.get().block_states();
        let dicts = states.iter().enumerate().map(|(block_id, state)| {
            let dict = PyDict::new(py);
            dict.set_item("block_id", block_id)?;
            dict.set_item("ref_count", state.ref_count)?;
            dict.set_item("is_cached", state.hash.is_some())?;
            dict.set_item("free_position", state.free_position)?;
            dict.set_item("is_null", state.is_null)?;
            Ok(dict)
        });
        dicts.collect()
    }

    /// Rows of requests, running ones first; see `request_summary`.
    fn request_summaries<'py>(slf: &Bound<'py, Self>, limit: usize) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let rows = slf.try_borrow_mut()?.take_arrivals().request_summaries(limit);
        rows.iter().map(|row| request_summary(slf.py(), row)).collect()
    }

    /// A byte per block, or per several; how many those are; and how many blocks of each use there are.
    fn block_map<'py>(
        slf: &Bound<'py, Self>,
        max_cells: u32,
    ) -> PyResult<(Bound<'py, PyBytes>, u32, [u32; 5])> {
        let map = slf.try_borrow_mut()?.inner.get().block_map(max_cells);
        Ok((PyBytes::new(slf.py(), &map.cells), map.blocks_per_cell, map.counts))
    }

    #[pyo3(signature = (prompt_token_ids, cache_salt=None, lora_name=None))]
    fn prefix_hit_length(
        slf: &Bound<'_, Self>,
        prompt_token_ids: &Bound<'_, PyAny>,
        cache_salt: Option<&str>,
        lora_name: Option<&str>,
    ) -> PyResult<u32> {
        let ids = token_ids(slf.py(), prompt_token_ids)?;
        let extra_keys = ExtraKeys::new(lora_name, cache_salt, Vec::new());
        Ok(slf.try_borrow_mut()?.inner.get().prefix_hit_length(&ids, &extra_keys))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.handle.get().stats(py)
    }
}

fn view_of_step(scheduler: &Bound<'_, PyAny>, output: &SchedulerOutput) -> PyResult<Option<StepView>> {
    Ok(scheduler.cast::<PyScheduler>()?.try_borrow_mut()?.inner.get().step_view(output))
}

/// One array per name and set, of zeros, as numpy makes them.
fn new_arrays<'py>(py: Python<'py>, config: &SchedulerConfig) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let numpy = py.import("numpy")?;
    let new_set = |_| {
        let set = PyDict::new(py);
        for spec in StepBuffers::spec(config) {
            let shape = PyTuple::new(py, &spec.shape)?;
            set.set_item(spec.name, numpy.call_method1("zeros", (shape, spec.dtype.as_str()))?)?;
        }
        Ok(set.into_any())
    };
    (0..config.num_buffer_sets()).map(new_set).collect()
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyScheduler>()
}
