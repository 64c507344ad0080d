//! Outputs that end because they repeat themselves: at which token, behind which other ends, and with which records.

mod common;

use common::{request, scheduler};
use scheduler::{
    EngineCoreOutput, FinishReason, MAX_PATTERN_SIZE, NewRequest, RepetitionDetection, SamplingParams,
    Scheduler, SchedulerConfig, StepRows, TokenRows, egress::Consumer,
};

const REPETITION: Option<FinishReason> = Some(FinishReason::Repetition);

fn begin(num_speculative_tokens: u32) -> (Scheduler, Consumer) {
    let config = SchedulerConfig { num_speculative_tokens, ..SchedulerConfig::new(1024, 256) };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    let consumer = scheduler.take_consumer().expect("taken once");
    (scheduler, consumer)
}

fn detecting(min: u32, max: u32, count: u32) -> SamplingParams {
    let wanted = RepetitionDetection::new(min, max, count).expect("in range");
    SamplingParams { max_tokens: 100, repetition_detection: Some(wanted), ..SamplingParams::default() }
}

fn add(scheduler: &Scheduler, params: SamplingParams) -> NewRequest {
    // Its prompt repeats itself, which does not count.
    let new = NewRequest { params, ..request(scheduler, "a", vec![7; 20], 1) };
    scheduler.handle().add_request(new.clone()).expect("a request that fits");
    new
}

/// Steps that give these tokens, one each, until the request ends; its records.
fn run(scheduler: &mut Scheduler, consumer: &mut Consumer, tokens: &[i32]) -> Vec<EngineCoreOutput> {
    let mut records = Vec::new();
    for token_id in tokens {
        let Some(output) = scheduler.schedule().expect("a free set") else { break };
        let sampled = vec![*token_id; output.num_sampled as usize];
        scheduler.update_from_output(&output, TokenRows::column(&sampled)).expect("the step in flight");
        scheduler.check_invariants();
        consumer.drain(|record| records.push(record));
    }
    records
}

/// What a request with these parameters becomes of these tokens: how many it gets, and why it ends.
fn ends(params: SamplingParams, tokens: &[i32]) -> (usize, Option<FinishReason>) {
    let (mut scheduler, mut consumer) = begin(0);
    add(&scheduler, params);
    let records = run(&mut scheduler, &mut consumer, tokens);
    (records.len(), records.last().and_then(|record| record.finish_reason))
}

#[test]
fn an_output_ends_at_the_first_token_that_completes_a_repetition() {
    let tokens = [1, 2, 3, 2, 3, 2, 3, 3, 3, 3];
    assert_eq!(ends(detecting(1, 2, 3), &tokens), (7, REPETITION));
    assert_eq!(ends(detecting(1, 1, 3), &tokens), (9, REPETITION));
    assert_eq!(ends(detecting(2, 8, 2), &tokens), (5, REPETITION));
    assert_eq!(ends(detecting(3, 8, 2), &tokens), (10, None));
    assert_eq!(ends(detecting(1, MAX_PATTERN_SIZE, u32::MAX), &tokens), (10, None));
    assert_eq!(ends(SamplingParams { max_tokens: 100, ..SamplingParams::default() }, &[7; 20]), (20, None));
}

#[test]
fn it_is_looked_for_from_min_tokens_on() {
    let at_least = |min_tokens| SamplingParams { min_tokens, ..detecting(1, 2, 3) };
    assert_eq!(ends(at_least(0), &[7; 20]), (3, REPETITION));
    assert_eq!(ends(at_least(9), &[7; 20]), (9, REPETITION), "what came before it counts");
    let tokens = [1, 1, 1, 2, 3, 4, 1, 1, 1, 1];
    assert_eq!(ends(at_least(4), &tokens), (9, REPETITION), "the first one is over by then");
}

#[test]
fn every_other_end_comes_first() {
    let stops = SamplingParams { stop_token_ids: Box::new([7]), ..detecting(1, 1, 3) };
    assert_eq!(ends(stops, &[7; 9]), (1, Some(FinishReason::Stop)));
    let stops = SamplingParams { stop_token_ids: Box::new([8]), ..detecting(1, 2, 3) };
    assert_eq!(ends(stops, &[7, 8, 7, 8, 7, 8]), (2, Some(FinishReason::Stop)));
    let eos = SamplingParams { eos_token_id: Some(8), min_tokens: 6, ..detecting(1, 2, 3) };
    assert_eq!(ends(eos, &[7, 8]), (2, Some(FinishReason::Stop)));
    let short = SamplingParams { max_tokens: 3, ..detecting(1, 1, 3) };
    assert_eq!(ends(short, &[7; 9]), (3, Some(FinishReason::Length)));
    let short = SamplingParams { max_tokens: 4, ..detecting(1, 1, 3) };
    assert_eq!(ends(short, &[7; 9]), (3, REPETITION));
}

