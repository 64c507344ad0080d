//! Cost of reading the text of one token for thoughts and calls, and of rendering its events, as JSON: nanoseconds per
//! token, the median and the least of many answers.
//!
//! `cargo run --release -p output --example turn_cost`

use std::error::Error;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use output::{EventTemplate, ReasoningFormat, TurnEvents, TurnFormat, TurnReading};
use serde_json::{Value, json};

const NUM_ANSWERS: usize = 301;
const WORDS: usize = 400;

fn main() -> Result<(), Box<dyn Error>> {
    let said = vec![" another".to_owned(); WORDS];
    let around = |before: &str, behind: &str| {
        let mut pieces = vec![before.to_owned()];
        pieces.extend(said.clone());
        pieces.push(behind.to_owned());
        pieces
    };
    let report = json!({
        "tokens": WORDS,
        "answers": NUM_ANSWERS,
        "nothing is looked for": cost(None, None, &said),
        "content": cost(Some("hermes"), Some("qwen3"), &said),
        "thoughts": cost(Some("hermes"), Some("qwen3"), &around("<think>", "</think>")),
        "arguments, JSON": cost(
            Some("hermes"),
            None,
            &around("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"", "\"}}</tool_call>"),
        ),
        "arguments, elements": cost(
            Some("qwen3_coder"),
            None,
            &around("<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"),
        ),
    });
    writeln!(std::io::stdout(), "{report:#}")?;
    Ok(())
}

fn cost(format: Option<&str>, reasoning: Option<&str>, pieces: &[String]) -> Value {
    let format = format.and_then(TurnFormat::named);
    let reasoning = reasoning.and_then(ReasoningFormat::named);
    let reading = Arc::new(TurnReading::new(format, reasoning, Arc::default(), false));
    let template = EventTemplate::new(
        &b"data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0"[..],
        &b",\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null,\"token_ids\":null}]}\n\n"[..],
    );
    let mut nanoseconds = Vec::with_capacity(NUM_ANSWERS);
    let mut bytes = Vec::new();
    for _ in 0..NUM_ANSWERS {
        let mut turn = TurnEvents::new(Arc::clone(&reading), template.clone());
        let started = Instant::now();
        for piece in pieces {
            bytes.clear();
            turn.read(piece, &mut bytes);
            std::hint::black_box(&bytes);
        }
        nanoseconds.push(started.elapsed().as_nanos() as f64 / pieces.len() as f64);
    }
    nanoseconds.sort_by(f64::total_cmp);
    json!({"median_ns": nanoseconds[NUM_ANSWERS / 2].round(), "least_ns": nanoseconds[0].round()})
}
