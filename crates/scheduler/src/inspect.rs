//! Looking inside: the state of requests, queues and blocks, and the invariants that hold between calls.
//! For tests, tracing and people; nothing here is on the step path.

use std::collections::HashSet;

use kvblocks::{BlockId, BlockState};

use crate::{
    output::SchedulerOutput,
    request::{NO_ROW, Request, RequestStatus},
    scheduler::Scheduler,
    step::UNCHANGED,
};

/// A request as seen from outside.
#[derive(Clone, PartialEq, Debug)]
pub struct RequestState {
    /// Its id.
    pub request_id: String,
    /// Where it is in its life.
    pub status: RequestStatus,
    /// Prompt and output.
    pub num_tokens: u32,
    /// Prompt.
    pub num_prompt_tokens: u32,
    /// Tokens with KV in the cache.
    pub num_computed_tokens: u32,
    /// Prompt tokens that came from the cache at first admission.
    pub num_cached_tokens: u32,
    /// How often it lost its blocks.
    pub num_preemptions: u32,
    /// Persistent row while running.
    pub row: Option<u32>,
    /// Its blocks, in order.
    pub block_table: Vec<BlockId>,
    /// Prompt and output ids.
    pub token_ids: Vec<i32>,
    /// Importance under the priority policy.
    pub priority: i32,
}

/// One scheduled request of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScheduledRequest {
    /// Its id.
    pub request_id: String,
    /// Tokens it runs.
    pub num_scheduled_tokens: u32,
    /// Tokens computed before the step.
    pub num_computed_tokens: u32,
    /// Its first admission.
    pub is_new: bool,
    /// Its admission after a preemption: its blocks replace what the worker knows.
    pub is_resumed: bool,
    /// Blocks the worker learns in this step.
    pub new_block_ids: Vec<BlockId>,
}

/// A step in people's terms.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StepView {
    /// In batch order.
    pub scheduled: Vec<ScheduledRequest>,
    /// Requests that finished since the last step.
    pub finished_req_ids: Vec<String>,
    /// Requests that lost their blocks in this step.
    pub preempted_req_ids: Vec<String>,
}

impl Scheduler {
    /// State of a live request.
    #[must_use]
    pub fn request_state(&self, request_id: &str) -> Option<RequestState> {
        self.by_id.get(request_id).map(|&slot| self.state_of(slot))
    }

    /// State of the request in a persistent row.
    #[must_use]
    pub fn request_in_row(&self, row: u32) -> Option<RequestState> {
        self.running
            .iter()
            .find(|&&slot| self.requests[slot as usize].row == row)
            .map(|&slot| self.state_of(slot))
    }

    /// Ids of waiting requests, in the order in which they are tried.
    #[must_use]
    pub fn waiting_request_ids(&self) -> Vec<String> {
        self.waiting.iter().map(|slot| self.id_of(slot)).collect()
    }

    /// Ids of running requests, in admission order.
    #[must_use]
    pub fn running_request_ids(&self) -> Vec<String> {
        self.running.iter().map(|&slot| self.id_of(slot)).collect()
    }

    /// State of every block.
    #[must_use]
    pub fn block_states(&self) -> Vec<BlockState> {
        (0..self.config.num_blocks).map(|block| self.kv.pool.block_state(BlockId(block))).collect()
    }

    /// Tokens of a prompt that the cache holds now.
    #[must_use]
    pub fn prefix_hit_length(&self, token_ids: &[i32], extra_keys: &[u8]) -> u32 {
        self.kv.prefix_hit_blocks(token_ids, extra_keys) * self.config.block_size
    }

    /// A step that is in flight, in people's terms. Requests that have left since are not in it.
    #[must_use]
    pub fn step_view(&self, output: &SchedulerOutput) -> Option<StepView> {
        let set = output.buffer_index as usize;
        let step =
            self.steps.get(set).filter(|step| step.output == *output && self.in_flight.contains(&set))?;
        let mut scheduled = Vec::with_capacity(step.entries.len());
        for entry in &step.entries {
            let request = &self.requests[entry.slot as usize];
            if request.epoch != entry.epoch {
                continue;
            }
            let new_blocks = match entry.block_table_start {
                UNCHANGED => &[],
                start => request.block_table.get(start as usize..).unwrap_or(&[]),
            };
            scheduled.push(ScheduledRequest {
                request_id: self.id_of(entry.slot),
                num_scheduled_tokens: entry.num_scheduled_tokens,
                num_computed_tokens: request.num_computed_tokens - entry.num_scheduled_tokens,
                is_new: entry.is_new && request.cold.num_preemptions == 0,
                is_resumed: entry.is_new && request.cold.num_preemptions > 0,
                new_block_ids: new_blocks.to_vec(),
            });
        }
        let preempted = step.preempted_slots.iter().map(|&slot| self.id_of(slot)).collect();
        let finished = step.finished_ids.iter().map(ToString::to_string).collect();
        Some(StepView { scheduled, finished_req_ids: finished, preempted_req_ids: preempted })
    }

