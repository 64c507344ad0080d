//! What comes in from other threads: requests and aborts, taken from the inbox once per step.

use crate::{
    clock::monotonic_ns,
    handle::{Message, RESERVED_OUTPUT_TOKENS},
    output::{EngineCoreOutput, FinishReason, RequestError},
    request::{Cold, NO_ROW, NewRequest, Request, RequestStatus},
    scheduler::Scheduler,
    sync::Ordering,
};

impl Scheduler {
    /// Take everything that arrived, in its order: before a step is planned, and before its tokens are applied,
    /// so that what was aborted while it ran gets none.
    pub(crate) fn drain_inbox(&mut self) {
        if self.handle.shared.inbox.is_empty() {
            return;
        }
        let shared = self.handle.shared.clone();
        let mut aborted = Vec::new();
        shared.inbox.take(|message| match message {
            Message::Add(request) => self.take_in(request.0, request.1),
            Message::AbortId(request_id) => {
                if let Some(&slot) = self.by_id.get(&request_id) {
                    self.abort(slot, &mut aborted);
                }
            }
            Message::AbortKey(key) => {
                if let Some(&slot) = self.by_key.get(&key) {
                    self.abort(slot, &mut aborted);
                }
            }
        });
        if !aborted.is_empty() {
            let requests = &self.requests;
            self.running.retain(|&slot| requests[slot as usize].status == RequestStatus::Running);
            self.free_slots.append(&mut aborted);
        }
    }

    fn take_in(&mut self, new: NewRequest, block_hashes: Vec<kvblocks::BlockHash>) {
        self.stats.num_requests += 1;
        if self.by_key.contains_key(&new.key) {
            // A key used twice is a front end's mistake; an answer to it would end the request that has the key.
            self.handle.shared.num_queued.fetch_sub(1, Ordering::Relaxed);
            self.stats.num_finished += 1;
            return;
        }
        if self.by_id.contains_key(&new.request_id) {
            self.handle.shared.num_queued.fetch_sub(1, Ordering::Relaxed);
            self.stats.num_finished += 1;
            self.offer(EngineCoreOutput {
                key: new.key,
                new_token_id: -1,
                finish_reason: Some(FinishReason::Error),
                stop_reason: -1,
                num_cached_tokens: 0,
                first_scheduled_ns: 0,
                timestamp_ns: monotonic_ns(),
                error: RequestError::DuplicateRequestId,
            });
            return;
        }
        let slot = self.free_slots.pop().unwrap_or(self.requests.len() as u32);
        let epoch = self.requests.get(slot as usize).map_or(0, |previous| previous.epoch);
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        self.by_id.insert(new.request_id.clone(), slot);
        self.by_key.insert(new.key, slot);
        self.waiting.push(new.priority, arrival, slot);
        let num_prompt_tokens = new.prompt_token_ids.len() as u32;
        let max_total_tokens =
            num_prompt_tokens.saturating_add(new.params.max_tokens).min(self.config.max_model_len);
        let reserved = max_total_tokens.min(num_prompt_tokens.saturating_add(RESERVED_OUTPUT_TOKENS));
        let blocks = reserved.div_ceil(self.config.block_size) as usize;
        let request = Request {
            num_computed_tokens: 0,
            num_tokens: num_prompt_tokens,
            max_total_tokens,
            next_slot: 0,
            slots_left: 0,
            last_token_id: new.prompt_token_ids.last().copied().unwrap_or(-1),
            row: NO_ROW,
            eos_token_id: new.params.eos_token_id.unwrap_or(-1),
            key: new.key,
            token_ids: new.prompt_token_ids,
            block_table: Vec::with_capacity(blocks),
            num_registered_blocks: 0,
            num_prompt_tokens,
            num_cached_tokens: 0,
            first_scheduled_ns: 0,
            epoch,
            status: RequestStatus::Waiting,
            has_stop_token_ids: !new.params.stop_token_ids.is_empty(),
            cold: Box::new(Cold {
                request_id: new.request_id,
                params: new.params,
                priority: new.priority,
                arrival,
                extra_keys: new.extra_keys,
                skip_reading_prefix_cache: new.skip_reading_prefix_cache,
                block_hashes,
                num_preemptions: 0,
                admitted_before: false,
            }),
        };
        match self.requests.get_mut(slot as usize) {
            Some(place) => *place = request,
            None => self.requests.push(request),
        }
    }

    /// Abort a live request. Its slot goes to `aborted`, to be used again only after `running` was filtered.
    fn abort(&mut self, slot: u32, aborted: &mut Vec<u32>) {
        self.emit(slot, -1, Some(FinishReason::Abort), -1, RequestError::None, monotonic_ns());
        let request = &self.requests[slot as usize];
        let (priority, arrival) = (request.cold.priority, request.cold.arrival);
        if request.status != RequestStatus::Running {
            self.waiting.remove(priority, arrival, slot);
        }
        if !request.cold.admitted_before {
            self.handle.shared.num_queued.fetch_sub(1, Ordering::Relaxed);
        }
        self.release(slot, RequestStatus::FinishedAborted);
        self.free_slots.pop();
        aborted.push(slot);
    }
}
