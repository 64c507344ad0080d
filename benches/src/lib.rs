//! `Decoding`: a scheduler with N running decodes, kept in steady state for as long as a bench wants.
//!
//! Prompts are staggered over one block, so that one sixteenth of the requests cross into a new block in
//! every step. A request that reaches its end is replaced, outside the measured part, by an equal one.

use scheduler::{
    EngineCoreOutput, NewRequest, SamplingParams, Scheduler, SchedulerConfig, SchedulerOutput, StepBuffers,
    TokenRows, egress::Consumer,
};

/// Tokens per block in all benches.
pub const BLOCK_SIZE: u32 = 16;
const OUTPUT_TOKENS: u32 = 512;
const PROMPT_TOKENS: u32 = 128;

/// N running decodes.
#[derive(Debug)]
pub struct Decoding {
    /// The scheduler under test.
    pub scheduler: Scheduler,
    consumer: Consumer,
    sampled: Vec<i32>,
    num_running: u32,
    num_added: u32,
}

impl Decoding {
    /// Admit `num_running` requests and run their prefill.
    ///
    /// # Panics
    /// When a request does not fit: the configuration below is wrong.
    #[must_use]
    pub fn new(num_running: u32) -> Self {
        let blocks_per_request = (PROMPT_TOKENS + BLOCK_SIZE + OUTPUT_TOKENS).div_ceil(BLOCK_SIZE);
        let config = SchedulerConfig {
            block_size: BLOCK_SIZE,
            max_num_seqs: num_running,
            max_num_batched_tokens: 8192,
            ..SchedulerConfig::new(num_running * blocks_per_request + 1, 8192)
        };
        let buffers = (0..2).map(|_| StepBuffers::owned(&config)).collect();
        let mut scheduler = Scheduler::new(config, buffers).expect("a valid configuration");
        let consumer = scheduler.take_consumer().expect("taken once");
        let mut decoding = Self { scheduler, consumer, sampled: Vec::new(), num_running, num_added: 0 };
        decoding.refill();
        decoding
    }

    /// Blocks in the pool, to be stated beside a figure.
    #[must_use]
    pub fn num_blocks(&self) -> u32 {
        self.scheduler.config().num_blocks
    }

    /// Replace what has ended and run its prefill; afterwards the next step is decodes only.
    ///
    /// # Panics
    /// When a request does not fit.
    pub fn refill(&mut self) {
        while self.scheduler.num_unfinished_requests() < self.num_running as usize {
            for _ in self.scheduler.num_unfinished_requests()..self.num_running as usize {
                let length = PROMPT_TOKENS + self.num_added % BLOCK_SIZE;
                let handle = self.scheduler.handle();
                let prompt_token_ids = (0..length as i32).map(|i| i ^ (self.num_added as i32) << 8).collect();
                handle
                    .add_request(NewRequest::new(
                        handle.new_key(),
                        &self.num_added.to_string(),
                        prompt_token_ids,
                        SamplingParams { max_tokens: OUTPUT_TOKENS, ..SamplingParams::default() },
                    ))
                    .expect("a request that fits");
                self.num_added += 1;
            }
            while self.scheduler.handle().num_queued() > 0 {
                self.step();
            }
            self.step();
        }
    }

    /// `schedule`.
    ///
    /// # Panics
    /// When nothing runs.
    pub fn schedule(&mut self) -> SchedulerOutput {
        self.scheduler.schedule().expect("a free set").expect("running requests")
    }

    /// `update_from_output` with a made-up token per row.
    ///
    /// # Panics
    /// When the step is not in flight.
    pub fn update(&mut self, output: &SchedulerOutput) -> usize {
        self.sampled.resize(output.num_sampled as usize, 7);
        self.scheduler
            .update_from_output(output, TokenRows::column(&self.sampled))
            .expect("the step in flight")
    }

    /// Consume the outputs, as the output thread would beside the step.
    pub fn drain(&mut self, mut receive: impl FnMut(EngineCoreOutput)) {
        self.consumer.drain(&mut receive);
    }

    /// One whole step.
    pub fn step(&mut self) {
        let output = self.schedule();
        self.update(&output);
        self.drain(drop);
    }
}
