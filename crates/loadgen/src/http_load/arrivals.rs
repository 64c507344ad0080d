//! `arrivals`: when each request is sent.

use std::time::Duration;

use super::{options::Rate, random::Random};

/// Purpose of the random numbers of arrivals; prompts use the numbers of their requests.
const PURPOSE: u64 = u64::MAX;

/// Seconds after the start for each of `num_requests` requests, not falling.
///
/// The gaps are gamma-distributed (exponential with a burstiness of 1) and then scaled so that the last request comes
/// when it would at an even rate: runs of different seeds last equally long.
#[must_use]
pub fn arrivals(rate: Rate, num_requests: usize, seed: u64) -> Vec<Duration> {
    let Rate::PerSecond { rate, burstiness } = rate else {
        return vec![Duration::ZERO; num_requests];
    };
    let mut random = Random::new(seed, PURPOSE);
    let mut sum = 0.0;
    let sums: Vec<f64> = (0..num_requests)
        .map(|_| {
            sum += random.gamma(burstiness);
            sum
        })
        .collect();
    let scale = if sum > 0.0 { num_requests as f64 / rate / sum } else { 0.0 };
    sums.into_iter().map(|at| Duration::from_secs_f64(at * scale)).collect()
}
