//! `Request`: one request in the scheduler, and what is handed in to make one.
//!
//! A request is two counters racing: `num_computed_tokens` catches up with `num_tokens`.

use kvblocks::{BlockHash, BlockId};

use crate::output::RequestKey;

/// No persistent row.
pub(crate) const NO_ROW: u32 = u32::MAX;

/// Where a request is in its life. Order matters: everything above `Preempted` is finished.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum RequestStatus {
    /// In the queue, nothing computed.
    Waiting,
    /// In the running list, owns blocks and a row.
    Running,
    /// Back in the queue: its blocks were taken, its output is kept.
    Preempted,
    /// EOS or a stop token.
    FinishedStopped,
    /// Out of room or of `max_tokens`.
    FinishedLengthCapped,
    /// Aborted.
    FinishedAborted,
    /// Failed.
    FinishedError,
}

impl RequestStatus {
    /// The field's name for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "WAITING",
            Self::Running => "RUNNING",
            Self::Preempted => "PREEMPTED",
            Self::FinishedStopped => "FINISHED_STOPPED",
            Self::FinishedLengthCapped => "FINISHED_LENGTH_CAPPED",
            Self::FinishedAborted => "FINISHED_ABORTED",
            Self::FinishedError => "FINISHED_ERROR",
        }
    }

    /// Whether the request has left the scheduler.
    #[must_use]
    pub fn is_finished(self) -> bool {
        self > Self::Preempted
    }
}

/// How a request is sampled and when it stops.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Output tokens at most; 0 ends with the prefill.
    pub max_tokens: u32,
    /// Output tokens before EOS and stop ids may be sampled.
    pub min_tokens: u32,
    /// The token that ends the request; `None` when EOS is ignored.
    pub eos_token_id: Option<i32>,
    /// Further tokens that end it.
    pub stop_token_ids: Box<[i32]>,
    /// 0 = greedy.
    pub temperature: f32,
    /// Nucleus share.
    pub top_p: f32,
    /// Smallest probability relative to the best.
    pub min_p: f32,
    /// Added once per token that appeared in the output.
    pub presence_penalty: f32,
    /// Added per appearance in the output.
    pub frequency_penalty: f32,
    /// Divides (positive) or multiplies (negative) logits of seen tokens.
    pub repetition_penalty: f32,
    /// Candidates kept; 0 = all.
    pub top_k: i64,
    /// Key of the counter-based random numbers.
    pub seed: i64,
    /// Log-probabilities returned per token; −1 = none.
    pub num_logprobs: i64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_tokens: 16,
            min_tokens: 0,
            eos_token_id: None,
            stop_token_ids: Box::new([]),
            temperature: 1.0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            top_k: 0,
            seed: 0,
            num_logprobs: -1,
        }
    }
}

/// What a front end hands in.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// Made by `EngineHandle::new_key`.
    pub key: RequestKey,
    /// Unique among live requests.
    pub request_id: Box<str>,
    /// At least one token; ids are checked against the vocabulary by the front end.
    pub prompt_token_ids: Vec<i32>,
    /// How to sample, when to stop.
    pub params: SamplingParams,
    /// Lower is more important; used by the priority policy.
    pub priority: i32,
    /// Keys beside the tokens that a block's content depends on (`LoRA`, salt), encoded.
    pub extra_keys: Box<[u8]>,
    /// Compute the whole prompt (it still fills the cache).
    pub skip_reading_prefix_cache: bool,
}

/// What is needed once per request or once per block, not once per step.
#[derive(Debug)]
pub(crate) struct Cold {
    pub(crate) request_id: Box<str>,
    pub(crate) params: SamplingParams,
    pub(crate) priority: i32,
    /// Place in the order of arrival.
    pub(crate) arrival: u64,
    pub(crate) extra_keys: Box<[u8]>,
    pub(crate) skip_reading_prefix_cache: bool,
    /// One per full block of tokens known so far (empty without prefix caching).
    pub(crate) block_hashes: Vec<BlockHash>,
    pub(crate) num_preemptions: u32,
    /// Prefix statistics and `num_cached_tokens` belong to the first admission.
    pub(crate) admitted_before: bool,
}

/// A request's hot part: what a decode step reads and writes, two cache lines.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Request {
    /// Tokens whose KV is in the cache, or will be when the steps in flight are done.
    pub(crate) num_computed_tokens: u32,
    /// Prompt and output: `token_ids.len()`.
    pub(crate) num_tokens: u32,
    /// `num_tokens` at which it ends: prompt + `max_tokens`, at most `max_model_len`.
    pub(crate) max_total_tokens: u32,
    /// Slot of position `num_computed_tokens`, while `slots_left > 0`.
    pub(crate) next_slot: u32,
    /// Positions from `num_computed_tokens` on in the block that `next_slot` lies in.
    pub(crate) slots_left: u32,
    pub(crate) last_token_id: i32,
    /// Persistent row while running.
    pub(crate) row: u32,
    /// −1: EOS does not end it.
    pub(crate) eos_token_id: i32,
    pub(crate) key: RequestKey,
    pub(crate) token_ids: Vec<i32>,
    // Second line.
    pub(crate) block_table: Vec<BlockId>,
    /// Leading blocks that are registered in the prefix index, or were hits.
    pub(crate) num_registered_blocks: u32,
    pub(crate) num_prompt_tokens: u32,
    /// Prompt tokens found in the prefix cache at first admission.
    pub(crate) num_cached_tokens: u32,
    /// When it was first admitted; 0 before.
    pub(crate) first_scheduled_ns: u64,
    /// Tells a slot's tenant from the one before it.
    pub(crate) epoch: u32,
    pub(crate) status: RequestStatus,
    pub(crate) has_stop_token_ids: bool,
    pub(crate) cold: Box<Cold>,
}

impl Request {
    /// Tokens that the block table has room for.
    pub(crate) fn capacity_tokens(&self, block_size: u32) -> u32 {
        self.block_table.len() as u32 * block_size
    }
}
