//! What decides how many drafts run: costs, estimates and the brake, with times that are given.

use drafting::{
    Belief, Brake, Candidate, Chooser, Drafter, DrafterConfig, DraftingMethod, Estimate, History, PlainStep,
    Round, StepCosts, TokenCap,
};

/// Steps that take `base` and `per_token` for each token (ns).
fn costs(base: u64, per_token: u64, sizes: &[u32]) -> StepCosts {
    let mut costs = StepCosts::default();
    for &size in sizes {
        for _ in 0..4 {
            costs.measure(size, base + per_token * u64::from(size));
        }
    }
    costs
}

fn chosen(costs: &StepCosts, num_rows: u32, found: &[(u32, f32)]) -> Vec<u32> {
    chosen_with_credit(costs, num_rows, found, 0.0)
}

fn chosen_with_credit(costs: &StepCosts, num_rows: u32, found: &[(u32, f32)], credit: f32) -> Vec<u32> {
    let mut candidates: Vec<Candidate> = found
        .iter()
        .enumerate()
        .map(|(index, &(num_drafts, acceptance))| Candidate {
            index: index as u32,
            num_drafts,
            belief: Belief::new(acceptance, 1e6),
            credit,
        })
        .collect();
    let Some(ns) = costs.expected(num_rows) else { return vec![0; found.len()] };
    let plain = PlainStep {
        num_rows,
        num_tokens: num_rows,
        ns,
        credit,
        is_patient: true,
        unnoticed_ns: f32::INFINITY,
    };
    Chooser::default().choose(costs, plain, &mut candidates);
    candidates.iter().map(|candidate| candidate.num_drafts).collect()
}

#[test]
fn drafts_that_cost_little_run_as_far_as_they_are_likely() {
    let cheap = costs(1_000_000, 30_000, &[1, 2, 4, 8, 16]);
    assert_eq!(chosen(&cheap, 1, &[(8, 0.95)]), [8]);
    let some = chosen(&cheap, 1, &[(8, 0.5)])[0];
    assert!((1..8).contains(&some), "{some}");
    assert_eq!(chosen(&cheap, 1, &[(8, 0.02)]), [0], "less likely than what they cost");
}

#[test]
fn drafts_that_cost_as_much_as_tokens_do_not_run() {
    let dear = costs(0, 1_000_000, &[1, 2, 4, 8, 16]);
    assert_eq!(chosen(&dear, 1, &[(8, 0.9)]), [0]);
}

#[test]
fn a_row_without_drafts_is_not_slowed_by_its_neighbour() {
    let sizes: Vec<u32> = (1..=16).collect();
    let cheap = costs(1_000_000, 30_000, &sizes);
    let alone = chosen(&cheap, 1, &[(8, 0.95)])[0];
    let with_others = chosen(&cheap, 4, &[(8, 0.95)])[0];
    assert_eq!(alone, 8);
    assert!((0..=1).contains(&with_others), "each draft takes 2.7 % of the step: {with_others}");
    assert_eq!(chosen(&cheap, 4, &[(3, 0.95); 4]), [3; 4], "all gain");
}

/// What seven more rows cost is seen with 32, as with one.
#[test]
fn many_rows_are_not_slowed_by_one_either() {
    let sizes: Vec<u32> = (1..=64).collect();
    let dear = costs(1_000_000, 30_000, &sizes);
    assert_eq!(chosen(&dear, 32, &[(8, 0.99)]), [1], "one of them costs 1.5 % of the step and gives 3.1 %");
    assert_eq!(chosen(&dear, 32, &[(8, 0.4)]), [0], "and 1.3 % where it is less likely");
    let cheaper = costs(1_000_000, 7_000, &sizes);
    let some = chosen(&cheaper, 32, &[(8, 0.99)])[0];
    assert!((2..=5).contains(&some), "each takes 0.6 % of the step: {some}");
}

