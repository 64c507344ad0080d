//! Small scenes of who gives way and who comes in, with every number written out.

mod common;

use common::{request, scheduler};
use scheduler::{NewRequest, Scheduler, SchedulerConfig, SchedulerOutput, SchedulingPolicy, TokenRows};

/// Tokens of different ids are different from the first on.
fn prompt(id: &str, num_prompt: i32) -> Vec<i32> {
    (0..num_prompt).map(|i| 1000 * i32::from(id.as_bytes()[0]) + i).collect()
}

fn new(scheduler: &Scheduler, id: &str, num_prompt: i32, max_tokens: u32) -> NewRequest {
    request(scheduler, id, prompt(id, num_prompt), max_tokens)
}

fn add(scheduler: &Scheduler, request: NewRequest) {
    scheduler.handle().add_request(request).expect("a request that fits");
}

fn rows(scheduler: &Scheduler, output: &SchedulerOutput) -> Vec<(String, u32)> {
    let view = scheduler.step_view(output).expect("the step is in flight");
    view.scheduled.into_iter().map(|row| (row.request_id, row.num_scheduled_tokens)).collect()
}

fn pairs(expected: &[(&str, u32)]) -> Vec<(String, u32)> {
    expected.iter().map(|&(id, n)| (id.to_owned(), n)).collect()
}

/// The next step, which runs these rows.
fn plan(scheduler: &mut Scheduler, expected: &[(&str, u32)]) -> SchedulerOutput {
    let output = scheduler.schedule().expect("a free set").expect("work");
    assert_eq!(rows(scheduler, &output), pairs(expected), "step {}", output.step);
    scheduler.check_invariants();
    output
}

fn update(scheduler: &mut Scheduler, output: &SchedulerOutput) {
    let sampled = vec![7; output.num_sampled as usize];
    scheduler.update_from_output(output, TokenRows::column(&sampled)).expect("the step in flight");
    scheduler.check_invariants();
}

fn run(scheduler: &mut Scheduler, expected: &[(&str, u32)]) {
    let output = plan(scheduler, expected);
    update(scheduler, &output);
}

/// A plan that came to nothing has preempted; the next one admits, because it preempts none itself.
#[test]
fn a_preemption_of_a_plan_in_vain_keeps_no_request_out() {
    let config = SchedulerConfig {
        block_size: 8,
        max_steps_in_flight: 2,
        num_speculative_tokens: 4,
        enable_prefix_caching: false,
        ..SchedulerConfig::new(7, 64)
    };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    add(&scheduler, new(&scheduler, "a", 27, 5));
    add(&scheduler, new(&scheduler, "b", 12, 28));
    let first = plan(&mut scheduler, &[("a", 27), ("b", 12)]);
    update(&mut scheduler, &first);
    let second = plan(&mut scheduler, &[("a", 4), ("b", 4)]);
    assert!(scheduler.schedule().expect("a free set").is_none(), "b lacks a block and gives itself up");
    assert_eq!(scheduler.waiting_request_ids(), ["b"]);
    update(&mut scheduler, &second);
    let third = plan(&mut scheduler, &[("a", 3), ("b", 14)]);
    let view = scheduler.step_view(&third).expect("in flight");
    assert_eq!(view.preempted_req_ids, ["b"], "the worker learns of the row that b had");
}

/// The worst gives itself up; one behind it, more important, has its block and runs.
#[test]
fn who_gives_itself_up_takes_nobodys_turn() {
    let config = SchedulerConfig {
        block_size: 4,
        enable_prefix_caching: false,
        scheduling_policy: SchedulingPolicy::Priority,
        ..SchedulerConfig::new(4, 12)
    };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    add(&scheduler, new(&scheduler, "a", 2, 9));
    add(&scheduler, NewRequest { priority: 5, ..new(&scheduler, "b", 3, 9) });
    run(&mut scheduler, &[("a", 2), ("b", 3)]);
    add(&scheduler, NewRequest { priority: 1, ..new(&scheduler, "c", 2, 9) });
    run(&mut scheduler, &[("a", 1), ("b", 1), ("c", 2)]);
    run(&mut scheduler, &[("a", 1), ("c", 1)]);
    assert_eq!(scheduler.waiting_request_ids(), ["b"]);
}

/// Until a victim that had its turn in the step being planned is taken out of it: a step in flight fills its first
/// block.
fn scheduler_with_a_victim_in_flight() -> (Scheduler, SchedulerOutput, SchedulerOutput) {
    let config = SchedulerConfig {
        block_size: 4,
        max_steps_in_flight: 2,
        scheduling_policy: SchedulingPolicy::Priority,
        ..SchedulerConfig::new(4, 12)
    };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    add(&scheduler, NewRequest { priority: 5, ..new(&scheduler, "v", 3, 5) });
    let first = plan(&mut scheduler, &[("v", 3)]);
    add(&scheduler, new(&scheduler, "w", 4, 5));
    let second = plan(&mut scheduler, &[("v", 1), ("w", 4)]);
    update(&mut scheduler, &first);
    assert_eq!(hit_of_victim(&scheduler), 0, "what fills the block became known just now");
    let third = plan(&mut scheduler, &[("w", 1)]);
    assert_eq!(scheduler.waiting_request_ids(), ["v"]);
    (scheduler, second, third)
}

fn hit_of_victim(scheduler: &Scheduler) -> u32 {
    let tokens = [&prompt("v", 3)[..], &[7, 7]].concat();
    scheduler.prefix_hit_length(&tokens, &scheduler::ExtraKeys::default())
}

