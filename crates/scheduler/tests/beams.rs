//! Searches of several beams against a naive one that keeps whole sequences: among other requests, in small pools, with
//! preemption, aborts, failures and overlapping steps. What a search finds does not depend on any of that.

mod common;

use std::collections::{HashMap, VecDeque};

use common::{
    Random,
    beam_search::{VOCABULARY, candidates_of, naive_search},
    model::{BlockTables, FakeModel},
    reference_tokens, request, scheduler, setting,
};
use scheduler::{
    AddRequestError, FinishReason, LogprobRows, NewRequest, PooledRows, PromptLogprobRows, RequestError,
    RequestKey, RequestStatus, SamplingParams, Scheduler, SchedulerConfig, SchedulerOutput, SchedulingPolicy,
    StepRows, TokenLogprobs, TokenRows, egress::Consumer, step_buffers::SAMPLING_INT_COLUMNS,
};

/// What a request must become, and what it has become so far.
struct Expectation {
    /// Its output, and the log-probabilities of a beam.
    tokens: Vec<i32>,
    logprobs: Option<Vec<f32>>,
    /// Whether a token ends it; of a beam.
    is_stopped: Option<bool>,
    received: Vec<i32>,
    received_logprobs: Vec<f32>,
    /// The others of its search.
    search: Vec<RequestKey>,
    aborted: bool,
}

/// A step in flight, with what the model gave: sampled ids and the values behind them.
struct Flight {
    output: SchedulerOutput,
    sampled: Vec<i32>,
    values: Vec<u64>,
    is_beam: Vec<bool>,
}

#[derive(Default, Debug)]
struct Coverage {
    searches: u64,
    compared: u64,
    preempted: u64,
    aborted: u64,
    failed: u64,
    copies: u64,
}

struct World {
    config: SchedulerConfig,
    scheduler: Scheduler,
    consumer: Consumer,
    model: FakeModel,
    mirror: BlockTables,
    flights: VecDeque<Flight>,
    random: Random,
    live: HashMap<RequestKey, Expectation>,
    logprobs: HashMap<RequestKey, VecDeque<TokenLogprobs>>,
    beam_rows: HashMap<i32, bool>,
    num_added: u32,
    coverage: Coverage,
}

fn config_of(seed: u64, random: &mut Random) -> SchedulerConfig {
    let is = |bit: u32| seed >> bit & 1 == 1;
    let max_model_len = random.between(8, 32);
    SchedulerConfig {
        num_blocks: random.between(24, 60),
        block_size: random.between(1, 8),
        max_model_len,
        max_num_seqs: random.between(4, 10),
        max_num_batched_tokens: if is(0) { random.between(4, 24) } else { 40 },
        enable_chunked_prefill: is(0),
        enable_prefix_caching: is(1),
        max_steps_in_flight: if is(2) { random.between(2, 3) } else { 1 },
        scheduling_policy: match seed >> 3 & 3 {
            1 => SchedulingPolicy::Priority,
            2 => SchedulingPolicy::Fair,
            _ => SchedulingPolicy::Fcfs,
        },
        preemption_immunity_steps: random.between(0, 4),
        max_look_past: random.between(0, 2),
        max_num_queued_reqs: 64,
        ..SchedulerConfig::new(64, max_model_len)
    }
}

impl World {
    fn new(config: SchedulerConfig, seed: u64) -> Self {
        let mut scheduler = scheduler(&config, config.num_buffer_sets());
        let consumer = scheduler.take_consumer().expect("the first to ask");
        let model = FakeModel::new(&config, VOCABULARY);
        Self {
            scheduler,
            consumer,
            model,
            mirror: BlockTables::default(),
            flights: VecDeque::new(),
            random: Random(seed),
            live: HashMap::new(),
            logprobs: HashMap::new(),
            beam_rows: HashMap::new(),
            num_added: 0,
            coverage: Coverage::default(),
            config,
        }
    }

    fn prompt(&mut self) -> Vec<i32> {
        let longest = self.config.max_model_len - 1;
        let longest = if self.config.enable_chunked_prefill {
            longest
        } else {
            longest.min(self.config.max_num_batched_tokens)
        };
        let length = self.random.between(1, longest);
        (0..length).map(|_| self.random.between(0, 1) as i32).collect()
    }

