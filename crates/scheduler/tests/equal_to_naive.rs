//! Random operations on the scheduler and on the naive one, with the same made-up tokens: after every step both
//! planned the same rows and hold the same requests in the same blocks, down to the order of the free ones.
//!
//! A seed names a run. `RUSTVLLM_TEST_SEEDS` and `RUSTVLLM_TEST_OPERATIONS` make a long one, and
//! `RUSTVLLM_TEST_FIRST_SEED` begins elsewhere.

mod common;
mod interventions;
mod naive;

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use common::{Coverage, Random, mix, scheduler, setting};
use naive::{NaiveConfig, NaiveRequest, NaiveScheduler, NaiveStep, Status};
use scheduler::{
    ExtraKeys, MultimodalSpan, NewRequest, PauseState, Payer, PreemptionMode, RequestKey, SamplingParams,
    Scheduler, SchedulerConfig, SchedulerOutput, SchedulingPolicy, StepRows, TokenRows, egress::Consumer,
    monotonic_ns,
};

struct World {
    config: SchedulerConfig,
    real: Scheduler,
    /// Emptied and not looked at: that what is delivered is right, others test.
    outputs: Consumer,
    naive: NaiveScheduler,
    random: Random,
    /// Steps in flight, oldest first.
    in_flight: VecDeque<(SchedulerOutput, NaiveStep)>,
    num_added: u32,
    keys: HashMap<String, RequestKey>,
    /// In the order in which they were handed in, each with a moment behind it and before the next.
    handed_in: Vec<(String, u64)>,
    /// Its own random numbers: what else happens does not depend on it.
    time: Random,
    /// Likewise: who pays; and who is held back, and whose token is called off.
    money: Random,
    patience: Random,
    /// Likewise: who may run.
    pauses: Random,
    /// Likewise: which prompts have multimodal inputs.
    images: Random,
    ids: Vec<String>,
    coverage: Coverage,
}

fn random_config(random: &mut Random) -> SchedulerConfig {
    let largest_block = [1, 4, 16][random.between(0, 2) as usize];
    let block_size = random.between(1, largest_block);
    let num_blocks = if random.chance(60) { random.between(4, 12) } else { random.between(13, 64) };
    // The longest request fits alone, often with nothing to spare.
    let most = ((num_blocks - 1) * block_size).min(120);
    let max_model_len = if random.chance(50) { most } else { random.between(2, most.max(2)) };
    let enable_chunked_prefill = random.chance(60);
    let largest_budget = if random.chance(50) { 16 } else { 64 };
    let budget = random.between(1, largest_budget);
    let config = SchedulerConfig {
        num_blocks,
        block_size,
        max_model_len,
        max_num_seqs: random.between(2, 8) - u32::from(random.chance(10)),
        max_num_batched_tokens: if enable_chunked_prefill { budget } else { budget.max(8) },
        enable_prefix_caching: random.chance(80),
        enable_chunked_prefill,
        long_prefill_token_threshold: if random.chance(40) { random.between(1, 8) } else { 0 },
        scheduling_policy: if random.chance(50) {
            SchedulingPolicy::Fcfs
        } else {
            SchedulingPolicy::Priority
        },
        watermark: if random.chance(30) { f64::from(random.between(5, 40)) / 100.0 } else { 0.0 },
        max_steps_in_flight: random.between(1, 3),
        num_speculative_tokens: if random.chance(40) { random.between(1, 4) } else { 0 },
        preemption_mode: if random.chance(50) { PreemptionMode::Swap } else { PreemptionMode::Recompute },
        num_cpu_blocks: random.between(0, 40),
        preemption_immunity_steps: if random.chance(70) { random.between(1, 8) } else { 0 },
        max_look_past: random.between(0, 2),
        max_times_passed: random.between(1, 4),
        ..SchedulerConfig::new(num_blocks, max_model_len)
    };
    // Victims that have had their turn in the same step are rare: many rows, few blocks and tokens, no order of
    // arrival.
    if !random.chance(25) {
        return config;
    }
    SchedulerConfig {
        num_blocks: 16,
        block_size: random.between(1, 2),
        max_model_len: random.between(8, 15),
        max_num_seqs: 8,
        max_num_batched_tokens: random.between(8, 10),
        scheduling_policy: SchedulingPolicy::Priority,
        watermark: 0.0,
        max_steps_in_flight: random.between(1, 2),
        preemption_immunity_steps: random.between(0, 1),
        ..config
    }
}

