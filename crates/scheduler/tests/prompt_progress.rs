//! How far a prompt is, told to those who ask: after each piece, as of the step that computed it, and no more once
//! there is a token.

mod common;

use std::collections::VecDeque;

use common::{request, scheduler};
use scheduler::{EngineCoreOutput, NewRequest, SchedulerConfig, SchedulerOutput, TokenRows};

/// Run one request with a budget of 8 tokens a step, up to `depth` steps in flight; every record of it.
fn records(depth: u32, asks: bool, num_prompt_tokens: i32, max_tokens: u32) -> Vec<EngineCoreOutput> {
    let mut config = SchedulerConfig::new(64, 256);
    config.max_num_batched_tokens = 8;
    config.max_steps_in_flight = depth;
    let mut scheduler = scheduler(&config, depth as usize + 1);
    let mut consumer = scheduler.take_consumer().expect("it was not taken yet");
    let new = NewRequest {
        reports_prompt_progress: asks,
        ..request(&scheduler, "a", (0..num_prompt_tokens).collect(), max_tokens)
    };
    scheduler.handle().add_request(new).expect("it fits");
    let mut in_flight: VecDeque<SchedulerOutput> = VecDeque::new();
    let mut records = Vec::new();
    loop {
        if in_flight.len() < depth as usize
            && let Some(output) = scheduler.schedule().expect("a free set")
        {
            in_flight.push_back(output);
            continue;
        }
        let Some(output) = in_flight.pop_front() else { break };
        let tokens = vec![7; output.num_sampled as usize];
        scheduler.update_from_output(&output, TokenRows::column(&tokens)).expect("the oldest");
        consumer.drain(|record| records.push(record));
    }
    records
}

#[test]
fn each_piece_is_told_as_of_its_own_step() {
    for depth in [1, 2, 3] {
        let records = records(depth, true, 21, 3);
        let told: Vec<_> = records.iter().filter_map(EngineCoreOutput::prompt_progress).collect();
        assert_eq!(told, [8, 16], "{depth} in flight");
        assert!(records[..2].iter().all(|record| record.first_scheduled_ns > 0 && record.new_token_id < 0));
        assert!(records[2].first_scheduled_ns > 0, "the first token's record is as ever");
        assert_eq!(records.iter().filter(|record| record.new_token_id == 7).count(), 3);
    }
}

#[test]
fn a_prompt_that_only_is_computed_tells_its_end_too() {
    let records = records(1, true, 21, 0);
    let told: Vec<_> = records.iter().map(EngineCoreOutput::prompt_progress).collect();
    assert_eq!(told, [Some(8), Some(16), Some(21), None]);
    assert!(records[3].finish_reason.is_some());
}

#[test]
fn a_request_that_does_not_ask_gets_no_progress() {
    let records = records(1, false, 21, 3);
    assert_eq!(records.len(), 3);
    assert!(records.iter().all(|record| record.prompt_progress().is_none()));
}
