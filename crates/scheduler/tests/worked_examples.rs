//! Small scenes with every number written out.

mod common;

use std::collections::{HashMap, VecDeque};

use common::{request, scheduler};
use scheduler::{
    ExtraKeys,
    RequestStatus::{self, FinishedLengthCapped, Running, Waiting},
    Scheduler, SchedulerConfig, SchedulerOutput, StepRows, TokenRows,
};

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

/// The trace of a request: (step, status, `num_computed_tokens`, `num_tokens`).
type Trace = Vec<(u64, RequestStatus, u32, u32)>;

/// Every request's trace since the last call.
fn traces(scheduler: &mut Scheduler) -> HashMap<String, Trace> {
    let (events, num_dropped) = scheduler.take_events();
    assert_eq!(num_dropped, 0);
    let mut traces: HashMap<String, Trace> = HashMap::new();
    for event in events {
        let state = (event.step, event.status, event.num_computed_tokens, event.num_tokens);
        traces.entry(event.request_id).or_default().push(state);
    }
    traces
}

fn running(states: impl IntoIterator<Item = (u64, u32, u32)>) -> Trace {
    states.into_iter().map(|(step, computed, tokens)| (step, Running, computed, tokens)).collect()
}

/// One decode and two prefills under a budget of 64, without and with chunked prefill.
#[test]
fn decode_and_two_prefills_share_a_budget() {
    for (chunked, expected, free) in
        [(false, pairs(&[("C", 1), ("AA", 50)]), 15), (true, pairs(&[("C", 1), ("AA", 50), ("BBB", 13)]), 14)]
    {
        let mut scheduler = scheduler(&mixed_config(chunked), 2);
        scheduler.set_trace(true);
        add(&scheduler, "C", 39, 30);
        // The prefill yields the first output token, nine decodes the next: 49 tokens, 48 computed.
        for _ in 0..10 {
            step(&mut scheduler);
        }
        assert_eq!(scheduler.request_state("C").expect("running").num_tokens, 49);
        assert_eq!(scheduler.handle().stats().num_free_blocks, 20);
        let mut trace = vec![(0, Waiting, 0, 39)];
        trace.extend(running((1..=10).map(|step| (step, 38 + step as u32, 38 + step as u32))));
        assert_eq!(traces(&mut scheduler)["C"], trace);
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
        let traces = traces(&mut scheduler);
        assert_eq!(traces["C"], running([(11, 49, 49)]));
        assert_eq!(traces["AA"], [(10, Waiting, 0, 50), (11, Running, 50, 50)]);
        let expected = if chunked {
            vec![(10, Waiting, 0, 30), (11, Running, 13, 30)]
        } else {
            vec![(10, Waiting, 0, 30)]
        };
        assert_eq!(traces["BBB"], expected);
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
    scheduler.set_trace(true);
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
    let traces = traces(&mut scheduler);
    assert_eq!(traces["A"], [(0, Waiting, 0, 1536), (1, Running, 512, 1536), (2, Running, 1024, 1536)]);
    assert_eq!(traces["BB"], [(0, Waiting, 0, 20), (1, Running, 20, 20), (2, Running, 21, 21)]);
    assert_eq!(traces["CCC"], [(1, Waiting, 0, 64), (2, Running, 64, 64)]);
}

/// Two rows with drafts of five run twelve tokens; when none of the drafts was made after all, two.
#[test]
fn drafts_that_were_not_made_leave_the_step() {
    let config = SchedulerConfig { num_speculative_tokens: 5, ..SchedulerConfig::new(64, 256) };
    let mut scheduler = scheduler(&config, 2);
    scheduler.set_trace(true);
    for id in ["A", "BB"] {
        add(&scheduler, id, 10, 50);
    }
    let output = scheduler.schedule().expect("a free set").expect("work");
    let drafts = TokenRows { token_ids: &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], num_columns: 5 };
    let rows = StepRows { drafts, ..StepRows::from(TokenRows::column(&[7, 7])) };
    scheduler.update_from_output(&output, rows).expect("the step in flight");
    traces(&mut scheduler);

    let output = scheduler.schedule().expect("a free set").expect("work");
    assert_eq!((output.total_num_scheduled_tokens, output.num_sampled, output.num_logits), (12, 2, 12));
    let view = scheduler.step_view(&output).expect("in flight");
    assert_eq!(view.scheduled[0].spec_token_ids, [1, 2, 3, 4, 5]);
    assert_eq!(view.scheduled[1].spec_token_ids, [6, 7, 8, 9, 10]);
    let arrays = scheduler.buffers(&output).expect("in flight");
    assert_eq!(arrays.input_ids.to_vec(12), [7, 1, 2, 3, 4, 5, 7, 6, 7, 8, 9, 10]);
    assert_eq!(traces(&mut scheduler)["A"], running([(2, 16, 11)]));

    let shorter = scheduler.truncate_drafts(&output, &[0, 0]).expect("the newest step");
    assert_eq!((shorter.total_num_scheduled_tokens, shorter.num_sampled, shorter.num_logits), (2, 2, 2));
    let view = scheduler.step_view(&shorter).expect("in flight");
    assert!(view.scheduled.iter().all(|row| row.spec_token_ids.is_empty() && row.num_scheduled_tokens == 1));
    assert!(scheduler.step_view(&output).is_none(), "the longer plan is gone");
    assert_eq!(
        scheduler.update_from_output(&output, TokenRows::column(&[8, 8])),
        Err(scheduler::SchedulerError::OutdatedOutput { step: 2 })
    );
    let state = scheduler.request_state("A").expect("running");
    assert_eq!((state.num_computed_tokens, state.num_tokens, state.num_output_placeholders), (11, 11, 1));
    scheduler.check_invariants();
    scheduler.update_from_output(&shorter, TokenRows::column(&[8, 8])).expect("the step in flight");
    assert_eq!(scheduler.handle().stats().num_draft_tokens, 0, "what was not made counts for nothing");
    step(&mut scheduler);
    assert_eq!(traces(&mut scheduler)["A"], running([(3, 12, 12)]));
}

