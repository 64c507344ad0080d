//! `SchedulerError`: misuse of the owner's side.

use thiserror::Error;

use crate::config::ConfigError;

/// Misuse of the owner's side: a value, the scheduler stays sound.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum SchedulerError {
    /// A number outside its limits.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The pool could not be made.
    #[error(transparent)]
    Pool(#[from] kvblocks::PoolError),
    /// `schedule` while as many steps are in flight as may be.
    #[error(
        "step {oldest_step} is in flight, and max_steps_in_flight is {limit}; call update_from_output or fail_step for it before the next schedule"
    )]
    StepInFlight {
        /// The step to update next.
        oldest_step: u64,
        /// `max_steps_in_flight`.
        limit: u32,
    },
    /// An update with what `schedule` returned, after `truncate_drafts` has returned something in its place.
    #[error("this output of step {step} is out of date: use the one that truncate_drafts returned")]
    OutdatedOutput {
        /// The step.
        step: u64,
    },
    /// A change to a step that is not the last one scheduled.
    #[error(
        "step {step} is not the last one in flight; its drafts can be changed only before the next schedule"
    )]
    NotTheNewestStep {
        /// Given.
        step: u64,
    },
    /// An update of a step that is not the oldest in flight.
    #[error("step {step} cannot be updated: {}", match oldest_step { Some(oldest) => format!("the next step to update is {oldest}"), None => "no step is in flight".to_owned() })]
    WrongStep {
        /// Given.
        step: u64,
        /// Expected.
        oldest_step: Option<u64>,
    },
    /// Sampled ids of the wrong shape.
    #[error("sampled_token_ids must have {expected} rows, one per sampled request of step {step}, got {got}")]
    WrongRows {
        /// The step.
        step: u64,
        /// `num_sampled`.
        expected: u32,
        /// Given.
        got: usize,
    },
    /// Log-probabilities that are not of what was sampled.
    #[error("the logprobs of step {step} do not fit its sampled tokens: {what}")]
    WrongLogprobs {
        /// The step.
        step: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// Log-probabilities of prompts that are not those that were asked for.
    #[error("the prompt_logprobs of step {step} are not what it was asked for: {what}")]
    WrongPromptLogprobs {
        /// The step.
        step: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// Vectors that are not of what was sampled.
    #[error("the pooled vectors of step {step} do not fit its samples: {what}")]
    WrongPooledRows {
        /// The step.
        step: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// Drafts where there may be none, or not as many.
    #[error(
        "drafts have {got} columns; the limit is {limit} (num_speculative_tokens, or 0 if steps overlap, because the worker then keeps its drafts)"
    )]
    TooManyDrafts {
        /// Given.
        got: usize,
        /// Possible.
        limit: u32,
    },
    /// No buffer sets.
    #[error("at least {needed} step buffer sets are needed (steps in flight + 1), got {got}")]
    TooFewBuffers {
        /// Needed.
        needed: usize,
        /// Given.
        got: usize,
    },
}
