//! The output processor: what a front end gets for the records of many requests, merged at random.

mod support;

use std::sync::Arc;

use output::{
    Delivery, EventTemplate, News, OutputError, OutputOptions, OutputProcessor, RequestDelta, RequestFailure,
    StopReason, Tokenizer, Verdict,
};
use proptest::prelude::*;
use scheduler::{AddRequestError, EngineCoreOutput, FinishReason, PredictedDrafts, RequestError, RequestKey};

fn token(key: u64, new_token_id: u32) -> EngineCoreOutput {
    EngineCoreOutput {
        key: RequestKey(key),
        new_token_id: new_token_id as i32,
        finish_reason: None,
        stop_reason: -1,
        num_cached_tokens: 16,
        first_scheduled_ns: 5,
        timestamp_ns: 7,
        error: RequestError::None,
        predicted: PredictedDrafts::NONE,
    }
}

fn last(key: u64, new_token_id: u32, finish_reason: FinishReason) -> EngineCoreOutput {
    EngineCoreOutput { finish_reason: Some(finish_reason), ..token(key, new_token_id) }
}

fn ended(key: u64, finish_reason: FinishReason, error: RequestError) -> EngineCoreOutput {
    EngineCoreOutput { new_token_id: -1, finish_reason: Some(finish_reason), error, ..token(key, 0) }
}

fn id(tokenizer: &Tokenizer, token: &str) -> u32 {
    tokenizer.token_to_id(token).expect("a token")
}

fn stop(stop: &[&str]) -> OutputOptions {
    OutputOptions { stop: Some(support::stop_strings(stop)), ..OutputOptions::default() }
}

/// A processor over single characters with request 1 in it.
fn one_request(options: OutputOptions) -> (Arc<Tokenizer>, OutputProcessor) {
    let tokenizer = support::fuse();
    let mut processor = OutputProcessor::new(Some(Arc::clone(&tokenizer)));
    processor.add_request(RequestKey(1), &[id(&tokenizer, "a")], options).expect("new");
    (tokenizer, processor)
}

fn only(mut deltas: Vec<RequestDelta>) -> RequestDelta {
    assert_eq!(deltas.len(), 1, "{deltas:?}");
    deltas.remove(0)
}

/// The last record of a request with stop strings that has come to its length, or repeated itself.
fn unsettled(key: u64, new_token_id: u32, reason: FinishReason) -> EngineCoreOutput {
    let record = EngineCoreOutput { stop_reason: -2, ..last(key, new_token_id, reason) };
    assert_eq!(record.unsettled_reason(), Some(reason));
    record
}

#[test]
fn the_engine_is_told_why_a_request_with_stop_strings_ended_at_its_length() {
    for own in [FinishReason::Length, FinishReason::Repetition] {
        the_engine_is_told_why_it_ended(own);
    }
}

fn the_engine_is_told_why_it_ended(own: FinishReason) {
    let own_stop = (own == FinishReason::Repetition).then_some(StopReason::Repetition);
    let verdict = |found_stop| {
        let reason = if found_stop { FinishReason::Stop } else { own };
        Some(Verdict::Settle { key: RequestKey(1), reason })
    };
    let unsettled = |key, new_token_id| unsettled(key, new_token_id, own);
    let ids = |tokenizer: &Tokenizer| ["a", "é"].map(|text| id(tokenizer, text));

    let (tokenizer, mut processor) = one_request(stop(&["aé"]));
    let [a, e] = ids(&tokenizer);
    assert_eq!(processor.process(&token(1, a)), None);
    assert_eq!(processor.process(&unsettled(1, e)), verdict(true), "found in the last text");
    let delta = only(processor.take().deltas);
    let reason = (delta.finish_reason, delta.stop_reason);
    assert_eq!(reason, (Some(FinishReason::Stop), Some(StopReason::Text("aé".to_owned()))));

    let (_, mut processor) = one_request(stop(&["aé"]));
    assert_eq!(processor.process(&unsettled(1, a)), verdict(false), "not found");
    let delta = only(processor.take().deltas);
    assert_eq!((delta.finish_reason, delta.stop_reason), (Some(own), own_stop));

    let (_, mut processor) = one_request(stop(&["a"]));
    assert_eq!(processor.process(&token(1, a)), Some(Verdict::Stop(RequestKey(1))));
    assert_eq!(only(processor.take().deltas).finish_reason, Some(FinishReason::Stop));
    assert_eq!(processor.process(&token(1, a)), None, "behind the stop string");
    assert_eq!(
        processor.process(&unsettled(1, a)),
        verdict(true),
        "found before, and the engine heard it too late"
    );
    assert_eq!(processor.process(&unsettled(1, a)), verdict(false), "it remembers no longer than it must");

    let (_, mut processor) = one_request(stop(&["aé"]));
    assert!(processor.discard(RequestKey(1)));
    assert_eq!(processor.process(&unsettled(1, e)), verdict(false), "no caller has looked");
}

