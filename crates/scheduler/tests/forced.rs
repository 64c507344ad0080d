//! Tokens that a request gets without a step for each: they are known before a model gives them.

mod common;

use std::sync::Arc;

use common::{request, scheduler};
use scheduler::{
    FinishReason, NewRequest, RequestKey, SamplingExtras, SamplingParams, Scheduler, SchedulerConfig,
    SchedulerOutput, SchedulingPolicy, TokenList, TokenRows, egress::Consumer,
};

const MAX_TOKENS: u32 = 12;

fn begin() -> (Scheduler, Consumer) {
    let config = SchedulerConfig::new(64, 256);
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    let consumer = scheduler.take_consumer().expect("taken once");
    (scheduler, consumer)
}

fn add(scheduler: &Scheduler, id: &str, params: SamplingParams) -> RequestKey {
    let mut new = request(scheduler, id, vec![1; 3], MAX_TOKENS);
    new.params = SamplingParams { max_tokens: MAX_TOKENS, ..params };
    let key = new.key;
    scheduler.handle().add_request(new).expect("a request that fits");
    key
}

/// Plan a step; also how many tokens it runs.
fn plan(scheduler: &mut Scheduler) -> (SchedulerOutput, u32) {
    let output = scheduler.schedule().expect("a free set").expect("something to run");
    (output, output.total_num_scheduled_tokens)
}

/// The tokens that a step tells that gives sevens.
fn run(scheduler: &mut Scheduler, consumer: &mut Consumer, output: &SchedulerOutput) -> Vec<i32> {
    let sampled = vec![7; output.num_sampled as usize];
    scheduler.update_from_output(output, TokenRows::column(&sampled)).expect("the step in flight");
    scheduler.check_invariants();
    let mut told = Vec::new();
    consumer.drain(|record| told.push(record.new_token_id));
    told
}

#[test]
fn tokens_that_have_to_follow_are_computed_in_one_row() {
    let (mut scheduler, mut consumer) = begin();
    let key = add(&scheduler, "a", SamplingParams::default());
    let (output, _) = plan(&mut scheduler);
    assert_eq!(scheduler.force_tokens(Some(&output), key, &[4]), 0, "one saves no step here");
    assert_eq!(scheduler.force_tokens(Some(&output), key, &[4, 5, 6]), 3);
    assert_eq!(scheduler.force_tokens(Some(&output), key, &[4, 5]), 0, "its token was called off");
    assert_eq!(run(&mut scheduler, &mut consumer, &output), [4, 5, 6], "in the place of its own");
    let (output, num_tokens) = plan(&mut scheduler);
    assert_eq!(num_tokens, 3);
    assert_eq!(scheduler.force_tokens(None, key, &[8]), 0, "a step has it");
    assert_eq!(run(&mut scheduler, &mut consumer, &output), [7]);
    assert_eq!(scheduler.force_tokens(None, key, &[8]), 1);
    assert_eq!(scheduler.force_tokens(None, key, &[9]), 1);
    let (output, num_tokens) = plan(&mut scheduler);
    assert_eq!(num_tokens, 3, "the last one that was sampled, and both");
    assert_eq!(run(&mut scheduler, &mut consumer, &output), [8, 9, 7]);
    assert_eq!(scheduler.handle().stats().num_forced_tokens, 5);
}

#[test]
fn a_request_that_is_complete_ends_with_all_its_tokens_told() {
    let (mut scheduler, mut consumer) = begin();
    let (first, second) =
        (add(&scheduler, "a", SamplingParams::default()), add(&scheduler, "b", SamplingParams::default()));
    let mut told = |scheduler: &Scheduler| {
        scheduler.check_invariants();
        let mut told = Vec::new();
        consumer.drain(|record| told.push((record.new_token_id, record.finish_reason)));
        told
    };
    let (output, _) = plan(&mut scheduler);
    assert_eq!(scheduler.force_tokens(Some(&output), first, &[4, 5]), 2);
    scheduler.complete(first);
    let end = Some(FinishReason::Stop);
    assert_eq!(told(&scheduler), [(4, None), (5, None), (-1, end)], "while the step is in flight");
    scheduler.update_from_output(&output, TokenRows::column(&[7, 7])).expect("the step in flight");
    assert_eq!(told(&scheduler), [(7, None)], "it gives the other one its own");
    assert_eq!(scheduler.force_tokens(None, second, &[8]), 1);
    scheduler.complete(second);
    assert_eq!(told(&scheduler), [(8, None), (-1, end)], "between steps");
    scheduler.complete(second);
    assert!(!scheduler.has_unfinished_requests());
    assert_eq!(scheduler.handle().stats().num_finished_stop, 2);
}

