//! Pauses: who runs, who waits, who can still leave, and when nothing moves any more.

mod common;

use common::{request, scheduler, step};
use scheduler::{FinishReason, PauseState, RequestKey, Scheduler, SchedulerConfig, TokenRows};

fn add(scheduler: &Scheduler, id: &str, num_prompt: u32, max_tokens: u32) -> RequestKey {
    let new = request(scheduler, id, vec![1; num_prompt as usize], max_tokens);
    let key = new.key;
    scheduler.handle().add_request(new).expect("a request that fits");
    key
}

#[test]
fn requests_in_flight_run_to_their_ends_while_new_ones_wait() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    add(&scheduler, "a", 3, 3);
    assert_eq!(step(&mut scheduler), ["a"]);
    assert!(!scheduler.is_at_rest(), "it is not paused");
    scheduler.set_pause_state(PauseState::PausedNew);
    add(&scheduler, "b", 3, 2);
    assert!(!scheduler.is_at_rest());
    assert_eq!(step(&mut scheduler), ["a"]);
    assert_eq!(step(&mut scheduler), ["a"]);
    assert!(scheduler.is_at_rest());
    assert!(step(&mut scheduler).is_empty());
    scheduler.set_pause_state(PauseState::Unpaused);
    assert_eq!(step(&mut scheduler), ["b"]);
    assert!(!scheduler.is_at_rest());
}

#[test]
fn a_request_that_was_preempted_counts_as_in_flight() {
    let config = SchedulerConfig { enable_prefix_caching: false, ..SchedulerConfig::new(5, 64) };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    add(&scheduler, "a", 31, 8);
    add(&scheduler, "b", 31, 8);
    step(&mut scheduler);
    scheduler.set_pause_state(PauseState::PausedNew);
    add(&scheduler, "c", 3, 1);
    let mut ran = Vec::new();
    while !scheduler.is_at_rest() {
        ran = step(&mut scheduler);
        assert!(!ran.is_empty() && !ran.contains(&"c".to_owned()));
    }
    assert!(scheduler.handle().stats().num_preemptions > 0);
    assert_eq!(ran, ["b"], "it came back and has ended");
    assert_eq!(scheduler.num_unfinished_requests(), 1);
}

#[test]
fn samples_that_fork_a_request_in_flight_run_with_it() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    let first = request(&scheduler, "0", vec![1; 40], 3);
    let mut second = request(&scheduler, "1", vec![1; 40], 3);
    second.fork_from = Some(first.key);
    scheduler.handle().add_requests(vec![first, second]).expect("requests that fit");
    assert_eq!(step(&mut scheduler), ["0"], "all of its prompt but the last token");
    scheduler.set_pause_state(PauseState::PausedNew);
    assert_eq!(step(&mut scheduler), ["0", "1"]);
    while !scheduler.is_at_rest() {
        step(&mut scheduler);
    }
    assert_eq!(scheduler.num_unfinished_requests(), 0);
}

#[test]
fn all_samples_of_a_request_in_flight_run_also_when_there_is_no_room_for_them_at_first() {
    // With one token there is nothing to share, so the second does not wait for the first: it has no place.
    for num_prompt in [40, 1] {
        let mut scheduler =
            scheduler(&SchedulerConfig { max_num_seqs: 1, ..SchedulerConfig::new(64, 256) }, 2);
        let first = request(&scheduler, "0", vec![1; num_prompt], 2);
        let mut second = request(&scheduler, "1", vec![1; num_prompt], 2);
        second.fork_from = Some(first.key);
        scheduler.handle().add_requests(vec![first, second]).expect("requests that fit");
        assert_eq!(step(&mut scheduler), ["0"]);
        scheduler.set_pause_state(PauseState::PausedNew);
        add(&scheduler, "late", 3, 1);
        let mut ran = Vec::new();
        while !scheduler.is_at_rest() {
            let ids = step(&mut scheduler);
            assert!(!ids.is_empty());
            ran.extend(ids);
        }
        assert_eq!(ran.last().expect("a step").as_str(), "1", "{num_prompt}: {ran:?}");
        assert_eq!(scheduler.waiting_request_ids(), ["late"]);
    }
}

#[test]
fn samples_of_a_request_that_has_not_begun_wait() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    scheduler.set_pause_state(PauseState::PausedNew);
    let first = request(&scheduler, "0", vec![1; 40], 2);
    let mut second = request(&scheduler, "1", vec![1; 40], 2);
    second.fork_from = Some(first.key);
    let first_key = first.key;
    scheduler.handle().add_requests(vec![first, second]).expect("requests that fit");
    assert!(step(&mut scheduler).is_empty());
    scheduler.handle().abort_key(first_key);
    assert!(step(&mut scheduler).is_empty());
    assert!(scheduler.is_at_rest());
    assert_eq!(scheduler.waiting_request_ids(), ["1"]);
}

#[test]
fn nothing_runs_while_all_is_paused_but_requests_come_and_go() {
    let config = SchedulerConfig { max_steps_in_flight: 2, ..SchedulerConfig::new(64, 256) };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    let (a, b) = (add(&scheduler, "a", 3, 8), add(&scheduler, "b", 3, 8));
    let output = scheduler.schedule().expect("a free set").expect("work");
    scheduler.set_pause_state(PauseState::PausedAll);
    assert!(scheduler.schedule().expect("a free set").is_none());
    assert!(!scheduler.is_at_rest(), "a step is in flight");
    scheduler.update_from_output(&output, TokenRows::column(&[7, 7])).expect("the step in flight");
    assert!(scheduler.is_at_rest());
    assert!(!scheduler.handle().is_busy(), "frozen requests do not count");
    scheduler.handle().abort_key(a);
    let c = add(&scheduler, "c", 3, 8);
    assert!(step(&mut scheduler).is_empty());
    assert_eq!(scheduler.running_request_ids(), ["b"]);
    assert_eq!(scheduler.waiting_request_ids(), ["c"]);
    assert!(scheduler.reset_prefix_cache(true), "their blocks can be taken meanwhile");
    scheduler.set_pause_state(PauseState::Unpaused);
    assert!(scheduler.handle().is_busy() || scheduler.has_unfinished_requests());
    assert_eq!(step(&mut scheduler), ["b", "c"]);
    assert_eq!(scheduler.output_tokens_from(b, 0), [7, 7]);
    assert_eq!(scheduler.output_tokens_from(c, 0), [7]);
}

#[test]
fn every_request_can_be_aborted_at_once() {
    let config = SchedulerConfig { max_num_seqs: 1, ..SchedulerConfig::new(64, 256) };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    let mut consumer = scheduler.take_consumer().expect("the first");
    add(&scheduler, "a", 3, 8);
    add(&scheduler, "b", 3, 8);
    let output = scheduler.schedule().expect("a free set").expect("work");
    add(&scheduler, "c", 3, 8);
    scheduler.set_pause_state(PauseState::PausedNew);
    assert_eq!(scheduler.abort_all(), 3, "running, waiting, and in the inbox");
    assert!(!scheduler.is_at_rest(), "a step is in flight");
    scheduler.update_from_output(&output, TokenRows::column(&[7])).expect("the step in flight");
    scheduler.check_invariants();
    assert!(scheduler.is_at_rest());
    assert_eq!(scheduler.abort_all(), 0);
    let mut ends = Vec::new();
    consumer.drain(|output| ends.push(output.finish_reason));
    assert_eq!(ends, [Some(FinishReason::Abort); 3]);
    assert_eq!(scheduler.handle().num_queued(), 0);
}
