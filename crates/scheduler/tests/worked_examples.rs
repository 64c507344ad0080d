//! Small scenes with every number written out.

mod common;

use common::{request, scheduler};
use scheduler::{ExtraKeys, RequestStatus, Scheduler, SchedulerConfig, SchedulerOutput, TokenRows};

fn add(scheduler: &Scheduler, id: &str, num_prompt: u32, max_tokens: u32) {
    let prompt = (0..num_prompt as i32).map(|i| i + 1000 * id.len() as i32).collect();
    scheduler.handle().add_request(request(scheduler, id, prompt, max_tokens)).expect("a request that fits");
}

/// `num_scheduled_tokens` by id, in batch order.
fn scheduled(scheduler: &Scheduler, output: &SchedulerOutput) -> Vec<(String, u32)> {
    let view = scheduler.step_view(output).expect("the step is in flight");
    view.scheduled.into_iter().map(|request| (request.request_id, request.num_scheduled_tokens)).collect()
}

fn pairs(expected: &[(&str, u32)]) -> Vec<(String, u32)> {
    expected.iter().map(|&(id, n)| (id.to_owned(), n)).collect()
}

fn step(scheduler: &mut Scheduler) -> Option<Vec<(String, u32)>> {
    let output = scheduler.schedule().expect("a free set")?;
    let rows = scheduled(scheduler, &output);
    scheduler
        .update_from_output(&output, TokenRows::column(&vec![7; output.num_sampled as usize]))
        .expect("the step in flight");
    scheduler.check_invariants();
    Some(rows)
}

fn mixed_config(enable_chunked_prefill: bool) -> SchedulerConfig {
    SchedulerConfig {
        max_num_batched_tokens: 64,
        enable_chunked_prefill,
        enable_prefix_caching: false,
        ..SchedulerConfig::new(24, 128)
    }
}

#[test]
fn decode_and_two_prefills_share_a_budget() {
    for (chunked, expected, free) in
        [(false, pairs(&[("C", 1), ("AA", 50)]), 15), (true, pairs(&[("C", 1), ("AA", 50), ("BBB", 13)]), 14)]
    {
        let mut scheduler = scheduler(&mixed_config(chunked), 2);
        add(&scheduler, "C", 39, 30);
        // The prefill yields the first output token, nine decodes the next: 49 tokens, 48 computed.
        for _ in 0..10 {
            step(&mut scheduler);
        }
        assert_eq!(scheduler.request_state("C").expect("running").num_tokens, 49);
        assert_eq!(scheduler.handle().stats().num_free_blocks, 20);
        add(&scheduler, "AA", 50, 10);
        add(&scheduler, "BBB", 30, 10);
        let output = scheduler.schedule().expect("a free set").expect("work");
        assert_eq!(scheduled(&scheduler, &output), expected);
        assert_eq!(output.total_num_scheduled_tokens, if chunked { 64 } else { 51 });
        assert_eq!(
            scheduler.handle().stats().num_free_blocks,
            free,
            "C crosses into a fourth block, A takes four"
        );
        let waiting = scheduler.waiting_request_ids();
        assert_eq!(waiting, if chunked { vec![] } else { vec!["BBB".to_owned()] });
    }
}

#[test]
fn a_long_prefill_is_cut_only_in_company() {
    let config = SchedulerConfig {
        long_prefill_token_threshold: 512,
        max_num_batched_tokens: 2048,
        ..SchedulerConfig::new(512, 4096)
    };
    let mut scheduler = scheduler(&config, 2);
    add(&scheduler, "A", 1536, 10);
    add(&scheduler, "BB", 20, 10);
    assert_eq!(step(&mut scheduler), Some(pairs(&[("A", 512), ("BB", 20)])));
    add(&scheduler, "CCC", 64, 10);
    let output = scheduler.schedule().expect("a free set").expect("work");
    assert_eq!(scheduled(&scheduler, &output), pairs(&[("A", 512), ("BB", 1), ("CCC", 64)]));
    let arrays = scheduler.buffers(&output).expect("the step is in flight");
    assert_eq!(arrays.num_scheduled_tokens.to_vec(3), [512, 1, 64]);
    assert_eq!(output.total_num_scheduled_tokens, 577);
    assert_eq!(output.num_sampled, 2, "A is in the middle of its prompt");
}

#[test]
fn three_decodes_and_a_prefill() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    for id in ["A", "BB", "CCC"] {
        add(&scheduler, id, 10, 50);
    }
    step(&mut scheduler);
    add(&scheduler, "DDDD", 50, 50);
    let rows = step(&mut scheduler).expect("work");
    assert_eq!(rows, pairs(&[("A", 1), ("BB", 1), ("CCC", 1), ("DDDD", 50)]));
    assert_eq!(rows.iter().map(|row| row.1).sum::<u32>(), 53);
}

#[test]
fn the_life_of_one_request() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    add(&scheduler, "A", 6, 100);
    let (mut steps, mut total, mut trace) = (0, 0, Vec::new());
    while let Some(output) = scheduler.schedule().expect("a free set") {
        let state = scheduler.request_state("A").expect("live");
        trace.push((output.step, state.status, state.num_computed_tokens, state.num_tokens));
        steps += 1;
        total += output.total_num_scheduled_tokens;
        scheduler.update_from_output(&output, TokenRows::column(&[7])).expect("the step in flight");
    }
    assert_eq!((steps, total), (100, 105));
    let expected: Vec<_> =
        (1..=100).map(|s| (s, RequestStatus::Running, 5 + s as u32, 5 + s as u32)).collect();
    assert_eq!(trace, expected, "num_computed_tokens catches up with num_tokens in every step");
    assert_eq!(scheduler.num_unfinished_requests(), 0);
    assert_eq!(scheduler.handle().stats().num_free_blocks, 63);
}

