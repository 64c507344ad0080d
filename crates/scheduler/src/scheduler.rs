//! `Scheduler`: what the next step runs.
//!
//! There is no prefill phase and no decode phase: every request has `num_computed_tokens`, which must
//! catch up with `num_tokens`. A step first serves the running list in admission order, taking blocks
//! from the worst request when the pool is empty, and then, unless it had to do that, admits waiting ones.
//!
//! The scheduler belongs to one thread (`!Sync` by type); other threads talk to it through `EngineHandle`.

use std::{cell::Cell, collections::HashMap, collections::VecDeque, marker::PhantomData};

use kvblocks::{BlockId, BlockPool, ChainHasher};
use thiserror::Error;

use crate::{
    config::{ConfigError, SchedulerConfig, SchedulingPolicy},
    egress::{self, Consumer, Producer},
    handle::EngineHandle,
    kv_cache_manager::{Admission, KVCacheManager},
    output::{EngineCoreOutput, RequestKey, SchedulerOutput},
    request::{NO_ROW, Request, RequestStatus},
    request_queue::RequestQueue,
    stats::SchedulerStats,
    step::Step,
    step_buffers::StepBuffers,
    sync::Ordering,
};

/// Misuse of the owner's side: a value, the scheduler stays sound.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum SchedulerError {
    /// A number outside its limits.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The pool could not be made.
    #[error(transparent)]
    Pool(#[from] kvblocks::PoolError),
    /// `schedule` while a step is in flight.
    #[error(
        "step {oldest_step} is in flight; call update_from_output or fail_step for it before the next schedule"
    )]
    StepInFlight {
        /// The step to update next.
        oldest_step: u64,
    },
    /// An update of a step that is not the oldest in flight.
    #[error("step {step} cannot be updated: {}", match oldest_step { Some(oldest) => format!("the next step to update is {oldest}"), None => "no step is in flight".to_owned() })]
    WrongStep {
        /// Given.
        step: u64,
        /// Expected.
        oldest_step: Option<u64>,
    },
    /// Sampled ids of the wrong shape.
    #[error("sampled_token_ids must have {expected} rows, one per sampled request of step {step}, got {got}")]
    WrongRows {
        /// The step.
        step: u64,
        /// `num_sampled`.
        expected: u32,
        /// Given.
        got: usize,
    },
    /// No buffer sets.
    #[error("at least {needed} step buffer sets are needed (steps in flight + 1), got {got}")]
    TooFewBuffers {
        /// Needed.
        needed: usize,
        /// Given.
        got: usize,
    },
}

/// The owner's side. See the module docs.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    /// All live requests, waiting ones too; a slot is used again after its request has left.
    pub(crate) requests: Vec<Request>,
    pub(crate) free_slots: Vec<u32>,
    pub(crate) by_id: HashMap<Box<str>, u32>,
    pub(crate) by_key: HashMap<RequestKey, u32>,
    pub(crate) waiting: RequestQueue,
    /// Slots in admission order.
    pub(crate) running: Vec<u32>,
    pub(crate) kv: KVCacheManager,
    pub(crate) free_rows: Vec<u32>,
    /// Rows given up while steps that name them are in flight, with the newest such step.
    pub(crate) retiring_rows: VecDeque<(u64, u32)>,
    pub(crate) steps: Vec<Step>,
    /// Sets of the steps that are not updated yet, oldest first.
    pub(crate) in_flight: VecDeque<usize>,
    pub(crate) last_step: u64,
    /// Rows given up since the last step, with the ids of their requests for the debug view.
    pub(crate) finished_rows: Vec<(u32, Box<str>)>,
    /// Rows given up in this step, with their slots.
    pub(crate) preempted_rows: Vec<(u32, u32)>,
    pub(crate) egress: Producer,
    /// Records that did not fit into the egress; offered again with the next step.
    pub(crate) spill: VecDeque<EngineCoreOutput>,
    consumer: Option<Consumer>,
    pub(crate) handle: EngineHandle,
    pub(crate) stats: SchedulerStats,
    pub(crate) next_arrival: u64,
    hits: Vec<BlockId>,
    _owned_by_one_thread: PhantomData<Cell<()>>,
}

/// What became of a running request's turn.
enum Turn {
    /// In the step, or nothing to do for it now.
    Done,
    /// It had to give up its own blocks; nobody behind it can do better.
    Stop,
}

