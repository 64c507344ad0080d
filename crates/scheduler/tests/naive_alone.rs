//! The naive scheduler against a worker that has nothing but memory: with steps in flight, drafts, swapping, forks and
//! failures, in every mixture, each request gets exactly the tokens that it would have got alone.
//!
//! Each slot of the worker's memory holds a value made of all tokens up to it. What a row reads is compared with what
//! its own tokens say, so a wrong block, a missing copy or a wrong position is found where it is read.

mod common;
mod naive;

use std::collections::{BTreeMap, HashMap, VecDeque};

use common::{Random, mix, setting};
use naive::{Leave, Live, NaiveConfig, NaiveRequest, NaiveScheduler, NaiveStep, Status};
use scheduler::{PreemptionMode, SchedulerConfig, SchedulingPolicy};

fn first_value(extra_keys: &[u8]) -> u64 {
    extra_keys.iter().fold(1, |value, &key| mix(value ^ u64::from(key)))
}

fn next_value(previous: u64, token: i32) -> u64 {
    mix(previous.wrapping_mul(3) ^ token as u64)
}

fn token_after(value: u64) -> i32 {
    (mix(value ^ 0x5EED) & 1) as i32
}

fn value_at(extra_keys: &[u8], tokens: &[i32]) -> u64 {
    tokens.iter().fold(first_value(extra_keys), |value, &token| next_value(value, token))
}

/// What a request has to become, by definition.
fn reference(request: &NaiveRequest, max_model_len: usize) -> Vec<i32> {
    let mut tokens = request.prompt.clone();
    while tokens.len() < (request.prompt.len() + request.max_tokens).min(max_model_len) {
        let token = token_after(value_at(&request.extra_keys, &tokens));
        tokens.push(token);
        if request.eos_token_id == Some(token) {
            break;
        }
    }
    tokens
}

/// What the worker knows of a row.
struct WorkerRow {
    tokens: Vec<i32>,
    /// Without those that were rejected: the host may think of more.
    computed: usize,
    drafts: Vec<i32>,
}

struct Worker {
    block_size: usize,
    gpu: Vec<u64>,
    cpu: Vec<u64>,
    rows: HashMap<String, WorkerRow>,
}

impl Worker {
    fn copy(&mut self, step: &NaiveStep) {
        let slots = |block: u32| block as usize * self.block_size..(block as usize + 1) * self.block_size;
        for &(from, to) in &step.swap_out {
            self.cpu[slots(to)].copy_from_slice(&self.gpu[slots(from)]);
        }
        for &(from, to) in &step.swap_in {
            self.gpu[slots(to)].copy_from_slice(&self.cpu[slots(from)]);
        }
        for &(from, to) in &step.copies {
            self.gpu.copy_within(slots(from), slots(to).start);
        }
    }

