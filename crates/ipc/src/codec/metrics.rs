//! `Metrics`: counters and histograms by name, so that an engine may send some that its client does not know.

use std::borrow::Cow;

use scheduler::{HistogramSnapshot, MetricsSnapshot};

use crate::{
    error::DecodeError,
    wire::{Reader, Writer},
};

/// Fewest bytes of a counter, and of a histogram.
const LEAST_COUNTER_BYTES: usize = 12;
const LEAST_HISTOGRAM_BYTES: usize = 24;

/// Append the body.
pub(crate) fn encode(id: u64, metrics: &MetricsSnapshot, body: &mut Vec<u8>) {
    let mut body = Writer(body);
    body.u64(id);
    body.u32(metrics.counters.len() as u32);
    for (name, value) in &metrics.counters {
        body.str(name);
        body.u64(*value);
    }
    body.u32(metrics.histograms.len() as u32);
    for (name, histogram) in &metrics.histograms {
        body.str(name);
        body.u32(histogram.bounds.len() as u32);
        for bound in &histogram.bounds {
            body.f64(*bound);
        }
        for count in &histogram.counts {
            body.u64(*count);
        }
        body.f64(histogram.sum);
    }
}

/// Read the body.
pub(crate) fn decode(body: &mut Reader<'_>) -> Result<(u64, MetricsSnapshot), DecodeError> {
    let id = body.u64()?;
    let mut metrics = MetricsSnapshot::default();
    for _ in 0..body.count(LEAST_COUNTER_BYTES)? {
        let name = body.str()?.to_owned();
        metrics.counters.push((Cow::Owned(name), body.u64()?));
    }
    for _ in 0..body.count(LEAST_HISTOGRAM_BYTES)? {
        let name = body.str()?.to_owned();
        let num_bounds = body.count(16)?;
        let bounds = (0..num_bounds).map(|_| body.f64()).collect::<Result<_, _>>()?;
        let counts = (0..=num_bounds).map(|_| body.u64()).collect::<Result<_, _>>()?;
        metrics.histograms.push((Cow::Owned(name), HistogramSnapshot { bounds, counts, sum: body.f64()? }));
    }
    Ok((id, metrics))
}
