//! The turns of running requests: each catches up with its tokens, in the order of admission.

use super::{NaiveScheduler, Row, Step};

impl NaiveScheduler {
    pub(super) fn plan_running(&mut self, plan: &mut Step) {
        let mut turn = 0;
        let mut one_gave_up = false;
        'turns: while turn < self.running.len() && self.budget_left(plan) > 0 && plan.has_row_left() {
            let arrival = self.running[turn];
            let num_tokens = self.wanted(arrival, plan);
            if num_tokens == 0 {
                turn += 1;
                continue;
            }
            while self.num_missing_blocks(arrival, num_tokens) > self.pool.free.len() {
                // Blocks that a request is about to give up are worth waiting for: no further victim.
                if self.is_swap_out_pending() {
                    return;
                }
                let victim = self.choose_victim(plan.number);
                let place = self.running.iter().position(|&running| running == victim).expect("it runs");
                if place < turn {
                    turn -= 1;
                }
                self.preempt(victim, plan);
                if victim == arrival {
                    // It was the worst; the next one is in its place now.
                    one_gave_up = true;
                    continue 'turns;
                }
            }
            let num_known_blocks = self.requests[&arrival].blocks.len();
            self.push_row(arrival, num_tokens, num_known_blocks, plan);
            self.num_behind_who_gave_up += usize::from(one_gave_up);
            turn += 1;
        }
    }

    /// Tokens that a running request runs in this step.
    fn wanted(&self, arrival: u64, plan: &Step) -> usize {
        let request = &self.requests[&arrival];
        if request.is_held {
            return 0;
        }
        let placeholders = self.num_output_placeholders(arrival);
        let known_and_coming = request.tokens.len() + placeholders;
        let max_total = request.max_total_tokens(&self.config);
        if placeholders > 0 && self.config.base.pipeline_stages > 1 {
            return 0; // Its next step begins with the token that comes.
        }
        if placeholders > 0 && known_and_coming >= max_total {
            return 0; // What is in flight ends it, or shows that there is room left.
        }
        let computed = request.num_computed_tokens;
        let wanted = known_and_coming - computed;
        // The last token of a prompt that is to be forked is computed together with the children's.
        let shared = request.new.prompt.len() - 1;
        let stops_for_children = self.num_fork_children(arrival) > 0 && computed < shared;
        let wanted = if stops_for_children { wanted.min(shared - computed) } else { wanted };
        self.clip(arrival, computed, wanted, plan)
    }

    fn num_missing_blocks(&self, arrival: u64, num_tokens: usize) -> usize {
        let request = &self.requests[&arrival];
        let needed = self.num_blocks_for(request.num_computed_tokens + num_tokens);
        needed.saturating_sub(request.blocks.len())
    }

    /// Give a running request the blocks for its next tokens, and put it into the step. `num_known_blocks` of its
    /// block table are known to the worker.
    pub(super) fn push_row(
        &mut self,
        arrival: u64,
        num_tokens: usize,
        num_known_blocks: usize,
        plan: &mut Step,
    ) {
        let new_blocks = self.pool.allocate(self.num_missing_blocks(arrival, num_tokens));
        let known_and_coming = self.requests[&arrival].tokens.len() + self.num_output_placeholders(arrival);
        let max_total = self.requests[&arrival].max_total_tokens(&self.config);
        let block_size = self.config.block_size();
        let request = self.request(arrival);
        // A decode inside a block has nothing new to offer. What it filled before may have become known since; that
        // waits for the next border.
        let is_plain_decode = num_known_blocks > 0
            && request.num_computed_tokens + 1 == known_and_coming
            && known_and_coming < max_total;
        let is_inside_block =
            new_blocks.is_empty() && request.num_computed_tokens % block_size + 1 < block_size;
        request.blocks.extend(new_blocks);
        let end = request.num_computed_tokens + num_tokens;
        let sampled = end >= known_and_coming && known_and_coming < max_total;
        plan.rows.push(Row {
            arrival,
            life: request.life,
            num_tokens,
            computed_before: request.num_computed_tokens,
            sampled,
            num_drafts: 0,
            is_withheld: false,
            num_new_blocks: request.blocks.len() - num_known_blocks,
            offered_before: request.num_offered_blocks,
        });
        request.num_computed_tokens = end;
        let known_end = end.min(request.tokens.len());
        if !(is_plain_decode && is_inside_block) {
            self.register(arrival, known_end, plan.number);
        }
    }

    /// Drafts take what everything else has left: of the budget, and of the blocks as long as more are free than
    /// requests run. Planned for one step, they guess what follows the newest token: used or not, they are stale
    /// after it.
    pub(super) fn plan_drafts(&mut self, plan: &mut Step) {
        for index in 0..plan.rows.len() {
            let arrival = plan.rows[index].arrival;
            let drafts = std::mem::take(&mut self.request(arrival).next_drafts).len();
            let expected = self.requests[&arrival].tokens.len()
                + self.num_output_placeholders(arrival)
                + usize::from(plan.rows[index].sampled);
            let room = self.requests[&arrival].max_total_tokens(&self.config).saturating_sub(expected);
            let mut num_drafts = 0;
            while num_drafts < drafts.min(room) && self.budget_left(plan) > 0 {
                if self.num_missing_blocks(arrival, 1) > 0 {
                    if self.pool.free.len() <= self.running.len() {
                        break;
                    }
                    let block = self.pool.allocate(1);
                    self.request(arrival).blocks.extend(block);
                    plan.rows[index].num_new_blocks += 1;
                }
                self.request(arrival).num_computed_tokens += 1;
                plan.rows[index].num_tokens += 1;
                num_drafts += 1;
            }
            self.num_cut_drafts += drafts - num_drafts;
            plan.rows[index].num_drafts = num_drafts;
            if self.config.is_async() && plan.rows[index].sampled {
                self.request(arrival).next_drafts = vec![-1; self.config.num_speculative_tokens];
            }
        }
    }
}