/// So much of the prompt is computed.
fn progress(key: u64, num_computed: i32) -> EngineCoreOutput {
    EngineCoreOutput { new_token_id: -1, stop_reason: num_computed, ..token(key, 0) }
}

#[test]
fn progress_of_the_prompt_is_news_of_its_own() {
    let (tokenizer, mut processor) = one_request(OutputOptions::default());
    let a = id(&tokenizer, "a");
    assert_eq!(processor.process(&progress(1, 8)), None);
    assert_eq!(processor.process(&progress(1, 16)), None);
    let delta = only(processor.take().deltas);
    assert_eq!((delta.num_computed_prompt_tokens, delta.last_token_ns), (16, 7));
    assert!(delta.new_token_ids.is_empty() && delta.first_token_ns == 0 && delta.stop_reason.is_none());
    processor.process(&last(1, a, FinishReason::Length));
    let delta = only(processor.take().deltas);
    assert_eq!((delta.num_computed_prompt_tokens, delta.new_text.as_str()), (0, "a"));
}

#[test]
fn tokens_become_one_delta_until_it_is_taken() {
    let (tokenizer, mut processor) = one_request(OutputOptions::default());
    let [a, space] = ["a", " "].map(|token| id(&tokenizer, token));
    assert_eq!(processor.take().deltas, []);
    assert_eq!(processor.process(&token(1, a)), None);
    assert_eq!(processor.process(&token(1, space)), None);
    let delta = only(processor.take().deltas);
    assert_eq!((delta.new_text.as_str(), &delta.new_token_ids[..]), ("a ", &[a as i32, space as i32][..]));
    assert_eq!((delta.num_cached_tokens, delta.first_scheduled_ns, delta.last_token_ns), (16, 5, 7));
    assert_eq!(delta.finish_reason, None);
    assert_eq!(processor.take().deltas, []);
    processor.process(&last(1, a, FinishReason::Length));
    assert_eq!(processor.len(), 1);
    let delta = only(processor.take().deltas);
    assert_eq!((delta.new_text.as_str(), delta.finish_reason), ("a", Some(FinishReason::Length)));
    assert!(processor.is_empty());
}

#[test]
fn the_stop_token_is_a_token_but_not_text() {
    for (include, text) in [(false, "a"), (true, "aé")] {
        let options = OutputOptions { include_stop_str_in_output: include, ..OutputOptions::default() };
        let (tokenizer, mut processor) = one_request(options);
        let [a, e] = ["a", "é"].map(|token| id(&tokenizer, token));
        processor.process(&token(1, a));
        processor.process(&EngineCoreOutput { stop_reason: e as i32, ..last(1, e, FinishReason::Stop) });
        let delta = only(processor.take().deltas);
        assert_eq!((delta.new_text.as_str(), &delta.new_token_ids[..]), (text, &[a as i32, e as i32][..]));
        assert_eq!(delta.stop_reason, Some(StopReason::Token(e as i32)));
    }
}

