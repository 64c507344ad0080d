//! Admission: which waiting requests get blocks and a row in this step.
//!
//! A cursor walks through the queue. It skips a request that is not ready: its grammar is not compiled, a step with it
//! is still in flight, the request that it forks has not computed enough, there is no place for its adapter, or a pause
//! keeps it waiting. Such a request delays no other. The first request that is ready but does not fit ends the walk; with
//! look-past, it may be overtaken a limited number of times.

use kvblocks::BlockId;

use super::{Scheduler, adapters::AdapterLimit};
use crate::{
    clock::monotonic_ns,
    kv_cache_manager::Admission,
    request::{RequestStatus, Tenant},
    step::Row,
};

/// Where a waiting request can start.
enum Start {
    /// It cannot start now.
    NotReady,
    /// With the tokens that the prefix cache holds.
    FromPrefixCache,
    /// With everything that it had computed, which is in CPU memory.
    FromCpu,
    /// With the KV of a running request, up to its own last token.
    FromParent(u32),
}

/// The plan of one admission; nothing has changed yet.
struct Candidate {
    /// Tokens that need not be computed.
    num_computed_tokens: u32,
    /// Tokens that were looked up in the prefix cache.
    num_queried_tokens: u32,
    /// Tokens that were found there.
    num_hit_tokens: u32,
    /// The source of its partly filled block, which is copied.
    copy_from: Option<BlockId>,
}

impl Scheduler {
    /// Admit waiting requests in queue order, while `budget` lasts and the step has fewer than `max_rows` rows.
    pub(crate) fn schedule_waiting(&mut self, set: usize, budget: &mut u32, max_rows: usize) {
        let mut passed_over = std::mem::take(&mut self.passed_over);
        passed_over.clear();
        let mut num_tries_left = self.config.max_look_past;
        let mut adapters = AdapterLimit::new(self.config.max_loras);
        let mut cursor = None;
        // Each admitted request needs at least one block of its own.
        while *budget > 0
            && self.steps[set].entries.len() < max_rows
            && self.kv.pool.num_free() > 0
            && self.running.len() < self.config.max_num_seqs as usize
            && self.rows.has_free()
        {
            cursor = self.waiting.after(cursor);
            let Some((_, _, _, slot)) = cursor else { break };
            let start = self.start_of(set, slot);
            if matches!(start, Start::NotReady) || !self.may_bring_adapter(slot, &mut adapters) {
                continue;
            }
            if !passed_over.is_empty() {
                num_tries_left -= 1;
            }
            if let Some(num_tokens) = self.try_admit(set, slot, &start, *budget) {
                *budget -= num_tokens;
                self.note_adapter(slot, &mut adapters);
                for &slot in &passed_over {
                    self.requests[slot as usize].cold.num_times_passed += 1;
                }
                self.stats.num_look_past += u64::from(!passed_over.is_empty());
            } else {
                passed_over.push(slot);
            }
            let worn_out = |&slot: &u32| {
                self.requests[slot as usize].cold.num_times_passed >= self.config.max_times_passed
            };
            if passed_over.iter().any(worn_out) || (!passed_over.is_empty() && num_tries_left == 0) {
                break;
            }
        }
        self.passed_over = passed_over;
    }

    /// Decide how a waiting request can start. Ends its link to a parent that cannot help any more.
    fn start_of(&mut self, set: usize, slot: u32) -> Start {
        let request = &self.requests[slot as usize];
        if request.status == RequestStatus::WaitingForGrammar || request.num_steps_in_flight > 0 {
            return Start::NotReady;
        }
        if self.is_kept_waiting(slot) || !self.beams_are_settled(slot) {
            return Start::NotReady;
        }
        if request.status == RequestStatus::Swapped {
            return Start::FromCpu;
        }
        let Some(parent) = request.cold.fork_parent else { return Start::FromPrefixCache };
        let num_shared = request.num_tokens - 1;
        let parent_request = &self.requests[parent.slot as usize];
        debug_assert_eq!(parent_request.epoch, parent.epoch, "who leaves unlinks its children");
        if parent_request.status == RequestStatus::Running {
            if parent_request.num_computed_tokens < num_shared {
                return Start::NotReady; // Without a look through the plan, as long as the prompt is being computed.
            }
            // A copy is made before the step runs, so the block must hold what earlier steps have computed. A request
            // that is admitted in this step may share blocks that this step fills.
            let settled = match self.steps[set].entry_of(parent) {
                Some(entry) if entry.is_new => 0,
                Some(entry) => entry.num_computed_tokens,
                None => parent_request.num_computed_tokens,
            };
            return if settled >= num_shared { Start::FromParent(parent.slot) } else { Start::NotReady };
        }
        if parent_request.num_tokens == parent_request.cold.num_prompt_tokens {
            return Start::NotReady;
        }
        self.unlink_from_parent(slot);
        Start::FromPrefixCache
    }

