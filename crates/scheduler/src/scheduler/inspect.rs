//! Inspection: the state of requests, queues and blocks, for tests, tracing and people. Nothing here is on the step
//! path.

use std::sync::Arc;

use kvblocks::{BlockId, BlockState};

use super::Scheduler;
use crate::{
    kv_cache_manager::extra_keys::{ExtraKeys, MultimodalSpan},
    output::{RequestKey, SchedulerOutput},
    request::{NO_ROW, Request, RequestStatus, Tenant},
    sampling_params::extras::SamplingExtras,
    step::UNCHANGED,
    step_buffers::Column,
};

/// A request as seen from outside.
#[derive(Clone, PartialEq, Debug)]
pub struct RequestState {
    /// Its id.
    pub request_id: String,
    /// Its status.
    pub status: RequestStatus,
    /// Prompt and output.
    pub num_tokens: u32,
    /// Prompt.
    pub num_prompt_tokens: u32,
    /// Tokens with KV in the cache.
    pub num_computed_tokens: u32,
    /// Prompt tokens that came from the cache at first admission.
    pub num_cached_tokens: u32,
    /// How often it was preempted.
    pub num_preemptions: u32,
    /// Its persistent row while it runs.
    pub row: Option<u32>,
    /// Tokens that steps in flight will give.
    pub num_output_placeholders: u32,
    /// Number of steps in flight with it.
    pub num_steps_in_flight: u32,
    /// Drafts for its next step.
    pub spec_token_ids: Vec<i32>,
    /// Its blocks, in order.
    pub block_table: Vec<BlockId>,
    /// Its blocks in CPU memory while it is swapped out.
    pub cpu_blocks: Vec<u32>,
    /// Prompt and output ids.
    pub token_ids: Vec<i32>,
    /// Importance under the priority policy.
    pub priority: i32,
    /// Virtual time of its tenant's turn under the fair policy, in 65536ths of a token at weight 1.
    pub fair_tag: u64,
    /// Its tag among the requests of its tenant, in the same unit.
    pub user_tag: u64,
    /// The number of its adapter; 0: none.
    pub adapter: i64,
}

/// One scheduled request of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScheduledRequest {
    /// Its id.
    pub request_id: String,
    /// Tokens that it runs.
    pub num_scheduled_tokens: u32,
    /// Tokens computed before the step.
    pub num_computed_tokens: u32,
    /// Whether the step gives a token for it.
    pub sampled: bool,
    /// The drafts among its tokens; `UNKNOWN_TOKEN` if only the worker knows them.
    pub spec_token_ids: Vec<i32>,
    /// Whether this is its first admission.
    pub is_new: bool,
    /// Whether it is admitted again after a preemption: its blocks replace those that the worker knows.
    pub is_resumed: bool,
    /// Blocks that the worker learns in this step.
    pub new_block_ids: Vec<BlockId>,
}

/// A step in readable form.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StepView {
    /// In batch order.
    pub scheduled: Vec<ScheduledRequest>,
    /// Leading blocks that all running requests share, as of now.
    pub num_common_prefix_blocks: u32,
    /// Requests that finished since the last step.
    pub finished_req_ids: Vec<String>,
    /// Requests that were preempted in this step.
    pub preempted_req_ids: Vec<String>,
    /// (GPU block, CPU block): copied first.
    pub blocks_to_swap_out: Vec<(i32, i32)>,
    /// (CPU block, GPU block): copied second.
    pub blocks_to_swap_in: Vec<(i32, i32)>,
    /// (from, to): copied last.
    pub blocks_to_copy: Vec<(i32, i32)>,
}

impl Scheduler {
    /// Number of arrived requests that wait for their first step, and of the tokens that they count for; counted from
    /// scratch.
    #[must_use]
    pub fn count_queue(&self) -> (u32, u64) {
        let queued = self.waiting.iter().map(|slot| &self.requests[slot as usize].cold);
        let queued = queued.filter(|cold| !cold.admitted_before);
        queued.fold((0, 0), |(count, tokens), cold| (count + 1, tokens + u64::from(cold.num_queued_tokens)))
    }

    /// Length of the list of requests with a deadline, including entries that no longer wait.
    #[must_use]
    pub fn num_deadlines(&self) -> usize {
        self.deadlines.tenants().count()
    }

    /// Take in what has arrived, as the next step would do first; until then it is in no queue.
    pub fn take_arrivals(&mut self) {
        self.drain_inbox();
        self.publish();
    }

    /// Pass on the records that found no room in the egress; returns whether there is something to take now.
    pub fn hand_over(&mut self) -> bool {
        self.publish();
        self.outgoing.has_published()
    }

    /// Id of the live request with this key.
    #[must_use]
    pub fn request_id_of(&self, key: RequestKey) -> Option<&str> {
        let slot = self.requests.slot_of_key(key)?;
        Some(&self.requests[slot as usize].cold.request_id)
    }

    /// State of a live request.
    #[must_use]
    pub fn request_state(&self, request_id: &str) -> Option<RequestState> {
        self.requests.slot_of_id(request_id).map(|slot| self.state_of(slot))
    }

    /// State of the request in a persistent row.
    #[must_use]
    pub fn request_in_row(&self, row: u32) -> Option<RequestState> {
        self.running
            .iter()
            .find(|&&slot| self.requests[slot as usize].row == row)
            .map(|&slot| self.state_of(slot))
    }

