//! The drafts of a step: guesses of the tokens after a request's newest one, which run with it and are kept while they
//! are right.
//!
//! They get only what is left over. They are planned after every running request and every waiting one that could be
//! admitted, from the rest of the token budget, and with blocks that no request is short of.

use drafting::{Drafter, Round};

use super::Scheduler;
use crate::{
    clock::monotonic_ns,
    kv_cache_manager::KVCacheManager,
    output::SchedulerOutput,
    request::{Request, UNKNOWN_TOKEN},
    step::{Entry, Step},
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
    pub(crate) fn schedule_drafts(&mut self, set: usize, budget: u32) {
        if self.config.num_speculative_tokens == 0 {
            return;
        }
        match self.drafter.take() {
            Some(mut drafter) => {
                self.look_for_drafts(set, &mut drafter);
                self.add_found_drafts(set, &mut drafter, budget);
                self.drafter = Some(drafter);
            }
            None => self.add_given_drafts(set, budget),
        }
        if self.config.makes_unknown_drafts() {
            self.expect_unknown_drafts(set);
        }
    }

    /// Add the drafts that the drafter has chosen. If there are any, the plan is written again, each row as soon as its
    /// drafts are known: its request is at hand then.
    fn add_found_drafts(&mut self, set: usize, drafter: &mut Drafter, budget: u32) {
        let mut found = drafter.end_round().filter(|(_, drafts)| !drafts.is_empty());
        let Some(mut next) = found.next() else { return };
        let mut room = self.room_for_drafts(set, budget);
        let Self { steps, requests, kv, .. } = self;
        let step = &mut steps[set];
        let mut entries = step.begin_rewrite();
        for (index, entry) in (0..).zip(&mut entries) {
            let request = &mut requests[entry.tenant.slot as usize];
            if next.0 == index {
                room.add(step, entry, request, kv, next.1);
                next = found.next().unwrap_or((u32::MAX, &[]));
            }
            step.write_again(entry, request);
        }
        step.end_rewrite(entries);
    }

    /// Add the drafts that came with the tokens of the previous step.
    fn add_given_drafts(&mut self, set: usize, budget: u32) {
        let mut room = self.room_for_drafts(set, budget);
        let Self { steps, requests, kv, .. } = self;
        let step = &mut steps[set];
        let mut entries = std::mem::take(&mut step.entries);
        let mut has_drafts = false;
        for entry in &mut entries {
            let request = &mut requests[entry.tenant.slot as usize];
            let mut given = std::mem::take(&mut request.cold.draft_token_ids);
            if !given.is_empty() {
                has_drafts |= room.add(step, entry, request, kv, &given);
            }
            // None of them is left for a later step.
            given.clear();
            request.cold.draft_token_ids = given;
        }
        step.entries = entries;
        if has_drafts {
            step.replay(requests);
        }
    }

    /// What the drafts of a plan may take.
    fn room_for_drafts(&self, set: usize, budget: u32) -> DraftRoom {
        DraftRoom {
            budget,
            num_running: self.running.len() as u32,
            num_block_ids: self.steps[set].block_ids_left() as u32,
            block_size: self.config.block_size,
        }
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
            if !entry.sampled || entry.is_new || entry.num_scheduled_tokens != 1 {
                continue;
            }
            let request = &mut self.requests[entry.tenant.slot as usize];
            let num_left = request.max_total_tokens.saturating_sub(request.num_expected_tokens);
            if let Some((history, tokens)) = request.history_and_tokens() {
                drafter.propose(index as u32, history, tokens, num_left);
            }
        }
    }

    /// Let the drafter keep the answer of a request that has ended, for others.
    pub(crate) fn archive_answer(&mut self, slot: u32) {
        let Some(drafter) = &mut self.drafter else { return };
        let request = &mut self.requests[slot as usize];
        if let Some((history, tokens)) = request.history_and_tokens() {
            drafter.retire(history, tokens);
        }
        request.cold.history = None;
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

/// What the drafts of a step may take in addition to its plan.
struct DraftRoom {
    /// Tokens.
    budget: u32,
    /// Running requests: so many blocks must stay free.
    num_running: u32,
    /// Ids of new blocks that the arrays have room for.
    num_block_ids: u32,
    block_size: u32,
}

impl DraftRoom {
    /// Add as many of a request's drafts to its row as its grammar accepts and as fit. Returns whether any were added.
    #[inline]
    fn add(
        &mut self,
        step: &mut Step,
        entry: &mut Entry,
        request: &mut Request,
        kv: &mut KVCacheManager,
        drafts: &[i32],
    ) -> bool {
        let num_drafts = self.num_that_fit(kv, request, request.num_drafts_taken(drafts));
        if num_drafts == 0 {
            return false;
        }
        self.budget -= num_drafts;
        let num_owned = request.block_table.len() as u32;
        if request.num_computed_tokens + num_drafts > num_owned * self.block_size {
            kv.grow(request, request.num_computed_tokens + num_drafts);
        }
        let block_table_start = (request.block_table.len() as u32 > num_owned).then_some(num_owned);
        step.add_drafts(entry, request, &drafts[..num_drafts as usize], block_table_start);
        true
    }

    /// How many drafts a request of the plan may run: none beyond its last possible token, and none that would leave
    /// fewer free blocks than there are running requests.
    #[inline]
    fn num_that_fit(&self, kv: &KVCacheManager, request: &Request, num_drafts: u32) -> u32 {
        let room = request.max_total_tokens.saturating_sub(request.num_expected_tokens);
        let spare_blocks = kv.pool.num_free().saturating_sub(self.num_running);
        let new_blocks = spare_blocks.min(self.num_block_ids);
        let capacity = (request.block_table.len() as u32 + new_blocks).saturating_mul(self.block_size);
        num_drafts.min(room).min(self.budget).min(capacity - request.num_computed_tokens)
    }
}
