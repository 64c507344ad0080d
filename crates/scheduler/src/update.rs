//! `update_from_output`: what a step's tokens change. Append, stop, free, emit.

use crate::{
    clock::monotonic_ns,
    output::{EngineCoreOutput, FinishReason, RequestError, SchedulerOutput},
    request::{Request, RequestStatus},
    scheduler::{Scheduler, SchedulerError},
};

/// What appending one token led to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stop {
    No,
    Token { stop_reason: i32 },
    Length,
}

impl Scheduler {
    /// Apply the tokens of the oldest step in flight.
    ///
    /// `sampled_token_ids` holds `num_columns` ids for each sampled request of the step, in the order of
    /// `logits_indices`; −1 ends a row. A sampled row without a token ends its request with an error (its
    /// logits were not numbers). Returns how many requests finished.
    ///
    /// # Errors
    /// When the step is not the oldest in flight or the rows do not match; nothing has changed then.
    pub fn update_from_output(
        &mut self,
        output: &SchedulerOutput,
        sampled_token_ids: &[i32],
        num_columns: usize,
    ) -> Result<usize, SchedulerError> {
        let set = self.oldest_step(output)?;
        let expected = self.steps[set].output.num_sampled;
        let num_ids = (expected as usize).checked_mul(num_columns);
        if num_ids != Some(sampled_token_ids.len()) || num_columns == 0 && expected > 0 {
            let got = sampled_token_ids.len() / num_columns.max(1);
            return Err(SchedulerError::WrongRows { step: output.step, expected, got });
        }
        self.drain_inbox();
        let now = monotonic_ns();
        let entries = std::mem::take(&mut self.steps[set].entries);
        let mut rows = sampled_token_ids.chunks_exact(num_columns.max(1));
        let mut num_finished = 0;
        for entry in &entries {
            let row = if entry.sampled { rows.next().unwrap_or(&[]) } else { &[] };
            let request = &mut self.requests[entry.slot as usize];
            if request.epoch != entry.epoch {
                continue; // It left while the step ran.
            }
            let status = if entry.sampled {
                self.append_tokens(entry.slot, row, now)
            } else if request.num_computed_tokens == request.num_tokens {
                // The whole prompt is computed and no token was asked for.
                self.emit(entry.slot, -1, Some(FinishReason::Length), -1, RequestError::None, now);
                Some(RequestStatus::FinishedLengthCapped)
            } else {
                None
            };
            if let Some(status) = status {
                self.release(entry.slot, status);
                num_finished += 1;
            }
        }
        self.steps[set].entries = entries;
        self.close_step(set, num_finished);
        Ok(num_finished)
    }

    /// End a step whose execution failed: its requests finish with an error, what they registered is withdrawn.
    ///
    /// # Errors
    /// When the step is not the oldest in flight.
    pub fn fail_step(&mut self, output: &SchedulerOutput) -> Result<usize, SchedulerError> {
        let set = self.oldest_step(output)?;
        let now = monotonic_ns();
        let entries = std::mem::take(&mut self.steps[set].entries);
        // Before aborts are applied: a request that leaves now would take its block table with it and leave its
        // registrations behind. All withdrawals come first: a block that several requests of the step share has one registration.
        for entry in &entries {
            let request = &self.requests[entry.slot as usize];
            if request.epoch == entry.epoch {
                self.kv.withdraw(request, output.step);
            }
        }
        self.drain_inbox();
        let mut num_finished = 0;
        for entry in &entries {
            if self.requests[entry.slot as usize].epoch == entry.epoch {
                self.emit(entry.slot, -1, Some(FinishReason::Error), -1, RequestError::StepFailed, now);
                self.release(entry.slot, RequestStatus::FinishedError);
                num_finished += 1;
            }
        }
        self.steps[set].entries = entries;
        self.close_step(set, num_finished);
        Ok(num_finished)
    }

    fn oldest_step(&self, output: &SchedulerOutput) -> Result<usize, SchedulerError> {
        let oldest = self.in_flight.front().copied();
        match oldest {
            Some(set) if self.steps[set].output == *output => Ok(set),
            _ => Err(SchedulerError::WrongStep {
                step: output.step,
                oldest_step: oldest.map(|set| self.steps[set].output.step),
            }),
        }
    }

