//! Cost of detokenising one token, near token 100 and near token 100,000 of one request, as JSON.
//!
//! `cargo run --release -p output --example detokenize_cost -- path/to/tokenizer.json [text file]`

use std::error::Error;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use output::{DetokenizeOptions, IncrementalDetokenizer, StopChecker, StopStrings, Tokenizer};
use serde_json::{Map, Value, json};

const TOKENS_PER_SAMPLE: usize = 100;
const NUM_REQUESTS: usize = 101;
const PLACES: [usize; 4] = [100, 1_000, 10_000, 100_000];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: detokenize_cost TOKENIZER_JSON [TEXT]")?;
    let text = match arguments.next() {
        Some(path) => std::fs::read_to_string(path)?,
        None => "The quick brown fox — naïve, 12.5 €, 日本語 😀 — jumps over the lazy dog.\n".repeat(64),
    };
    let started = Instant::now();
    let tokenizer = Arc::new(Tokenizer::from_file(&path)?);
    let loaded = started.elapsed();
    let mut first = IncrementalDetokenizer::new(Arc::clone(&tokenizer), &[], DetokenizeOptions::default());
    first.finish(&mut String::new());
    let table = started.elapsed().saturating_sub(loaded);

    // The same tokens at every place, so that only the place differs.
    let ids = tokenizer.encode(&text, false)?;
    let sample: Vec<u32> = ids.iter().copied().cycle().take(TOKENS_PER_SAMPLE).collect();
    let report = json!({
        "tokenizer": path,
        "load_ms": loaded.as_secs_f64() * 1e3,
        "table_ms": table.as_secs_f64() * 1e3,
        "tokens_per_sample": TOKENS_PER_SAMPLE,
        "requests": NUM_REQUESTS,
        "text_only": cost(&tokenizer, &sample, &[])?,
        "two_stop_strings": cost(&tokenizer, &sample, &["\n\nUser:".to_owned(), "<|end|>".to_owned()])?,
    });
    writeln!(std::io::stdout(), "{report:#}")?;
    Ok(())
}

/// Nanoseconds per token at each place, the median and the least of the requests, and the last place's as a share of the
/// first's. On a busy machine the least is what is comparable.
fn cost(tokenizer: &Arc<Tokenizer>, sample: &[u32], stop: &[String]) -> Result<Value, Box<dyn Error>> {
    let mut nanoseconds = [const { Vec::new() }; PLACES.len()];
    for _ in 0..NUM_REQUESTS {
        let mut detokenizer =
            IncrementalDetokenizer::new(Arc::clone(tokenizer), &[], DetokenizeOptions::default());
        let mut checker = StopChecker::new(Arc::new(StopStrings::new(stop.to_vec())?), false);
        // As a front end has it: one small string per delta, taken away when it is sent.
        let (mut scratch, mut released) = (String::new(), String::new());
        let mut run = || {
            for &token_id in sample {
                scratch.clear();
                detokenizer.push(token_id, &mut scratch);
                if !stop.is_empty() {
                    released.clear();
                    std::hint::black_box(checker.push(&scratch, true, &mut released));
                }
                std::hint::black_box(&scratch);
            }
        };
        let mut num_tokens = 0;
        for (place, samples) in PLACES.iter().zip(&mut nanoseconds) {
            while num_tokens + sample.len() < *place {
                run();
                num_tokens += sample.len();
            }
            // Once to warm the caches, so that the first place is measured like the others.
            run();
            let started = Instant::now();
            run();
            samples.push(started.elapsed().as_nanos() as f64 / sample.len() as f64);
            num_tokens += 2 * sample.len();
        }
    }
    let mut report = Map::new();
    for (name, index) in [("median", NUM_REQUESTS / 2), ("least", 0)] {
        let mut of_places = Map::new();
        for (place, samples) in PLACES.iter().zip(&mut nanoseconds) {
            samples.sort_by(f64::total_cmp);
            of_places.insert(format!("token_{place}_ns"), json!(samples[index]));
        }
        let ratio = nanoseconds[PLACES.len() - 1][index] / nanoseconds[0][index];
        of_places.insert("last_to_first".to_owned(), json!(ratio));
        report.insert(name.to_owned(), Value::Object(of_places));
    }
    Ok(Value::Object(report))
}
