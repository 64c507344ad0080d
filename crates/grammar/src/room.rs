//! What the matchers of an engine may take of memory, all together.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// Bytes of what live matchers have found out about their grammars. A usual one has some hundred kilobytes, the largest
/// that the limits of a lexer allow a hundred megabytes: without a bound a few dozen of these fill a machine.
pub(crate) const MAX_MATCHER_BYTES: usize = 512 << 20;

/// Bytes that are taken, and by how many.
///
/// All loads and stores are relaxed: each number stands for itself, no other memory is published by it, and a sum that is
/// late by a step only moves the bound by that step.
#[derive(Debug, Default)]
pub(crate) struct Room {
    used: AtomicUsize,
    num_charges: AtomicUsize,
}

impl Room {
    /// Whether one more may begin.
    pub(crate) fn is_left(&self) -> bool {
        self.used.load(Ordering::Relaxed) < MAX_MATCHER_BYTES // see `Room`
    }
}

/// What one matcher takes; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    room: Arc<Room>,
    num_bytes: usize,
}

impl Charge {
    /// Of one that takes nothing yet.
    pub(crate) fn new(room: Arc<Room>) -> Self {
        room.num_charges.fetch_add(1, Ordering::Relaxed); // see `Room`
        Self { room, num_bytes: 0 }
    }

    /// The matcher has so many bytes now. False where there is no room for all and it has more than an equal share: then it
    /// must go.
    #[must_use]
    pub(crate) fn set(&mut self, num_bytes: usize) -> bool {
        // Both see `Room`. Added before subtracted: the sum never falls below what is taken.
        let before = self.room.used.fetch_add(num_bytes, Ordering::Relaxed);
        self.room.used.fetch_sub(self.num_bytes, Ordering::Relaxed);
        let all = before + num_bytes - self.num_bytes;
        let has_grown = num_bytes > self.num_bytes;
        self.num_bytes = num_bytes;
        let share = MAX_MATCHER_BYTES / self.room.num_charges.load(Ordering::Relaxed).max(1); // see `Room`
        !has_grown || all <= MAX_MATCHER_BYTES || num_bytes <= share
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.room.used.fetch_sub(self.num_bytes, Ordering::Relaxed); // see `Room`
        self.room.num_charges.fetch_sub(1, Ordering::Relaxed); // see `Room`
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Charge, MAX_MATCHER_BYTES, Room};

    #[test]
    fn the_one_that_grows_beyond_its_share_must_go() {
        let room = Arc::new(Room::default());
        let (mut small, mut large) = (Charge::new(room.clone()), Charge::new(room.clone()));
        assert!(large.set(MAX_MATCHER_BYTES - 10), "alone it may have it all");
        assert!(room.is_left());
        assert!(small.set(1000), "it has less than its share");
        assert!(!room.is_left(), "none begins");
        assert!(large.set(MAX_MATCHER_BYTES - 10), "what does not grow stays");
        assert!(!large.set(MAX_MATCHER_BYTES - 9));
        drop(large);
        assert!(room.is_left());
        assert!(small.set(MAX_MATCHER_BYTES));
    }
}