    /// Append a row's tokens one at a time; what follows a stop is dropped.
    fn append_tokens(&mut self, slot: u32, row: &[i32], now: u64) -> Option<RequestStatus> {
        if row.first().is_none_or(|&token_id| token_id < 0) {
            // What it computed is as little a number as its logits: nobody may find it.
            self.kv.forget(&self.requests[slot as usize]);
            self.emit(slot, -1, Some(FinishReason::Error), -1, RequestError::NoToken, now);
            return Some(RequestStatus::FinishedError);
        }
        for &token_id in row.iter().take_while(|&&token_id| token_id >= 0) {
            let request = &mut self.requests[slot as usize];
            request.token_ids.push(token_id);
            request.num_tokens += 1;
            request.last_token_id = token_id;
            let (status, reason, stop_reason) = match check_stop(request, token_id) {
                Stop::No => {
                    self.emit(slot, token_id, None, -1, RequestError::None, now);
                    continue;
                }
                Stop::Token { stop_reason } => {
                    (RequestStatus::FinishedStopped, FinishReason::Stop, stop_reason)
                }
                Stop::Length => (RequestStatus::FinishedLengthCapped, FinishReason::Length, -1),
            };
            self.emit(slot, token_id, Some(reason), stop_reason, RequestError::None, now);
            return Some(status);
        }
        None
    }

    /// Inlined, so that a record's fields go straight to the ring: copied as a whole right after its fields were
    /// written one by one, it would wait for every store to reach the cache.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a fifth of a step, measured")]
    pub(crate) fn emit(
        &mut self,
        slot: u32,
        new_token_id: i32,
        finish_reason: Option<FinishReason>,
        stop_reason: i32,
        error: RequestError,
        timestamp_ns: u64,
    ) {
        let request = &self.requests[slot as usize];
        let record = EngineCoreOutput {
            key: request.key,
            new_token_id,
            finish_reason,
            stop_reason,
            num_cached_tokens: request.num_cached_tokens,
            first_scheduled_ns: request.first_scheduled_ns,
            timestamp_ns,
            error,
        };
        self.offer(record);
    }

    /// Into the egress, or behind what already waits for room in it.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "see emit")]
    pub(crate) fn offer(&mut self, record: EngineCoreOutput) {
        if !self.spill.is_empty() || !self.egress.has_room() {
            self.spill.push_back(record);
        } else {
            self.egress.push(record);
        }
    }

    /// Take a finished request out of everything; `running` is filtered in one pass afterwards.
    pub(crate) fn release(&mut self, slot: u32, status: RequestStatus) {
        debug_assert!(status.is_finished(), "only finished requests are released");
        let request = &mut self.requests[slot as usize];
        self.kv.free(request);
        let was_running = request.status == RequestStatus::Running;
        request.status = status;
        request.epoch = request.epoch.wrapping_add(1);
        self.by_key.remove(&request.key);
        self.by_id.remove(&request.cold.request_id);
        request.token_ids = Vec::new();
        request.block_table = Vec::new();
        request.cold.block_hashes = Vec::new();
        if was_running {
            self.finished_rows.push((request.row, std::mem::take(&mut request.cold.request_id)));
        }
        self.retire_row(slot);
        self.free_slots.push(slot);
        self.stats.num_finished += 1;
    }

    fn close_step(&mut self, set: usize, num_finished: usize) {
        if num_finished > 0 {
            let requests = &self.requests;
            self.running.retain(|&slot| requests[slot as usize].status == RequestStatus::Running);
        }
        self.in_flight.pop_front();
        let updated = self.steps[set].output.step;
        while self.retiring_rows.front().is_some_and(|&(step, _)| step <= updated) {
            if let Some((_, row)) = self.retiring_rows.pop_front() {
                self.free_rows.push(row);
            }
        }
        self.stats.last_updated_step = updated;
        self.publish();
    }
}

/// The stop rules, in this order: EOS, stop token, length. EOS and stop tokens below `min_tokens` are
/// masked by the sampler, so one that arrives is meant.
fn check_stop(request: &Request, token_id: i32) -> Stop {
    if token_id == request.eos_token_id {
        return Stop::Token { stop_reason: -1 };
    }
    if request.has_stop_token_ids && request.cold.params.stop_token_ids.contains(&token_id) {
        return Stop::Token { stop_reason: token_id };
    }
    if request.num_tokens >= request.max_total_tokens {
        return Stop::Length;
    }
    Stop::No
}
