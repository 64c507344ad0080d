//! The intake of requests and aborts from other threads, read from the inbox once per step.

use std::sync::Arc;

use super::Scheduler;
use crate::{
    clock::monotonic_ns,
    grammar::{GrammarNews, GrammarProgress, GrammarWork},
    handle::{Message, PromptWork, RESERVED_OUTPUT_TOKENS},
    output::{EngineCoreOutput, FinishReason, PredictedDrafts, RequestError, RequestKey},
    request::{
        Cold, NewRequest, Request, RequestStatus, forced::ForcedTokens, repetition::RepetitionFinder,
        sample_group::SampleGroup, standing::Standing,
    },
};

impl Scheduler {
    /// Take in everything that arrived, in order. Called before a step is planned, and before its tokens are applied,
    /// so that a request that was aborted while the step ran gets no token.
    pub(crate) fn drain_inbox(&mut self) {
        if self.handle.shared.inbox.is_empty() {
            return;
        }
        let shared = self.handle.shared.clone();
        let mut aborted = Vec::new();
        shared.inbox.take(|message| match message {
            Message::Add { requests, since_ns } => {
                let group = group_of(&requests);
                let mut beams = Vec::new();
                let mut grammars = Vec::new();
                for (place, (request, work)) in requests.into_iter().enumerate() {
                    let is_beam = request.params.beam_width > 0;
                    let is_follower = is_beam && place > 0;
                    let grammar = work.grammar.clone().map(|work| (request.key, work));
                    let slot = self.take_in(request, work, since_ns, group.clone(), is_follower);
                    grammars.extend(slot.and(grammar));
                    if is_beam {
                        beams.push(slot);
                    }
                }
                if !beams.is_empty() {
                    self.take_in_search(&beams, &mut aborted);
                }
                for (key, work) in grammars {
                    self.take_in_grammar(key, &*work, &mut aborted);
                }
            }
            Message::GrammarReady(key) => self.grammar_ready(key),
            Message::GrammarFailed(key, error) => self.grammar_failed(key, error, &mut aborted),
            Message::AbortId(request_id) => {
                if let Some(slot) = self.requests.slot_of_id(&request_id) {
                    self.abort(slot, &mut aborted);
                }
            }
            Message::AbortKey(key) => {
                if let Some(slot) = self.requests.slot_of_key(key) {
                    self.abort(slot, &mut aborted);
                }
            }
            Message::StopKey(key) => {
                if let Some(slot) = self.requests.slot_of_key(key) {
                    self.stop(slot, &mut aborted);
                }
            }
        });
        if !aborted.is_empty() {
            self.drop_finished();
            for slot in aborted {
                self.requests.free(slot);
            }
        }
    }

    /// Begin the search of beams that were taken in; if one of them is missing, there is no search.
    fn take_in_search(&mut self, beams: &[Option<u32>], left: &mut Vec<u32>) {
        let slots: Vec<u32> = beams.iter().copied().flatten().collect();
        if slots.len() == beams.len() {
            self.begin_search(&slots);
            return;
        }
        for slot in slots {
            let (error, status) = (RequestError::DuplicateRequestId, RequestStatus::FinishedError);
            self.leave(slot, FinishReason::Error, error, status, left);
        }
    }

    /// Remove a request that is not taken in from the counts.
    fn turn_away(&mut self, num_queued_tokens: u32, group: Option<Arc<SampleGroup>>) {
        self.leave_queue_for_good(num_queued_tokens);
        self.stats.num_finished += 1;
        if let Some(group) = group {
            group.end_sample(None);
        }
    }

    /// Emit the error of a request that is not taken in.
    fn answer_at_once(&mut self, key: RequestKey, error: RequestError) {
        self.stats.count_end(FinishReason::Error);
        self.outgoing.offer(EngineCoreOutput {
            key,
            new_token_id: -1,
            finish_reason: Some(FinishReason::Error),
            stop_reason: -1,
            num_cached_tokens: 0,
            first_scheduled_ns: 0,
            timestamp_ns: monotonic_ns(),
            error,
            predicted: PredictedDrafts::NONE,
        });
    }

