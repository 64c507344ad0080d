//! `HttpLoadReport`: many records as a few numbers.

use std::{collections::BTreeMap, time::Duration};

use super::{
    options::Goodput,
    record::{Failure, Record},
};

/// Numbers of one kind: mean, median, population standard deviation, extremes and percentiles (linear interpolation).
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Distribution {
    /// How many numbers; with none all the rest is 0.
    pub count: usize,
    /// Mean.
    pub mean: f64,
    /// Median.
    pub median: f64,
    /// Standard deviation.
    pub std: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// As asked for, in the order asked for.
    pub percentiles: Vec<f64>,
}

impl Distribution {
    /// Of any numbers that are not NaN.
    #[must_use]
    pub fn of(mut values: Vec<f64>, percentiles: &[f64]) -> Self {
        let count = values.len();
        if count == 0 {
            return Self { percentiles: vec![0.0; percentiles.len()], ..Self::default() };
        }
        values.sort_unstable_by(f64::total_cmp);
        let mean = values.iter().sum::<f64>() / count as f64;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count as f64;
        Self {
            count,
            mean,
            median: percentile(&values, 50.0),
            std: variance.sqrt(),
            min: values[0],
            max: values[count - 1],
            percentiles: percentiles.iter().map(|&at| percentile(&values, at)).collect(),
        }
    }
}

/// Of sorted numbers, at least one.
fn percentile(sorted: &[f64], at: f64) -> f64 {
    let place = at / 100.0 * (sorted.len() - 1) as f64;
    let below = sorted[place.floor() as usize];
    let above = sorted[place.ceil() as usize];
    below + (above - below) * place.fract()
}

/// Failures of one kind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FailureCount {
    /// How many.
    pub count: u64,
    /// What the first one said.
    pub first: String,
}

/// What is known of a run as a whole, in addition to the records of its requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunTotals {
    /// From the first request to the end of the last one.
    pub duration: Duration,
    /// Requests open at a time, at most.
    pub max_concurrent_requests: usize,
    /// Processor time of the thread that makes the load.
    pub client_cpu: Duration,
}

/// What a run brought. Times and tokens are those of completed requests.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct HttpLoadReport {
    /// From the first request to the end of the last one.
    pub duration: Duration,
    /// Requests whose stream came to its end.
    pub completed: u64,
    /// The others, by kind.
    pub failures: BTreeMap<String, FailureCount>,
    /// Tokens of prompts.
    pub input_tokens: u64,
    /// Completed requests whose prompt has an unknown length.
    pub requests_of_unknown_input: u64,
    /// Tokens of answers.
    pub output_tokens: u64,
    /// Completed requests without a count from the server: each event was taken for one token.
    pub requests_without_usage: u64,
    /// Completed requests within every limit; None: there was none.
    pub good: Option<u64>,
    /// Events with text.
    pub events: u64,
    /// Events with text, of each request.
    pub events_per_request: Distribution,
    /// Milliseconds to the first event with text.
    pub ttft_ms: Distribution,
    /// Milliseconds per output token after the first, of each request with two tokens or more.
    pub tpot_ms: Distribution,
    /// Milliseconds between one event with text and the next.
    pub itl_ms: Distribution,
    /// Milliseconds to the last event with a choice.
    pub e2el_ms: Distribution,
    /// Requests open at a time, at most.
    pub max_concurrent_requests: usize,
    /// Bytes of all answers' bodies.
    pub bytes_received: u64,
    /// Processor time of the thread that makes the load, while it was measured.
    pub client_cpu: Duration,
    /// Every request, in the order in which they were sent; none where only their numbers were given.
    pub records: Vec<Record>,
}

fn milliseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e6
}

impl HttpLoadReport {
    /// Sum up a run.
    #[must_use]
    pub fn of(totals: RunTotals, records: &[Record], percentiles: &[f64], goodput: Goodput) -> Self {
        let mut failures: BTreeMap<String, FailureCount> = BTreeMap::new();
        for failure in records.iter().filter_map(|record| record.failure.as_ref()) {
            failures
                .entry(failure.kind())
                .or_insert_with(|| FailureCount { count: 0, first: failure.to_string() })
                .count += 1;
        }
        let completed: Vec<&Record> = records.iter().filter(|record| record.failure.is_none()).collect();
        let sum = |of: fn(&Record) -> u64| completed.iter().map(|record| of(record)).sum::<u64>();
        let distribution = |of: fn(&Record) -> Option<f64>| {
            Distribution::of(completed.iter().filter_map(|record| of(record)).collect(), percentiles)
        };
        let gaps = completed.iter().flat_map(|record| &record.gaps_ns).map(|&gap| gap as f64 / 1e6);
        Self {
            duration: totals.duration,
            completed: completed.len() as u64,
            failures,
            input_tokens: sum(|record| record.num_prompt_tokens.unwrap_or(0)),
            requests_of_unknown_input: sum(|record| u64::from(record.num_prompt_tokens.is_none())),
            output_tokens: sum(Record::output_tokens),
            requests_without_usage: sum(|record| u64::from(record.num_output_tokens.is_none())),
            good: goodput
                .is_asked_for()
                .then(|| completed.iter().filter(|record| is_good(record, goodput)).count() as u64),
            events: sum(|record| record.num_events),
            events_per_request: distribution(|record| Some(record.num_events as f64)),
            ttft_ms: distribution(|record| Some(milliseconds(record.first_token))),
            tpot_ms: distribution(|record| record.time_per_token().map(milliseconds)),
            itl_ms: Distribution::of(gaps.collect(), percentiles),
            e2el_ms: distribution(|record| Some(milliseconds(record.end))),
            max_concurrent_requests: totals.max_concurrent_requests,
            bytes_received: sum(|record| record.num_bytes),
            client_cpu: totals.client_cpu,
            records: Vec::new(),
        }
    }

    /// Requests that did not come to their end.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.failures.values().map(|failure| failure.count).sum()
    }
}

fn is_good(record: &Record, goodput: Goodput) -> bool {
    let within = |time: Duration, limit: Option<f64>| limit.is_none_or(|limit| milliseconds(time) <= limit);
    within(record.first_token, goodput.ttft_ms)
        && within(record.time_per_token().unwrap_or_default(), goodput.tpot_ms)
        && within(record.end, goodput.e2el_ms)
}

/// The first failure of a run; `None` if every request was answered.
pub(super) fn first_failure(records: &[Record]) -> Option<&Failure> {
    records.iter().find_map(|record| record.failure.as_ref())
}