#[test]
fn the_model_gives_the_last_token_and_one_that_ends_a_request() {
    let (mut scheduler, mut consumer) = begin();
    let ends = SamplingParams { eos_token_id: Some(2), stop_token_ids: Box::new([3]), ..Default::default() };
    let (long, short) = (add(&scheduler, "a", SamplingParams::default()), add(&scheduler, "b", ends));
    let (output, _) = plan(&mut scheduler);
    assert_eq!(run(&mut scheduler, &mut consumer, &output), [7, 7]);
    assert_eq!(scheduler.force_tokens(None, long, &[5; 40]), MAX_TOKENS as usize - 2);
    assert_eq!(scheduler.force_tokens(None, long, &[5]), 0);
    assert_eq!(scheduler.force_tokens(None, short, &[4, 2, 4]), 1, "up to EOS");
    assert_eq!(scheduler.force_tokens(None, short, &[3, 4]), 0);
    let (output, _) = plan(&mut scheduler);
    let told = run(&mut scheduler, &mut consumer, &output);
    assert_eq!(told, [vec![5; MAX_TOKENS as usize - 2], vec![7, 4, 7]].concat());
    assert_eq!(scheduler.handle().stats().num_finished_length, 1);
}

#[test]
fn where_each_token_is_looked_at_the_model_gives_it() {
    let (mut scheduler, mut consumer) = begin();
    let biased = SamplingExtras::new([("logit_bias", TokenList::Biases(vec![(4, 1.0)]))], None);
    let asked = [
        SamplingParams { num_logprobs: 0, ..Default::default() },
        SamplingParams { presence_penalty: 0.5, ..Default::default() },
        SamplingParams { frequency_penalty: -0.5, ..Default::default() },
        SamplingParams { repetition_penalty: 1.5, ..Default::default() },
        SamplingParams { extras: Some(Arc::new(biased.expect("a bias"))), ..Default::default() },
    ];
    let keys: Vec<RequestKey> =
        asked.into_iter().enumerate().map(|(id, params)| add(&scheduler, &id.to_string(), params)).collect();
    let (output, _) = plan(&mut scheduler);
    for &key in &keys {
        assert_eq!(scheduler.force_tokens(Some(&output), key, &[4, 5]), 0);
    }
    run(&mut scheduler, &mut consumer, &output);
    for key in keys {
        assert_eq!(scheduler.force_tokens(None, key, &[4, 5]), 0);
    }
}

/// It had its turn in the step being planned, and gives it back to a more important one.
#[test]
fn who_is_taken_out_of_the_step_being_planned_tells_its_tokens_later() {
    let config = SchedulerConfig {
        block_size: 4,
        scheduling_policy: SchedulingPolicy::Priority,
        ..SchedulerConfig::new(4, 12)
    };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    let mut consumer = scheduler.take_consumer().expect("taken once");
    let victim = NewRequest { priority: 5, ..request(&scheduler, "v", vec![1; 3], 6) };
    let key = victim.key;
    scheduler.handle().add_request(victim).expect("a request that fits");
    let (output, _) = plan(&mut scheduler);
    assert_eq!(run(&mut scheduler, &mut consumer, &output), [7]);
    let urgent = request(&scheduler, "w", vec![2; 4], 5);
    scheduler.handle().add_request(urgent).expect("a request that fits");
    let (output, _) = plan(&mut scheduler);
    assert_eq!(run(&mut scheduler, &mut consumer, &output), [7, 7]);
    assert_eq!(scheduler.force_tokens(None, key, &[5, 6]), 2);
    let (output, num_tokens) = plan(&mut scheduler);
    assert_eq!((num_tokens, scheduler.waiting_request_ids()), (1, vec!["v".into()]), "w took its block");
    assert_eq!(run(&mut scheduler, &mut consumer, &output), [7], "of w");
    scheduler.handle().abort_requests(["w"]);
    let (output, _) = plan(&mut scheduler);
    assert_eq!(run(&mut scheduler, &mut consumer, &output), [-1, 5, 6, 7], "the end of w, and its own");
}
