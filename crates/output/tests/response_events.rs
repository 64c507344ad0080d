//! Answers as the events of a response: their numbers, their bytes, and what the items add up to, however text is cut.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use output::{
    Delivery, OutputOptions, OutputProcessor, ReasoningFormat, ResponseEvents, SharedBytes, TurnFormat,
    TurnReading, custom_input,
};
use scheduler::RequestKey;
use serde_json::{Value, json};

const TEXT: &str = "<think>\nHm \"é\"\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": \
                    {\"city\": \"Paris\\n\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"patch\", \"arguments\": {\"input\": \
                    \"a 😀\"}}\n</tool_call>";

fn reading() -> TurnReading {
    let (format, thoughts) = (TurnFormat::named("hermes"), ReasoningFormat::named("qwen3"));
    TurnReading::new(format, thoughts, Arc::default(), false)
}

fn events_of(reading: TurnReading) -> ResponseEvents {
    ResponseEvents::new(Some(Arc::new(reading)), HashSet::from(["patch".to_owned()]))
}

fn bytes(of: SharedBytes) -> Vec<u8> {
    of.into_slices(7).flatten().collect()
}

/// The data of events, which are numbered from two on.
fn parsed(events: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(events).expect("UTF-8");
    let events = text.split_terminator("\n\n").enumerate().map(|(number, event)| {
        let (first, data) = event.split_once('\n').expect("two lines");
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(first.strip_prefix("event: "), event["type"].as_str());
        assert_eq!(event["sequence_number"], json!(number + 2));
        event
    });
    events.collect()
}

fn read<'a>(mut response: ResponseEvents, pieces: impl IntoIterator<Item = &'a str>) -> (Vec<Value>, Value) {
    let mut into = Vec::new();
    for piece in pieces {
        response.read(piece, &[], &mut into);
    }
    into.extend(bytes(response.finish(true)));
    (parsed(&into), serde_json::from_slice(&bytes(response.output())).expect("JSON"))
}

/// A value, with its ids left out.
fn without_ids(mut value: Value) -> Value {
    match &mut value {
        Value::Object(members) => {
            for name in ["id", "item_id", "call_id"] {
                members.remove(name);
            }
            for member in members.values_mut() {
                *member = without_ids(member.take());
            }
        }
        Value::Array(elements) => {
            for element in elements {
                *element = without_ids(element.take());
            }
        }
        _ => {}
    }
    value
}

#[test]
fn a_text_is_the_events_of_one_message() {
    let mut response = ResponseEvents::new(None, HashSet::new());
    let mut into = Vec::new();
    response.read("", &[], &mut into);
    assert!(into.is_empty(), "nothing has begun");
    response.read("a\"", &[], &mut into);
    let text = String::from_utf8(into.clone()).expect("UTF-8");
    let id = parsed(&into)[0]["item"]["id"].as_str().expect("an id").to_owned();
    assert!(id.len() == 36 && id.starts_with("msg_"), "{id}");
    let place = format!(r#""item_id":"{id}","output_index":0,"content_index":0"#);
    let expected = format!(
        "event: response.output_item.added\ndata: {{\"type\":\"response.output_item.added\",\"sequence_number\":2,\
         \"output_index\":0,\"item\":{{\"id\":\"{id}\",\"type\":\"message\",\"status\":\"in_progress\",\"role\":\"assistant\",\
         \"content\":[]}}}}\n\nevent: response.content_part.added\ndata: {{\"type\":\"response.content_part.added\",\
         \"sequence_number\":3,{place},\"part\":{{\"type\":\"output_text\",\"text\":\"\",\"annotations\":[],\"logprobs\":[]}}}}\
         \n\nevent: response.output_text.delta\ndata: {{\"type\":\"response.output_text.delta\",\"sequence_number\":4,{place},\
         \"delta\":\"a\\\"\",\"logprobs\":[]}}\n\n"
    );
    assert_eq!(text, expected);
    assert_eq!(response.take_number(), 5);
    let text = String::from_utf8(bytes(response.break_off())).expect("UTF-8");
    assert_eq!(text.matches("\"status\":\"incomplete\"").count(), 1, "{text}");
    assert_eq!(response.take_number(), 9);
    assert!(bytes(response.break_off()).is_empty(), "it is closed");
}

#[test]
fn any_cuts_of_a_text_give_the_same_items() {
    let (events, output) = read(events_of(reading()), [TEXT]);
    let expected = json!([
        {"type": "reasoning", "status": "completed", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm \"é\""}], "encrypted_content": null},
        {"type": "message", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "status": "completed", "name": "weather", "arguments": "{\"city\": \"Paris\\n\"}"},
        {"type": "custom_tool_call", "status": "completed", "name": "patch", "input": "a 😀"},
    ]);
    assert_eq!(without_ids(output), expected);
    let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
    assert_eq!(without_ids(Value::Array(done.map(|event| event["item"].clone()).collect())), expected);
    let delta_of = |event: &&Value| event["type"] == "response.custom_tool_call_input.delta";
    assert_eq!(events.iter().filter(delta_of).count(), 1, "its input comes as a whole");
    for at in (0..=TEXT.len()).filter(|&at| TEXT.is_char_boundary(at)) {
        let (_, cut) = read(events_of(reading()), [&TEXT[..at], &TEXT[at..]]);
        assert_eq!(without_ids(cut), expected, "at {at}");
    }
    let chars: Vec<String> = TEXT.chars().map(String::from).collect();
    let (_, single) = read(events_of(reading()), chars.iter().map(String::as_str));
    assert_eq!(without_ids(single), expected);
}

