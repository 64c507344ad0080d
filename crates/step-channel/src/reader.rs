//! `Reader`: the end of a rank other than the first.

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

/// Why a reader cannot follow.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The descriptor is not a step channel, or one of another version.
    #[error("the descriptor is not a step channel of this version")]
    NoChannel,
    /// The channel has no line for this rank.
    #[error("the step channel has {num_readers} readers, so rank {rank} is not one of them")]
    NoLine {
        /// The rank, from 1.
        rank: usize,
        /// Number of readers.
        num_readers: usize,
    },
    /// The frame cannot be used.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// An error of the kernel.
    #[error("the step channel's memory: {0}")]
    Memory(#[from] io::Error),
}

/// A published frame, in its slot until it is taken.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// Its sequence number.
    pub number: u32,
    /// The command.
    pub command: u32,
    /// Its arguments.
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
    /// Make the reader of `rank`, from 1.
    ///
    /// # Errors
    /// The descriptor is not a step channel, or the channel has fewer readers.
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

    /// Wait for the next frame; returns its number. `None`: there was none in time, or none will come (`is_closed`).
    #[must_use]
    pub fn wait(&self, limit: Option<Duration>) -> Option<u32> {
        self.control().next(self.taken, limit.map(|limit| Instant::now() + limit))
    }

    /// Whether the writer has announced that nothing more comes, or has ended in an orderly way.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.control().is_closed()
    }

    /// The frame that `wait` returned.
    ///
    /// # Errors
    /// The frame is damaged.
    pub fn frame(&mut self) -> Result<Frame<'_>, ReadError> {
        let number = self.taken.wrapping_add(1);
        let (start, room) = self.slot(number)?;
        // SAFETY: published, and written again only after `take`, which borrows this reader again; the place lies in
        // the mapping, aligned to 4096.
        let (head, words) = unsafe { frame::read(start, room, number)? };
        Ok(Frame { number, command: head.command, words })
    }

    /// Release the frame: its slot may be written again.
    pub fn take(&mut self) {
        self.taken = self.taken.wrapping_add(1);
        self.line().taken.raise(self.taken);
        self.control().news.count();
    }

    /// Report that the last taken frame was executed, with `value` as its answer.
    pub fn finish(&self, value: u64) {
        let line = self.line();
        line.value.store(value, Ordering::Relaxed); // published by the number
        line.done.raise(self.taken);
        self.control().news.count();
    }

    /// Report that this rank cannot follow any more.
    pub fn fail(&self) {
        self.line().failed.store(1, Ordering::Relaxed);
        self.control().news.count();
    }

    /// Report what this rank waits in from now on; 0: nothing.
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

    /// Start and length of a frame's slot.
    fn slot(&mut self, number: u32) -> Result<(NonNull<u8>, usize), ReadError> {
        let control = self.control();
        // Relaxed: the frame's number, which was read before, published them.
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
