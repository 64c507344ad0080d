//! `SchedulerConfig` and the specification of the step arrays, for Python.

use std::time::Duration;

use ::scheduler::{PreemptionMode, SchedulerConfig, SchedulingPolicy, StepBuffers};
use kvblocks::HashAlgorithm;
use pyo3::{exceptions::PyValueError, prelude::*, types::PyTuple};

use crate::scheduler::drafter::PyDrafterConfig;

/// A policy by the name that Python has for it.
pub(crate) fn scheduling_policy_of(name: &str) -> PyResult<SchedulingPolicy> {
    match name {
        "fcfs" => Ok(SchedulingPolicy::Fcfs),
        "priority" => Ok(SchedulingPolicy::Priority),
        "fair" => Ok(SchedulingPolicy::Fair),
        other => {
            let message = format!("scheduling_policy must be 'fcfs', 'priority' or 'fair', got {other:?}");
            Err(PyValueError::new_err(message))
        }
    }
}

/// Numbers that fix a scheduler; checked here, readable under their names.
#[pyclass(frozen, name = "SchedulerConfig", module = "rustvllm._core")]
pub(crate) struct PySchedulerConfig {
    pub(crate) inner: SchedulerConfig,
}

#[pymethods]
impl PySchedulerConfig {
    #[new]
    #[pyo3(signature = (*, num_blocks, max_model_len, block_size=16, max_num_seqs=128, max_num_batched_tokens=2048,
        enable_prefix_caching=true, enable_chunked_prefill=true, long_prefill_token_threshold=0,
        scheduling_policy="fcfs", watermark=0.0, max_num_queued_reqs=65536,
        max_num_queued_tokens=0, queue_timeout=0.0, max_steps_in_flight=1, pipeline_stages=1,
        num_speculative_tokens=0, drafter=None, preemption_mode="recompute", num_cpu_blocks=0, preemption_immunity_steps=8,
        max_look_past=0, max_times_passed=8, max_loras=0, max_multimodal_bytes=0, disable_chunked_mm_input=false,
        hash_algorithm="siphash13", collect_metrics=true))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
    #[expect(clippy::fn_params_excessive_bools, reason = "keyword arguments of the Python signature")]
    fn new(
        num_blocks: u32,
        max_model_len: u32,
        block_size: u32,
        max_num_seqs: u32,
        max_num_batched_tokens: u32,
        enable_prefix_caching: bool,
        enable_chunked_prefill: bool,
        long_prefill_token_threshold: u32,
        scheduling_policy: &str,
        watermark: f64,
        max_num_queued_reqs: u32,
        max_num_queued_tokens: u64,
        queue_timeout: f64,
        max_steps_in_flight: u32,
        pipeline_stages: u32,
        num_speculative_tokens: u32,
        drafter: Option<&PyDrafterConfig>,
        preemption_mode: &str,
        num_cpu_blocks: u32,
        preemption_immunity_steps: u32,
        max_look_past: u32,
        max_times_passed: u32,
        max_loras: u32,
        max_multimodal_bytes: u32,
        disable_chunked_mm_input: bool,
        hash_algorithm: &str,
        collect_metrics: bool,
    ) -> PyResult<Self> {
        let scheduling_policy = scheduling_policy_of(scheduling_policy)?;
        let preemption_mode = match preemption_mode {
            "recompute" => PreemptionMode::Recompute,
            "swap" => PreemptionMode::Swap,
            other => {
                let message = format!("preemption_mode must be 'recompute' or 'swap', got {other:?}");
                return Err(PyValueError::new_err(message));
            }
        };
        let hash_algorithm = match hash_algorithm {
            "siphash13" => HashAlgorithm::SipHash13,
            "sha256" => HashAlgorithm::Sha256,
            other => {
                let message = format!("hash_algorithm must be 'siphash13' or 'sha256', got {other:?}");
                return Err(PyValueError::new_err(message));
            }
        };
        let queue_timeout = Duration::try_from_secs_f64(queue_timeout).map_err(|error| {
            PyValueError::new_err(format!(
                "queue_timeout must be a number of seconds, got {queue_timeout}: {error}"
            ))
        })?;
        let inner = SchedulerConfig {
            num_blocks,
            block_size,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            enable_prefix_caching,
            enable_chunked_prefill,
            long_prefill_token_threshold,
            scheduling_policy,
            watermark,
            max_num_queued_reqs,
            max_num_queued_tokens,
            queue_timeout,
            max_steps_in_flight,
            pipeline_stages,
            num_speculative_tokens,
            drafter: drafter.map(|drafter| drafter.inner.clone()),
            preemption_mode,
            num_cpu_blocks,
            preemption_immunity_steps,
            max_look_past,
            max_times_passed,
            max_loras,
            max_multimodal_bytes,
            disable_chunked_mm_input,
            hash_algorithm,
            collect_metrics,
        };
        inner.check().map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self { inner })
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.inner.num_blocks
    }

    #[getter]
    fn max_model_len(&self) -> u32 {
        self.inner.max_model_len
    }

    #[getter]
    fn block_size(&self) -> u32 {
        self.inner.block_size
    }

    #[getter]
    fn max_num_seqs(&self) -> u32 {
        self.inner.max_num_seqs
    }

    #[getter]
    fn max_num_batched_tokens(&self) -> u32 {
        self.inner.max_num_batched_tokens
    }

    #[getter]
    fn enable_prefix_caching(&self) -> bool {
        self.inner.enable_prefix_caching
    }

    #[getter]
    fn enable_chunked_prefill(&self) -> bool {
        self.inner.enable_chunked_prefill
    }

    #[getter]
    fn long_prefill_token_threshold(&self) -> u32 {
        self.inner.long_prefill_token_threshold
    }

    #[getter]
    fn scheduling_policy(&self) -> &'static str {
        match self.inner.scheduling_policy {
            SchedulingPolicy::Fcfs => "fcfs",
            SchedulingPolicy::Priority => "priority",
            SchedulingPolicy::Fair => "fair",
        }
    }

    #[getter]
    fn watermark(&self) -> f64 {
        self.inner.watermark
    }

    #[getter]
    fn max_num_queued_reqs(&self) -> u32 {
        self.inner.max_num_queued_reqs
    }

    #[getter]
    fn max_num_queued_tokens(&self) -> u64 {
        self.inner.max_num_queued_tokens
    }

    #[getter]
    fn queue_timeout(&self) -> f64 {
        self.inner.queue_timeout.as_secs_f64()
    }

    #[getter]
    fn max_steps_in_flight(&self) -> u32 {
        self.inner.max_steps_in_flight
    }

    #[getter]
    fn pipeline_stages(&self) -> u32 {
        self.inner.pipeline_stages
    }

    #[getter]
    fn num_speculative_tokens(&self) -> u32 {
        self.inner.num_speculative_tokens
    }

    #[getter]
    fn num_cpu_blocks(&self) -> u32 {
        self.inner.num_cpu_blocks
    }

    #[getter]
    fn preemption_immunity_steps(&self) -> u32 {
        self.inner.preemption_immunity_steps
    }

    #[getter]
    fn max_look_past(&self) -> u32 {
        self.inner.max_look_past
    }

    #[getter]
    fn max_times_passed(&self) -> u32 {
        self.inner.max_times_passed
    }

    #[getter]
    fn max_loras(&self) -> u32 {
        self.inner.max_loras
    }

    #[getter]
    fn max_multimodal_bytes(&self) -> u32 {
        self.inner.max_multimodal_bytes
    }

    #[getter]
    fn disable_chunked_mm_input(&self) -> bool {
        self.inner.disable_chunked_mm_input
    }

    #[getter]
    fn hash_algorithm(&self) -> &'static str {
        self.inner.hash_algorithm.as_str()
    }

    #[getter]
    fn collect_metrics(&self) -> bool {
        self.inner.collect_metrics
    }

    #[getter]
    fn preemption_mode(&self) -> &'static str {
        match self.inner.preemption_mode {
            PreemptionMode::Recompute => "recompute",
            PreemptionMode::Swap => "swap",
        }
    }

    /// Sets of step buffers that a scheduler of these numbers needs.
    #[getter]
    fn num_buffer_sets(&self) -> usize {
        self.inner.num_buffer_sets()
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.inner)
    }
}

/// Name, dtype and shape of every array of one step-buffer set.
#[pyfunction]
fn step_buffer_spec<'py>(
    py: Python<'py>,
    config: &PySchedulerConfig,
) -> PyResult<Vec<(&'static str, &'static str, Bound<'py, PyTuple>)>> {
    StepBuffers::spec(&config.inner)
        .into_iter()
        .map(|spec| Ok((spec.name, spec.dtype.as_str(), PyTuple::new(py, spec.shape)?)))
        .collect()
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PySchedulerConfig>()?;
    module.add_function(wrap_pyfunction!(step_buffer_spec, module)?)
}
