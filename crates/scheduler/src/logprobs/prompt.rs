//! Log-probabilities of prompts: for which places a step computes them, and what comes back.
//!
//! The token at place i is judged by the logits of the token before it. So a step that runs the tokens [a, b) of a
//! prompt judges those of (a, b], as far as the prompt goes; the last of these may belong to the next chunk. Each
//! place is asked for once: a request that is preempted and computes its prompt again asks for nothing that a step,
//! perhaps still in flight, has given or will give. A step that fails ends its requests, so nothing is left out
//! either.

use crate::{
    error::SchedulerError,
    output::{RequestKey, SchedulerOutput},
    request::{Request, Tenant},
    step_buffers::StepBuffers,
};

/// Of consecutive places of one prompt: each token's own log-probability and those of the likeliest ones at its place.
///
/// They come in the order of the places, and all before the request's first token.
#[derive(Clone, PartialEq, Debug)]
pub struct PromptLogprobs {
    /// Whose prompt it is.
    pub key: RequestKey,
    /// The first of the places, at least 1: nothing judges the first token.
    pub first_position: u32,
    /// Candidates per place.
    pub num_columns: u32,
    /// Of each place, the rank of its token, from 1.
    pub ranks: Box<[u32]>,
    /// `num_columns` for each place: its token, then the likeliest in their order; −1 ends a row.
    pub token_ids: Box<[i32]>,
    /// The log-probability of each of these.
    pub logprobs: Box<[f32]>,
}

/// What a step says of the places of prompts that it was asked for, in the order of `prompt_logprobs_indices`.
#[derive(Clone, Copy, Debug)]
pub struct PromptLogprobRows<'a> {
    /// Candidates per place, of each request that asks.
    pub num_columns: &'a [i32],
    /// Of each place its token, then the likeliest; −1 ends a row. Row after row, without gaps.
    pub token_ids: &'a [i32],
    /// The log-probability of each of these.
    pub logprobs: &'a [f32],
    /// Of each place, the rank of its token, from 1.
    pub ranks: &'a [i32],
}

impl PromptLogprobRows<'_> {
    /// No rows.
    pub const NONE: PromptLogprobRows<'static> =
        PromptLogprobRows { num_columns: &[], token_ids: &[], logprobs: &[], ranks: &[] };

    /// Whether they are what the step was asked for.
    pub(crate) fn check(
        &self,
        output: &SchedulerOutput,
        spans: &[PromptSpan],
        buffers: &mut StepBuffers,
    ) -> Result<(), SchedulerError> {
        let wrong = |what| Err(SchedulerError::WrongPromptLogprobs { step: output.step, what });
        if self.num_columns.len() != spans.len()
            || self.ranks.len() != output.num_prompt_logprobs as usize
            || self.token_ids.len() != self.logprobs.len()
        {
            return wrong("the arrays have not one row for each place that was asked for");
        }
        let targets = buffers.prompt_logprobs_targets.window(0, self.ranks.len());
        let (mut row, mut entry) = (0, 0_usize);
        for (span, &num_columns) in spans.iter().zip(self.num_columns) {
            let width = usize::try_from(num_columns).ok().filter(|&width| width > 0);
            for _ in 0..span.count {
                let next = width.and_then(|width| entry.checked_add(width));
                let Some(next) = next.filter(|&next| next <= self.token_ids.len()) else {
                    return wrong("the rows are wider than the arrays are long, or have no columns");
                };
                if self.token_ids[entry] != targets[row] {
                    return wrong("the first id of a row is not the prompt's at its place");
                }
                (row, entry) = (row + 1, next);
            }
        }
        if entry != self.token_ids.len() {
            return wrong("the arrays are longer than the rows");
        }
        Ok(())
    }
}

/// What one row of a step is asked for: the tokens that judge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PromptSpan {
    pub(crate) tenant: Tenant,
    /// Place of the first.
    pub(crate) start: u32,
    pub(crate) count: u32,
}

impl Request {
    /// What a row that ends before `end` is asked for; from now on it counts as asked.
    pub(crate) fn ask_prompt_logprobs(&mut self, tenant: Tenant, end: u32) -> Option<PromptSpan> {
        let last = self.cold.num_prompt_tokens - 1;
        let start = self.cold.num_judges_asked;
        debug_assert!(self.num_computed_tokens <= start, "what is found in the cache judges no token");
        let count = end.min(last).saturating_sub(start);
        self.cold.num_judges_asked += count;
        self.cold.wants_prompt_logprobs = self.cold.num_judges_asked < last;
        (count > 0).then_some(PromptSpan { tenant, start, count })
    }

    /// The row that was asked does not run after all.
    pub(crate) fn unask_prompt_logprobs(&mut self, span: PromptSpan) {
        self.cold.num_judges_asked = span.start;
        self.cold.wants_prompt_logprobs = true;
    }
}
