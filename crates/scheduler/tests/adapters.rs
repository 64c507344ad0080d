//! How many different adapters run at a time, and that none of them waits for ever.

mod common;

use common::{request, scheduler};
use scheduler::{ExtraKeys, NewRequest, RequestError, Scheduler, SchedulerConfig, TokenRows};

fn with_adapter(scheduler: &Scheduler, id: &str, adapter: i64, max_tokens: u32) -> NewRequest {
    let mut request = request(scheduler, id, vec![1; 5], max_tokens);
    request.params.adapter = adapter;
    if adapter > 0 {
        request.extra_keys = ExtraKeys::new(Some(&adapter.to_string()), None, Vec::new());
    }
    request
}

fn add(scheduler: &Scheduler, request: NewRequest) {
    scheduler.handle().add_request(request).expect("a request that fits");
}

/// Runs a step; the ids of its requests.
fn step(scheduler: &mut Scheduler) -> Vec<String> {
    let Some(output) = scheduler.schedule().expect("a free set") else { return Vec::new() };
    let view = scheduler.step_view(&output).expect("in flight");
    let sampled = vec![7; output.num_sampled as usize];
    scheduler.update_from_output(&output, TokenRows::column(&sampled)).expect("in flight");
    scheduler.check_invariants();
    view.scheduled.into_iter().map(|row| row.request_id).collect()
}

fn config(max_loras: u32) -> SchedulerConfig {
    SchedulerConfig { max_loras, enable_prefix_caching: false, ..SchedulerConfig::new(256, 64) }
}

#[test]
fn a_further_adapter_waits_and_holds_no_other_up() {
    let config = config(1);
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    for (id, adapter) in [("a", 1), ("b", 2), ("c", 0), ("d", 1)] {
        add(&scheduler, with_adapter(&scheduler, id, adapter, 2));
    }
    assert_eq!(scheduler.adapter_counts().into_iter().collect::<Vec<_>>(), [(1, (0, 2)), (2, (0, 1))]);
    assert_eq!(step(&mut scheduler), ["a", "c", "d"]);
    assert_eq!(scheduler.waiting_request_ids(), ["b"]);
    assert_eq!(scheduler.adapter_counts().into_iter().collect::<Vec<_>>(), [(1, (2, 0)), (2, (0, 1))]);
    let adapters: Vec<_> = scheduler.request_summaries(9).iter().map(|row| row.adapter).collect();
    assert_eq!(adapters, [1, 0, 1, 2]);
    step(&mut scheduler);
    assert_eq!(step(&mut scheduler), ["b"], "the others have ended");
}

#[test]
fn without_a_limit_all_come_in() {
    let config = config(0);
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    for adapter in 1..=9 {
        add(&scheduler, with_adapter(&scheduler, &adapter.to_string(), adapter, 2));
    }
    assert_eq!(step(&mut scheduler).len(), 9);
}

/// Two adapters whose requests never end coming; a third is passed `max_times_passed` times, and then comes in as soon
/// as one of the two has no request left.
#[test]
fn two_adapters_that_flood_cannot_keep_a_third_out() {
    let config = SchedulerConfig { max_num_seqs: 8, max_times_passed: 4, ..config(2) };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    for number in 0..6 {
        add(&scheduler, with_adapter(&scheduler, &format!("first-{number}"), 1 + number % 2, 6));
    }
    step(&mut scheduler);
    add(&scheduler, with_adapter(&scheduler, "third", 3, 6));
    let mut num_passed = 0;
    for number in 0..100 {
        add(&scheduler, with_adapter(&scheduler, &format!("flood-{number}"), 1 + number % 2, 6));
        let ran = step(&mut scheduler);
        if ran.iter().any(|id| id == "third") {
            assert!(num_passed >= 1, "the flood was there");
            assert!(number < 30, "it waited for {number} steps");
            return;
        }
        num_passed += i64::from(ran.iter().any(|id| id.starts_with("flood")));
    }
    panic!("the third adapter never ran");
}

/// One that a request needs stays; once it is removed, what still names it ends with an error and holds nothing up.
#[test]
fn a_removed_adapter_takes_no_request_and_one_in_use_is_not_removed() {
    let config = config(1);
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    scheduler.add_adapter(1);
    scheduler.add_adapter(2);
    add(&scheduler, with_adapter(&scheduler, "a", 1, 2));
    assert!(!scheduler.remove_adapter(1), "it has arrived, if no step has it yet");
    add(&scheduler, with_adapter(&scheduler, "b", 2, 2));
    step(&mut scheduler);
    assert_eq!(scheduler.live_adapters(), (vec![1], vec![2]));
    assert!(!scheduler.remove_adapter(1) && !scheduler.remove_adapter(2));
    while scheduler.num_unfinished_requests() > 0 {
        step(&mut scheduler);
    }
    assert!(scheduler.remove_adapter(1));
    let mut consumer = scheduler.take_consumer().expect("not taken");
    consumer.drain(|_| {});
    add(&scheduler, with_adapter(&scheduler, "late", 1, 2));
    add(&scheduler, with_adapter(&scheduler, "c", 2, 2));
    add(&scheduler, with_adapter(&scheduler, "none", 0, 2));
    assert_eq!(step(&mut scheduler), ["c", "none"]);
    let mut ends = Vec::new();
    consumer.drain(|output| ends.push(output.error));
    assert_eq!(ends, [RequestError::AdapterMissing, RequestError::None, RequestError::None]);
}
