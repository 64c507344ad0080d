//! `replay`: a trace run through a scheduler under a virtual clock.
//!
//! No model runs: a `StepTimeModel` says how long each step would take, and the clock goes on by that. Requests whose
//! time has come are handed in before the next step; when nothing is left to do, the clock jumps to the next arrival. So
//! an hour of traffic is replayed in seconds, with the same queues, batches, hits and evictions each time.
//!
//! Requests that wait are handed in only so far as one step could admit them. The order is first come, first served, so
//! the result is the same, and the tokens of a long queue need no memory.

use std::{
    collections::{BTreeMap, VecDeque},
    iter::Peekable,
    time::{Duration, Instant},
};

use scheduler::{AddRequestError, ConfigError, SchedulerConfig, SchedulerError};
use thiserror::Error;

use crate::{
    KeepGoing,
    replay_target::{ControlPlaneTime, ReplayTarget, StepLoad, TimedScheduler},
    step_time::StepTimeModel,
    trace::{Trace, TraceError, TraceRequest, TraceSummary, output_token_id},
};

/// Real time between two questions whether to go on.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// How to replay.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ReplayOptions {
    /// Tokens per block.
    pub block_size: u32,
    /// KV blocks, the null block included.
    pub num_blocks: u32,
    /// Running requests at most.
    pub max_num_seqs: u32,
    /// Tokens per step at most.
    pub max_num_batched_tokens: u32,
    /// Whether equal prefixes share blocks.
    pub enable_prefix_caching: bool,
    /// How long a step would take.
    pub step_time: StepTimeModel,
}

impl Default for ReplayOptions {
    fn default() -> Self {
        Self {
            block_size: 16,
            num_blocks: 16_384,
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            enable_prefix_caching: true,
            step_time: StepTimeModel::default(),
        }
    }
}

impl ReplayOptions {
    /// The scheduler's numbers for a trace whose longest request has `max_model_len` tokens.
    #[must_use]
    pub fn scheduler_config(&self, max_model_len: u32) -> SchedulerConfig {
        SchedulerConfig {
            block_size: self.block_size,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            enable_prefix_caching: self.enable_prefix_caching,
            ..SchedulerConfig::new(self.num_blocks, max_model_len)
        }
    }
}

/// Why a replay ended early.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// The trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A number outside its limits.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The scheduler refused a call.
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    /// The scheduler has requests and runs none.
    #[error(
        "after {steps} steps the scheduler runs nothing, with requests left: this is a bug in the scheduler"
    )]
    Stalled {
        /// Steps so far.
        steps: u64,
    },
    /// The caller ended it.
    #[error("interrupted")]
    Interrupted,
}

/// Shares of the requests that waited at most so long, in virtual time from arrival to the first step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QueueTime {
    /// Half of them.
    pub p50: Duration,
    /// Nine tenths.
    pub p90: Duration,
    /// All but one in a hundred.
    pub p99: Duration,
    /// All.
    pub max: Duration,
}

impl QueueTime {
    /// By nearest rank; zeros when there are none.
    fn from_durations(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let rank = |percent: usize| match (times.len() * percent).div_ceil(100) {
            0 => Duration::ZERO,
            rank => times[rank - 1],
        };
        Self { p50: rank(50), p90: rank(90), p99: rank(99), max: rank(100) }
    }
}

/// What one request found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RequestHits {
    /// Full blocks of its prompt.
    pub full_blocks: u32,
    /// Of these, blocks found in the prefix cache at first admission. `None` when the request was refused.
    pub hit_blocks: Option<u32>,
}

/// What came of a replay.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ReplayReport {
    /// Requests of the trace.
    pub num_requests: u64,
    /// Requests that can never run, by reason.
    pub refused: BTreeMap<&'static str, u64>,
    /// Steps.
    pub num_steps: u64,
    /// Tokens computed.
    pub num_scheduled_tokens: u64,
    /// Tokens sampled.
    pub num_output_tokens: u64,
    /// Preemptions.
    pub num_preemptions: u64,
    /// Most requests in one step.
    pub max_num_running: u32,
    /// Waiting.
    pub queue_time: QueueTime,
    /// Virtual time from the first arrival to the end of the last step.
    pub virtual_time: Duration,
    /// Per request, in the trace's order.
    pub requests: Vec<RequestHits>,
}

impl ReplayReport {
    /// Full blocks of all admitted prompts, and those of them that were hits.
    #[must_use]
    pub fn blocks(&self) -> (u64, u64) {
        self.requests
            .iter()
            .filter_map(|request| Some((request.full_blocks, request.hit_blocks?)))
            .fold((0, 0), |(full, hits), (more_full, more_hits)| {
                (full + u64::from(more_full), hits + u64::from(more_hits))
            })
    }

    /// Hit full blocks per full block; 0 when there are none.
    #[must_use]
    pub fn prefix_hit_rate(&self) -> f64 {
        let (full, hits) = self.blocks();
        hits as f64 / full.max(1) as f64
    }
}

/// Replay a trace through the real scheduler. The longest request of the trace is its `max_model_len`.
///
/// # Errors
/// See [`ReplayError`].
pub fn replay(
    trace: &Trace,
    options: &ReplayOptions,
    keep_going: &mut KeepGoing<'_>,
) -> Result<(ReplayReport, ControlPlaneTime, TraceSummary), ReplayError> {
    // What is cheap to refuse is refused before a long file is read.
    options.step_time.check()?;
    options.scheduler_config(1).check()?;
    let summary = match trace.summarise(keep_going) {
        Err(TraceError::Interrupted) => return Err(ReplayError::Interrupted),
        summary => summary?,
    };
    let mut target = TimedScheduler::new(options.scheduler_config(summary.max_request_tokens))?;
    let report = replay_requests(trace.requests()?, options, &mut target, keep_going)?;
    Ok((report, target.time(), summary))
}

