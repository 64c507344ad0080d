//! `StepRows`: what a step gave, row by row, as `update_from_output` takes it.

use crate::{
    logprobs::{LogprobRows, prompt::PromptLogprobRows},
    step::token_rows::TokenRows,
};

/// What one step gave.
#[derive(Clone, Copy, Debug)]
pub struct StepRows<'a> {
    /// A row for each sampled request of the step, in the order of `sampled_rows`: with drafts, those that were
    /// accepted and one more.
    pub sampled: TokenRows<'a>,
    /// Drafts for the next step of each sampled request: none, or as many rows, of at most `num_speculative_tokens`
    /// ids. Only when steps do not overlap; else the worker keeps its drafts to itself.
    pub drafts: TokenRows<'a>,
    /// Log-probabilities of those sampled tokens whose requests asked for them.
    pub logprobs: LogprobRows<'a>,
    /// Log-probabilities of those places of prompts that the step was asked for.
    pub prompt_logprobs: PromptLogprobRows<'a>,
}

impl<'a> From<TokenRows<'a>> for StepRows<'a> {
    /// Sampled tokens and nothing else.
    fn from(sampled: TokenRows<'a>) -> Self {
        Self {
            sampled,
            drafts: TokenRows::NONE,
            logprobs: LogprobRows::NONE,
            prompt_logprobs: PromptLogprobRows::NONE,
        }
    }
}
