//! `update_from_output`: what a step's tokens change. Append, stop, free, emit.

use crate::{
    clock::monotonic_ns,
    logprobs::LogprobRows,
    output::{EngineCoreOutput, FinishReason, RequestError, SchedulerOutput},
    prompt_logprobs::PromptLogprobRows,
    request::{Request, RequestStatus},
    scheduler::{Scheduler, SchedulerError},
    step::Entry,
};

/// In a row of sampled ids: the grammar did not take what was sampled.
pub const REJECTED_BY_GRAMMAR: i32 = -2;

/// In a row of sampled ids: a logits processor of the request raised an error.
pub const REJECTED_BY_PROCESSOR: i32 = -3;

/// What appending one token led to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stop {
    No,
    Token { stop_reason: i32 },
    Length,
}

/// Rows of `num_columns` ids, one for each sampled request; −1 ends a row.
#[derive(Clone, Copy, Debug)]
pub struct TokenRows<'a> {
    /// Row after row.
    pub token_ids: &'a [i32],
    /// Ids per row.
    pub num_columns: usize,
}

impl<'a> TokenRows<'a> {
    /// No rows.
    pub const NONE: TokenRows<'static> = TokenRows { token_ids: &[], num_columns: 0 };

    /// One id per row.
    #[must_use]
    pub fn column(token_ids: &'a [i32]) -> Self {
        Self { token_ids, num_columns: 1 }
    }

    /// The ids of a row before its end.
    fn row(&self, index: usize) -> &'a [i32] {
        let start = index * self.num_columns;
        let row = &self.token_ids[start..start + self.num_columns];
        let length = row.iter().position(|&token_id| token_id < 0).unwrap_or(row.len());
        &row[..length]
    }

    /// The first id of a row, which may be one of the negative ones.
    fn first(&self, index: usize) -> i32 {
        self.token_ids[index * self.num_columns]
    }

    fn check(&self, output: &SchedulerOutput) -> Result<(), SchedulerError> {
        let expected = output.num_sampled;
        let num_ids = (expected as usize).checked_mul(self.num_columns);
        if num_ids == Some(self.token_ids.len()) && (self.num_columns > 0 || expected == 0) {
            return Ok(());
        }
        let got = self.token_ids.len() / self.num_columns.max(1);
        Err(SchedulerError::WrongRows { step: output.step, expected, got })
    }
}

impl Scheduler {
    /// Apply the tokens of the oldest step in flight.
    ///
    /// `sampled` has a row for each sampled request of the step, in the order of `sampled_rows`: with drafts, those
    /// that were accepted and one more. A row without a token ends its request with an error (its logits were not
    /// numbers, or, when it begins with [`REJECTED_BY_GRAMMAR`], its grammar did not take the token, or, with
    /// [`REJECTED_BY_PROCESSOR`], a logits processor of its own failed). Returns how many requests finished.
    ///
    /// # Errors
    /// When the step is not the oldest in flight or the rows do not match; nothing has changed then.
    pub fn update_from_output(
        &mut self,
        output: &SchedulerOutput,
        sampled: TokenRows<'_>,
    ) -> Result<usize, SchedulerError> {
        self.update_with_drafts(output, sampled, TokenRows::NONE)
    }

    /// The same, with drafts for the next step of each sampled request: as many rows, of at most
    /// `num_speculative_tokens` ids. Only when steps do not overlap; else the worker keeps its drafts to itself.
    ///
    /// # Errors
    /// As for [`update_from_output`](Self::update_from_output), and when there may be no such drafts.
    pub fn update_with_drafts(
        &mut self,
        output: &SchedulerOutput,
        sampled: TokenRows<'_>,
        drafts: TokenRows<'_>,
    ) -> Result<usize, SchedulerError> {
        self.update_with_logprobs(output, sampled, drafts, LogprobRows::NONE, PromptLogprobRows::NONE)
    }

