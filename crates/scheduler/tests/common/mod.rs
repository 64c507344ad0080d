//! What the tests of the scheduler share: random numbers, a reference that is nothing but its definition, and ways to
//! make schedulers and requests. The model with a real cache is in `model.rs`, a run that is hard on
//! prompts in `hard_run.rs`.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

pub mod beam_search;
pub mod hard_run;
pub mod model;

use std::collections::BTreeMap;

use scheduler::{
    FinishReason, NewRequest, RepetitionDetection, SamplingParams, Scheduler, SchedulerConfig, StepBuffers,
    TokenRows,
};

/// A small, fast, good enough generator (splitmix64), so that a seed names a run for ever.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        low + (self.next() % u64::from(high - low + 1)) as u32
    }

    pub fn chance(&mut self, percent: u32) -> bool {
        self.between(1, 100) <= percent
    }
}

/// What the runs of a comparison met: one that never saw a case says nothing about it.
#[derive(Default)]
pub struct Coverage(pub BTreeMap<&'static str, u64>);

impl Coverage {
    pub fn count(&mut self, what: &'static str, number: usize) {
        *self.0.entry(what).or_default() += number as u64;
    }
}

/// A number from the environment: what makes a run longer, or repeats a part of it.
pub fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// What a token at a position leaves in the cache, given what the position before it has left.
pub fn value_of(previous: u64, token_id: i32, position: i32) -> u64 {
    mix(previous ^ mix((token_id as u64) << 32 | position as u64))
}

/// The token that follows a position whose cache holds `value`.
pub fn token_of(value: u64, seed: i64, vocabulary: u64) -> i32 {
    (mix(value ^ mix(seed as u64 ^ 0x5EED)) % vocabulary) as i32
}

/// Whether an output ends with a pattern that comes as often as it must.
pub fn repeats_itself(output: &[i32], wanted: RepetitionDetection) -> bool {
    let count = wanted.min_count() as usize;
    (wanted.min_pattern_size() as usize..=wanted.max_pattern_size() as usize).any(|size| {
        let Some(start) = output.len().checked_sub(size.saturating_mul(count)) else { return false };
        output[start..].chunks(size).all(|piece| piece == &output[output.len() - size..])
    })
}

/// Output of one request by the definition. `vocabulary` is the number of token ids.
pub fn reference_tokens(
    prompt: &[i32],
    params: &SamplingParams,
    max_model_len: u32,
    vocabulary: u64,
) -> Vec<i32> {
    reference_output(prompt, params, max_model_len, vocabulary).0
}

/// Output of one request by the definition, and why it ended.
pub fn reference_output(
    prompt: &[i32],
    params: &SamplingParams,
    max_model_len: u32,
    vocabulary: u64,
) -> (Vec<i32>, FinishReason) {
    let mut value = 0;
    for (position, &token_id) in prompt.iter().enumerate() {
        value = value_of(value, token_id, position as i32);
    }
    let mut output = Vec::new();
    let has_room = |output: &[i32]| {
        (output.len() as u32) < params.max_tokens && ((prompt.len() + output.len()) as u32) < max_model_len
    };
    while has_room(&output) {
        let token_id = token_of(value, params.seed, vocabulary);
        value = value_of(value, token_id, (prompt.len() + output.len()) as i32);
        output.push(token_id);
        if params.eos_token_id == Some(token_id) || params.stop_token_ids.contains(&token_id) {
            return (output, FinishReason::Stop);
        }
        let may_repeat = output.len() as u32 >= params.min_tokens && has_room(&output);
        let wanted = params.repetition_detection.filter(|_| may_repeat);
        if wanted.is_some_and(|wanted| repeats_itself(&output, wanted)) {
            return (output, FinishReason::Repetition);
        }
    }
    (output, FinishReason::Length)
}

/// A scheduler with `num_sets` buffer sets of its own memory.
pub fn scheduler(config: &SchedulerConfig, num_sets: usize) -> Scheduler {
    let buffers = (0..num_sets).map(|_| StepBuffers::owned(config)).collect();
    Scheduler::new(config.clone(), buffers).expect("a valid configuration")
}

/// A greedy request that nothing but `max_tokens` stops.
pub fn request(scheduler: &Scheduler, id: &str, prompt: Vec<i32>, max_tokens: u32) -> NewRequest {
    let params = SamplingParams { max_tokens, ..SamplingParams::default() };
    NewRequest::new(scheduler.handle().new_key(), id, prompt, params)
}

/// Who runs in the next step, which is updated with sevens; empty: nothing can run.
pub fn step(scheduler: &mut Scheduler) -> Vec<String> {
    let Some(output) = scheduler.schedule().expect("a free set") else { return Vec::new() };
    let view = scheduler.step_view(&output).expect("the step is in flight");
    let sampled = vec![7; output.num_sampled as usize];
    scheduler.update_from_output(&output, TokenRows::column(&sampled)).expect("the step in flight");
    scheduler.check_invariants();
    view.scheduled.into_iter().map(|request| request.request_id).collect()
}
