//! `Reader`: the end of a rank that follows.

use std::{
    io,
    os::fd::OwnedFd,
    ptr::NonNull,
    time::{Duration, Instant},
};

use rustix::time::{ClockId, clock_gettime};
use thiserror::Error;

use crate::{
    control::{Control, Line, NUM_SLOTS},
    frame::{self, FrameError, HEAD_BYTES},
    memory::{Mapping, Memory},
    sync::Ordering,
    writer::MAGIC,
};

/// What keeps a reader from following.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The descriptor is not a step channel, or of another version.
    #[error("the descriptor is not a step channel of this version")]
    NoChannel,
    /// The channel has no such line.
    #[error("the step channel has {num_readers} readers, so rank {rank} is not one of them")]
    NoLine {
        /// From 1.
        rank: usize,
        /// Readers that there are.
        num_readers: usize,
    },
    /// The frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The kernel.
    #[error("the step channel's memory: {0}")]
    Memory(#[from] io::Error),
}

/// A frame that was published, in its slot until it is taken.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// Its sequence number.
    pub number: u32,
    /// What to do.
    pub command: u32,
    /// With which numbers.
    pub words: &'a [u64],
}

/// Reads every frame in turn.
#[derive(Debug)]
pub struct Reader {
    memory: Memory,
    control: Mapping,
    slots: Option<(u64, usize, Mapping)>,
    index: usize,
    taken: u32,
}

impl Reader {
    /// The reader of `rank`, from 1.
    ///
    /// # Errors
    /// The descriptor is not a step channel, or has fewer readers.
    pub fn new(fd: OwnedFd, rank: usize) -> Result<Self, ReadError> {
        let memory = Memory::adopt(fd);
        if memory.num_bytes()? < size_of::<Control>() as u64 {
            return Err(ReadError::NoChannel);
        }
        let control = Mapping::new(&memory, 0, size_of::<Control>())?;
        let reader = Self { memory, control, slots: None, index: rank.wrapping_sub(1), taken: 0 };
        // Acquire: what was written before the magic number is seen after it.
        if reader.control().magic.load(Ordering::Acquire) != MAGIC {
            return Err(ReadError::NoChannel);
        }
        let num_readers = reader.control().lines().len();
        if reader.index >= num_readers {
            return Err(ReadError::NoLine { rank, num_readers });
        }
        Ok(reader)
    }

    /// Wait for the next frame; its number. `None`: there was none in time, or none will come (`is_closed`).
    #[must_use]
    pub fn wait(&self, limit: Option<Duration>) -> Option<u32> {
        self.control().next(self.taken, limit.map(|limit| Instant::now() + limit))
    }

    /// Whether the writer said that nothing more comes, or is gone in good order.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.control().is_closed()
    }

    /// The frame that was waited for.
    ///
    /// # Errors
    /// It is not as it was written.
    pub fn frame(&mut self) -> Result<Frame<'_>, ReadError> {
        let number = self.taken.wrapping_add(1);
        let (start, room) = self.slot(number)?;
        // SAFETY: published, and written again only after `take`, which borrows this reader again; the place lies in
        // the mapping, aligned to 4096.
        let (head, words) = unsafe { frame::read(start, room, number)? };
        Ok(Frame { number, command: head.command, words })
    }

    /// The frame is needed no more: its slot may be written again.
    pub fn take(&mut self) {
        self.taken = self.taken.wrapping_add(1);
        self.line().taken.raise(self.taken);
        self.control().news.count();
    }

    /// What the last taken frame says is done.
    pub fn finish(&self, value: u64) {
        let line = self.line();
        line.value.store(value, Ordering::Relaxed); // published by the number
        line.done.raise(self.taken);
        self.control().news.count();
    }

    /// Say that this rank cannot follow any more.
    pub fn fail(&self) {
        self.line().failed.store(1, Ordering::Relaxed);
        self.control().news.count();
    }

    /// Say what this rank waits in from now on; 0: in nothing.
    pub fn note_activity(&self, activity: u32) {
        let (line, now) = (self.line(), monotonic_ns());
        if line.activity.load(Ordering::Relaxed) != 0 {
            let spent = now.saturating_sub(line.since_ns.load(Ordering::Relaxed));
            line.activity_ns.store(line.activity_ns.load(Ordering::Relaxed) + spent, Ordering::Relaxed);
            line.activities.store(line.activities.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        line.since_ns.store(now, Ordering::Relaxed);
        line.activity.store(activity, Ordering::Relaxed);
    }

    fn control(&self) -> &Control {
        // SAFETY: the mapping is long enough, aligned to a page, and lives as long as `self`; every field is atomic.
        unsafe { self.control.start().cast::<Control>().as_ref() }
    }

    fn line(&self) -> &Line {
        &self.control().lines[self.index]
    }

    /// Where the slot of a frame begins, and how long it is.
    fn slot(&mut self, number: u32) -> Result<(NonNull<u8>, usize), ReadError> {
        let control = self.control();
        // Relaxed: the frame's number, which was seen before, published them.
        let start = control.slots_start.load(Ordering::Relaxed);
        let bytes = control.slot_bytes.load(Ordering::Relaxed) as usize;
        let is_same = self.slots.as_ref().is_some_and(|(known, size, _)| (*known, *size) == (start, bytes));
        if !is_same {
            if bytes <= HEAD_BYTES || !bytes.is_multiple_of(8) {
                return Err(ReadError::NoChannel);
            }
            let mapping = Mapping::new(&self.memory, start, bytes.saturating_mul(NUM_SLOTS as usize))?;
            self.slots = Some((start, bytes, mapping));
        }
        let (_, _, mapping) = self.slots.as_ref().expect("it was put there");
        let offset = (number % NUM_SLOTS) as usize * bytes;
        debug_assert!(offset + bytes <= mapping.len());
        // SAFETY: within the mapping, which has NUM_SLOTS slots.
        Ok((unsafe { mapping.start().add(offset) }, bytes))
    }
}

fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