/// One step gives several tokens: those behind the end are dropped, drafts or not.
#[test]
fn what_follows_the_end_in_a_step_is_dropped() {
    let (mut scheduler, mut consumer) = begin(6);
    add(&scheduler, detecting(1, 2, 3));
    add_other(&scheduler);
    let mut records = Vec::new();
    // Both drafts and tokens of two requests, a step after the other.
    let steps: [[[i32; 7]; 2]; 2] = [
        [[1, -1, -1, -1, -1, -1, -1], [1, -1, -1, -1, -1, -1, -1]],
        [[5, 6, 5, 6, 5, 6, 9], [5, 6, 5, 6, 5, 6, 9]],
    ];
    for tokens in &steps {
        let output = scheduler.schedule().expect("a free set").expect("something to run");
        let rows = TokenRows { token_ids: tokens.as_flattened(), num_columns: 7 };
        let drafts = TokenRows { token_ids: &[5, 6, 5, 6, 5, 6, 5, 6, 5, 6, 5, 6], num_columns: 6 };
        let rows = StepRows { drafts, ..StepRows::from(rows) };
        scheduler.update_from_output(&output, rows).expect("the step in flight");
        scheduler.check_invariants();
        consumer.drain(|record| records.push(record));
    }
    let of = |key: scheduler::RequestKey| -> Vec<i32> {
        records.iter().filter(|record| record.key == key).map(|record| record.new_token_id).collect()
    };
    let first = records[0].key;
    let other = records.iter().find(|record| record.key != first).expect("two requests").key;
    assert_eq!(of(first), [1, 5, 6, 5, 6, 5, 6], "the last draft was accepted for nothing");
    assert_eq!(of(other), [1, 5, 6, 5, 6, 5, 6, 9]);
    let end = records.iter().find(|record| record.finish_reason.is_some()).expect("one of them");
    assert_eq!((end.key, end.finish_reason, end.stop_reason), (first, REPETITION, -1));
    assert_eq!(scheduler.num_unfinished_requests(), 1);
}

fn add_other(scheduler: &Scheduler) {
    scheduler.handle().add_request(request(scheduler, "b", vec![8; 20], 100)).expect("a request that fits");
}

#[test]
fn no_token_is_forced_on_an_output_that_may_end_at_it() {
    let (mut scheduler, mut consumer) = begin(0);
    let key = add(&scheduler, detecting(1, 1, 3)).key;
    assert_eq!(run(&mut scheduler, &mut consumer, &[7]).len(), 1);
    assert_eq!(scheduler.force_tokens(None, key, &[7, 7, 7, 7]), 0);
    assert_eq!(run(&mut scheduler, &mut consumer, &[7, 7]).len(), 2);
    assert!(!scheduler.has_unfinished_requests());
}

#[test]
fn such_an_end_is_counted_and_traced_by_its_name() {
    let (mut scheduler, mut consumer) = begin(0);
    scheduler.set_trace(true);
    add(&scheduler, detecting(1, 1, 3));
    run(&mut scheduler, &mut consumer, &[7; 3]);
    let statuses: Vec<_> = scheduler.take_events().0.iter().map(|event| event.status.as_str()).collect();
    assert_eq!(statuses.last(), Some(&"FINISHED_REPETITION"), "{statuses:?}");
    let stats = scheduler.handle().stats();
    assert_eq!((stats.num_finished, stats.num_finished_repetition), (1, 1));
    assert_eq!((stats.num_finished_stop, stats.num_finished_length), (0, 0));
}

/// With stop strings, only the front end knows whether the last text holds one.
#[test]
fn with_stop_strings_the_front_end_says_why_it_ended() {
    let (mut scheduler, mut consumer) = begin(0);
    let handle = scheduler.handle();
    for reason in [FinishReason::Stop, FinishReason::Repetition] {
        let new = NewRequest { params: detecting(1, 1, 3), ..request(&scheduler, "a", vec![7; 20], 1) };
        handle.add_request(NewRequest { has_stop_strings: true, ..new }).expect("a request that fits");
        let records = run(&mut scheduler, &mut consumer, &[7; 3]);
        assert_eq!(records[2].finish_reason, REPETITION);
        assert_eq!(records[2].unsettled_reason(), REPETITION);
        assert_eq!(records[1].unsettled_reason(), None);
        handle.settle_end(reason);
    }
    let stats = handle.stats();
    assert_eq!((stats.num_finished_stop, stats.num_finished_repetition), (1, 1));
    assert_eq!((stats.num_finished, stats.num_finished_length), (2, 0));
}
