//! What leaves the scheduler: `SchedulerOutput` to the worker, `EngineCoreOutput` to the front ends.

use std::fmt;

/// Names one request between a front end and the core, uniquely for the core's whole life. Only the front ends use
/// strings.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct RequestKey(pub u64);

/// Why a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum FinishReason {
    /// EOS, a stop token, or (found by the front end) a stop string.
    Stop,
    /// `max_tokens` or `max_model_len` reached.
    Length,
    /// Aborted by its client or by a shutdown.
    Abort,
    /// Failed; see `EngineCoreOutput::error`.
    Error,
    /// It repeated itself, as its `repetition_detection` says.
    Repetition,
}

impl FinishReason {
    /// Whether a front end that looks for stop strings may find one in the text of such an end.
    #[must_use]
    pub fn may_be_a_stop(self) -> bool {
        matches!(self, Self::Length | Self::Repetition)
    }

    /// The wire name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
            Self::Repetition => "repetition",
        }
    }
}

/// Why a request failed, as numbers; the front end makes the text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[repr(u8)]
pub enum RequestError {
    /// It did not fail.
    #[default]
    None,
    /// A live request has the same id.
    DuplicateRequestId,
    /// The model failed in a step with it.
    StepFailed,
    /// The model gave no token for it: its logits were not numbers.
    NoToken,
    /// Its grammar does not accept the token that was sampled, or has become too complex to follow.
    GrammarRejected,
    /// Its grammar could not be compiled.
    GrammarFailed,
    /// It waited longer than `queue_timeout` for its first step.
    QueueTimeout,
    /// A logits processor raised an error for it.
    ProcessorFailed,
    /// A logits processor does not accept its arguments.
    ProcessorRefused,
    /// The engine does not have its adapter, or no longer has it.
    AdapterMissing,
    /// There is no room, or no longer room, for its grammar next to those of other requests.
    GrammarsFull,
    /// Its parameters exclude every token, for example because its grammar accepts none of the allowed ids.
    NothingAllowed,
    /// The engine could not read the tokenizer that its grammar is compiled for.
    TokenizerUnreadable,
}

impl RequestError {
    /// Whether the worker has a message of its own about this error.
    #[must_use]
    pub fn is_explained(self) -> bool {
        matches!(self, Self::StepFailed | Self::ProcessorFailed | Self::ProcessorRefused)
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "no error",
            Self::DuplicateRequestId => {
                "a request with this id is still running; use another id or wait until it has finished"
            }
            Self::NoToken => {
                "the model's output for this request (logits or hidden states) is not finite numbers"
            }
            Self::StepFailed => "the model failed while this request was being computed",
            Self::GrammarRejected => {
                "the grammar of this request allows no token here, or has become too complex to follow"
            }
            Self::GrammarFailed => {
                "the grammar of this request could not be compiled for the vocabulary of this model"
            }
            Self::QueueTimeout => {
                "the request waited longer than queue_timeout and was not begun; try again later"
            }
            Self::ProcessorFailed => "a logits processor of this request raised an error",
            Self::ProcessorRefused => "a logits processor does not take the arguments of this request",
            Self::AdapterMissing => "the engine does not have the adapter of this request; it may have been removed while the request came in",
            Self::GrammarsFull => {
                "the grammars of other requests take all the room that there is for grammars; try again later"
            }
            Self::NothingAllowed => {
                "no token may follow: the grammar, allowed_token_ids, bad_words, min_tokens and logits processors of this request exclude every one together; leave one of them out"
            }
            Self::TokenizerUnreadable => {
                "the grammar of this request could not be compiled, because the server cannot read the tokenizer of its model; the server's log names the file"
            }
        })
    }
}

/// What became of the drafts from a request's own prediction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PredictedDrafts {
    /// Accepted: the answer continued as predicted.
    pub num_accepted: u16,
    /// Rejected.
    pub num_rejected: u16,
}

impl PredictedDrafts {
    /// None of either kind.
    pub const NONE: Self = Self { num_accepted: 0, num_rejected: 0 };
}

