//! `Scheduler`: decides what the next step runs.
//!
//! There is no prefill phase and no decode phase: each request has `num_computed_tokens`, which must catch up with
//! `num_tokens`. A step first serves the running list in admission order. If the pool is empty, it takes blocks from
//! the request that is last in line. Then, unless it had to do that, it admits waiting requests.
//!
//! The modules below this one are its methods by subject; only they use its fields.
//!
//! The scheduler belongs to one thread (`!Sync` by type); other threads use `EngineHandle`.

mod adapters;
mod admission;
pub(crate) mod beam_search;
mod beams;
mod deadlines;
mod departure;
mod drafts;
mod events;
mod grammar;
mod inspect;
mod intake;
mod invariants;
mod pause;
mod preemption;
mod running;
mod summary;
mod update;

use std::{cell::Cell, collections::HashSet, marker::PhantomData};

use drafting::Drafter;
use kvblocks::{BlockCopies, BlockId, BlockPool, ChainHasher};

pub use events::{MAX_EVENTS, RequestEvent, RequestEventKind};
pub use inspect::{RequestState, ScheduledRequest, StepView};
pub use pause::PauseState;
pub use summary::{BlockMap, RequestSummary};
pub use update::{
    COMPLETED_BY_GRAMMAR, CROWDED_OUT_OF_GRAMMARS, NOTHING_LEFT, REFUSED_BY_PROCESSOR, REJECTED_BY_GRAMMAR,
    REJECTED_BY_PROCESSOR, WITHHELD_SAMPLE,
};

use self::{beams::Beams, deadlines::Deadlines, events::EventLog};
use crate::{
    config::SchedulerConfig,
    egress::{Consumer, outgoing::Outgoing},
    error::SchedulerError,
    grammar::GrammarNews,
    handle::EngineHandle,
    kv_cache_manager::KVCacheManager,
    metrics::{Meter, NUM_STEP_PHASES, stats::SchedulerStats},
    output::SchedulerOutput,
    request_queue::RequestQueue,
    requests::{Requests, rows::Rows},
    step::Entry,
    step_buffers::StepBuffers,
    steps::Steps,
};

/// The owner's side. See the module docs.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    requests: Requests,
    waiting: RequestQueue,
    deadlines: Deadlines,
    /// Slots of the running requests in admission order.
    running: Vec<u32>,
    /// Preempted requests that will be swapped out when the steps with them have ended; they still have their blocks.
    leaving: Vec<u32>,
    kv: KVCacheManager,
    /// Searches of several beams.
    beams: Beams,
    rows: Rows,
    steps: Steps,
    outgoing: Outgoing,
    handle: EngineHandle,
    stats: SchedulerStats,
    meter: Meter,
    /// Adapters that requests may name; `None`: the owner keeps no list and makes sure that requests name only existing
    /// ones.
    known_adapters: Option<HashSet<i64>>,
    /// Makes drafts, if the scheduler does.
    drafter: Option<Drafter>,
    /// Arrivals and departures of requests with grammars, until `take_grammar_news`.
    grammar_news: Vec<GrammarNews>,
    events: EventLog,
    pause_state: PauseState,
    /// Buffer for `dispatch`: the copies of its step.
    copies: BlockCopies,
    /// Buffers for admissions: the blocks found for a request, and the requests before it that did not fit.
    hits: Vec<BlockId>,
    passed_over: Vec<u32>,
    _owned_by_one_thread: PhantomData<Cell<()>>,
}

