//! `SchedulerConfig`: the fixed numbers of a scheduler, and their limits.

use std::time::Duration;

use drafting::{DrafterConfig, DrafterConfigError};
use kvblocks::HashAlgorithm;
use thiserror::Error;

/// The order in which waiting requests are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SchedulingPolicy {
    /// By arrival.
    #[default]
    Fcfs,
    /// By `(priority, arrival)`; a lower value is more important.
    Priority,
    /// In turns: tenants share the engine's tokens by their weights, and the users of a tenant share what it gets.
    Fair,
}

/// How a request gives up its blocks if the pool is empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PreemptionMode {
    /// Its KV is discarded and computed again later.
    #[default]
    Recompute,
    /// Its KV moves to CPU memory and back; it is recomputed if there is no room.
    Swap,
}

/// See the field docs; `check` holds the limits.
#[derive(Clone, PartialEq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "settings that have nothing to do with each other")]
pub struct SchedulerConfig {
    /// KV blocks, including the null block.
    pub num_blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Most tokens of a request, prompt and output together.
    pub max_model_len: u32,
    /// Most running requests.
    pub max_num_seqs: u32,
    /// Most tokens per step.
    pub max_num_batched_tokens: u32,
    /// Whether equal prefixes share blocks.
    pub enable_prefix_caching: bool,
    /// Whether a prompt may be computed over several steps.
    pub enable_chunked_prefill: bool,
    /// Longest chunk of one request while others are eligible; 0 = no limit.
    pub long_prefill_token_threshold: u32,
    /// Order of the waiting queue.
    pub scheduling_policy: SchedulingPolicy,
    /// Share of the blocks kept free when a waiting request is admitted while others run.
    pub watermark: f64,
    /// Requests that may wait before `add_request` refuses further ones.
    pub max_num_queued_reqs: u32,
    /// Prompt tokens that may wait before `add_request` refuses further requests; 0 = no limit. A request that alone
    /// exceeds this is accepted if no other request waits; otherwise it would be refused forever.
    pub max_num_queued_tokens: u64,
    /// How long a request may wait for its first step before it ends with an error; zero = no limit.
    pub queue_timeout: Duration,
    /// Steps that may be scheduled before the first of them is updated; 1 = synchronous, 2 = the next step is scheduled
    /// while one runs.
    pub max_steps_in_flight: u32,
    /// Pipeline stages: groups of layers that a step passes one after the other, each in processes of its own; 1 = no
    /// pipeline. With more, the running requests are distributed over as many steps, so that each stage has one to run.
    /// A request then waits for its token before it is in another step.
    pub pipeline_stages: u32,
    /// Draft tokens per request and step; 0 = no speculation.
    pub num_speculative_tokens: u32,
    /// Makes drafts in the scheduler; `None`: the worker makes them, if there are any.
    pub drafter: Option<DrafterConfig>,
    /// How a preempted request gives up its blocks.
    pub preemption_mode: PreemptionMode,
    /// Blocks in CPU memory for swapped requests.
    pub num_cpu_blocks: u32,
    /// Number of steps for which a request that came back is not preempted again while another request can be.
    pub preemption_immunity_steps: u32,
    /// Waiting requests that may be tried after one that does not fit; 0 = strictly in order.
    pub max_look_past: u32,
    /// How often a request that does not fit may be overtaken.
    pub max_times_passed: u32,
    /// Most different adapters among the running requests; 0 = no limit.
    pub max_loras: u32,
    /// Most bytes that the multimodal inputs of one request take on their way from another process; 0 = they have none.
    pub max_multimodal_bytes: u32,
    /// Whether all tokens of a multimodal input are computed in one step, because they attend to each other.
    pub disable_chunked_mm_input: bool,
    /// The hash function of the hashes that name cached blocks.
    pub hash_algorithm: HashAlgorithm,
    /// Whether times and sizes of requests and steps are collected in histograms.
    pub collect_metrics: bool,
}

/// Largest `num_speculative_tokens`.
pub const MAX_SPECULATIVE_TOKENS: u32 = 64;

/// Longest `queue_timeout`: a year.
pub const MAX_QUEUE_TIMEOUT: Duration = Duration::from_secs(365 * 86_400);

/// A number is outside its limits.
#[derive(Clone, PartialEq, Debug, Error)]
#[error("{name} must be {rule}, got {value}")]
pub struct ConfigError {
    /// The field.
    pub name: &'static str,
    /// The rule for it.
    pub rule: String,
    /// Its value.
    pub value: String,
}

impl From<DrafterConfigError> for ConfigError {
    fn from(DrafterConfigError { name, rule, value }: DrafterConfigError) -> Self {
        Self { name, rule, value }
    }
}