/// One token of one request, or its end, or both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineCoreOutput {
    /// The request.
    pub key: RequestKey,
    /// The token, or −1 when there is none (an abort, an error, `max_tokens = 0`).
    pub new_token_id: i32,
    /// Set on the last record of a request.
    pub finish_reason: Option<FinishReason>,
    /// The stop token that ended the request, or −1. See also [`Self::prompt_progress`] and [`Self::unsettled_reason`].
    pub stop_reason: i32,
    /// Prompt tokens that came from the prefix cache at first admission; on the first record of a request, else 0.
    pub num_cached_tokens: u32,
    /// When the request was first scheduled (monotonic nanoseconds); on the first record of a request that was, else 0.
    pub first_scheduled_ns: u64,
    /// When this record was made (monotonic nanoseconds).
    pub timestamp_ns: u64,
    /// Why it failed.
    pub error: RequestError,
    /// What became of the predicted drafts of this step; on the step's first record.
    pub predicted: PredictedDrafts,
}

/// The stop reason of an end whose cause is open; no token has this id.
pub(crate) const UNSETTLED: i32 = -2;

impl EngineCoreOutput {
    /// Why the request ended, if that is open until the front end reports it ([`crate::EngineHandle::settle_end`]): it
    /// reached its length limit or repeated itself, but it has stop strings, and only the front end knows whether the
    /// last text contains one.
    #[must_use]
    pub fn unsettled_reason(&self) -> Option<FinishReason> {
        let is_open = |reason: &FinishReason| reason.may_be_a_stop() && self.stop_reason == UNSETTLED;
        self.finish_reason.filter(is_open)
    }

    /// Make a record that has neither token nor end, but reports how many tokens of the prompt are computed; the number
    /// is in the field `stop_reason`.
    pub(crate) fn progress(key: RequestKey, num_computed_tokens: u32, timestamp_ns: u64) -> Self {
        Self {
            key,
            new_token_id: -1,
            finish_reason: None,
            stop_reason: i32::try_from(num_computed_tokens).unwrap_or(i32::MAX),
            num_cached_tokens: 0,
            first_scheduled_ns: 0,
            timestamp_ns,
            error: RequestError::None,
            predicted: PredictedDrafts::NONE,
        }
    }

    /// Number of computed prompt tokens, if this record reports nothing else.
    #[must_use]
    pub fn prompt_progress(&self) -> Option<u32> {
        let says_nothing_else = self.new_token_id < 0 && self.finish_reason.is_none();
        if says_nothing_else { u32::try_from(self.stop_reason).ok() } else { None }
    }
}

/// What one step runs: the scalars; everything else is in buffer set `buffer_index`.
///
/// The set belongs to the reader until the step is updated; `step` is its generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SchedulerOutput {
    /// Number of the step, from 1; also the generation of the buffer set.
    pub step: u64,
    /// Which of the registered sets holds the arrays.
    pub buffer_index: u32,
    /// Scheduled requests.
    pub num_reqs: u32,
    /// Sum of `num_scheduled_tokens`.
    pub total_num_scheduled_tokens: u32,
    /// Largest `num_scheduled_tokens`.
    pub max_num_scheduled_tokens: u32,
    /// Largest `seq_lens`.
    pub max_seq_len: u32,
    /// Requests that are sampled.
    pub num_sampled: u32,
    /// Rows of logits: one per sampled request and one per draft.
    pub num_logits: u32,
    /// Number of requests that need log-probabilities of their prompts.
    pub num_prompt_logprobs_reqs: u32,
    /// Number of tokens whose logits are needed for that.
    pub num_prompt_logprobs: u32,
    /// New and resumed requests.
    pub num_new_reqs: u32,
    /// Block-table differences.
    pub num_block_table_updates: u32,
    /// Rows that finished requests have given up since the last step.
    pub num_finished: u32,
    /// Rows that preempted requests have given up in this step.
    pub num_preempted: u32,
    /// Number of sampled requests whose output obeys a grammar.
    pub num_structured_output_reqs: u32,
    /// Pairs in `blocks_to_swap_out`.
    pub num_swap_out: u32,
    /// Pairs in `blocks_to_swap_in`.
    pub num_swap_in: u32,
    /// Pairs in `blocks_to_copy`.
    pub num_copies: u32,
}
