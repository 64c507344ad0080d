//! `World`: one scheduler, one model, the requests that are on their way, and what each of them must become.

mod coverage;
mod draws;
mod ledger;
mod pauses;
mod plan;
mod queue;

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::Duration,
};

use scheduler::{
    AddRequestError, EngineCoreOutput, ExtraKeys, FinishReason, NewRequest, PauseState, PreemptionMode,
    RequestError, RequestKey, RequestStatus, SamplingParams, Scheduler, SchedulerConfig, SchedulerOutput,
    SchedulingPolicy, StepRows, TokenRows, egress::Consumer,
};

use crate::common::{
    self, Random,
    model::{BlockTables, FakeModel},
    reference_output, scheduler,
};
pub(crate) use coverage::Coverage;
use draws::{drafter_of, payer_of, predicted, repetition_of};
use ledger::Ledger;
use pauses::Pauses;
use queue::Queue;

const VOCABULARY: u64 = 2;

/// What a request must become, and what it has become so far.
struct Expectation {
    request_id: String,
    tokens: Vec<i32>,
    /// Why it ends, unless it is aborted or fails.
    reason: FinishReason,
    received: Vec<i32>,
    aborted: bool,
    failed: bool,
    waits_for_grammar: bool,
}

/// A step that was scheduled and not updated.
struct Flight {
    output: SchedulerOutput,
    /// What the model gave, when it has run.
    sampled: Option<Vec<i32>>,
    /// Rows whose tokens were called off, and whether these are drawn once more.
    withheld: Vec<(u32, bool)>,
}

pub(crate) struct World {
    config: SchedulerConfig,
    scheduler: Scheduler,
    consumer: Consumer,
    model: FakeModel,
    /// Block tables as a worker knows them that has learnt of every step, run or not.
    mirror: BlockTables,
    flights: VecDeque<Flight>,
    random: Random,
    live: HashMap<RequestKey, Expectation>,
    num_added: u32,
    /// Requests with nothing about them that lets others pass.
    plain: HashSet<String>,
    /// These, in the order of their first step.
    first_scheduled: Vec<u32>,
    seen: HashSet<String>,
    queue: Queue,
    /// Its own random numbers: who is held back, and whose token is called off.
    patience: Random,
    held: HashSet<String>,
    pauses: Pauses,
    ledger: Ledger,
    coverage: Coverage,
    seed: u64,
    num_operations: u64,
}

/// A run that panics says how to run it again.
impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}, operation {}, {:?}", self.seed, self.num_operations, self.config);
        }
    }
}

