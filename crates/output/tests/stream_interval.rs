//! Tokens that go out so many at a time: when, and that none is lost whatever ends a request.

mod support;

use std::sync::Arc;

use output::{
    Delivery, EventTemplate, News, OutputOptions, OutputProcessor, RequestFailure, Tokenizer, TurnEvents,
    TurnReading,
};
use proptest::prelude::*;
use scheduler::{EngineCoreOutput, FinishReason, PredictedDrafts, RequestError, RequestKey};

const KEY: RequestKey = RequestKey(1);
const WAYS: [Way; 3] = [Way::Deltas, Way::Events, Way::Turn];

/// How news is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Deltas,
    Events,
    Turn,
}

fn record(new_token_id: i32, finish_reason: Option<FinishReason>) -> EngineCoreOutput {
    EngineCoreOutput {
        key: KEY,
        new_token_id,
        finish_reason,
        stop_reason: -1,
        num_cached_tokens: 0,
        first_scheduled_ns: 3,
        timestamp_ns: 7,
        error: RequestError::None,
        predicted: PredictedDrafts::NONE,
    }
}

fn options(way: Way, stream_interval: u32) -> OutputOptions {
    let delivery = match way {
        Way::Deltas => Delivery::Deltas,
        Way::Events => Delivery::Events(EventTemplate::new(&b"<"[..], &b">"[..])),
        Way::Turn => {
            let reading = Arc::new(TurnReading::new(None, None, Arc::default(), false));
            Delivery::Turn(Box::new(TurnEvents::new(reading, EventTemplate::new(&b"<"[..], &b">"[..]))))
        }
    };
    OutputOptions { delivery, stream_interval, ..OutputOptions::default() }
}

/// A processor over single characters with a request in it, and the id of `a`.
fn new(options: OutputOptions) -> (OutputProcessor, i32) {
    let tokenizer = support::fuse();
    let mut processor = OutputProcessor::new(Some(Arc::clone(&tokenizer)));
    processor.add_request(KEY, &[], options).expect("new");
    (processor, id(&tokenizer, "a"))
}

fn id(tokenizer: &Tokenizer, text: &str) -> i32 {
    tokenizer.token_to_id(text).expect("a token") as i32
}

/// The text of each event, or delta with text, in `news`.
fn texts(news: &News) -> Vec<String> {
    let mut texts = Vec::new();
    for (_, events) in news.events.iter() {
        let events = String::from_utf8(events.to_vec()).expect("UTF-8");
        for event in events.split_terminator('>') {
            // A chunk's text, or the same within `,"delta":{"content":…}`.
            let text = event.trim_start_matches('<');
            let text = text.split_once("\"content\":").map_or(text, |(_, rest)| rest.trim_end_matches('}'));
            texts.push(serde_json::from_str(text).expect("JSON"));
        }
    }
    texts.extend(news.deltas.iter().map(|delta| delta.new_text.clone()).filter(|text| !text.is_empty()));
    texts
}

#[test]
fn the_first_token_goes_out_alone_and_the_last_with_the_end() {
    for way in WAYS {
        let (mut processor, a) = new(options(way, 3));
        let mut taken = Vec::new();
        for _ in 0..9 {
            processor.process(&record(a, None));
            taken.push(texts(&processor.take()).concat().len());
        }
        assert_eq!(taken, [1, 0, 0, 3, 0, 0, 3, 0, 0], "{way:?}");
        processor.process(&record(a, Some(FinishReason::Length)));
        let news = processor.take();
        assert_eq!(texts(&news), ["aaa"], "{way:?}");
        let [end] = &news.deltas[..] else { panic!("one end") };
        assert_eq!(end.new_token_ids.len(), if way == Way::Deltas { 3 } else { 10 });
        assert!(processor.is_empty());
    }
}

#[test]
fn nothing_changes_without_an_interval() {
    for way in WAYS {
        for interval in [0, 1] {
            let (mut processor, a) = new(options(way, interval));
            for _ in 0..4 {
                processor.process(&record(a, None));
                assert_eq!(texts(&processor.take()), ["a"], "{way:?}");
            }
        }
    }
}

#[test]
fn events_are_the_same_whenever_they_are_taken() {
    for way in [Way::Events, Way::Turn] {
        let (mut processor, a) = new(options(way, 2));
        (0..6).for_each(|_| assert_eq!(processor.process(&record(a, None)), None));
        assert_eq!(texts(&processor.take()), ["a", "aa", "aa"], "the sixth waits");
        processor.process(&record(a, None));
        assert_eq!(texts(&processor.take()), ["aa"]);
    }
}

#[test]
fn a_delta_holds_all_that_has_come_and_the_count_begins_again() {
    let (mut processor, a) = new(options(Way::Deltas, 3));
    processor.process(&record(a, None));
    assert_eq!(texts(&processor.take()), ["a"]);
    (0..5).for_each(|_| assert_eq!(processor.process(&record(a, None)), None)); // drafts that were kept
    assert_eq!(texts(&processor.take()), ["aaaaa"]);
    let taken: Vec<_> = (0..3)
        .map(|_| {
            processor.process(&record(a, None));
            texts(&processor.take()).concat()
        })
        .collect();
    assert_eq!(taken, ["", "", "aaa"]);
}

