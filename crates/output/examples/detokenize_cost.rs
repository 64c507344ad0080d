//! Cost of detokenising one token, near token 100 and near token 100,000 of one request.
//!
//! `cargo run --release -p output --example detokenize_cost -- path/to/tokenizer.json [text file]`

use std::error::Error;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use output::{DetokenizeOptions, IncrementalDetokenizer, StopChecker, Tokenizer};

const TOKENS_PER_SAMPLE: usize = 100;
const NUM_REQUESTS: usize = 15;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: detokenize_cost TOKENIZER_JSON [TEXT]")?;
    let text = match arguments.next() {
        Some(path) => std::fs::read_to_string(path)?,
        None => "The quick brown fox — naïve, 12.5 €, 日本語 😀 — jumps over the lazy dog.\n".repeat(64),
    };
    let mut out = std::io::stdout();
    let started = Instant::now();
    let tokenizer = Arc::new(Tokenizer::from_file(path)?);
    let loaded = started.elapsed();
    let mut first = IncrementalDetokenizer::new(Arc::clone(&tokenizer), &[], DetokenizeOptions::default());
    first.finish(&mut String::new());
    writeln!(out, "load {loaded:?}, table {:?}", started.elapsed().saturating_sub(loaded))?;

    // The same tokens at every place, so that only the place differs.
    let ids = tokenizer.encode(&text, false)?;
    let sample: Vec<u32> = ids.iter().copied().cycle().take(TOKENS_PER_SAMPLE).collect();
    let stop = ["\n\nUser:".to_owned(), "<|end|>".to_owned()];
    for with_stop in [false, true] {
        let places = [100, 1_000, 10_000, 100_000];
        let mut nanoseconds = [const { Vec::new() }; 4];
        for _ in 0..NUM_REQUESTS {
            let mut detokenizer =
                IncrementalDetokenizer::new(Arc::clone(&tokenizer), &[], DetokenizeOptions::default());
            let mut checker = StopChecker::new(&stop, false)?;
            // As a front end has it: one small string per delta, taken away when it is sent.
            let (mut scratch, mut released) = (String::new(), String::new());
            let mut step = |token_id| {
                scratch.clear();
                detokenizer.push(token_id, &mut scratch);
                if with_stop {
                    released.clear();
                    std::hint::black_box(checker.push(&scratch, true, &mut released));
                }
                std::hint::black_box(&scratch);
            };
            let mut run = |token_ids: &[u32]| {
                for &token_id in token_ids {
                    step(token_id);
                }
            };
            let mut num_tokens = 0;
            for (place, samples) in places.iter().zip(&mut nanoseconds) {
                while num_tokens + TOKENS_PER_SAMPLE < *place {
                    run(&sample);
                    num_tokens += TOKENS_PER_SAMPLE;
                }
                // Once to warm the caches, so that the first place is no worse off than the others.
                run(&sample);
                let started = Instant::now();
                run(&sample);
                samples.push(started.elapsed().as_nanos() as f64 / TOKENS_PER_SAMPLE as f64);
                num_tokens += 2 * TOKENS_PER_SAMPLE;
            }
        }
        writeln!(out, "{}", if with_stop { "with two stop strings" } else { "text only" })?;
        for (place, samples) in places.iter().zip(&mut nanoseconds) {
            samples.sort_by(f64::total_cmp);
            writeln!(out, "  token {place:>7}: {:.1} ns", samples[samples.len() / 2])?;
        }
    }
    Ok(())
}
