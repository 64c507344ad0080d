//! Runs steps of the control plane and nothing else: what `benches/python/step_instructions.py` counts the instructions
//! of. Prints the median times of planning a step and of taking in its tokens.
//!
//!     step_loop NUM_RUNNING PREFILL_TOKENS STEPS [NUM_DRAFTS REPEATS [MODEL_US]]
//!
//! With drafts each decode looks for so many among its own tokens, which repeat themselves where REPEATS is not 0,
//! and runs all that it finds. If `MODEL_US` is not 0, the controller chooses among them, as if a model took so many
//! microseconds for each step, and a thousandth of that more for each token.

use std::{env, time::Duration};

use loadgen::{Decoding, DecodingOptions, decoding::StepTimes};

fn main() {
    let numbers: Vec<u32> = env::args().skip(1).map(|text| text.parse().expect("whole numbers")).collect();
    let (num_running, prefill_tokens, steps, of_drafts) = match &numbers[..] {
        [num_running, prefill_tokens, steps, of_drafts @ ..] if matches!(of_drafts.len(), 0 | 2 | 3) => {
            (*num_running, *prefill_tokens, *steps, of_drafts)
        }
        _ => panic!("usage: step_loop NUM_RUNNING PREFILL_TOKENS STEPS [NUM_DRAFTS REPEATS [MODEL_US]]"),
    };
    let of_drafts = |index: usize| of_drafts.get(index).copied().unwrap_or(0);
    let options = DecodingOptions {
        prefill_tokens,
        num_drafts: of_drafts(0),
        repeats: of_drafts(1) != 0,
        adaptive: of_drafts(2) != 0,
        model_time: Duration::from_micros(u64::from(of_drafts(2))),
        ..DecodingOptions::new(num_running)
    };
    let mut decoding = Decoding::new(options).expect("a valid configuration");
    let times: Vec<StepTimes> = (0..steps).map(|_| decoding.step().1).collect();
    let median = |part: fn(&StepTimes) -> Duration| {
        let mut of_part: Vec<Duration> = times.iter().map(part).collect();
        of_part.sort_unstable();
        of_part.get(of_part.len() / 2).copied().unwrap_or_default()
    };
    let [schedule, update] = [median(|times| times.schedule), median(|times| times.update)];
    println!("{{\"schedule_us\": {:.1}, \"update_us\": {:.1}}}", us(schedule), us(update));
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