impl Scheduler {
    /// Make a scheduler over registered buffer sets.
    ///
    /// # Errors
    /// A number is outside its limits, or there are no buffer sets.
    pub fn new(config: SchedulerConfig, buffers: Vec<StepBuffers>) -> Result<Self, SchedulerError> {
        config.check()?;
        let (needed, got) = (config.num_buffer_sets(), buffers.len());
        if got < needed {
            return Err(SchedulerError::TooFewBuffers { needed, got });
        }
        let hasher = ChainHasher::random_with(config.hash_algorithm);
        let pool = BlockPool::new(config.num_blocks)?;
        let handle = EngineHandle::new(config.clone(), hasher.clone(), pool.shared());
        // Room for a step and a half. A larger ring would take more of the cache than the waiting that it saves is
        // worth.
        let tokens_per_step = (config.max_num_seqs * (1 + config.num_speculative_tokens)) as usize;
        let outgoing = Outgoing::new(tokens_per_step + tokens_per_step / 2 + 16);
        let max_num_seqs = config.max_num_seqs;
        let drafter =
            config.drafter.clone().map(|drafter| Drafter::new(drafter, config.num_speculative_tokens));
        let mut scheduler = Self {
            requests: Requests::default(),
            waiting: RequestQueue::new(config.scheduling_policy),
            deadlines: Deadlines::default(),
            running: Vec::with_capacity(max_num_seqs as usize),
            leaving: Vec::with_capacity(max_num_seqs as usize),
            kv: KVCacheManager::new(&config, hasher, pool),
            beams: Beams::default(),
            rows: Rows::new(max_num_seqs),
            steps: Steps::new(buffers, &config),
            outgoing,
            handle,
            stats: SchedulerStats {
                num_usable_blocks: u64::from(config.num_blocks - 1),
                ..SchedulerStats::default()
            },
            meter: Meter::default(),
            known_adapters: None,
            drafter,
            grammar_news: Vec::new(),
            events: EventLog::default(),
            pause_state: PauseState::default(),
            copies: BlockCopies::default(),
            hits: Vec::with_capacity(config.blocks_per_request() as usize),
            passed_over: Vec::new(),
            config,
            _owned_by_one_thread: PhantomData,
        };
        // The counters must show the blocks even before the first step.
        scheduler.publish();
        Ok(scheduler)
    }

    /// A handle for other threads.
    #[must_use]
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// The output side's end of the egress; only the first call returns it.
    pub fn take_consumer(&mut self) -> Option<Consumer> {
        self.outgoing.take_consumer()
    }

    /// Plan the next step into the next free buffer set. Returns `None` if nothing can run now, or all is paused; if
    /// steps are in flight, that may change when the oldest is updated.
    ///
    /// # Errors
    /// `max_steps_in_flight` steps are in flight: update one first.
    pub fn schedule(&mut self) -> Result<Option<SchedulerOutput>, SchedulerError> {
        let set = self.steps.free_set()?;
        self.drain_inbox();
        self.end_overdue(None);
        self.kv.pool.drain_returned();
        if self.pause_state == PauseState::PausedAll || self.waits_for_tokens() {
            self.publish();
            return Ok(None);
        }
        self.steps.begin(set);
        // An earlier plan that was dropped may have preempted. The worker learns of that with this step, but it does
        // not count here.
        let num_preempted_before = self.rows.num_preempted();
        self.swap_out_leaving(set);
        let mut budget = self.config.max_num_batched_tokens;
        let max_rows = self.max_rows();
        self.schedule_running(set, &mut budget, max_rows);
        let has_preempted = self.rows.num_preempted() > num_preempted_before;
        if self.may_admit(has_preempted) {
            self.schedule_waiting(set, &mut budget, max_rows);
        }
        self.schedule_drafts(set, budget);
        if self.steps[set].entries.is_empty() {
            self.publish();
            return Ok(None);
        }
        Ok(Some(self.dispatch(set)))
    }

    /// Most requests of one step: in a pipeline, each stage must have a step, and a request is in only one of them.
    fn max_rows(&self) -> usize {
        let most = self.config.max_num_seqs as usize;
        if !self.config.is_pipeline() {
            return most;
        }
        let wanted = (self.running.len() + self.waiting.len()).min(most);
        wanted.div_ceil(self.config.pipeline_stages as usize).max(1)
    }

    /// Complete the plan in `set`; from now on it is in flight.
    fn dispatch(&mut self, set: usize) -> SchedulerOutput {
        let step = &mut self.steps[set];
        step.finish();
        step.write_departures(&mut self.rows);
        if !self.kv.cpu.planned().is_empty() {
            self.kv.cpu.take_copies(&mut self.copies);
            step.write_copies(&self.copies);
        }
        if self.requests.any_with_grammar() {
            let requests = &self.requests;
            let obeys = |entry: &&Entry| requests[entry.tenant.slot as usize].cold.uses_grammar;
            let sampled = step.entries.iter().filter(|entry| entry.sampled);
            step.output.num_structured_output_reqs = sampled.filter(obeys).count() as u32;
        }
        let output = step.output;
        self.steps.dispatch(set);
        self.stats.num_steps += 1;
        self.stats.num_scheduled_tokens += u64::from(output.total_num_scheduled_tokens);
        self.record_step(set);
        self.publish();
        output
    }

