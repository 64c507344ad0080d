//! The only access to atomics and futexes: the kernel's in production, loom's models under `cfg(loom)`.

use std::time::Duration;

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// A number that processes wait for: a shared futex.
#[cfg(not(loom))]
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct Word(AtomicU32);

#[cfg(not(loom))]
impl Word {
    pub(crate) fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }

    pub(crate) fn store(&self, value: u32, order: Ordering) {
        self.0.store(value, order);
    }

    pub(crate) fn add(&self, more: u32, order: Ordering) {
        self.0.fetch_add(more, order);
    }

    /// Sleep while the number is `seen`, at most for this long; may return earlier.
    pub(crate) fn sleep_while(&self, seen: u32, at_most: Option<Duration>) {
        use rustix::thread::futex;
        let limit = at_most.and_then(|limit| futex::Timespec::try_from(limit).ok());
        // Not PRIVATE: the sleeper and the waker are different processes. The result is ignored, because the caller
        // must look again in any case.
        let _ = futex::wait(&self.0, futex::Flags::empty(), seen, limit.as_ref());
    }

    pub(crate) fn wake_all(&self) {
        use rustix::thread::futex;
        let _ = futex::wake(&self.0, futex::Flags::empty(), i32::MAX as u32);
    }
}

/// Loom's version: the kernel compares and sleeps in one operation, as a lock and a condition variable do.
#[cfg(loom)]
#[derive(Debug, Default)]
pub(crate) struct Word {
    value: AtomicU32,
    lock: loom::sync::Mutex<()>,
    bell: loom::sync::Condvar,
}

#[cfg(loom)]
impl Word {
    pub(crate) fn load(&self, order: Ordering) -> u32 {
        self.value.load(order)
    }

    pub(crate) fn store(&self, value: u32, order: Ordering) {
        self.value.store(value, order);
    }

    pub(crate) fn add(&self, more: u32, order: Ordering) {
        self.value.fetch_add(more, order);
    }

    pub(crate) fn sleep_while(&self, seen: u32, _at_most: Option<Duration>) {
        let held = self.lock.lock().expect("no model panics while it holds the lock");
        // Acquire: the kernel's own look at the word comes after everything before the call.
        if self.value.load(Ordering::Acquire) == seen {
            drop(self.bell.wait(held));
        }
    }

    pub(crate) fn wake_all(&self) {
        drop(self.lock.lock());
        self.bell.notify_all();
    }
}
