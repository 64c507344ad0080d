//! What those ask who compile grammars and mask logits: who came and left with a grammar, which samples of a step obey
//! one, and which tokens a request has so far.

use super::Scheduler;
use crate::{
    grammar::{ConstrainedSample, GrammarNews},
    output::{RequestKey, SchedulerOutput},
    request::{Request, RequestStatus, Tenant},
    step::Entry,
};

impl Scheduler {
    /// Who came and left with a grammar since the last call.
    pub fn take_grammar_news(&mut self) -> Vec<GrammarNews> {
        std::mem::take(&mut self.grammar_news)
    }

    /// The samples of a step in flight that obey a grammar, those of requests that have left since aside.
    #[must_use]
    pub fn constrained_samples(&self, output: &SchedulerOutput) -> Vec<ConstrainedSample> {
        let step = self.steps.of(output).filter(|_| output.num_structured_output_reqs > 0);
        let Some(step) = step else { return Vec::new() };
        let sampled = step.entries.iter().filter(|entry| entry.sampled).zip(0..);
        let live = sampled.filter_map(|(entry, place)| {
            let request = &self.requests[entry.tenant.slot as usize];
            let obeys = request.epoch == entry.tenant.epoch && request.cold.grammar.is_some();
            obeys.then_some(ConstrainedSample { place, key: request.key })
        });
        live.collect()
    }

    /// Hold a running request back from the steps that are planned from now on, or let it into them again: what its next
    /// token may be is not known yet, and would hold them up. Steps in flight run on, and a preemption releases it.
    pub fn hold_back(&mut self, key: RequestKey, is_held: bool) {
        let Some(slot) = self.requests.slot_of_key(key) else { return };
        let request: &mut Request = &mut self.requests[slot as usize];
        request.is_held = is_held && request.status == RequestStatus::Running;
    }

    /// Call off the token that a step in flight gives a request: what it may be is not known yet. The request computes
    /// its last token again in the next step that it is in. False, and nothing is changed, where another step in flight
    /// counts on the token, and for the first token of a request, which others may fork.
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
        let is_one = |entry: &&mut Entry| entry.sampled && !entry.is_withheld && entry.num_draft_tokens == 0;
        let Some(entry) = entry.filter(is_one) else { return false };
        entry.is_withheld = true;
        request.retract(1, self.config.block_size);
        self.stats.num_withheld_samples += 1;
        true
    }

    /// Whether a token of a request is under way.
    #[must_use]
    pub fn awaits_token(&self, key: RequestKey) -> bool {
        let slot = self.requests.slot_of_key(key);
        slot.is_some_and(|slot| self.requests[slot as usize].num_output_placeholders() > 0)
    }

    /// The known output tokens of a live request, the first `start` aside.
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
