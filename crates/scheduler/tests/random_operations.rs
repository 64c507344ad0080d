//! Random operations against a model that is nothing but its cache and a reference that is nothing but its definition:
//! after every operation all invariants hold, and every request ends with exactly the tokens it would have had alone.
//!
//! The seed's lowest five bits choose one of 32 modes (FCFS or PRIORITY, recompute or swap, synchronous or
//! overlapping steps, chunked prefill or not, prefix cache or not), and the two above it FAIR in place of the first;
//! everything else about a run is drawn. `RUSTVLLM_TEST_SEEDS` and `RUSTVLLM_TEST_OPERATIONS` make a long run,
//! `RUSTVLLM_TEST_FIRST_SEED` repeats a part of one.

mod common;
mod world;

use common::setting;
use world::{Coverage, World};

#[test]
fn tokens_do_not_depend_on_company_memory_or_budget() {
    let operations = setting("RUSTVLLM_TEST_OPERATIONS", 1_200);
    let seeds = setting("RUSTVLLM_TEST_SEEDS", 96);
    let mut coverage = Coverage::default();
    let first = setting("RUSTVLLM_TEST_FIRST_SEED", 0);
    for seed in first..first + seeds {
        let mut world = World::new(seed);
        for _ in 0..operations {
            world.operate();
        }
        coverage.add(&world.finish());
    }
    println!("{seeds} seeds of {operations} operations: {coverage:?}");
    coverage.check(seeds * operations);
}