    fn id(&mut self) -> String {
        self.num_added += 1;
        format!("r{}", self.num_added)
    }

    fn add_ordinary(&mut self) {
        let (prompt, id) = (self.prompt(), self.id());
        let max_tokens = self.random.between(1, 12);
        let mut new = request(&self.scheduler, &id, prompt, max_tokens);
        new.params.seed = i64::from(self.num_added);
        new.priority = self.random.between(0, 2) as i32;
        let tokens =
            reference_tokens(&new.prompt_token_ids, &new.params, self.config.max_model_len, VOCABULARY);
        let key = new.key;
        if self.scheduler.handle().add_request(new).is_ok() {
            self.expect(key, tokens, None, None, vec![key]);
        }
    }

    fn expect(
        &mut self,
        key: RequestKey,
        tokens: Vec<i32>,
        logprobs: Option<Vec<f32>>,
        is_stopped: Option<bool>,
        search: Vec<RequestKey>,
    ) {
        let (received, received_logprobs) = (Vec::new(), Vec::new());
        let expectation =
            Expectation { tokens, logprobs, is_stopped, received, received_logprobs, search, aborted: false };
        self.live.insert(key, expectation);
    }

    fn add_search(&mut self) {
        let width = self.random.between(1, 4.min(self.config.max_num_seqs));
        let params = SamplingParams {
            max_tokens: self.random.between(1, 10),
            eos_token_id: self.random.chance(60).then_some(3),
            stop_token_ids: if self.random.chance(30) { [5].into() } else { [].into() },
            length_penalty: [-1.0, 0.0, 1.0, 2.0][self.random.between(0, 3) as usize],
            beam_width: i64::from(width),
            num_logprobs: 100,
            ..SamplingParams::default()
        };
        let prompt = self.prompt();
        self.search(&prompt, &params);
    }

