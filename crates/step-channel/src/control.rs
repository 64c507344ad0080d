//! `Control`: who may write and who may read which slot, and what each reader reports.
//!
//! Frames have sequence numbers, which start at 1 and wrap around at 32 bits. Frame `n` lies in slot `n mod NUM_SLOTS`.
//! It is written once every reader has taken frame `n - NUM_SLOTS`, and read once "published" is `n`.

use std::time::{Duration, Instant};

use crate::{
    gate::{Gate, has_reached},
    sync::{AtomicU32, AtomicU64, Ordering},
};

/// Most readers of one channel.
#[cfg(not(loom))]
pub const MAX_READERS: usize = 63;
/// In loom's model every atomic costs time.
#[cfg(loom)]
pub const MAX_READERS: usize = 2;
/// Most frames that were published and not yet taken: as many steps as the scheduler lets overlap. A power of two, so
/// that the numbers can wrap around. A slot takes memory once it is first written.
#[cfg(not(loom))]
pub const NUM_SLOTS: u32 = 16;
/// The smallest ring, in which a slot is used again soonest.
#[cfg(loom)]
pub const NUM_SLOTS: u32 = 1;
/// How long a reader spins for the next frame before it sleeps.
pub(crate) const SPIN: Duration = Duration::from_micros(50);

/// What one reader reports. Only that reader writes the fields.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct Line {
    /// The last frame that it no longer needs, so that its slot may be used again.
    pub(crate) taken: Gate,
    /// The last frame that it has executed.
    pub(crate) done: Gate,
    /// 1 if it cannot follow any more.
    pub(crate) failed: AtomicU32,
    /// A number for what it waits in; 0: it computes or is idle.
    pub(crate) activity: AtomicU32,
    /// Its answer to the last command.
    pub(crate) value: AtomicU64,
    /// When the activity changed (ns, monotonic).
    pub(crate) since_ns: AtomicU64,
    /// Total time in activities that have ended (ns).
    pub(crate) activity_ns: AtomicU64,
    /// Number of activities that have ended.
    pub(crate) activities: AtomicU64,
}

/// The first part of the channel's memory.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Control {
    /// Identifies the memory; written before any reader looks.
    pub(crate) magic: AtomicU64,
    pub(crate) num_readers: AtomicU32,
    /// 1 if the writer is gone.
    pub(crate) closed: AtomicU32,
    /// Where the slots begin in the memory, and the size of each. These change only while every frame has been taken.
    pub(crate) slots_start: AtomicU64,
    pub(crate) slot_bytes: AtomicU64,
    /// The last frame that was published.
    pub(crate) published: Gate,
    pub(crate) lines: [Line; MAX_READERS],
    /// Counts each time a reader took a frame, executed one or failed; a node reports that to the head.
    pub(crate) news: Gate,
}

impl Control {
    /// Wait until the slot of frame `number` may be written; otherwise returns the index of the first reader that was
    /// late.
    pub(crate) fn wait_free(&self, number: u32, deadline: Option<Instant>) -> Result<(), usize> {
        let before = number.wrapping_sub(NUM_SLOTS);
        self.wait_lines(|line| &line.taken, before, Duration::ZERO, deadline)
    }

    /// Wait until every reader has executed frame `number`; otherwise returns the first that was late.
    pub(crate) fn wait_done(&self, number: u32, deadline: Option<Instant>) -> Result<(), usize> {
        self.wait_lines(|line| &line.done, number, SPIN, deadline)
    }

    /// Whether every reader has taken frame `number`.
    pub(crate) fn is_taken(&self, number: u32) -> bool {
        self.lines().iter().all(|line| has_reached(line.taken.number(), number))
    }

    fn wait_lines(
        &self,
        gate: impl Fn(&Line) -> &Gate,
        wanted: u32,
        spin: Duration,
        deadline: Option<Instant>,
    ) -> Result<(), usize> {
        for (index, line) in self.lines().iter().enumerate() {
            gate(line).wait(|number| has_reached(number, wanted), spin, deadline).ok_or(index)?;
        }
        Ok(())
    }

    /// Announce frame `number`, which lies in its slot.
    pub(crate) fn publish(&self, number: u32) {
        self.published.raise(number);
    }