    /// Run a step.
    fn execute(&mut self, scheduler: &NaiveScheduler, step: &NaiveStep, random: &mut Random) -> Outputs {
        for id in step.preempted.iter().chain(&step.finished) {
            self.rows.remove(id);
        }
        self.copy(step);
        let (mut outputs, mut all_drafts) = (Vec::new(), Vec::new());
        for ((id, num_tokens, computed_before), &num_drafts) in step.scheduled.iter().zip(&step.num_drafts) {
            let request = scheduler.by_id(id).expect("scheduled");
            let extra_keys = &request.new.extra_keys;
            let row = self.rows.entry(id.clone()).or_insert_with(|| WorkerRow {
                tokens: request.tokens.clone(),
                computed: *computed_before,
                drafts: Vec::new(),
            });
            let slot = |position: usize| {
                request.blocks[position / self.block_size] as usize * self.block_size
                    + position % self.block_size
            };
            assert!(row.computed <= *computed_before, "request {id}: the host counts at least what there is");
            for position in 0..row.computed {
                let expected = value_at(extra_keys, &row.tokens[..=position]);
                assert_eq!(self.gpu[slot(position)], expected, "request {id}: position {position}");
            }
            let inputs = [&row.tokens[..], &row.drafts[..num_drafts]].concat();
            let end = row.computed + num_tokens;
            let is_sampled = step.sampled.contains(id);
            assert!(
                !is_sampled || end == inputs.len(),
                "request {id}: a sampled row ends with what is known"
            );
            for (position, &token) in inputs.iter().enumerate().take(end).skip(row.computed) {
                let previous =
                    if position == 0 { first_value(extra_keys) } else { self.gpu[slot(position - 1)] };
                self.gpu[slot(position)] = next_value(previous, token);
            }
            row.computed = end;
            if !is_sampled {
                continue;
            }
            let mut output = Vec::new();
            for position in row.tokens.len() - 1..end {
                let token = token_after(self.gpu[slot(position)]);
                output.push(token);
                if inputs.get(position + 1) != Some(&token) {
                    break;
                }
            }
            row.computed -= num_drafts + 1 - output.len();
            row.tokens.extend(&output);
            let mut guessed = row.tokens.clone();
            for _ in 0..scheduler.config.num_speculative_tokens {
                let right = token_after(value_at(extra_keys, &guessed));
                guessed.push(if random.chance(70) { right } else { 1 - right });
            }
            row.drafts = guessed.split_off(row.tokens.len());
            outputs.push(output);
            all_drafts.push(row.drafts.clone());
        }
        (outputs, all_drafts)
    }
}

/// Tokens of each sampled row, and drafts for what follows them.
type Outputs = (Vec<Vec<i32>>, Vec<Vec<i32>>);

struct World {
    scheduler: NaiveScheduler,
    worker: Worker,
    random: Random,
    /// Steps in flight with what they will give; `None` for those that fail.
    in_flight: VecDeque<(NaiveStep, Option<Outputs>)>,
    num_added: u32,
    coverage: BTreeMap<&'static str, usize>,
}