fn config_of(seed: u64, random: &mut Random) -> SchedulerConfig {
    let block_size = random.between(1, 16);
    let max_model_len = random.between(4, 40);
    let enough = max_model_len.div_ceil(block_size) + 1;
    let budget = random.between(1, 48);
    let is = |bit: u32| seed >> bit & 1 == 1;
    let swaps = is(1);
    let sometimes = |random: &mut Random, percent: u32, low: u32, high: u32| {
        if random.chance(percent) { random.between(low, high) } else { 0 }
    };
    // Requests of a pipeline have no drafts.
    let is_pipeline = is(2) && seed.is_multiple_of(3);
    let num_speculative_tokens = if is_pipeline { 0 } else { sometimes(random, 50, 1, 4) };
    SchedulerConfig {
        num_blocks: random.between(enough, enough + 12).clamp(4, 64),
        block_size,
        max_model_len,
        max_num_seqs: random.between(1, 8),
        max_num_batched_tokens: if is(3) { budget } else { budget.max(8) },
        enable_prefix_caching: is(4),
        enable_chunked_prefill: is(3),
        long_prefill_token_threshold: sometimes(random, 30, 1, 16),
        scheduling_policy: match seed >> 5 & 3 {
            1 => SchedulingPolicy::Fair,
            _ if is(0) => SchedulingPolicy::Priority,
            _ => SchedulingPolicy::Fcfs,
        },
        watermark: f64::from(sometimes(random, 30, 5, 40)) / 100.0,
        max_num_queued_reqs: 64,
        max_steps_in_flight: if is(2) { random.between(2, 3) } else { 1 },
        pipeline_stages: if is_pipeline { 2 + seed as u32 / 3 % 3 } else { 1 },
        num_speculative_tokens,
        drafter: (num_speculative_tokens > 0 && is(6)).then(|| drafter_of(is(5))),
        preemption_mode: if swaps { PreemptionMode::Swap } else { PreemptionMode::Recompute },
        num_cpu_blocks: if swaps { random.between(0, 24) } else { 0 },
        preemption_immunity_steps: sometimes(random, 70, 1, 6),
        max_look_past: sometimes(random, 40, 1, 4),
        max_times_passed: random.between(0, 4),
        max_loras: seed as u32 % 3,
        max_multimodal_bytes: 0,
        disable_chunked_mm_input: false,
        hash_algorithm: kvblocks::HashAlgorithm::SipHash13,
        max_num_queued_tokens: 0,
        queue_timeout: Duration::ZERO,
        collect_metrics: true,
    }
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x1234_5678_9ABC_DEF1));
        let mut config = config_of(seed, &mut random);
        let queue = Queue::new(seed, &mut config);
        let mut scheduler = scheduler(&config, config.num_buffer_sets() + (seed >> 5 & 1) as usize);
        let consumer = scheduler.take_consumer().expect("taken once");
        Self {
            model: FakeModel::new(&config, VOCABULARY),
            config,
            scheduler,
            consumer,
            mirror: BlockTables::default(),
            flights: VecDeque::new(),
            random,
            live: HashMap::new(),
            num_added: 0,
            plain: HashSet::new(),
            first_scheduled: Vec::new(),
            seen: HashSet::new(),
            queue,
            patience: Random(common::mix(seed ^ 0x4E1D)),
            held: HashSet::new(),
            pauses: Pauses::new(seed),
            ledger: Ledger::default(),
            coverage: Coverage::default(),
            seed,
            num_operations: 0,
        }
    }

    /// One random operation, and a check of everything afterwards.
    pub(crate) fn operate(&mut self) {
        self.num_operations += 1;
        match self.random.between(1, 200) {
            1..=44 => self.add(),
            45..=49 => self.add_fork(),
            50..=55 => self.abort(),
            56..=58 => {
                let preempt_running = self.random.chance(30);
                let all_free = self.scheduler.reset_prefix_cache(preempt_running);
                let holds = preempt_running || !self.holds_blocks();
                assert_eq!(all_free, holds, "a reset works exactly when no request holds a block");
            }
            59..=65 => self.settle_grammars(60),
            66..=140 => {
                self.schedule();
            }
            _ => self.update(),
        }
        self.let_time_pass();
        self.hold();
        self.pause();
        self.scheduler.check_invariants();
    }

    fn holds_blocks(&self) -> bool {
        let stats = self.scheduler.handle().stats();
        stats.num_free_blocks != stats.num_usable_blocks
    }

    fn random_request(&mut self, prompt: Vec<i32>) -> NewRequest {
        let random = &mut self.random;
        let mut params = SamplingParams {
            max_tokens: if random.chance(5) { 0 } else { random.between(1, 24) },
            eos_token_id: random.chance(10).then_some(1),
            stop_token_ids: if random.chance(5) { Box::new([0]) } else { Box::new([]) },
            seed: i64::from(random.between(0, 2)),
            ..SamplingParams::default()
        };
        let request_id = self.num_added.to_string();
        self.num_added += 1;
        let salt = random.chance(10).then_some("salt");
        (params.repetition_detection, params.min_tokens) = repetition_of(self.num_added);
        params.adapter = i64::from(if random.chance(20) { random.between(1, 4) } else { 0 });
        let adapter = (params.adapter > 0).then(|| params.adapter.to_string());
        NewRequest {
            priority: random.between(0, 2) as i32,
            payer: payer_of(self.num_added),
            extra_keys: ExtraKeys::new(adapter.as_deref(), salt, Vec::new()),
            skip_reading_prefix_cache: random.chance(5),
            waits_for_grammar: random.chance(5),
            has_stop_strings: random.chance(30),
            prediction: predicted(self.num_added),
            ..NewRequest::new(self.scheduler.handle().new_key(), &request_id, prompt, params)
        }
    }

    /// A request, sometimes with others that fork it from the start.
    fn add(&mut self) {
        let prompt = self.random_prompt();
        let request = self.random_request(prompt);
        let mut requests = vec![request];
        if self.random.chance(15) {
            for sample in 1..=self.random.between(1, 3) {
                // One that forks no other hits what another one computes in the same step, and may be forked itself.
                let parent = &requests[self.random.between(0, sample - 1) as usize];
                let mut child = NewRequest {
                    fork_from: Some(parent.key).filter(|_| self.random.chance(70)),
                    key: self.scheduler.handle().new_key(),
                    request_id: self.num_added.to_string().into(),
                    ..parent.clone()
                };
                child.params.seed += i64::from(sample);
                if self.random.chance(40) {
                    self.cut(&mut child.prompt_token_ids);
                }
                self.num_added += 1;
                requests.push(child);
            }
            self.note_samples(&requests);
        }
        self.hand_in(&requests);
    }

    /// A request that continues another one from where it is now.
    fn add_fork(&mut self) {
        let mut keys: Vec<_> = self.live.keys().copied().collect();
        keys.sort();
        if keys.is_empty() {
            return;
        }
        let parent = keys[self.random.between(0, keys.len() as u32 - 1) as usize];
        let Some(state) = self.scheduler.request_state(&self.live[&parent].request_id) else { return };
        let mut request = self.random_request(state.token_ids);
        request.fork_from = Some(parent);
        request.waits_for_grammar = false;
        if self.random.chance(30) {
            self.cut(&mut request.prompt_token_ids);
        }
        if self.random.chance(70) {
            request.extra_keys = ExtraKeys::default();
            request.params.adapter = 0;
        }
        self.hand_in(&[request]);
    }

    /// Who forks may want less than all that there is.
    fn cut(&mut self, prompt: &mut Vec<i32>) {
        let length = self.random.between(1, prompt.len() as u32);
        prompt.truncate(length as usize);
    }

    fn fits(&self, request: &NewRequest) -> bool {
        let num_prompt = request.prompt_token_ids.len() as u32;
        let longest = (num_prompt + request.params.max_tokens).min(self.config.max_model_len);
        num_prompt + u32::from(request.params.max_tokens > 0) <= self.config.max_model_len
            && (self.config.enable_chunked_prefill || num_prompt <= self.config.max_num_batched_tokens)
            && longest.div_ceil(self.config.block_size) < self.config.num_blocks
    }

    fn hand_in(&mut self, requests: &[NewRequest]) {
        let fits = requests.iter().all(|request| self.fits(request));
        if let [request] = requests
            && request.fork_from.is_none()
            && !request.waits_for_grammar
            && request.params.adapter == 0
        {
            self.plain.insert(request.request_id.to_string());
        }
        let expectations: Vec<_> = requests
            .iter()
            .map(|request| {
                let (tokens, reason) = reference_output(
                    &request.prompt_token_ids,
                    &request.params,
                    self.config.max_model_len,
                    VOCABULARY,
                );
                let expectation = Expectation {
                    request_id: request.request_id.to_string(),
                    tokens,
                    reason,
                    received: Vec::new(),
                    aborted: false,
                    failed: false,
                    waits_for_grammar: request.waits_for_grammar,
                };
                (request.key, expectation)
            })
            .collect();
        match self.add_to_queue(requests) {
            Ok(()) => {
                assert!(fits, "a request that can never fit was taken in");
                self.live.extend(expectations);
            }
            Err(AddRequestError::QueueFull { limit, .. }) => {
                assert!(self.live.len() + expectations.len() > limit as usize);
            }
            Err(AddRequestError::QueueTokensFull { .. }) => {}
            Err(_) => assert!(!fits, "a request that fits was refused"),
        }
    }

    fn abort(&mut self) {
        let mut ids: Vec<_> = self.live.values().map(|expectation| expectation.request_id.clone()).collect();
        ids.sort();
        let id = match ids.len() {
            0 => "unknown".to_owned(),
            n => ids[self.random.between(0, n as u32 - 1) as usize].clone(),
        };
        for expectation in self.live.values_mut().filter(|expectation| expectation.request_id == id) {
            expectation.aborted = true;
        }
        // Twice: aborting is idempotent.
        self.scheduler.handle().abort_requests([id.as_str(), id.as_str()]);
    }

    /// Some grammars are compiled by now, few of them in vain.
    fn settle_grammars(&mut self, percent: u32) {
        let mut keys: Vec<_> = self.live.keys().copied().collect();
        keys.sort();
        for key in keys {
            let expectation = self.live.get_mut(&key).expect("live");
            if !expectation.waits_for_grammar || !self.random.chance(percent) {
                continue;
            }
            expectation.waits_for_grammar = false;
            if self.random.chance(10) {
                expectation.failed = true;
                self.scheduler.handle().grammar_failed(key);
            } else {
                self.scheduler.handle().grammar_ready(key);
            }
        }
    }

    /// Plan a step, if another one may be in flight. `false` when nothing can run.
    fn schedule(&mut self) -> bool {
        if self.flights.len() == self.config.max_steps_in_flight as usize {
            assert!(self.scheduler.schedule().is_err(), "no more steps in flight than agreed");
            return true;
        }
        let num_gave_way_before = self.num_gave_way();
        let planned = self.scheduler.schedule().expect("a free set");
        self.check_queue();
        let Some(mut output) = planned else {
            self.check_idle();
            self.drain();
            return false;
        };
        let is_speculative = self.config.num_speculative_tokens > 0;
        if is_speculative && self.random.chance(10) {
            output = self.truncate(&output);
        }
        self.coverage.steps += 1;
        self.coverage.overlapping_steps += u64::from(!self.flights.is_empty());
        self.check_plan(&output, num_gave_way_before);
        self.check_rows(&output);
        let arrays = self.scheduler.buffers(&output).expect("in flight");
        self.mirror.apply(&output, arrays);
        self.check_mirror();
        let withheld = self.withhold(&output);
        self.flights.push_back(Flight { output, sampled: None, withheld });
        if self.random.chance(50) {
            self.run_model();
        }
        true
    }

    /// Some drafts were not made after all.
    fn truncate(&mut self, output: &SchedulerOutput) -> SchedulerOutput {
        let num_kept: Vec<u32> = (0..output.num_reqs).map(|_| self.random.between(0, 2)).collect();
        let shorter = self.scheduler.truncate_drafts(output, &num_kept).expect("the newest step");
        self.coverage.truncated_steps += u64::from(shorter != *output);
        shorter
    }

    /// Run the oldest step that was not run yet.
    fn run_model(&mut self) {
        if let Some(flight) = self.flights.iter_mut().find(|flight| flight.sampled.is_none()) {
            let arrays = self.scheduler.buffers(&flight.output).expect("in flight");
            flight.sampled = Some(self.model.execute(&flight.output, arrays));
            let again = flight.withheld.iter().filter(|(_, is_taken_back)| *is_taken_back);
            again.for_each(|&(row, _)| self.model.take_back(row));
        }
    }

    /// Bring the oldest step in flight home, or let it fail.
    fn update(&mut self) {
        if self.flights.is_empty() {
            return;
        }
        if self.random.chance(2) {
            self.fail();
            return;
        }
        if self.flights[0].sampled.is_none() {
            self.run_model();
        }
        let flight = self.flights.pop_front().expect("checked above");
        let sampled = flight.sampled.expect("it has run");
        if self.random.chance(5) {
            self.abort();
        }
        self.count_late_tokens(&flight.output);
        let num_columns = 1 + self.config.num_speculative_tokens as usize;
        let rows = TokenRows { token_ids: &sampled, num_columns };
        let stale = SchedulerOutput { step: flight.output.step + 1, ..flight.output };
        assert!(self.scheduler.update_from_output(&stale, rows).is_err(), "only the oldest step is updated");
        let drafts = self.random_drafts(flight.output.num_sampled as usize);
        let num_columns = if drafts.is_empty() { 0 } else { self.config.num_speculative_tokens as usize };
        let drafts = TokenRows { token_ids: &drafts, num_columns };
        let rows = StepRows { drafts, ..StepRows::from(rows) };
        self.scheduler.update_from_output(&flight.output, rows).expect("in flight");
        self.drain();
    }

    fn random_drafts(&mut self, num_rows: usize) -> Vec<i32> {
        let makes_none = self.config.max_steps_in_flight > 1 || self.config.drafter.is_some();
        if makes_none || self.random.chance(20) {
            return Vec::new();
        }
        let num_ids = num_rows * self.config.num_speculative_tokens as usize;
        (0..num_ids)
            .map(|_| self.random.between(0, 6) as i32 / 3 - i32::from(self.random.chance(10)))
            .collect()
    }

    fn count_late_tokens(&mut self, output: &SchedulerOutput) {
        let view = self.scheduler.step_view(output).expect("in flight");
        let is_late = |id: &str| {
            let state = self.scheduler.request_state(id);
            state.is_some_and(|state| {
                matches!(state.status, RequestStatus::Preempted | RequestStatus::Swapped)
            })
        };
        let late = view.scheduled.iter().filter(|row| is_late(&row.request_id)).count();
        self.coverage.late_tokens += late as u64;
    }

    /// The oldest step fails, and with it all that are in flight. Some were run before, some never are.
    fn fail(&mut self) {
        for flight in &self.flights {
            let arrays = self.scheduler.buffers(&flight.output).expect("in flight");
            if flight.sampled.is_none() {
                self.model.skip(&flight.output, arrays);
            }
            let view = self.scheduler.step_view(&flight.output).expect("in flight");
            for expectation in self.live.values_mut() {
                expectation.failed |=
                    view.scheduled.iter().any(|row| row.request_id == expectation.request_id);
            }
        }
        let oldest = self.flights[0].output;
        self.flights.clear();
        if self.random.chance(20) {
            self.abort();
        }
        self.scheduler.fail_step(&oldest).expect("in flight");
        self.coverage.failed_steps += 1;
        self.drain();
    }

    fn drain(&mut self) {
        let mut records = Vec::new();
        self.consumer.drain(|record| records.push(record));
        for record in records {
            self.ledger.note(&record);
            if let Some(reason) = record.unsettled_reason() {
                // Its last text has come to a stop string, or not.
                let reason = if self.random.chance(50) { FinishReason::Stop } else { reason };
                self.ledger.settle(record.key, reason);
                self.scheduler.handle().settle_end(reason);
                self.coverage.settled_ends += 1;
            }
            self.receive(&record);
        }
    }

    fn receive(&mut self, record: &EngineCoreOutput) {
        let expectation = self.live.get_mut(&record.key).expect("an output belongs to a live request");
        if record.new_token_id >= 0 {
            expectation.received.push(record.new_token_id);
        }
        let received = &expectation.received;
        assert!(
            expectation.tokens.starts_with(received),
            "{received:?} is not how {:?} begins",
            expectation.tokens
        );
        let Some(reason) = record.finish_reason else { return };
        match reason {
            FinishReason::Abort => assert!(expectation.aborted),
            FinishReason::Error if record.error == RequestError::QueueTimeout => {
                assert!(self.queue.overdue.contains(&record.key));
            }
            FinishReason::Error => assert!(expectation.failed),
            FinishReason::Stop | FinishReason::Length | FinishReason::Repetition => {
                assert_eq!((received, reason), (&expectation.tokens, expectation.reason));
                self.coverage.repetitions += u64::from(reason == FinishReason::Repetition);
            }
        }
        self.live.remove(&record.key);
        self.coverage.requests += 1;
    }

    /// Let everything that is on its way end, and look at what is left.
    pub(crate) fn finish(mut self) -> Coverage {
        let mut rounds = 0;
        self.scheduler.set_pause_state(PauseState::Unpaused);
        while self.scheduler.has_unfinished_requests() || !self.flights.is_empty() {
            self.settle_grammars(100);
            self.release();
            self.schedule();
            self.update();
            self.scheduler.check_invariants();
            rounds += 1;
            assert!(rounds < 100_000, "{} requests never finish", self.live.len());
        }
        self.drain();
        assert!(self.live.is_empty(), "{} requests were lost", self.live.len());
        let stats = self.scheduler.handle().stats();
        assert_eq!(stats.num_free_blocks, stats.num_usable_blocks, "every block came back");
        assert_eq!(stats.num_free_cpu_blocks, u64::from(self.config.num_cpu_blocks), "on both tiers");
        assert_eq!(self.scheduler.handle().num_queued(), 0);
        assert_eq!(self.scheduler.handle().num_queued_tokens(), 0);
        assert_eq!(stats.num_queue_timeouts, self.coverage.overdue);
        self.ledger.check(&self.scheduler.handle().metrics());
        assert!(self.scheduler.reset_prefix_cache(false));
        self.scheduler.check_invariants();
        if self.config.scheduling_policy == SchedulingPolicy::Fcfs && self.config.max_look_past == 0 {
            assert!(self.first_scheduled.is_sorted(), "FCFS schedules in the order of arrival");
        }
        Coverage {
            preemptions: stats.num_preemptions,
            swapped_out: stats.num_swapped_out,
            swapped_in: stats.num_swapped_in,
            hit_tokens: stats.prefix_cache_hits,
            forks: stats.num_forks,
            look_past: stats.num_look_past,
            drafts: stats.num_draft_tokens,
            accepted: stats.num_accepted_tokens,
            host_drafts: if self.config.drafter.is_some() { stats.num_draft_tokens } else { 0 },
            host_accepted: if self.config.drafter.is_some() { stats.num_accepted_tokens } else { 0 },
            ..std::mem::take(&mut self.coverage)
        }
    }
}
