//! `Scheduler`: what the next step runs.
//!
//! There is no prefill phase and no decode phase: every request has `num_computed_tokens`, which must
//! catch up with `num_tokens`. A step first serves the running list in admission order, taking blocks
//! from the worst request when the pool is empty, and then, unless it had to do that, admits waiting ones.
//!
//! The scheduler belongs to one thread (`!Sync` by type); other threads talk to it through `EngineHandle`.

use std::{cell::Cell, collections::HashMap, collections::VecDeque, marker::PhantomData};

use kvblocks::{BlockCopies, BlockId, BlockPool, ChainHasher};
use thiserror::Error;

use crate::{
    config::{ConfigError, SchedulerConfig},
    deadlines::Deadlines,
    egress::{self, Consumer, Producer},
    events::EventLog,
    handle::EngineHandle,
    kv_cache_manager::KVCacheManager,
    metrics::Meter,
    output::{EngineCoreOutput, RequestKey, SchedulerOutput},
    request::{Request, Tenant},
    request_queue::RequestQueue,
    running::Served,
    stats::SchedulerStats,
    step::{Entry, Step},
    step_buffers::StepBuffers,
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
    /// `schedule` while as many steps are in flight as may be.
    #[error(
        "step {oldest_step} is in flight, and max_steps_in_flight is {limit}; call update_from_output or fail_step for it before the next schedule"
    )]
    StepInFlight {
        /// The step to update next.
        oldest_step: u64,
        /// `max_steps_in_flight`.
        limit: u32,
    },
    /// An update with what `schedule` returned, after `truncate_drafts` has returned something in its place.
    #[error("this output of step {step} is out of date: use the one that truncate_drafts returned")]
    OutdatedOutput {
        /// The step.
        step: u64,
    },
    /// A change to a step that is not the last one scheduled.
    #[error(
        "step {step} is not the last one in flight; its drafts can be changed only before the next schedule"
    )]
    NotTheNewestStep {
        /// Given.
        step: u64,
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
    /// Log-probabilities that are not of what was sampled.
    #[error("the logprobs of step {step} do not fit its sampled tokens: {what}")]
    WrongLogprobs {
        /// The step.
        step: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// Log-probabilities of prompts that are not those that were asked for.
    #[error("the prompt_logprobs of step {step} are not what it was asked for: {what}")]
    WrongPromptLogprobs {
        /// The step.
        step: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// Drafts where there may be none, or not as many.
    #[error(
        "drafts have {got} columns, at most {limit} are possible (num_speculative_tokens; 0 when steps overlap: the worker keeps its drafts)"
    )]
    TooManyDrafts {
        /// Given.
        got: usize,
        /// Possible.
        limit: u32,
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
    pub(crate) deadlines: Deadlines,
    /// Slots in admission order.
    pub(crate) running: Vec<u32>,
    /// Victims that will be swapped out when no step that they are in is in flight; they still have their blocks.
    pub(crate) leaving: Vec<u32>,
    pub(crate) kv: KVCacheManager,
    pub(crate) copies: BlockCopies,
    pub(crate) free_rows: Vec<u32>,
    /// Rows given up while steps that name them are in flight, with the newest such step.
    pub(crate) retiring_rows: VecDeque<(u64, u32)>,
    pub(crate) steps: Vec<Step>,
    /// Sets of the steps that are not updated yet, oldest first.
    pub(crate) in_flight: VecDeque<usize>,
    pub(crate) last_step: u64,
    /// Rows given up since the last step, with the ids of their requests for the debug view.
    pub(crate) finished_rows: Vec<(u32, Box<str>)>,
    /// Rows given up in this step, with whose they were.
    pub(crate) preempted_rows: Vec<(u32, Tenant)>,
    pub(crate) egress: Producer,
    /// Records that did not fit into the egress; offered again with the next step.
    pub(crate) spill: VecDeque<EngineCoreOutput>,
    consumer: Option<Consumer>,
    pub(crate) handle: EngineHandle,
    pub(crate) stats: SchedulerStats,
    pub(crate) meter: Meter,
    pub(crate) next_arrival: u64,
    /// Live requests whose output obeys a grammar.
    pub(crate) num_grammar_requests: u32,
    pub(crate) events: EventLog,
    /// Scratch of an admission: the blocks found for it, and who did not fit before it.
    pub(crate) hits: Vec<BlockId>,
    pub(crate) passed_over: Vec<u32>,
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
        let (egress, consumer) = egress::channel(tokens_per_step + tokens_per_step / 2 + 16);
        let max_num_seqs = config.max_num_seqs;
        Ok(Self {
            requests: Vec::new(),
            free_slots: Vec::new(),
            by_id: HashMap::new(),
            by_key: HashMap::new(),
            waiting: RequestQueue::new(config.scheduling_policy),
            deadlines: Deadlines::default(),
            running: Vec::with_capacity(max_num_seqs as usize),
            leaving: Vec::with_capacity(max_num_seqs as usize),
            copies: BlockCopies::default(),
            kv: KVCacheManager::new(&config, hasher, pool),
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
            meter: Meter::default(),
            next_arrival: 0,
            num_grammar_requests: 0,
            events: EventLog::default(),
            hits: Vec::with_capacity(config.blocks_per_request() as usize),
            passed_over: Vec::new(),
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

    /// Plan the next step into the next free buffer set. `None` when nothing can run now; with steps in flight that
    /// may change when the oldest is updated.
    ///
    /// # Errors
    /// When `max_steps_in_flight` steps are in flight: the next one is planned after one was updated.
    pub fn schedule(&mut self) -> Result<Option<SchedulerOutput>, SchedulerError> {
        let set = self.free_set()?;
        self.drain_inbox();
        self.end_overdue(None);
        self.kv.pool.drain_returned();
        self.steps[set].begin(self.last_step + 1, set as u32);
        self.swap_out_leaving(set);
        let mut budget = self.config.max_num_batched_tokens;
        // Who gave up its own blocks was the worst: the others run with them. Each round shrinks the running list.
        while self.schedule_running(set, &mut budget) == Served::UntilOneGaveUp
            && self.steps[set].entries.is_empty()
        {}
        if self.may_admit() {
            self.schedule_waiting(set, budget);
        }
        if self.steps[set].entries.is_empty() {
            self.publish();
            return Ok(None);
        }
        Ok(Some(self.dispatch(set)))
    }

    /// Complete the plan in `set`: it is in flight from now on.
    fn dispatch(&mut self, set: usize) -> SchedulerOutput {
        let step = &mut self.steps[set];
        step.finish();
        step.write_departures(&mut self.finished_rows, &mut self.preempted_rows);
        if !self.kv.cpu.planned().is_empty() {
            self.kv.cpu.take_copies(&mut self.copies);
            step.write_copies(&self.copies);
        }
        if self.num_grammar_requests > 0 {
            let requests = &self.requests;
            let obeys = |entry: &&Entry| requests[entry.tenant.slot as usize].cold.uses_grammar;
            let sampled = step.entries.iter().filter(|entry| entry.sampled);
            step.output.num_structured_output_reqs = sampled.filter(obeys).count() as u32;
        }
        let output = step.output;
        self.last_step = output.step;
        self.in_flight.push_back(set);
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
        let newest = self.in_flight.back().copied();
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
            request.retract_drafts(dropped, self.config.block_size);
        }
        step.replay(&self.requests);
        step.finish();
        Ok(step.output)
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
        self.running.len() + self.leaving.len() + self.waiting.len()
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

    /// The set for the next step. Sets rotate, so that what was written for the last step stays readable.
    fn free_set(&self) -> Result<usize, SchedulerError> {
        match self.in_flight.front() {
            Some(&oldest) if self.in_flight.len() >= self.config.max_steps_in_flight as usize => {
                Err(SchedulerError::StepInFlight {
                    oldest_step: self.steps[oldest].output.step,
                    limit: self.config.max_steps_in_flight,
                })
            }
            _ => Ok(self.last_step as usize % self.steps.len()),
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
        self.stats.num_waiting = (self.waiting.len() + self.leaving.len()) as u64;
        self.stats.num_free_blocks = u64::from(self.kv.pool.num_free());
        self.stats.num_free_cpu_blocks = u64::from(self.kv.cpu.num_free());
        self.handle.shared.counters.publish(&self.stats);
    }
}
