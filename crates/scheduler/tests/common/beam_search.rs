//! A beam search by its definition: it keeps whole sequences, and looks at every continuation of each.

use scheduler::SamplingParams;

use super::{mix, value_of};

/// Token ids.
pub const VOCABULARY: u64 = 40;

/// All tokens behind a position whose cache holds `value`, likeliest first.
pub fn candidates_of(value: u64) -> Vec<(i32, f32)> {
    let logprob = |token: u64| -((mix(value ^ mix(token + 77)) % (1 << 22)) as f32) / (1 << 20) as f32;
    let mut all: Vec<(i32, f32)> = (0..VOCABULARY).map(|token| (token as i32, logprob(token))).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all
}

fn value_behind(tokens: &[i32]) -> u64 {
    (0..).zip(tokens).fold(0, |value, (position, &token_id)| value_of(value, token_id, position))
}

/// A beam that has ended: its output and the log-probability of each token, and whether a stop id ended it.
#[derive(Clone, PartialEq, Debug)]
pub struct Found {
    pub score: f64,
    pub tokens: Vec<i32>,
    pub logprobs: Vec<f32>,
    pub is_stopped: bool,
}

/// The search by its definition: every continuation of every beam, sorted. `None` where two of those that count are equal.
pub fn naive_search(prompt: &[i32], params: &SamplingParams, max_model_len: u32) -> Option<Vec<Found>> {
    let width = params.beam_width as usize;
    let stops: Vec<i32> =
        params.eos_token_id.into_iter().chain(params.stop_token_ids.iter().copied()).collect();
    let max_tokens = params.max_tokens.min(max_model_len - prompt.len() as u32).max(1) as usize;
    let num_kept = width * (1 + stops.len()).max(2);
    let mut running = vec![Found { score: 0.0, tokens: Vec::new(), logprobs: Vec::new(), is_stopped: false }];
    let mut ended: Vec<Found> = Vec::new();
    for length in 1..=max_tokens {
        let mut all: Vec<Found> = Vec::new();
        for beam in &running {
            for (token_id, logprob) in candidates_of(value_behind(&[prompt, &beam.tokens].concat())) {
                all.push(Found {
                    score: beam.score + f64::from(logprob),
                    tokens: [&beam.tokens[..], &[token_id]].concat(),
                    logprobs: [&beam.logprobs[..], &[logprob]].concat(),
                    is_stopped: stops.contains(&token_id),
                });
            }
        }
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        if all.windows(2).take(num_kept).any(|pair| pair[0].score.total_cmp(&pair[1].score).is_eq()) {
            return None;
        }
        all.truncate(num_kept);
        let penalty = (length as f64).powf(f64::from(params.length_penalty));
        for beam in all.iter().take(width).filter(|beam| beam.is_stopped || length == max_tokens) {
            ended.push(Found { score: beam.score / penalty, ..beam.clone() });
        }
        ended.sort_by(|a, b| b.score.total_cmp(&a.score));
        if ended.windows(2).any(|pair| pair[0].score.total_cmp(&pair[1].score).is_eq()) {
            return None;
        }
        ended.truncate(width);
        running = all.into_iter().filter(|beam| !beam.is_stopped).take(width).collect();
        if ended.len() == width && running[0].score / penalty <= ended[width - 1].score {
            break;
        }
    }
    Some(ended)
}