fn random_config(random: &mut Random) -> NaiveConfig {
    let block_size = random.between(1, 6);
    let num_blocks = random.between(4, 16);
    let max_model_len = random.between(2, ((num_blocks - 1) * block_size).min(32));
    let enable_chunked_prefill = random.chance(60);
    let base = SchedulerConfig {
        block_size,
        max_num_seqs: random.between(1, 6),
        max_num_batched_tokens: random.between(if enable_chunked_prefill { 1 } else { 32 }, 40),
        enable_prefix_caching: random.chance(75),
        enable_chunked_prefill,
        long_prefill_token_threshold: if random.chance(20) { 4 } else { 0 },
        scheduling_policy: if random.chance(50) {
            SchedulingPolicy::Fcfs
        } else {
            SchedulingPolicy::Priority
        },
        watermark: if random.chance(20) { 0.1 } else { 0.0 },
        preemption_mode: if random.chance(60) { PreemptionMode::Swap } else { PreemptionMode::Recompute },
        ..SchedulerConfig::new(num_blocks, max_model_len)
    };
    NaiveConfig {
        max_steps_in_flight: random.between(1, 3) as usize,
        num_cpu_blocks: random.between(0, 20) as usize,
        num_speculative_tokens: if random.chance(50) { random.between(1, 4) as usize } else { 0 },
        preemption_immunity_steps: u64::from(random.between(0, 8)),
        max_look_past: random.between(0, 2) as usize,
        max_times_passed: random.between(1, 4) as usize,
        ..NaiveConfig::new(base)
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(mix(seed ^ 0xA10E));
        let config = random_config(&mut random);
        let block_size = config.base.block_size as usize;
        Self {
            worker: Worker {
                block_size,
                gpu: vec![0; config.base.num_blocks as usize * block_size],
                cpu: vec![0; config.num_cpu_blocks * block_size],
                rows: HashMap::new(),
            },
            scheduler: NaiveScheduler::new(config),
            random,
            in_flight: VecDeque::new(),
            num_added: 0,
            coverage: BTreeMap::new(),
        }
    }

    fn count(&mut self, what: &'static str, number: usize) {
        *self.coverage.entry(what).or_default() += number;
    }

    fn live(&mut self) -> Option<Live> {
        let mut arrivals: Vec<u64> = self.scheduler.requests.keys().copied().collect();
        arrivals.sort_unstable();
        let chosen = self.random.between(0, arrivals.len().max(1) as u32 - 1) as usize;
        arrivals.get(chosen).map(|arrival| self.scheduler.requests[arrival].clone())
    }

    fn add(&mut self) {
        if self.scheduler.requests.len() > 12 {
            return;
        }
        let max_model_len = self.scheduler.config.base.max_model_len;
        let parent = self.live().filter(|_| self.random.chance(30));
        let random = &mut self.random;
        let family = random.between(0, 2);
        let length = random.between(1, max_model_len - 1);
        let mut request = NaiveRequest {
            id: self.num_added.to_string(),
            prompt: (0..length).map(|i| (mix(u64::from(family << 16 | i)) & 1) as i32).collect(),
            max_tokens: if random.chance(5) { 0 } else { random.between(1, 24) as usize },
            eos_token_id: random.chance(15).then_some(1),
            priority: random.between(0, 2) as i32,
            extra_keys: if random.chance(15) { b"salt".to_vec() } else { Vec::new() },
            needs_grammar: random.chance(5),
            ..NaiveRequest::default()
        };
        if let Some(parent) = parent {
            request.fork_from = Some(parent.new.id);
            request.extra_keys = parent.new.extra_keys;
            // The prompt that the parent had, or any beginning of what it is now.
            request.prompt = parent.new.prompt;
            if random.chance(30) {
                request.prompt = parent.tokens;
                request.prompt.truncate(random.between(1, max_model_len - 1) as usize);
            }
        }
        self.num_added += 1;
        self.scheduler.add(request);
    }

    /// `false` when there was nothing to plan.
    fn schedule(&mut self) -> bool {
        if self.in_flight.len() == self.scheduler.config.max_steps_in_flight {
            return false;
        }
        let Some(step) = self.scheduler.schedule() else {
            let is_grammar_missing = |request: &Live| {
                request.status == Status::WaitingForGrammar || request.new.fork_from.is_some()
            };
            assert!(
                !self.in_flight.is_empty() || self.scheduler.requests.values().all(is_grammar_missing),
                "nothing runs, nothing is in flight, and a request waits: {:?} {:?}",
                self.scheduler.running_ids(),
                self.scheduler.waiting_ids()
            );
            return false;
        };
        let fails = self.in_flight.back().is_some_and(|step| step.1.is_none()) || self.random.chance(1);
        let outputs = (!fails).then(|| self.worker.execute(&self.scheduler, &step, &mut self.random));
        self.count("steps", 1);
        self.count("preempted", step.preempted.len());
        self.count("drafts", step.num_drafts.iter().sum());
        self.count("swapped in", step.swap_in.len());
        self.count("swapped out", step.swap_out.len());
        self.count("copied", step.copies.len());
        self.count("planned with another", usize::from(!self.in_flight.is_empty()));
        self.in_flight.push_back((step, outputs));
        true
    }

    fn update(&mut self) {
        let Some((step, outputs)) = self.in_flight.pop_front() else { return };
        if let Some((tokens, drafts)) = outputs {
            self.scheduler.update(step.number, &tokens, &drafts);
        } else {
            self.scheduler.fail(step.number);
            self.in_flight.clear();
            // Those that were in none of the steps, for want of budget, go on.
            let scheduler = &self.scheduler;
            let keeps_row = |request: &Live| request.status == Status::Running || request.swap_out_pending;
            self.worker.rows.retain(|id, _| scheduler.by_id(id).is_some_and(keeps_row));
            self.count("failed", 1);
        }
        self.check_tokens();
    }

    fn check_tokens(&mut self) {
        let max_model_len = self.scheduler.config.base.max_model_len as usize;
        for request in self.scheduler.requests.values() {
            let expected = reference(&request.new, max_model_len);
            assert!(expected.starts_with(&request.tokens), "request {}", request.new.id);
        }
        for (how, request) in std::mem::take(&mut self.scheduler.left) {
            if how == Leave::Finished {
                assert_eq!(request.tokens, reference(&request.new, max_model_len));
                self.count("finished", 1);
            }
        }
    }

    fn check_blocks(&self) {
        let scheduler = &self.scheduler;
        let mut references = vec![0; scheduler.pool.ref_counts.len()];
        for request in scheduler.requests.values() {
            let owns = request.status == Status::Running || request.swap_out_pending;
            assert!(owns || request.blocks.is_empty(), "who does not run has no blocks");
            assert!(request.num_computed_tokens <= request.blocks.len() * self.worker.block_size || !owns);
            for &block in &request.blocks {
                references[block as usize] += 1;
            }
        }
        assert_eq!(references, scheduler.pool.ref_counts);
        let mut free = scheduler.free_order().to_vec();
        free.sort_unstable();
        let idle: Vec<u32> =
            (1..references.len() as u32).filter(|&block| references[block as usize] == 0).collect();
        assert_eq!(free, idle, "a block is free or held");
        let on_cpu: usize = scheduler.requests.values().map(|request| request.cpu_blocks.len()).sum();
        assert!(on_cpu <= scheduler.config.num_cpu_blocks);
    }

    fn operation(&mut self) {
        match self.random.between(1, 100) {
            1..=15 => self.add(),
            16..=17 => {
                if let Some(request) = self.live() {
                    self.scheduler.abort(&request.new.id);
                }
            }
            18..=22 => {
                if let Some(request) = self.live() {
                    self.scheduler.grammar_is_ready(&request.new.id);
                }
            }
            23 => {
                self.scheduler.reset_prefix_cache(false);
            }
            24..=64 => {
                self.schedule();
            }
            _ => self.update(),
        }
        self.check_blocks();
    }

    fn finish(&mut self) {
        let mut rounds = 0;
        loop {
            let ids: Vec<String> =
                self.scheduler.requests.values().map(|request| request.new.id.clone()).collect();
            for id in ids {
                self.scheduler.grammar_is_ready(&id);
            }
            if !self.schedule() {
                if self.in_flight.is_empty() && self.scheduler.requests.is_empty() {
                    break;
                }
                self.update();
            }
            self.check_blocks();
            rounds += 1;
            assert!(rounds < 20_000, "{:?} never run", self.scheduler.waiting_ids());
        }
    }
}

#[test]
fn tokens_do_not_depend_on_company_or_mode() {
    let (first, seeds) = (setting("RUSTVLLM_TEST_FIRST_SEED", 0), setting("RUSTVLLM_TEST_SEEDS", 100));
    let operations = setting("RUSTVLLM_TEST_OPERATIONS", 300);
    let mut total = BTreeMap::<&str, usize>::new();
    for seed in first..first + seeds {
        // On failure libtest shows the last line: the seed reproduces it.
        println!("seed {seed}");
        let mut world = World::new(seed);
        for _ in 0..operations {
            world.operation();
        }
        world.finish();
        for (what, number) in world.coverage {
            *total.entry(what).or_default() += number;
        }
    }
    println!("{seeds} seeds: {total:?}");
    if seeds * operations < 30_000 {
        return; // A person looks at one run.
    }
    for (what, least) in [
        ("finished", 1_000),
        ("preempted", 200),
        ("drafts", 1_000),
        ("swapped out", 200),
        ("swapped in", 100),
        ("copied", 50),
        ("failed", 20),
        ("planned with another", 1_000),
    ] {
        let met = total.get(what).copied().unwrap_or(0);
        assert!(met >= least, "the runs hardly ever met {what}: {met}");
    }
}