    fn search(&mut self, prompt: &[i32], params: &SamplingParams) -> bool {
        let Some(found) = naive_search(prompt, params, self.config.max_model_len) else { return false };
        let keys: Vec<RequestKey> =
            (0..params.beam_width).map(|_| self.scheduler.handle().new_key()).collect();
        let priority = self.random.between(0, 2) as i32;
        let beams = keys
            .iter()
            .map(|&key| {
                let fork_from = (key != keys[0]).then_some(keys[0]);
                let id = self.id();
                NewRequest {
                    priority,
                    fork_from,
                    ..NewRequest::new(key, &id, prompt.to_vec(), params.clone())
                }
            })
            .collect();
        match self.scheduler.handle().add_requests(beams) {
            Ok(()) => {
                assert_eq!(found.len(), keys.len(), "the naive search gives as many");
                for (&key, beam) in keys.iter().zip(found) {
                    self.expect(key, beam.tokens, Some(beam.logprobs), Some(beam.is_stopped), keys.clone());
                }
                self.coverage.searches += 1;
                true
            }
            Err(AddRequestError::NeverFits { .. } | AddRequestError::QueueFull { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    }

    fn schedule(&mut self) {
        if self.flights.len() >= self.config.max_steps_in_flight as usize {
            return self.update(false);
        }
        let before = self.scheduler.handle().stats().num_preemptions;
        let Some(output) = self.scheduler.schedule().expect("a free set") else {
            assert!(
                !self.flights.is_empty() || self.scheduler.num_unfinished_requests() == 0,
                "a request waits, and nothing runs"
            );
            return;
        };
        self.coverage.preempted += self.scheduler.handle().stats().num_preemptions - before;
        let arrays = self.scheduler.buffers(&output).expect("in flight");
        self.mirror.apply(&output, arrays);
        let is_beam = self.beams_of(&output);
        let arrays = self.scheduler.buffers(&output).expect("in flight");
        let sampled = self.model.execute(&output, arrays);
        let values = self.model.last_values.clone();
        self.flights.push_back(Flight { output, sampled, values, is_beam });
    }

    /// Which of the sampled rows are beams.
    fn beams_of(&mut self, output: &SchedulerOutput) -> Vec<bool> {
        let arrays = self.scheduler.buffers(output).expect("in flight");
        let column = SAMPLING_INT_COLUMNS.iter().position(|&name| name == "beam_width").expect("it is there");
        for index in 0..output.num_new_reqs as usize {
            let width = arrays.sampling_int.read(index * SAMPLING_INT_COLUMNS.len() + column);
            self.beam_rows.insert(arrays.new_rows.read(index), width > 0);
        }
        let rows = arrays.sampled_rows.to_vec(output.num_sampled as usize);
        rows.iter().map(|row| self.beam_rows[row]).collect()
    }

    fn update(&mut self, with_nan: bool) {
        let Some(flight) = self.flights.pop_front() else { return };
        let mut sampled = flight.sampled.clone();
        let (mut places, mut ids, mut values) = (Vec::new(), Vec::new(), Vec::new());
        let num_columns = 1 + VOCABULARY as usize;
        for (place, (&value, &is_beam)) in flight.values.iter().zip(&flight.is_beam).enumerate() {
            if is_beam {
                let all = candidates_of(value);
                sampled[place] = all[0].0;
                if with_nan && self.random.chance(20) {
                    sampled[place] = -1;
                    continue;
                }
                places.push(place as i32);
                ids.extend([all[0].0].into_iter().chain(all.iter().map(|&(id, _)| id)));
                values.extend([all[0].1].into_iter().chain(all.iter().map(|&(_, logprob)| logprob)));
            }
        }
        let ranks = vec![1; places.len()];
        let rows = StepRows {
            sampled: TokenRows::column(&sampled),
            drafts: TokenRows::NONE,
            logprobs: LogprobRows {
                places: &places,
                token_ids: &ids,
                logprobs: &values,
                ranks: &ranks,
                num_columns,
            },
            prompt_logprobs: PromptLogprobRows::NONE,
            pooled: PooledRows::NONE,
        };
        self.scheduler.update_from_output(&flight.output, rows).expect("the oldest step");
        self.read();
    }

    fn abort_one(&mut self) {
        let mut keys: Vec<RequestKey> = self.live.keys().copied().collect();
        if keys.is_empty() {
            return;
        }
        keys.sort(); // a seed gives the same world again
        let key = keys[self.random.next() as usize % keys.len()];
        for other in self.live[&key].search.clone() {
            if let Some(one) = self.live.get_mut(&other) {
                one.aborted = true;
            }
        }
        self.scheduler.handle().abort_key(key);
        self.coverage.aborted += 1;
    }

    fn read(&mut self) {
        loop {
            self.consumer.look();
            let logprobs = &mut self.logprobs;
            self.consumer.take_logprobs(|given| logprobs.entry(given.key).or_default().push_back(given));
            let mut records = Vec::new();
            self.consumer.drain_seen(|record| records.push(record));
            if records.is_empty() {
                return;
            }
            for record in records {
                let one = self.live.get_mut(&record.key).expect("a live request");
                if record.new_token_id >= 0 {
                    one.received.push(record.new_token_id);
                    if one.logprobs.is_some() {
                        let given = self.logprobs.get_mut(&record.key).and_then(VecDeque::pop_front);
                        let given = given.expect("one for each token of a beam");
                        assert_eq!(given.entries[0].0, record.new_token_id);
                        one.received_logprobs.push(given.entries[0].1);
                    }
                }
                if let Some(reason) = record.finish_reason {
                    let one = self.live.remove(&record.key).expect("it is live");
                    self.coverage.compared += u64::from(check(&one, reason, record.error));
                    self.coverage.failed += u64::from(reason == FinishReason::Error);
                }
            }
            self.scheduler.hand_over();
        }
    }

    fn operate(&mut self) {
        match self.random.between(0, 99) {
            0..8 => self.add_search(),
            8..16 => self.add_ordinary(),
            16..18 => self.abort_one(),
            18 => {
                self.scheduler.reset_prefix_cache(self.random.chance(20));
            }
            19 => self.update(true),
            20..60 => self.schedule(),
            _ => self.update(false),
        }
        self.read();
        self.scheduler.check_invariants();
    }

    fn finish(mut self) -> Coverage {
        for _ in 0..200_000 {
            if self.live.is_empty() {
                break;
            }
            self.schedule();
            self.update(false);
            self.read(); // an abort ends a request without a step
        }
        assert!(self.live.is_empty(), "{} requests never end", self.live.len());
        while !self.flights.is_empty() {
            self.update(false);
        }
        self.scheduler.check_invariants();
        let stats = self.scheduler.handle().stats();
        assert_eq!(stats.num_free_blocks, stats.num_usable_blocks, "all blocks are free again");
        assert!(self.logprobs.values().all(VecDeque::is_empty), "none without its token");
        self.coverage.copies = stats.num_beam_copies;
        self.coverage
    }
}

/// Whether what a request became was compared.
fn check(one: &Expectation, reason: FinishReason, error: RequestError) -> bool {
    match reason {
        FinishReason::Abort => assert!(one.aborted, "it was not aborted"),
        FinishReason::Error => assert_eq!(error, RequestError::NoToken),
        _ => {
            assert_eq!(one.received, one.tokens);
            let Some(logprobs) = &one.logprobs else { return false };
            assert_eq!(&one.received_logprobs, logprobs);
            assert_eq!(one.is_stopped, Some(reason == FinishReason::Stop));
            return true;
        }
    }
    assert!(one.received.is_empty() || one.logprobs.is_none(), "a search says all or nothing");
    false
}

#[test]
fn what_a_search_finds_does_not_depend_on_company_memory_or_budget() {
    let operations = setting("RUSTVLLM_TEST_OPERATIONS", 600);
    let seeds = setting("RUSTVLLM_TEST_SEEDS", 32);
    let first = setting("RUSTVLLM_TEST_FIRST_SEED", 0);
    let mut sum = Coverage::default();
    for seed in first..first + seeds {
        let config = config_of(seed, &mut Random(seed ^ 0xBEA));
        println!("seed {seed}: {config:?}");
        let mut world = World::new(config, seed);
        for _ in 0..operations {
            world.operate();
        }
        let coverage = world.finish();
        sum.searches += coverage.searches;
        sum.compared += coverage.compared;
        sum.preempted += coverage.preempted;
        sum.aborted += coverage.aborted;
        sum.failed += coverage.failed;
        sum.copies += coverage.copies;
    }
    println!("{sum:?}");
    let (most, few) = (seeds * operations / 100, seeds * operations / 5_000);
    assert!(sum.compared >= most && sum.searches >= most, "{sum:?}");
    assert!(sum.preempted >= few && sum.failed >= few && sum.aborted >= few && sum.copies >= most, "{sum:?}");
}

fn roomy(width: u32) -> SchedulerConfig {
    SchedulerConfig {
        num_blocks: 400,
        block_size: 4,
        max_model_len: 64,
        max_num_seqs: width.max(8),
        max_num_batched_tokens: 64,
        ..SchedulerConfig::new(400, 64)
    }
}

fn params(width: u32, max_tokens: u32) -> SamplingParams {
    SamplingParams { beam_width: width.into(), max_tokens, num_logprobs: 100, ..SamplingParams::default() }
}

#[test]
fn beams_share_their_prompt_and_what_they_have_in_common() {
    for (width, prompt_len) in [(2, 16), (4, 17), (8, 19), (8, 1)] {
        let mut world = World::new(roomy(width), 3);
        let prompt: Vec<i32> = (0..prompt_len).collect();
        assert!(world.search(&prompt, &params(width, 20)));
        let (mut most, mut num_steps) = (0, 0);
        while !world.live.is_empty() {
            world.schedule();
            num_steps += 1;
            let stats = world.scheduler.handle().stats();
            let used = (stats.num_usable_blocks - stats.num_free_blocks) as u32;
            // The step that was just planned has one token of each beam less than there are steps.
            let own = (prompt_len as u32 % 4 + num_steps - 1).div_ceil(4);
            let bound = if num_steps == 1 {
                (prompt_len as u32).div_ceil(4)
            } else {
                prompt_len as u32 / 4 + width * own
            };
            assert!(used <= bound, "{used} blocks of {bound} in step {num_steps}");
            most = most.max(used);
            world.update(false);
        }
        assert_eq!(num_steps, 20, "one step for each token");
        assert!(most < prompt_len as u32 / 4 + width * 6, "{most}: some of the output is shared");
        assert!(world.finish().compared == width.into());
    }
}

#[test]
fn a_search_waits_for_rows_and_runs_with_others() {
    let mut world = World::new(SchedulerConfig { max_num_seqs: 4, ..roomy(4) }, 5);
    for _ in 0..2 {
        world.add_ordinary();
    }
    world.schedule();
    assert!(world.search(&[1, 2, 3], &params(4, 6)));
    world.update(false);
    world.schedule();
    assert_eq!(world.scheduler.waiting_request_ids(), ["r3"], "two rows are taken: it waits, as one");
    world.finish();
}

#[test]
fn two_searches_that_do_not_fit_together_end_one_after_the_other() {
    let config =
        SchedulerConfig { num_blocks: 28, max_num_seqs: 12, preemption_immunity_steps: 0, ..roomy(4) };
    let mut world = World::new(config, 9);
    for first in 0..3 {
        assert!(world.search(&[first, 1, 2, 3, 4, 5], &params(4, 20)));
    }
    let coverage = world.finish();
    assert_eq!(coverage.compared, 12);
    assert!(coverage.preempted > 0, "they do not fit together");
}

#[test]
fn an_abort_of_one_beam_ends_all_of_them() {
    let mut world = World::new(roomy(4), 5);
    assert!(world.search(&[1, 2, 3], &params(4, 20)));
    for _ in 0..5 {
        world.schedule();
        world.update(false);
    }
    world.schedule();
    assert_eq!(world.scheduler.running_request_ids().len(), 4);
    world.abort_one();
    world.update(false);
    assert!(world.live.is_empty(), "all have ended");
    world.finish();
}

#[test]
fn a_step_that_fails_ends_the_whole_search() {
    let mut world = World::new(roomy(4), 5);
    assert!(world.search(&[1, 2, 3], &params(4, 20)));
    for _ in 0..3 {
        world.schedule();
        world.update(false);
    }
    world.schedule();
    let flight = world.flights.pop_front().expect("a step is in flight");
    assert_eq!(world.scheduler.fail_step(&flight.output).expect("the oldest"), 4);
    let mut ends = Vec::new();
    world.consumer.look();
    world.consumer.drain_seen(|record| ends.push(record.error));
    assert_eq!(ends, [RequestError::StepFailed; 4]);
    world.live.clear();
    world.finish();
}

#[test]
fn what_is_no_search_is_refused() {
    let handle_error = |width: u32, num_requests: usize, prompt_len: i32, max_tokens: u32| {
        let config = SchedulerConfig { num_blocks: 20, max_num_seqs: 4, ..roomy(2) };
        let world = World::new(SchedulerConfig { max_num_seqs: 4, ..config }, 1);
        let handle = world.scheduler.handle();
        let new =
            |_| NewRequest::new(handle.new_key(), "x", (0..prompt_len).collect(), params(width, max_tokens));
        handle.add_requests((0..num_requests).map(new).collect())
    };
    assert_eq!(handle_error(5, 5, 4, 4), Err(AddRequestError::TooManyBeams { beam_width: 5, limit: 4 }));
    assert_eq!(handle_error(3, 2, 4, 4), Err(AddRequestError::WrongNumberOfBeams { beam_width: 3, got: 2 }));
    let never = AddRequestError::NeverFits { needed_blocks: 24, usable_blocks: 19, block_size: 4 };
    assert_eq!(handle_error(4, 4, 4, 20), Err(never));
    assert_eq!(handle_error(2, 2, 4, 20), Ok(()));
}

#[test]
fn a_beam_with_an_id_in_use_ends_the_search_and_nothing_else() {
    let mut world = World::new(roomy(2), 1);
    world.add_ordinary();
    world.schedule();
    let handle = world.scheduler.handle();
    let keys = [handle.new_key(), handle.new_key()];
    let beam = |key, id| NewRequest::new(key, id, vec![1, 2], params(2, 4));
    handle.add_requests(vec![beam(keys[0], "a"), beam(keys[1], "r1")]).expect("the queue has room");
    world.scheduler.take_arrivals();
    let mut ends = Vec::new();
    world.consumer.look();
    world.consumer.drain_seen(|record| ends.push((record.key, record.error)));
    ends.sort_by_key(|end| end.0);
    assert_eq!(ends, keys.map(|key| (key, RequestError::DuplicateRequestId)));
    assert_eq!(world.scheduler.request_state("r1").map(|one| one.status), Some(RequestStatus::Running));
    world.finish();
}
