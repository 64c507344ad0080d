//! The drafts of a step: tokens that are guessed to follow the newest one of a request, run with it and kept while they
//! are right.
//!
//! They take what is left over: planned after every running request and every waiting one that could be admitted, out
//! of the budget that these left and of blocks that no request runs short of.

use drafting::{Drafter, Round};

use super::Scheduler;
use crate::{
    clock::monotonic_ns,
    output::SchedulerOutput,
    request::{Request, UNKNOWN_TOKEN},
};

impl Scheduler {
    /// Whether drafts are made here.
    #[must_use]
    pub fn has_drafter(&self) -> bool {
        self.drafter.is_some()
    }

    /// Whether the next step is planned only when the one before it is over: drafts follow a token that must be known.
    pub(crate) fn waits_for_tokens(&self) -> bool {
        self.steps.oldest().is_some() && self.drafter.as_ref().is_some_and(Drafter::needs_tokens)
    }

    /// Let rows of the plan run drafts, in their order, with what is left of the budget.
    pub(crate) fn schedule_drafts(&mut self, set: usize, mut budget: u32) {
        if self.config.num_speculative_tokens == 0 {
            return;
        }
        let has_drafts = match self.drafter.take() {
            Some(mut drafter) => {
                self.look_for_drafts(set, &mut drafter);
                let has_drafts = self.add_found_drafts(set, &mut drafter, &mut budget);
                self.drafter = Some(drafter);
                has_drafts
            }
            None => self.add_given_drafts(set, &mut budget),
        };
        if has_drafts {
            self.steps[set].replay(&self.requests);
        }
        if self.config.makes_unknown_drafts() {
            self.expect_unknown_drafts(set);
        }
    }

    /// The drafts that the drafter wants to run. Returns whether any does.
    fn add_found_drafts(&mut self, set: usize, drafter: &mut Drafter, budget: &mut u32) -> bool {
        let mut has_drafts = false;
        for (index, drafts) in drafter.end_round() {
            if !drafts.is_empty() {
                has_drafts |= self.add_drafts(set, index as usize, drafts, budget);
            }
        }
        has_drafts
    }

    /// The drafts that came with the tokens of the step before. Returns whether any runs.
    fn add_given_drafts(&mut self, set: usize, budget: &mut u32) -> bool {
        let mut has_drafts = false;
        for index in 0..self.steps[set].entries.len() {
            let slot = self.steps[set].entries[index].tenant.slot as usize;
            let mut given = std::mem::take(&mut self.requests[slot].cold.draft_token_ids);
            if !given.is_empty() {
                has_drafts |= self.add_drafts(set, index, &given, budget);
            }
            // None of them is left for a later step.
            given.clear();
            self.requests[slot].cold.draft_token_ids = given;
        }
        has_drafts
    }

    /// How many of its drafts a request of the plan may run: none beyond the last token that it may have, none that
    /// would leave fewer blocks free than requests run.
    fn num_drafts_that_fit(&self, set: usize, request: &Request, num_drafts: u32, budget: u32) -> u32 {
        let room = request.max_total_tokens.saturating_sub(request.num_expected_tokens);
        let spare_blocks = self.kv.pool.num_free().saturating_sub(self.running.len() as u32);
        let new_blocks = spare_blocks.min(self.steps[set].block_ids_left() as u32);
        let capacity = (request.block_table.len() as u32 + new_blocks).saturating_mul(self.config.block_size);
        num_drafts.min(room).min(budget).min(capacity - request.num_computed_tokens)
    }

    /// Put as many of a request's drafts behind its row as its grammar takes and as fit. Returns whether any does.
    fn add_drafts(&mut self, set: usize, index: usize, drafts: &[i32], budget: &mut u32) -> bool {
        let slot = self.steps[set].entries[index].tenant.slot;
        let request = &self.requests[slot as usize];
        let num_taken = request.num_drafts_taken(drafts);
        let num_drafts = self.num_drafts_that_fit(set, request, num_taken, *budget);
        if num_drafts == 0 {
            return false;
        }
        *budget -= num_drafts;
        let request = &mut self.requests[slot as usize];
        let num_owned = request.block_table.len() as u32;
        self.kv.grow(request, request.num_computed_tokens + num_drafts);
        let block_table_start = (request.block_table.len() as u32 > num_owned).then_some(num_owned);
        self.steps[set].add_drafts(index, request, &drafts[..num_drafts as usize], block_table_start);
        true
    }

    /// Where steps overlap without a drafter here, the worker follows every row with drafts of its own in the next
    /// step.
    fn expect_unknown_drafts(&mut self, set: usize) {
        for entry in self.steps[set].entries.iter().filter(|entry| entry.sampled) {
            let cold = &mut self.requests[entry.tenant.slot as usize].cold;
            if cold.seat.is_some() {
                continue; // What follows a beam is chosen, not guessed.
            }
            cold.draft_token_ids.resize(self.config.num_speculative_tokens as usize, UNKNOWN_TOKEN);
        }
    }

    /// Ask the drafter what may follow the plain decodes of the plan. While a step before it is in flight its tokens
    /// are not known: the drafter lets nothing run then, and learns whether it would have been right.
    fn look_for_drafts(&mut self, set: usize, drafter: &mut Drafter) {
        let step = &self.steps[set];
        let round = Round {
            step: step.output.step,
            num_running: self.running.len() as u32,
            num_rows: step.output.num_reqs,
            num_tokens: step.output.total_num_scheduled_tokens,
            overlaps: self.steps.oldest().is_some(),
            now_ns: monotonic_ns(),
        };
        drafter.begin_round(round);
        for (index, entry) in step.entries.iter().enumerate() {
            let request = &mut self.requests[entry.tenant.slot as usize];
            if !entry.sampled || entry.is_new || entry.num_scheduled_tokens != 1 {
                continue;
            }
            let Some(mut history) = request.cold.history.take() else { continue };
            request.gather_tokens();
            let num_left = request.max_total_tokens.saturating_sub(request.num_expected_tokens);
            drafter.propose(index as u32, &mut history, request.gathered_tokens(), num_left);
            request.cold.history = Some(history);
        }
    }

    /// Let the drafter keep what a request was answered, which is over, for others.
    pub(crate) fn archive_answer(&mut self, slot: u32) {
        let Some(drafter) = &mut self.drafter else { return };
        let request = &mut self.requests[slot as usize];
        if let Some(mut history) = request.cold.history.take() {
            request.gather_tokens();
            drafter.retire(&mut history, request.gathered_tokens());
        }
    }

    /// Tell the drafter what a step took and gave.
    pub(crate) fn measure_step(&mut self, output: &SchedulerOutput, num_generated: u64, now_ns: u64) {
        let Some(drafter) = &mut self.drafter else { return };
        let &SchedulerOutput { step, total_num_scheduled_tokens, num_sampled, .. } = output;
        drafter.end_step(step, total_num_scheduled_tokens, num_sampled, num_generated as u32, now_ns);
        let stats = drafter.stats();
        self.stats.num_draft_pauses = stats.num_pauses;
        self.stats.is_drafting_paused = u64::from(stats.is_paused);
        self.stats.num_withheld_draft_tokens = stats.num_withheld;
    }
}
