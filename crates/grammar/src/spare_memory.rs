//! Memory that a compiler or a large lexer has freed, and that the allocator keeps.
//!
//! To compile a schema may take a hundred megabytes for half a second. The allocator keeps what was freed for the thread that
//! freed it, and other threads take new memory: after a few such schemas a process is several hundred megabytes larger than
//! what it holds. So the threads that did such work ask the allocator to give the memory back to the system.

use std::{sync::OnceLock, time::Duration};

use crate::thread_time::thread_time;

/// Processor time of a compile from which on it may have freed much: usual ones take a millisecond.
const LONG_COMPILE: Duration = Duration::from_millis(20);
/// Bytes of a matcher from which on it is much itself.
const LARGE_MATCHER_BYTES: usize = 4 << 20;

static GIVE_BACK: OnceLock<fn()> = OnceLock::new();

/// Say how the process gives memory back; how it is done depends on its allocator. The first that says it is believed.
pub fn give_back_memory_with(give_back: fn()) {
    let _ = GIVE_BACK.set(give_back); // another one would do the same
}

/// Do work that may free much, then give memory back if it took long.
pub(crate) fn giving_back<T>(work: impl FnOnce() -> T) -> T {
    let begin = thread_time();
    let result = work();
    if thread_time().saturating_sub(begin) >= LONG_COMPILE {
        give_back();
    }
    result
}

/// Give memory back after a matcher of so many bytes was dropped.
pub(crate) fn after_dropping(num_bytes: usize) {
    if num_bytes >= LARGE_MATCHER_BYTES {
        give_back();
    }
}

fn give_back() {
    if let Some(give_back) = GIVE_BACK.get() {
        give_back();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::{LARGE_MATCHER_BYTES, LONG_COMPILE, after_dropping, give_back_memory_with, giving_back};
    use crate::thread_time::thread_time;

    thread_local! {
        static NUM_CALLS: Cell<usize> = const { Cell::new(0) };
    }

    fn count() {
        NUM_CALLS.set(NUM_CALLS.get() + 1);
    }

    #[test]
    fn memory_is_given_back_after_much_work_and_large_matchers_alone() {
        give_back_memory_with(count);
        assert_eq!(giving_back(|| 1), 1);
        after_dropping(LARGE_MATCHER_BYTES - 1);
        assert_eq!(NUM_CALLS.get(), 0);
        let work = || {
            let begin = thread_time();
            while thread_time().saturating_sub(begin) < 2 * LONG_COMPILE {}
            2
        };
        assert_eq!(giving_back(work), 2);
        assert_eq!(NUM_CALLS.get(), 1);
        after_dropping(LARGE_MATCHER_BYTES);
        assert_eq!(NUM_CALLS.get(), 2);
    }
}
