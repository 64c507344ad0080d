//! `RequestLimits`: what a request must keep to, whatever the engine's load; and `AddRequestError`, why one is refused.
//!
//! A front end in another process has the same limits and refuses with the same words, before it sends anything.

use thiserror::Error;

use crate::{config::SchedulerConfig, sampling_params::SamplingParams, step_buffers::MAX_STOP_TOKEN_IDS};

/// Why a request was not taken in. Each carries the numbers.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum AddRequestError {
    /// Nothing to compute.
    #[error("the prompt has no tokens; at least 1 is needed")]
    EmptyPrompt,
    /// No room for even one output token.
    #[error(
        "This model's maximum context length is {max_model_len} tokens (prompt and output together), but your prompt contains {num_prompt_tokens} input tokens: at most {} fit",
        max_model_len.saturating_sub(1)
    )]
    PromptTooLong {
        /// Prompt.
        num_prompt_tokens: u32,
        /// Limit.
        max_model_len: u32,
    },
    /// More blocks than there are.
    #[error(
        "the request needs up to {needed_blocks} KV blocks of {block_size} tokens, but there are only {usable_blocks}; lower max_tokens or enlarge the KV cache"
    )]
    NeverFits {
        /// Blocks for prompt and `max_tokens`.
        needed_blocks: u32,
        /// Blocks in the pool.
        usable_blocks: u32,
        /// Tokens per block.
        block_size: u32,
    },
    /// A prompt that one step cannot hold while chunking is off.
    #[error(
        "the prompt has {num_prompt_tokens} tokens, but without chunked prefill at most max_num_batched_tokens = {max_num_batched_tokens} fit into a step; enable chunked prefill or raise the budget"
    )]
    PromptExceedsBudget {
        /// Prompt.
        num_prompt_tokens: u32,
        /// Budget of a step.
        max_num_batched_tokens: u32,
    },
    /// A multimodal input that no step can compute as a whole.
    #[error(
        "the multimodal input of {length} tokens at position {offset} cannot be computed in one step: it may have at most {most} tokens (max_num_batched_tokens, long_prefill_token_threshold), none of another input, and the prompt of {num_prompt_tokens} tokens must go on behind it"
    )]
    InputNotWhole {
        /// Position of its first token.
        offset: u32,
        /// Tokens.
        length: u32,
        /// Most tokens.
        most: u32,
        /// Prompt.
        num_prompt_tokens: u32,
    },
    /// More stop ids than a row can mask.
    #[error("stop_token_ids has {got} entries; the limit is {MAX_STOP_TOKEN_IDS}")]
    TooManyStopTokenIds {
        /// Given.
        got: usize,
    },
    /// More beams than may run at once.
    #[error("a search has at most max_num_seqs = {limit} beams, got {beam_width}; lower the beam width")]
    TooManyBeams {
        /// Asked for.
        beam_width: i64,
        /// `max_num_seqs`.
        limit: u32,
    },
    /// Beams without their requests.
    #[error("a search of {beam_width} beams is handed in as {beam_width} requests, got {got}")]
    WrongNumberOfBeams {
        /// Asked for.
        beam_width: i64,
        /// Handed in.
        got: usize,
    },
    /// A negative token id.
    #[error("token id {token_id} at position {position} of the prompt is negative")]
    NegativeTokenId {
        /// The id.
        token_id: i32,
        /// Where.
        position: usize,
    },
    /// The queue is full: a value, not a failure.
    #[error(
        "the queue is full: {queued} requests are waiting, {wanted} more would exceed max_num_queued_reqs = {limit}; {}",
        if wanted > limit { "send fewer at a time" } else { "try again later" }
    )]
    QueueFull {
        /// Waiting.
        queued: u32,
        /// In this group.
        wanted: u32,
        /// `max_num_queued_reqs`.
        limit: u32,
    },
    /// The waiting prompts have too many tokens.
    #[error(
        "the queue is full: {queued} prompt tokens are waiting, {wanted} more would exceed max_num_queued_tokens = {limit}; try again later"
    )]
    QueueTokensFull {
        /// Waiting.
        queued: u64,
        /// In this group.
        wanted: u64,
        /// `max_num_queued_tokens`.
        limit: u64,
    },
}

/// The scheduler's numbers that bound one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestLimits {
    /// Longest request, prompt and output together.
    pub max_model_len: u32,
    /// Tokens per step at most.
    pub max_num_batched_tokens: u32,
    /// Whether a prompt may be computed over several steps.
    pub enable_chunked_prefill: bool,
    /// Tokens per block.
    pub block_size: u32,
    /// KV blocks, the null block included.
    pub num_blocks: u32,
    /// Requests that run at once at most.
    pub max_num_seqs: u32,
}

impl RequestLimits {
    /// Those of a scheduler.
    #[must_use]
    pub fn of(config: &SchedulerConfig) -> Self {
        Self {
            max_model_len: config.max_model_len,
            max_num_batched_tokens: config.max_num_batched_tokens,
            enable_chunked_prefill: config.enable_chunked_prefill,
            block_size: config.block_size,
            num_blocks: config.num_blocks,
            max_num_seqs: config.max_num_seqs,
        }
    }

    /// # Errors
    /// The first limit that the request breaks.
    pub fn check(&self, prompt: &[i32], params: &SamplingParams) -> Result<(), AddRequestError> {
        if prompt.is_empty() {
            return Err(AddRequestError::EmptyPrompt);
        }
        // A request that only scores its prompt needs no room for an output token.
        let has_output = (params.max_tokens > 0 && params.pooling == 0) || params.beam_width > 0;
        let longest_prompt = (self.max_model_len as usize).saturating_sub(usize::from(has_output));
        let num_prompt_tokens = prompt.len().min(u32::MAX as usize) as u32;
        if prompt.len() > longest_prompt {
            return Err(AddRequestError::PromptTooLong {
                num_prompt_tokens,
                max_model_len: self.max_model_len,
            });
        }
        if let Some(position) = prompt.iter().position(|&token_id| token_id < 0) {
            return Err(AddRequestError::NegativeTokenId { token_id: prompt[position], position });
        }
        if !self.enable_chunked_prefill && num_prompt_tokens > self.max_num_batched_tokens {
            let max_num_batched_tokens = self.max_num_batched_tokens;
            return Err(AddRequestError::PromptExceedsBudget { num_prompt_tokens, max_num_batched_tokens });
        }
        let longest = num_prompt_tokens.saturating_add(params.max_tokens).min(self.max_model_len);
        let usable_blocks = self.num_blocks - 1;
        let mut needed_blocks = longest.div_ceil(self.block_size);
        if !(0..=i64::from(self.max_num_seqs)).contains(&params.beam_width) {
            let (beam_width, limit) = (params.beam_width, self.max_num_seqs);
            return Err(AddRequestError::TooManyBeams { beam_width, limit });
        }
        if params.beam_width > 1 {
            // Each further beam has its own output, and copies the block in which the prompt ends.
            let own = (longest - num_prompt_tokens).div_ceil(self.block_size) + 1;
            needed_blocks = needed_blocks.saturating_add(own.saturating_mul(params.beam_width as u32 - 1));
        }
        if needed_blocks > usable_blocks {
            return Err(AddRequestError::NeverFits {
                needed_blocks,
                usable_blocks,
                block_size: self.block_size,
            });
        }
        let stop_ids = params.stop_token_ids.len();
        if stop_ids > MAX_STOP_TOKEN_IDS {
            return Err(AddRequestError::TooManyStopTokenIds { got: stop_ids });
        }
        Ok(())
    }
}