    /// Take one request in; returns its slot, unless its id or key is in use or its adapter is gone.
    fn take_in(
        &mut self,
        new: NewRequest,
        work: PromptWork,
        since_ns: u64,
        group: Option<Arc<SampleGroup>>,
        is_follower: bool,
    ) -> Option<u32> {
        self.stats.num_requests += 1;
        let num_queued_tokens = new.num_queued_tokens();
        if self.requests.slot_of_key(new.key).is_some() {
            // A key that is used twice is a front end's mistake; an answer would end the request that has the key.
            self.turn_away(num_queued_tokens, group);
            return None;
        }
        let error = if self.requests.slot_of_id(&new.request_id).is_some() {
            RequestError::DuplicateRequestId
        } else if !self.has_adapter(new.params.adapter) {
            RequestError::AdapterMissing
        } else {
            RequestError::None
        };
        if error != RequestError::None {
            self.turn_away(num_queued_tokens, group);
            self.answer_at_once(new.key, error);
            return None;
        }
        let (slot, epoch, arrival) = self.requests.reserve();
        let uses_grammar = new.waits_for_grammar || new.grammar.is_some();
        self.stats.num_waiting_for_grammar += u64::from(uses_grammar);
        let grammar_work = work.grammar.clone().filter(|_| work.history.is_some());
        if let Some(spec) = &new.grammar {
            let ignores_eos = new.params.eos_token_id.is_none();
            let (key, spec, work) = (new.key, spec.clone(), work.grammar);
            self.grammar_news.push(GrammarNews::Arrived { key, spec, ignores_eos, work });
        }
        let num_prompt_tokens = new.prompt_token_ids.len() as u32;
        let first_judge = new.params.first_judge();
        let mut max_total_tokens =
            num_prompt_tokens.saturating_add(new.params.max_tokens).min(self.config.max_model_len);
        let search_limit = max_total_tokens.max(num_prompt_tokens + 1);
        if new.params.beam_width > 0 || new.params.pooling > 0 {
            max_total_tokens = num_prompt_tokens + 1;
        }
        let reserved = max_total_tokens.min(num_prompt_tokens.saturating_add(RESERVED_OUTPUT_TOKENS));
        let blocks = reserved.div_ceil(self.config.block_size) as usize;
        let repetition = RepetitionFinder::of(&new.params, max_total_tokens - num_prompt_tokens);
        let cold = Box::new(Cold {
            request_id: new.request_id,
            params: new.params,
            priority: new.priority,
            payer: new.payer.checked(),
            standing: Standing::default(),
            arrival,
            num_prompt_tokens,
            num_queued_tokens,
            extra_keys: new.extra_keys,
            // Cached tokens are not computed, so no log-probabilities would be computed for them.
            skip_reading_prefix_cache: new.skip_reading_prefix_cache || first_judge.is_some(),
            reports_prompt_progress: new.reports_prompt_progress,
            has_stop_strings: new.has_stop_strings,
            wants_prompt_logprobs: first_judge.is_some_and(|first| first < num_prompt_tokens - 1),
            num_judges_asked: first_judge.unwrap_or(0),
            uses_grammar,
            grammar: new.grammar,
            grammar_work,
            block_hashes: work.block_hashes,
            num_preemptions: 0,
            arrival_ns: since_ns.saturating_sub(new.age_ns),
            queued_ns: since_ns,
            first_scheduled_ns: 0,
            first_token_ns: 0,
            num_prompt_tokens_skipped: 0,
            group,
            admitted_before: is_follower,
            draft_token_ids: Vec::with_capacity(self.config.num_speculative_tokens as usize),
            repetition,
            history: work.history,
            untold: ForcedTokens::default(),
            predicted: PredictedDrafts::NONE,
            cpu_blocks: Vec::new(),
            swapped_out_in: 0,
            immune_until: 0,
            num_times_passed: 0,
            fork_parent: None,
            num_fork_children: 0,
            seat: None,
            is_follower,
            search_limit,
        });
        let table = Vec::with_capacity(blocks);
        let request = Request::new(new.prompt_token_ids, new.key, epoch, max_total_tokens, table, cold);
        self.requests.insert(slot, request);
        if self.config.collect_metrics {
            self.meter.arrive(slot);
        }
        if is_follower {
            self.leave_queue_for_good(num_queued_tokens);
            self.note(slot);
            return Some(slot);
        }
        self.waiting.arrive(slot, &mut self.requests[slot as usize]);
        self.limit_wait(slot, since_ns);
        let parent = new.fork_from.filter(|_| first_judge.is_none());
        if let Some(parent_slot) = parent.and_then(|parent| self.requests.slot_of_key(parent)) {
            self.link_to_parent(slot, parent_slot);
        }
        self.note(slot);
        Some(slot)
    }

    /// Take in a request whose grammar may have been compiled on its way.
    fn take_in_grammar(&mut self, key: RequestKey, work: &dyn GrammarWork, left: &mut Vec<u32>) {
        match work.progress() {
            GrammarProgress::Compiling => {} // a message says when
            GrammarProgress::Ready => self.grammar_ready(key),
            GrammarProgress::Failed(error) => self.grammar_failed(key, error, left),
        }
    }

    /// End a request whose grammar cannot be used.
    fn grammar_failed(&mut self, key: RequestKey, error: RequestError, left: &mut Vec<u32>) {
        if let Some(slot) = self.requests.slot_of_key(key) {
            self.leave(slot, FinishReason::Error, error, RequestStatus::FinishedError, left);
        }
    }

    /// Let a request run from now on.
    fn grammar_ready(&mut self, key: RequestKey) {
        let Some(slot) = self.requests.slot_of_key(key) else { return };
        let request = &mut self.requests[slot as usize];
        if request.status == RequestStatus::WaitingForGrammar {
            // Its place in the queue is the same for both statuses.
            request.status = RequestStatus::Waiting;
            self.stats.num_waiting_for_grammar -= 1;
            self.note(slot);
        }
    }
}

/// What is counted for all requests of a message together, if they are samples of one request.
fn group_of(requests: &[(NewRequest, PromptWork)]) -> Option<Arc<SampleGroup>> {
    let ((first, _), others) = requests.split_first()?;
    let is_sample = |(other, _): &(NewRequest, _)| other.fork_from == Some(first.key);
    (!others.is_empty() && others.iter().all(is_sample)).then(|| SampleGroup::new(requests.len() as u32))
}
