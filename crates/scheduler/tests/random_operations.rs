//! Random operations against the fake model and the naive reference: after every operation all invariants
//! hold, and every request ends with exactly the tokens it would have had alone.
//!
//! `RUSTVLLM_TEST_SEEDS` and `RUSTVLLM_TEST_OPERATIONS` make a long run.

mod common;

use std::collections::{HashMap, HashSet};

use common::{FakeModel, Random, reference_tokens, scheduler};
use scheduler::{
    AddRequestError, EngineCoreOutput, FinishReason, NewRequest, RequestKey, SamplingParams, Scheduler,
    SchedulerConfig, SchedulingPolicy, egress::Consumer,
};

const VOCABULARY: u64 = 2;

struct Expectation {
    request_id: String,
    tokens: Vec<i32>,
    received: Vec<i32>,
    aborted: bool,
    failed: bool,
}

struct World {
    config: SchedulerConfig,
    scheduler: Scheduler,
    consumer: Consumer,
    model: FakeModel,
    random: Random,
    live: HashMap<RequestKey, Expectation>,
    num_added: u32,
    num_finished: u32,
    first_scheduled: Vec<u32>,
    seen: HashSet<String>,
}

fn mode(seed: u64, random: &mut Random) -> SchedulerConfig {
    let block_size = random.between(1, 16);
    let max_model_len = random.between(4, 40);
    let enough = max_model_len.div_ceil(block_size) + 1;
    let budget = random.between(1, 48);
    let enable_chunked_prefill = seed & 1 == 0;
    SchedulerConfig {
        num_blocks: random.between(enough, enough.max(64)).min(enough + random.between(0, 12)).max(4),
        block_size,
        max_model_len,
        max_num_seqs: random.between(1, 8),
        max_num_batched_tokens: if enable_chunked_prefill { budget } else { budget.max(8) },
        enable_prefix_caching: seed & 2 == 0,
        enable_chunked_prefill,
        long_prefill_token_threshold: if random.chance(30) { random.between(1, 16) } else { 0 },
        scheduling_policy: if seed & 4 == 0 { SchedulingPolicy::Fcfs } else { SchedulingPolicy::Priority },
        watermark: if random.chance(30) { 0.1 } else { 0.0 },
        max_num_queued_reqs: 64,
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x1234_5678_9ABC_DEF1));
        let config = mode(seed, &mut random);
        let mut scheduler = scheduler(&config, 2);
        let consumer = scheduler.take_consumer().expect("taken once");
        let model = FakeModel::new(&config, VOCABULARY);
        Self {
            config,
            scheduler,
            consumer,
            model,
            random,
            live: HashMap::new(),
            num_added: 0,
            num_finished: 0,
            first_scheduled: Vec::new(),
            seen: HashSet::new(),
        }
    }

    fn add(&mut self) {
        let random = &mut self.random;
        let length = random.between(1, self.config.max_model_len + 2);
        // Few families of prompts, so that prefixes are shared often.
        let family = random.between(0, 2);
        let prompt: Vec<i32> = (0..length)
            .map(|i| if random.chance(3) { 1 } else { (common::mix(u64::from(family << 8 | i)) & 1) as i32 })
            .collect();
        let params = SamplingParams {
            max_tokens: if random.chance(5) { 0 } else { random.between(1, 24) },
            eos_token_id: random.chance(10).then_some(1),
            stop_token_ids: if random.chance(5) { Box::new([0]) } else { Box::new([]) },
            ..SamplingParams::default()
        };
        let request_id = self.num_added.to_string();
        self.num_added += 1;
        let key = self.scheduler.handle().new_key();
        let tokens = reference_tokens(&prompt, &params, self.config.max_model_len, VOCABULARY);
        let num_prompt = prompt.len() as u32;
        let longest = (num_prompt + params.max_tokens).min(self.config.max_model_len);
        let fits = num_prompt + u32::from(params.max_tokens > 0) <= self.config.max_model_len
            && (self.config.enable_chunked_prefill || num_prompt <= self.config.max_num_batched_tokens)
            && longest.div_ceil(self.config.block_size) < self.config.num_blocks;
        let added = self.scheduler.handle().add_request(NewRequest {
            key,
            request_id: request_id.as_str().into(),
            prompt_token_ids: prompt,
            params,
            priority: self.random.between(0, 2) as i32,
            extra_keys: if self.random.chance(10) { b"salt".as_slice().into() } else { Box::new([]) },
            skip_reading_prefix_cache: self.random.chance(5),
        });
        match added {
            Ok(()) => {
                assert!(fits, "a request that can never fit was taken in");
                let expectation =
                    Expectation { request_id, tokens, received: Vec::new(), aborted: false, failed: false };
                self.live.insert(key, expectation);
            }
            Err(AddRequestError::QueueFull { limit }) => assert!(self.live.len() >= limit as usize),
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

    fn step(&mut self) -> bool {
        let abort_in_flight = self.random.chance(5);
        let fails = self.random.chance(2);
        let Some(output) = self.scheduler.schedule().expect("a free set") else {
            assert!(
                self.scheduler.running_request_ids().is_empty(),
                "running requests always have something to run"
            );
            self.drain();
            return false;
        };
        self.check_plan(&output);
        let arrays = self.scheduler.buffers(&output).expect("in flight");
        // A step that fails computes nothing of what it registered.
        let sampled =
            if fails { self.model.skip(&output, arrays) } else { self.model.execute(&output, arrays) };
        self.check_mirror();
        self.scheduler.check_invariants();
        if abort_in_flight {
            self.abort();
        }
        if fails {
            let view = self.scheduler.step_view(&output).expect("in flight");
            for expectation in self.live.values_mut() {
                expectation.failed |=
                    view.scheduled.iter().any(|row| row.request_id == expectation.request_id);
            }
            self.scheduler.fail_step(&output).expect("in flight");
        } else {
            self.scheduler.update_from_output(&output, &sampled, 1).expect("in flight");
        }
        self.drain();
        true
    }

    fn check_plan(&mut self, output: &scheduler::SchedulerOutput) {
        let view = self.scheduler.step_view(output).expect("in flight");
        let total: u32 = view.scheduled.iter().map(|row| row.num_scheduled_tokens).sum();
        assert_eq!(total, output.total_num_scheduled_tokens);
        assert!(total <= self.config.max_num_batched_tokens, "the token budget holds");
        assert!(view.scheduled.len() <= self.config.max_num_seqs as usize);
        let mut ids = HashSet::new();
        for row in &view.scheduled {
            assert!(row.num_scheduled_tokens >= 1 && ids.insert(row.request_id.clone()), "each request once");
            assert!(row.num_computed_tokens + row.num_scheduled_tokens <= self.config.max_model_len);
            if self.seen.insert(row.request_id.clone()) {
                self.first_scheduled.push(row.request_id.parse().expect("a number"));
            }
        }
        if !view.preempted_req_ids.is_empty() {
            assert!(
                view.scheduled.iter().all(|row| !row.is_new && !row.is_resumed),
                "no admission beside a preemption"
            );
        }
    }

    /// The worker that applied only differences knows exactly the scheduler's block tables.
    fn check_mirror(&self) {
        for id in self.scheduler.running_request_ids() {
            let state = self.scheduler.request_state(&id).expect("running");
            let blocks: Vec<u32> = state.block_table.iter().map(|block| block.0).collect();
            assert_eq!(self.model.block_table(state.row.expect("running")), blocks, "request {id}");
        }
    }

    fn drain(&mut self) {
        let mut records = Vec::new();
        self.consumer.drain(|record| records.push(record));
        for record in records {
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
            FinishReason::Error => assert!(expectation.failed),
            FinishReason::Stop | FinishReason::Length => assert_eq!(*received, expectation.tokens),
            FinishReason::Repetition => panic!("nothing looks for repetitions"),
        }
        self.live.remove(&record.key);
        self.num_finished += 1;
    }

    fn finish(&mut self) {
        let mut steps = 0;
        while self.scheduler.has_unfinished_requests() {
            self.step();
            steps += 1;
            assert!(steps < 100_000, "{} requests never finish", self.live.len());
        }
        self.drain();
        assert!(self.live.is_empty(), "{} requests were lost", self.live.len());
        let stats = self.scheduler.handle().stats();
        assert_eq!(stats.num_free_blocks, stats.num_usable_blocks, "every block came back");
        assert_eq!(self.scheduler.handle().num_queued(), 0);
        assert!(self.scheduler.reset_prefix_cache());
        self.scheduler.check_invariants();
        if self.config.scheduling_policy == SchedulingPolicy::Fcfs {
            assert!(self.first_scheduled.is_sorted(), "FCFS schedules in the order of arrival");
        }
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

#[test]
fn tokens_do_not_depend_on_company_memory_or_budget() {
    let operations = setting("RUSTVLLM_TEST_OPERATIONS", 1_500);
    let (mut preemptions, mut hits, mut finished) = (0, 0, 0);
    for seed in 0..setting("RUSTVLLM_TEST_SEEDS", 64) {
        let mut world = World::new(seed);
        for _ in 0..operations {
            match world.random.between(1, 100) {
                1..=25 => world.add(),
                26..=28 => world.abort(),
                29 => {
                    world.scheduler.reset_prefix_cache();
                }
                _ => {
                    world.step();
                }
            }
            world.scheduler.check_invariants();
        }
        world.finish();
        let stats = world.scheduler.handle().stats();
        preemptions += stats.num_preemptions;
        hits += stats.prefix_cache_hits;
        finished += world.num_finished;
    }
    println!("{finished} requests, {preemptions} preemptions, {hits} tokens from the prefix cache");
    assert!(preemptions > 500 && hits > 1_000 && finished > 1_000, "the run must reach the hard cases");
}
