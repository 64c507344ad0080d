//! What a step's tokens change, what a failure undoes, and how a request leaves.

use super::{Leave, Live, NaiveScheduler, Row, Status};

impl NaiveScheduler {
    /// Apply the tokens of the oldest step in flight: a list for each sampled row, −1 or its end after the last
    /// token; an empty one ends its request. `drafts` are guesses of what follows, or empty.
    ///
    /// # Panics
    /// If the lists do not belong to that step.
    pub fn update(&mut self, step: u64, tokens: &[Vec<i32>], drafts: &[Vec<i32>]) {
        self.drain_inbox();
        let done = self.in_flight.remove(0);
        assert_eq!(done.number, step, "steps are updated in their order");
        let num_sampled = done.rows.iter().filter(|row| row.sampled).count();
        assert_eq!(tokens.len(), num_sampled, "a list for each sampled row");
        let mut tokens = tokens.iter();
        let mut drafts = drafts.iter();
        for row in &done.rows {
            let (row_tokens, row_drafts) =
                if row.sampled { (tokens.next(), drafts.next()) } else { (None, None) };
            let Some(request) = self.requests.get(&row.arrival) else { continue };
            if row.is_withheld {
                continue;
            }
            let Some(row_tokens) = row_tokens else {
                let is_computed = request.num_computed_tokens == request.new.prompt.len();
                if request.new.max_tokens == 0 && is_computed && !self.is_in_flight(row.arrival) {
                    self.finish(row.arrival);
                }
                continue;
            };
            let generated: Vec<i32> = row_tokens.iter().copied().take_while(|&token| token >= 0).collect();
            self.apply(row, &generated);
            let is_sync = !self.config.is_async();
            if let Some(request) = self.requests.get_mut(&row.arrival)
                && let Some(row_drafts) = row_drafts
                && is_sync
                && request.status == Status::Running
            {
                let known = row_drafts.iter().copied().take_while(|&token| token >= 0);
                request.next_drafts = known.collect();
            }
        }
        self.retiring_rows.retain(|&newest| newest > step);
    }

    fn apply(&mut self, row: &Row, generated: &[i32]) {
        if generated.is_empty() {
            // What it computed is as little a number as its logits.
            self.forget_content(row.arrival);
            self.leave(row.arrival, Leave::Failed);
            return;
        }
        let num_rejected = row.num_drafts + 1 - generated.len();
        let request = self.request(row.arrival);
        // Else it was recomputed meanwhile, and nothing that this row computed counts any more.
        if request.life == row.life {
            request.num_computed_tokens -= num_rejected;
        }
        for &token in generated {
            self.request(row.arrival).tokens.push(token);
            let request = &self.requests[&row.arrival];
            if request.new.eos_token_id == Some(token)
                || request.new.stop_token_ids.contains(&token)
                || request.tokens.len() >= request.max_total_tokens(&self.config)
            {
                self.finish(row.arrival);
                return;
            }
        }
    }

    /// No request may find what this one has computed; of one without blocks, whatever has its content.
    fn forget_content(&mut self, arrival: u64) {
        let request = self.requests[&arrival].clone();
        for block in &request.blocks {
            self.pool.forget(*block);
        }
        if request.status == Status::Preempted {
            let block_size = self.config.block_size();
            for num_blocks in (1..=request.tokens.len() / block_size).rev() {
                let prefix = &request.tokens[..num_blocks * block_size];
                while let Some(block) = self.pool.find(&request.new.extra_keys, &request.new.inputs, prefix) {
                    self.pool.forget(block);
                }
            }
        }
    }

    /// The oldest step failed, and with it every step behind it.
    ///
    /// # Panics
    /// If `step` is not the oldest in flight.
    pub fn fail(&mut self, step: u64) {
        assert_eq!(self.in_flight[0].number, step, "the oldest step fails first");
        // The newest registration first.
        let unsettled = self.pool.contents.iter().enumerate().filter_map(|(block, content)| {
            content
                .as_ref()
                .filter(|content| content.step >= step)
                .map(|content| (content.number, block as u32))
        });
        let mut unsettled: Vec<(u64, u32)> = unsettled.collect();
        unsettled.sort_unstable();
        for (_, block) in unsettled.into_iter().rev() {
            self.pool.forget(block);
        }
        self.drain_inbox();
        for row in self.in_flight.iter().flat_map(|step| step.rows.clone()).collect::<Vec<_>>() {
            if self.requests.contains_key(&row.arrival) {
                self.leave(row.arrival, Leave::Failed);
            }
        }
        let lost = self
            .requests
            .values()
            .filter(|request| request.status == Status::Swapped && request.swapped_out_in >= step);
        for arrival in lost.map(|request| request.arrival).collect::<Vec<_>>() {
            self.forget_progress(arrival);
        }
        self.in_flight.clear();
        self.retiring_rows.clear();
    }

    /// End those of the named requests that wait for their first step.
    pub fn end_overdue(&mut self, is_due: impl Fn(&str) -> bool) -> usize {
        self.drain_inbox();
        let overdue = |request: &&Live| !request.was_admitted && is_due(&request.new.id);
        let mut overdue: Vec<u64> =
            self.requests.values().filter(overdue).map(|request| request.arrival).collect();
        overdue.sort_unstable();
        for &arrival in &overdue {
            self.leave(arrival, Leave::Failed);
        }
        overdue.len()
    }

    fn finish(&mut self, arrival: u64) {
        self.register_late(arrival);
        self.leave(arrival, Leave::Finished);
    }

    /// Full blocks whose tokens became known after they were scheduled: what updated steps computed can be found.
    pub(super) fn register_late(&mut self, arrival: u64) {
        let request = &self.requests[&arrival];
        if request.blocks.is_empty() {
            return;
        }
        let num_tokens = self.num_computed_for_sure(arrival).min(request.tokens.len());
        // No step that may fail computes it: step 0 was over before the first.
        self.register(arrival, num_tokens, 0);
    }

    /// Out of everything.
    pub(super) fn leave(&mut self, arrival: u64, how: Leave) {
        let request = self.requests[&arrival].clone();
        self.orphan_children(arrival);
        if self.is_fair() {
            self.settle(arrival, request.waits());
        }
        self.discard_swapped(arrival);
        self.free_blocks(arrival);
        if request.status == Status::Running || request.swap_out_pending {
            self.notes.finished.push(request.new.id.clone());
            self.retire_row();
        }
        self.running.retain(|&running| running != arrival);
        self.requests.remove(&arrival);
        self.left.push((how, request));
    }
}