#[test]
fn three_decodes_and_a_prefill() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    scheduler.set_trace(true);
    for id in ["A", "BB", "CCC"] {
        add(&scheduler, id, 10, 50);
    }
    step(&mut scheduler);
    add(&scheduler, "DDDD", 50, 50);
    let rows = step(&mut scheduler).expect("work");
    assert_eq!(rows, pairs(&[("A", 1), ("BB", 1), ("CCC", 1), ("DDDD", 50)]));
    assert_eq!(rows.iter().map(|row| row.1).sum::<u32>(), 53);
    let traces = traces(&mut scheduler);
    assert_eq!(traces["A"], [(0, Waiting, 0, 10), (1, Running, 10, 10), (2, Running, 11, 11)]);
    assert_eq!(traces["DDDD"], [(1, Waiting, 0, 50), (2, Running, 50, 50)]);
}

/// A prompt of six and a hundred outputs: a hundred steps, 105 tokens, with steps that overlap and without.
#[test]
fn the_life_of_one_request() {
    for max_steps_in_flight in [1, 2, 3] {
        let config = SchedulerConfig { max_steps_in_flight, ..SchedulerConfig::new(64, 256) };
        let mut scheduler = scheduler(&config, config.num_buffer_sets());
        scheduler.set_trace(true);
        add(&scheduler, "A", 6, 100);
        let (mut steps, mut total, mut in_flight) = (0, 0, VecDeque::new());
        loop {
            while in_flight.len() < max_steps_in_flight as usize {
                let Some(output) = scheduler.schedule().expect("a free set") else { break };
                steps += 1;
                total += output.total_num_scheduled_tokens;
                in_flight.push_back(output);
            }
            let Some(output) = in_flight.pop_front() else { break };
            scheduler.update_from_output(&output, TokenRows::column(&[7])).expect("the oldest step");
        }
        assert_eq!((steps, total), (100, 105), "no step is wasted at the end");
        let ahead = max_steps_in_flight - 1;
        let mut trace = vec![(0, Waiting, 0, 6)];
        // What is known lags behind by the steps in flight.
        trace.extend(running(
            (1..=100).map(|s| (s, 5 + s as u32, 5 + (s as u32).saturating_sub(ahead).max(1))),
        ));
        trace.push((100, FinishedLengthCapped, 105, 106));
        assert_eq!(traces(&mut scheduler)["A"], trace, "{max_steps_in_flight} steps in flight");
        assert_eq!(scheduler.num_unfinished_requests(), 0);
        assert_eq!(scheduler.handle().stats().num_free_blocks, 63);
    }
}

