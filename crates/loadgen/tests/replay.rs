//! Replays: hit rates against a plain set of seen prefixes, bounds, refusals, the clock.

mod common;

use std::{collections::HashMap, collections::HashSet, time::Duration};

use common::{hash_request, mooncake, requests, unique_request};
use loadgen::{
    ReplayError, ReplayOptions, ReplayReport, StepTimeModel, TimedScheduler, Trace, TraceError, TraceRequest,
    replay, replay_requests,
    replay_target::ControlPlaneTime,
    trace::{HASH_BLOCK_TOKENS, PromptContent},
};

/// Larger than anything here needs: nothing is ever evicted.
const ENDLESS: u32 = 100_000;

/// Slow steps: many requests are alive at once.
const SLOW: StepTimeModel =
    StepTimeModel { base_us: 500_000.0, per_token_us: 25.0, per_context_token_us: 0.0 };

fn run(trace: &[TraceRequest], options: &ReplayOptions) -> ReplayReport {
    let longest = trace.iter().map(|request| request.num_prompt_tokens + request.num_output_tokens).max();
    let config = options.scheduler_config(longest.unwrap_or(1));
    let mut target = TimedScheduler::new(config).expect("a valid configuration");
    replay_requests(trace.iter().cloned().map(Ok), options, &mut target, &mut || true).expect("a replay")
}

/// Hit blocks of each request when nothing is evicted: a block is found when its whole prefix was seen in an earlier
/// request, and the last token is always computed.
fn expected_hits(trace: &[TraceRequest], block_size: usize) -> Vec<u32> {
    let mut seen: HashSet<Vec<i32>> = HashSet::new();
    let mut hits = Vec::new();
    for request in trace {
        let tokens = request.prompt_token_ids();
        let findable = (1..=(tokens.len() - 1) / block_size).map(|end| &tokens[..end * block_size]);
        hits.push(findable.take_while(|&prefix| seen.contains(prefix)).count() as u32);
        seen.extend((1..=tokens.len() / block_size).map(|end| tokens[..end * block_size].to_vec()));
    }
    hits
}

#[test]
fn hits_are_those_of_a_set_of_seen_prefixes() {
    let trace = requests();
    for block_size in [1, 16, 48, 512, 700] {
        let expected = expected_hits(&trace, block_size);
        assert!(expected.iter().any(|&hits| hits > 0) || block_size > 512, "nothing to compare");
        for (max_num_seqs, max_num_batched_tokens) in [(1, 8192), (3, 100), (256, 8192), (256, 1)] {
            let options = ReplayOptions {
                block_size: block_size as u32,
                num_blocks: ENDLESS,
                max_num_seqs,
                max_num_batched_tokens,
                ..ReplayOptions::default()
            };
            let report = run(&trace, &options);
            let hits: Vec<u32> = report.requests.iter().filter_map(|request| request.hit_blocks).collect();
            assert_eq!(hits, expected, "block size {block_size}, budget {max_num_batched_tokens}");
            let full: u64 =
                trace.iter().map(|request| u64::from(request.num_prompt_tokens) / block_size as u64).sum();
            assert_eq!(report.blocks(), (full, u64::from(expected.iter().sum::<u32>())));
            assert_eq!(report.num_preemptions, 0);
        }
    }
}

#[test]
fn every_request_runs_to_its_length() {
    let trace = requests();
    let report = run(&trace, &ReplayOptions { num_blocks: ENDLESS, ..ReplayOptions::default() });
    let outputs: u64 = trace.iter().map(|request| u64::from(request.num_output_tokens)).sum();
    assert_eq!((report.num_requests, report.num_output_tokens), (trace.len() as u64, outputs));
    assert!(report.refused.is_empty());
}

#[test]
fn a_small_pool_preempts_and_still_finishes_everything() {
    let trace: Vec<_> = (0..40).map(|number| unique_request(0, number, 40, 200)).collect();
    let options = ReplayOptions { num_blocks: 64, step_time: SLOW, ..ReplayOptions::default() };
    let report = run(&trace, &options);
    assert!(report.num_preemptions > 0);
    // Unique prompts share nothing, whichever was preempted.
    assert_eq!(report.blocks(), (80, 0));
    assert_eq!(report.num_output_tokens, 40 * 200);
    assert_eq!(report, run(&trace, &options), "the same again");
}

#[test]
fn without_caching_nothing_hits() {
    let options =
        ReplayOptions { num_blocks: ENDLESS, enable_prefix_caching: false, ..ReplayOptions::default() };
    let report = run(&requests(), &options);
    let (full, hits) = report.blocks();
    assert!(full > 0 && hits == 0);
}