    /// Wait for the frame after `seen`; `None` if there was none in time.
    pub(crate) fn next(&self, seen: u32, deadline: Option<Instant>) -> Option<u32> {
        // One frame at a time: a reader that lags takes every frame in turn.
        let next = seen.wrapping_add(1);
        self.published.wait(|number| has_reached(number, next) || self.is_closed(), SPIN, deadline)?;
        has_reached(self.published.number(), next).then_some(next)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed) != 0
    }

    /// The lines of the channel's readers.
    pub(crate) fn lines(&self) -> &[Line] {
        &self.lines[..(self.num_readers.load(Ordering::Relaxed) as usize).min(MAX_READERS)]
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;

    struct Model {
        control: Control,
        slots: [UnsafeCell<u32>; NUM_SLOTS as usize],
    }

    // SAFETY: the protocol under test must keep two threads out of one slot; loom's cell reports where it does not.
    unsafe impl Sync for Model {}
    // SAFETY: it holds numbers and loom's own objects, which may move to another thread.
    unsafe impl Send for Model {}

    fn model(num_readers: u32, first: u32) -> Model {
        let lines = std::array::from_fn(|index| {
            let line = Line::default();
            if index < num_readers as usize {
                line.taken.raise(first.wrapping_sub(1));
                line.done.raise(first.wrapping_sub(1));
            }
            line
        });
        let control = Control {
            magic: AtomicU64::new(0),
            num_readers: AtomicU32::new(num_readers),
            closed: AtomicU32::new(0),
            slots_start: AtomicU64::new(0),
            slot_bytes: AtomicU64::new(0),
            published: Gate::default(),
            lines,
            news: Gate::default(),
        };
        control.published.raise(first.wrapping_sub(1));
        Model { control, slots: std::array::from_fn(|_| UnsafeCell::new(0)) }
    }

    fn write(model: &Model, number: u32) {
        assert_eq!(model.control.wait_free(number, None), Ok(()));
        // SAFETY: every reader has taken what was in the slot.
        model.slots[(number % NUM_SLOTS) as usize].with_mut(|slot| unsafe { *slot = number });
        model.control.publish(number);
    }

    fn read(model: &Model, index: usize, seen: u32) {
        let number = model.control.next(seen, None).expect("the writer is not gone");
        // SAFETY: published, and not taken by this reader yet.
        let found = model.slots[(number % NUM_SLOTS) as usize].with(|slot| unsafe { *slot });
        assert_eq!(found, number, "a slot was written before it was read");
        let line = &model.control.lines[index];
        line.taken.raise(number);
        line.done.raise(number);
    }

    fn run(num_readers: u32, num_frames: u32, first: u32) {
        loom::model(move || {
            let model = Arc::new(model(num_readers, first));
            let readers: Vec<_> = (0..num_readers as usize)
                .map(|index| {
                    let model = Arc::clone(&model);
                    thread::spawn(move || {
                        for frame in 0..num_frames {
                            read(&model, index, first.wrapping_add(frame).wrapping_sub(1));
                        }
                    })
                })
                .collect();
            for frame in 0..num_frames {
                write(&model, first.wrapping_add(frame));
            }
            let last = first.wrapping_add(num_frames - 1);
            assert_eq!(model.control.wait_done(last, None), Ok(()));
            assert!(model.control.is_taken(last));
            for reader in readers {
                reader.join().expect("no reader panicked");
            }
        });
    }

    #[test]
    fn one_reader_gets_every_frame_and_a_slot_is_free_when_it_is_written() {
        run(1, 3, 1);
    }

    #[test]
    fn two_readers_each_get_every_frame() {
        run(2, 2, 1);
    }

    /// A node's thread looks at the lines and then sleeps until there is news: it must not sleep through a change in
    /// between.
    #[test]
    fn who_tells_of_lines_sleeps_on_no_change_of_two_readers() {
        loom::model(|| {
            let model = Arc::new(model(2, 1));
            let readers: Vec<_> = (0..2)
                .map(|index| {
                    let model = Arc::clone(&model);
                    thread::spawn(move || {
                        model.control.lines[index].taken.raise(1);
                        model.control.news.count();
                    })
                })
                .collect();
            let mut looks = 0;
            loop {
                let seen = model.control.news.number();
                if model.control.is_taken(1) {
                    break;
                }
                looks += 1;
                assert!(looks <= 3, "it was woken more often than there was news");
                assert!(model.control.news.wait(|news| news != seen, Duration::ZERO, None).is_some());
            }
            for reader in readers {
                reader.join().expect("no reader panicked");
            }
        });
    }

    #[test]
    fn the_numbers_go_around_their_end() {
        run(1, 3, u32::MAX);
    }
}
