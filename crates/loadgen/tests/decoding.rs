//! The steady state that benches measure is the one they claim: so many decodes, one sixteenth of them at a border.

use loadgen::{Decoding, DecodingOptions, StepCostError, step_cost};

fn options(num_running: u32, prefill_tokens: u32) -> DecodingOptions {
    DecodingOptions { prefill_tokens, ..DecodingOptions::new(num_running) }
}

#[test]
fn every_step_has_the_same_work() {
    let loads = [(1, 0), (32, 0), (32, 100), (3, 10_000), (1100, 0)];
    for (steps_in_flight, (num_running, prefill_tokens)) in
        [1, 2].into_iter().flat_map(|depth| loads.map(|load| (depth, load)))
    {
        let options = DecodingOptions { steps_in_flight, ..options(num_running, prefill_tokens) };
        let mut decoding = Decoding::new(options).expect("valid");
        // Longer than a decode lives.
        for _ in 0..1200 {
            let (output, _) = decoding.step();
            assert_eq!(output.total_num_scheduled_tokens, num_running + prefill_tokens);
            assert_eq!(output.num_reqs, num_running + u32::from(prefill_tokens > 0));
            assert_eq!(output.num_new_reqs, u32::from(prefill_tokens > 0));
            if num_running == 32 && prefill_tokens == 0 {
                assert_eq!(output.num_block_table_updates, 2, "a sixteenth takes a block");
            }
        }
        let stats = decoding.scheduler.handle().stats();
        assert!(stats.num_finished >= 2 * u64::from(num_running));
        assert_eq!(stats.last_updated_step + u64::from(steps_in_flight) - 1, stats.num_steps);
        assert_eq!(stats.num_preemptions, 0);
        assert_eq!(stats.prefix_cache_hits, 0);
        decoding.scheduler.check_invariants();
    }
}

#[test]
fn a_cost_has_its_parts() {
    let cost = step_cost(options(64, 0), 200, &mut || true).expect("a measurement");
    assert!(cost.schedule.as_nanos() > 0 && cost.update.as_nanos() > 0);
    assert!(cost.total >= cost.schedule && cost.total >= cost.update);
    assert_eq!((cost.num_blocks, cost.block_size), (64 * 41 + 1, 16));
    let mixed = step_cost(options(64, 2048), 50, &mut || true).expect("a measurement");
    assert_eq!(mixed.num_blocks, cost.num_blocks + 129);
}

#[test]
fn numbers_outside_their_limits_are_named() {
    let message =
        |options, num_steps| step_cost(options, num_steps, &mut || true).expect_err("wrong").to_string();
    assert_eq!(message(options(0, 0), 10), "num_running must be between 1 and 32768, got 0");
    assert_eq!(message(options(40_000, 0), 10), "num_running must be between 1 and 32768, got 40000");
    assert_eq!(
        message(options(1, u32::MAX), 10),
        "prefill_tokens must be between 0 and 1048576, got 4294967295"
    );
    assert_eq!(message(options(1, 0), 0), "num_steps must be between 1 and 1000000, got 0");
    let deep = DecodingOptions { steps_in_flight: 3, ..options(1, 0) };
    assert!(message(deep, 10).starts_with("steps_in_flight must be "));
    let stopped = step_cost(options(1, 0), 10, &mut || false);
    assert!(matches!(stopped, Err(StepCostError::Interrupted)), "{stopped:?}");
}