/// Few tenants with few users, so that they meet; the weight of one may change.
fn payer(money: &mut Random) -> Payer {
    let tenant = u64::from(money.between(0, 2));
    let weight = if money.chance(5) { 7 } else { [1, 3, 1000][tenant as usize] };
    Payer { tenant, user: money.between(0, 2).into(), weight }
}

fn extra_keys(salt: &[u8], inputs: &[(usize, usize)]) -> ExtraKeys {
    let salt = std::str::from_utf8(salt).expect("a word");
    let span = |&(offset, length): &(usize, usize)| MultimodalSpan {
        offset: offset as u32,
        length: length as u32,
        digest: Box::new([length as u8]),
        ..MultimodalSpan::default()
    };
    ExtraKeys::new(None, Some(salt).filter(|salt| !salt.is_empty()), inputs.iter().map(span).collect())
}

/// The inputs of a prompt, one of two sets, so that prompts which begin alike share them; what does not fit is refused when it
/// is handed in.
fn inputs_of(images: &mut Random, num_prompt: usize) -> Vec<(usize, usize)> {
    if !images.chance(50) {
        return Vec::new();
    }
    let mut set = Random(mix(images.between(1, 2).into()));
    let (mut inputs, mut place) = (Vec::new(), 0);
    loop {
        let start = place + set.between(0, 3) as usize;
        place = start + set.between(2, 8) as usize;
        if place >= num_prompt {
            return inputs;
        }
        inputs.push((start, place - start));
    }
}

impl World {
    fn new(seed: u64) -> Self {
        // Every fourth seed is fair; the others are numbered as if there were none of these.
        let is_fair = seed % 4 == 3;
        let seed = if is_fair { 1 << 32 | seed } else { seed / 4 * 3 + seed % 4 };
        let mut random = Random(mix(seed + 1));
        let mut time = Random(mix(seed ^ 0x71E));
        let mut config = random_config(&mut random);
        // Steps that overlap may be those of a pipeline, whose requests have no drafts.
        if seed % 5 == 2 && config.max_steps_in_flight > 1 {
            config.pipeline_stages = config.max_steps_in_flight;
            config.num_speculative_tokens = 0;
        }
        if is_fair {
            config.scheduling_policy = SchedulingPolicy::Fair;
        }
        if time.chance(50) {
            // Never over while the test runs: time is what the test says.
            config.queue_timeout = Duration::from_secs(3600);
        }
        let mut images = Random(mix(seed ^ 0x1A6E5));
        config.disable_chunked_mm_input = images.chance(50);
        let mut real = scheduler(&config, config.num_buffer_sets());
        Self {
            outputs: real.take_consumer().expect("taken once"),
            real,
            naive: NaiveScheduler::new(NaiveConfig::new(config.clone())),
            config,
            random,
            in_flight: VecDeque::new(),
            num_added: 0,
            keys: HashMap::new(),
            handed_in: Vec::new(),
            time,
            money: Random(mix(seed ^ 0xFA18)),
            patience: Random(mix(seed ^ 0x4E1D)),
            pauses: Random(mix(seed ^ 0x9A05E)),
            images,
            ids: Vec::new(),
            coverage: Coverage::default(),
        }
    }

    /// One of few families, with a token changed now and then, so that prefixes of all lengths are shared.
    fn prompt(&mut self) -> Vec<i32> {
        // Short ones are admitted in numbers and outgrow the pool together.
        let longest = self.config.max_model_len;
        let longest = if self.random.chance(60) { longest.min(2 * self.config.block_size) } else { longest };
        let length = self.random.between(1, longest);
        let family = self.random.between(0, 2);
        let changed = self.random.between(0, 3 * length);
        let token = |i| (mix(u64::from(family << 16 | i)) & 1) as i32;
        (0..length).map(|i| if i == changed { 1 - token(i) } else { token(i) }).collect()
    }