/// Replay requests, in order of arrival, through anything that schedules.
///
/// # Errors
/// See [`ReplayError`].
pub fn replay_requests(
    requests: impl Iterator<Item = Result<TraceRequest, TraceError>>,
    options: &ReplayOptions,
    target: &mut dyn ReplayTarget,
    keep_going: &mut KeepGoing<'_>,
) -> Result<ReplayReport, ReplayError> {
    options.step_time.check()?;
    let mut replay = Replay {
        options: *options,
        now: Duration::ZERO,
        waiting: VecDeque::new(),
        queue_times: Vec::new(),
        report: ReplayReport::default(),
        last_check: Instant::now(),
    };
    let mut requests = requests.peekable();
    let mut sampled = Vec::new();
    loop {
        replay.add_arrived(&mut requests, target, keep_going)?;
        if let Some(load) = target.schedule()? {
            replay.step(&load, &mut sampled, target)?;
        } else if target.has_unfinished_requests() {
            return Err(ReplayError::Stalled { steps: replay.report.num_steps });
        } else if let Some(Ok(next)) = requests.peek() {
            replay.now = replay.now.max(next.arrival);
        } else if let Some(error) = requests.next() {
            error?;
        } else {
            break;
        }
        replay.ask(keep_going)?;
    }
    let mut report = replay.report;
    report.num_preemptions = target.num_preemptions();
    report.queue_time = QueueTime::from_durations(replay.queue_times);
    report.virtual_time = replay.now;
    Ok(report)
}

/// A replay under way.
struct Replay {
    options: ReplayOptions,
    /// Virtual time since the beginning of the trace.
    now: Duration,
    /// Arrivals of the requests handed in and not scheduled yet, oldest first.
    waiting: VecDeque<Duration>,
    queue_times: Vec<Duration>,
    report: ReplayReport,
    last_check: Instant,
}

impl Replay {
    /// Hand in what has come, so far as the next step could admit it.
    fn add_arrived(
        &mut self,
        requests: &mut Peekable<impl Iterator<Item = Result<TraceRequest, TraceError>>>,
        target: &mut dyn ReplayTarget,
        keep_going: &mut KeepGoing<'_>,
    ) -> Result<(), ReplayError> {
        while target.num_queued() < self.options.max_num_seqs {
            let now = self.now;
            // A line that cannot be read ends the replay too.
            let has_come =
                |next: &Result<TraceRequest, _>| next.as_ref().map_or(true, |next| next.arrival <= now);
            let Some(request) = requests.next_if(has_come).transpose()? else { break };
            let index = self.report.num_requests;
            self.report.num_requests += 1;
            let full_blocks = request.num_prompt_tokens / self.options.block_size;
            self.report.requests.push(RequestHits { full_blocks, hit_blocks: None });
            match target.add_request(index, request.prompt_token_ids(), request.num_output_tokens) {
                Ok(()) => self.waiting.push_back(request.arrival),
                Err(error) => *self.report.refused.entry(reason(&error)).or_default() += 1,
            }
            self.ask(keep_going)?;
        }
        Ok(())
    }

    /// Run a planned step.
    fn step(
        &mut self,
        load: &StepLoad,
        sampled: &mut Vec<i32>,
        target: &mut dyn ReplayTarget,
    ) -> Result<(), ReplayError> {
        for arrival in self.waiting.drain(..load.num_admitted as usize) {
            self.queue_times.push(self.now.saturating_sub(arrival));
        }
        let report = &mut self.report;
        report.num_steps += 1;
        report.num_scheduled_tokens += u64::from(load.num_tokens);
        report.max_num_running = report.max_num_running.max(load.num_reqs);
        sampled.clear();
        sampled.extend((report.num_output_tokens..).take(load.num_sampled as usize).map(output_token_id));
        report.num_output_tokens += u64::from(load.num_sampled);
        self.now += self.options.step_time.duration(load);
        let (block_size, requests) = (self.options.block_size, &mut report.requests);
        target.update(sampled, &mut |index, num_cached_tokens| {
            requests[index as usize].hit_blocks.get_or_insert(num_cached_tokens / block_size);
        })?;
        Ok(())
    }

    fn ask(&mut self, keep_going: &mut KeepGoing<'_>) -> Result<(), ReplayError> {
        if self.last_check.elapsed() < CHECK_INTERVAL {
            return Ok(());
        }
        self.last_check = Instant::now();
        if keep_going() { Ok(()) } else { Err(ReplayError::Interrupted) }
    }
}

/// A refusal without its numbers, to count by.
fn reason(error: &AddRequestError) -> &'static str {
    match error {
        AddRequestError::EmptyPrompt => "empty_prompt",
        AddRequestError::PromptTooLong { .. } => "prompt_too_long",
        AddRequestError::NeverFits { .. } => "never_fits",
        AddRequestError::PromptExceedsBudget { .. } => "prompt_exceeds_budget",
        AddRequestError::QueueFull { .. } | AddRequestError::QueueTokensFull { .. } => "queue_full",
        _ => "other",
    }
}
