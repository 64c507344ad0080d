//! `Gate`: a number that only rises, and lets others wait until it has.

use std::time::{Duration, Instant};

use crate::sync::{AtomicU32, Ordering, Word, fence};

/// How often a spinning waiter looks at the number between two looks at the clock.
#[cfg(not(loom))]
const LOOKS: u32 = 64;

/// A number that one side raises by one at a time, wrapping around, and that others wait for.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Gate {
    number: Word,
    sleepers: AtomicU32,
}

impl Gate {
    /// The number. What was written before it was raised is visible after this call.
    pub(crate) fn number(&self) -> u32 {
        // Acquire: pairs with the store in `raise`, so that what the number announces is seen with it.
        self.number.load(Ordering::Acquire)
    }

    /// Set the number to `to` and wake the sleepers.
    pub(crate) fn raise(&self, to: u32) {
        // Release: publishes what was written before.
        self.number.store(to, Ordering::Release);
        self.wake();
    }

    /// Raise the number by one; several sides may do so.
    pub(crate) fn count(&self) {
        // Release: publishes what was written before.
        self.number.add(1, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        // SeqCst, like the fence in `wait`: either this side sees the sleeper, or the sleeper sees the number.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            self.number.wake_all();
        }
    }

    /// Wake the sleepers without changing the number; they then check what else they wait for.
    #[cfg(not(loom))]
    pub(crate) fn ring(&self) {
        self.number.wake_all();
    }

    /// Wait for a number; `None` at the deadline.
    ///
    /// # Arguments
    /// * `is_there`: whether a number is enough; once true, it must stay true.
    /// * `spin`: how long to spin before sleeping.
    /// * `deadline`: when to give up.
    pub(crate) fn wait(
        &self,
        is_there: impl Fn(u32) -> bool,
        spin: Duration,
        deadline: Option<Instant>,
    ) -> Option<u32> {
        let now = self.number();
        if is_there(now) {
            return Some(now);
        }
        if let Some(found) = self.spin(&is_there, spin) {
            return Some(found);
        }
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        // SeqCst: see `raise`.
        fence(Ordering::SeqCst);
        let found = loop {
            let now = self.number();
            if is_there(now) {
                break Some(now);
            }
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                break None;
            }
            self.number.sleep_while(now, left);
        };
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        found
    }

    #[cfg(not(loom))]
    fn spin(&self, is_there: &impl Fn(u32) -> bool, spin: Duration) -> Option<u32> {
        let began = Instant::now();
        while began.elapsed() < spin {
            for _ in 0..LOOKS {
                let now = self.number();
                if is_there(now) {
                    return Some(now);
                }
                std::hint::spin_loop();
            }
        }
        None
    }

    #[cfg(loom)]
    fn spin(&self, _is_there: &impl Fn(u32) -> bool, _spin: Duration) -> Option<u32> {
        None
    }
}

/// Whether sequence number `number` is `wanted` or a later one, considering that numbers wrap around.
pub(crate) fn has_reached(number: u32, wanted: u32) -> bool {
    (number.wrapping_sub(wanted) as i32) >= 0
}
