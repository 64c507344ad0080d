//! The interface for compiling grammars and masking logits: which requests with a grammar arrived and left, which
//! samples of a step obey one, and which tokens a request has so far.

use super::Scheduler;
use crate::{
    clock::monotonic_ns,
    grammar::{ConstrainedSample, GrammarNews},
    output::{RequestError, RequestKey, SchedulerOutput},
    request::{Request, RequestStatus, Tenant, forced::ForcedTokens},
    step::Entry,
};

impl Scheduler {
    /// The requests with grammars that arrived and left since the last call.
    pub fn take_grammar_news(&mut self) -> Vec<GrammarNews> {
        std::mem::take(&mut self.grammar_news)
    }

    /// The samples of a step in flight that obey a grammar, except those of requests that have left.
    #[must_use]
    pub fn constrained_samples(&self, output: &SchedulerOutput) -> Vec<ConstrainedSample> {
        let step = self.steps.of(output).filter(|_| output.num_structured_output_reqs > 0);
        let Some(step) = step else { return Vec::new() };
        let sampled = step.entries.iter().filter(|entry| entry.sampled).zip(0..);
        let live = sampled.filter_map(|(entry, place)| {
            let request = &self.requests[entry.tenant.slot as usize];
            let obeys = request.epoch == entry.tenant.epoch && request.cold.grammar.is_some();
            let draft_token_ids = || step.drafts_of(entry).to_vec();
            obeys.then(|| ConstrainedSample { place, key: request.key, draft_token_ids: draft_token_ids() })
        });
        live.collect()
    }

    /// Hold a running request back from steps that are planned from now on, or release it again. Used if it is not
    /// known yet which tokens may follow, so that steps with it would have to wait. Steps in flight continue, and a
    /// preemption releases the request.
    pub fn hold_back(&mut self, key: RequestKey, is_held: bool) {
        let Some(slot) = self.requests.slot_of_key(key) else { return };
        let request: &mut Request = &mut self.requests[slot as usize];
        request.is_held = is_held && request.status == RequestStatus::Running;
    }

    /// Cancel the sample that a step in flight takes for a request, because it is not known yet which tokens are
    /// allowed. The request computes its last token again in its next step. Returns false, with nothing changed, if
    /// another step in flight depends on the token, or if it is the request's first token, which others may fork.
    pub fn withhold_sample(&mut self, output: &SchedulerOutput, key: RequestKey) -> bool {
        let Some(slot) = self.requests.slot_of_key(key) else { return false };
        let request: &mut Request = &mut self.requests[slot as usize];
        let can_wait = request.status == RequestStatus::Running
            && request.num_steps_in_flight == 1
            && request.num_tokens > request.cold.num_prompt_tokens
            && request.cold.seat.is_none();
        let Some(step) = self.steps.of_mut(output).filter(|_| can_wait) else { return false };
        let entry =
            step.entries.iter_mut().find(|entry| entry.tenant == Tenant { slot, epoch: request.epoch });
        let Some(entry) = entry.filter(|entry| entry.sampled && !entry.is_withheld) else { return false };
        request.retract(entry.num_placeholders(), self.config.block_size);
        entry.is_withheld = true;
        self.stats.num_withheld_samples += 1;
        true
    }