impl Scheduler {
    /// A scheduler over registered buffer sets.
    ///
    /// # Errors
    /// A number outside its limits, or no buffer sets.
    pub fn new(config: SchedulerConfig, buffers: Vec<StepBuffers>) -> Result<Self, SchedulerError> {
        config.check()?;
        if buffers.is_empty() {
            return Err(SchedulerError::TooFewBuffers { needed: 1, got: 0 });
        }
        let hasher = ChainHasher::random();
        let handle = EngineHandle::new(config.clone(), hasher.clone());
        // Room for two steps: a larger ring would cycle through more cache than it saves in patience.
        let (egress, consumer) = egress::channel(2 * config.max_num_seqs as usize);
        let max_num_seqs = config.max_num_seqs;
        Ok(Self {
            requests: Vec::new(),
            free_slots: Vec::new(),
            by_id: HashMap::new(),
            by_key: HashMap::new(),
            waiting: RequestQueue::new(config.scheduling_policy),
            running: Vec::with_capacity(max_num_seqs as usize),
            kv: KVCacheManager::new(&config, hasher, BlockPool::new(config.num_blocks)?),
            free_rows: (0..max_num_seqs).rev().collect(),
            retiring_rows: VecDeque::with_capacity(max_num_seqs as usize),
            in_flight: VecDeque::with_capacity(buffers.len()),
            steps: buffers.into_iter().map(|buffers| Step::new(buffers, &config)).collect(),
            last_step: 0,
            finished_rows: Vec::with_capacity(max_num_seqs as usize),
            preempted_rows: Vec::with_capacity(max_num_seqs as usize),
            egress,
            spill: VecDeque::new(),
            consumer: Some(consumer),
            handle,
            stats: SchedulerStats {
                num_usable_blocks: u64::from(config.num_blocks - 1),
                ..SchedulerStats::default()
            },
            next_arrival: 0,
            hits: Vec::with_capacity(config.blocks_per_request() as usize),
            config,
            _owned_by_one_thread: PhantomData,
        })
    }

    /// The shared side.
    #[must_use]
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// The output side's end of the egress; there is one.
    pub fn take_consumer(&mut self) -> Option<Consumer> {
        self.consumer.take()
    }

    /// Plan the next step into the next free buffer set. `None` when nothing can run.
    ///
    /// # Errors
    /// When a step is in flight: the next one is planned after it was updated.
    pub fn schedule(&mut self) -> Result<Option<SchedulerOutput>, SchedulerError> {
        let set = self.free_set()?;
        self.drain_inbox();
        self.steps[set].begin(self.last_step + 1, set as u32);
        let mut budget = self.schedule_running(set);
        // The first may have had to give up its own blocks, being the worst: the others run with them. Each
        // round plans something or shrinks the running list.
        while self.steps[set].entries.is_empty() && !self.running.is_empty() {
            budget = self.schedule_running(set);
        }
        // With nobody left running there is nobody to protect from an admission: all victims' company was aborted.
        if self.preempted_rows.is_empty() || self.running.is_empty() {
            self.schedule_waiting(set, budget);
        }
        let step = &mut self.steps[set];
        if step.entries.is_empty() {
            self.publish();
            return Ok(None);
        }
        step.finish(&mut self.finished_rows, &mut self.preempted_rows);
        let output = step.output;
        self.last_step = output.step;
        self.in_flight.push_back(set);
        self.stats.num_steps += 1;
        self.stats.num_scheduled_tokens += u64::from(output.total_num_scheduled_tokens);
        self.publish();
        Ok(Some(output))
    }

    /// The arrays of a step that is in flight.
    #[must_use]
    pub fn buffers(&self, output: &SchedulerOutput) -> Option<&StepBuffers> {
        let set = output.buffer_index as usize;
        let step = self.steps.get(set).filter(|_| self.in_flight.contains(&set))?;
        (step.output == *output).then_some(&step.buffers)
    }

    /// Requests that have not finished.
    #[must_use]
    pub fn num_unfinished_requests(&self) -> usize {
        self.running.len() + self.waiting.len()
    }

    /// Whether anything is waiting, running, in the inbox, or waiting for room in the egress.
    #[must_use]
    pub fn has_unfinished_requests(&self) -> bool {
        self.num_unfinished_requests() > 0 || !self.spill.is_empty() || !self.handle.shared.inbox.is_empty()
    }

    /// Whether outputs wait for the output side.
    #[must_use]
    pub fn has_outputs(&self) -> bool {
        self.egress.has_published() || !self.spill.is_empty()
    }

