//! `update_from_output`: applies a step's tokens: append, stop, free, emit.

use super::Scheduler;
use crate::{
    clock::monotonic_ns,
    error::SchedulerError,
    logprobs::{
        LogprobRows,
        prompt::{PromptLogprobRows, PromptLogprobs},
    },
    output::{EngineCoreOutput, FinishReason, PredictedDrafts, RequestError, SchedulerOutput, UNSETTLED},
    pooling::{POOLED, PooledRows},
    request::{Request, RequestStatus},
    step::{Entry, rows::StepRows, token_rows::TokenRows},
};

/// In a row of sampled ids: the grammar did not accept what was sampled.
pub const REJECTED_BY_GRAMMAR: i32 = -2;

/// In a row of sampled ids: a logits processor of the request raised an error.
pub const REJECTED_BY_PROCESSOR: i32 = -3;

/// In a row of sampled ids: a logits processor does not accept the arguments of the request.
pub const REFUSED_BY_PROCESSOR: i32 = -4;

/// In a row of sampled ids: the grammar is complete and nothing can follow; the request ends as stopped.
pub const COMPLETED_BY_GRAMMAR: i32 = -5;

/// In a row of sampled ids: there is no room any more for the grammar next to those of other requests.
pub const CROWDED_OUT_OF_GRAMMARS: i32 = -6;

/// In a row of sampled ids: all logits are minus infinity, so there is nothing to choose from.
pub const NOTHING_LEFT: i32 = -8;

/// Stands for the token of a sample that was [withheld](Scheduler::withhold_sample); the request gets none.
pub const WITHHELD_SAMPLE: i32 = -7;

/// The result of appending one token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stop {
    No,
    Token { stop_reason: i32 },
    Length,
    Repetition,
}