    /// The list parameters of the request in a persistent row.
    #[must_use]
    pub fn extras_in_row(&self, row: u32) -> Option<&Arc<SamplingExtras>> {
        let slot = self.running.iter().find(|&&slot| self.requests[slot as usize].row == row)?;
        self.requests[*slot as usize].cold.params.extras.as_ref()
    }

    /// The multimodal inputs of the request in a persistent row, in the order of their positions.
    #[must_use]
    pub fn multimodal_in_row(&self, row: u32) -> &[MultimodalSpan] {
        let found = self.running.iter().find(|&&slot| self.requests[slot as usize].row == row);
        found.map_or(&[], |slot| self.requests[*slot as usize].cold.extra_keys.multimodal())
    }

    /// Ids of waiting requests, in the order in which they are tried.
    #[must_use]
    pub fn waiting_request_ids(&self) -> Vec<String> {
        self.waiting.iter().map(|slot| self.id_of(slot)).collect()
    }

    /// Ids of preempted requests that keep their blocks until the steps in flight with them have ended, and are swapped
    /// out then.
    #[must_use]
    pub fn leaving_request_ids(&self) -> Vec<String> {
        self.leaving.iter().map(|&slot| self.id_of(slot)).collect()
    }

    /// Ids of running requests, in admission order.
    #[must_use]
    pub fn running_request_ids(&self) -> Vec<String> {
        self.running.iter().map(|&slot| self.id_of(slot)).collect()
    }

    /// State of every block.
    #[must_use]
    pub fn block_states(&self) -> Vec<BlockState> {
        self.kv.pool.block_states()
    }

    /// Number of a prompt's tokens that the cache would save a request now. The last token is always computed, so a
    /// prompt of whole blocks that are all cached saves one block less than it has.
    #[must_use]
    pub fn prefix_hit_length(&self, token_ids: &[i32], extra_keys: &ExtraKeys) -> u32 {
        self.kv.prefix_hit_blocks(token_ids, extra_keys) * self.config.block_size
    }

    /// A step in flight, in readable form, without requests that have left since.
    #[must_use]
    pub fn step_view(&self, output: &SchedulerOutput) -> Option<StepView> {
        let step = self.steps.of(output)?;
        let mut scheduled = Vec::with_capacity(step.entries.len());
        for entry in &step.entries {
            let request = &self.requests[entry.tenant.slot as usize];
            if request.epoch != entry.tenant.epoch {
                continue;
            }
            let new_blocks = match entry.block_table_start {
                UNCHANGED => &[],
                start => request.block_table.get(start as usize..).unwrap_or(&[]),
            };
            scheduled.push(ScheduledRequest {
                request_id: self.id_of(entry.tenant.slot),
                num_scheduled_tokens: entry.num_scheduled_tokens,
                num_computed_tokens: entry.num_computed_tokens,
                sampled: entry.sampled,
                spec_token_ids: step.drafts_of(entry).to_vec(),
                is_new: entry.is_new && request.cold.num_preemptions == 0,
                is_resumed: entry.is_new && request.cold.num_preemptions > 0,
                new_block_ids: new_blocks.to_vec(),
            });
        }
        let alive = |tenant: &&Tenant| self.requests[tenant.slot as usize].epoch == tenant.epoch;
        let preempted = step.preempted.iter().filter(alive).map(|tenant| self.id_of(tenant.slot)).collect();
        let finished = step.finished_ids.iter().map(ToString::to_string).collect();
        let pairs = |column: &Column<i32>, count: u32| {
            (0..count as usize).map(|i| (column.read(2 * i), column.read(2 * i + 1))).collect()
        };
        Some(StepView {
            scheduled,
            num_common_prefix_blocks: self.num_common_prefix_blocks(),
            finished_req_ids: finished,
            preempted_req_ids: preempted,
            blocks_to_swap_out: pairs(&step.buffers.blocks_to_swap_out, output.num_swap_out),
            blocks_to_swap_in: pairs(&step.buffers.blocks_to_swap_in, output.num_swap_in),
            blocks_to_copy: pairs(&step.buffers.blocks_to_copy, output.num_copies),
        })
    }

    /// Leading blocks that all running requests have in common.
    fn num_common_prefix_blocks(&self) -> u32 {
        let mut tables = self.running.iter().map(|&slot| self.requests[slot as usize].block_table.as_slice());
        let Some(first) = tables.next() else { return 0 };
        let in_common = |table: &[BlockId]| first.iter().zip(table).take_while(|(a, b)| a == b).count();
        tables.map(in_common).min().unwrap_or(first.len()) as u32
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
            num_prompt_tokens: request.cold.num_prompt_tokens,
            num_computed_tokens: request.num_computed_tokens,
            num_cached_tokens: request.num_cached_tokens,
            num_preemptions: request.cold.num_preemptions,
            row: (request.row != NO_ROW).then_some(request.row),
            num_output_placeholders: request.num_output_placeholders(),
            num_steps_in_flight: u32::from(request.num_steps_in_flight),
            spec_token_ids: request.cold.draft_token_ids.clone(),
            block_table: request.block_table.clone(),
            cpu_blocks: request.cold.cpu_blocks.iter().map(|block| block.0).collect(),
            token_ids: request.all_tokens(),
            priority: request.cold.priority,
            fair_tag: request.cold.standing.turn.0,
            user_tag: request.cold.standing.user_tag,
            adapter: request.cold.params.adapter,
        }
    }
}
