//! `Decoding`: a scheduler with N running decodes, kept in steady state for as long as a bench wants.
//!
//! Prompts are staggered over one block, so that one sixteenth of the requests cross into a new block in
//! every step. A request that reaches its end is replaced, outside the measured part, by an equal one.
//! With `prefill_tokens` each step also admits one prompt of that length, which no cache knows and which ends with it.

use std::{
    collections::VecDeque,
    hint::black_box,
    time::{Duration, Instant},
};

use scheduler::{
    ConfigError, DrafterConfig, DraftingMethod, RequestKey, Scheduler, SchedulerConfig, SchedulerError,
    SchedulerOutput, SchedulingPolicy, SuffixLimits, TokenRows, egress::Consumer,
};

use crate::replay_target::{new_request, with_buffers};

/// Tokens per block.
pub const BLOCK_SIZE: u32 = 16;
/// Output tokens of a decode without drafts, from its beginning to its end.
pub const OUTPUT_TOKENS: u32 = 512;
/// Prompt tokens of a decode: so many, and up to a block more.
pub const PROMPT_TOKENS: u32 = 128;
/// Longest decode there is room for.
const MAX_MODEL_LEN: u32 = 8192;
/// Tokens per step at most, unless there are more decodes than this leaves room to admit in time.
const TOKEN_BUDGET: u32 = 8192;
/// Tokens per step and decode: all are admitted long before the first has ended.
const TOKENS_PER_DECODE: u32 = 8;
/// Steps in flight at most.
const MAX_STEPS_IN_FLIGHT: u32 = 2;
/// Running requests, and tokens of a prompt, at most: what `SchedulerConfig` allows, less the room for the rest.
const MAX_NUM_RUNNING: u32 = 1 << 15;
const MAX_PREFILL_TOKENS: u32 = 1 << 20;
const MAX_NUM_DRAFTS: u32 = 64;
/// What is sampled where nothing repeats counts up to here, and begins again much later than a request ends.
const NUM_IDS: u64 = 1 << 30;

/// What to keep running.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DecodingOptions {
    /// Running decodes.
    pub num_running: u32,
    /// Tokens of the prompt in each step; 0 = decodes alone.
    pub prefill_tokens: u32,
    /// Steps scheduled and not updated: with 2 the next step is scheduled before the one before it is updated.
    pub steps_in_flight: u32,
    /// Who is admitted first.
    pub scheduling_policy: SchedulingPolicy,
    /// Drafts of each decode and step at most, looked for among its own tokens; 0 = none are made.
    pub num_drafts: u32,
    /// Whether what is sampled repeats itself, so that drafts are found and are right; else no three tokens come twice.
    pub repeats: bool,
    /// Whether the controller chooses among the drafts that are found; else all of them run.
    pub adaptive: bool,
    /// What a step takes in addition to its planning, as if a model ran: the controller chooses by that. Each of its
    /// tokens takes a thousandth more.
    pub model_time: Duration,
}

impl DecodingOptions {
    /// Decodes alone, one step at a time, under FCFS.
    #[must_use]
    pub fn new(num_running: u32) -> Self {
        Self {
            num_running,
            prefill_tokens: 0,
            steps_in_flight: 1,
            scheduling_policy: SchedulingPolicy::default(),
            num_drafts: 0,
            repeats: true,
            adaptive: false,
            model_time: Duration::ZERO,
        }
    }

    /// Output tokens of a decode: so many that it runs as many steps with drafts as without.
    fn output_tokens(&self) -> u32 {
        let per_step = if self.repeats { 1 + self.num_drafts / 2 } else { 1 };
        (OUTPUT_TOKENS * per_step).min(MAX_MODEL_LEN - PROMPT_TOKENS - BLOCK_SIZE)
    }

