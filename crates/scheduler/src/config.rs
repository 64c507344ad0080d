//! `SchedulerConfig`: the numbers that fix a scheduler, checked where they are built.

use thiserror::Error;

/// Order in which waiting requests are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SchedulingPolicy {
    /// By arrival.
    #[default]
    Fcfs,
    /// By `(priority, arrival)`; a lower value is more important.
    Priority,
}

/// See the field docs; `check` holds the limits.
#[derive(Clone, PartialEq, Debug)]
pub struct SchedulerConfig {
    /// KV blocks, the null block included.
    pub num_blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Longest request, prompt and output together.
    pub max_model_len: u32,
    /// Running requests at most.
    pub max_num_seqs: u32,
    /// Tokens per step at most.
    pub max_num_batched_tokens: u32,
    /// Whether equal prefixes share blocks.
    pub enable_prefix_caching: bool,
    /// Whether a prompt may be computed over several steps.
    pub enable_chunked_prefill: bool,
    /// Longest chunk of one request while others are eligible; 0 = no limit.
    pub long_prefill_token_threshold: u32,
    /// Order of the waiting queue.
    pub scheduling_policy: SchedulingPolicy,
    /// Share of the blocks kept free when a waiting request is admitted beside running ones.
    pub watermark: f64,
    /// Requests that may wait before `add_request` answers "full".
    pub max_num_queued_reqs: u32,
}

/// A number outside its limits.
#[derive(Clone, PartialEq, Debug, Error)]
#[error("{name} must be {rule}, got {value}")]
pub struct ConfigError {
    /// Field.
    pub name: &'static str,
    /// What it must be.
    pub rule: String,
    /// What it was.
    pub value: String,
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
        }
    }

    /// Blocks that the longest request needs.
    #[must_use]
    pub fn blocks_per_request(&self) -> u32 {
        self.max_model_len.div_ceil(self.block_size)
    }

    /// Blocks kept free at admission.
    #[must_use]
    pub fn watermark_blocks(&self) -> u32 {
        (self.watermark * f64::from(self.num_blocks)) as u32
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