    /// Give a waiting request blocks, a row and its place in the step. Returns the number of tokens that it runs;
    /// `None`, with nothing changed, if it does not fit.
    fn try_admit(&mut self, set: usize, slot: u32, start: &Start, budget: u32) -> Option<u32> {
        let mut hits = std::mem::take(&mut self.hits);
        let admitted = self.try_admit_with(set, slot, start, budget, &mut hits);
        self.hits = hits;
        admitted
    }

    fn try_admit_with(
        &mut self,
        set: usize,
        slot: u32,
        start: &Start,
        budget: u32,
        hits: &mut Vec<BlockId>,
    ) -> Option<u32> {
        if self.rows.num_free() < self.num_rows_needed(slot) {
            return None;
        }
        let block_size = self.config.block_size;
        let candidate = self.find_start(slot, start, hits);
        let request = &self.requests[slot as usize];
        let wanted = request.num_tokens - candidate.num_computed_tokens;
        // If a prompt is forked, its last token is computed in the same step as the children's.
        let prefill = if request.cold.num_fork_children > 0
            && wanted > 1
            && request.num_tokens == request.cold.num_prompt_tokens
        {
            wanted - 1
        } else {
            wanted
        };
        let num_tokens = self.clip(request, candidate.num_computed_tokens, prefill, budget);
        if num_tokens == 0 {
            return None; // a multimodal input waits for a step that has room for all of it
        }
        // Without chunked prefill a prompt runs in one step. Only a request that its own output has made longer than
        // the budget is resumed in chunks after a preemption.
        let may_chunk = self.config.enable_chunked_prefill || wanted > self.config.max_num_batched_tokens;
        let end = candidate.num_computed_tokens + num_tokens;
        let num_blocks = end.div_ceil(block_size) as usize;
        let num_stop_ids = request.cold.params.stop_token_ids.len() + 1;
        if !(may_chunk || wanted <= budget) || !self.steps[set].has_room(num_blocks, num_stop_ids) {
            return None;
        }
        let admission = Admission {
            watermark_blocks: if self.running.is_empty() { 0 } else { self.config.watermark_blocks() },
            full_sequence_tokens: self.full_sequence_tokens(slot),
        };
        let step = self.steps[set].output.step;
        let request = &mut self.requests[slot as usize];
        if !self.kv.allocate_slots(request, hits, end, Some(admission), step) {
            return None;
        }
        self.waiting.take(slot, request);
        if matches!(start, Start::FromCpu) {
            self.kv.swap_in(request, hits.len());
            self.stats.num_swapped_in += 1;
        }
        if let Some(source) = candidate.copy_from {
            self.kv.cpu.copy(source, request.block_table[hits.len()]);
        }
        if matches!(start, Start::FromParent(_)) {
            self.stats.num_forks += 1;
            self.unlink_from_parent(slot);
        }
        self.admit(slot, &candidate, step);
        self.keep_rows(slot);
        let request = &mut self.requests[slot as usize];
        self.steps[set].push(slot, request, Row { num_tokens, block_table_start: Some(0), is_new: true });
        Some(num_tokens)
    }