/// The owner of a prompt of 39 tokens and two samples that fork it: two full blocks in common, a copy of the third
/// each.
#[test]
fn samples_share_the_prompt_and_copy_its_last_block() {
    let mut scheduler =
        scheduler(&SchedulerConfig { enable_prefix_caching: false, ..SchedulerConfig::new(24, 128) }, 2);
    let first = request(&scheduler, "A", (0..39).collect(), 10);
    let samples = ["A1", "A2"].map(|id| scheduler::NewRequest {
        fork_from: Some(first.key),
        ..request(&scheduler, id, (0..39).collect(), 10)
    });
    let [one, two] = samples;
    scheduler.handle().add_requests(vec![first, one, two]).expect("they fit");
    assert_eq!(step(&mut scheduler), Some(pairs(&[("A", 38)])), "all but the last token of the prompt");
    let output = scheduler.schedule().expect("a free set").expect("work");
    assert_eq!(scheduled(&scheduler, &output), pairs(&[("A", 1), ("A1", 1), ("A2", 1)]));
    let tables = ["A", "A1", "A2"].map(|id| scheduler.request_state(id).expect("running").block_table);
    assert!(tables.iter().all(|table| table.len() == 3 && table[..2] == tables[0][..2]));
    let view = scheduler.step_view(&output).expect("in flight");
    let copies = [1, 2].map(|i| (tables[0][2].0 as i32, tables[i][2].0 as i32));
    assert_eq!(view.blocks_to_copy, copies);
    assert_eq!(scheduler.block_states()[tables[0][0].0 as usize].ref_count, 3);
    assert_eq!(scheduler.handle().stats().num_free_blocks, 23 - 5);
    scheduler.update_from_output(&output, TokenRows::column(&[1, 2, 3])).expect("in flight");
    scheduler.check_invariants();
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

#[test]
fn who_comes_back_from_the_cpu_shares_only_what_it_had_computed() {
    let config = SchedulerConfig {
        block_size: 4,
        max_num_batched_tokens: 5,
        scheduling_policy: scheduler::SchedulingPolicy::Priority,
        preemption_mode: scheduler::PreemptionMode::Swap,
        num_cpu_blocks: 8,
        ..SchedulerConfig::new(5, 16)
    };
    let mut scheduler = scheduler(&config, 2);
    let add = |scheduler: &Scheduler, id: &str, first: i32, num_prompt: i32, priority: i32| {
        let mut request = request(scheduler, id, (first..first + num_prompt).collect(), 3);
        request.priority = priority;
        scheduler.handle().add_request(request).expect("fits");
    };
    // A computes its prompt next to B's decodes until there is no block for it: five tokens are in two blocks then.
    add(&scheduler, "B", 100, 4, 0);
    add(&scheduler, "A", 0, 12, 5);
    while scheduler.request_state("A").is_none_or(|state| state.status != RequestStatus::Swapped) {
        step(&mut scheduler).expect("B runs");
    }
    let computed = scheduler.request_state("A").expect("it waits").num_computed_tokens;
    assert!((5..8).contains(&computed), "{computed}");
    // C computes the same prompt to its end, and is gone; all of it can be found.
    scheduler.handle().abort_requests(["B"]);
    add(&scheduler, "C", 0, 12, 1);
    while scheduler.request_state("C").is_none_or(|state| state.num_computed_tokens < 10) {
        step(&mut scheduler).expect("C runs");
    }
    let prompt: Vec<i32> = (0..12).collect();
    assert!(scheduler.prefix_hit_length(&prompt, &ExtraKeys::default()) >= 8);
    scheduler.handle().abort_requests(["C"]);
    // A shares the block that it had filled. The next one has tokens that are not computed for it yet: that is its own.
    let output = scheduler.schedule().expect("a free set").expect("A comes back");
    assert_eq!((output.num_swap_in, scheduled(&scheduler, &output)[0].0.as_str()), (1, "A"));
}