    /// The same, with log-probabilities of those tokens, and of those places of prompts, whose requests asked for them.
    ///
    /// # Errors
    /// As for [`update_with_drafts`](Self::update_with_drafts), and when they are not of what was sampled, or not of all
    /// places of prompts that the step was asked for.
    pub fn update_with_logprobs(
        &mut self,
        output: &SchedulerOutput,
        sampled: TokenRows<'_>,
        drafts: TokenRows<'_>,
        logprobs: LogprobRows<'_>,
        prompt_logprobs: PromptLogprobRows<'_>,
    ) -> Result<usize, SchedulerError> {
        let set = self.oldest_step(output)?;
        sampled.check(output)?;
        logprobs.check(output, sampled)?;
        let step = &mut self.steps[set];
        prompt_logprobs.check(output, &step.prompt_spans, &mut step.buffers)?;
        let limit = if self.config.max_steps_in_flight > 1 { 0 } else { self.config.num_speculative_tokens };
        if drafts.num_columns > 0 {
            drafts.check(output)?;
            if drafts.num_columns > limit as usize {
                return Err(SchedulerError::TooManyDrafts { got: drafts.num_columns, limit });
            }
        }
        self.drain_inbox();
        if output.num_prompt_logprobs > 0 {
            self.emit_prompt_logprobs(set, prompt_logprobs);
        }
        let now = monotonic_ns();
        let entries = std::mem::take(&mut self.steps[set].entries);
        self.events.updated_step = output.step;
        let one_each = sampled.num_columns == 1 && drafts.num_columns == 0 && logprobs.is_empty();
        let one_each = one_each && !self.events.with_tokens; // those are recorded one by one
        let mut num_finished = 0;
        let (mut done, mut sample) = (0, 0);
        while done < entries.len() {
            if one_each {
                let count = self.append_decodes(&entries[done..], &sampled.token_ids[sample..], now);
                done += count;
                sample += count;
            }
            let Some(entry) = entries.get(done) else { break };
            num_finished += usize::from(self.apply(entry, sample, sampled, drafts, logprobs, now));
            done += 1;
            sample += usize::from(entry.sampled);
        }
        self.steps[set].entries = entries;
        self.meter_step(now);
        self.close_step(set, num_finished);
        Ok(num_finished)
    }

    /// The path that nearly every row takes: one token that ends nothing, for the leading `entries`. Returns how many
    /// that were.
    fn append_decodes(&mut self, entries: &[Entry], token_ids: &[i32], now: u64) -> usize {
        if !self.spill.is_empty() {
            return 0;
        }
        let mut egress = self.egress.decodes(now);
        let mut meter = self.meter.decodes(&self.handle.shared.metrics, now);
        let mut done = 0;
        for (entry, &token_id) in entries.iter().zip(token_ids).take(egress.room) {
            let request = &mut self.requests[entry.tenant.slot as usize];
            if request.epoch != entry.tenant.epoch
                || !entry.sampled
                || entry.num_draft_tokens > 0
                || request.status != RequestStatus::Running
                || !request.is_introduced
                || request.num_tokens + 1 >= request.max_total_tokens
                || token_id < 0
                || token_id == request.eos_token_id
                || request.has_stop_token_ids
            {
                break;
            }
            request.num_steps_in_flight -= 1;
            request.push_token(token_id);
            egress.push(request.key, token_id);
            meter.count(entry.tenant.slot);
            done += 1;
        }
        meter.finish(done);
        self.stats.num_generation_tokens += done as u64;
        done
    }

