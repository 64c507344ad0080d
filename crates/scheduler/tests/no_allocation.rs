//! A thousand decode steps that cross block borders allocate nothing.

mod common;

use common::{request, scheduler};
use scheduler::{SchedulerConfig, TokenRows};

#[test]
fn decode_steps_allocate_nothing() {
    for (enable_prefix_caching, max_steps_in_flight) in [(true, 1), (false, 1), (true, 2)] {
        let config = SchedulerConfig {
            max_steps_in_flight,
            max_num_seqs: 64,
            max_num_batched_tokens: 4096,
            enable_prefix_caching,
            ..SchedulerConfig::new(64 * 80, 1280)
        };
        let mut scheduler = scheduler(&config, config.num_buffer_sets());
        let mut consumer = scheduler.take_consumer().expect("taken once");
        for i in 0..64 {
            let prompt = (0..16 + i % 16).map(|token| token + 100 * i).collect();
            scheduler.handle().add_request(request(&scheduler, &i.to_string(), prompt, 1100)).expect("fits");
        }
        let sampled = [7; 64];
        let mut num_crossings = 0;
        let mut in_flight = std::collections::VecDeque::with_capacity(4);
        let mut step = || {
            while in_flight.len() < max_steps_in_flight as usize {
                let output = scheduler.schedule().expect("a free set").expect("running requests");
                num_crossings += output.num_block_table_updates;
                in_flight.push_back(output);
            }
            let output = in_flight.pop_front().expect("scheduled above");
            let rows = TokenRows::column(&sampled[..output.num_sampled as usize]);
            scheduler.update_from_output(&output, rows).expect("in flight");
            consumer.drain(drop);
        };
        (0..20).for_each(|_| step());
        let counted = allocation_counter::measure(|| (0..1000).for_each(|_| step()));
        assert_eq!(
            counted.count_total, 0,
            "prefix caching {enable_prefix_caching}, {max_steps_in_flight} steps in flight"
        );
        assert!(num_crossings > 4000, "the steps must cross block borders");
    }
}