impl Scheduler {
    /// Apply the results of the oldest step in flight. Returns how many requests finished.
    ///
    /// A row of `rows.sampled` without a token ends its request with an error. Its first id gives the reason:
    /// [`REJECTED_BY_GRAMMAR`]: its grammar did not accept the token; [`REJECTED_BY_PROCESSOR`]: one of its logits
    /// processors failed; [`REFUSED_BY_PROCESSOR`]: one does not accept its arguments; [`CROWDED_OUT_OF_GRAMMARS`]:
    /// there is no room for its grammar any more; [`NOTHING_LEFT`]: its parameters exclude every token; any other: its
    /// logits were not numbers. A row that begins with [`COMPLETED_BY_GRAMMAR`] ends its request as stopped, and so does
    /// one that begins with [`POOLED`], with the vector of its row.
    ///
    /// # Errors
    /// The step is not the oldest in flight, or the rows do not match it: another number of rows, drafts where there
    /// may be none, log-probabilities of other tokens, or not of all prompt positions that the step was asked for, or
    /// not one vector per sample.
    /// Nothing has changed then.
    pub fn update_from_output<'a>(
        &mut self,
        output: &SchedulerOutput,
        rows: impl Into<StepRows<'a>>,
    ) -> Result<usize, SchedulerError> {
        let StepRows { sampled, drafts, logprobs, prompt_logprobs, pooled } = rows.into();
        let set = self.steps.expect_oldest(output)?;
        sampled.check(output)?;
        logprobs.check(output, sampled)?;
        pooled.check(output, sampled)?;
        let step = &mut self.steps[set];
        prompt_logprobs.check(output, &step.prompt_spans, &mut step.buffers)?;
        let takes_drafts = self.config.max_steps_in_flight == 1 && self.config.drafter.is_none();
        let limit = if takes_drafts { self.config.num_speculative_tokens } else { 0 };
        if drafts.num_columns > 0 {
            drafts.check(output)?;
            if drafts.num_columns > limit as usize {
                return Err(SchedulerError::TooManyDrafts { got: drafts.num_columns, limit });
            }
        }
        self.drain_inbox();
        if pooled.width > 0 {
            self.emit_pooled(set, sampled, pooled);
        }
        if output.num_prompt_logprobs > 0 {
            self.emit_prompt_logprobs(set, prompt_logprobs);
        }
        let now = monotonic_ns();
        let num_generated_before = self.stats.num_generation_tokens;
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
            num_finished += self.apply(entry, sample, sampled, drafts, logprobs, now);
            done += 1;
            sample += usize::from(entry.sampled);
        }
        self.steps[set].entries = entries;
        self.meter.end_step(&self.handle.shared.metrics, now);
        self.measure_step(output, self.stats.num_generation_tokens - num_generated_before, now);
        self.close_step(set, num_finished);
        Ok(num_finished)
    }

    /// Pass on the log-probabilities of prompts, before the step's tokens.
    fn emit_prompt_logprobs(&mut self, set: usize, rows: PromptLogprobRows<'_>) {
        let (mut row, mut entry) = (0, 0);
        for (span, &num_columns) in self.steps[set].prompt_spans.iter().zip(rows.num_columns) {
            let next_row = row + span.count as usize;
            let next_entry = entry + span.count as usize * num_columns as usize;
            let request = &self.requests[span.tenant.slot as usize];
            if request.epoch == span.tenant.epoch {
                self.outgoing.push_prompt_logprobs(PromptLogprobs {
                    key: request.key,
                    first_position: span.start + 1,
                    num_columns: num_columns as u32,
                    ranks: rows.ranks[row..next_row]
                        .iter()
                        .map(|&rank| u32::try_from(rank).unwrap_or(0))
                        .collect(),
                    token_ids: rows.token_ids[entry..next_entry].into(),
                    logprobs: rows.logprobs[entry..next_entry].into(),
                });
            }
            (row, entry) = (next_row, next_entry);
        }
    }

    /// Pass on the vectors of a step, before the records that end their requests.
    fn emit_pooled(&mut self, set: usize, sampled: TokenRows<'_>, pooled: PooledRows<'_>) {
        for (sample, entry) in self.steps[set].entries.iter().filter(|entry| entry.sampled).enumerate() {
            let request = &self.requests[entry.tenant.slot as usize];
            if request.epoch == entry.tenant.epoch && sampled.first(sample) == POOLED {
                self.outgoing.push_pooled(pooled.vector(request.key, sample));
            }
        }
    }

    /// The path of nearly every row: one token that ends nothing, for the leading `entries`. Returns how many rows took
    /// it.
    fn append_decodes(&mut self, entries: &[Entry], token_ids: &[i32], now: u64) -> usize {
        let Some(mut egress) = self.outgoing.decodes(now) else { return 0 };
        let mut meter = self.meter.decodes(&self.handle.shared.metrics, now);
        let mut done = 0;
        for (entry, &token_id) in entries.iter().zip(token_ids).take(egress.room) {
            let request = &mut self.requests[entry.tenant.slot as usize];
            if request.epoch != entry.tenant.epoch
                || !entry.sampled
                || entry.is_withheld
                || !entry.forced.is_empty()
                || entry.num_draft_tokens > 0
                || request.status != RequestStatus::Running
                || !request.is_introduced
                || request.num_tokens + 1 >= request.max_total_tokens
                || token_id < 0
                || token_id == request.eos_token_id
                || request.has_stop_rules
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

    /// Apply any row; returns how many requests finished with it.
    fn apply(
        &mut self,
        entry: &Entry,
        sample: usize,
        sampled: TokenRows<'_>,
        drafts: TokenRows<'_>,
        logprobs: LogprobRows<'_>,
        now: u64,
    ) -> usize {
        let slot = entry.tenant.slot;
        let request = &mut self.requests[slot as usize];
        if request.epoch != entry.tenant.epoch {
            return 0; // It left while the step ran.
        }
        request.num_steps_in_flight -= 1;
        let is_beam = request.cold.seat.is_some();
        if !entry.forced.is_empty() {
            self.emit_forced(slot, entry.forced, now);
        }
        if entry.is_withheld {
            return 0;
        }
        if entry.sampled && is_beam {
            return self.take_candidates(entry, sample, sampled, logprobs, now);
        }
        let status = if entry.sampled {
            self.append_row(entry, sample, sampled, logprobs, now)
        } else {
            self.report_prompt_progress(entry, now);
            self.close_prefill(slot, now)
        };
        if let Some(status) = status {
            self.register_settled(slot);
            self.release(slot, status);
            self.requests.free(slot);
            return 1;
        }
        if drafts.num_columns > 0 && entry.sampled {
            self.take_drafts(slot, drafts.row(sample));
        }
        0
    }

    /// Apply a row without a sample, of a request that reports the progress of its prompt.
    fn report_prompt_progress(&mut self, entry: &Entry, now: u64) {
        let request = &self.requests[entry.tenant.slot as usize];
        if !request.cold.reports_prompt_progress || request.is_introduced {
            return;
        }
        let num_computed_tokens = entry.num_computed_tokens + entry.num_scheduled_tokens;
        self.outgoing.offer(EngineCoreOutput {
            num_cached_tokens: request.num_cached_tokens,
            first_scheduled_ns: request.cold.first_scheduled_ns,
            ..EngineCoreOutput::progress(request.key, num_computed_tokens, now)
        });
    }

    /// Apply a row without a sample: a part of a prompt, or the end of a request that only wants its prompt computed.
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

    /// Append one token of a row.
    fn append_token(&mut self, slot: u32, token_id: i32, now: u64) -> Option<RequestStatus> {
        let request = &mut self.requests[slot as usize];
        request.push_token(token_id);
        if request.status == RequestStatus::Preempted {
            // It lost its placeholders with its blocks; this token must be computed again too.
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
            Stop::Repetition => {
                self.emit(slot, token_id, Some(FinishReason::Repetition), -1, RequestError::None, now);
                Some(RequestStatus::FinishedRepetition)
            }
        }
    }

    /// Apply any other sampled row: several tokens, or none. What follows a stop is dropped.
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
        if matches!(first, COMPLETED_BY_GRAMMAR | POOLED) {
            self.emit(slot, -1, Some(FinishReason::Stop), -1, RequestError::None, now);
            return Some(RequestStatus::FinishedStopped);
        }
        if row.is_empty() {
            // The KV is as invalid as the logits: no request may find it.
            let error = match first {
                REJECTED_BY_GRAMMAR => RequestError::GrammarRejected,
                CROWDED_OUT_OF_GRAMMARS => RequestError::GrammarsFull,
                REJECTED_BY_PROCESSOR => RequestError::ProcessorFailed,
                REFUSED_BY_PROCESSOR => RequestError::ProcessorRefused,
                NOTHING_LEFT if self.requests[slot as usize].may_exclude_tokens() => {
                    RequestError::NothingAllowed
                }
                _ => {
                    self.kv.forget(&mut self.requests[slot as usize]);
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
        if num_drafts > 0 {
            self.stats.num_drafts += 1;
            self.stats.num_draft_tokens += u64::from(num_drafts);
            self.stats.num_accepted_tokens += u64::from(num_used - 1);
            self.handle.shared.metrics.observe_accepted(num_used - 1);
            self.record_drafts(slot, num_drafts, num_used - 1, now);
        }
        let request = &mut self.requests[slot as usize];
        if num_drafts > 0
            && let Some(history) = &mut request.cold.history
        {
            history.verify(num_used - 1, num_rejected > 0);
        }
        if request.status != RequestStatus::Preempted {
            // Their positions are computed again, with other tokens.
            request.retract(num_rejected, self.config.block_size);
        }
        if num_drafts > 0 && request.cold.history.as_ref().is_some_and(|history| history.is_predicted()) {
            request.cold.predicted =
                PredictedDrafts { num_accepted: (num_used - 1) as u16, num_rejected: num_rejected as u16 };
        }
        for (index, &token_id) in row[..num_used as usize].iter().enumerate() {
            if !logprobs.is_empty()
                && let Some(found) =
                    logprobs.find(self.requests[slot as usize].key, sample * sampled.num_columns + index)
            {
                // Before the token's record: a consumer that sees the record then finds these.
                self.outgoing.push_logprobs(found);
            }
            if let Some(status) = self.append_token(slot, token_id, now) {
                // What follows the stop is not expected any more.
                let request = &mut self.requests[slot as usize];
                let num_dropped = num_used - 1 - index as u32;
                request.num_expected_tokens =
                    request.num_expected_tokens.saturating_sub(num_dropped).max(request.num_tokens);
                return Some(status);
            }
        }
        None
    }

    /// Store the drafts for the request's next step.
    fn take_drafts(&mut self, slot: u32, drafts: &[i32]) {
        let request = &mut self.requests[slot as usize];
        if request.status == RequestStatus::Running && !drafts.is_empty() {
            request.cold.draft_token_ids.clear();
            request.cold.draft_token_ids.extend_from_slice(drafts);
        }
    }

    /// Emit a record of a request. Its first record says when it was scheduled and what was cached.
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
        let may_be_a_stop = finish_reason.is_some_and(FinishReason::may_be_a_stop);
        let is_unsettled = may_be_a_stop && request.cold.has_stop_strings;
        let record = EngineCoreOutput {
            key: request.key,
            new_token_id,
            finish_reason,
            stop_reason: if is_unsettled { UNSETTLED } else { stop_reason },
            num_cached_tokens: if is_first { request.num_cached_tokens } else { 0 },
            first_scheduled_ns: if is_first { request.cold.first_scheduled_ns } else { 0 },
            timestamp_ns,
            error,
            predicted: std::mem::take(&mut request.cold.predicted),
        };
        self.count_record(slot, &record, is_first);
        if !is_unsettled && let Some(reason) = finish_reason {
            self.stats.count_end(reason);
        }
        self.outgoing.offer(record);
    }

    fn count_record(&mut self, slot: u32, record: &EngineCoreOutput, is_first: bool) {
        let request = &mut self.requests[slot as usize];
        let has_token = record.new_token_id >= 0;
        // A request without room for a token ends when its prompt is computed.
        let is_pooled = request.cold.params.pooling > 0 && record.finish_reason == Some(FinishReason::Stop);
        let completes_prompt =
            is_first && (has_token || is_pooled || record.finish_reason == Some(FinishReason::Length));
        if completes_prompt {
            request.cold.first_token_ns = record.timestamp_ns;
            self.stats.num_prompt_tokens += u64::from(request.cold.num_prompt_tokens);
            self.stats.num_prompt_tokens_cached += u64::from(request.cold.num_prompt_tokens_skipped);
        }
        self.stats.num_generation_tokens += u64::from(has_token);
        self.meter.count(&self.handle.shared.metrics, slot, request, record, completes_prompt);
    }

    pub(crate) fn close_step(&mut self, set: usize, num_finished: usize) {
        if num_finished > 0 {
            self.drop_finished();
        }
        let updated = self.steps.close(set);
        self.rows.settle(updated);
        self.kv.settle(updated);
        self.stats.last_updated_step = updated;
        self.publish();
    }
}

/// Apply the stop rules, in this order: EOS, stop token, length, repetition. The sampler masks EOS and stop tokens below
/// `min_tokens`, so one that arrives here counts.
fn check_stop(request: &mut Request, token_id: i32) -> Stop {
    if token_id == request.eos_token_id {
        return Stop::Token { stop_reason: -1 };
    }
    if request.has_stop_rules && request.cold.params.stop_token_ids.contains(&token_id) {
        return Stop::Token { stop_reason: token_id };
    }
    if request.num_tokens >= request.max_total_tokens {
        return Stop::Length;
    }
    if request.has_stop_rules && request.repeats_itself() {
        return Stop::Repetition;
    }
    Stop::No
}
