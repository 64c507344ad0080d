//! `ReplayTarget`: what a replay drives. `TimedScheduler` is the real scheduler on a stopwatch; a test may put a naive
//! one in its place and compare the two request by request.

use std::time::{Duration, Instant};

use scheduler::{
    AddRequestError, EngineHandle, NewRequest, RequestKey, SamplingParams, Scheduler, SchedulerConfig,
    SchedulerError, SchedulerOutput, StepBuffers, TokenRows, egress::Consumer,
};

/// What a step has to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StepLoad {
    /// Requests in it.
    pub num_reqs: u32,
    /// Tokens to compute.
    pub num_tokens: u32,
    /// Tokens that the step's requests attend to: the sum of their lengths.
    pub num_context_tokens: u64,
    /// Requests that get a token.
    pub num_sampled: u32,
    /// Requests scheduled for the first time, which are the oldest of those that never were.
    pub num_admitted: u32,
}

/// A scheduler under replay: first come, first served, one step at a time.
pub trait ReplayTarget {
    /// Hand in the request number `index`, which ignores EOS.
    ///
    /// # Errors
    /// Why it can never run.
    fn add_request(
        &mut self,
        index: u64,
        prompt_token_ids: Vec<i32>,
        max_tokens: u32,
    ) -> Result<(), AddRequestError>;

    /// Plan a step; `None` when nothing can run.
    ///
    /// # Errors
    /// Misuse: a bug in the replay.
    fn schedule(&mut self) -> Result<Option<StepLoad>, SchedulerError>;

    /// End the step with a token for each of its sampled requests. With a request's first output `receive` gets its index
    /// and the number of prompt tokens found in the prefix cache at first admission; what it gets later does not matter.
    ///
    /// # Errors
    /// Misuse: a bug in the replay.
    fn update(&mut self, sampled: &[i32], receive: &mut dyn FnMut(u64, u32)) -> Result<(), SchedulerError>;

    /// Requests handed in and never scheduled yet.
    fn num_queued(&self) -> u32;

    /// Whether any request has not finished.
    fn has_unfinished_requests(&self) -> bool;

    /// Preemptions since the start.
    fn num_preemptions(&self) -> u64;
}

/// Time spent in the scheduler's calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ControlPlaneTime {
    /// `add_request`: checks and the hashes of the prompt's blocks.
    pub add: Duration,
    /// `schedule`.
    pub schedule: Duration,
    /// `update_from_output`.
    pub update: Duration,
    /// Reading the outputs.
    pub drain: Duration,
}

impl ControlPlaneTime {
    /// All of it.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.add + self.schedule + self.update + self.drain
    }
}

/// The real scheduler on a stopwatch.
#[derive(Debug)]
pub struct TimedScheduler {
    scheduler: Scheduler,
    handle: EngineHandle,
    consumer: Consumer,
    step: SchedulerOutput,
    time: ControlPlaneTime,
}

impl TimedScheduler {
    /// A scheduler over buffers of its own.
    ///
    /// # Errors
    /// A number outside its limits.
    pub fn new(config: SchedulerConfig) -> Result<Self, SchedulerError> {
        config.check()?;
        let (scheduler, consumer) = with_buffers(config)?;
        let handle = scheduler.handle();
        let (step, time) = (SchedulerOutput::default(), ControlPlaneTime::default());
        Ok(Self { scheduler, handle, consumer, step, time })
    }

    /// What the calls so far took.
    #[must_use]
    pub fn time(&self) -> ControlPlaneTime {
        self.time
    }
}

impl ReplayTarget for TimedScheduler {
    fn add_request(
        &mut self,
        index: u64,
        prompt_token_ids: Vec<i32>,
        max_tokens: u32,
    ) -> Result<(), AddRequestError> {
        let request = new_request(RequestKey(index), prompt_token_ids, max_tokens);
        let start = Instant::now();
        let answer = self.handle.add_request(request);
        self.time.add += start.elapsed();
        answer
    }

    fn schedule(&mut self) -> Result<Option<StepLoad>, SchedulerError> {
        let num_queued = self.handle.num_queued();
        let start = Instant::now();
        let output = self.scheduler.schedule();
        self.time.schedule += start.elapsed();
        let Some(step) = output? else { return Ok(None) };
        self.step = step;
        let buffers = self.scheduler.buffers(&step);
        let lengths = |position| buffers.map_or(0, |buffers| buffers.seq_lens.read(position) as u64);
        Ok(Some(StepLoad {
            num_reqs: step.num_reqs,
            num_tokens: step.total_num_scheduled_tokens,
            num_context_tokens: (0..step.num_reqs as usize).map(lengths).sum(),
            num_sampled: step.num_sampled,
            num_admitted: num_queued - self.handle.num_queued(),
        }))
    }

    fn update(&mut self, sampled: &[i32], receive: &mut dyn FnMut(u64, u32)) -> Result<(), SchedulerError> {
        let start = Instant::now();
        self.scheduler.update_from_output(&self.step, TokenRows::column(sampled))?;
        let updated = Instant::now();
        self.consumer.drain(|record| receive(record.key.0, record.num_cached_tokens));
        self.time.update += updated - start;
        self.time.drain += updated.elapsed();
        Ok(())
    }

    fn num_queued(&self) -> u32 {
        self.handle.num_queued()
    }

    fn has_unfinished_requests(&self) -> bool {
        self.scheduler.has_unfinished_requests()
    }

    fn num_preemptions(&self) -> u64 {
        self.handle.stats().num_preemptions
    }
}

/// A scheduler over buffer sets of its own, and the end where its outputs come out.
pub(crate) fn with_buffers(config: SchedulerConfig) -> Result<(Scheduler, Consumer), SchedulerError> {
    let buffers = (0..config.num_buffer_sets()).map(|_| StepBuffers::owned(&config)).collect();
    let mut scheduler = Scheduler::new(config, buffers)?;
    let consumer = scheduler.take_consumer().expect("a new scheduler has its consumer");
    Ok((scheduler, consumer))
}

/// A plain request that runs to `max_tokens`. Its key is its name.
pub(crate) fn new_request(key: RequestKey, prompt_token_ids: Vec<i32>, max_tokens: u32) -> NewRequest {
    let params = SamplingParams { max_tokens, ..SamplingParams::default() };
    NewRequest::new(key, &key.0.to_string(), prompt_token_ids, params)
}
