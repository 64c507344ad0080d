//! What it takes to find drafts, as JSON: `cargo run --release -p rustvllm-benches --example drafting_cost`.
//!
//! One request at a time, with a full archive of other answers, looks for 16 drafts behind each of its tokens; times are
//! nanoseconds of one search, appending included. Texts: tokens that never repeat, a text that repeats itself, tokens of
//! which every three were there before with another one behind them, and one token over and over.

use std::{hint::black_box, time::Instant};

use drafting::{Archive, Beliefs, DrafterConfig, DraftingMethod, History, SuffixLimits};

const LIMITS: SuffixLimits = SuffixLimits { max_match: 24, max_factor: 1.0, min_share: 0.1 };
const NUM_DRAFTS: usize = 16;
const NUM_ARCHIVED: usize = 1 << 22;

/// The token at a place.
type Text = Box<dyn Fn(usize, &mut u64) -> i32>;

fn main() {
    let mut state = 1;
    let mut archive = Archive::new(NUM_ARCHIVED);
    let mut other: Vec<i32> = Vec::new();
    let began = Instant::now();
    let mut num_tokens = 0;
    while num_tokens < 2 * NUM_ARCHIVED {
        other.clear();
        other.extend((0..480).map(|_| draw(&mut state, 5000)));
        for first in (0..other.len()).step_by(48) {
            archive.add(7, &other, first);
        }
        num_tokens += other.len();
    }
    let archived_ns = began.elapsed().as_nanos() as f64 / num_tokens as f64;
    println!("{{\"archived_ns_per_token\": {archived_ns:.1},");
    let config = DrafterConfig {
        method: DraftingMethod::Suffix(LIMITS),
        caps: Vec::new(),
        num_archived_requests: 8192,
        adaptive: true,
    };
    println!(" \"append_ns_per_token\": {:.1},", append_ns(&config, &mut state));
    let piece: Vec<i32> = (0..50).map(|_| draw(&mut state, 32_000)).collect();
    let texts: [(&str, usize, Text); 5] = [
        ("random, 32,000 ids", 20_000, Box::new(|_, state| draw(state, 32_000))),
        ("random, 5,000 ids, as the archive", 20_000, Box::new(|_, state| draw(state, 5000))),
        ("repeats itself", 20_000, Box::new(move |place, _| piece[place % 50])),
        ("random, 20 ids", 20_000, Box::new(|_, state| draw(state, 20))),
        ("one token", 100_000, Box::new(|_, _| 5)),
    ];
    for (index, (name, length, next)) in texts.iter().enumerate() {
        let mut history = History::new(&config, &[], &[], *length, 7);
        let (mut tokens, mut drafts, mut times) = (Vec::new(), Vec::new(), Vec::new());
        for place in 0..*length {
            tokens.push(next(place, &mut state));
            drafts.clear();
            let began = Instant::now();
            history.propose(&tokens, NUM_DRAFTS, true, Some(&archive), &mut Beliefs::default(), &mut drafts);
            times.push(began.elapsed().as_nanos() as u64);
            black_box(&drafts);
        }
        let times = &mut times[length / 4..];
        times.sort_unstable();
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        let end = if index + 1 < texts.len() { "," } else { "}" };
        println!(" \"{name}\": {{\"p50\": {}, \"p90\": {}, \"p99\": {}}}{end}", at(0.5), at(0.9), at(0.99));
    }
}

fn append_ns(config: &DrafterConfig, state: &mut u64) -> f64 {
    let prompt: Vec<i32> = (0..100_000).map(|_| draw(state, 32_000)).collect();
    let began = Instant::now();
    black_box(History::new(config, &prompt, &[], prompt.len(), 7));
    began.elapsed().as_nanos() as f64 / prompt.len() as f64
}

fn draw(state: &mut u64, below: u64) -> i32 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((mixed ^ (mixed >> 29)) % below) as i32
}