    /// Drop drafts of the step that was scheduled last, because they were not made: the request in batch position `i`
    /// keeps only its first `num_kept[i]`. The step is written again, and the returned output replaces `output`.
    ///
    /// # Errors
    /// `output` is not the newest step in flight, or the length of `num_kept` is not the number of requests in the
    /// step.
    pub fn truncate_drafts(
        &mut self,
        output: &SchedulerOutput,
        num_kept: &[u32],
    ) -> Result<SchedulerOutput, SchedulerError> {
        let newest = self.steps.newest();
        let Some(set) = newest.filter(|&set| self.steps[set].output == *output) else {
            return Err(SchedulerError::NotTheNewestStep { step: output.step });
        };
        let step = &mut self.steps[set];
        if num_kept.len() != step.entries.len() {
            return Err(SchedulerError::WrongRows {
                step: output.step,
                expected: step.output.num_reqs,
                got: num_kept.len(),
            });
        }
        for (index, &num_kept) in num_kept.iter().enumerate() {
            let tenant = step.entries[index].tenant;
            let dropped = step.truncate_drafts(index, num_kept);
            let request = &mut self.requests[tenant.slot as usize];
            self.stats.num_scheduled_tokens -= u64::from(dropped);
            request.retract(dropped, self.config.block_size);
        }
        step.replay(&self.requests);
        step.finish();
        Ok(step.output)
    }

    /// Record how long the parts of a step took. `times_ns` are the times when each of
    /// [`STEP_PHASES`](crate::STEP_PHASES) began, and when the last one ended, as the worker measured them (monotonic
    /// nanoseconds, ascending). Call this on the owner's thread.
    pub fn record_step_phases(&mut self, times_ns: &[u64; NUM_STEP_PHASES + 1]) {
        self.handle.shared.metrics.observe_step_phases(times_ns);
    }

    /// The arrays of a step that is in flight.
    #[must_use]
    pub fn buffers(&self, output: &SchedulerOutput) -> Option<&StepBuffers> {
        self.steps.of(output).map(|step| &step.buffers)
    }

    /// Number of requests that have not finished.
    #[must_use]
    pub fn num_unfinished_requests(&self) -> usize {
        self.running.len() + self.leaving.len() + self.waiting.len()
    }

    /// Whether anything is waiting, running, in the inbox, or waiting for room in the egress.
    #[must_use]
    pub fn has_unfinished_requests(&self) -> bool {
        self.num_unfinished_requests() > 0
            || self.outgoing.num_held_back() > 0
            || !self.handle.shared.inbox.is_empty()
    }

    /// Whether outputs wait for the output side.
    #[must_use]
    pub fn has_outputs(&self) -> bool {
        self.outgoing.has_published() || self.outgoing.num_held_back() > 0
    }

    /// Forget every cached block; returns `false` while blocks are in use. With `preempt_running`, all requests first
    /// give up their blocks, including those in CPU memory, and are computed again.
    pub fn reset_prefix_cache(&mut self, preempt_running: bool) -> bool {
        if preempt_running {
            self.preempt_all();
        }
        self.kv.pool.drain_returned();
        let done = self.kv.pool.reset_prefix_cache();
        self.publish();
        done
    }

    /// The scheduler's configuration.
    #[must_use]
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Copy the counters to where other threads read them, and pass waiting records to the output side.
    pub(crate) fn publish(&mut self) {
        self.outgoing.publish();
        self.stats.num_held_back = self.outgoing.num_held_back() as u64;
        self.stats.num_running = self.running.len() as u64;
        self.stats.num_waiting = (self.waiting.len() + self.leaving.len()) as u64;
        self.stats.num_free_blocks = u64::from(self.kv.pool.num_free());
        self.stats.num_free_cpu_blocks = u64::from(self.kv.cpu.num_free());
        self.handle.shared.counters.publish(&self.stats);
    }
}