#[test]
fn the_token_that_completes_a_repetition_is_text() {
    let (tokenizer, mut processor) = one_request(OutputOptions::default());
    let a = id(&tokenizer, "a");
    processor.process(&token(1, a));
    assert_eq!(processor.process(&last(1, a, FinishReason::Repetition)), None);
    let delta = only(processor.take().deltas);
    assert_eq!((delta.new_text.as_str(), &delta.new_token_ids[..]), ("aa", &[a as i32; 2][..]));
    let reason = (delta.finish_reason, delta.stop_reason);
    assert_eq!(reason, (Some(FinishReason::Repetition), Some(StopReason::Repetition)));
    assert!(processor.is_empty());
}

#[test]
fn eos_has_no_stop_reason() {
    let (tokenizer, mut processor) = one_request(OutputOptions::default());
    processor.process(&last(1, id(&tokenizer, "</s>"), FinishReason::Stop));
    let delta = only(processor.take().deltas);
    assert_eq!(
        (delta.finish_reason, delta.stop_reason, delta.new_text.as_str()),
        (Some(FinishReason::Stop), None, "")
    );
    assert_eq!(delta.new_token_ids.len(), 1);
}

#[test]
fn a_stop_string_ends_the_request_and_asks_for_an_abort() {
    let (tokenizer, mut processor) = one_request(stop(&["x", "aé"]));
    let [a, e, space] = ["a", "é", " "].map(|token| id(&tokenizer, token));
    assert_eq!(processor.process(&token(1, space)), None);
    assert_eq!(processor.process(&token(1, a)), None);
    assert_eq!(only(processor.take().deltas).new_text, " ");
    assert_eq!(processor.process(&token(1, e)), Some(Verdict::Stop(RequestKey(1))));
    // The engine runs on for a token or two and then confirms the abort.
    assert_eq!(processor.process(&token(1, a)), None);
    let delta = only(processor.take().deltas);
    assert_eq!((delta.new_text.as_str(), delta.finish_reason), ("", Some(FinishReason::Stop)));
    assert_eq!(delta.stop_reason, Some(StopReason::Text("aé".to_owned())));
    assert_eq!(delta.new_token_ids, [e as i32]);
    assert_eq!(processor.process(&ended(1, FinishReason::Abort, RequestError::None)), None);
    assert_eq!((processor.take().deltas, processor.num_dropped(), processor.len()), (vec![], 2, 0));
}

#[test]
fn a_stop_string_in_the_last_text_needs_no_abort() {
    let (tokenizer, mut processor) = one_request(stop(&["é"]));
    assert_eq!(processor.process(&last(1, id(&tokenizer, "é"), FinishReason::Length)), None);
    let delta = only(processor.take().deltas);
    assert_eq!((delta.finish_reason, delta.new_text.as_str()), (Some(FinishReason::Stop), ""));
}

#[test]
fn held_back_text_is_released_at_the_end() {
    let (tokenizer, mut processor) = one_request(stop(&["aaaa"]));
    let a = id(&tokenizer, "a");
    for _ in 0..2 {
        processor.process(&token(1, a));
    }
    assert_eq!(only(processor.take().deltas).new_text, "");
    processor.process(&last(1, a, FinishReason::Length));
    assert_eq!(only(processor.take().deltas).new_text, "aaa");
}

#[test]
fn stop_strings_wait_for_min_tokens() {
    let (tokenizer, mut processor) = one_request(OutputOptions { min_tokens: 2, ..stop(&["a"]) });
    let a = id(&tokenizer, "a");
    assert_eq!(processor.process(&token(1, a)), None);
    assert_eq!(processor.process(&token(1, a)), None);
    assert_eq!(processor.process(&token(1, a)), Some(Verdict::Stop(RequestKey(1))));
    assert_eq!(only(processor.take().deltas).new_text, "aa");
}

#[test]
fn an_abort_or_an_error_without_a_token() {
    for (reason, error) in
        [(FinishReason::Abort, RequestError::None), (FinishReason::Error, RequestError::StepFailed)]
    {
        let (tokenizer, mut processor) = one_request(stop(&["aaaa"]));
        processor.process(&token(1, id(&tokenizer, "a")));
        processor.process(&ended(1, reason, error));
        let delta = only(processor.take().deltas);
        assert_eq!((delta.new_text.as_str(), delta.finish_reason, delta.error), ("a", Some(reason), error));
        assert_eq!(delta.new_token_ids.len(), 1);
    }
}

