//! Preemption: which request gives up its blocks if the pool is empty, and how: its KV is discarded, or moved to CPU
//! memory.

use super::Scheduler;
use crate::{
    config::{PreemptionMode, SchedulingPolicy},
    request::{NO_ROW, RequestStatus, Tenant},
    sync::Ordering,
};

impl Scheduler {
    /// Index in `running` of the request that gives up its blocks: the newest under FCFS, the least important and
    /// newest under PRIORITY, the one with the last turn under FAIR. A request that came back recently is spared while
    /// there is another, and the first one is never chosen. So there is always one request that advances, and every
    /// request becomes the first eventually.
    pub(crate) fn choose_victim(&self, step: u64) -> usize {
        let is_immune = |index: usize| {
            let request = &self.requests[self.running[index] as usize];
            request.cold.immune_until >= step
        };
        let last = self.running.len() - 1;
        let first = self.leader_of(self.running[0]);
        let is_first = |index: usize| self.leader_of(self.running[index]) == first;
        match self.config.scheduling_policy {
            SchedulingPolicy::Fcfs => {
                let mut others = (0..=last).rev().filter(|&index| !is_first(index));
                let newest = others.clone().next();
                others.find(|&index| !is_immune(index)).or(newest).unwrap_or(last)
            }
            SchedulingPolicy::Priority | SchedulingPolicy::Fair => {
                let key = |&index: &usize| {
                    let slot = self.leader_of(self.running[index]);
                    self.waiting.key(slot, &self.requests[slot as usize])
                };
                let best = (0..=last).map(|index| key(&index)).min();
                let others = || (0..=last).filter(|index| Some(key(index)) != best);
                let worst = others().filter(|&index| !is_immune(index)).max_by_key(key);
                worst.or_else(|| others().max_by_key(key)).unwrap_or(0)
            }
        }
    }

    /// Remove a victim from the step being planned, if it is in it. Returns the tokens of the budget that this frees.
    pub(crate) fn unschedule(&mut self, set: usize, slot: u32) -> Option<u32> {
        let step = &mut self.steps[set];
        let entry = step.remove(slot)?;
        let request = &mut self.requests[slot as usize];
        request.num_computed_tokens -= entry.num_scheduled_tokens;
        request.num_expected_tokens -= entry.num_placeholders();
        request.num_steps_in_flight -= 1;
        request.cold.untold = entry.forced;
        if let Some(span) = step.remove_prompt_span(entry.tenant) {
            request.unask_prompt_logprobs(span);
        }
        self.kv.withdraw(request, step.output.step);
        Some(entry.num_scheduled_tokens)
    }

    /// Preempt a victim that has left the running list and is not in the step being planned.
    pub(crate) fn preempt(&mut self, slot: u32, step: u64) {
        let request = &mut self.requests[slot as usize];
        debug_assert_eq!(request.status, RequestStatus::Running, "only running requests are preempted");
        // The drafts were made for the step that it has just left.
        request.cold.draft_token_ids.clear();
        request.slots_left = 0;
        request.is_held = false; // it comes back when it is admitted
        request.cold.num_preemptions += 1;
        self.stats.num_preemptions += 1;
        if self.config.preemption_mode == PreemptionMode::Recompute || request.num_computed_tokens == 0 {
            self.recompute(slot);
            return;
        }
        request.status = RequestStatus::Swapped;
        if request.num_steps_in_flight > 0 {
            // What these steps compute must be in its blocks before they are copied.
            self.leaving.push(slot);
            self.note(slot);
        } else {
            self.swap_out(slot, step);
        }
    }

    /// Swap out the victims whose last step has been updated.
    pub(crate) fn swap_out_leaving(&mut self, set: usize) {
        let step = self.steps[set].output.step;
        let mut index = 0;
        while let Some(&slot) = self.leaving.get(index) {
            if self.requests[slot as usize].num_steps_in_flight > 0 {
                index += 1;
            } else {
                self.leaving.remove(index);
                self.swap_out(slot, step);
            }
        }
    }

    /// Move a victim's KV to CPU memory with the copies of the step being planned; if there is no room, discard it.
    fn swap_out(&mut self, slot: u32, step: u64) {
        self.register_settled(slot);
        let request = &mut self.requests[slot as usize];
        if !self.kv.swap_out(request) {
            self.recompute(slot);
            return;
        }
        request.cold.swapped_out_in = step;
        self.stats.num_swapped_out += 1;
        self.leave_row(slot);
        self.waiting.push(slot, &self.requests[slot as usize]);
    }

