//! Answers that are read on their way into a stream: what the events of any cuts of a text say together, and what comes
//! with the end.

mod support;

use std::sync::Arc;

use output::{
    Delivery, EventTemplate, News, OutputOptions, OutputProcessor, ReasoningFormat, StopReason, StopStrings,
    TurnEvents, TurnFormat, TurnReading, Verdict,
};
use scheduler::{EngineCoreOutput, FinishReason, PredictedDrafts, RequestError, RequestKey};
use serde_json::{Value, json};

const TEXT: &str = "<think>\nHm \"é\"\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": \
                    {\"city\": \"Paris\\n\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";

fn reading() -> TurnReading {
    let (format, thoughts) = (TurnFormat::named("hermes"), ReasoningFormat::named("qwen3"));
    TurnReading::new(format, thoughts, Arc::default(), false)
}

fn events_of(reading: TurnReading) -> TurnEvents {
    TurnEvents::new(
        Arc::new(reading),
        EventTemplate::new(&b"data: {\"index\":3"[..], &b",\"end\":null}\n\n"[..]),
    )
}

/// The deltas of events.
fn deltas(events: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(events).expect("UTF-8");
    let events = text.split_terminator("\n\n").map(|event| {
        let event = event.strip_prefix("data: ").expect("an event");
        let mut event: Value = serde_json::from_str(event).expect("JSON");
        assert_eq!((&event["index"], &event["end"]), (&json!(3), &Value::Null));
        event["delta"].take()
    });
    events.collect()
}

/// What a client makes of deltas: content, both fields of thoughts, and of each call its name and arguments.
#[derive(Debug, Default, PartialEq)]
struct Message {
    content: String,
    thoughts: [String; 2],
    calls: Vec<[String; 2]>,
    ids: Vec<String>,
}

fn joined(deltas: &[Value]) -> Message {
    let mut message = Message::default();
    for delta in deltas {
        let of = |name: &str| delta.get(name).and_then(Value::as_str).unwrap_or_default();
        message.content += of("content");
        message.thoughts[0] += of("reasoning");
        message.thoughts[1] += of("reasoning_content");
        for call in delta.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            let function = &call["function"];
            if let Some(id) = call.get("id") {
                assert_eq!(
                    (&call["index"], &call["type"]),
                    (&json!(message.calls.len()), &json!("function"))
                );
                message.ids.push(id.as_str().expect("a text").to_owned());
                message.calls.push([function["name"].as_str().expect("a text").to_owned(), String::new()]);
            }
            assert_eq!(call["index"], json!(message.calls.len() - 1));
            let last = message.calls.last_mut().expect("a call has begun");
            last[1] += function["arguments"].as_str().expect("a text");
        }
    }
    message
}

fn read<'a>(reading: TurnReading, pieces: impl IntoIterator<Item = &'a str>) -> (Message, u32) {
    let (mut turn, mut bytes) = (events_of(reading), Vec::new());
    for piece in pieces {
        turn.read(piece, &mut bytes);
    }
    turn.finish(&mut bytes);
    (joined(&deltas(&bytes)), turn.num_calls())
}

#[test]
fn any_cuts_of_a_text_give_the_same_message() {
    let (whole, num_calls) = read(reading(), [TEXT]);
    assert_eq!(whole.content, "Let me see.");
    assert_eq!(whole.thoughts, ["Hm \"é\"", "Hm \"é\""]);
    let calls = [["weather", "{\"city\": \"Paris\\n\"}"], ["time", "{}"]];
    assert_eq!(whole.calls, calls);
    assert_eq!(num_calls, 2);
    let sum = |message: Message| Message { ids: Vec::new(), ..message };
    let whole = sum(whole);
    for at in (0..=TEXT.len()).filter(|&at| TEXT.is_char_boundary(at)) {
        let (cut, _) = read(reading(), [&TEXT[..at], &TEXT[at..]]);
        assert_eq!(sum(cut), whole, "at {at}");
    }
    let chars: Vec<String> = TEXT.chars().map(String::from).collect();
    let (single, _) = read(reading(), chars.iter().map(String::as_str));
    assert_eq!(sum(single), whole);
}

#[test]
fn ids_are_those_of_the_format_and_no_two_are_the_same() {
    let is_plain = |id: &str| id.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let mut seen = std::collections::HashSet::new();
    for _ in 0..100 {
        let (message, _) = read(reading(), [TEXT]);
        for id in message.ids {
            let rest = id.strip_prefix("call_").expect("its beginning");
            assert!(rest.len() == 24 && is_plain(rest), "{id}");
            assert!(seen.insert(id));
        }
    }
    assert_eq!(seen.len(), 200);
    let of = |format: &str, text: &str| {
        read(TurnReading::new(TurnFormat::named(format), None, Arc::default(), false), [text]).0.ids
    };
    let [id] = &of("mistral", r#"[TOOL_CALLS][{"name": "f", "arguments": {}}]"#)[..] else {
        panic!("one call")
    };
    assert!(id.len() == 9 && is_plain(id), "{id}");
    let kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}\
                <|tool_call_end|><|tool_calls_section_end|>";
    assert_eq!(of("kimi_k2", kimi), ["functions.f:0"]);
}