#[test]
fn discarded_and_unknown_requests_are_dropped_and_counted() {
    let (tokenizer, mut processor) = one_request(OutputOptions::default());
    let a = id(&tokenizer, "a");
    processor.process(&token(2, a));
    processor.process(&token(1, a));
    assert!(processor.discard(RequestKey(1)));
    assert!(!processor.discard(RequestKey(1)));
    processor.process(&last(1, a, FinishReason::Length));
    assert_eq!((processor.take().deltas, processor.num_dropped(), processor.len()), (vec![], 2, 0));
    // The key may be used again, and its old news is not the new request's.
    processor.process(&token(1, a));
    processor.add_request(RequestKey(1), &[], OutputOptions::default()).expect("free again");
    assert_eq!(processor.take().deltas, []);
}

#[test]
fn bad_requests_leave_nothing_behind() {
    let (_, mut processor) = one_request(OutputOptions::default());
    let mut add = |key, options| processor.add_request(RequestKey(key), &[], options);
    assert!(matches!(add(1, stop(&[])), Err(OutputError::DuplicateKey { key: 1 })));
    let no_text = OutputOptions { detokenize: None, ..stop(&["a"]) };
    assert!(matches!(add(2, no_text), Err(OutputError::StopNeedsText)));
    assert_eq!(processor.len(), 1);
}

#[test]
fn without_a_tokenizer_there_are_tokens_only() {
    let mut processor = OutputProcessor::new(None);
    processor.add_request(RequestKey(1), &[], OutputOptions::default()).expect("new");
    processor.process(&last(1, 3, FinishReason::Stop));
    let delta = only(processor.take().deltas);
    assert_eq!((delta.new_text.as_str(), &delta.new_token_ids[..]), ("", &[3][..]));
    assert!(matches!(
        processor.add_request(RequestKey(1), &[], stop(&["a"])),
        Err(OutputError::StopNeedsText)
    ));
}

