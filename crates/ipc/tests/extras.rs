//! The lists of a request (`SamplingExtras`) in frames: sent once for all samples, and held to their rules on arrival.

use std::sync::Arc;

use ipc::{ClientMessage, DecodeError, HEADER_BYTES};
use scheduler::{
    NewRequest, PromptTokens, RepetitionDetection, RequestKey, SamplingExtras, SamplingParams, TokenList,
};

fn frame(message: &ClientMessage) -> Vec<u8> {
    let mut frame = Vec::new();
    message.encode(&mut frame);
    frame
}

/// The samples of a request share its extras, on both sides; another request with equal ones has its own.
#[test]
fn extras_are_sent_once_for_all_samples() {
    let allowed = ("allowed_token_ids", TokenList::Ids((0..1000).collect()));
    let extras = SamplingExtras::new([allowed], None).expect("ids");
    let params = SamplingParams { extras: Some(Arc::new(extras)), ..SamplingParams::default() };
    let request = |key| NewRequest::new(RequestKey(key), "a", vec![1], params.clone());
    let bytes = frame(&ClientMessage::AddRequests(vec![request(1)]));
    let message = ClientMessage::AddRequests((1..=100).map(request).collect());
    let all_bytes = frame(&message);
    assert!(all_bytes.len() < bytes.len() + 99 * 128, "{} bytes", all_bytes.len());
    let decoded =
        ClientMessage::decode(all_bytes[4], &all_bytes[HEADER_BYTES..], 100).expect("it was encoded");
    let ClientMessage::AddRequests(decoded) = decoded else { panic!("{decoded:?}") };
    let first = decoded[0].params.extras.as_ref().expect("extras");
    assert!(
        decoded.iter().all(|request| Arc::ptr_eq(first, request.params.extras.as_ref().expect("extras")))
    );
}

#[test]
fn repetitions_that_no_request_may_look_for_are_refused() {
    let wanted = RepetitionDetection::new(0x0304, 0x0305, 0x0506).expect("in range");
    let params = SamplingParams { repetition_detection: Some(wanted), ..SamplingParams::default() };
    let request = NewRequest::new(RequestKey(1), "a", vec![1], params);
    let good = frame(&ClientMessage::AddRequests(vec![request]));
    let start = good.windows(4).position(|window| window == 0x0304u32.to_le_bytes()).expect("the numbers");
    for (numbers, expected) in [
        ([0, 4, 2], "got min_pattern_size 0 and max_pattern_size 4"),
        ([5, 4, 2], "got min_pattern_size 5"),
        ([1, 1025, 2], "of 1 to 1024 tokens"),
        ([1, u32::MAX, u32::MAX], "max_pattern_size 4294967295"),
        ([1, 4, 1], "min_count of repetition_detection must be at least 2, got 1"),
    ] {
        let mut bad = good.clone();
        bad[start..start + 12].copy_from_slice(&numbers.map(u32::to_le_bytes).concat());
        let error = ClientMessage::decode(bad[4], &bad[HEADER_BYTES..], 1).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// What a front end cannot make, a frame can hold.
#[test]
fn wrong_extras_are_refused() {
    let lists =
        [("logit_bias", TokenList::Biases(vec![(7, 0.5)])), ("bad_words", TokenList::Words(vec![vec![3]]))];
    let extras = SamplingExtras::new(lists, None).expect("lists that may be");
    let params = SamplingParams { extras: Some(Arc::new(extras)), ..SamplingParams::default() };
    let request = NewRequest::new(RequestKey(1), "a", vec![1], params);
    let good = frame(&ClientMessage::AddRequests(vec![request.clone()]));
    let bias = good.windows(4).position(|window| window == 0.5f32.to_le_bytes()).expect("the bias");
    let mut bad = good.clone();
    bad[bias..bias + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let error = ClientMessage::decode(bad[4], &bad[HEADER_BYTES..], 1).expect_err("not finite").to_string();
    assert!(error.contains("token id 7 is NaN"), "{error}");
    let extras = SamplingExtras::default();
    let tokens = PromptTokens { start: 0x0708, is_alone: false, width: 2, ids: [5, 6].into() };
    let extras = extras.with_prompt_tokens(tokens).expect("a row");
    let params = SamplingParams { extras: Some(Arc::new(extras)), ..SamplingParams::default() };
    let rows = frame(&ClientMessage::AddRequests(vec![NewRequest::new(RequestKey(1), "a", vec![1], params)]));
    let start = rows.windows(4).position(|window| window == 0x0708u32.to_le_bytes()).expect("the start");
    let id = start + 4 + 1 + 4 + 4;
    for (place, value, expected) in
        [(start + 5, 3, "not rows of 3"), (start + 5, 0, "not rows of 0"), (id, -2, "-2")]
    {
        let mut bad = rows.clone();
        bad[place..place + 4].copy_from_slice(&i32::to_le_bytes(value));
        let error = ClientMessage::decode(bad[4], &bad[HEADER_BYTES..], 1).expect_err("no rows").to_string();
        assert!(error.contains(expected) && error.contains("prompt_logprob_token_ids"), "{error}");
    }
    // "The same extras" without any before: the flags are the byte behind the count.
    for flags in [1 << 6, (1 << 5) | (1 << 6)] {
        let mut bad = good.clone();
        bad[HEADER_BYTES + 4] = flags;
        let error = ClientMessage::decode(bad[4], &bad[HEADER_BYTES..], 1).expect_err("wrong flags");
        assert!(matches!(error, DecodeError::BadValue { what: "a set of request flags", .. }), "{error}");
    }
}