    /// Append tokens that must follow, so that no step is spent on each: the request's next row computes them like a
    /// prompt. Call this either while no step has the request, or for a step that was just `planned`, in place of the
    /// token that it would sample. The next step with the request emits them before its own token.
    ///
    /// Returns how many were appended: the leading ones, up to one that would end the request or be the last that it
    /// may have. Returns 0, with nothing changed, if there are none, or if they would save no step: a single token in
    /// place of a sample, or a planned row that has drafts or gives no sample. Likewise if the request is not running,
    /// is in another step in flight, is to be forked or belongs to a beam search, or if its tokens are weighed, counted
    /// or reported with log-probabilities when the model gives them.
    pub fn force_tokens(
        &mut self,
        planned: Option<&SchedulerOutput>,
        key: RequestKey,
        token_ids: &[i32],
    ) -> usize {
        let Some(slot) = self.requests.slot_of_key(key) else { return 0 };
        let request: &mut Request = &mut self.requests[slot as usize];
        let room = request.max_total_tokens.saturating_sub(request.num_tokens + 1) as usize;
        let goes_on = token_ids.iter().take(room).take_while(|&&token_id| !request.ends_with(token_id));
        let count = goes_on.count();
        let may_be = request.status == RequestStatus::Running
            && request.num_steps_in_flight == u8::from(planned.is_some())
            && request.cold.num_fork_children == 0
            && request.cold.seat.is_none()
            && request.cold.params.takes_tokens_unseen();
        if !may_be || count < 1 + usize::from(planned.is_some()) {
            return 0;
        }
        if let Some(output) = planned {
            let tenant = Tenant { slot, epoch: request.epoch };
            let Some(step) = self.steps.of_mut(output) else { return 0 };
            let entry = step.entries.iter_mut().find(|entry| entry.tenant == tenant);
            let is_one =
                |entry: &&mut Entry| entry.sampled && !entry.is_withheld && entry.num_draft_tokens == 0;
            let Some(entry) = entry.filter(is_one) else { return 0 };
            // What the step computes stays computed, as for a prompt that continues.
            entry.is_withheld = true;
            entry.forced.extend(request.num_tokens, count as u32);
        } else {
            request.cold.untold.extend(request.num_tokens, count as u32);
        }
        for &token_id in &token_ids[..count] {
            request.push_token(token_id);
        }
        request.num_expected_tokens = request.num_tokens;
        request.cold.draft_token_ids.clear(); // they would follow another token
        self.stats.num_forced_tokens += count as u64;
        count
    }

    /// End a request whose grammar is complete and whose tokens were emitted: whatever the steps in flight give cannot
    /// follow.
    pub fn complete(&mut self, key: RequestKey) {
        let Some(slot) = self.requests.slot_of_key(key) else { return };
        let tenant = Tenant { slot, epoch: self.requests[slot as usize].epoch };
        let now = monotonic_ns();
        for forced in self.steps.take_forced(tenant) {
            self.emit_forced(slot, forced, now);
        }
        let untold = std::mem::take(&mut self.requests[slot as usize].cold.untold);
        self.emit_forced(slot, untold, now);
        let mut left = Vec::new();
        self.stop(slot, &mut left);
        self.drop_finished();
        for slot in left {
            self.requests.free(slot);
        }
        self.publish();
    }

    /// Emit tokens that a request has without a step that sampled them.
    pub(crate) fn emit_forced(&mut self, slot: u32, forced: ForcedTokens, now: u64) {
        let mut token_ids = vec![0; forced.len()];
        self.requests[slot as usize].copy_tokens(forced.start(), &mut token_ids);
        for token_id in token_ids {
            self.record_token(slot, token_id, now);
            self.emit(slot, token_id, None, -1, RequestError::None, now);
        }
    }

    /// Whether a step is in flight.
    #[must_use]
    pub fn is_step_in_flight(&self) -> bool {
        self.steps.oldest().is_some()
    }

    /// Whether a step in flight will give the request a token.
    #[must_use]
    pub fn awaits_token(&self, key: RequestKey) -> bool {
        let slot = self.requests.slot_of_key(key);
        slot.is_some_and(|slot| self.requests[slot as usize].num_output_placeholders() > 0)
    }

    /// The known output tokens of a live request, without the first `start`.
    #[must_use]
    pub fn output_tokens_from(&self, key: RequestKey, start: usize) -> Vec<i32> {
        let Some(slot) = self.requests.slot_of_key(key) else { return Vec::new() };
        let request: &Request = &self.requests[slot as usize];
        let start = request.cold.num_prompt_tokens as usize + start;
        let mut tokens = vec![0; (request.num_tokens as usize).saturating_sub(start)];
        request.copy_tokens(start, &mut tokens);
        tokens
    }
}