proptest! {
    #![proptest_config(support::cases(3000))]
    /// However records interleave and whenever deltas are taken, a request's deltas add up to the same.
    #[test]
    fn merging_changes_nothing(
        outputs in prop::collection::vec(prop::collection::vec(1_u32..6, 1..12), 1..5),
        order in prop::collection::vec((any::<prop::sample::Index>(), prop::bool::weighted(0.3)), 64),
        include: bool,
    ) {
        let tokenizer = support::fuse();
        let options = OutputOptions { include_stop_str_in_output: include, ..stop(&["éa", "aé ", "  "]) };
        let mut processor = OutputProcessor::new(Some(Arc::clone(&tokenizer)));
        let mut merged: Vec<RequestDelta> = Vec::new();
        let mut add_up = |deltas: Vec<RequestDelta>| {
            for delta in deltas {
                match merged.iter_mut().find(|sum| sum.key == delta.key) {
                    None => merged.push(delta),
                    Some(sum) => {
                        assert_eq!(sum.finish_reason, None, "a delta after the last");
                        sum.new_text.push_str(&delta.new_text);
                        sum.new_token_ids.extend(&delta.new_token_ids);
                        (sum.finish_reason, sum.stop_reason) = (delta.finish_reason, delta.stop_reason);
                    }
                }
            }
        };
        for key in 0..outputs.len() as u64 {
            processor.add_request(RequestKey(key), &[], options.clone()).expect("new");
        }
        let mut left: Vec<(u64, std::slice::Iter<'_, u32>)> = (0..).zip(outputs.iter().map(|output| output.iter())).collect();
        for (choice, take) in order {
            if left.is_empty() {
                break;
            }
            let place = choice.index(left.len());
            let (key, tokens) = &mut left[place];
            let key = *key;
            let next = *tokens.next().expect("not empty");
            if tokens.len() == 0 {
                drop(left.remove(place));
                processor.process(&last(key, next, FinishReason::Length));
            } else {
                processor.process(&token(key, next));
            }
            if take {
                add_up(processor.take().deltas);
            }
        }
        prop_assert!(left.is_empty());
        add_up(processor.take().deltas);
        prop_assert!(processor.is_empty());

        // Alone, in one go: the whole text, searched once.
        for (key, output) in (0..).zip(&outputs) {
            let mut alone = OutputProcessor::new(Some(Arc::clone(&tokenizer)));
            alone.add_request(RequestKey(key), &[], options.clone()).expect("new");
            for (index, &new_token_id) in output.iter().enumerate() {
                let record = token(key, new_token_id);
                let finish_reason = (index + 1 == output.len()).then_some(FinishReason::Length);
                alone.process(&EngineCoreOutput { finish_reason, ..record });
            }
            let delta = only(alone.take().deltas);
            let sum = merged.iter().find(|sum| sum.key == RequestKey(key)).expect("an output");
            prop_assert_eq!(sum, &delta);
            let text = tokenizer.decode(output, true).expect("decodes");
            prop_assert!(text.starts_with(&sum.new_text));
            if sum.finish_reason == Some(FinishReason::Length) {
                prop_assert_eq!(&sum.new_text, &text);
            }
        }
    }
}

#[test]
fn a_request_that_the_engine_cannot_end_is_failed_with_its_reason() {
    let (tokenizer, mut processor) = one_request(stop(&["ab"]));
    processor.process(&token(1, id(&tokenizer, "a")));
    assert_eq!(only(processor.take().deltas).new_text, "", "held back: it may become a stop string");
    processor.fail(RequestKey(1), RequestFailure::EngineDied("the engine died".into()));
    processor.fail(RequestKey(1), RequestFailure::EngineDied("again".into()));
    processor.fail(RequestKey(2), RequestFailure::Refused(AddRequestError::EmptyPrompt));
    let delta = only(processor.take().deltas);
    assert_eq!((delta.new_text.as_str(), delta.finish_reason), ("a", Some(FinishReason::Error)));
    assert_eq!(delta.failure.map(|failure| failure.to_string()).as_deref(), Some("the engine died"));
    assert_eq!((processor.len(), processor.num_dropped()), (0, 2));
}

fn events() -> OutputOptions {
    let template = EventTemplate::new(&b"data: {\"text\":"[..], &b"}\n\n"[..]);
    OutputOptions { delivery: Delivery::Events(template), ..OutputOptions::default() }
}

/// What the template makes of a text that JSON need not escape.
fn event(text: &str) -> String {
    format!("data: {{\"text\":\"{text}\"}}\n\n")
}

fn texts(news: &News) -> Vec<(u64, String)> {
    news.events
        .iter()
        .map(|(key, event)| (key.0, String::from_utf8(event.to_vec()).expect("UTF-8")))
        .collect()
}

#[test]
fn text_becomes_events_and_all_else_comes_with_the_end() {
    let (tokenizer, mut processor) = one_request(events());
    let [a, space] = ["a", " "].map(|token| id(&tokenizer, token));
    processor.process(&token(1, a));
    processor.process(&token(1, space));
    let news = processor.take();
    assert_eq!(texts(&news), [(1, event("a") + &event(" "))]);
    assert_eq!((news.deltas, processor.take()), (vec![], News::default()));
    processor.process(&token(1, a));
    processor.process(&last(1, space, FinishReason::Length));
    let news = processor.take();
    assert_eq!(texts(&news), [(1, event("a"))], "the last text goes with the end");
    let delta = only(news.deltas);
    assert_eq!((delta.new_text.as_str(), delta.finish_reason), (" ", Some(FinishReason::Length)));
    assert_eq!(delta.new_token_ids, [a, space, a, space].map(|token| token as i32));
    assert!(processor.is_empty());
}

#[test]
fn of_a_reader_that_is_far_behind_the_last_tokens_are_joined() {
    let (tokenizer, mut processor) = one_request(events());
    let a = id(&tokenizer, "a");
    for _ in 0..40 {
        processor.process(&token(1, a));
    }
    assert_eq!(texts(&processor.take()), [(1, event("a").repeat(31) + &event("aaaaaaaaa"))]);
    processor.process(&token(1, a));
    assert_eq!(texts(&processor.take()), [(1, event("a"))]);
    assert_eq!(processor.take(), News::default());
}

#[test]
fn tokens_without_certain_text_make_no_event() {
    let (tokenizer, mut processor) =
        one_request(OutputOptions { stop: Some(support::stop_strings(&["aaa"])), ..events() });
    let [a, space] = ["a", " "].map(|token| id(&tokenizer, token));
    processor.process(&token(1, a));
    assert_eq!(processor.take(), News::default(), "it may become the stop string");
    processor.process(&token(1, space));
    assert_eq!(texts(&processor.take()), [(1, event("a "))]);
}

#[test]
fn a_request_that_is_waited_for_to_the_end_gives_one_delta() {
    let (tokenizer, mut processor) =
        one_request(OutputOptions { delivery: Delivery::AtTheEnd, ..OutputOptions::default() });
    let a = id(&tokenizer, "a");
    for _ in 0..3 {
        processor.process(&token(1, a));
        assert_eq!(processor.take(), News::default());
    }
    processor.process(&EngineCoreOutput { timestamp_ns: 9, ..last(1, a, FinishReason::Length) });
    let delta = only(processor.take().deltas);
    assert_eq!((delta.new_text.as_str(), delta.first_token_ns, delta.last_token_ns), ("aaaa", 7, 9));
}

#[test]
fn what_is_on_hold_waits_merged_and_harms_no_other_request() {
    for options in [events(), OutputOptions::default()] {
        let (tokenizer, mut processor) = one_request(options.clone());
        processor.add_request(RequestKey(2), &[0], options.clone()).expect("new");
        let a = id(&tokenizer, "a");
        processor.process(&token(1, a));
        processor.hold(RequestKey(1));
        processor.process(&token(2, a));
        let news = processor.take();
        let keys: Vec<_> = news.events.iter().map(|(key, _)| key).collect();
        assert_eq!([keys, news.deltas.iter().map(|delta| delta.key).collect()].concat(), [RequestKey(2)]);
        processor.process(&token(1, a));
        assert_eq!(processor.take(), News::default());
        assert!(processor.release(RequestKey(1)));
        assert!(processor.release(RequestKey(1)), "twice is once");
        let news = processor.take();
        assert!(news.deltas.iter().all(|delta| delta.new_text == "aa"));
        assert!(texts(&news).iter().all(|(_, events)| *events == event("a").repeat(2)));
        assert_eq!(news.deltas.len() + news.events.iter().len(), 1);
        assert!(!processor.release(RequestKey(1)), "nothing is new");
        processor.hold(RequestKey(1));
        processor.process(&last(1, a, FinishReason::Length));
        assert_eq!((processor.take(), processor.len()), (News::default(), 2));
        assert!(processor.release(RequestKey(1)));
        assert_eq!(only(processor.take().deltas).finish_reason, Some(FinishReason::Length));
        processor.hold(RequestKey(1));
        assert!(!processor.release(RequestKey(1)), "an unknown key is left alone");
    }
}

#[test]
fn the_text_of_an_event_is_a_json_string() {
    let pieces = ["\"", "\\", "\n", "\u{1}", "é", "\u{2028}", "</script>"];
    let tokenizer = support::synthetic(&pieces.map(str::to_owned), &serde_json::json!({"type": "Fuse"}));
    let mut processor = OutputProcessor::new(Some(Arc::clone(&tokenizer)));
    for (key, piece) in (1..).zip(pieces) {
        let delivery = Delivery::Events(EventTemplate::new(&b"<"[..], &b">"[..]));
        let options = OutputOptions { delivery, ..OutputOptions::default() };
        processor.add_request(RequestKey(key), &[], options).expect("new");
        processor.process(&token(key, id(&tokenizer, piece)));
        let news = processor.take();
        let (_, event) = news.events.iter().next().expect("one event");
        assert_eq!((event[0], event[event.len() - 1]), (b'<', b'>'));
        assert_eq!(serde_json::from_slice::<String>(&event[1..event.len() - 1]).expect("JSON"), piece);
    }
}