    /// Any row; `true` when its request finished.
    fn apply(
        &mut self,
        entry: &Entry,
        sample: usize,
        sampled: TokenRows<'_>,
        drafts: TokenRows<'_>,
        logprobs: LogprobRows<'_>,
        now: u64,
    ) -> bool {
        let slot = entry.tenant.slot;
        let request = &mut self.requests[slot as usize];
        if request.epoch != entry.tenant.epoch {
            return false; // It left while the step ran.
        }
        request.num_steps_in_flight -= 1;
        let status = if entry.sampled {
            self.append_row(entry, sample, sampled, logprobs, now)
        } else {
            self.report_prompt_progress(entry, now);
            self.close_prefill(slot, now)
        };
        if let Some(status) = status {
            self.register_settled(slot);
            self.release(slot, status);
            return true;
        }
        if drafts.num_columns > 0 && entry.sampled {
            self.take_drafts(slot, drafts.row(sample));
        }
        false
    }

    pub(crate) fn oldest_step(&self, output: &SchedulerOutput) -> Result<usize, SchedulerError> {
        let oldest = self.in_flight.front().copied();
        match oldest {
            Some(set) if self.steps[set].output == *output => Ok(set),
            Some(set) if self.steps[set].output.step == output.step => {
                Err(SchedulerError::OutdatedOutput { step: output.step })
            }
            _ => Err(SchedulerError::WrongStep {
                step: output.step,
                oldest_step: oldest.map(|set| self.steps[set].output.step),
            }),
        }
    }

    /// A row that was not sampled, of a request that tells how far its prompt is.
    fn report_prompt_progress(&mut self, entry: &Entry, now: u64) {
        let request = &self.requests[entry.tenant.slot as usize];
        if !request.cold.reports_prompt_progress || request.is_introduced {
            return;
        }
        let num_computed_tokens = entry.num_computed_tokens + entry.num_scheduled_tokens;
        self.offer(EngineCoreOutput {
            num_cached_tokens: request.num_cached_tokens,
            first_scheduled_ns: request.cold.first_scheduled_ns,
            ..EngineCoreOutput::progress(request.key, num_computed_tokens, now)
        });
    }

    /// A row that was not sampled: the end of a request that only wants its prompt computed, or a part of a prompt.
    fn close_prefill(&mut self, slot: u32, now: u64) -> Option<RequestStatus> {
        let request = &self.requests[slot as usize];
        let is_done = request.num_steps_in_flight == 0
            && request.num_tokens >= request.max_total_tokens
            && request.num_computed_tokens >= request.num_tokens;
        if !is_done {
            return None;
        }
        self.emit(slot, -1, Some(FinishReason::Length), -1, RequestError::None, now);
        Some(RequestStatus::FinishedLengthCapped)
    }

    /// One token of a row.
    fn append_token(&mut self, slot: u32, token_id: i32, now: u64) -> Option<RequestStatus> {
        let request = &mut self.requests[slot as usize];
        request.push_token(token_id);
        if request.status == RequestStatus::Preempted {
            // It lost its placeholders with its blocks; the token is one more to compute again.
            request.num_expected_tokens = request.num_tokens;
        }
        let stop = check_stop(request, token_id);
        self.record_token(slot, token_id, now);
        match stop {
            Stop::No => {
                self.emit(slot, token_id, None, -1, RequestError::None, now);
                None
            }
            Stop::Token { stop_reason } => {
                self.emit(slot, token_id, Some(FinishReason::Stop), stop_reason, RequestError::None, now);
                Some(RequestStatus::FinishedStopped)
            }
            Stop::Length => {
                self.emit(slot, token_id, Some(FinishReason::Length), -1, RequestError::None, now);
                Some(RequestStatus::FinishedLengthCapped)
            }
        }
    }

