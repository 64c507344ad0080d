//! The walk over the queue: who is ready, who fits, and with which blocks it begins.

use scheduler::{PauseState, SchedulingPolicy};

use super::{Live, NaiveScheduler, Status, Step};

/// What a request has before it takes new blocks.
struct Beginning {
    num_computed_tokens: usize,
    /// Blocks that others hold or held: the beginning of its block table.
    shared: Vec<u32>,
    /// A block of the parent whose content goes into the first new block.
    copy_from: Option<u32>,
}

/// Where a fork child stands with its parent.
enum Fork {
    /// It waits until the parent is far enough.
    Wait,
    /// It shares the parent's blocks now.
    From(u64),
    /// It is a request like any other.
    Ordinary,
}

impl NaiveScheduler {
    pub(super) fn plan_waiting(&mut self, plan: &mut Step) {
        let mut blocked: Vec<u64> = Vec::new();
        let mut num_tried_past = 0;
        self.count_overtaken();
        let waiting = self.waiting();
        let turns = if self.is_fair() { self.turns_of_waiting(&waiting) } else { Vec::new() };
        for (place, arrival) in waiting.into_iter().enumerate() {
            let turn = turns.get(place).map(|&(turn, _)| turn);
            let has_seat = self.running.len() < self.config.max_num_seqs() && self.num_free_rows() > 0;
            // Each request that comes in needs a block of its own.
            if self.budget_left(plan) == 0 || !plan.has_row_left() || !has_seat || self.pool.free.is_empty() {
                return;
            }
            let limit = self.config.max_times_passed;
            let is_passed_too_often = |other| self.requests[other].times_passed >= limit;
            let may_pass =
                num_tried_past < self.config.max_look_past && !blocked.iter().any(is_passed_too_often);
            if !blocked.is_empty() && !may_pass {
                return;
            }
            if !self.is_ready(arrival, plan) {
                continue;
            }
            num_tried_past += usize::from(!blocked.is_empty());
            if self.admit_if_it_fits(arrival, turn, plan) {
                for &passed in &blocked {
                    self.request(passed).times_passed += 1;
                }
            } else {
                blocked.push(arrival);
            }
        }
    }

    fn count_overtaken(&mut self) {
        let waiting = self.waiting();
        let priority = |arrival: u64| self.requests[&arrival].new.priority;
        let is_overtaken = |pair: &&[u64]| priority(pair[0]) == priority(pair[1]) && pair[0] > pair[1];
        let by_priority = self.config.base.scheduling_policy == SchedulingPolicy::Priority;
        let count = if by_priority { waiting.windows(2).filter(is_overtaken).count() } else { 0 };
        self.num_overtaken += count;
    }

    /// Rows that no request has and that no step in flight names.
    fn num_free_rows(&self) -> usize {
        let num_pending = self.requests.values().filter(|request| request.swap_out_pending).count();
        self.config.max_num_seqs() - self.running.len() - num_pending - self.retiring_rows.len()
    }

    fn is_ready(&mut self, arrival: u64, plan: &Step) -> bool {
        if self.requests[&arrival].status == Status::WaitingForGrammar || self.is_in_flight(arrival) {
            return false;
        }
        if self.pause_state != PauseState::Unpaused && !self.requests[&arrival].was_admitted {
            return false;
        }
        match self.fork(arrival, plan) {
            Fork::Wait => false,
            Fork::From(_) => true,
            Fork::Ordinary => {
                self.request(arrival).parent = None;
                true
            }
        }
    }

    fn admit_if_it_fits(&mut self, arrival: u64, turn: Option<(u64, u64)>, plan: &mut Step) -> bool {
        let is_fork = self.requests[&arrival].parent.is_some();
        let Beginning { num_computed_tokens, shared, copy_from } = self.beginning(arrival, plan);
        let config = &self.config;
        let request = &self.requests[&arrival];
        let wanted = request.tokens.len() - num_computed_tokens;
        let is_prompt = request.tokens.len() == request.new.prompt.len();
        let stops_for_children = self.num_fork_children(arrival) > 0 && is_prompt && wanted > 1;
        let wanted_now = wanted - usize::from(stops_for_children);
        let num_tokens = self.clip(arrival, num_computed_tokens, wanted_now, plan);
        if num_tokens == 0 {
            return false;
        }
        // Without chunks a prompt runs whole; what outgrew every budget by its output is resumed in chunks.
        let outgrew = wanted > config.max_num_batched_tokens();
        if !config.base.enable_chunked_prefill && wanted > self.budget_left(plan) && !outgrew {
            return false;
        }
        let needed = self.num_blocks_for(num_computed_tokens + num_tokens);
        let told: usize = plan.rows.iter().map(|row| row.num_new_blocks).sum();
        if told + needed > config.max_block_ids() {
            return false;
        }
        // All blocks of the known sequence must fit now, although only some are taken; a shared block that
        // no request holds is taken from the free ones too.
        let whole = self.num_blocks_for(request.tokens.len()).max(needed) - shared.len();
        let num_idle = shared.iter().filter(|&&block| self.pool.is_free(block)).count();
        let watermark = (config.base.watermark * f64::from(config.base.num_blocks)) as usize;
        let kept_free = if self.running.is_empty() { 0 } else { watermark };
        if whole + num_idle + kept_free > self.pool.free.len() {
            return false;
        }

        for &block in &shared {
            self.pool.touch(block);
        }
        let num_shared = shared.len();
        self.count_lookup(arrival, is_fork);
        let is_long = wanted > self.config.base.long_prefill_token_threshold as usize;
        let may_be_cut = self.config.base.enable_chunked_prefill;
        let has_threshold = self.config.base.long_prefill_token_threshold > 0;
        if has_threshold && is_long && !may_be_cut && self.requests.len() > 1 {
            self.num_long_and_whole += usize::from(num_tokens == wanted);
        }
        if let Some(turn) = turn {
            self.num_turns_of_others += usize::from(self.requests[&arrival].standing.turn != turn);
            self.take_turn(arrival, turn);
        }
        let request = self.request(arrival);
        let was_swapped = request.status == Status::Swapped;
        if was_swapped || request.status == Status::Preempted {
            request.resumed_in = Some(plan.number);
        }
        request.status = Status::Running;
        request.admitted_in = plan.number;
        request.parent = None;
        request.num_computed_tokens = num_computed_tokens;
        request.blocks = shared;
        request.num_offered_blocks = num_shared;
        if !request.was_admitted {
            request.was_admitted = true;
            request.num_skipped = num_computed_tokens;
            request.num_cached_tokens = if is_fork { 0 } else { num_computed_tokens };
        }
        self.running.push(arrival);
        self.push_row(arrival, num_tokens, 0, plan);

        let blocks = self.requests[&arrival].blocks.clone();
        let cpu_blocks = std::mem::take(&mut self.request(arrival).cpu_blocks);
        // What is in the prefix cache is not even read; if it was to be written in this same step, that is dropped too.
        let unread = &cpu_blocks[..num_shared.min(cpu_blocks.len())];
        self.notes.swap_out.retain(|pair| !unread.contains(&pair.1));
        let missing = cpu_blocks.into_iter().zip(blocks.iter().copied()).skip(num_shared);
        self.notes.swap_in.extend(missing);
        self.notes.copies.extend(copy_from.map(|from| (from, blocks[num_shared])));
        true
    }

