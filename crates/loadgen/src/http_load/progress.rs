//! `Progress`: how far a run is, for a thread that watches it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters of the measured requests. They are statistics: nothing else is read because of them, so Relaxed does.
#[derive(Debug, Default)]
pub(super) struct Progress {
    completed: AtomicU64,
    failed: AtomicU64,
    events: AtomicU64,
    is_warmup: AtomicU64,
}

/// The counters at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ProgressCounts {
    /// Requests that came to their end.
    pub completed: u64,
    /// Requests that did not.
    pub failed: u64,
    /// Events with text of all requests.
    pub events: u64,
    /// The requests are still those before the measured ones.
    pub is_warmup: bool,
}

impl Progress {
    pub(super) fn start_phase(&self, is_warmup: bool) {
        for counter in [&self.completed, &self.failed, &self.events] {
            counter.store(0, Relaxed);
        }
        self.is_warmup.store(u64::from(is_warmup), Relaxed);
    }

    pub(super) fn add_events(&self, count: u64) {
        self.events.fetch_add(count, Relaxed);
    }

    pub(super) fn add_request(&self, failed: bool) {
        if failed { &self.failed } else { &self.completed }.fetch_add(1, Relaxed);
    }

    pub(super) fn counts(&self) -> ProgressCounts {
        ProgressCounts {
            completed: self.completed.load(Relaxed),
            failed: self.failed.load(Relaxed),
            events: self.events.load(Relaxed),
            is_warmup: self.is_warmup.load(Relaxed) != 0,
        }
    }
}
