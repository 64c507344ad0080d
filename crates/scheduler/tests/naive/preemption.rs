//! Who gives way when a block is missing, and how: its blocks are recomputed later, or kept in CPU memory.

use scheduler::SchedulingPolicy;

use super::{NaiveScheduler, Status, Step};

impl NaiveScheduler {
    /// The running request that gives up its blocks.
    pub(super) fn choose_victim(&self, step: u64) -> u64 {
        let worse_last = |arrivals: &[u64]| {
            let mut sorted = arrivals.to_vec();
            if self.config.base.scheduling_policy != SchedulingPolicy::Fcfs {
                sorted.sort_by_key(|&arrival| self.queue_key(arrival));
            }
            sorted
        };
        let mut candidates = worse_last(&self.running);
        // The first of all is never taken from: so there is always one that gets ahead.
        if candidates.len() > 1 {
            candidates.remove(0);
        }
        let is_immune = |arrival: &u64| {
            let resumed = self.requests[arrival].resumed_in;
            resumed.is_some_and(|resumed| step <= resumed + self.config.preemption_immunity_steps)
        };
        let not_immune = candidates.iter().rfind(|arrival| !is_immune(arrival));
        *not_immune.or(candidates.last()).expect("a request runs")
    }

    /// Take a victim out of the running list and out of the step.
    pub(super) fn preempt(&mut self, victim: u64, plan: &mut Step) {
        self.running.retain(|&running| running != victim);
        if let Some(place) = plan.rows.iter().position(|row| row.arrival == victim) {
            let row = plan.rows.remove(place);
            self.num_taken_out += 1;
            // As if it had had no turn: nothing will compute what it offered in this step.
            for block in self.requests[&victim].blocks.clone() {
                self.num_withdrawn += usize::from(self.pool.forget_if_made_in(block, plan.number));
            }
            let request = self.request(victim);
            request.num_computed_tokens -= row.num_tokens;
            request.num_offered_blocks = row.offered_before;
        }
        let request = self.request(victim);
        request.is_held = false;
        request.next_drafts.clear();
        request.num_preemptions += 1;
        if !self.config.swap || self.requests[&victim].num_computed_tokens == 0 {
            self.recompute(victim);
        } else if self.is_in_flight(victim) {
            let request = self.request(victim);
            request.status = Status::Swapped;
            request.swap_out_pending = true;
        } else {
            self.swap_out(victim, plan.number);
        }
    }

    pub(super) fn is_swap_out_pending(&self) -> bool {
        self.requests.values().any(|request| request.swap_out_pending)
    }

    /// Swap out who has no step in flight any more.
    pub(super) fn swap_out_pending(&mut self, plan: &Step) {
        let pending = self.requests.values().filter(|request| request.swap_out_pending);
        // There is one at most: none is preempted while there is.
        for arrival in pending.map(|request| request.arrival).collect::<Vec<_>>() {
            if !self.is_in_flight(arrival) {
                self.request(arrival).swap_out_pending = false;
                self.swap_out(arrival, plan.number);
            }
        }
    }

    fn swap_out(&mut self, victim: u64, step: u64) {
        let num_blocks = self.num_blocks_for(self.requests[&victim].num_computed_tokens);
        let in_use: Vec<u32> =
            self.requests.values().flat_map(|request| request.cpu_blocks.iter().copied()).collect();
        let free = (0..self.config.num_cpu_blocks as u32).filter(|block| !in_use.contains(block));
        let cpu_blocks: Vec<u32> = free.take(num_blocks).collect();
        if cpu_blocks.len() < num_blocks {
            self.recompute(victim);
            return;
        }
        let pairs = self.requests[&victim].blocks.iter().copied().zip(cpu_blocks.iter().copied());
        self.notes.swap_out.extend(pairs);
        self.give_up_blocks_and_row(victim);
        let request = self.request(victim);
        request.cpu_blocks = cpu_blocks;
        request.status = Status::Swapped;
        request.swapped_out_in = step;
    }

    fn recompute(&mut self, victim: u64) {
        self.register_late(victim);
        // A row in flight that gives a token computes all that is known now. It counts as the next step's.
        if self.rows_in_flight(victim).any(|row| row.sampled && !row.is_withheld) {
            let request = &self.requests[&victim];
            let (num_tokens, num_before) = (request.tokens.len(), request.num_offered_blocks);
            self.register(victim, num_tokens, self.last_step + 1);
            self.num_filled_in_flight += self.requests[&victim].num_offered_blocks - num_before;
        }
        self.give_up_blocks_and_row(victim);
        self.forget_progress(victim);
    }

    fn give_up_blocks_and_row(&mut self, victim: u64) {
        self.register_late(victim);
        self.free_blocks(victim);
        self.retire_row();
        let request = self.request(victim);
        let id = request.new.id.clone();
        self.notes.preempted.push(id);
        if self.is_fair() {
            self.bring_turn(victim);
        }
    }

    /// All requests give up their blocks and are computed again.
    pub(super) fn preempt_all(&mut self) {
        for victim in std::mem::take(&mut self.running).into_iter().rev() {
            let request = self.request(victim);
            request.is_held = false;
            request.next_drafts.clear();
            request.num_preemptions += 1;
            self.recompute(victim);
        }
        let swapped = self.requests.values().filter(|request| request.status == Status::Swapped);
        for arrival in swapped.map(|request| request.arrival).collect::<Vec<_>>() {
            if self.requests[&arrival].swap_out_pending {
                self.request(arrival).swap_out_pending = false;
                self.recompute(arrival);
            } else {
                self.forget_progress(arrival);
            }
        }
    }

    pub(super) fn forget_progress(&mut self, arrival: u64) {
        self.discard_swapped(arrival);
        let request = self.request(arrival);
        request.status = Status::Preempted;
        request.num_computed_tokens = 0;
        request.life += 1;
    }

    /// Copies out that are planned and not on their way are dropped.
    pub(super) fn discard_swapped(&mut self, arrival: u64) {
        let discarded = std::mem::take(&mut self.request(arrival).cpu_blocks);
        self.notes.swap_out.retain(|pair| !discarded.contains(&pair.1));
    }

    /// The tail of a chain is freed first, so that it is evicted before its head.
    pub(super) fn free_blocks(&mut self, arrival: u64) {
        for block in std::mem::take(&mut self.request(arrival).blocks).into_iter().rev() {
            self.pool.free(block);
        }
        self.request(arrival).num_offered_blocks = 0;
    }

    /// A row is used again when every step that may name it has been updated.
    pub(super) fn retire_row(&mut self) {
        if !self.in_flight.is_empty() {
            self.retiring_rows.push(self.last_step);
        }
    }
}
