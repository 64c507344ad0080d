//! How many tokens may wait, and how long a request may: scenes with numbers, threads that race, and the real clock.

mod common;

use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{request, scheduler};
use scheduler::{
    AddRequestError, EngineCoreOutput, FinishReason, NewRequest, RequestError, Scheduler, SchedulerConfig,
    SchedulingPolicy, TokenRows, egress::Consumer, monotonic_ns,
};

const PATIENCE: Duration = Duration::from_secs(20);
const HOUR: Duration = Duration::from_secs(3600);

fn with(change: impl FnOnce(&mut SchedulerConfig)) -> (Scheduler, Consumer) {
    let mut config = SchedulerConfig { max_num_seqs: 1, ..SchedulerConfig::new(1024, 4096) };
    change(&mut config);
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    let consumer = scheduler.take_consumer().expect("taken once");
    (scheduler, consumer)
}

fn drained(consumer: &mut Consumer) -> Vec<EngineCoreOutput> {
    let mut outputs = Vec::new();
    consumer.drain(|output| outputs.push(output));
    outputs
}

fn step(scheduler: &mut Scheduler) -> bool {
    let Some(output) = scheduler.schedule().expect("a free set") else { return false };
    let tokens = vec![7; output.num_sampled as usize];
    scheduler.update_from_output(&output, TokenRows::column(&tokens)).expect("in flight");
    scheduler.check_invariants();
    true
}

fn add(scheduler: &Scheduler, id: &str, num_prompt: usize) -> Result<(), AddRequestError> {
    scheduler.handle().add_request(request(scheduler, id, vec![1; num_prompt], 100))
}

#[test]
fn tokens_that_wait_are_bounded_and_given_back() {
    let (mut scheduler, _consumer) = with(|config| config.max_num_queued_tokens = 100);
    let handle = scheduler.handle();
    add(&scheduler, "running", 60).expect("taken");
    assert!(step(&mut scheduler));
    assert_eq!(handle.num_queued_tokens(), 0, "who runs does not wait");
    add(&scheduler, "a", 60).expect("taken");
    add(&scheduler, "b", 40).expect("just fits");
    let error = add(&scheduler, "c", 1).expect_err("full");
    assert_eq!(error, AddRequestError::QueueTokensFull { queued: 100, wanted: 1, limit: 100 });
    assert_eq!(
        error.to_string(),
        "the queue is full: 100 prompt tokens are waiting, 1 more would exceed max_num_queued_tokens = 100; \
         try again later"
    );
    assert_eq!((handle.num_queued(), handle.num_queued_tokens()), (2, 100), "what was refused has no place");
    handle.abort_requests(["a"]);
    assert!(step(&mut scheduler));
    assert_eq!((handle.num_queued(), handle.num_queued_tokens()), (1, 40));
    add(&scheduler, "c", 60).expect("there is room again");
    add(&scheduler, "c", 0).expect_err("an empty prompt");
    handle.abort_requests(["running", "b", "c"]);
    assert!(!step(&mut scheduler));
    assert_eq!((handle.num_queued(), handle.num_queued_tokens()), (0, 0));
    let stats = handle.stats();
    assert_eq!((stats.num_admitted_requests, stats.num_admitted_tokens), (1, 60));
}

#[test]
fn a_request_larger_than_the_limit_waits_alone() {
    let (mut scheduler, _consumer) = with(|config| config.max_num_queued_tokens = 100);
    add(&scheduler, "large", 500).expect("no request waits");
    add(&scheduler, "small", 1).expect_err("now one does");
    assert!(step(&mut scheduler));
    add(&scheduler, "small", 1).expect("it runs");
    let error = add(&scheduler, "larger", 500).expect_err("not with another");
    assert_eq!(error, AddRequestError::QueueTokensFull { queued: 1, wanted: 500, limit: 100 });
}

#[test]
fn a_group_counts_its_prompt_once() {
    let (scheduler, _consumer) = with(|config| config.max_num_queued_tokens = 100);
    let first = request(&scheduler, "a", vec![1; 80], 5);
    let handle = scheduler.handle();
    let sample = |id: &str| NewRequest {
        key: handle.new_key(),
        request_id: id.into(),
        fork_from: Some(first.key),
        ..first.clone()
    };
    handle.add_requests(vec![first.clone(), sample("b"), sample("c")]).expect("taken");
    assert_eq!((handle.num_queued(), handle.num_queued_tokens()), (3, 80));
}

