//! Rows without a token: each ends its own request, with the error that the row's number stands for.

mod common;

use std::sync::Arc;

use common::{request, scheduler};
use scheduler::{
    FinishReason, NOTHING_LEFT, REFUSED_BY_PROCESSOR, REJECTED_BY_GRAMMAR, RequestError, SamplingExtras,
    SamplingParams, SchedulerConfig, TokenList, TokenRows,
};

const NO_TOKEN: i32 = -1;

fn allowed(ids: Vec<i32>) -> SamplingParams {
    let extras =
        SamplingExtras::new([("allowed_token_ids", TokenList::Ids(ids))], None).expect("legal lists");
    SamplingParams { extras: Some(Arc::new(extras)), ..SamplingParams::default() }
}

#[test]
fn only_a_request_that_asked_for_less_is_told_that_it_left_nothing() {
    let at_least = SamplingParams { min_tokens: 2, ..SamplingParams::default() };
    let cases = [
        (SamplingParams::default(), NOTHING_LEFT, RequestError::NoToken),
        (allowed(vec![3]), NOTHING_LEFT, RequestError::NothingAllowed),
        (at_least, NOTHING_LEFT, RequestError::NothingAllowed),
        (allowed(vec![3]), NO_TOKEN, RequestError::NoToken),
        (allowed(vec![3]), REFUSED_BY_PROCESSOR, RequestError::ProcessorRefused),
        (allowed(vec![3]), REJECTED_BY_GRAMMAR, RequestError::GrammarRejected),
        (allowed(vec![3]), 3, RequestError::None),
    ];
    let config = SchedulerConfig::new(64, 256);
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    let mut consumer = scheduler.take_consumer().expect("taken once");
    for (index, (params, ..)) in cases.iter().enumerate() {
        let mut new = request(&scheduler, &format!("request {index}"), vec![1; 3], 4);
        new.params = SamplingParams { max_tokens: 4, ..params.clone() };
        scheduler.handle().add_request(new).expect("a request that fits");
    }
    let output = scheduler.schedule().expect("a free set").expect("something to run");
    let sampled = cases.each_ref().map(|(_, sampled, _)| *sampled);
    scheduler.update_from_output(&output, TokenRows::column(&sampled)).expect("the step in flight");
    scheduler.check_invariants();
    let mut told = Vec::new();
    consumer.drain(|record| told.push((record.error, record.finish_reason)));
    let expected =
        cases.map(|(_, _, error)| (error, (error != RequestError::None).then_some(FinishReason::Error)));
    assert_eq!(told, expected);
}