#[test]
fn what_can_never_fit_is_refused_and_the_rest_runs() {
    let trace = [unique_request(0, 0, 40, 8), unique_request(0, 1, 1000, 8), unique_request(5, 2, 40, 0)];
    let report = run(&trace, &ReplayOptions { num_blocks: 10, ..ReplayOptions::default() });
    assert_eq!(report.refused.into_iter().collect::<Vec<_>>(), [("never_fits", 1)]);
    let hits: Vec<_> = report.requests.iter().map(|request| request.hit_blocks).collect();
    assert_eq!(hits, [Some(0), None, Some(0)]);
    assert_eq!(report.num_output_tokens, 8);
}

#[test]
fn the_clock_follows_the_model_and_jumps_over_idle_time() {
    let step_time = StepTimeModel { base_us: 1000.0, per_token_us: 100.0, per_context_token_us: 10.0 };
    let options = ReplayOptions { max_num_seqs: 1, step_time, ..ReplayOptions::default() };
    let trace = [unique_request(0, 0, 10, 2), unique_request(0, 1, 10, 1), unique_request(1000, 2, 10, 1)];
    let report = run(&trace, &options);
    // 10 tokens: 1 + 1 + 0.1 ms; then one token at length 11: 1 + 0.1 + 0.11 ms.
    let (first, second) = (Duration::from_micros(2100), Duration::from_micros(1210));
    assert_eq!(report.num_steps, 4);
    assert_eq!(report.queue_time.max, first + second);
    assert_eq!(report.queue_time.p50, Duration::ZERO);
    assert_eq!(report.virtual_time, Duration::from_secs(1) + first);
}

#[test]
fn waiting_does_not_depend_on_how_many_are_handed_in() {
    // All come at once: far more than are handed in at a time.
    let trace: Vec<_> = (0..100).map(|number| unique_request(0, number, 20, 3)).collect();
    let step_time = StepTimeModel { base_us: 1000.0, per_token_us: 0.0, per_context_token_us: 0.0 };
    let options = ReplayOptions { max_num_seqs: 10, step_time, ..ReplayOptions::default() };
    let report = run(&trace, &options);
    // Ten at a time, three steps each.
    assert_eq!((report.num_steps, report.max_num_running), (30, 10));
    assert_eq!(report.queue_time.max, Duration::from_millis(27));
    assert_eq!(report.queue_time.p50, Duration::from_millis(12));
    assert_eq!(report.queue_time.p90, Duration::from_millis(24));
}

#[test]
fn an_error_in_the_trace_or_an_interrupt_ends_it() {
    let options = ReplayOptions::default();
    let mut target = TimedScheduler::new(options.scheduler_config(100)).expect("valid");
    let items = [Ok(unique_request(0, 0, 10, 2)), Err(TraceError::Interrupted)];
    let failed = replay_requests(items.into_iter(), &options, &mut target, &mut || true);
    assert!(matches!(failed, Err(ReplayError::Trace(TraceError::Interrupted))), "{failed:?}");

    let mut target = TimedScheduler::new(options.scheduler_config(100)).expect("valid");
    let endless = (0..).map(|number| Ok(unique_request(number, number, 10, 2)));
    let stopped = replay_requests(endless, &options, &mut target, &mut || false);
    assert!(matches!(stopped, Err(ReplayError::Interrupted)), "{stopped:?}");
}

#[test]
fn numbers_outside_their_limits_are_named() {
    let (path, _guard) = common::file("limits.jsonl", b"{\"timestamp\":0}\n");
    let trace = Trace::open(&path, None, None).expect("it looks like Mooncake's");
    let message = |options: ReplayOptions| {
        replay(&trace, &options, &mut || true).expect_err("a wrong number").to_string()
    };
    let default = ReplayOptions::default;
    assert_eq!(
        message(ReplayOptions { num_blocks: 1, ..default() }),
        "num_blocks must be between 2 and 134217728, got 1"
    );
    assert_eq!(
        message(ReplayOptions { block_size: 0, ..default() }),
        "block_size must be between 1 and 1024, got 0"
    );
    assert_eq!(
        message(ReplayOptions { max_num_seqs: 0, ..default() }),
        "max_num_seqs must be between 1 and 65536, got 0"
    );
    let with = |base_us| ReplayOptions { step_time: StepTimeModel { base_us, ..SLOW }, ..default() };
    assert_eq!(message(with(-1.0)), "base_us must be between 0 and 1000000 microseconds, got -1");
    assert_eq!(message(with(f64::NAN)), "base_us must be between 0 and 1000000 microseconds, got NaN");
    let frozen = StepTimeModel { base_us: 0.0, per_token_us: 0.0, per_context_token_us: 1.0 };
    assert!(message(ReplayOptions { step_time: frozen, ..default() }).contains("a step must take time"));
    assert!(
        message(default()).contains("line 1: the field timestamp")
            || message(default()).contains("input_length is missing")
    );
}

