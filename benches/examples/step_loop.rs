//! Runs steps of the control plane and nothing else: what `benches/python/step_instructions.py` counts the instructions of.
//!
//!     step_loop NUM_RUNNING PREFILL_TOKENS STEPS

use std::env;

use loadgen::{Decoding, DecodingOptions};

fn main() {
    let numbers: Vec<u32> =
        env::args().skip(1).map(|text| text.parse().expect("three whole numbers")).collect();
    let [num_running, prefill_tokens, steps] = numbers[..] else {
        panic!("usage: step_loop NUM_RUNNING PREFILL_TOKENS STEPS");
    };
    let options = DecodingOptions { prefill_tokens, ..DecodingOptions::new(num_running) };
    let mut decoding = Decoding::new(options).expect("a valid configuration");
    for _ in 0..steps {
        decoding.step();
    }
}