#[test]
fn equal_prompts_in_one_step_share_their_full_blocks() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    let prompt: Vec<i32> = (0..40).collect();
    for id in ["A", "B"] {
        scheduler.handle().add_request(request(&scheduler, id, prompt.clone(), 4)).expect("fits");
    }
    assert_eq!(step(&mut scheduler), Some(pairs(&[("A", 40), ("B", 8)])));
    let tables = ["A", "B"].map(|id| scheduler.request_state(id).expect("running").block_table);
    assert_eq!(tables[0][..2], tables[1][..2]);
    assert_ne!(tables[0][2], tables[1][2]);
    assert_eq!(scheduler.request_state("B").expect("running").num_cached_tokens, 32);
}

#[test]
fn a_prompt_of_whole_cached_blocks_recomputes_the_last_block() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    let prompt: Vec<i32> = (0..48).collect();
    scheduler.handle().add_request(request(&scheduler, "A", prompt.clone(), 1)).expect("fits");
    assert_eq!(step(&mut scheduler), Some(pairs(&[("A", 48)])));
    assert_eq!(
        scheduler.prefix_hit_length(&prompt, &ExtraKeys::default()),
        32,
        "the last token is always computed"
    );
    assert_eq!(
        scheduler.prefix_hit_length(&prompt, &ExtraKeys::new(None, Some("salt"), Vec::new())),
        0,
        "another salt shares nothing"
    );
    scheduler.handle().add_request(request(&scheduler, "B", prompt, 1)).expect("fits");
    assert_eq!(step(&mut scheduler), Some(pairs(&[("B", 16)])));
}

#[test]
fn a_failed_step_leaves_nothing_findable() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    let prompt: Vec<i32> = (0..40).collect();
    for id in ["A", "B"] {
        scheduler.handle().add_request(request(&scheduler, id, prompt.clone(), 4)).expect("fits");
    }
    let output = scheduler.schedule().expect("a free set").expect("work");
    assert_eq!(
        scheduler.prefix_hit_length(&prompt, &ExtraKeys::default()),
        32,
        "findable while the step is in flight"
    );
    assert_eq!(scheduler.fail_step(&output), Ok(2));
    assert_eq!(scheduler.prefix_hit_length(&prompt, &ExtraKeys::default()), 0, "never computed, never found");
    scheduler.check_invariants();
    assert_eq!(scheduler.handle().stats().num_free_blocks, 63);
}

#[test]
fn the_worst_request_gives_way_and_the_others_run_in_the_same_step() {
    let config = SchedulerConfig {
        block_size: 4,
        scheduling_policy: scheduler::SchedulingPolicy::Priority,
        enable_prefix_caching: false,
        ..SchedulerConfig::new(5, 16)
    };
    let mut scheduler = scheduler(&config, 2);
    for (id, priority) in [("A", 5), ("BB", 0)] {
        let prompt = (0..7).map(|i| i + 100 * id.len() as i32).collect();
        let mut request = request(&scheduler, id, prompt, 5);
        request.priority = priority;
        scheduler.handle().add_request(request).expect("fits");
        step(&mut scheduler);
    }
    // Both have two full blocks of the four: A, first in the list and less important, loses its own.
    let mut plans = Vec::new();
    while scheduler.request_state("BB").is_some() {
        plans.push(step(&mut scheduler).expect("BB runs in every step"));
    }
    assert!(plans.iter().any(|plan| *plan == pairs(&[("BB", 1)])));
    assert!(scheduler.handle().stats().num_preemptions > 0);
    while scheduler.has_unfinished_requests() {
        step(&mut scheduler).expect("A comes back and finishes");
    }
}

#[test]
fn aborting_the_company_of_a_victim_lets_it_run_again() {
    let config =
        SchedulerConfig { block_size: 4, enable_prefix_caching: false, ..SchedulerConfig::new(5, 16) };
    let mut scheduler = scheduler(&config, 2);
    for id in ["A", "BB"] {
        add(&scheduler, id, 7, 5);
        step(&mut scheduler);
    }
    while scheduler.handle().stats().num_preemptions == 0 {
        step(&mut scheduler).expect("work");
    }
    scheduler.handle().abort_requests(["A"]);
    assert!(step(&mut scheduler).is_some(), "BB is admitted again");
}

#[test]
fn an_abort_before_a_failed_step_leaves_nothing_findable() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    let prompt: Vec<i32> = (0..40).collect();
    scheduler.handle().add_request(request(&scheduler, "A", prompt.clone(), 4)).expect("fits");
    let output = scheduler.schedule().expect("a free set").expect("work");
    scheduler.handle().abort_requests(["A"]);
    scheduler.fail_step(&output).expect("in flight");
    assert_eq!(scheduler.prefix_hit_length(&prompt, &ExtraKeys::default()), 0);
    scheduler.check_invariants();
}

#[test]
fn what_was_computed_for_a_request_without_numbers_is_forgotten() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    let prompt: Vec<i32> = (0..40).collect();
    scheduler.handle().add_request(request(&scheduler, "A", prompt.clone(), 4)).expect("fits");
    let output = scheduler.schedule().expect("a free set").expect("work");
    assert_eq!(scheduler.update_from_output(&output, TokenRows::column(&[-1])), Ok(1));
    assert_eq!(scheduler.prefix_hit_length(&prompt, &ExtraKeys::default()), 0);
    scheduler.check_invariants();
}
