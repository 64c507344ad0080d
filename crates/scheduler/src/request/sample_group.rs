//! `SampleGroup`: the samples of one request, as far as they are counted, and paused, together.

use std::sync::{
    Arc,
    // std's atomics also under loom: the numbers order nothing.
    atomic::{AtomicBool, AtomicU32, Ordering},
};

/// Samples of one request: what is counted of all of them together, when the last has ended, and whether any has begun.
#[derive(Debug)]
pub(crate) struct SampleGroup {
    pub(crate) num_samples: u32,
    // Touched by the scheduler's thread alone; atomics, because a scheduler may move to another thread.
    num_left: AtomicU32,
    longest: AtomicU32,
    num_completed: AtomicU32,
    has_begun: AtomicBool,
}

impl SampleGroup {
    pub(crate) fn new(num_samples: u32) -> Arc<Self> {
        Arc::new(Self {
            num_samples,
            num_left: AtomicU32::new(num_samples),
            longest: AtomicU32::new(0),
            num_completed: AtomicU32::new(0),
            has_begun: AtomicBool::new(false),
        })
    }

    /// A sample is admitted.
    pub(crate) fn begin(&self) {
        self.has_begun.store(true, Ordering::Relaxed);
    }

    /// Whether a sample was admitted.
    pub(crate) fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::Relaxed)
    }

    /// A sample has ended, completed with so many tokens or not. The longest, when it was the last and any was
    /// completed.
    pub(crate) fn end_sample(&self, completed: Option<u32>) -> Option<u32> {
        // Relaxed everywhere: one thread.
        if let Some(num_tokens) = completed {
            self.longest.fetch_max(num_tokens, Ordering::Relaxed);
            self.num_completed.fetch_add(1, Ordering::Relaxed);
        }
        let is_last = self.num_left.fetch_sub(1, Ordering::Relaxed) == 1;
        let any = self.num_completed.load(Ordering::Relaxed) > 0;
        (is_last && any).then(|| self.longest.load(Ordering::Relaxed))
    }
}
