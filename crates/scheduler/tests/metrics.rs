//! What is counted, in scenes whose numbers are known. Random operations hold everything that is counted against the
//! records that left (`world/ledger.rs`).

mod common;

use std::collections::VecDeque;

use common::{request, scheduler};
use scheduler::{
    FinishReason, HistogramSnapshot, MetricsSnapshot, NewRequest, STEP_PHASES, SamplingParams, Scheduler,
    SchedulerConfig, TokenRows,
};

fn counter(metrics: &MetricsSnapshot, name: &str) -> u64 {
    metrics.counters.iter().find(|(counter, _)| counter == name).expect("a counter").1
}

fn histogram<'a>(metrics: &'a MetricsSnapshot, name: &str) -> &'a HistogramSnapshot {
    &metrics.histograms.iter().find(|(histogram, _)| histogram == name).expect("a histogram").1
}

/// Count and sum.
fn totals(metrics: &MetricsSnapshot, name: &str) -> (u64, f64) {
    let histogram = histogram(metrics, name);
    (histogram.count(), histogram.sum)
}

/// Run until nothing is left; every token is 7.
fn run(scheduler: &mut Scheduler) {
    let mut in_flight = VecDeque::new();
    let most = scheduler.config().max_steps_in_flight as usize;
    loop {
        while in_flight.len() < most
            && let Some(output) = scheduler.schedule().expect("a free set")
        {
            in_flight.push_back(output);
        }
        let Some(output) = in_flight.pop_front() else { return };
        let sampled = vec![7; output.num_sampled as usize];
        scheduler.update_from_output(&output, TokenRows::column(&sampled)).expect("in flight");
    }
}

#[test]
fn requests_of_one_size_give_the_numbers_that_are_expected() {
    const R: u64 = 5;
    const P: u64 = 40;
    const G: u64 = 9;
    for (max_steps_in_flight, budget) in [(1, 2048), (2, 2048), (1, 16)] {
        let config = SchedulerConfig {
            max_steps_in_flight,
            max_num_batched_tokens: budget,
            enable_prefix_caching: false,
            ..SchedulerConfig::new(256, 128)
        };
        let mut scheduler = scheduler(&config, config.num_buffer_sets());
        for index in 0..R {
            let prompt = vec![index as i32; P as usize];
            scheduler
                .handle()
                .add_request(request(&scheduler, &index.to_string(), prompt, G as u32))
                .expect("fits");
        }
        assert_eq!(counter(&scheduler.handle().metrics(), "num_queued"), R);
        run(&mut scheduler);
        let metrics = scheduler.handle().metrics();
        assert_eq!(counter(&metrics, "num_prompt_tokens"), R * P);
        assert_eq!(counter(&metrics, "num_prompt_tokens_cached"), 0);
        assert_eq!(counter(&metrics, "num_generation_tokens"), R * G);
        assert_eq!(counter(&metrics, "num_finished_length"), R);
        assert_eq!(histogram(&metrics, "time_to_first_token").count(), R);
        assert_eq!(histogram(&metrics, "inter_token_latency").count(), R * (G - 1));
        assert_eq!(histogram(&metrics, "iteration_tokens").sum as u64, R * (P + G));
        assert_eq!(totals(&metrics, "request_prompt_tokens"), (R, (R * P) as f64));
        assert_eq!(totals(&metrics, "request_generation_tokens"), (R, (R * G) as f64));
        assert_eq!(totals(&metrics, "request_params_max_tokens"), (R, (R * G) as f64));
        assert_eq!(totals(&metrics, "request_params_n"), (R, R as f64));
        assert_eq!(totals(&metrics, "request_num_preemptions"), (R, 0.0));
        for gauge in ["num_running", "num_waiting", "num_queued"] {
            assert_eq!(counter(&metrics, gauge), 0, "{gauge}");
        }
        // The parts of a request's time are its time.
        let sum = |name| histogram(&metrics, name).sum;
        let whole = sum("e2e_request_latency");
        let parts = sum("request_queue_time") + sum("request_prefill_time") + sum("request_decode_time");
        assert!((whole - parts).abs() < 1e-3 * R as f64, "{parts} of {whole} s");
        assert!((sum("inter_token_latency") - sum("request_decode_time")).abs() < 1e-9 * R as f64);
        let means = sum("request_time_per_output_token") * (G - 1) as f64;
        assert!((means - sum("request_decode_time")).abs() < 1e-7);
    }
}