    /// Forget every cached block; `false` while blocks are in use.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.kv.pool.reset_prefix_cache()
    }

    /// The scheduler's numbers.
    #[must_use]
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// The set for the next step. Sets rotate, so that what was written for the last step stays readable.
    fn free_set(&self) -> Result<usize, SchedulerError> {
        match self.in_flight.front() {
            Some(&oldest) => {
                Err(SchedulerError::StepInFlight { oldest_step: self.steps[oldest].output.step })
            }
            None => Ok(self.last_step as usize % self.steps.len()),
        }
    }

    /// Running requests in admission order. Returns what is left of the token budget.
    fn schedule_running(&mut self, set: usize) -> u32 {
        let mut budget = self.config.max_num_batched_tokens;
        let mut index = 0;
        while index < self.running.len() && budget > 0 {
            let done = self.steps[set].push_decodes(&self.running[index..], &mut self.requests, budget);
            index += done;
            budget -= done as u32;
            if index == self.running.len() || budget == 0 {
                break;
            }
            if self.decode_at_border(set, self.running[index]) {
                budget -= 1;
                index += 1;
                continue;
            }
            match self.schedule_one_running(set, &mut index, &mut budget) {
                Turn::Done => index += 1,
                Turn::Stop => break,
            }
        }
        budget
    }

    /// A decode that fills its block (which becomes findable) or needs the next one. `false`, with nothing
    /// changed, when the request is no plain decode or the pool has no block.
    fn decode_at_border(&mut self, set: usize, slot: u32) -> bool {
        let request = &mut self.requests[slot as usize];
        let samples = request.max_total_tokens > request.num_prompt_tokens;
        if request.num_computed_tokens + 1 != request.num_tokens || !samples {
            return false;
        }
        let mut block_table_start = None;
        if request.slots_left == 0 {
            let Some(block) = self.kv.pool.allocate_one() else { return false };
            block_table_start = Some(request.block_table.len() as u32);
            request.block_table.push(block);
            request.next_slot = block.0 * self.config.block_size;
            request.slots_left = self.config.block_size;
        }
        let step = &mut self.steps[set];
        if request.slots_left == 1 {
            self.kv.register_full_blocks(request, request.num_tokens, step.output.step);
        }
        step.push_decode_at_border(slot, request, block_table_start);
        true
    }

    /// Any other running request: it has several tokens to compute, or somebody must give up blocks for it.
    fn schedule_one_running(&mut self, set: usize, index: &mut usize, budget: &mut u32) -> Turn {
        let slot = self.running[*index];
        let request = &self.requests[slot as usize];
        let room = self.config.max_model_len - request.num_computed_tokens;
        let num_tokens = self.clip(request.num_tokens - request.num_computed_tokens, *budget).min(room);
        if num_tokens == 0 {
            return Turn::Done;
        }
        let num_owned = request.block_table.len() as u32;
        let step_number = self.steps[set].output.step;
        let mut replay = false;
        loop {
            let request = &mut self.requests[slot as usize];
            if self.kv.allocate_slots(request, &[], num_tokens, None, step_number) {
                break;
            }
            let victim_index = self.choose_victim();
            let victim = self.running.remove(victim_index);
            if victim_index < *index {
                *index -= 1;
            }
            if let Some(returned) = self.steps[set].remove(victim) {
                *budget += returned;
                replay = true;
                self.kv.withdraw(&self.requests[victim as usize], step_number);
            }
            self.preempt(victim);
            if victim == slot {
                if replay {
                    self.steps[set].replay(&self.requests);
                }
                return Turn::Stop;
            }
        }
        if replay {
            self.steps[set].replay(&self.requests);
        }
        let request = &mut self.requests[slot as usize];
        let grown = (request.block_table.len() as u32 > num_owned).then_some(num_owned);
        self.steps[set].push(slot, request, num_tokens, grown, false);
        *budget -= num_tokens;
        Turn::Done
    }

    /// Waiting requests in queue order; the first that does not fit ends the step (no look-past).
    fn schedule_waiting(&mut self, set: usize, mut budget: u32) {
        let step_number = self.steps[set].output.step;
        while budget > 0
            && self.running.len() < self.config.max_num_seqs as usize
            && !self.free_rows.is_empty()
        {
            let Some(slot) = self.waiting.peek() else { return };
            let mut hits = std::mem::take(&mut self.hits);
            let request = &mut self.requests[slot as usize];
            self.kv.longest_cache_hit(request, &mut hits);
            let request = &self.requests[slot as usize];
            let num_hit_tokens = hits.len() as u32 * self.config.block_size;
            let wanted = request.num_tokens - num_hit_tokens;
            let num_tokens = self.clip(wanted, budget);
            // Without chunked prefill a prompt runs whole; only what outgrew the budget by its own
            // output after a preemption is resumed in chunks.
            let whole = self.config.enable_chunked_prefill || wanted > self.config.max_num_batched_tokens;
            let fits_step = (whole || wanted <= budget)
                && self.steps[set].has_room(
                    (num_hit_tokens + num_tokens).div_ceil(self.config.block_size) as usize,
                    request.cold.params.stop_token_ids.len() + 1,
                );
            let admission = Admission {
                watermark_blocks: if self.running.is_empty() { 0 } else { self.config.watermark_blocks() },
                full_sequence_tokens: request.num_tokens.min(self.config.max_model_len),
            };
            let request = &mut self.requests[slot as usize];
            let admitted =
                fits_step && self.kv.allocate_slots(request, &hits, num_tokens, Some(admission), step_number);
            self.hits = hits;
            if !admitted {
                return;
            }
            self.waiting.pop();
            self.admit(slot, num_hit_tokens);
            let request = &mut self.requests[slot as usize];
            self.steps[set].push(slot, request, num_tokens, Some(0), true);
            budget -= num_tokens;
        }
    }

    /// How many of `wanted` tokens one request may run: the long-prefill threshold counts only in company.
    fn clip(&self, wanted: u32, budget: u32) -> u32 {
        let threshold = self.config.long_prefill_token_threshold;
        let in_company = self.running.len() + self.waiting.len() > 1;
        let wanted = if threshold > 0 && in_company { wanted.min(threshold) } else { wanted };
        wanted.min(budget)
    }

    /// Put a waiting request that has its blocks into the running list.
    fn admit(&mut self, slot: u32, num_hit_tokens: u32) {
        let request = &mut self.requests[slot as usize];
        request.status = RequestStatus::Running;
        request.num_computed_tokens = num_hit_tokens;
        request.row = self.free_rows.pop().unwrap_or(NO_ROW);
        self.running.push(slot);
        let (queried, hit) = (u64::from(request.num_tokens), u64::from(num_hit_tokens));
        if request.cold.admitted_before {
            self.stats.preempted_cache_queries += queried;
            self.stats.preempted_cache_hits += hit;
            return;
        }
        request.cold.admitted_before = true;
        request.num_cached_tokens = num_hit_tokens;
        request.first_scheduled_ns = crate::clock::monotonic_ns();
        self.stats.prefix_cache_queries += queried;
        self.stats.prefix_cache_hits += hit;
        // Relaxed: see `EngineHandle::reserve_place`.
        self.handle.shared.num_queued.fetch_sub(1, Ordering::Relaxed);
    }

    /// Index in `running` of the request that gives up its blocks: the newest under FCFS, the least
    /// important and newest under PRIORITY.
    fn choose_victim(&self) -> usize {
        match self.config.scheduling_policy {
            SchedulingPolicy::Fcfs => self.running.len() - 1,
            SchedulingPolicy::Priority => {
                let worst = (0..self.running.len()).max_by_key(|&index| {
                    let slot = self.running[index];
                    let cold = &self.requests[slot as usize].cold;
                    self.waiting.key(cold.priority, cold.arrival, slot)
                });
                worst.unwrap_or(0)
            }
        }
    }

    /// Take a victim's blocks and row; it waits again, with its output kept.
    fn preempt(&mut self, slot: u32) {
        let request = &mut self.requests[slot as usize];
        debug_assert_eq!(request.status, RequestStatus::Running, "only running requests are preempted");
        self.kv.free(request);
        request.status = RequestStatus::Preempted;
        request.num_computed_tokens = 0;
        request.cold.num_preemptions += 1;
        self.stats.num_preemptions += 1;
        self.preempted_rows.push((request.row, slot));
        self.waiting.push(request.cold.priority, request.cold.arrival, slot);
        self.retire_row(slot);
    }

    /// A row is used again only after every step in flight that names it has been updated.
    pub(crate) fn retire_row(&mut self, slot: u32) {
        let row = std::mem::replace(&mut self.requests[slot as usize].row, NO_ROW);
        if row == NO_ROW {
            return;
        }
        if self.in_flight.is_empty() {
            self.free_rows.push(row);
        } else {
            self.retiring_rows.push_back((self.last_step, row));
        }
    }

    /// Copy the counters to where other threads read them, and hand over what waits for the output side.
    pub(crate) fn publish(&mut self) {
        while let Some(&record) = self.spill.front() {
            if !self.egress.push(record) {
                break;
            }
            self.spill.pop_front();
        }
        self.egress.publish();
        self.stats.num_held_back = self.spill.len() as u64;
        self.stats.num_running = self.running.len() as u64;
        self.stats.num_waiting = self.waiting.len() as u64;
        self.stats.num_free_blocks = u64::from(self.kv.pool.num_free());
        self.handle.shared.counters.publish(&self.stats);
    }
}