/// A larger step that seems to have taken less was measured at a good moment.
#[test]
fn a_lucky_measurement_does_not_slow_the_neighbours() {
    let sizes: Vec<u32> = (1..=64).collect();
    let mut noisy = costs(1_000_000, 30_000, &sizes);
    for _ in 0..40 {
        noisy.measure(36, 1_900_000);
    }
    assert_eq!(chosen(&noisy, 32, &[(8, 0.99)]), [1], "36 rows seem to take less than 32");
}

#[test]
fn nothing_runs_before_a_step_was_measured() {
    assert_eq!(chosen(&StepCosts::default(), 1, &[(8, 1.0)]), [0]);
}

#[test]
fn costs_between_two_sizes_lie_between_theirs() {
    let costs = costs(1000, 100, &[2, 10]);
    assert_eq!(costs.expected(1), None);
    assert_eq!(costs.expected(2), Some(1200.0));
    assert_eq!(costs.expected(6), Some(1600.0));
    assert_eq!(costs.expected(10), Some(2000.0));
    let beyond = costs.expected(15).expect("something was measured");
    assert!(
        (beyond - 2236.2).abs() < 0.1,
        "{beyond}: for each 3 % of what a single token is believed to take"
    );
}

/// A prompt that was slow, as the first step of an engine is, does not keep drafts from being tried.
#[test]
fn a_slow_prompt_says_little_of_a_few_drafts() {
    let mut costs = costs(1_000_000, 30_000, &[1]);
    for _ in 0..2 {
        costs.measure(96, 900_000_000);
    }
    assert_ne!(chosen(&costs, 1, &[(2, 0.25)]), [0], "what was not tried is believed to cost little");
    for _ in 0..4 {
        costs.measure(2, 5_000_000);
    }
    assert_eq!(chosen(&costs, 1, &[(2, 0.25)]), [0], "and then it is known");
    assert_eq!(costs.expected(50).map(|ns| ns > 100_000_000.0), Some(true), "what is near counts");
}

#[test]
fn a_size_is_measured_again_after_a_while() {
    let mut costs = costs(1000, 100, &[1]);
    assert_eq!(costs.at_least(1), Some(1100.0));
    assert_eq!(costs.at_least(2), Some(1100.0), "no less than a smaller one");
    assert_eq!(costs.at_least(3), None, "that is too far");
    for _ in 0..128 {
        costs.measure(5, 2000);
    }
    assert_eq!(costs.at_least(1), None);
    assert_eq!(costs.at_least(4), Some(1600.0), "its part of a larger one");
}

#[test]
fn an_estimate_follows_what_was_right() {
    let mut estimate = Estimate::default();
    assert!((estimate.belief(0.25).acceptance() - 0.25).abs() < 1e-6);
    for _ in 0..20 {
        estimate.observe(4, false);
    }
    assert!(estimate.belief(0.25).acceptance() > 0.95);
    for _ in 0..100 {
        estimate.observe(0, true);
    }
    assert!(estimate.belief(0.25).acceptance() < 0.15);
    estimate.observe(0, false);
    assert!(estimate.belief(0.25).acceptance().is_finite());
}

/// 64 slow steps, then so many steps without drafts, twice as many each time, up to a limit.
#[test]
fn the_brake_holds_longer_each_time() {
    let mut brake = Brake::default();
    for pause in [256, 512, 1024, 2048, 4096, 8192, 8192] {
        assert!(!brake.is_on());
        for _ in 0..64 {
            brake.observe(1, 1100, 1, 1000.0);
        }
        for _ in 0..pause {
            assert!(brake.is_on());
            brake.pass_step();
        }
    }
    assert_eq!(brake.num_pulled(), 7);
    for _ in 0..64 {
        brake.observe(3, 1100, 1, 1000.0);
    }
    assert!(!brake.is_on(), "three tokens in hardly more time");
    for _ in 0..64 {
        brake.observe(1, 1100, 1, 1000.0);
    }
    for _ in 0..256 {
        brake.pass_step();
    }
    assert!(!brake.is_on(), "a good window makes it short again");
}