    /// Any other sampled row: several tokens, or none. What follows a stop is dropped.
    fn append_row(
        &mut self,
        entry: &Entry,
        sample: usize,
        sampled: TokenRows<'_>,
        logprobs: LogprobRows<'_>,
        now: u64,
    ) -> Option<RequestStatus> {
        let slot = entry.tenant.slot;
        let (row, first) = (sampled.row(sample), sampled.first(sample));
        if row.is_empty() {
            // What it computed is as little a number as its logits: nobody may find it.
            let error = match first {
                REJECTED_BY_GRAMMAR => RequestError::GrammarRejected,
                REJECTED_BY_PROCESSOR => RequestError::ProcessorFailed,
                _ => {
                    self.kv.forget(&self.requests[slot as usize]);
                    RequestError::NoToken
                }
            };
            self.requests[slot as usize].num_computed_tokens = 0;
            self.emit(slot, -1, Some(FinishReason::Error), -1, error, now);
            return Some(RequestStatus::FinishedError);
        }
        let num_drafts = u32::from(entry.num_draft_tokens);
        let num_used = (row.len() as u32).min(num_drafts + 1);
        let num_rejected = num_drafts + 1 - num_used;
        let request = &mut self.requests[slot as usize];
        if num_drafts > 0 {
            self.stats.num_draft_tokens += u64::from(num_drafts);
            self.stats.num_accepted_tokens += u64::from(num_used - 1);
        }
        if request.status != RequestStatus::Preempted {
            // Their positions are computed again, with other tokens.
            request.retract_drafts(num_rejected, self.config.block_size);
        }
        for (index, &token_id) in row[..num_used as usize].iter().enumerate() {
            if !logprobs.is_empty()
                && let Some(beside) =
                    logprobs.find(self.requests[slot as usize].key, sample * sampled.num_columns + index)
            {
                // Before the token's record: whoever sees that finds this.
                self.egress.push_logprobs(beside);
            }
            if let Some(status) = self.append_token(slot, token_id, now) {
                // What follows the stop is expected no more.
                let request = &mut self.requests[slot as usize];
                let num_dropped = num_used - 1 - index as u32;
                request.num_expected_tokens =
                    request.num_expected_tokens.saturating_sub(num_dropped).max(request.num_tokens);
                return Some(status);
            }
        }
        None
    }

    /// Drafts for the request's next step.
    fn take_drafts(&mut self, slot: u32, drafts: &[i32]) {
        let request = &mut self.requests[slot as usize];
        if request.status == RequestStatus::Running && !drafts.is_empty() {
            request.cold.draft_token_ids.clear();
            request.cold.draft_token_ids.extend_from_slice(drafts);
            request.slots_left = 0;
        }
    }

    /// A record of a request. Its first one tells when it was scheduled and what was cached.
    pub(crate) fn emit(
        &mut self,
        slot: u32,
        new_token_id: i32,
        finish_reason: Option<FinishReason>,
        stop_reason: i32,
        error: RequestError,
        timestamp_ns: u64,
    ) {
        let request = &mut self.requests[slot as usize];
        let is_first = !std::mem::replace(&mut request.is_introduced, true);
        let record = EngineCoreOutput {
            key: request.key,
            new_token_id,
            finish_reason,
            stop_reason,
            num_cached_tokens: if is_first { request.num_cached_tokens } else { 0 },
            first_scheduled_ns: if is_first { request.cold.first_scheduled_ns } else { 0 },
            timestamp_ns,
            error,
        };
        self.meter_record(slot, is_first, new_token_id >= 0, finish_reason, timestamp_ns);
        self.offer(record);
    }

    /// Into the egress, or behind what already waits for room in it.
    pub(crate) fn offer(&mut self, record: EngineCoreOutput) {
        if !self.spill.is_empty() || !self.egress.has_room() {
            self.spill.push_back(record);
        } else {
            self.egress.push(record);
        }
    }

    pub(crate) fn close_step(&mut self, set: usize, num_finished: usize) {
        if num_finished > 0 {
            self.drop_finished();
        }
        self.in_flight.pop_front();
        let updated = self.steps[set].output.step;
        while self.retiring_rows.front().is_some_and(|&(step, _)| step <= updated) {
            if let Some((_, row)) = self.retiring_rows.pop_front() {
                self.free_rows.push(row);
            }
        }
        self.kv.settle(updated);
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
