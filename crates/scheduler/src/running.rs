//! The running list's part of a step: each request, in admission order, runs what it lacks.

use crate::{
    request::{Request, RequestStatus},
    scheduler::Scheduler,
    step::Row,
};

/// How far a walk over the running list came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Served {
    /// To its end, or to the end of the budget.
    All,
    /// To a request that gave up its own blocks; nobody behind it could do better.
    UntilOneGaveUp,
    /// To a request that waits for blocks which are on their way out.
    UntilOneWaits,
}

impl Scheduler {
    /// Running requests in admission order, while `budget` lasts.
    pub(crate) fn schedule_running(&mut self, set: usize, budget: &mut u32) -> Served {
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            let running = &self.running[index..];
            let done = self.steps[set].push_decodes(running, &mut self.requests, &mut self.kv, *budget);
            index += done;
            *budget -= done as u32;
            if index == self.running.len() || *budget == 0 {
                break;
            }
            match self.schedule_one(set, &mut index, budget) {
                Served::All => index += 1,
                stop => return stop,
            }
        }
        Served::All
    }

    /// A running request that is no plain decode: it has several tokens to compute, or none, or somebody must give up
    /// blocks for it. `index` is its place in the running list, also when others have left from before it.
    fn schedule_one(&mut self, set: usize, index: &mut usize, budget: &mut u32) -> Served {
        let slot = self.running[*index];
        let num_tokens = self.clip(self.requests[slot as usize].num_wanted_tokens(), *budget);
        if num_tokens == 0 {
            return Served::All;
        }
        let step = self.steps[set].output.step;
        let num_owned = self.requests[slot as usize].block_table.len() as u32;
        let mut replay = false;
        let served = loop {
            let request = &mut self.requests[slot as usize];
            let end = request.num_computed_tokens + num_tokens;
            if self.kv.allocate_slots(request, &[], end, None, step) {
                break Served::All;
            }
            if !self.leaving.is_empty() {
                break Served::UntilOneWaits;
            }
            let victim_index = self.choose_victim(step);
            let victim = self.running.remove(victim_index);
            if victim_index < *index {
                *index -= 1;
            }
            if let Some(returned) = self.unschedule(set, victim) {
                *budget += returned;
                replay = true;
            }
            self.preempt(victim, step);
            if victim == slot {
                break Served::UntilOneGaveUp;
            }
        };
        if replay {
            self.steps[set].replay(&self.requests);
        }
        if served == Served::All {
            let request = &mut self.requests[slot as usize];
            let block_table_start = (request.block_table.len() as u32 > num_owned).then_some(num_owned);
            self.steps[set].push(slot, request, Row { num_tokens, block_table_start, is_new: false });
            *budget -= num_tokens;
        }
        served
    }

    /// How many of `wanted` tokens one request may run: the long-prefill threshold counts only in company.
    pub(crate) fn clip(&self, wanted: u32, budget: u32) -> u32 {
        let threshold = self.config.long_prefill_token_threshold;
        let in_company = self.num_unfinished_requests() > 1;
        let wanted = if threshold > 0 && in_company { wanted.min(threshold) } else { wanted };
        wanted.min(budget)
    }
}

impl Request {
    /// Tokens that it could run now, drafts included.
    pub(crate) fn num_wanted_tokens(&self) -> u32 {
        debug_assert!(
            !self.status.is_finished() && self.status != RequestStatus::Preempted,
            "it has a row to run"
        );
        if self.is_full() {
            return 0;
        }
        // A draft beyond the last token that it may have could not be used.
        let room = self.max_total_tokens.saturating_sub(self.num_expected_tokens + 1);
        let num_drafts = (self.cold.draft_token_ids.len() as u32).min(room);
        let wanted = self.num_expected_tokens + num_drafts - self.num_computed_tokens;
        if self.cold.num_fork_children == 0 {
            return wanted;
        }
        // Its children take what precedes the last token of the prompt, and compute that one with it.
        let shared = self.cold.num_prompt_tokens - 1;
        if self.num_computed_tokens < shared { wanted.min(shared - self.num_computed_tokens) } else { wanted }
    }
}