fn config(adaptive: bool, caps: Vec<TokenCap>) -> DrafterConfig {
    DrafterConfig {
        method: DraftingMethod::Ngram { min: 2, max: 2 },
        caps,
        num_archived_requests: 0,
        adaptive,
    }
}

/// Runs one request whose text repeats, whose steps take `ns(tokens)`; the drafts of each step.
fn run(config: &DrafterConfig, num_running: u32, num_steps: u64, ns: impl Fn(u32) -> u64) -> Vec<usize> {
    let mut drafter = Drafter::new(config.clone(), 4);
    let mut tokens = vec![1, 2, 3, 4, 1, 2];
    let mut history = History::new(config, &tokens, &[], 64, 9);
    let (mut now_ns, mut counts) = (0, Vec::new());
    for step in 1..=num_steps {
        drafter.begin_round(Round { step, num_running, num_rows: 1, num_tokens: 1, overlaps: false, now_ns });
        drafter.propose(0, &mut history, &tokens, 100);
        let drafts: Vec<i32> = drafter.end_round().flat_map(|(_, drafts)| drafts.to_vec()).collect();
        now_ns += ns(1 + drafts.len() as u32);
        // Every draft is right.
        for _ in 0..=drafts.len() {
            tokens.push(tokens[tokens.len() - 4]);
        }
        drafter.end_step(step, 1 + drafts.len() as u32, 1, 1 + drafts.len() as u32, now_ns);
        counts.push(drafts.len());
    }
    counts
}

#[test]
fn without_the_controller_all_that_is_found_runs() {
    assert_eq!(run(&config(false, Vec::new()), 1, 5, |_| 1000), [4; 5]);
}

#[test]
fn the_first_cap_that_holds_the_running_requests_counts() {
    let caps =
        vec![TokenCap { first: 8, last: 8, num_tokens: 3 }, TokenCap { first: 4, last: 100, num_tokens: 0 }];
    assert_eq!(run(&config(false, caps.clone()), 1, 3, |_| 1000), [4; 3]);
    assert_eq!(run(&config(false, caps.clone()), 8, 3, |_| 1000), [3; 3]);
    assert_eq!(run(&config(false, caps), 9, 3, |_| 1000), [0; 3]);
}

#[test]
fn with_it_steps_are_measured_without_drafts_first_and_now_and_then() {
    let counts = run(&config(true, Vec::new()), 1, 300, |tokens| 1000 + 20 * u64::from(tokens));
    assert_eq!(counts[..2], [0, 0]);
    assert_eq!(counts[3], 4);
    let num_plain = counts.iter().filter(|&&count| count == 0).count();
    assert!((4..=12).contains(&num_plain), "{num_plain} of 300");
}

#[test]
fn with_it_drafts_that_turn_out_dear_stop() {
    let counts = run(&config(true, Vec::new()), 1, 300, |tokens| 1_000_000 * u64::from(tokens * tokens));
    assert!(counts.iter().sum::<usize>() < 40, "{counts:?}");
}

/// What the drafter waits for when one request's answer, whose steps may overlap, repeats itself in `repeats`.
fn waits(num_steps: u64, repeats: impl Fn(u64) -> bool) -> Vec<bool> {
    let config = config(true, Vec::new());
    let mut drafter = Drafter::new(config.clone(), 4);
    let mut tokens = vec![1, 2, 3, 4, 1, 2];
    let mut history = History::new(&config, &tokens, &[], 64, 9);
    let (mut now_ns, mut fresh) = (0, 100);
    let mut waits = Vec::new();
    for step in 1..=num_steps {
        // While steps overlap, this one is planned before the token of the one before it is known.
        let overlaps = step > 1 && !drafter.needs_tokens();
        waits.push(!overlaps);
        let next = if repeats(step) { tokens[tokens.len() - 4] } else { fresh };
        fresh += 1;
        if !overlaps {
            tokens.push(next);
        }
        drafter.begin_round(Round { step, num_running: 1, num_rows: 1, num_tokens: 1, overlaps, now_ns });
        drafter.propose(0, &mut history, &tokens, 100);
        let num_drafts: usize = drafter.end_round().map(|(_, drafts)| drafts.len()).sum();
        assert!(!overlaps || num_drafts == 0, "what overlaps runs no drafts");
        if overlaps {
            tokens.push(next);
        }
        let num_right = if repeats(step) { num_drafts } else { 0 };
        for _ in 0..num_right {
            tokens.push(tokens[tokens.len() - 4]);
        }
        // Overlapping hides a fifth of a step.
        now_ns += (1000 + 20 * num_drafts as u64) * if overlaps { 4 } else { 5 };
        drafter.end_step(step, 1 + num_drafts as u32, 1, 1 + num_right as u32, now_ns);
    }
    waits
}