    fn config(&self) -> Result<SchedulerConfig, ConfigError> {
        let between = |name: &'static str, value: u32, low: u32, high: u32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(ConfigError { name, rule: format!("between {low} and {high}"), value: value.to_string() })
        };
        between("num_running", self.num_running, 1, MAX_NUM_RUNNING)?;
        between("prefill_tokens", self.prefill_tokens, 0, MAX_PREFILL_TOKENS)?;
        between("steps_in_flight", self.steps_in_flight, 1, MAX_STEPS_IN_FLIGHT)?;
        between("num_drafts", self.num_drafts, 0, MAX_NUM_DRAFTS)?;
        // Prompts whose step is in flight, and those whose row cannot be used again before such a step is updated.
        let prompts = if self.prefill_tokens > 0 { 2 * self.steps_in_flight - 1 } else { 0 };
        let most_tokens = PROMPT_TOKENS + BLOCK_SIZE + self.output_tokens();
        let num_blocks = self.num_running * most_tokens.div_ceil(BLOCK_SIZE)
            + prompts * (self.prefill_tokens + 1).div_ceil(BLOCK_SIZE)
            + 1;
        Ok(SchedulerConfig {
            block_size: BLOCK_SIZE,
            max_num_seqs: self.num_running + prompts,
            max_steps_in_flight: self.steps_in_flight,
            scheduling_policy: self.scheduling_policy,
            max_num_batched_tokens: TOKEN_BUDGET
                .max(TOKENS_PER_DECODE * self.num_running + self.prefill_tokens)
                .max((1 + self.num_drafts) * self.num_running + self.prefill_tokens),
            num_speculative_tokens: self.num_drafts,
            drafter: (self.num_drafts > 0).then(|| drafter_config(self.adaptive)),
            ..SchedulerConfig::new(num_blocks, MAX_MODEL_LEN.max(self.prefill_tokens + 1))
        })
    }
}

/// As `--speculative-config '{"method": "suffix"}'` has it.
fn drafter_config(adaptive: bool) -> DrafterConfig {
    DrafterConfig {
        method: DraftingMethod::Suffix(SuffixLimits { max_match: 24, max_factor: 1.0, min_share: 0.1 }),
        caps: Vec::new(),
        num_archived_requests: 10_000,
        adaptive,
    }
}

/// What the two halves of a step took.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepTimes {
    /// `schedule`.
    pub schedule: Duration,
    /// `update_from_output`.
    pub update: Duration,
}

/// N running decodes.
#[derive(Debug)]
pub struct Decoding {
    /// The scheduler under test.
    pub scheduler: Scheduler,
    consumer: Consumer,
    sampled: Vec<i32>,
    options: DecodingOptions,
    in_flight: VecDeque<SchedulerOutput>,
    num_added: u64,
    num_sampled: u64,
}

impl Decoding {
    /// Admit the requests and run their prefill.
    ///
    /// # Errors
    /// A number outside its limits.
    pub fn new(options: DecodingOptions) -> Result<Self, SchedulerError> {
        let (scheduler, consumer) = with_buffers(options.config()?)?;
        let mut decoding = Self {
            scheduler,
            consumer,
            sampled: Vec::new(),
            options,
            in_flight: VecDeque::new(),
            num_added: 0,
            num_sampled: 0,
        };
        decoding.refill();
        Ok(decoding)
    }

    /// Blocks in the pool, to be stated with a figure.
    #[must_use]
    pub fn num_blocks(&self) -> u32 {
        self.scheduler.config().num_blocks
    }

    /// Run one step of the steady state: so many decodes (and drafts of them), and the prompt if each step has one. Handing that in, reading
    /// the outputs and replacing what has ended are off the clock.
    ///
    /// # Panics
    /// When a request does not fit: the configuration above is wrong.
    pub fn step(&mut self) -> (SchedulerOutput, StepTimes) {
        loop {
            if self.options.prefill_tokens > 0 {
                self.add(self.options.prefill_tokens, 1);
            }
            let start = Instant::now();
            let scheduled = self.schedule();
            let between = Instant::now();
            if let Some(output) = &scheduled {
                self.run_model(output, between);
            }
            self.sample();
            let begin_update = Instant::now();
            self.update();
            let end = Instant::now();
            self.drain();
            let steady = scheduled.filter(|output| self.is_steady(output));
            // A decode whose last token is in flight is in no step: it ends when its step is updated.
            if steady.is_none() || self.num_decodes() < self.options.num_running as usize {
                self.refill();
            }
            if let Some(output) = steady {
                return (output, StepTimes { schedule: between - start, update: end - begin_update });
            }
        }
    }

