//! Log-probabilities on their way to their tokens: none is lost, none meets another's token, and the bytes are the text's.

mod support;

use output::{OutputOptions, OutputProcessor, RequestDelta, Verdict};
use scheduler::{EngineCoreOutput, FinishReason, PredictedDrafts, RequestError, RequestKey, TokenLogprobs};

const KEY: RequestKey = RequestKey(7);

fn token(key: RequestKey, token_id: i32, finish_reason: Option<FinishReason>) -> EngineCoreOutput {
    EngineCoreOutput {
        key,
        new_token_id: token_id,
        finish_reason,
        stop_reason: -1,
        num_cached_tokens: 0,
        first_scheduled_ns: 0,
        timestamp_ns: 1,
        error: RequestError::None,
        predicted: PredictedDrafts::NONE,
    }
}

fn logprobs_of(key: RequestKey, token_id: u32, logprob: f32) -> TokenLogprobs {
    let entries = [(token_id as i32, logprob), (0, -0.5), (token_id as i32, logprob)];
    TokenLogprobs { key, rank: 2, entries: entries.into() }
}

fn wanting(stop: &[&str]) -> OutputOptions {
    OutputOptions {
        logprobs: true,
        stop: (!stop.is_empty()).then(|| support::stop_strings(stop)),
        ..Default::default()
    }
}

fn one(processor: &mut OutputProcessor) -> RequestDelta {
    let mut deltas = processor.take().deltas;
    assert_eq!(deltas.len(), 1);
    deltas.remove(0)
}

#[test]
fn bytes_of_the_tokens_are_the_text_and_offsets_are_places_in_it() {
    for tokenizer in [support::byte_level(), support::byte_fallback(), support::words()] {
        let mut processor = OutputProcessor::new(Some(tokenizer.clone()));
        processor.add_request(KEY, &[1], wanting(&[])).expect("a new key");
        // A run of byte tokens is whole characters or none, so something else comes between any two.
        let ids: Vec<u32> = (0..tokenizer.vocab_size() as u32)
            .filter(|id| !tokenizer.special_token_ids().contains(id))
            .flat_map(|id| [id, 0])
            .collect();
        let mut text = String::new();
        let mut bytes = Vec::new();
        for (index, &id) in ids.iter().enumerate() {
            processor.add_logprobs(logprobs_of(KEY, id, -(index as f32)));
            assert_eq!(processor.process(&token(KEY, id as i32, None)), None);
            let delta = one(&mut processor);
            let [position] = &delta.new_logprobs[..] else { panic!("one position for one token") };
            let sampled = &position.candidates[0];
            assert_eq!((sampled.token_id, sampled.logprob, sampled.rank), (id as i32, -(index as f32), 2));
            let ranks: Vec<u32> = position.candidates.iter().map(|of| of.rank).collect();
            assert_eq!(ranks, [2, 1, 2]);
            assert_eq!(position.text_offset as usize, text.chars().count());
            assert_eq!(sampled.bytes.as_deref(), Some(&tokenizer.token_bytes(id)[..]));
            bytes.extend_from_slice(sampled.bytes.as_deref().expect("text is wanted"));
            text.push_str(&delta.new_text);
        }
        processor.process(&token(KEY, -1, Some(FinishReason::Abort)));
        text.push_str(&one(&mut processor).new_text);
        // Invalid bytes are U+FFFD in the text, how many depends on the decoder.
        let squeeze = |text: &str| text.replace('\u{FFFD}', "");
        assert_eq!(squeeze(&String::from_utf8_lossy(&bytes)).trim_start(), squeeze(&text).trim_start());
    }
}

#[test]
fn they_may_come_long_before_their_tokens() {
    let mut processor = OutputProcessor::new(Some(support::byte_level()));
    let other = RequestKey(8);
    processor.add_request(KEY, &[1], wanting(&[])).expect("a new key");
    processor.add_request(other, &[1], OutputOptions::default()).expect("a new key");
    for id in 1..=3 {
        processor.add_logprobs(logprobs_of(KEY, id, id as f32));
        processor.add_logprobs(logprobs_of(other, id, 0.0)); // did not ask
        processor.add_logprobs(logprobs_of(RequestKey(9), id, 0.0)); // has gone
    }
    for id in 1..=3 {
        processor.process(&token(KEY, id, None));
        processor.process(&token(other, id, None));
    }
    let deltas = processor.take().deltas;
    let values: Vec<f32> = deltas[0].new_logprobs.iter().map(|of| of.candidates[0].logprob).collect();
    assert_eq!(values, [1.0, 2.0, 3.0]);
    assert!(deltas[1].new_logprobs.is_empty());
}

#[test]
fn a_token_of_which_nothing_is_known_has_an_empty_position() {
    let mut processor = OutputProcessor::new(None);
    processor.add_request(KEY, &[1], OutputOptions { detokenize: None, ..wanting(&[]) }).expect("a new key");
    processor.add_logprobs(logprobs_of(KEY, 5, -1.0));
    processor.process(&token(KEY, 4, None));
    processor.process(&token(KEY, 5, None));
    let delta = one(&mut processor);
    assert_eq!(delta.new_token_ids, [4, 5]);
    assert!(delta.new_logprobs[0].candidates.is_empty());
    let of_five = &delta.new_logprobs[1].candidates[0];
    assert_eq!((of_five.token_id, of_five.logprob), (5, -1.0));
    assert_eq!(of_five.bytes, None, "there is no tokenizer");
}

#[test]
fn what_follows_a_stop_string_is_dropped_with_its_token() {
    let tokenizer = support::byte_level();
    let id_of = |text: &str| tokenizer.token_to_id(text).expect("in the vocabulary");
    let mut processor = OutputProcessor::new(Some(tokenizer.clone()));
    processor.add_request(KEY, &[1], wanting(&["b"])).expect("a new key");
    let mut stopped = None;
    for text in ["a", "b", "c"] {
        let id = id_of(text);
        processor.add_logprobs(logprobs_of(KEY, id, -1.0));
        stopped = stopped.or(processor.process(&token(KEY, id as i32, None)));
    }
    assert_eq!(stopped, Some(Verdict::Stop(KEY)));
    let delta = one(&mut processor);
    assert_eq!((delta.new_text.as_str(), delta.new_token_ids.len(), delta.new_logprobs.len()), ("a", 2, 2));
}