#[test]
fn steps_overlap_while_no_draft_would_pay_and_wait_again_when_one_would() {
    let waits = waits(300, |step| step > 150);
    let overlapping = waits[..150].iter().filter(|&&waits| !waits).count();
    assert!(overlapping > 135, "{overlapping} of 150");
    let first = waits[150..].iter().position(|&waits| waits).expect("it sees that the text repeats");
    assert!(first < 12, "{first}");
    let waiting = waits[150 + first..].iter().filter(|&&waits| waits).count();
    assert!(waiting > 120, "{waiting} of {}", 150 - first);
}

#[test]
fn steps_overlap_where_all_that_is_found_is_wrong() {
    // Every pair of tokens was there before, and another one follows each time.
    let config = config(true, Vec::new());
    let mut drafter = Drafter::new(config.clone(), 4);
    let mut history = History::new(&config, &[1, 2], &[], 64, 9);
    let (mut tokens, mut num_waits, mut now_ns) = (vec![1, 2], 0, 0);
    for step in 1..=400 {
        let overlaps = step > 1 && !drafter.needs_tokens();
        num_waits += u32::from(!overlaps);
        tokens.extend([100 + step as i32, 1, 2]);
        drafter.begin_round(Round { step, num_running: 1, num_rows: 1, num_tokens: 1, overlaps, now_ns });
        drafter.propose(0, &mut history, &tokens, 100);
        let num_drafts: usize = drafter.end_round().map(|(_, drafts)| drafts.len()).sum();
        now_ns += 1000 + 300 * num_drafts as u64;
        drafter.end_step(step, 1 + num_drafts as u32, 1, 1, now_ns);
    }
    assert!(num_waits < 60, "{num_waits} of 400");
}

#[test]
fn what_drafts_saved_a_row_its_neighbours_drafts_may_take() {
    let sizes: Vec<u32> = (1..=32).collect();
    let cheap = costs(1_000_000, 30_000, &sizes);
    let found = [(3, 0.95); 7];
    assert!(chosen(&cheap, 8, &found).iter().sum::<u32>() <= 1, "the eighth would wait");
    assert_eq!(chosen_with_credit(&cheap, 8, &found, 1.0), [3; 7], "it is ahead by a step and more");
    let some: u32 = chosen_with_credit(&cheap, 8, &found, 0.1).iter().sum();
    assert!((2..21).contains(&some), "{some}");
}

/// What a step takes that has so many tokens (ns).
fn step_ns(num_tokens: usize) -> u64 {
    1_000_000 + 30_000 * num_tokens as u64
}