#[test]
fn only_what_is_wanted_is_passed_on() {
    let (_, output) = read(events_of(reading().with_one_call().with_reasoning_in(Vec::new())), [TEXT]);
    let kinds: Vec<&str> =
        output.as_array().expect("a list").iter().filter_map(|item| item["type"].as_str()).collect();
    assert_eq!(kinds, ["message", "function_call"]);
    let (events, output) = read(events_of(reading()), []);
    assert_eq!(events.len(), 5, "an answer has an item: {events:?}");
    assert_eq!(output[0]["content"][0]["text"], "");
}

#[test]
fn log_probabilities_stay_with_messages() {
    let mut response = events_of(reading());
    let mut into = Vec::new();
    for (text, logprobs) in
        [("<think>H", "1"), ("m</think>", "2"), ("a ", "3"), (" ", "4"), ("b", "5"), ("<", "6")]
    {
        response.read(text, logprobs.as_bytes(), &mut into);
    }
    into.extend(bytes(response.finish(false)));
    let events = parsed(&into);
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    let shown: Vec<Value> = deltas.map(|event| event["logprobs"].clone()).collect();
    assert_eq!(shown, [json!([3]), json!([4, 5]), json!([6])]);
    let output: Value = serde_json::from_slice(&bytes(response.output())).expect("JSON");
    assert_eq!(output[1]["content"][0]["logprobs"], json!([3, 4, 5, 6]));
    assert_eq!(output[1]["status"], "incomplete");
}

#[test]
fn a_request_without_text_gives_no_events() {
    let response = Arc::new(Mutex::new(events_of(reading())));
    let mut processor = OutputProcessor::new(None);
    let options =
        OutputOptions { delivery: Delivery::Response(Arc::clone(&response)), ..OutputOptions::default() };
    processor.add_request(RequestKey(1), &[], options).expect("a new key");
    assert!(processor.take().events.is_empty());
    assert_eq!(Arc::strong_count(&response), 2);
    processor.discard(RequestKey(1));
    assert_eq!(Arc::strong_count(&response), 1, "it is forgotten");
}

#[test]
fn the_input_of_a_custom_tool_is_read_as_far_as_it_goes() {
    for (arguments, input) in [
        (r#"{"input": "a\n\"b\""}"#, "a\n\"b\""),
        (r#" {"x": [1, {}], "input": "a"} "#, "a"),
        (r#"{"input": "cut sh"#, "cut sh"),
        (r#"{"input": "a""#, "a"),
        (r#"{"input": "\ud83d\ude00 \ud83d \ude00 \\ud83d"}"#, "😀 \u{fffd} \u{fffd} \\ud83d"),
        (r#"{"input": "\ud83d\ud83d\ude00"#, "\u{fffd}😀"),
        (r#"{"input": 1}"#, r#"{"input": 1}"#),
        (r#"{"input": "a\u00"#, r#"{"input": "a\u00"#),
        (r#"["input"]"#, r#"["input"]"#),
        ("\\ud83d", "\\ud83d"),
        ("\\", "\\"),
        ("", ""),
    ] {
        assert_eq!(custom_input(arguments), input, "{arguments}");
    }
    let deep = format!(r#"{{"input": "a", "b": {}"#, "[".repeat(100_000));
    assert_eq!(custom_input(&deep), deep);
}