    fn add(&mut self) {
        if self.ids.len() > 20 {
            return; // A longer queue is only slower.
        }
        let prompt = self.prompt();
        let parent = self.some_id().filter(|_| self.random.chance(30));
        let parent = parent.and_then(|id| self.naive.by_id(&id)).map(|parent| &parent.new);
        let random = &mut self.random;
        let mut salt = if random.chance(20) { b"salt".to_vec() } else { Vec::new() };
        let mut inputs = inputs_of(&mut self.images, prompt.len());
        let id = self.num_added.to_string();
        self.num_added += 1;
        let params = SamplingParams {
            max_tokens: if random.chance(5) { 0 } else { random.between(1, 48) },
            eos_token_id: random.chance(10).then_some(1),
            stop_token_ids: if random.chance(5) { Box::new([0]) } else { Box::new([]) },
            ..SamplingParams::default()
        };
        let mut new = NewRequest {
            priority: random.between(0, 2) as i32,
            payer: payer(&mut self.money),
            extra_keys: extra_keys(&salt, &inputs),
            skip_reading_prefix_cache: random.chance(5),
            waits_for_grammar: random.chance(5),
            ..NewRequest::new(self.real.handle().new_key(), &id, prompt, params)
        };
        if let Some(parent) = parent {
            new.fork_from = Some(self.keys[&parent.id]);
            if !random.chance(20) {
                salt.clone_from(&parent.extra_keys);
            }
            // It may want less than all that there is.
            let length = parent.prompt.len() as u32;
            let length = if random.chance(30) { random.between(1, length) } else { length } as usize;
            new.prompt_token_ids = parent.prompt[..length].to_vec();
            inputs = parent.inputs.iter().copied().filter(|(offset, len)| offset + len < length).collect();
            new.extra_keys = extra_keys(&salt, &inputs);
        }
        let same = NaiveRequest {
            id: id.clone(),
            prompt: new.prompt_token_ids.clone(),
            max_tokens: new.params.max_tokens as usize,
            eos_token_id: new.params.eos_token_id,
            stop_token_ids: new.params.stop_token_ids.to_vec(),
            priority: new.priority,
            payer: new.payer,
            extra_keys: salt,
            inputs,
            skip_reading_prefix_cache: new.skip_reading_prefix_cache,
            needs_grammar: new.waits_for_grammar,
            fork_from: parent.map(|parent| parent.id.clone()),
            age: if self.time.chance(30) { self.time.between(1, 3).into() } else { 0 },
        };
        // A run lasts no second.
        new.age_ns = same.age * 10_000_000_000;
        self.keys.insert(id.clone(), new.key);
        // Who can never fit is refused at the door, which the naive one does not have.
        if self.real.handle().add_request(new).is_ok() {
            self.naive.add(same);
            let now = monotonic_ns();
            while monotonic_ns() <= now {}
            self.handed_in.push((id.clone(), now));
            self.ids.push(id);
        }
    }

    fn some_id(&mut self) -> Option<String> {
        let last = (self.ids.len() as u32).checked_sub(1)?;
        Some(self.ids[self.random.between(0, last) as usize].clone())
    }

    fn abort(&mut self) {
        if let Some(id) = self.some_id() {
            self.real.handle().abort_requests([id.as_str()]);
            self.naive.abort(&id);
            self.coverage.count("aborts", 1);
        }
    }

    fn compile_grammar(&mut self, id: &str) {
        self.real.handle().grammar_ready(self.keys[id]);
        self.naive.grammar_is_ready(id);
    }

    fn reset(&mut self) {
        let preempt_running = self.random.chance(10);
        let done = self.real.reset_prefix_cache(preempt_running);
        assert_eq!(done, self.naive.reset_prefix_cache(preempt_running), "reset_prefix_cache");
        self.coverage.count("resets", usize::from(done));
    }

    /// `false` when there was nothing to plan.
    fn schedule(&mut self) -> bool {
        self.outputs.drain(|_| ());
        if self.in_flight.len() == self.config.max_steps_in_flight as usize {
            return false;
        }
        let planned = self.real.schedule().expect("a free set");
        let expected = self.naive.schedule();
        let (Some(output), Some(step)) = (planned, expected.as_ref()) else {
            assert_eq!(planned.is_some(), expected.is_some(), "{planned:?}, {expected:?}");
            self.check_state();
            return false;
        };
        self.check_plan(&output, step);
        self.check_state();
        self.withhold(&output, step);
        self.coverage.count("steps", 1);
        let is_paused = self.real.pause_state() == PauseState::PausedNew;
        self.coverage.count("steps while new requests wait", usize::from(is_paused));
        self.coverage.count("steps behind others", usize::from(!self.in_flight.is_empty()));
        self.in_flight.push_back((output, expected.expect("looked at above")));
        true
    }