    /// Find what a waiting request has already; `hits` gets the blocks that it would share.
    fn find_start(&mut self, slot: u32, start: &Start, hits: &mut Vec<BlockId>) -> Candidate {
        let block_size = self.config.block_size;
        let request = &mut self.requests[slot as usize];
        match *start {
            Start::NotReady | Start::FromPrefixCache => {
                let is_looked_up = self.kv.longest_cache_hit(request, request.num_tokens - 1, hits);
                let num_hit_tokens = hits.len() as u32 * block_size;
                Candidate {
                    num_computed_tokens: num_hit_tokens,
                    num_queried_tokens: if is_looked_up { request.num_tokens } else { 0 },
                    num_hit_tokens,
                    copy_from: None,
                }
            }
            Start::FromCpu => {
                let num_computed_tokens = request.num_computed_tokens;
                // Hits only save copies here: no token had to be computed.
                self.kv.longest_cache_hit(request, num_computed_tokens, hits);
                Candidate { num_computed_tokens, num_queried_tokens: 0, num_hit_tokens: 0, copy_from: None }
            }
            Start::FromParent(parent) => {
                let num_shared = request.num_tokens - 1;
                let num_full = (num_shared / block_size) as usize;
                let table = &self.requests[parent as usize].block_table;
                hits.clear();
                hits.extend_from_slice(&table[..num_full]);
                let copy_from = (!num_shared.is_multiple_of(block_size)).then(|| table[num_full]);
                Candidate {
                    num_computed_tokens: num_shared,
                    num_queried_tokens: 0,
                    num_hit_tokens: 0,
                    copy_from,
                }
            }
        }
    }

    /// Move a waiting request that has its blocks to the running list.
    fn admit(&mut self, slot: u32, candidate: &Candidate, step: u64) {
        let request = &mut self.requests[slot as usize];
        request.status = RequestStatus::Running;
        request.num_computed_tokens = candidate.num_computed_tokens;
        request.row = self.rows.take();
        self.running.push(slot);
        if request.cold.admitted_before {
            request.cold.immune_until = match self.config.preemption_immunity_steps {
                0 => 0,
                steps => step + u64::from(steps),
            };
            self.stats.preempted_cache_queries += u64::from(candidate.num_queried_tokens);
            self.stats.preempted_cache_hits += u64::from(candidate.num_hit_tokens);
            return;
        }
        request.cold.admitted_before = true;
        if let Some(group) = &request.cold.group {
            group.begin();
        }
        request.num_cached_tokens = candidate.num_hit_tokens;
        request.cold.num_prompt_tokens_skipped = candidate.num_computed_tokens;
        request.cold.first_scheduled_ns = monotonic_ns();
        self.stats.prefix_cache_queries += u64::from(candidate.num_queried_tokens);
        self.stats.prefix_cache_hits += u64::from(candidate.num_hit_tokens);
        let num_queued_tokens = request.cold.num_queued_tokens;
        self.stats.num_admitted_requests += 1;
        self.stats.num_admitted_tokens += u64::from(num_queued_tokens);
        self.leave_queue_for_good(num_queued_tokens);
    }

    /// Link a new request to the one that it forks, if that one can help.
    pub(crate) fn link_to_parent(&mut self, slot: u32, parent_slot: u32) {
        // Prompts may be long, and this is the scheduler's thread, so they are compared in place.
        self.requests[parent_slot as usize].gather_tokens();
        self.requests[slot as usize].gather_tokens();
        let (child, parent) = (&self.requests[slot as usize], &self.requests[parent_slot as usize]);
        let (child_tokens, parent_tokens) = (child.gathered_tokens(), parent.gathered_tokens());
        let num_shared = child_tokens.len() - 1;
        if num_shared == 0
            || child.cold.extra_keys != parent.cold.extra_keys
            || parent_tokens.get(..num_shared) != Some(&child_tokens[..num_shared])
        {
            return;
        }
        let tenant = Tenant { slot: parent_slot, epoch: parent.epoch };
        self.requests[slot as usize].cold.fork_parent = Some(tenant);
        self.requests[parent_slot as usize].cold.num_fork_children += 1;
    }

    pub(crate) fn unlink_from_parent(&mut self, slot: u32) {
        if let Some(parent) = self.requests[slot as usize].cold.fork_parent.take() {
            self.requests[parent.slot as usize].cold.num_fork_children -= 1;
        }
    }

    /// A request leaves while others wait to fork it: the first of these takes its place.
    pub(crate) fn hand_children_over(&mut self, slot: u32) {
        if self.requests[slot as usize].cold.num_fork_children == 0 {
            return;
        }
        let is_child = |&child: &u32| {
            let parent = self.requests[child as usize].cold.fork_parent;
            parent.is_some_and(|parent| parent.slot == slot)
        };
        let children: Vec<u32> = self.waiting.iter().filter(is_child).collect();
        for &child in &children {
            self.unlink_from_parent(child);
        }
        if let Some((&heir, others)) = children.split_first() {
            for &child in others {
                self.link_to_parent(child, heir);
            }
        }
    }
}