#[test]
fn a_block_that_a_step_in_flight_fills_for_a_victim_is_found() {
    let (mut scheduler, second, third) = scheduler_with_a_victim_in_flight();
    assert_eq!(hit_of_victim(&scheduler), 4);
    update(&mut scheduler, &second);
    scheduler.handle().abort_requests(["w"]);
    update(&mut scheduler, &third);
    run(&mut scheduler, &[("v", 1)]);
    assert_eq!(scheduler.handle().stats().preempted_cache_hits, 4, "four of its five tokens");
}

#[test]
fn a_block_that_a_failed_step_was_to_fill_for_a_victim_is_not_found() {
    let (mut scheduler, second, _) = scheduler_with_a_victim_in_flight();
    assert_eq!(hit_of_victim(&scheduler), 4);
    scheduler.fail_step(&second).expect("the step in flight");
    assert_eq!(hit_of_victim(&scheduler), 0);
}

#[test]
fn what_a_step_in_flight_computed_for_a_victim_without_numbers_is_not_found() {
    let (mut scheduler, second, _) = scheduler_with_a_victim_in_flight();
    assert_eq!(hit_of_victim(&scheduler), 4);
    scheduler.update_from_output(&second, TokenRows::column(&[-1, 7])).expect("the step in flight");
    scheduler.check_invariants();
    assert!(scheduler.request_state("v").is_none());
    assert_eq!(hit_of_victim(&scheduler), 0);
}

/// The threshold cuts prompts; where none may be cut it says nothing.
#[test]
fn without_chunks_a_prompt_above_the_threshold_runs_whole() {
    let config = SchedulerConfig {
        max_num_batched_tokens: 128,
        long_prefill_token_threshold: 46,
        enable_chunked_prefill: false,
        ..SchedulerConfig::new(64, 128)
    };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    add(&scheduler, new(&scheduler, "0", 100, 3));
    add(&scheduler, new(&scheduler, "1", 100, 3));
    run(&mut scheduler, &[("0", 100)]);
    run(&mut scheduler, &[("0", 1), ("1", 100)]);
}

/// Of two requests that are as important, the one that came to its front end first; under FCFS the one handed in first.
#[test]
fn a_tie_of_priorities_goes_to_who_came_first() {
    for (policy, expected) in [(SchedulingPolicy::Priority, "b"), (SchedulingPolicy::Fcfs, "a")] {
        let config = SchedulerConfig {
            block_size: 4,
            scheduling_policy: policy,
            max_num_seqs: 1,
            ..SchedulerConfig::new(4, 12)
        };
        let mut scheduler = scheduler(&config, config.num_buffer_sets());
        add(&scheduler, new(&scheduler, "a", 2, 3));
        add(&scheduler, NewRequest { age_ns: 1_000_000_000, ..new(&scheduler, "b", 2, 3) });
        add(&scheduler, NewRequest { priority: 1, age_ns: 2_000_000_000, ..new(&scheduler, "c", 2, 3) });
        run(&mut scheduler, &[(expected, 2)]);
        assert_eq!(scheduler.waiting_request_ids().last().map(String::as_str), Some("c"));
    }
}

/// The prefix cache counts what it was asked for.
#[test]
fn only_what_is_looked_up_is_counted() {
    let config = |enable_prefix_caching| SchedulerConfig {
        block_size: 4,
        enable_prefix_caching,
        ..SchedulerConfig::new(32, 64)
    };
    let queried = |scheduler: &Scheduler| scheduler.handle().stats().prefix_cache_queries;

    let mut without_cache = scheduler(&config(false), 2);
    add(&without_cache, new(&without_cache, "a", 9, 2));
    run(&mut without_cache, &[("a", 9)]);
    assert_eq!(queried(&without_cache), 0, "nothing is cached");

    let mut scheduler = scheduler(&config(true), 2);
    add(&scheduler, NewRequest { skip_reading_prefix_cache: true, ..new(&scheduler, "a", 9, 2) });
    let mut judged = new(&scheduler, "b", 9, 2);
    judged.params.num_prompt_logprobs = 0;
    add(&scheduler, judged);
    let output = plan(&mut scheduler, &[("a", 9), ("b", 9)]);
    assert_eq!((output.num_sampled, queried(&scheduler)), (2, 0), "both compute their whole prompts");
    scheduler.fail_step(&output).expect("the step in flight");

    let parent = new(&scheduler, "p", 9, 2);
    let child = NewRequest {
        key: scheduler.handle().new_key(),
        request_id: "q".into(),
        fork_from: Some(parent.key),
        ..parent.clone()
    };
    scheduler.handle().add_requests(vec![parent, child]).expect("requests that fit");
    run(&mut scheduler, &[("p", 8)]);
    run(&mut scheduler, &[("p", 1), ("q", 1)]);
    assert_eq!(scheduler.handle().stats().num_forks, 1);
    assert_eq!(queried(&scheduler), 9, "the child takes what the parent has");
}

/// There are blocks before the first step, and a reader sees them.
#[test]
fn the_numbers_are_there_before_the_first_step() {
    let config = SchedulerConfig { num_cpu_blocks: 5, ..SchedulerConfig::new(9, 64) };
    let stats = scheduler(&config, 2).handle().stats();
    assert_eq!((stats.num_usable_blocks, stats.num_free_blocks, stats.num_free_cpu_blocks), (8, 8, 5));
}
