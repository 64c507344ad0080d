//! Runs steps of the control plane and nothing else: what `benches/python/step_instructions.py` counts the instructions of.
//!
//!     step_loop NUM_RUNNING PREFILL_TOKENS STEPS [NUM_DRAFTS REPEATS]
//!
//! With drafts each decode looks for so many among its own tokens, which repeat themselves where REPEATS is not 0.

use std::env;

use loadgen::{Decoding, DecodingOptions};

fn main() {
    let numbers: Vec<u32> = env::args().skip(1).map(|text| text.parse().expect("whole numbers")).collect();
    let (num_running, prefill_tokens, steps, num_drafts, repeats) = match numbers[..] {
        [num_running, prefill_tokens, steps] => (num_running, prefill_tokens, steps, 0, 0),
        [num_running, prefill_tokens, steps, num_drafts, repeats] => {
            (num_running, prefill_tokens, steps, num_drafts, repeats)
        }
        _ => panic!("usage: step_loop NUM_RUNNING PREFILL_TOKENS STEPS [NUM_DRAFTS REPEATS]"),
    };
    let options = DecodingOptions {
        prefill_tokens,
        num_drafts,
        repeats: repeats != 0,
        ..DecodingOptions::new(num_running)
    };
    let mut decoding = Decoding::new(options).expect("a valid configuration");
    for _ in 0..steps {
        decoding.step();
    }
}