#[test]
fn equal_hash_ids_share_and_different_ones_never_do() {
    // The same second block after different first ones is not a hit, nor is an id that differs in its upper half.
    let trace = [
        hash_request(0, 1024, 1, &[1, 2]),
        hash_request(0, 1024, 1, &[3, 2]),
        hash_request(0, 1024, 1, &[1 | 1 << 40, 2]),
        hash_request(0, 1024, 1, &[1, 4]),
    ];
    let options = ReplayOptions { num_blocks: ENDLESS, ..ReplayOptions::default() };
    let hits: Vec<_> = run(&trace, &options).requests.iter().map(|request| request.hit_blocks).collect();
    assert_eq!(hits, [Some(0), Some(0), Some(0), Some(32)]);
}

/// Hit blocks with and without the rule that the last token is computed, and full blocks, of a whole trace: prefixes
/// as paths of hash ids, no tokens.
fn expected_totals(trace: &Trace, block_size: u32) -> (u64, u64, u64) {
    assert_eq!(HASH_BLOCK_TOKENS % block_size, 0);
    let per_id = HASH_BLOCK_TOKENS / block_size;
    let mut nodes: HashMap<(usize, u64), usize> = HashMap::new();
    // Per node: blocks of it that were seen. Blocks of a node are always seen from its first one on.
    let mut seen = vec![0];
    let (mut ruled, mut own, mut full) = (0, 0, 0);
    for request in trace.requests().expect("a file") {
        let request = request.expect("a request");
        let PromptContent::HashIds(ids) = &request.content else { panic!("no hash ids") };
        let blocks = request.num_prompt_tokens / block_size;
        let (mut node, mut hits, mut unbroken) = (0, 0, true);
        for (place, &id) in ids.iter().enumerate() {
            let fresh = nodes.len() + 1;
            node = *nodes.entry((node, id)).or_insert(fresh);
            seen.resize(nodes.len() + 1, 0);
            let here = (blocks - place as u32 * per_id).min(per_id);
            let found = seen[node].min(here);
            hits += if unbroken { found } else { 0 };
            unbroken &= found == per_id;
            seen[node] = seen[node].max(here);
        }
        full += u64::from(blocks);
        own += u64::from(hits);
        ruled += u64::from(hits.min((request.num_prompt_tokens - 1) / block_size));
    }
    (ruled, own, full)
}

/// The pool never evicts, so the hit rate is the trace's own, less what it costs that the last token is computed.
#[test]
fn the_recorded_trace_has_its_own_hit_rate() {
    for (block_size, num_blocks, percent) in
        [(512, 600_000, "38.19"), (16, if cfg!(debug_assertions) { 1_000_000 } else { 10_000_000 }, "37.38")]
    {
        let Some(whole) = mooncake(None) else { return };
        let (_, own, full) = expected_totals(&whole, block_size);
        assert_eq!(format!("{:.2}", 100.0 * own as f64 / full as f64), percent);
        // 145 million tokens take a debug build a minute: it replays the beginning. tests/core has all of it.
        let limit = cfg!(debug_assertions).then_some(1000);
        let Some(trace) = mooncake(limit) else { return };
        let (expected, own, full) = expected_totals(&trace, block_size);
        let options = ReplayOptions { block_size, num_blocks, step_time: SLOW, ..ReplayOptions::default() };
        let (report, time, summary) = replay(&trace, &options, &mut || true).expect("a replay");
        println!(
            "block size {block_size}: {expected} of {full} blocks, {own} without the rule; {} steps, {time:?}",
            report.num_steps
        );
        assert_eq!(report.blocks(), (full, expected));
        assert_eq!((report.num_requests, report.num_preemptions), (summary.num_requests, 0));
        assert_eq!(summary.num_requests, limit.unwrap_or(12_031));
        assert!(report.refused.is_empty());
    }
}

/// The bounded pool of the documents. The time is a limit that a loaded machine keeps, for release builds.
#[test]
fn the_recorded_trace_runs_in_seconds() {
    if cfg!(debug_assertions) {
        println!("skipped: times mean nothing in a debug build");
        return;
    }
    let Some(trace) = mooncake(None) else { return };
    let (report, time, summary): (_, ControlPlaneTime, _) =
        replay(&trace, &ReplayOptions::default(), &mut || true).expect("a replay");
    println!(
        "{} steps, hit rate {}, {time:?}, {:?}",
        report.num_steps,
        report.prefix_hit_rate(),
        report.queue_time
    );
    assert_eq!(report.num_output_tokens, summary.num_output_tokens);
    assert!(time.total() < Duration::from_secs(10), "{time:?}");
}