#[test]
fn latencies_count_from_arrival() {
    /// Half a minute: less than any machine has been up for, since the clock begins with the machine.
    const AGE_NS: u64 = 30_000_000_000;
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 128), 2);
    let old = NewRequest { age_ns: AGE_NS, ..request(&scheduler, "a", vec![1; 4], 2) };
    scheduler.handle().add_request(old).expect("fits");
    run(&mut scheduler);
    let metrics = scheduler.handle().metrics();
    for name in ["time_to_first_token", "e2e_request_latency"] {
        let seconds = histogram(&metrics, name).sum;
        assert!((30.0..60.0).contains(&seconds), "{name}: {seconds}");
    }
    assert!(histogram(&metrics, "request_queue_time").sum < 30.0, "the queue is the engine's");
}

#[test]
fn samples_count_one_by_one_and_as_one_request() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 128), 2);
    let first = request(&scheduler, "a", vec![1; 20], 3);
    let sample = |max_tokens| NewRequest {
        key: scheduler.handle().new_key(),
        request_id: format!("{max_tokens}").into(),
        fork_from: Some(first.key),
        params: SamplingParams { max_tokens, ..first.params.clone() },
        ..first.clone()
    };
    let group = vec![first.clone(), sample(8), sample(5)];
    scheduler.handle().add_requests(group).expect("fits");
    run(&mut scheduler);
    let metrics = scheduler.handle().metrics();
    assert_eq!(histogram(&metrics, "time_to_first_token").count(), 3);
    assert_eq!(totals(&metrics, "request_generation_tokens"), (3, 16.0));
    assert_eq!(totals(&metrics, "request_params_n"), (1, 3.0));
    assert_eq!(totals(&metrics, "request_max_num_generation_tokens"), (1, 8.0));
    // Two share all of the prompt but its last token.
    assert_eq!(counter(&metrics, "num_prompt_tokens"), 60);
    assert_eq!(counter(&metrics, "num_prompt_tokens_cached"), 2 * 19);
    assert_eq!(totals(&metrics, "request_prefill_kv_computed_tokens"), (3, 22.0));
}

#[test]
fn a_stop_is_no_abort_and_neither_is_counted_as_the_other() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 128), 2);
    let handle = scheduler.handle();
    let requests = ["a", "b", "c"].map(|id| request(&scheduler, id, vec![1; 4], 50));
    let keys = requests.clone().map(|request| request.key);
    for request in requests {
        handle.add_request(request).expect("fits");
    }
    for _ in 0..3 {
        let output = scheduler.schedule().expect("a free set").expect("running requests");
        scheduler.update_from_output(&output, TokenRows::column(&[7; 3])).expect("in flight");
    }
    handle.stop_key(keys[0]);
    handle.stop_key(keys[0]);
    handle.abort_key(keys[1]);
    handle.abort_requests(["c", "unknown"]);
    assert!(scheduler.schedule().expect("a free set").is_none());
    let mut outputs = Vec::new();
    scheduler.take_consumer().expect("taken once").drain(|output| outputs.extend(output.finish_reason));
    assert_eq!(outputs.iter().map(|reason| reason.as_str()).collect::<Vec<_>>(), ["stop", "abort", "abort"]);
    let metrics = handle.metrics();
    assert_eq!(counter(&metrics, "num_finished_stop"), 1);
    assert_eq!(counter(&metrics, "num_finished_abort"), 2);
    assert_eq!(totals(&metrics, "request_generation_tokens"), (1, 3.0), "only what is complete");
    assert_eq!(histogram(&metrics, "inter_token_latency").count(), 6);
    for gauge in ["num_running", "num_waiting", "num_queued"] {
        assert_eq!(counter(&metrics, gauge), 0, "{gauge}");
    }
}

#[test]
fn what_ends_at_its_length_with_stop_strings_counts_when_it_is_settled() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 128), 2);
    let handle = scheduler.handle();
    for id in ["a", "b", "c"] {
        let request = request(&scheduler, id, vec![1; 4], 2);
        handle.add_request(NewRequest { has_stop_strings: id != "c", ..request }).expect("fits");
    }
    run(&mut scheduler);
    let mut unsettled = 0;
    scheduler
        .take_consumer()
        .expect("taken once")
        .drain(|output| unsettled += u32::from(output.unsettled_reason().is_some()));
    assert_eq!(unsettled, 2);
    let ends = || {
        let stats = handle.stats();
        let metrics = handle.metrics();
        assert_eq!(counter(&metrics, "num_finished_stop"), stats.num_finished_stop);
        assert_eq!(counter(&metrics, "num_finished_length"), stats.num_finished_length);
        (stats.num_finished, stats.num_finished_stop, stats.num_finished_length)
    };
    assert_eq!(ends(), (3, 0, 1), "the engine cannot know it of two");
    handle.settle_end(FinishReason::Stop);
    assert_eq!(ends(), (3, 1, 1));
    handle.settle_end(FinishReason::Length);
    assert_eq!(ends(), (3, 1, 2));
    assert_eq!(
        totals(&handle.metrics(), "request_generation_tokens"),
        (3, 6.0),
        "whatever the front ends say"
    );
}

