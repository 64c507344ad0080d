//! The measurements of `loadgen`, for `rustvllm bench`.

pub(crate) mod serve;

use std::{path::PathBuf, time::Duration};

use loadgen::{
    DecodingOptions, ReplayError, ReplayOptions, StepCostError, StepTimeModel, Trace, TraceFormat,
};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyDict};

use crate::{
    errors::{SchedulerStateError, TraceError, scheduler_error},
    scheduler::config::scheduling_policy_of,
};

/// Run without the interpreter; `work` is given a question that looks for signals and says no after one, whose
/// exception then wins over what `work` returned.
#[expect(
    clippy::redundant_closure_for_method_calls,
    reason = "the method named alone is not general over the interpreter's lifetime"
)]
fn interruptible<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&mut loadgen::KeepGoing<'_>) -> T + Send,
) -> PyResult<T> {
    let mut raised = None;
    let result = py.detach(|| {
        work(&mut || match Python::attach(|py| py.check_signals()) {
            Ok(()) => true,
            Err(error) => {
                raised = Some(error);
                false
            }
        })
    });
    raised.map_or(Ok(result), Err)
}

fn microseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1000.0
}

#[pyfunction]
#[pyo3(signature = (num_running, num_steps, *, prefill_tokens=0, steps_in_flight=1, scheduling_policy="fcfs"))]
fn bench_step<'py>(
    py: Python<'py>,
    num_running: u32,
    num_steps: u32,
    prefill_tokens: u32,
    steps_in_flight: u32,
    scheduling_policy: &str,
) -> PyResult<Bound<'py, PyDict>> {
    let scheduling_policy = scheduling_policy_of(scheduling_policy)?;
    let options = DecodingOptions {
        prefill_tokens,
        steps_in_flight,
        scheduling_policy,
        ..DecodingOptions::new(num_running)
    };
    let cost = interruptible(py, |keep_going| loadgen::step_cost(options, num_steps, keep_going))?.map_err(
        |error| match error {
            StepCostError::Scheduler(error) => scheduler_error(&error),
            StepCostError::Config(_) | StepCostError::Interrupted => PyValueError::new_err(error.to_string()),
        },
    )?;
    let dict = PyDict::new(py);
    dict.set_item("num_blocks", cost.num_blocks)?;
    dict.set_item("block_size", cost.block_size)?;
    dict.set_item("schedule_us", microseconds(cost.schedule))?;
    dict.set_item("update_us", microseconds(cost.update))?;
    dict.set_item("total_us", microseconds(cost.total))?;
    Ok(dict)
}

#[pyfunction]
#[pyo3(signature = (path, *, trace_format="auto", limit=None, block_size=16, num_blocks=16384, max_num_seqs=256,
    max_num_batched_tokens=8192, enable_prefix_caching=true, step_base_us=None, step_per_token_us=None,
    step_per_context_token_us=None, per_request=false))]
#[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
fn bench_trace<'py>(
    py: Python<'py>,
    path: PathBuf,
    trace_format: &str,
    limit: Option<u64>,
    block_size: u32,
    num_blocks: u32,
    max_num_seqs: u32,
    max_num_batched_tokens: u32,
    enable_prefix_caching: bool,
    step_base_us: Option<f64>,
    step_per_token_us: Option<f64>,
    step_per_context_token_us: Option<f64>,
    per_request: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let known_format = TraceFormat::from_name(trace_format);
    if known_format.is_none() && trace_format != "auto" {
        let message = format!("trace_format must be 'auto', 'mooncake' or 'azure', got {trace_format:?}");
        return Err(PyValueError::new_err(message));
    }
    let usual = StepTimeModel::default();
    let step_time = StepTimeModel {
        base_us: step_base_us.unwrap_or(usual.base_us),
        per_token_us: step_per_token_us.unwrap_or(usual.per_token_us),
        per_context_token_us: step_per_context_token_us.unwrap_or(usual.per_context_token_us),
    };
    let options = ReplayOptions {
        block_size,
        num_blocks,
        max_num_seqs,
        max_num_batched_tokens,
        enable_prefix_caching,
        step_time,
    };
    let (trace, (report, time, summary)) = interruptible(py, |keep_going| {
        let trace = Trace::open(&path, known_format, limit)?;
        let replayed = loadgen::replay(&trace, &options, keep_going)?;
        Ok((trace, replayed))
    })?
    .map_err(|error: ReplayError| match error {
        ReplayError::Trace(error) => TraceError::new_err(error.to_string()),
        ReplayError::Scheduler(error) => scheduler_error(&error),
        ReplayError::Stalled { .. } => SchedulerStateError::new_err(error.to_string()),
        ReplayError::Config(_) | ReplayError::Interrupted => PyValueError::new_err(error.to_string()),
    })?;
    let dict = PyDict::new(py);
    dict.set_item("format", trace.format().as_str())?;
    dict.set_item("requests", report.num_requests)?;
    dict.set_item("refused", &report.refused)?;
    dict.set_item("steps", report.num_steps)?;
    dict.set_item("control_plane_s", time.total().as_secs_f64())?;
    dict.set_item("add_s", time.add.as_secs_f64())?;
    dict.set_item("schedule_s", time.schedule.as_secs_f64())?;
    dict.set_item("update_s", time.update.as_secs_f64())?;
    dict.set_item("drain_s", time.drain.as_secs_f64())?;
    let (full_blocks, hit_blocks) = report.blocks();
    dict.set_item("prefix_hit_rate", report.prefix_hit_rate())?;
    dict.set_item("full_blocks", full_blocks)?;
    dict.set_item("hit_blocks", hit_blocks)?;
    dict.set_item("preemptions", report.num_preemptions)?;
    let queue_time = PyDict::new(py);
    queue_time.set_item("p50", report.queue_time.p50.as_secs_f64())?;
    queue_time.set_item("p90", report.queue_time.p90.as_secs_f64())?;
    queue_time.set_item("p99", report.queue_time.p99.as_secs_f64())?;
    queue_time.set_item("max", report.queue_time.max.as_secs_f64())?;
    dict.set_item("queue_time_s", queue_time)?;
    dict.set_item("prompt_tokens", summary.num_prompt_tokens)?;
    dict.set_item("scheduled_tokens", report.num_scheduled_tokens)?;
    dict.set_item("output_tokens", report.num_output_tokens)?;
    dict.set_item("max_num_running", report.max_num_running)?;
    dict.set_item("trace_s", summary.last_arrival.as_secs_f64())?;
    dict.set_item("virtual_s", report.virtual_time.as_secs_f64())?;
    dict.set_item("block_size", block_size)?;
    dict.set_item("num_blocks", num_blocks)?;
    dict.set_item("max_model_len", summary.max_request_tokens)?;
    dict.set_item("max_num_seqs", max_num_seqs)?;
    dict.set_item("max_num_batched_tokens", max_num_batched_tokens)?;
    dict.set_item("enable_prefix_caching", enable_prefix_caching)?;
    let model = PyDict::new(py);
    model.set_item("base_us", step_time.base_us)?;
    model.set_item("per_token_us", step_time.per_token_us)?;
    model.set_item("per_context_token_us", step_time.per_context_token_us)?;
    dict.set_item("step_time_model", model)?;
    if per_request {
        let hits: Vec<Option<u32>> = report.requests.iter().map(|request| request.hit_blocks).collect();
        dict.set_item("hit_blocks_per_request", hits)?;
    }
    Ok(dict)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(bench_step, module)?)?;
    module.add_function(wrap_pyfunction!(bench_trace, module)?)
}