    /// Check what holds between any two calls.
    ///
    /// # Panics
    /// With the invariant that is broken: a bug in this crate.
    pub fn check_invariants(&self) {
        self.kv.pool.check_invariants();
        let mut references = vec![0u32; self.config.num_blocks as usize];
        let mut rows: HashSet<u32> = HashSet::new();
        assert!(
            self.running.len() <= self.config.max_num_seqs as usize,
            "more running requests than max_num_seqs"
        );
        assert_eq!(
            self.by_id.len(),
            self.num_unfinished_requests(),
            "live requests are in exactly one queue"
        );
        assert_eq!(self.by_key.len(), self.by_id.len(), "keys and ids name the same requests");
        for &slot in &self.running {
            let request = &self.requests[slot as usize];
            assert_eq!(request.status, RequestStatus::Running, "the running list holds running requests");
            assert!(
                request.row != NO_ROW && rows.insert(request.row),
                "each running request has a row of its own"
            );
            let capacity = request.capacity_tokens(self.config.block_size);
            assert!(request.num_computed_tokens <= capacity, "computed tokens lie in owned blocks");
            assert!(capacity < request.num_computed_tokens.max(1) + self.config.block_size, "no idle blocks");
            assert!(
                request.num_tokens < request.max_total_tokens
                    || request.max_total_tokens == request.num_prompt_tokens,
                "a request at its limit has finished"
            );
            for &block in &request.block_table {
                references[block.0 as usize] += 1;
            }
        }
        for slot in self.waiting.iter() {
            let request = &self.requests[slot as usize];
            assert!(
                matches!(request.status, RequestStatus::Waiting | RequestStatus::Preempted),
                "the queue holds waiting requests"
            );
            assert!(
                request.block_table.is_empty() && request.row == NO_ROW,
                "a waiting request owns nothing"
            );
            assert_eq!(request.num_computed_tokens, 0, "a waiting request has nothing computed");
        }
        for slot in self.running.iter().copied().chain(self.waiting.iter()) {
            let request = &self.requests[slot as usize];
            assert_eq!(request.token_ids.len(), request.num_tokens as usize, "num_tokens counts the tokens");
            assert!(request.num_computed_tokens <= request.num_tokens, "no more computed than known");
            assert_eq!(self.by_id.get(&request.cold.request_id), Some(&slot), "the id leads to its request");
        }
        for &row in self.free_rows.iter().chain(self.retiring_rows.iter().map(|(_, row)| row)) {
            assert!(rows.insert(row), "a free row is in use or free twice");
        }
        assert_eq!(rows.len(), self.config.max_num_seqs as usize, "every row is in use, retiring or free");
        for (block, &expected) in references.iter().enumerate().skip(1) {
            let actual = self.kv.pool.ref_count(BlockId(block as u32));
            assert_eq!(actual, expected, "block {block}: reference count and block tables disagree");
        }
    }

    fn id_of(&self, slot: u32) -> String {
        self.requests[slot as usize].cold.request_id.to_string()
    }

    fn state_of(&self, slot: u32) -> RequestState {
        let request: &Request = &self.requests[slot as usize];
        RequestState {
            request_id: self.id_of(slot),
            status: request.status,
            num_tokens: request.num_tokens,
            num_prompt_tokens: request.num_prompt_tokens,
            num_computed_tokens: request.num_computed_tokens,
            num_cached_tokens: request.num_cached_tokens,
            num_preemptions: request.cold.num_preemptions,
            row: (request.row != NO_ROW).then_some(request.row),
            block_table: request.block_table.clone(),
            token_ids: request.token_ids.clone(),
            priority: request.cold.priority,
        }
    }
}