    /// What an admission asked the prefix cache for: all its tokens, or nothing.
    fn count_lookup(&mut self, arrival: u64, is_fork: bool) {
        let request = &self.requests[&arrival];
        let reads = self.config.base.enable_prefix_caching && !request.new.skip_reading_prefix_cache;
        let asks = reads && !is_fork && request.status != Status::Swapped;
        if asks {
            self.num_queried[usize::from(request.was_admitted)] += request.tokens.len();
        }
        self.num_unasked += usize::from(!asks);
    }

    fn beginning(&self, arrival: u64, plan: &Step) -> Beginning {
        let block_size = self.config.block_size();
        let request = &self.requests[&arrival];
        if let Fork::From(parent) = self.fork(arrival, plan) {
            let num_computed_tokens = request.tokens.len() - 1;
            let num_full = num_computed_tokens / block_size;
            let parent = &self.requests[&parent];
            let is_partial = !num_computed_tokens.is_multiple_of(block_size);
            return Beginning {
                num_computed_tokens,
                shared: parent.blocks[..num_full].to_vec(),
                copy_from: is_partial.then(|| parent.blocks[num_full]),
            };
        }
        let mut shared = Vec::new();
        if self.config.base.enable_prefix_caching && !request.new.skip_reading_prefix_cache {
            shared = self.pool.longest_prefix(
                &request.new.extra_keys,
                &request.new.inputs,
                &request.tokens,
                block_size,
            );
        }
        if request.status == Status::Swapped {
            // What is on the CPU says how far it was; only copies are saved.
            shared.truncate(request.num_computed_tokens / block_size);
            let num_computed_tokens = request.num_computed_tokens;
            return Beginning { num_computed_tokens, shared, copy_from: None };
        }
        Beginning { num_computed_tokens: shared.len() * block_size, shared, copy_from: None }
    }

    fn fork(&self, arrival: u64, plan: &Step) -> Fork {
        let child = &self.requests[&arrival];
        let Some(parent) = child.parent.map(|parent| &self.requests[&parent]) else {
            return Fork::Ordinary;
        };
        let num_common = child.tokens.len() - 1;
        if parent.status != Status::Running {
            // With output it was far enough once; without, it will be.
            let has_output = parent.tokens.len() > parent.new.prompt.len();
            return if has_output { Fork::Ordinary } else { Fork::Wait };
        }
        // One that was admitted in this very step may begin with blocks that the step only fills: too late for a copy,
        // which is made before.
        if parent.admitted_in < plan.number && computed_before_step(parent, plan) >= num_common {
            Fork::From(parent.arrival)
        } else {
            Fork::Wait
        }
    }

    /// Let a request wait for another, if that one can help.
    pub(super) fn link(&mut self, child: u64, parent: u64) {
        let (new, parent) = (&self.requests[&child].new, &self.requests[&parent]);
        let num_common = new.prompt.len() - 1;
        let helps = num_common > 0
            && (&new.extra_keys, &new.inputs) == (&parent.new.extra_keys, &parent.new.inputs)
            && parent.tokens.starts_with(&new.prompt[..num_common]);
        let parent = parent.arrival;
        self.request(child).parent = Some(parent).filter(|_| helps);
    }

    /// Requests that wait to fork this one.
    pub(super) fn num_fork_children(&self, arrival: u64) -> usize {
        self.requests.values().filter(|request| request.parent == Some(arrival)).count()
    }

    /// A request is about to leave: the first that waits to fork it stands in for it.
    pub(super) fn orphan_children(&mut self, parent: u64) {
        let waiting = self.waiting();
        let is_child = |child: &u64| self.requests[child].parent == Some(parent);
        let children: Vec<u64> = waiting.into_iter().filter(is_child).collect();
        for &child in &children {
            self.request(child).parent = None;
            if child != children[0] {
                self.link(child, children[0]);
            }
        }
    }
}

fn computed_before_step(request: &Live, plan: &Step) -> usize {
    let planned = plan.rows.iter().filter(|row| row.arrival == request.arrival);
    request.num_computed_tokens - planned.map(|row| row.num_tokens).sum::<usize>()
}
