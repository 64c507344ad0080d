//! The drafts of a step: guesses of the tokens after a request's newest one, which run with it and are kept while they
//! are right.
//!
//! They get only what is left over. They are planned after every running request and every waiting one that could be
//! admitted, from the rest of the token budget, and with blocks that no request is short of.

use drafting::{Drafter, Round};

use super::Scheduler;
use crate::{
    clock::monotonic_ns,
    output::SchedulerOutput,
    request::{Request, UNKNOWN_TOKEN},
};

impl Scheduler {
    /// Whether the scheduler makes drafts itself.
    #[must_use]
    pub fn has_drafter(&self) -> bool {
        self.drafter.is_some()
    }

    /// Whether the next step is planned only after the previous one has ended, because drafts follow a known token.
    pub(crate) fn waits_for_tokens(&self) -> bool {
        self.steps.oldest().is_some() && self.drafter.as_ref().is_some_and(Drafter::needs_tokens)
    }

    /// Let rows of the plan run drafts, in their order, with the rest of the budget.
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

    /// Add the drafts that the drafter has chosen. Returns whether any were added.
    fn add_found_drafts(&mut self, set: usize, drafter: &mut Drafter, budget: &mut u32) -> bool {
        let mut has_drafts = false;
        for (index, drafts) in drafter.end_round() {
            if !drafts.is_empty() {
                has_drafts |= self.add_drafts(set, index as usize, drafts, budget);
            }
        }
        has_drafts
    }

    /// Add the drafts that came with the tokens of the previous step. Returns whether any were added.
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

    /// How many of its drafts a request of the plan may run: none beyond its last possible token, and none that would
    /// leave fewer free blocks than there are running requests.
    fn num_drafts_that_fit(&self, set: usize, request: &Request, num_drafts: u32, budget: u32) -> u32 {
        let room = request.max_total_tokens.saturating_sub(request.num_expected_tokens);
        let spare_blocks = self.kv.pool.num_free().saturating_sub(self.running.len() as u32);
        let new_blocks = spare_blocks.min(self.steps[set].block_ids_left() as u32);
        let capacity = (request.block_table.len() as u32 + new_blocks).saturating_mul(self.config.block_size);
        num_drafts.min(room).min(budget).min(capacity - request.num_computed_tokens)
    }

    /// Add as many of a request's drafts to its row as its grammar accepts and as fit. Returns whether any were added.
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

    /// If steps overlap and the scheduler makes no drafts, the worker adds drafts of its own to every row in the next
    /// step: expect them.
    fn expect_unknown_drafts(&mut self, set: usize) {
        for entry in self.steps[set].entries.iter().filter(|entry| entry.sampled) {
            let cold = &mut self.requests[entry.tenant.slot as usize].cold;
            if cold.seat.is_some() {
                continue; // What follows a beam is chosen, not guessed.
            }
            cold.draft_token_ids.resize(self.config.num_speculative_tokens as usize, UNKNOWN_TOKEN);
        }
    }

    /// Ask the drafter for drafts of the plain decodes in the plan. While an earlier step is in flight, its tokens are
    /// not known: the drafter then lets no draft run, and learns later whether its guesses would have been right.
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

    /// Let the drafter keep the answer of a request that has ended, for others.
    pub(crate) fn archive_answer(&mut self, slot: u32) {
        let Some(drafter) = &mut self.drafter else { return };
        let request = &mut self.requests[slot as usize];
        if let Some(mut history) = request.cold.history.take() {
            request.gather_tokens();
            drafter.retire(&mut history, request.gathered_tokens());
        }
    }

    /// Report to the drafter how long a step took and what it gave.
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