    /// Update what is in flight, replace what has ended and run its prefill; then schedule as many steps as are in
    /// flight at the beginning of a step.
    fn refill(&mut self) {
        self.update_all();
        let num_running = self.options.num_running as usize;
        while self.num_decodes() < num_running {
            for _ in self.num_decodes()..num_running {
                self.add(PROMPT_TOKENS + self.num_added as u32 % BLOCK_SIZE, self.options.output_tokens());
            }
            while self.scheduler.handle().num_queued() > 0 {
                self.schedule();
                self.update_all();
            }
            // The last one's prompt may have been cut by the budget.
            self.schedule();
            self.update_all();
        }
        while self.in_flight.len() + 1 < self.options.steps_in_flight as usize {
            if self.options.prefill_tokens > 0 {
                self.add(self.options.prefill_tokens, 1);
            }
            self.schedule();
        }
    }

    /// Whether every decode is in the step, and the prompt if each step has one.
    fn is_steady(&self, output: &SchedulerOutput) -> bool {
        let DecodingOptions { num_running, prefill_tokens, .. } = self.options;
        let num_prompts = u32::from(prefill_tokens > 0);
        output.num_reqs == num_running + num_prompts
            && output.num_new_reqs == num_prompts
            && (self.options.num_drafts > 0
                || output.total_num_scheduled_tokens == num_running + prefill_tokens)
    }

    /// Requests that have not finished, the prompts of the steps in flight aside.
    fn num_decodes(&self) -> usize {
        let prompts = if self.options.prefill_tokens > 0 { self.in_flight.len() } else { 0 };
        self.scheduler.num_unfinished_requests() - prompts
    }

    fn schedule(&mut self) -> Option<SchedulerOutput> {
        let output = self.scheduler.schedule().expect("a free buffer set")?;
        self.in_flight.push_back(output);
        Some(output)
    }

    /// Wait until a model would have run the step, which began at `start`.
    fn run_model(&self, output: &SchedulerOutput, start: Instant) {
        let model_time = self.options.model_time;
        let end = start + model_time + model_time * output.total_num_scheduled_tokens / 1000;
        while Instant::now() < end {
            std::hint::spin_loop();
        }
    }

    /// Make up the tokens of the oldest step in flight: one for each row, and one for each column where there are drafts,
    /// of which the first half is right.
    fn sample(&mut self) {
        let Some(output) = self.in_flight.front() else { return };
        let most = self.num_columns(output) as u64;
        self.sampled.clear();
        for _ in 0..output.num_sampled {
            for column in 0..most {
                self.num_sampled += 1;
                let token_id = if self.options.repeats { 7 } else { (self.num_sampled % NUM_IDS) as i32 };
                self.sampled.push(if column > most / 2 { -1 } else { token_id });
            }
        }
    }

    fn num_columns(&self, output: &SchedulerOutput) -> usize {
        let has_drafts = output.num_logits > output.num_sampled;
        if has_drafts { 1 + self.options.num_drafts as usize } else { 1 }
    }

    /// Update the oldest step in flight.
    fn update(&mut self) {
        let Some(output) = self.in_flight.pop_front() else { return };
        let num_columns = self.num_columns(&output);
        let rows = TokenRows { token_ids: &self.sampled, num_columns };
        self.scheduler.update_from_output(&output, rows).expect("the oldest step in flight");
    }

    fn update_all(&mut self) {
        while !self.in_flight.is_empty() {
            self.sample();
            self.update();
        }
        self.drain();
    }

    /// Consume the outputs, as the output thread would during the step.
    fn drain(&mut self) {
        self.consumer.drain(|record| {
            black_box(record);
        });
    }

    fn add(&mut self, num_prompt_tokens: u32, max_tokens: u32) {
        self.num_added += 1;
        let tag = (self.num_added as i32) << 8 & i32::MAX;
        let prompt_token_ids = (0..num_prompt_tokens as i32).map(|place| place ^ tag).collect();
        let request = new_request(RequestKey(self.num_added), prompt_token_ids, max_tokens);
        self.scheduler.handle().add_request(request).expect("a request that fits");
    }
}