    /// Discard what was computed for a victim. It keeps its tokens, and those of steps in flight still arrive.
    fn recompute(&mut self, slot: u32) {
        self.forget_computed(slot);
        self.waiting.push(slot, &self.requests[slot as usize]);
    }

    /// Discard what was computed for a victim that is in no queue of its own.
    pub(crate) fn forget_computed(&mut self, slot: u32) {
        self.register_settled(slot);
        self.register_in_flight(slot);
        let request = &mut self.requests[slot as usize];
        self.kv.free(request);
        request.status = RequestStatus::Preempted;
        request.num_computed_tokens = 0;
        request.num_expected_tokens = request.num_tokens;
        self.leave_row(slot);
    }

    /// Let a swapped-out request be computed again, because its KV did not reach CPU memory or must not be used.
    pub(crate) fn forget_swapped(&mut self, slot: u32) {
        let request = &mut self.requests[slot as usize];
        let moves = self.waiting.looks_at_status();
        if moves {
            self.waiting.remove(slot, request);
        }
        self.kv.discard_swapped(request);
        request.status = RequestStatus::Preempted;
        request.num_computed_tokens = 0;
        request.num_expected_tokens = request.num_tokens;
        if moves {
            self.waiting.push(slot, request);
        }
        self.note(slot);
    }

    /// Make all requests give up their blocks; they are computed again.
    pub(crate) fn preempt_all(&mut self) {
        while let Some(beams) = self.running.iter().find_map(|&slot| self.running_beams(slot)) {
            self.running.retain(|slot| !beams.contains(slot));
            self.preempt_search(&beams);
        }
        let running = std::mem::take(&mut self.running);
        let leaving = std::mem::take(&mut self.leaving);
        for &slot in running.iter().rev() {
            let request = &mut self.requests[slot as usize];
            request.is_held = false;
            request.cold.draft_token_ids.clear();
            request.cold.num_preemptions += 1;
            self.stats.num_preemptions += 1;
            self.recompute(slot);
        }
        for &slot in &leaving {
            self.recompute(slot);
        }
        let is_swapped = |&slot: &u32| self.requests[slot as usize].status == RequestStatus::Swapped;
        let swapped: Vec<u32> = self.waiting.iter().filter(is_swapped).collect();
        for slot in swapped {
            self.forget_swapped(slot);
        }
    }

    /// Register the blocks that steps in flight do not touch any more, before they are given back.
    pub(crate) fn register_settled(&mut self, slot: u32) {
        let request = &mut self.requests[slot as usize];
        let num_tokens = request.num_settled_tokens();
        self.kv.register_full_blocks(request, num_tokens, None);
    }

    /// Register the block that a step in flight fills with the last known token of a victim. Steps run in order, so it
    /// is full before a later step reads it.
    fn register_in_flight(&mut self, slot: u32) {
        let request = &mut self.requests[slot as usize];
        if request.num_output_placeholders() > 0 {
            // The registration belongs to the next step: that fails together with those in flight, and nothing
            // withdraws it before.
            let num_tokens = request.num_tokens;
            self.kv.register_full_blocks(request, num_tokens, Some(self.steps.last() + 1));
        }
    }

    /// Note that a preempted request's row is free; the worker learns this with the next step.
    fn leave_row(&mut self, slot: u32) {
        let request = &self.requests[slot as usize];
        self.rows.note_preempted(request.row, Tenant { slot, epoch: request.epoch });
        self.retire_row(slot);
        self.note(slot);
    }

    /// Release a row. It is used again only after every step in flight with it has been updated.
    pub(crate) fn retire_row(&mut self, slot: u32) {
        let row = std::mem::replace(&mut self.requests[slot as usize].row, NO_ROW);
        if row == NO_ROW {
            return;
        }
        self.rows.give_up(row, self.steps.newest_in_flight());
    }

    /// Whether the step being planned may admit requests. Not if it `has_preempted`, unless no running request is left
    /// to be protected, and not while blocks are waiting to be swapped out.
    pub(crate) fn may_admit(&self, has_preempted: bool) -> bool {
        self.leaving.is_empty() && (!has_preempted || self.running.is_empty())
    }

    /// Record that one request fewer, with this many tokens, waits for its first admission.
    pub(crate) fn leave_queue_for_good(&self, num_queued_tokens: u32) {
        // Relaxed: see `EngineHandle::reserve`.
        self.handle.shared.num_queued.fetch_sub(1, Ordering::Relaxed);
        self.handle.shared.num_queued_tokens.fetch_sub(num_queued_tokens.into(), Ordering::Relaxed);
    }
}