impl SchedulerConfig {
    /// Defaults for a pool of `num_blocks` blocks of 16 tokens.
    #[must_use]
    pub fn new(num_blocks: u32, max_model_len: u32) -> Self {
        Self {
            num_blocks,
            block_size: 16,
            max_model_len,
            max_num_seqs: 128,
            max_num_batched_tokens: 2048,
            enable_prefix_caching: true,
            enable_chunked_prefill: true,
            long_prefill_token_threshold: 0,
            scheduling_policy: SchedulingPolicy::Fcfs,
            watermark: 0.0,
            max_num_queued_reqs: 65_536,
            max_num_queued_tokens: 0,
            queue_timeout: Duration::ZERO,
            max_steps_in_flight: 1,
            pipeline_stages: 1,
            num_speculative_tokens: 0,
            drafter: None,
            preemption_mode: PreemptionMode::Recompute,
            num_cpu_blocks: 0,
            preemption_immunity_steps: 8,
            max_look_past: 0,
            max_times_passed: 8,
            max_loras: 0,
            max_multimodal_bytes: 0,
            disable_chunked_mm_input: false,
            hash_algorithm: HashAlgorithm::default(),
            collect_metrics: true,
        }
    }

    /// Blocks that the longest request needs.
    #[must_use]
    pub fn blocks_per_request(&self) -> u32 {
        self.max_model_len.div_ceil(self.block_size)
    }

    /// Blocks that admissions keep free.
    #[must_use]
    pub fn watermark_blocks(&self) -> u32 {
        (self.watermark * f64::from(self.num_blocks)) as u32
    }

    /// Number of buffer sets for the steps in flight and the one being scheduled.
    #[must_use]
    pub fn num_buffer_sets(&self) -> usize {
        self.max_steps_in_flight as usize + 1
    }

    /// Most tokens that a chunk of a prompt has, whatever else runs.
    pub(crate) fn longest_sure_chunk(&self) -> u32 {
        match self.long_prefill_token_threshold {
            threshold if threshold > 0 && self.enable_chunked_prefill => {
                threshold.min(self.max_num_batched_tokens)
            }
            _ => self.max_num_batched_tokens,
        }
    }

    /// Whether each sampled row is followed by drafts that only the worker knows: steps overlap, and the scheduler
    /// makes no drafts.
    pub(crate) fn makes_unknown_drafts(&self) -> bool {
        self.max_steps_in_flight > 1 && self.num_speculative_tokens > 0 && self.drafter.is_none()
    }

    /// Whether a request waits for a token that is being sampled before it is in another step.
    pub(crate) fn is_pipeline(&self) -> bool {
        self.pipeline_stages > 1
    }

    /// # Errors
    /// The first number that is outside its limits.
    pub fn check(&self) -> Result<(), ConfigError> {
        let between = |name: &'static str, value: u32, low: u32, high: u32| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(ConfigError { name, rule: format!("between {low} and {high}"), value: value.to_string() })
            }
        };
        between("num_blocks", self.num_blocks, 2, 1 << 27)?;
        between("block_size", self.block_size, 1, 1024)?;
        between("max_model_len", self.max_model_len, 1, 1 << 26)?;
        between("max_num_seqs", self.max_num_seqs, 1, 1 << 16)?;
        between("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 22)?;
        between("max_num_queued_reqs", self.max_num_queued_reqs, 1, 1 << 30)?;
        between("max_steps_in_flight", self.max_steps_in_flight, 1, 16)?;
        between("pipeline_stages", self.pipeline_stages, 1, 64)?;
        // A draft follows a known token, and in a pipeline that token's step must end first.
        let most_drafts = if self.is_pipeline() { 0 } else { MAX_SPECULATIVE_TOKENS };
        between("num_speculative_tokens", self.num_speculative_tokens, 0, most_drafts)?;
        if let Some(drafter) = &self.drafter {
            between("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)?;
            drafter.check()?;
        }
        between("num_cpu_blocks", self.num_cpu_blocks, 0, 1 << 27)?;
        // Slots cross the boundary as int32.
        if u64::from(self.num_blocks) * u64::from(self.block_size) > i32::MAX as u64 {
            return Err(ConfigError {
                name: "num_blocks",
                rule: format!(
                    "at most {} with block_size {}",
                    i32::MAX as u32 / self.block_size,
                    self.block_size
                ),
                value: self.num_blocks.to_string(),
            });
        }
        if self.queue_timeout > MAX_QUEUE_TIMEOUT {
            return Err(ConfigError {
                name: "queue_timeout",
                rule: format!("at most {} seconds", MAX_QUEUE_TIMEOUT.as_secs()),
                value: self.queue_timeout.as_secs_f64().to_string(),
            });
        }
        if !(0.0..1.0).contains(&self.watermark) {
            return Err(ConfigError {
                name: "watermark",
                rule: "at least 0 and below 1".to_owned(),
                value: self.watermark.to_string(),
            });
        }
        Ok(())
    }
}