    /// Tokens that no model computed, as many as could be: with drafts, some are accepted.
    fn update(&mut self) {
        let Some((output, step)) = self.in_flight.pop_front() else { return };
        if self.random.chance(1) {
            self.real.fail_step(&output).expect("in flight");
            self.naive.fail(step.number);
            self.in_flight.clear();
            self.coverage.count("failed steps", 1);
            self.check_state();
            return;
        }
        let random = &mut self.random;
        let num_columns = 1 + self.config.num_speculative_tokens as usize;
        let mut rows = Vec::new();
        for ((id, _, _), &num_drafts) in step.scheduled.iter().zip(&step.num_drafts) {
            if step.sampled.contains(id) {
                let length = 1 + random.between(0, num_drafts as u32) as usize;
                // A row without a token is what a model without numbers gives.
                let length = if random.next().is_multiple_of(500) { 0 } else { length };
                rows.push((0..length).map(|_| random.between(0, 1) as i32).collect::<Vec<_>>());
            }
        }
        let mut drafts = Vec::new();
        if self.config.max_steps_in_flight == 1 && self.config.num_speculative_tokens > 0 {
            for _ in &rows {
                let length = random.between(0, self.config.num_speculative_tokens);
                drafts.push((0..length).map(|_| random.between(0, 1) as i32).collect::<Vec<_>>());
            }
        }
        let padded = |rows: &[Vec<i32>], num_columns: usize| -> Vec<i32> {
            let padding = std::iter::repeat(-1);
            rows.iter().flat_map(|row| row.iter().copied().chain(padding.clone()).take(num_columns)).collect()
        };
        let sampled = padded(&rows, num_columns);
        let sampled = TokenRows { token_ids: &sampled, num_columns };
        let draft_ids = padded(&drafts, num_columns - 1);
        if drafts.is_empty() {
            self.real.update_from_output(&output, sampled).expect("in flight");
        } else {
            let draft_rows = TokenRows { token_ids: &draft_ids, num_columns: num_columns - 1 };
            let rows = StepRows { drafts: draft_rows, ..StepRows::from(sampled) };
            self.real.update_from_output(&output, rows).expect("in flight");
        }
        self.naive.update(step.number, &rows, &drafts);
        self.naive.left.clear();
        self.check_state();
    }

    fn check_plan(&mut self, output: &SchedulerOutput, step: &NaiveStep) {
        let view = self.real.step_view(output).expect("in flight");
        let rows: Vec<(String, usize, usize)> = view
            .scheduled
            .iter()
            .map(|row| {
                let (tokens, computed) =
                    (row.num_scheduled_tokens as usize, row.num_computed_tokens as usize);
                (row.request_id.clone(), tokens, computed)
            })
            .collect();
        assert_eq!(rows, step.scheduled, "rows: id, tokens, computed");
        let alive: Vec<String> =
            step.preempted.iter().filter(|id| self.naive.by_id(id).is_some()).cloned().collect();
        assert_eq!(view.preempted_req_ids, alive, "preempted");
        assert_eq!(view.finished_req_ids, step.finished, "finished");
        assert_eq!((output.step, output.num_sampled as usize), (step.number, step.sampled.len()));

        let num_drafts: Vec<usize> = view.scheduled.iter().map(|row| row.spec_token_ids.len()).collect();
        assert_eq!(num_drafts, step.num_drafts, "drafts");
        // Which CPU blocks are taken is the tier's own affair.
        let out: Vec<u32> = view.blocks_to_swap_out.iter().map(|pair| pair.0 as u32).collect();
        assert_eq!(out, step.swap_out.iter().map(|pair| pair.0).collect::<Vec<_>>(), "swapped out");
        let back: Vec<u32> = view.blocks_to_swap_in.iter().map(|pair| pair.1 as u32).collect();
        assert_eq!(back, step.swap_in.iter().map(|pair| pair.1).collect::<Vec<_>>(), "swapped in");
        let copied: Vec<(u32, u32)> =
            view.blocks_to_copy.iter().map(|&(from, to)| (from as u32, to as u32)).collect();
        assert_eq!(copied, step.copies, "copied");

        let coverage = &mut self.coverage;
        coverage.count("drafts", num_drafts.iter().sum());
        coverage.count("blocks swapped out", out.len());
        coverage.count("blocks swapped in", back.len());
        coverage.count("blocks copied", copied.len());
        coverage.count("rows", rows.len());
        coverage.count("finished", step.finished.len());
        coverage.count("preemptions", step.preempted.len());
        for row in &view.scheduled {
            let num_tokens = self.naive.by_id(&row.request_id).expect("scheduled").tokens.len();
            let end = (row.num_computed_tokens + row.num_scheduled_tokens) as usize;
            coverage.count("chunks", usize::from(end < num_tokens));
            let hit = row.num_computed_tokens as usize;
            if row.is_new {
                coverage.count("hit tokens", hit);
            } else if row.is_resumed {
                coverage.count("resumed", 1);
                coverage.count("hit tokens of resumed", hit);
            }
        }
    }

