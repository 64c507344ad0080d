//! `StepRows`: the results of a step, row by row, for `update_from_output`.

use crate::{
    logprobs::{LogprobRows, prompt::PromptLogprobRows},
    pooling::PooledRows,
    step::token_rows::TokenRows,
};

/// The results of one step.
#[derive(Clone, Copy, Debug)]
pub struct StepRows<'a> {
    /// A row for each sampled request of the step, in the order of `sampled_rows`; with drafts, the accepted ones and
    /// one more token.
    pub sampled: TokenRows<'a>,
    /// Drafts for the next step of each sampled request: no rows, or one per sampled request, of at most
    /// `num_speculative_tokens` ids. Only if steps do not overlap; otherwise the worker keeps its drafts to itself.
    pub drafts: TokenRows<'a>,
    /// Log-probabilities of those sampled tokens whose requests asked for them.
    pub logprobs: LogprobRows<'a>,
    /// Log-probabilities of the prompt positions that the step was asked for.
    pub prompt_logprobs: PromptLogprobRows<'a>,
    /// Vectors of the samples that are pooled.
    pub pooled: PooledRows<'a>,
}

impl<'a> From<TokenRows<'a>> for StepRows<'a> {
    /// Sampled tokens and nothing else.
    fn from(sampled: TokenRows<'a>) -> Self {
        Self {
            sampled,
            drafts: TokenRows::NONE,
            logprobs: LogprobRows::NONE,
            prompt_logprobs: PromptLogprobRows::NONE,
            pooled: PooledRows::NONE,
        }
    }
}
