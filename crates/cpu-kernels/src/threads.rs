//! Threads that share out the tiles of a layer. They sleep while there is nothing to do.

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// The calling thread and its helpers.
#[derive(Debug)]
pub struct Threads {
    /// None: the caller works alone.
    helpers: Option<ThreadPool>,
}

impl Threads {
    /// The caller and `num_threads − 1` helpers; at least the caller.
    ///
    /// # Errors
    ///
    /// The system starts no more threads.
    pub fn new(num_threads: usize) -> Result<Self, ThreadPoolBuildError> {
        let helpers = match num_threads.saturating_sub(1) {
            0 => None,
            helpers => {
                let builder = ThreadPoolBuilder::new().num_threads(helpers);
                Some(builder.thread_name(|i| format!("attention-{i}")).build()?)
            }
        };
        Ok(Self { helpers })
    }

    /// How many threads work, the caller included.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        1 + self.helpers.as_ref().map_or(0, ThreadPool::current_num_threads)
    }

    /// Call `work` for 0 up to `num_parts`, each once, in no order and on any thread; alone when not `shared`.
    ///
    /// The caller works, too: when the helpers are slow to wake it may be done before they begin.
    pub(crate) fn for_each(&self, num_parts: usize, shared: bool, work: impl Fn(usize) + Sync) {
        let next = AtomicUsize::new(0);
        let take_parts = || {
            loop {
                // Relaxed: the number is all that is taken; what was done is seen when the scope ends.
                let part = next.fetch_add(1, Ordering::Relaxed);
                if part >= num_parts {
                    break;
                }
                work(part);
            }
        };
        match &self.helpers {
            Some(pool) if shared && num_parts > 1 => pool.in_place_scope(|scope| {
                for _ in 0..pool.current_num_threads().min(num_parts - 1) {
                    scope.spawn(|_| take_parts());
                }
                take_parts();
            }),
            _ => (0..num_parts).for_each(work),
        }
    }
}