    /// Everything that can be seen is the same.
    fn check_state(&mut self) {
        let (real, naive) = (&self.real, &self.naive);
        real.check_invariants();
        assert_eq!(real.running_request_ids(), naive.running_ids(), "the running list");
        assert_eq!(real.waiting_request_ids(), naive.waiting_ids(), "the queue");
        assert_eq!(real.leaving_request_ids(), naive.leaving_ids(), "on the way out");
        assert_eq!(real.is_at_rest(), naive.is_at_rest(), "at rest");
        let num_leaving = naive.leaving_ids().len();
        let num_grammars =
            naive.requests.values().filter(|request| request.status == Status::WaitingForGrammar).count();
        for request in naive.requests.values() {
            let id = &request.new.id;
            let state = real.request_state(id).unwrap_or_else(|| panic!("request {id} is live"));
            assert!(
                request.status.is(state.status),
                "request {id}: {:?}, {:?}",
                state.status,
                request.status
            );
            assert_eq!(state.token_ids, request.tokens, "request {id}");
            let blocks: Vec<u32> = state.block_table.iter().map(|block| block.0).collect();
            assert_eq!(blocks, request.blocks, "request {id}: block table");
            assert_eq!(state.spec_token_ids, request.next_drafts, "request {id}: drafts");
            let num_placeholders = match request.status {
                Status::Preempted => 0, // Tokens in flight still come, but nothing stands for them.
                _ => naive.num_output_placeholders(request.arrival),
            };
            assert_eq!(
                state.num_output_placeholders as usize, num_placeholders,
                "request {id}: placeholders"
            );
            assert_eq!(state.cpu_blocks.len(), request.cpu_blocks.len(), "request {id}: CPU blocks");
            let numbers =
                [state.num_computed_tokens, state.num_tokens, state.num_cached_tokens, state.num_preemptions];
            let expected = [
                request.num_computed_tokens,
                request.tokens.len(),
                request.num_cached_tokens,
                request.num_preemptions,
            ];
            let numbers = numbers.map(|number| number as usize);
            assert_eq!(numbers, expected, "request {id}: computed, tokens, cached, preemptions");
            assert_eq!(state.priority, request.new.priority, "request {id}");
            let tags = (state.fair_tag, state.user_tag);
            assert_eq!(tags, (request.standing.turn.0, request.standing.user_tag), "request {id}: tags");
        }
        let states = real.block_states();
        let mut free: Vec<(u32, u32)> = states
            .iter()
            .filter_map(|state| state.free_position.map(|position| (position, state.block.0)))
            .collect();
        free.sort_unstable();
        let free: Vec<u32> = free.into_iter().map(|(_, block)| block).collect();
        assert_eq!(free, naive.free_order(), "the free order");
        for (state, content) in states.iter().zip(&naive.pool.contents) {
            assert_eq!(state.hash.is_some(), content.is_some(), "{}: cached", state.block);
            assert_eq!(state.registered_in, content.as_ref().map(|content| content.step), "{}", state.block);
        }
        self.ids = naive.requests.values().map(|request| request.new.id.clone()).collect();
        self.ids.sort_unstable();
        let stats = real.handle().stats();
        let queried = [stats.prefix_cache_queries, stats.preempted_cache_queries];
        assert_eq!(queried, naive.num_queried.map(|tokens| tokens as u64), "tokens looked up");
        self.coverage.count("on the way out", num_leaving);
        self.coverage.count("waiting for a grammar", num_grammars);
        self.coverage.count("exhausted pools", usize::from(free.is_empty()));
    }