#[test]
fn what_is_not_wanted_is_not_passed_on() {
    let (one, num_calls) = read(reading().with_one_call(), [TEXT]);
    assert_eq!(one.calls, [["weather", "{\"city\": \"Paris\\n\"}"]]);
    assert_eq!(num_calls, 2, "they are counted all the same");
    let (silent, _) = read(reading().with_reasoning_in(Vec::new()), [TEXT]);
    assert_eq!((silent.thoughts, &*silent.content), ([String::new(), String::new()], "Let me see."));
    let (older, _) = read(reading().with_reasoning_in(vec!["reasoning_content".to_owned()]), [TEXT]);
    assert_eq!(older.thoughts, [String::new(), "Hm \"é\"".to_owned()]);
    let once = "Yes <think>no</think>";
    assert_eq!(read(reading().thinking_once(), [once]).0.content, once);
    assert_ne!(read(reading(), [once]).0.content, once);
}

fn record(token_id: i32, finish_reason: Option<FinishReason>) -> EngineCoreOutput {
    EngineCoreOutput {
        key: RequestKey(1),
        new_token_id: token_id,
        finish_reason,
        stop_reason: -1,
        num_cached_tokens: 0,
        first_scheduled_ns: 3,
        timestamp_ns: 7,
        error: RequestError::None,
        predicted: PredictedDrafts::NONE,
    }
}

fn bytes_of(news: &News) -> Vec<Vec<u8>> {
    news.events.iter().map(|(_, event)| event.to_vec()).collect()
}

#[test]
fn a_request_that_is_read_gives_events_to_its_end_and_then_its_calls() {
    let pieces = ["<tool_", "call>{\"name\": \"f\", ", "\"arguments\": {\"a\": 1", "}}</tool_call>"];
    let tokenizer = support::synthetic(&pieces.map(str::to_owned), &json!({"type": "Fuse"}));
    let ids = pieces.map(|piece| tokenizer.token_to_id(piece).expect("it is a token") as i32);
    let new = || {
        let mut processor = OutputProcessor::new(Some(Arc::clone(&tokenizer)));
        let delivery = Delivery::Turn(Box::new(events_of(reading())));
        let options = OutputOptions { delivery, ..OutputOptions::default() };
        processor.add_request(RequestKey(1), &[], options).expect("new");
        processor
    };
    let mut processor = new();
    processor.process(&record(ids[0], None));
    let news = processor.take();
    assert_eq!(
        (bytes_of(&news), news.deltas.len()),
        (vec![Vec::new()], 0),
        "it has begun, and says nothing yet"
    );
    processor.process(&record(ids[1], None));
    assert_eq!(processor.take(), News::default(), "still");
    processor.process(&record(ids[2], None));
    let first = bytes_of(&processor.take()).concat();
    processor.process(&record(ids[3], Some(FinishReason::Stop)));
    // A stop token adds no text: what came before it ends the call.
    let mut all = [first, bytes_of(&processor.take()).concat()].concat();
    assert_eq!(joined(&deltas(&all)).calls, [["f", "{\"a\": 1"]]);

    let mut processor = new();
    ids[..3].iter().for_each(|&id| {
        processor.process(&record(id, None));
    });
    processor.process(&record(ids[3], Some(FinishReason::Length)));
    let news = processor.take();
    all = bytes_of(&news).concat();
    assert_eq!(joined(&deltas(&all)).calls, [["f", "{\"a\": 1}"]], "all of the text went out as events");
    let [end] = &news.deltas[..] else { panic!("one end") };
    assert_eq!((&*end.new_text, end.num_calls, end.new_token_ids.len()), ("", 1, 4));
    assert!(processor.is_empty());

    let mut processor = new();
    processor.process(&record(-1, Some(FinishReason::Error)));
    let news = processor.take();
    assert_eq!(
        (bytes_of(&news), news.deltas.len()),
        (Vec::new(), 1),
        "an error before all else opens no stream"
    );
}

/// Text of two calls, the first of which is whole with the third token.
const TWO_CALLS: [&str; 5] = [
    "So: <tool_call>",
    "{\"name\": \"f\", \"arguments\": {\"a\": 1}",
    "}\n</tool_",
    "call>\n<tool_call>{\"name\": \"g\", ",
    "\"arguments\": {}}</tool_call> Done.",
];

