//! The departure of requests: finished, aborted, or with a step that failed.

use super::Scheduler;
use crate::{
    clock::monotonic_ns,
    error::SchedulerError,
    grammar::GrammarNews,
    output::{FinishReason, RequestError, SchedulerOutput},
    request::RequestStatus,
    step::Entry,
};

impl Scheduler {
    /// End a step whose execution failed. The steps scheduled after it end too, because they would read what it did not
    /// write. Their requests finish with an error, their registrations are withdrawn, and KV that their copies should
    /// have brought to CPU memory is computed again. Returns how many requests finished.
    ///
    /// # Errors
    /// The step is not the oldest in flight.
    pub fn fail_step(&mut self, output: &SchedulerOutput) -> Result<usize, SchedulerError> {
        self.steps.expect_oldest(output)?;
        let now = monotonic_ns();
        // Before any request leaves, because several requests may share a block with one registration.
        self.kv.withdraw_unsettled();
        self.drain_inbox();
        let mut num_finished = 0;
        while let Some(set) = self.steps.oldest() {
            let entries = std::mem::take(&mut self.steps[set].entries);
            for entry in &entries {
                num_finished += self.fail(entry, now);
            }
            self.steps[set].entries = entries;
            self.close_step(set, num_finished);
        }
        let never_arrived = |&slot: &u32| {
            let request = &self.requests[slot as usize];
            request.status == RequestStatus::Swapped && request.cold.swapped_out_in >= output.step
        };
        let swapped: Vec<u32> = self.waiting.iter().filter(never_arrived).collect();
        for slot in swapped {
            self.forget_swapped(slot);
        }
        self.publish();
        Ok(num_finished)
    }

    /// End the request of one row of a failed step. Returns how many requests end; 0 if it had left before.
    fn fail(&mut self, entry: &Entry, now: u64) -> usize {
        let slot = entry.tenant.slot;
        if self.requests[slot as usize].epoch != entry.tenant.epoch {
            return 0;
        }
        let slots = self.disband_with(slot).unwrap_or_else(|| vec![slot]);
        for &slot in &slots {
            self.emit(slot, -1, Some(FinishReason::Error), -1, RequestError::StepFailed, now);
            self.release(slot, RequestStatus::FinishedError);
            self.requests.free(slot);
        }
        slots.len()
    }

    /// Abort a live request. Its slot is added to `aborted`, and may be reused only after `running` was filtered.
    pub(crate) fn abort(&mut self, slot: u32, aborted: &mut Vec<u32>) {
        self.leave(slot, FinishReason::Abort, RequestError::None, RequestStatus::FinishedAborted, aborted);
    }

    /// End a live request that is complete: its front end has found a stop string, or its grammar accepts nothing more.
    pub(crate) fn stop(&mut self, slot: u32, left: &mut Vec<u32>) {
        self.leave(slot, FinishReason::Stop, RequestError::None, RequestStatus::FinishedStopped, left);
    }

    /// End a live request between steps, together with the others of its search.
    pub(crate) fn leave(
        &mut self,
        slot: u32,
        reason: FinishReason,
        error: RequestError,
        status: RequestStatus,
        left: &mut Vec<u32>,
    ) {
        for slot in self.disband_with(slot).unwrap_or_else(|| vec![slot]) {
            self.emit(slot, -1, Some(reason), -1, error, monotonic_ns());
            if self.requests[slot as usize].status == RequestStatus::Running {
                self.register_settled(slot);
            }
            self.release(slot, status);
            left.push(slot);
        }
    }

    /// Remove a finished request from everything except its slot, which the caller frees; `running` and `leaving` are
    /// filtered in one pass afterwards.
    pub(crate) fn release(&mut self, slot: u32, status: RequestStatus) {
        debug_assert!(status.is_finished(), "only finished requests are released");
        self.hand_children_over(slot);
        self.unlink_from_parent(slot);
        self.archive_answer(slot);
        let request = &mut self.requests[slot as usize];
        if request.row == crate::request::NO_ROW && !request.cold.is_follower {
            self.waiting.remove(slot, request);
        }
        if !request.cold.is_follower {
            self.waiting.leave(request);
        }
        let waited_for_grammar = request.status == RequestStatus::WaitingForGrammar;
        self.stats.num_waiting_for_grammar -= u64::from(waited_for_grammar);
        self.kv.free(request);
        self.kv.discard_swapped(request);
        request.status = status;
        request.cold.grammar_work = None;
        if request.cold.grammar.take().is_some() {
            self.grammar_news.push(GrammarNews::Left(request.key));
        }
        request.forget_tokens();
        if !request.cold.admitted_before {
            request.cold.admitted_before = true;
            let num_queued_tokens = request.cold.num_queued_tokens;
            self.leave_queue_for_good(num_queued_tokens);
        }
        self.requests.retire(slot);
        self.note(slot);
        let request = &mut self.requests[slot as usize];
        if request.row != crate::request::NO_ROW {
            self.rows.note_finished(request.row, std::mem::take(&mut request.cold.request_id));
        }
        self.retire_row(slot);
        self.stats.num_finished += 1;
    }

    /// Remove finished requests from the lists of requests with a row.
    pub(crate) fn drop_finished(&mut self) {
        let requests = &self.requests;
        self.running.retain(|&slot| requests[slot as usize].status == RequestStatus::Running);
        self.leaving.retain(|&slot| requests[slot as usize].status == RequestStatus::Swapped);
    }
}
