//! `Scheduler`: what the next step runs.
//!
//! There is no prefill phase and no decode phase: every request has `num_computed_tokens`, which must
//! catch up with `num_tokens`. A step first serves the running list in admission order, taking blocks
//! from the worst request when the pool is empty, and then, unless it had to do that, admits waiting ones.
//!
//! The modules below it are its methods by subject; its fields are theirs alone.
//!
//! The scheduler belongs to one thread (`!Sync` by type); other threads talk to it through `EngineHandle`.

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
mod preemption;
mod running;
mod summary;
mod update;

use std::{cell::Cell, collections::HashSet, marker::PhantomData};

use drafting::Drafter;
use kvblocks::{BlockCopies, BlockId, BlockPool, ChainHasher};

pub use events::{MAX_EVENTS, RequestEvent, RequestEventKind};
pub use inspect::{RequestState, ScheduledRequest, StepView};
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
    metrics::{Meter, NUM_STEP_PHASES},
    output::SchedulerOutput,
    request_queue::RequestQueue,
    requests::{Requests, rows::Rows},
    stats::SchedulerStats,
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
    /// Slots in admission order.
    running: Vec<u32>,
    /// Victims that will be swapped out when no step that they are in is in flight; they still have their blocks.
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
    /// Adapters that requests may name; `None`: the owner keeps no list, and does not send what it does not have.
    known_adapters: Option<HashSet<i64>>,
    /// Makes drafts, if the scheduler does.
    drafter: Option<Drafter>,
    /// Who came and left with a grammar, until `take_grammar_news`.
    grammar_news: Vec<GrammarNews>,
    events: EventLog,
    /// Scratch of a dispatch: the copies of its step.
    copies: BlockCopies,
    /// Scratch of an admission: the blocks found for it, and who did not fit before it.
    hits: Vec<BlockId>,
    passed_over: Vec<u32>,
    _owned_by_one_thread: PhantomData<Cell<()>>,
}

impl Scheduler {
    /// A scheduler over registered buffer sets.
    ///
    /// # Errors
    /// A number outside its limits, or no buffer sets.
    pub fn new(config: SchedulerConfig, buffers: Vec<StepBuffers>) -> Result<Self, SchedulerError> {
        config.check()?;
        let (needed, got) = (config.num_buffer_sets(), buffers.len());
        if got < needed {
            return Err(SchedulerError::TooFewBuffers { needed, got });
        }
        let hasher = ChainHasher::random_with(config.hash_algorithm);
        let pool = BlockPool::new(config.num_blocks)?;
        let handle = EngineHandle::new(config.clone(), hasher.clone(), pool.shared());
        // Room for a step and a half: a larger ring would cycle through more cache than it saves in patience.
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
            copies: BlockCopies::default(),
            hits: Vec::with_capacity(config.blocks_per_request() as usize),
            passed_over: Vec::new(),
            config,
            _owned_by_one_thread: PhantomData,
        };
        // Before the first step, too, there are blocks.
        scheduler.publish();
        Ok(scheduler)
    }

    /// The shared side.
    #[must_use]
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// The output side's end of the egress; there is one.
    pub fn take_consumer(&mut self) -> Option<Consumer> {
        self.outgoing.take_consumer()
    }

    /// Plan the next step into the next free buffer set. `None` when nothing can run now; with steps in flight that
    /// may change when the oldest is updated.
    ///
    /// # Errors
    /// When `max_steps_in_flight` steps are in flight: the next one is planned after one was updated.
    pub fn schedule(&mut self) -> Result<Option<SchedulerOutput>, SchedulerError> {
        let set = self.steps.free_set()?;
        self.drain_inbox();
        self.end_overdue(None);
        self.kv.pool.drain_returned();
        if self.waits_for_tokens() {
            self.publish();
            return Ok(None);
        }
        self.steps.begin(set);
        // A plan that came to nothing may have preempted: the worker hears of it with this step, but that was another
        // turn.
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

    /// Requests of one step at most: of a pipeline each stage is to have a step, and a request is in one of them.
    fn max_rows(&self) -> usize {
        let most = self.config.max_num_seqs as usize;
        if !self.config.is_pipeline() {
            return most;
        }
        let wanted = (self.running.len() + self.waiting.len()).min(most);
        wanted.div_ceil(self.config.pipeline_stages as usize).max(1)
    }

    /// Complete the plan in `set`: it is in flight from now on.
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

    /// Drop drafts of the step that was scheduled last, because they were not made: of the request in batch position
    /// `i` only the first `num_kept[i]` stay. The step is written again; what is returned takes the place of `output`.
    ///
    /// # Errors
    /// When `output` is not the newest step in flight, or `num_kept` has another length than the step has requests.
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

    /// How long the parts of a step took, as what runs the model has measured it: `times_ns` says when each of
    /// [`STEP_PHASES`](crate::STEP_PHASES) began and when the last ended (monotonic nanoseconds, ascending). By the
    /// owner's thread.
    pub fn record_step_phases(&mut self, times_ns: &[u64; NUM_STEP_PHASES + 1]) {
        self.handle.shared.metrics.observe_step_phases(times_ns);
    }

    /// The arrays of a step that is in flight.
    #[must_use]
    pub fn buffers(&self, output: &SchedulerOutput) -> Option<&StepBuffers> {
        self.steps.of(output).map(|step| &step.buffers)
    }

    /// Requests that have not finished.
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

    /// Forget every cached block; `false` while blocks are in use. With `preempt_running` all requests give theirs up
    /// first, those in CPU memory too, and are computed again.
    pub fn reset_prefix_cache(&mut self, preempt_running: bool) -> bool {
        if preempt_running {
            self.preempt_all();
        }
        self.kv.pool.drain_returned();
        let done = self.kv.pool.reset_prefix_cache();
        self.publish();
        done
    }

    /// The scheduler's numbers.
    #[must_use]
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Copy the counters to where other threads read them, and hand over what waits for the output side.
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