fn with_one_call(options: OutputOptions) -> (OutputProcessor, [i32; 5]) {
    let tokenizer = support::synthetic(&TWO_CALLS.map(str::to_owned), &json!({"type": "Fuse"}));
    let ids = TWO_CALLS.map(|piece| tokenizer.token_to_id(piece).expect("it is a token") as i32);
    let mut processor = OutputProcessor::new(Some(tokenizer));
    let options = OutputOptions { ends_after_call: Some(Arc::new(reading().with_one_call())), ..options };
    processor.add_request(RequestKey(1), &[], options).expect("new");
    (processor, ids)
}

/// How many of the tokens it takes until it wants the request to be stopped.
fn num_until_stop(processor: &mut OutputProcessor, ids: &[i32]) -> Option<usize> {
    let stops = |id: &i32| processor.process(&record(*id, None)) == Some(Verdict::Stop(RequestKey(1)));
    ids.iter().position(stops).map(|place| place + 1)
}

#[test]
fn a_request_that_may_have_one_call_is_stopped_behind_it() {
    let (mut whole, ids) = with_one_call(OutputOptions::default());
    assert_eq!(num_until_stop(&mut whole, &ids), Some(3));
    let [end] = &whole.take().deltas[..] else { panic!("one delta") };
    assert_eq!((end.finish_reason, &end.stop_reason), (Some(FinishReason::Stop), &None));
    assert_eq!((end.new_token_ids.len(), &*end.new_text), (3, &*TWO_CALLS[..3].concat()));
    assert_eq!(whole.process(&record(ids[3], None)), None, "what comes after it is dropped");

    let delivery = Delivery::Turn(Box::new(events_of(reading().with_one_call())));
    let (mut streamed, ids) = with_one_call(OutputOptions { delivery, ..OutputOptions::default() });
    assert_eq!(num_until_stop(&mut streamed, &ids), Some(3));
    let news = streamed.take();
    let message = joined(&deltas(&bytes_of(&news).concat()));
    assert_eq!(
        (&*message.content, &message.calls[..]),
        ("So:", &[["f", "{\"a\": 1}"].map(str::to_owned)][..])
    );
    let [end] = &news.deltas[..] else { panic!("one end") };
    assert_eq!((end.finish_reason, end.num_calls), (Some(FinishReason::Stop), 1));
}

#[test]
fn one_call_ends_no_request_before_its_least_tokens_nor_in_place_of_another_end() {
    let (mut processor, ids) = with_one_call(OutputOptions { min_tokens: 3, ..OutputOptions::default() });
    assert_eq!(num_until_stop(&mut processor, &ids), Some(4));

    let (mut processor, ids) = with_one_call(OutputOptions::default());
    assert_eq!(num_until_stop(&mut processor, &ids[..2]), None);
    processor.process(&record(ids[2], Some(FinishReason::Length)));
    let [end] = &processor.take().deltas[..] else { panic!("one delta") };
    assert_eq!(end.finish_reason, Some(FinishReason::Stop), "as a stop string in the last token would");

    let (mut processor, ids) = with_one_call(OutputOptions::default());
    assert_eq!(num_until_stop(&mut processor, &ids[..2]), None);
    processor.process(&record(ids[2], Some(FinishReason::Repetition)));
    let [end] = &processor.take().deltas[..] else { panic!("one delta") };
    assert_eq!((end.finish_reason, &end.stop_reason), (Some(FinishReason::Stop), &None));

    let (mut processor, ids) = with_one_call(OutputOptions::default());
    assert_eq!(num_until_stop(&mut processor, &ids[..2]), None);
    processor.process(&record(-1, Some(FinishReason::Error)));
    let [end] = &processor.take().deltas[..] else { panic!("one delta") };
    assert_eq!(end.finish_reason, Some(FinishReason::Error));

    let (mut stops, ids) = with_one_call(OutputOptions {
        stop: Some(Arc::new(StopStrings::new(vec!["}}".to_owned()]).expect("texts"))),
        ..OutputOptions::default()
    });
    assert_eq!(num_until_stop(&mut stops, &ids), Some(3));
    let [end] = &stops.take().deltas[..] else { panic!("one delta") };
    assert_eq!(
        end.stop_reason,
        Some(StopReason::Text("}}".to_owned())),
        "a stop string that comes sooner is the end"
    );

    let mut processor = OutputProcessor::new(None);
    let options = OutputOptions { ends_after_call: Some(Arc::new(reading())), ..OutputOptions::default() };
    assert!(processor.add_request(RequestKey(1), &[], options).is_err(), "there is no text to be read");
}

#[test]
fn where_one_call_is_passed_on_nothing_behind_it_is() {
    let text = TWO_CALLS.concat();
    let (all, num_calls) = read(reading(), [&*text]);
    assert_eq!((&*all.content, all.calls.len(), num_calls), ("So:Done.", 2, 2));
    let (one, num_calls) = read(reading().with_one_call(), text.split_inclusive(' '));
    assert_eq!((&*one.content, &one.calls[..], num_calls), ("So:", &all.calls[..1], 2), "both have begun");
}