#[test]
fn threads_that_race_never_exceed_a_limit() {
    let (mut scheduler, mut consumer) = with(|config| {
        config.max_num_queued_tokens = 1000;
        config.max_num_queued_reqs = 30;
    });
    let (num_taken, num_refused) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for number in 0..4u64 {
            let (handle, num_taken, num_refused) = (scheduler.handle(), &num_taken, &num_refused);
            scope.spawn(move || {
                for index in 0..500 {
                    let params =
                        scheduler::SamplingParams { max_tokens: 1, ..scheduler::SamplingParams::default() };
                    let prompt = vec![1; 1 + (index * 7 + number as usize * 13) % 90];
                    let id = format!("{number}-{index}");
                    let result = handle.add_request(NewRequest::new(handle.new_key(), &id, prompt, params));
                    let count = if result.is_ok() { num_taken } else { num_refused };
                    count.fetch_add(1, Ordering::Relaxed);
                    assert!(handle.num_queued_tokens() <= 1000, "more tokens than may wait");
                    assert!(handle.num_queued() <= 30, "more requests than may wait");
                }
            });
        }
        let deadline = Instant::now() + PATIENCE;
        while num_taken.load(Ordering::Relaxed) + num_refused.load(Ordering::Relaxed) < 2000 {
            assert!(Instant::now() < deadline, "the threads are stuck");
            step(&mut scheduler);
            drained(&mut consumer);
        }
    });
    while step(&mut scheduler) {
        drained(&mut consumer);
    }
    let handle = scheduler.handle();
    assert_eq!((handle.num_queued(), handle.num_queued_tokens()), (0, 0));
    assert_eq!(handle.stats().num_admitted_requests, num_taken.into_inner());
}

#[test]
fn who_waits_too_long_ends_in_the_order_of_arrival() {
    for scheduling_policy in [SchedulingPolicy::Fcfs, SchedulingPolicy::Priority] {
        let (mut scheduler, mut consumer) = with(|config| {
            config.queue_timeout = HOUR;
            config.scheduling_policy = scheduling_policy;
        });
        add(&scheduler, "running", 10).expect("taken");
        assert!(step(&mut scheduler));
        let mut moments = Vec::new();
        let mut keys = Vec::new();
        for (index, id) in ["a", "b", "c"].into_iter().enumerate() {
            // The most urgent comes last.
            let priority = -(index as i32);
            let request = NewRequest { priority, ..request(&scheduler, id, vec![1; 10], 5) };
            keys.push(request.key);
            scheduler.handle().add_request(request).expect("taken");
            let now = monotonic_ns();
            while monotonic_ns() <= now {}
            moments.push(now);
        }
        assert!(step(&mut scheduler));
        drained(&mut consumer);
        assert_eq!(scheduler.end_overdue_by(moments[0]), 0, "an hour is not over");
        assert_eq!(scheduler.end_overdue_by(moments[1] + HOUR.as_nanos() as u64), 2);
        let ends: Vec<_> = drained(&mut consumer)
            .iter()
            .map(|output| (output.key, output.finish_reason, output.error, output.new_token_id))
            .collect();
        let end = |index: usize| (keys[index], Some(FinishReason::Error), RequestError::QueueTimeout, -1);
        assert_eq!(ends, vec![end(0), end(1)]);
        assert_eq!(scheduler.waiting_request_ids(), vec!["c"]);
        assert_eq!(scheduler.running_request_ids(), vec!["running"], "who runs has no such limit");
        scheduler.check_invariants();
        assert_eq!(scheduler.handle().stats().num_queue_timeouts, 2);
    }
}

#[test]
fn a_parked_scheduler_wakes_when_a_request_has_waited_too_long() {
    let timeout = Duration::from_millis(30);
    let (mut scheduler, mut consumer) = with(|config| config.queue_timeout = timeout);
    // Nothing but the clock can end it: its grammar never comes.
    let grammar = NewRequest { waits_for_grammar: true, ..request(&scheduler, "a", vec![1; 10], 5) };
    let handle = scheduler.handle();
    let began = Instant::now();
    handle.add_request(grammar).expect("taken");
    let mut seen_wakes = 0;
    while drained(&mut consumer).is_empty() {
        assert!(scheduler.schedule().expect("a free set").is_none());
        assert!(
            handle.num_queued() == 1 || began.elapsed() >= timeout,
            "ended after {:?} of {timeout:?}",
            began.elapsed()
        );
        if handle.num_queued() == 1 {
            // However late it comes to look: a deadline that has passed goes before the end of its own time.
            let enough = Some(Duration::from_secs(3));
            assert!(handle.wait_for_work(&mut seen_wakes, enough).expect("the owner"), "overslept");
        }
    }
    assert_eq!((handle.num_queued(), handle.num_queued_tokens()), (0, 0));
    assert!(
        !handle.wait_for_work(&mut seen_wakes, Some(Duration::ZERO)).expect("the owner"),
        "nothing to do"
    );
}

#[test]
fn deadlines_of_those_that_have_gone_are_forgotten() {
    let (mut scheduler, mut consumer) = with(|config| config.queue_timeout = HOUR);
    let grammar = NewRequest { waits_for_grammar: true, ..request(&scheduler, "first", vec![1; 10], 5) };
    scheduler.handle().add_request(grammar).expect("taken");
    let mut longest = 0;
    for index in 0..2000 {
        let one = request(&scheduler, &index.to_string(), vec![1; 4], 1);
        scheduler.handle().add_request(one).expect("taken");
        assert!(step(&mut scheduler));
        drained(&mut consumer);
        longest = longest.max(scheduler.num_deadlines());
    }
    assert!(longest < 100, "{longest} deadlines for two requests that wait");
}

#[test]
fn a_timeout_beyond_a_year_is_no_configuration() {
    let config = SchedulerConfig { queue_timeout: Duration::MAX, ..SchedulerConfig::new(8, 16) };
    let error = config.check().expect_err("too long");
    assert!(
        error.to_string().starts_with("queue_timeout must be at most 31536000 seconds, got 1844"),
        "{error}"
    );
}