/// Runs eight requests whose answers repeat themselves and whose drafts are all right, where `finds(step, request)`;
/// returns the time of each step and how many tokens each request got.
fn run_eight(num_steps: u64, finds: impl Fn(u64, usize) -> bool) -> (Vec<u64>, [usize; 8]) {
    let config = config(true, Vec::new());
    let mut drafter = Drafter::new(config.clone(), 4);
    let mut tokens = vec![vec![1, 2, 3, 4, 1, 2]; 8];
    let mut histories: Vec<History> =
        tokens.iter().map(|tokens| History::new(&config, tokens, &[], 64, 9)).collect();
    let (mut now_ns, mut times) = (0, Vec::new());
    for step in 1..=num_steps {
        let round = Round { step, num_running: 8, num_rows: 8, num_tokens: 8, overlaps: false, now_ns };
        drafter.begin_round(round);
        for (index, (history, tokens)) in histories.iter_mut().zip(&tokens).enumerate() {
            drafter.propose(index as u32, history, tokens, if finds(step, index) { 100 } else { 0 });
        }
        let mut num_new = [1; 8];
        for (index, drafts) in drafter.end_round() {
            num_new[index as usize] += drafts.len();
        }
        for (tokens, num_new) in tokens.iter_mut().zip(num_new) {
            for _ in 0..num_new {
                tokens.push(tokens[tokens.len() - 4]);
            }
        }
        let num_generated: usize = num_new.iter().sum();
        times.push(step_ns(num_generated));
        now_ns += times[times.len() - 1];
        drafter.end_step(step, num_generated as u32, 8, num_generated as u32, now_ns);
    }
    (times, std::array::from_fn(|index| tokens[index].len() - 6))
}

#[test]
fn requests_that_all_repeat_themselves_draft_though_one_finds_nothing() {
    // One of them, another each time, has none.
    let (times, num_tokens) = run_eight(400, |step, index| step % 8 != index as u64);
    let plain = times.iter().sum::<u64>() / step_ns(8);
    assert!(num_tokens.iter().all(|&count| count as u64 > plain * 3 / 2), "{num_tokens:?}, {plain} without");
}

#[test]
fn a_request_waits_for_no_more_than_it_was_ahead() {
    // The first one repeats itself for a while, and then never again.
    let (times, num_tokens) = run_eight(1000, |step, index| index > 0 || step < 100);
    assert!(num_tokens[0] > 1100, "it was ahead: {num_tokens:?}");
    let late: f64 = times[100..].iter().map(|&ns| ns as f64 / step_ns(8) as f64 - 1.03).sum();
    assert!(late < 8.0, "{late} steps later than without drafts");
    let (times, _) = run_eight(1000, |_, index| index == 0);
    let share = times[200..].iter().sum::<u64>() as f64 / (800 * step_ns(8)) as f64;
    assert!(share > 1.005, "one drafts now and then: {share}");
    assert!(share < 1.015, "seven that never repeat themselves wait {share}");
}

/// Each guess takes a quarter of a step, and the first one much more, as all that runs for the first time.
#[test]
fn each_request_is_guessed_for_by_a_second_model_though_its_first_guess_was_slow() {
    let config = DrafterConfig { method: DraftingMethod::Model, ..config(true, Vec::new()) };
    let mut drafter = Drafter::new(config.clone(), 4);
    let (mut now_ns, mut counts) = (0, Vec::new());
    for request in 0..3 {
        let mut tokens = vec![1, 2, 3];
        let mut history = History::new(&config, &tokens, &[], 64, request);
        for step in 1..=20 {
            let step = 20 * request + step;
            let round = Round { step, num_running: 1, num_rows: 1, num_tokens: 1, overlaps: false, now_ns };
            drafter.begin_round(round);
            drafter.propose(0, &mut history, &tokens, 100);
            let num_drafts: usize = drafter.end_round().map(|(_, drafts)| drafts.len()).sum();
            let is_first = num_drafts > 0 && counts.iter().all(|&count| count == 0);
            now_ns += if is_first { 100_000 } else { 1000 + 250 * num_drafts as u64 };
            // Of the first request all are wrong, of the others all are right.
            let num_right = if request == 0 { 0 } else { num_drafts };
            history.verify(num_right as u32, num_right < num_drafts);
            tokens.extend(vec![7; 1 + num_right]);
            drafter.end_step(step, 1 + num_drafts as u32, 1, 1 + num_right as u32, now_ns);
            counts.push(num_drafts);
        }
    }
    assert_eq!(counts[15..20], [0; 5], "what is wrong is not run");
    let guessed = counts[20..].iter().filter(|&&count| count >= 3).count();
    assert!(guessed > 30, "{counts:?}");
}