#[test]
fn where_no_text_is_certain_the_next_that_is_goes_out_at_once() {
    let stop = Some(support::stop_strings(&["aaaa"]));
    let (mut processor, a) = new(OutputOptions { stop, ..options(Way::Events, 2) });
    let space = id(&support::fuse(), " ");
    for (token, expected) in
        [(space, " "), (a, ""), (a, ""), (a, ""), (space, "aaa "), (space, ""), (space, "  ")]
    {
        processor.process(&record(token, None));
        assert_eq!(texts(&processor.take()).concat(), expected);
    }
}

#[test]
fn whatever_ends_a_request_brings_the_rest() {
    for way in WAYS {
        for reason in [FinishReason::Stop, FinishReason::Length, FinishReason::Abort, FinishReason::Error] {
            let (mut processor, a) = new(options(way, 5));
            (0..4).for_each(|_| assert_eq!(processor.process(&record(a, None)), None));
            assert_eq!(texts(&processor.take()).concat().len(), if way == Way::Deltas { 4 } else { 1 });
            (0..3).for_each(|_| assert_eq!(processor.process(&record(a, None)), None));
            processor.process(&record(-1, Some(reason)));
            let news = processor.take();
            assert_eq!(
                texts(&news).concat().len(),
                if way == Way::Deltas { 3 } else { 6 },
                "{way:?} {reason:?}"
            );
            let [end] = &news.deltas[..] else { panic!("one end") };
            assert_eq!(end.finish_reason, Some(reason));
            // A stream's error follows its text: none is left for a chunk that would come behind it.
            let goes_with_the_end = way == Way::Events && reason != FinishReason::Error;
            assert_eq!(
                end.new_text.is_empty(),
                way != Way::Deltas && !goes_with_the_end,
                "{way:?} {reason:?}"
            );
        }
    }
}

#[test]
fn an_engine_that_dies_takes_no_tokens_along() {
    for way in WAYS {
        let (mut processor, a) = new(options(way, 100));
        (0..4).for_each(|_| assert_eq!(processor.process(&record(a, None)), None));
        let before = texts(&processor.take()).concat().len();
        processor.process(&record(a, None));
        assert_eq!(processor.take(), News::default());
        processor.flush();
        assert_eq!(texts(&processor.take()).concat().len(), 5 - before, "{way:?}");
        processor.flush();
        assert_eq!(processor.take(), News::default(), "{way:?}");
        processor.process(&record(a, None));
        processor.fail(KEY, RequestFailure::EngineDied("gone".into()));
        let news = processor.take();
        assert_eq!((texts(&news).concat().as_str(), news.deltas.len()), ("a", 1), "{way:?}");
        assert!(processor.is_empty());
    }
}

#[test]
fn a_request_on_hold_is_not_flushed() {
    for way in WAYS {
        let (mut processor, a) = new(options(way, 3));
        processor.process(&record(a, None));
        processor.take();
        processor.hold(KEY);
        processor.process(&record(a, None));
        assert!(!processor.release(KEY), "it waits for its interval");
        processor.hold(KEY);
        (0..2).for_each(|_| assert_eq!(processor.process(&record(a, None)), None));
        processor.flush();
        assert_eq!(processor.take(), News::default());
        assert!(processor.release(KEY));
        assert_eq!(texts(&processor.take()), ["aaa"], "{way:?}");
    }
}

proptest! {
    #![proptest_config(support::cases(500))]
    /// Text and tokens add up to those of a request without an interval, whatever it is and whenever they are taken.
    #[test]
    fn nothing_is_lost(
        tokens in prop::collection::vec(1_i32..6, 1..40),
        takes in prop::collection::vec(any::<bool>(), 40),
        interval in 1_u32..12,
        way in prop::sample::select(&WAYS[..]),
        stops: bool,
    ) {
        let stop = stops.then(|| support::stop_strings(&["éa", "aé ", "    "]));
        let run = |interval, takes: &[bool]| {
            let (mut processor, _) = new(OutputOptions { stop: stop.clone(), ..options(way, interval) });
            let (mut pieces, mut ids, mut finish_reason) = (Vec::new(), Vec::new(), None);
            for (index, &token) in tokens.iter().enumerate() {
                let is_last = index + 1 == tokens.len();
                processor.process(&record(token, is_last.then_some(FinishReason::Length)));
                if takes[index] || is_last {
                    let news = processor.take();
                    pieces.extend(texts(&news));
                    ids.extend(news.deltas.iter().flat_map(|delta| delta.new_token_ids.clone()));
                    finish_reason = news.deltas.last().map_or(finish_reason, |delta| delta.finish_reason);
                }
            }
            assert!(processor.is_empty());
            (pieces, ids, finish_reason)
        };
        let (expected, all_ids, reason) = run(1, &[true; 40]);
        let (pieces, ids, finish_reason) = run(interval, &takes);
        prop_assert_eq!(pieces.concat(), expected.concat());
        prop_assert_eq!((ids, finish_reason), (all_ids, reason));
        prop_assert!(pieces.len() <= expected.len());
        if way == Way::Events && !stops {
            prop_assert_eq!(pieces.len(), run(interval, &[true; 40]).0.len(), "taken late or at once");
        }
    }
}