#[test]
fn refusals_are_counted_by_the_limit_that_was_met() {
    let config = SchedulerConfig {
        max_num_queued_reqs: 2,
        max_num_queued_tokens: 100,
        ..SchedulerConfig::new(64, 128)
    };
    let mut scheduler = scheduler(&config, 2);
    let handle = scheduler.handle();
    let add = |id: &str, length| handle.add_request(request(&scheduler, id, vec![1; length], 1));
    add("a", 60).expect("fits");
    add("b", 60).expect_err("too many tokens");
    add("b", 20).expect("fits");
    add("c", 1).expect_err("too many requests");
    add("c", 1).expect_err("too many requests");
    add("d", 0).expect_err("what can never run is not a matter of room");
    add("a", 1).expect_err("still full");
    run(&mut scheduler);
    handle.add_request(request(&scheduler, "e", vec![1; 4], 5)).expect("fits");
    handle
        .add_request(request(&scheduler, "e", vec![1; 4], 5))
        .expect("it is the scheduler that knows the id");
    run(&mut scheduler);
    let metrics = handle.metrics();
    assert_eq!(counter(&metrics, "num_rejected_max_num_queued_tokens"), 1);
    assert_eq!(counter(&metrics, "num_rejected_max_num_queued_reqs"), 3);
    assert_eq!(counter(&metrics, "num_finished_length"), 3);
    assert_eq!(counter(&metrics, "num_finished_error"), 1, "an id that is taken");
}

#[test]
fn a_step_that_fails_counts_its_requests_as_errors() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 128), 2);
    scheduler.handle().add_request(request(&scheduler, "a", vec![1; 4], 5)).expect("fits");
    let output = scheduler.schedule().expect("a free set").expect("a request");
    scheduler.fail_step(&output).expect("in flight");
    let metrics = scheduler.handle().metrics();
    assert_eq!(counter(&metrics, "num_finished_error"), 1);
    assert_eq!(histogram(&metrics, "e2e_request_latency").count(), 0);
    assert_eq!(histogram(&metrics, "time_to_first_token").count(), 0);
}

#[test]
fn the_parts_of_a_step_add_up_to_it() {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 128), 2);
    let times_ns = [1_000, 3_000, 7_000, 15_000, 31_000, 63_000, 127_000, 255_000];
    scheduler.record_step_phases(&times_ns);
    scheduler.record_step_phases(&times_ns);
    let metrics = scheduler.handle().metrics();
    let mut doubled = 2;
    for part in STEP_PHASES {
        let (count, sum) = totals(&metrics, &format!("step_{part}_time"));
        doubled *= 2;
        assert_eq!((count, (sum * 1e6).round() as u64), (2, doubled), "{part}");
    }
    assert_eq!(totals(&metrics, "step_time"), (2, 508e-6));
}

#[test]
fn nothing_is_measured_when_the_configuration_says_so() {
    let config = SchedulerConfig { collect_metrics: false, ..SchedulerConfig::new(64, 128) };
    let mut scheduler = scheduler(&config, 2);
    scheduler.handle().add_request(request(&scheduler, "a", vec![1; 4], 5)).expect("fits");
    run(&mut scheduler);
    let metrics = scheduler.handle().metrics();
    assert!(metrics.histograms.is_empty());
    assert_eq!(counter(&metrics, "num_generation_tokens"), 5, "what is only counted is counted");
    assert_eq!(counter(&metrics, "num_finished_length"), 1);
}

#[test]
fn buckets_for_tokens_go_up_to_the_longest_request() {
    let metrics = scheduler(&SchedulerConfig::new(64, 300), 2).handle().metrics();
    let bounds = &histogram(&metrics, "request_prompt_tokens").bounds;
    assert_eq!(*bounds, [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0]);
}
