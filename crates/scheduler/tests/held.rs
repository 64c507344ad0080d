//! Requests that are held back: steps run without them, and their tokens are the same as ever.

mod common;

use common::{request, scheduler};
use scheduler::{RequestKey, Scheduler, SchedulerConfig, TokenRows};

fn add(scheduler: &Scheduler, id: &str, num_prompt: u32) -> RequestKey {
    let new = request(scheduler, id, vec![1; num_prompt as usize], 8);
    let key = new.key;
    scheduler.handle().add_request(new).expect("a request that fits");
    key
}

/// Who runs in the next step, which is updated with sevens; `None`: nothing can run.
fn step(scheduler: &mut Scheduler) -> Option<Vec<String>> {
    let output = scheduler.schedule().expect("a free set")?;
    let view = scheduler.step_view(&output).expect("the step is in flight");
    let sampled = vec![7; output.num_sampled as usize];
    scheduler.update_from_output(&output, TokenRows::column(&sampled)).expect("the step in flight");
    scheduler.check_invariants();
    Some(view.scheduled.into_iter().map(|request| request.request_id).collect())
}

fn names(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|&id| id.to_owned()).collect()
}

#[test]
fn steps_run_without_a_request_that_is_held_back() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    let keys = ["a", "b", "c"].map(|id| add(&scheduler, id, 3));
    assert_eq!(step(&mut scheduler), Some(names(&["a", "b", "c"])));
    scheduler.hold_back(keys[1], true);
    assert_eq!(step(&mut scheduler), Some(names(&["a", "c"])));
    assert_eq!(step(&mut scheduler), Some(names(&["a", "c"])));
    let late = add(&scheduler, "d", 3);
    assert_eq!(step(&mut scheduler), Some(names(&["a", "c", "d"])));
    assert_eq!(scheduler.output_tokens_from(keys[1], 0).len(), 1, "it got none meanwhile");
    scheduler.hold_back(keys[1], false);
    assert_eq!(step(&mut scheduler), Some(names(&["a", "b", "c", "d"])));
    assert_eq!(scheduler.output_tokens_from(keys[1], 0), [7, 7]);
    for key in [keys[0], keys[1], keys[2], late] {
        scheduler.hold_back(key, true);
    }
    assert_eq!(step(&mut scheduler), None);
    scheduler.hold_back(keys[1], false);
    assert_eq!(step(&mut scheduler), Some(names(&["b"])));
    while scheduler.has_unfinished_requests() {
        keys.into_iter().chain([late]).for_each(|key| scheduler.hold_back(key, false));
        assert!(step(&mut scheduler).is_some());
    }
}

#[test]
fn a_request_that_is_held_back_can_be_preempted_and_aborted() {
    let config = SchedulerConfig { enable_prefix_caching: false, ..SchedulerConfig::new(5, 64) };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    let (_, second) = (add(&scheduler, "a", 31), add(&scheduler, "b", 31));
    assert_eq!(step(&mut scheduler), Some(names(&["a", "b"])));
    scheduler.hold_back(second, true);
    while scheduler.handle().stats().num_preemptions == 0 {
        assert_eq!(step(&mut scheduler), Some(names(&["a"])), "until it needs a block of the other's");
    }
    scheduler.hold_back(second, true); // it waits: ignored
    let mut has_run = false;
    while scheduler.output_tokens_from(second, 0).len() < 3 {
        has_run |= step(&mut scheduler).is_some_and(|ran| ran.contains(&"b".to_owned()));
    }
    assert!(has_run, "it has come back");
    scheduler.hold_back(second, true);
    assert_eq!(step(&mut scheduler), None, "the other has ended");
    scheduler.handle().abort_key(second);
    assert_eq!(step(&mut scheduler), None);
    assert!(!scheduler.has_unfinished_requests());
    scheduler.hold_back(second, true); // it has left: ignored
}

#[test]
fn a_request_that_waits_is_not_held_back() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    let key = add(&scheduler, "a", 3);
    scheduler.hold_back(key, true);
    assert_eq!(step(&mut scheduler), Some(names(&["a"])));
}

#[test]
fn a_token_is_awaited_while_its_step_is_in_flight() {
    let config = SchedulerConfig { max_steps_in_flight: 2, ..SchedulerConfig::new(64, 256) };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    let key = add(&scheduler, "a", 3);
    assert!(!scheduler.awaits_token(key));
    let output = scheduler.schedule().expect("a free set").expect("it runs");
    assert!(scheduler.awaits_token(key));
    scheduler.hold_back(key, true);
    assert_eq!(scheduler.schedule().expect("a free set"), None, "the next step is without it");
    scheduler.update_from_output(&output, TokenRows::column(&[7])).expect("the step in flight");
    assert!(!scheduler.awaits_token(key));
}
