//! `Histogram`: counts values by bucket. One thread writes, any thread reads, and neither waits.

// std's atomics also under loom: the numbers order nothing.
use std::sync::atomic::{AtomicU64, Ordering};

/// The unit of the observations, and of what is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unit {
    /// Observed in nanoseconds, shown in seconds.
    Time,
    /// Shown unchanged.
    Count,
}

impl Unit {
    fn observed_per_shown(self) -> f64 {
        match self {
            Self::Time => 1e9,
            Self::Count => 1.0,
        }
    }
}

/// See the module docs. The bounds are fixed.
#[derive(Debug)]
pub(crate) struct Histogram {
    unit: Unit,
    /// Upper bounds in the unit that is shown, ascending; a value equal to a bound is in its bucket.
    shown_bounds: Box<[f64]>,
    /// The same bounds in the unit that is observed.
    bounds: Box<[u64]>,
    /// The count of each bucket, and of the values above the last bound.
    counts: Box<[AtomicU64]>,
    /// The sum of all values, as the bits of an `f64`: a whole number of nanoseconds would overflow after a few months
    /// of many streams.
    sum: AtomicU64,
}

/// A copy of a histogram, in the unit that is shown.
#[derive(Clone, PartialEq, Debug)]
pub struct HistogramSnapshot {
    /// Upper bounds of the buckets, ascending; the last bucket has none.
    pub bounds: Vec<f64>,
    /// Number of values in each bucket alone; one more than there are bounds.
    pub counts: Vec<u64>,
    /// The sum of all values.
    pub sum: f64,
}

impl HistogramSnapshot {
    /// How many values were observed.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

impl Histogram {
    /// Make an empty histogram with ascending bounds, in the unit that is shown.
    pub(crate) fn new(unit: Unit, shown_bounds: &[f64]) -> Self {
        debug_assert!(shown_bounds.is_sorted(), "bounds ascend");
        let observed = |bound: &f64| (bound * unit.observed_per_shown()).round() as u64;
        Self {
            unit,
            shown_bounds: shown_bounds.into(),
            bounds: shown_bounds.iter().map(observed).collect(),
            counts: (0..=shown_bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
        }
    }

    /// Count a value. Only one thread may write.
    pub(crate) fn observe(&self, value: u64) {
        self.observe_times(value, 1);
    }

    /// Count a value `times` times.
    pub(crate) fn observe_times(&self, value: u64, times: u64) {
        let bucket = self.bounds.partition_point(|&bound| bound < value);
        add(&self.counts[bucket], times);
        // Relaxed: see `add`.
        let sum = f64::from_bits(self.sum.load(Ordering::Relaxed)) + value as f64 * times as f64;
        self.sum.store(sum.to_bits(), Ordering::Relaxed);
    }

    /// Copy the current content. While a value is being added, it may be in the buckets and not in the sum yet.
    pub(crate) fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            bounds: self.shown_bounds.to_vec(),
            counts: self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
            sum: f64::from_bits(self.sum.load(Ordering::Relaxed)) / self.unit.observed_per_shown(),
        }
    }
}

/// A load and a store: only one thread writes, so no addition is lost, and no atomic addition is needed.
fn add(number: &AtomicU64, times: u64) {
    // Relaxed: each number is exact by itself, and orders no other.
    number.store(number.load(Ordering::Relaxed) + times, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::{Histogram, Unit};

    #[test]
    fn a_value_belongs_to_the_first_bound_that_is_not_below_it() {
        let histogram = Histogram::new(Unit::Count, &[1.0, 10.0]);
        for value in [0, 1, 2, 10, 11, 1000] {
            histogram.observe(value);
        }
        histogram.observe_times(5, 3);
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.counts, [2, 2 + 3, 2]);
        assert_eq!((snapshot.count(), snapshot.sum), (9, 1024.0 + 15.0));
    }

    #[test]
    fn times_are_shown_in_seconds() {
        let histogram = Histogram::new(Unit::Time, &[0.001, 0.3]);
        histogram.observe(1_000_000);
        histogram.observe(1_000_001);
        histogram.observe(300_000_000);
        let snapshot = histogram.snapshot();
        assert_eq!((snapshot.bounds, snapshot.counts), (vec![0.001, 0.3], vec![1, 2, 0]));
        assert!((snapshot.sum - 0.302_000_001).abs() < 1e-12);
    }
}
