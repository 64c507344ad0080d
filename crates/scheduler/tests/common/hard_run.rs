//! A run that is hard on prompts: chunks of any size, preemption by either way, aborts, pauses, overlapping steps, and a
//! reader that is late. What requests ask for, and what must come of it, a test says.

use std::collections::VecDeque;

use scheduler::{
    NewRequest, PauseState, PreemptionMode, RequestKey, Scheduler, SchedulerConfig, SchedulerOutput,
    SchedulerStats, SchedulingPolicy, egress::Consumer,
};

use super::{Random, scheduler};

/// Longest sequence, and most tokens of a prompt.
pub const MAX_MODEL_LEN: u32 = 40;
const NUM_REQUESTS: usize = 70;

/// What a test wants of a run.
pub trait HardRun {
    /// What the worker makes of a step's arrays.
    type Said;

    /// Requests that were made.
    fn num_requests(&self) -> usize;

    /// A request, whose id is its key.
    fn request(&mut self, scheduler: &Scheduler, random: &mut Random) -> NewRequest;

    /// Called when a step is planned: its arrays are read before the next one is.
    fn said_by(&self, scheduler: &Scheduler, output: &SchedulerOutput) -> Self::Said;

    /// Give the scheduler what a step made.
    fn update(&self, scheduler: &mut Scheduler, output: &SchedulerOutput, said: &Self::Said);

    /// Take what has come out, and check it.
    fn read(&mut self, consumer: &mut Consumer);
}

/// Run `test` to the end of all of its requests.
pub fn run_hard<Test: HardRun>(
    test: &mut Test,
    seed: u64,
    max_steps_in_flight: u32,
    preemption_mode: PreemptionMode,
) -> SchedulerStats {
    let config = SchedulerConfig {
        max_num_seqs: 5,
        max_num_batched_tokens: 9,
        max_steps_in_flight,
        preemption_mode,
        num_cpu_blocks: if preemption_mode == PreemptionMode::Swap { 6 } else { 0 },
        block_size: 4,
        // Under this one a request may leave the step that it is already planned for.
        scheduling_policy: if seed.is_multiple_of(2) {
            SchedulingPolicy::Fcfs
        } else {
            SchedulingPolicy::Priority
        },
        // Several prompts are computed in one step, so that a later one takes blocks from an earlier one's.
        long_prefill_token_threshold: 3,
        preemption_immunity_steps: 1,
        ..SchedulerConfig::new(12, MAX_MODEL_LEN)
    };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    let mut consumer = scheduler.take_consumer().expect("the first to ask");
    let mut random = Random(seed);
    let mut in_flight = VecDeque::new();
    for _ in 0..900 {
        if test.num_requests() < NUM_REQUESTS && random.chance(25) {
            let new = test.request(&scheduler, &mut random);
            scheduler.handle().add_request(new).expect("it fits");
        }
        if random.chance(3) {
            scheduler.handle().abort_key(RequestKey(random.between(1, NUM_REQUESTS as u32).into()));
        }
        if random.chance(if scheduler.pause_state() == PauseState::Unpaused { 1 } else { 20 }) {
            let states = [PauseState::Unpaused, PauseState::PausedNew, PauseState::PausedAll];
            scheduler.set_pause_state(states[random.between(0, 2) as usize]);
        }
        if in_flight.len() < max_steps_in_flight as usize
            && let Some(output) = scheduler.schedule().expect("a free set")
        {
            in_flight.push_back((output, test.said_by(&scheduler, &output)));
        }
        if (in_flight.len() == max_steps_in_flight as usize || random.chance(50))
            && let Some((output, said)) = in_flight.pop_front()
        {
            test.update(&mut scheduler, &output, &said);
            scheduler.check_invariants();
        }
        if random.chance(20) {
            test.read(&mut consumer);
        }
    }
    scheduler.set_pause_state(PauseState::Unpaused);
    loop {
        if let Some((output, said)) = in_flight.pop_front() {
            test.update(&mut scheduler, &output, &said);
            scheduler.check_invariants();
        } else if let Some(output) = scheduler.schedule().expect("a free set") {
            in_flight.push_back((output, test.said_by(&scheduler, &output)));
        } else {
            break;
        }
        test.read(&mut consumer);
    }
    test.read(&mut consumer);
    assert!(!scheduler.has_unfinished_requests());
    scheduler.handle().stats()
}
