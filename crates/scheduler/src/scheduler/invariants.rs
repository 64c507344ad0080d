//! The invariants that hold between any two calls of the scheduler, checked from its state alone. For tests, and for an
//! idle engine that was started with `RUSTVLLM_CHECK_INVARIANTS`.

use std::collections::HashSet;

use kvblocks::BlockId;

use super::Scheduler;
use crate::{
    config::PreemptionMode,
    request::{NO_ROW, Request, RequestStatus},
};

impl Scheduler {
    /// Check every invariant.
    ///
    /// # Panics
    /// An invariant is broken, which is a bug in this crate; names it.
    pub fn check_invariants(&self) {
        self.kv.pool.check_invariants();
        self.kv.cpu.check_invariants(&self.kv.pool);
        self.waiting.check_invariants();
        self.check_queues();
        self.check_queue_limits();
        self.check_rows();
        self.check_references();
        self.check_steps_in_flight();
        for slot in self.live_slots() {
            self.check_counters(&self.requests[slot as usize], slot);
        }
    }

    fn live_slots(&self) -> impl Iterator<Item = u32> + '_ {
        let queued = self.running.iter().chain(&self.leaving).copied().chain(self.waiting.iter());
        queued.chain(self.parked_beams())
    }

    /// Each live request is in one queue, the one that its status names.
    fn check_queues(&self) {
        let live: HashSet<u32> = self.live_slots().collect();
        let queued = self.num_unfinished_requests() + self.parked_beams().count();
        assert_eq!(live.len(), queued, "a request is in two queues");
        let (num_ids, num_keys) = self.requests.num_names();
        assert_eq!(num_ids, queued, "live requests are in exactly one queue");
        assert_eq!(num_keys, num_ids, "keys and ids name the same requests");
        let status = |slot: u32| self.requests[slot as usize].status;
        assert!(
            self.running.iter().all(|&slot| status(slot) == RequestStatus::Running),
            "the running list holds running requests"
        );
        assert!(
            self.leaving.iter().all(|&slot| status(slot) == RequestStatus::Swapped),
            "who leaves is to be swapped out"
        );
        for slot in self.waiting.iter() {
            assert!(
                status(slot) != RequestStatus::Running && !status(slot).is_finished(),
                "the queue holds waiting requests"
            );
        }
        let (num_adapters, max_loras) = (self.running_adapters().len(), self.config.max_loras as usize);
        assert!(max_loras == 0 || num_adapters <= max_loras, "more adapters run than may");
        let mut num_free = 0;
        for &slot in self.requests.free_slots() {
            assert!(!live.contains(&slot), "the slot of a live request is free");
            num_free += 1;
        }
        assert_eq!(live.len() + num_free, self.requests.num_slots(), "a slot is lost, or free twice");
    }

    /// Requests that wait for their first step are counted, and have a deadline if there is a limit. Others may still
    /// be in the inbox.
    fn check_queue_limits(&self) {
        let (num_queued, num_queued_tokens) = self.count_queue();
        assert!(self.handle.num_queued() >= num_queued, "who waits has a place in the queue");
        assert!(self.handle.num_queued_tokens() >= num_queued_tokens, "so have the tokens");
        let limited: HashSet<u32> = self
            .deadlines
            .tenants()
            .filter(|tenant| self.is_queued(*tenant))
            .map(|tenant| tenant.slot)
            .collect();
        let expected = if self.config.queue_timeout.is_zero() { 0 } else { num_queued as usize };
        assert_eq!(limited.len(), expected, "who waits for its first step has one deadline");
    }

    /// Each row is used by one request, retiring, or free.
    fn check_rows(&self) {
        let mut rows = HashSet::new();
        for slot in self.live_slots() {
            let request = &self.requests[slot as usize];
            let has_row = request.row != NO_ROW;
            let is_waiting = !self.running.contains(&slot) && !self.leaving.contains(&slot);
            assert_ne!(has_row, is_waiting, "who runs has a row, who waits has none");
            assert!(!has_row || rows.insert(request.row), "two requests have one row");
        }
        for row in self.rows.unused().chain(self.beams.kept_rows()) {
            assert!(rows.insert(row), "a free row is in use or free twice");
        }
        assert_eq!(rows.len(), self.config.max_num_seqs as usize, "every row is in use, retiring or free");
        for (step, row) in self.rows.retiring() {
            assert!(step > self.stats.last_updated_step, "row {row} retires although step {step} is done");
        }
    }

    /// Reference counts equal the references in block tables, on both tiers.
    fn check_references(&self) {
        let mut references = vec![0u32; self.config.num_blocks as usize];
        let mut cpu_references = vec![0u32; self.config.num_cpu_blocks as usize];
        for slot in self.live_slots() {
            let request = &self.requests[slot as usize];
            for &block in &request.block_table {
                references[block.0 as usize] += 1;
            }
            for &cpu_block in &request.cold.cpu_blocks {
                cpu_references[cpu_block.0 as usize] += 1;
            }
        }
        for (block, &expected) in references.iter().enumerate().skip(1) {
            let actual = self.kv.pool.ref_count(BlockId(block as u32));
            assert_eq!(actual, expected, "block {block}: reference count and block tables disagree");
        }
        assert!(cpu_references.iter().all(|&count| count <= 1), "two requests have one CPU block");
        let held: u32 = cpu_references.iter().sum();
        let leaving = self.kv.cpu.planned().blocks_to_swap_in.len() as u32;
        assert_eq!(
            held + leaving + self.kv.cpu.num_free(),
            self.config.num_cpu_blocks,
            "a CPU block is lost"
        );
        assert!(
            self.config.preemption_mode == PreemptionMode::Swap || held == 0,
            "nothing is swapped in this mode"
        );
    }

    /// Each request counts its rows in steps in flight.
    fn check_steps_in_flight(&self) {
        let mut rows = vec![0u32; self.requests.num_slots()];
        let mut placeholders = vec![0u32; self.requests.num_slots()];
        for set in self.steps.in_flight() {
            for entry in &self.steps[set].entries {
                let slot = entry.tenant.slot as usize;
                if self.requests[slot].epoch == entry.tenant.epoch {
                    rows[slot] += 1;
                    placeholders[slot] += entry.num_placeholders();
                }
            }
        }
        for slot in self.live_slots() {
            let request = &self.requests[slot as usize];
            assert_eq!(
                u32::from(request.num_steps_in_flight),
                rows[slot as usize],
                "steps in flight are counted"
            );
            let expected = match request.status {
                // It lost its placeholders together with its blocks.
                RequestStatus::Preempted => 0,
                _ => placeholders[slot as usize],
            };
            assert_eq!(request.num_output_placeholders(), expected, "placeholders are what steps will give");
        }
    }

    fn check_counters(&self, request: &Request, slot: u32) {
        assert_eq!(request.all_tokens().len(), request.num_tokens as usize, "num_tokens counts the tokens");
        let named = self.requests.slot_of_id(&request.cold.request_id);
        assert_eq!(named, Some(slot), "the id leads to its request");
        assert!(
            request.num_computed_tokens <= request.num_expected_tokens,
            "no more computed than known or expected"
        );
        assert!(
            request.num_tokens < request.max_total_tokens
                || request.max_total_tokens == request.cold.num_prompt_tokens,
            "a request at its limit has finished"
        );
        assert!(
            request.num_expected_tokens <= request.max_total_tokens.max(request.num_tokens),
            "no token is expected beyond the limit"
        );
        let block_size = self.config.block_size;
        let capacity = request.capacity_tokens(block_size);
        let owns_blocks = matches!(request.status, RequestStatus::Running) || self.leaving.contains(&slot);
        if owns_blocks {
            assert!(request.num_computed_tokens <= capacity, "computed tokens lie in owned blocks");
            // The next step uses what rejected drafts and a withheld sample have left over; the row of a request that
            // is leaving may have been withdrawn.
            let mut slack = 1 + self.config.num_speculative_tokens * self.config.max_steps_in_flight;
            if self.leaving.contains(&slot) {
                slack += self.config.max_num_batched_tokens;
            }
            assert!(capacity < request.num_computed_tokens.max(1) + slack + block_size, "no idle blocks");
        } else {
            assert_eq!(capacity, 0, "who waits has no blocks");
            let in_cpu = request.cold.cpu_blocks.len() as u32;
            assert_eq!(
                in_cpu,
                request.num_computed_tokens.div_ceil(block_size),
                "what is computed of a waiting request is in CPU memory"
            );
        }
        if request.status == RequestStatus::Running && request.slots_left > 0 {
            let position = request.num_computed_tokens;
            let block = request.block_table[(position / block_size) as usize];
            assert_eq!(
                request.next_slot,
                block.0 * block_size + position % block_size,
                "the next slot is where the block table says"
            );
            assert_eq!(
                u32::from(request.slots_left),
                block_size - position % block_size,
                "slots to the block's end"
            );
        }
        assert!(
            request.num_registered_blocks <= request.block_table.len() as u32,
            "registered blocks are owned"
        );
    }
}
