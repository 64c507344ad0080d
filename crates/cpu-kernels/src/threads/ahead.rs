//! What threads read while they wait: the beginning of the next product's weights, so that memory does not wait with them.

use std::{
    ptr,
    sync::atomic::{AtomicPtr, AtomicUsize, Ordering},
};

use crate::lines::{LINE, ask_for};

/// The most that a thread asks for before the product begins: half of what the second cache of most servers holds.
const MOST: usize = 512 << 10;
/// Lines that are asked for between two looks at whether the product has begun.
const TOGETHER: usize = 2;

/// Arrays of as many parts, which threads begin with in stretches of their own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ahead {
    /// Of each array the first byte, and the bytes of a part.
    pub(crate) arrays: [(*const u8, usize); 2],
    pub(crate) num_parts: usize,
}

/// What was announced last. Threads that see halves of two announcements ask for memory that they do not need, which changes
/// nothing but their time; so nothing here is ordered.
#[derive(Debug, Default)]
pub(crate) struct Announced {
    arrays: [(AtomicPtr<u8>, AtomicUsize); 2],
    num_parts: AtomicUsize,
}

impl Announced {
    /// The next call is expected to read this; None if that is not known.
    pub(crate) fn set(&self, ahead: Option<Ahead>) {
        if let Some(Ahead { arrays, .. }) = ahead {
            for ((start, bytes), (new_start, new_bytes)) in self.arrays.iter().zip(arrays) {
                // Relaxed: see the type.
                start.store(new_start.cast_mut(), Ordering::Relaxed);
                bytes.store(new_bytes, Ordering::Relaxed);
            }
        }
        // Relaxed: see the type.
        self.num_parts.store(ahead.map_or(0, |ahead| ahead.num_parts), Ordering::Relaxed);
    }

    /// What one of some threads begins with.
    fn stretches(&self, thread: usize, num_threads: usize) -> [Stretch; 2] {
        // Relaxed: see the type.
        let num_parts = self.num_parts.load(Ordering::Relaxed);
        let (first, end) = (num_parts * thread / num_threads, num_parts * (thread + 1) / num_threads);
        let mut left = MOST;
        self.arrays.each_ref().map(|(start, bytes)| {
            // Relaxed: see the type.
            let (start, bytes) = (start.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed));
            let len = bytes.saturating_mul(end - first).min(left);
            left -= len;
            Stretch { begin: start.wrapping_add(bytes.wrapping_mul(first)), len }
        })
    }
}

/// Bytes that one thread begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stretch {
    begin: *const u8,
    len: usize,
}

/// A thread's way through what was announced.
#[derive(Debug)]
pub(crate) struct Reader {
    thread: usize,
    num_threads: usize,
    stretches: [Stretch; 2],
    /// Bytes of the first, and then of the second, that were asked for.
    done: usize,
}

impl Reader {
    /// Of one of so many threads.
    pub(crate) fn new(thread: usize, num_threads: usize) -> Self {
        Self { thread, num_threads, stretches: [Stretch { begin: ptr::null(), len: 0 }; 2], done: 0 }
    }

    /// Look at what is announced now; a reader that has seen it goes on where it was.
    pub(crate) fn look(&mut self, announced: &Announced) {
        let stretches = announced.stretches(self.thread, self.num_threads);
        if stretches != self.stretches {
            (self.stretches, self.done) = (stretches, 0);
        }
    }

    /// Ask for the next lines; whether there were any.
    pub(crate) fn ask(&mut self) -> bool {
        let mut at = self.done;
        for stretch in &self.stretches {
            if at < stretch.len {
                ask_for(stretch.begin.wrapping_add(at), TOGETHER * LINE);
                self.done += TOGETHER * LINE;
                return true;
            }
            // A stretch may end within the lines that were asked for together.
            at -= stretch.len.next_multiple_of(TOGETHER * LINE);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announced(part_bytes: [usize; 2], num_parts: usize) -> Announced {
        let announced = Announced::default();
        let arrays = [
            (ptr::without_provenance(1 << 20), part_bytes[0]),
            (ptr::without_provenance(1 << 30), part_bytes[1]),
        ];
        announced.set(Some(Ahead { arrays, num_parts }));
        announced
    }

    fn num_asked(reader: &mut Reader) -> usize {
        (0..1 << 20).take_while(|_| reader.ask()).count()
    }

    #[test]
    fn each_thread_has_the_stretches_that_it_begins_with() {
        let announced = announced([100, 1000], 7);
        let begins = [0, 1].map(|thread| announced.stretches(thread, 2).map(|stretch| stretch.begin.addr()));
        assert_eq!(begins, [[1 << 20, 1 << 30], [(1 << 20) + 300, (1 << 30) + 3000]]);
        let lens = [0, 1].map(|thread| announced.stretches(thread, 2).map(|stretch| stretch.len));
        assert_eq!(lens, [[300, 3000], [400, 4000]]);
    }

    #[test]
    fn a_reader_asks_for_all_once_and_begins_anew_with_another_announcement() {
        let first = announced([100, 1000], 7);
        let mut reader = Reader::new(0, 2);
        reader.look(&first);
        assert_eq!(num_asked(&mut reader), 300_usize.div_ceil(128) + 3000_usize.div_ceil(128));
        reader.look(&first);
        assert_eq!(num_asked(&mut reader), 0);
        first.set(None);
        reader.look(&first);
        assert_eq!(num_asked(&mut reader), 0);
        reader.look(&announced([0, 1 << 30], 2));
        assert_eq!(num_asked(&mut reader), MOST / 128);
    }
}
