//! Replays through the real scheduler and through the naive one, in pools that evict and preempt: both report the same,
//! request by request.

mod common;
// The one oracle of the scheduler, where its own tests are.
#[path = "../../scheduler/tests/naive/mod.rs"]
mod naive;

use std::collections::HashSet;

use common::{mooncake, requests, unique_request};
use loadgen::{
    ReplayOptions, ReplayReport, ReplayTarget, StepLoad, StepTimeModel, TimedScheduler, TraceRequest,
    replay_requests,
};
use naive::{NaiveConfig, NaiveRequest, NaiveScheduler, NaiveStep};
use scheduler::{AddRequestError, SchedulerConfig, SchedulerError};

/// The naive scheduler, driven like the real one.
struct NaiveTarget {
    naive: NaiveScheduler,
    step: NaiveStep,
    num_added: u32,
    admitted: HashSet<String>,
    num_preemptions: u64,
}

impl NaiveTarget {
    fn new(config: SchedulerConfig) -> Self {
        Self {
            naive: NaiveScheduler::new(NaiveConfig::new(config)),
            step: NaiveStep::default(),
            num_added: 0,
            admitted: HashSet::new(),
            num_preemptions: 0,
        }
    }
}

impl ReplayTarget for NaiveTarget {
    fn add_request(&mut self, index: u64, prompt: Vec<i32>, max_tokens: u32) -> Result<(), AddRequestError> {
        self.num_added += 1;
        let max_tokens = max_tokens as usize;
        self.naive.add(NaiveRequest { id: index.to_string(), prompt, max_tokens, ..NaiveRequest::default() });
        Ok(())
    }

    fn schedule(&mut self) -> Result<Option<StepLoad>, SchedulerError> {
        let Some(step) = self.naive.schedule() else { return Ok(None) };
        let num_before = self.admitted.len();
        self.admitted.extend(step.scheduled.iter().map(|(id, ..)| id.clone()));
        self.num_preemptions += step.preempted.len() as u64;
        let load = StepLoad {
            num_reqs: step.scheduled.len() as u32,
            num_tokens: step.scheduled.iter().map(|&(_, tokens, _)| tokens as u32).sum(),
            num_context_tokens: step
                .scheduled
                .iter()
                .map(|&(_, tokens, before)| (tokens + before) as u64)
                .sum(),
            num_sampled: step.sampled.len() as u32,
            num_admitted: (self.admitted.len() - num_before) as u32,
        };
        self.step = step;
        Ok(Some(load))
    }

    fn update(&mut self, sampled: &[i32], receive: &mut dyn FnMut(u64, u32)) -> Result<(), SchedulerError> {
        for (id, ..) in &self.step.scheduled {
            let request = self.naive.by_id(id).expect("what was scheduled lives until its step is updated");
            receive(id.parse().expect("an index"), request.num_cached_tokens as u32);
        }
        let rows: Vec<Vec<i32>> = sampled.iter().map(|&token| vec![token]).collect();
        self.naive.update(self.step.number, &rows, &[]);
        Ok(())
    }

    fn num_queued(&self) -> u32 {
        self.num_added - self.admitted.len() as u32
    }

    fn has_unfinished_requests(&self) -> bool {
        self.num_queued() > 0 || !self.naive.requests.is_empty()
    }

    fn num_preemptions(&self) -> u64 {
        self.num_preemptions
    }
}

/// Replay both ways, compare, and return what both say.
fn compare(trace: &[TraceRequest], options: &ReplayOptions) -> ReplayReport {
    let longest = trace.iter().map(|request| request.num_prompt_tokens + request.num_output_tokens).max();
    let config = options.scheduler_config(longest.expect("a trace has requests"));
    let run = |target: &mut dyn ReplayTarget| {
        replay_requests(trace.iter().cloned().map(Ok), options, target, &mut || true).expect("a replay")
    };
    let real = run(&mut TimedScheduler::new(config.clone()).expect("a valid configuration"));
    let naive = run(&mut NaiveTarget::new(config));
    assert_eq!(real, naive);
    real
}

/// Steps so slow that requests queue and run side by side.
const SLOW: StepTimeModel =
    StepTimeModel { base_us: 20_000.0, per_token_us: 100.0, per_context_token_us: 0.1 };

#[test]
fn in_small_pools() {
    let trace = requests();
    let (mut evicted, mut num_preemptions) = (false, 0);
    let endless =
        compare(&trace, &ReplayOptions { num_blocks: 10_000, step_time: SLOW, ..ReplayOptions::default() });
    for num_blocks in [280, 400, 700] {
        for (max_num_seqs, max_num_batched_tokens) in [(256, 8192), (4, 300), (256, 64)] {
            let options = ReplayOptions {
                num_blocks,
                max_num_seqs,
                max_num_batched_tokens,
                step_time: SLOW,
                ..ReplayOptions::default()
            };
            let report = compare(&trace, &options);
            evicted |= report.blocks().1 < endless.blocks().1;
            num_preemptions += report.num_preemptions;
            assert!(report.blocks().1 > 0);
        }
    }
    assert!(evicted, "the pools are too large to say anything");
    println!("{num_preemptions} preemptions");
}

#[test]
fn under_preemption() {
    let trace: Vec<_> = (0..60).map(|number| unique_request(number, number, 40, 200)).collect();
    let report =
        compare(&trace, &ReplayOptions { num_blocks: 64, step_time: SLOW, ..ReplayOptions::default() });
    assert!(report.num_preemptions > 0);
}

/// A debug build takes the beginning of the trace, a release build more of it, and `RUSTVLLM_TEST_REQUESTS` as much as
/// it says.
#[test]
fn on_the_recorded_trace() {
    let usual = if cfg!(debug_assertions) { 100 } else { 1000 };
    let given = std::env::var("RUSTVLLM_TEST_REQUESTS").ok();
    let num_requests = given.map_or(usual, |number| number.parse().expect("a number of requests"));
    let Some(trace) = mooncake(Some(num_requests)) else { return };
    let trace: Vec<_> = trace.requests().expect("a file").collect::<Result<_, _>>().expect("good lines");
    // The same memory cut into large blocks and into small ones.
    for (block_size, num_blocks, share) in [(512, 512, 1), (64, 4096, 10)] {
        let options = ReplayOptions { block_size, num_blocks, ..ReplayOptions::default() };
        let report = compare(&trace[..trace.len() / share], &options);
        let (full, hits) = report.blocks();
        println!(
            "{} requests, block size {block_size}: {} steps, {hits} of {full} blocks, {} preemptions",
            report.num_requests, report.num_steps, report.num_preemptions
        );
        assert!(hits > 0);
    }
}