    fn check_prefix(&mut self) {
        let prompt = self.prompt();
        let inputs = inputs_of(&mut self.images, prompt.len());
        for salt in [b"".as_slice(), b"salt"] {
            let hit = self.real.prefix_hit_length(&prompt, &extra_keys(salt, &inputs)) as usize;
            let expected = if self.config.enable_prefix_caching {
                self.naive.prefix_hit_length(&prompt, salt, &inputs)
            } else {
                0
            };
            assert_eq!(hit, expected, "prefix_hit_length");
        }
    }

    fn operation(&mut self) {
        match self.random.between(1, 100) {
            1..=15 => self.add(),
            16 => self.abort(),
            17 => self.reset(),
            18..=19 => self.check_prefix(),
            20..=23 => {
                for id in self.ids.clone() {
                    self.compile_grammar(&id);
                }
            }
            24..=62 => _ = self.schedule(),
            _ => self.update(),
        }
        self.let_time_pass();
        self.hold();
        self.pause();
    }

    fn finish(&mut self) {
        self.set_pause_state(PauseState::Unpaused);
        let mut rounds = 0;
        while self.real.has_unfinished_requests() || !self.in_flight.is_empty() {
            for id in self.ids.clone() {
                self.compile_grammar(&id);
                self.real.hold_back(self.keys[&id], false);
                self.naive.hold(&id, false);
            }
            if !self.schedule() {
                self.update();
            }
            rounds += 1;
            assert!(rounds < 20_000, "requests never finish");
        }
        assert_eq!(self.naive.free_order().len() as u32, self.config.num_blocks - 1, "all blocks came back");
    }
}

#[test]
fn every_step_equals_the_naive_one() {
    let (first, seeds) = (setting("RUSTVLLM_TEST_FIRST_SEED", 0), setting("RUSTVLLM_TEST_SEEDS", 200));
    let operations = setting("RUSTVLLM_TEST_OPERATIONS", 400);
    let mut total = Coverage::default();
    for seed in first..first + seeds {
        // On failure libtest shows the last line: the seed reproduces it.
        println!("seed {seed}");
        let mut world = World::new(seed);
        for _ in 0..operations {
            world.operation();
        }
        world.finish();
        for (what, number) in world.naive.met() {
            world.coverage.count(what, number);
        }
        for (what, number) in world.coverage.0 {
            total.count(what, number as usize);
        }
    }
    println!("{seeds} seeds: {:?}", total.0);
    if seeds * operations < 80_000 {
        return; // A person looks at one run.
    }
    for (what, least) in [
        ("preemptions", 500),
        ("victims taken out of the step", 100),
        ("admissions after a plan in vain", 5),
        ("turns behind who gave up", 20),
        ("blocks filled in flight for victims", 20),
        ("long prompts that ran whole", 50),
        ("admissions without a look-up", 500),
        ("overtaken by who came first", 200),
        ("turns of others", 200),
        ("resumed", 300),
        ("hit tokens", 2_000),
        ("hit tokens of resumed", 500),
        ("chunks", 2_000),
        ("exhausted pools", 1_000),
        ("finished", 3_000),
        ("aborts", 200),
        ("pauses", 300),
        ("steps while new requests wait", 300),
        ("aborted by pauses", 50),
        ("failed steps", 50),
        ("resets", 50),
        ("steps behind others", 2_000),
        ("drafts", 2_000),
        ("cut drafts", 500),
        ("blocks swapped out", 500),
        ("blocks swapped in", 300),
        ("on the way out", 200),
        ("blocks copied", 50),
        ("waiting for a grammar", 500),
        ("waited too long", 100),
        ("held back", 500),
        ("withheld", 500),
        ("forced", 100),
        ("forced in a step", 500),
        ("chunks that end before an input", 100),
        ("inputs that wait for a step with room", 15),
        ("chunks that begin within an input", 4),
    ] {
        let met = total.0.get(what).copied().unwrap_or(0);
        assert!(met >= least, "the runs hardly ever met {what}: {met}");
    }
}
