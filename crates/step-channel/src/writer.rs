//! `Writer`: rank 0's end.

use std::{
    io,
    os::fd::BorrowedFd,
    ptr::NonNull,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use thiserror::Error;

use crate::{
    control::{Control, MAX_READERS, NUM_SLOTS},
    frame::{Filling, FrameError, HEAD_BYTES},
    memory::{Mapping, Memory, PAGE},
    step_frame::{STEP_HEAD_BYTES, StepArrays, StepFrame},
    sync::Ordering,
    wire::{SLOT, Wire},
};

/// "ranks" and the version of what follows.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"ranks\0\0\x01");
/// Room for commands other than steps.
const FIRST_SLOT_BYTES: usize = 4096;
/// Between two looks whether the channel was given up, while a reader is waited for.
const LOOK: Duration = Duration::from_millis(20);

/// How long a frame of another writer may wait for a slot: that one says when it was too long.
const RELAY_LIMIT: Duration = Duration::from_secs(1_000_000);

/// What kept a frame from being published, or its end from being seen.
#[derive(Debug, Error)]
pub enum WriteError {
    /// A reader took too long.
    #[error("rank {rank} has not taken frame {number} within {seconds:.1} s")]
    Late {
        /// From 1.
        rank: usize,
        /// The frame that it should have taken, or done.
        number: u32,
        /// The limit.
        seconds: f64,
    },
    /// `give_up` was called.
    #[error("the step channel was given up: a rank has ended")]
    GivenUp,
    /// The frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The kernel.
    #[error("the step channel's memory: {0}")]
    Memory(#[from] io::Error),
    /// A node's connection.
    #[error("the connection to the node of ranks {first} and up: {source}")]
    Node {
        /// Its first rank.
        first: usize,
        /// What it says.
        source: io::Error,
    },
    /// A frame that another writer made and that cannot be the next.
    #[error("frame {got} came after frame {number}")]
    OutOfTurn {
        /// The last one.
        number: u32,
        /// The one that came.
        got: u32,
    },
}

/// What a reader says of itself, at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LineView {
    /// The last frame that it took.
    pub taken: u32,
    /// The last frame that it did.
    pub done: u32,
    /// It cannot follow any more.
    pub failed: bool,
    /// A number for what it waits in; 0: nothing.
    pub activity: u32,
    /// When that changed (ns, monotonic).
    pub since_ns: u64,
    /// Time in activities that ended (ns).
    pub activity_ns: u64,
    /// How many ended.
    pub activities: u64,
    /// What it answered last.
    pub value: u64,
}

/// What any thread of rank 0 may ask of a channel, and do to it, while one thread writes.
#[derive(Debug)]
pub struct Watch {
    control: Mapping,
    given_up: AtomicBool,
}

impl Watch {
    /// End every wait of the writer, now and later, with an error.
    pub fn give_up(&self) {
        // Relaxed: it says nothing but itself, and the writer looks again and again.
        self.given_up.store(true, Ordering::Relaxed);
    }

    /// Tell readers that nothing more comes.
    pub fn close(&self) {
        let control = self.control();
        control.closed.store(1, Ordering::Relaxed);
        control.published.ring();
    }

    /// The last frame that was published.
    #[must_use]
    pub fn published(&self) -> u32 {
        self.control().published.number()
    }

    /// What each reader says of itself, in the order of ranks, from 1.
    #[must_use]
    pub fn lines(&self) -> Vec<LineView> {
        let lines = self.control().lines().iter();
        lines
            .map(|line| LineView {
                taken: line.taken.number(),
                done: line.done.number(),
                failed: line.failed.load(Ordering::Relaxed) != 0,
                activity: line.activity.load(Ordering::Relaxed),
                since_ns: line.since_ns.load(Ordering::Relaxed),
                activity_ns: line.activity_ns.load(Ordering::Relaxed),
                activities: line.activities.load(Ordering::Relaxed),
                value: line.value.load(Ordering::Relaxed),
            })
            .collect()
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    pub(crate) fn control(&self) -> &Control {
        // SAFETY: the mapping is long enough, aligned to a page, made of zeros at first, which are a `Control`, and
        // lives as long as `self`; every field is atomic.
        unsafe { self.control.start().cast::<Control>().as_ref() }
    }
}

/// Publishes frames, in one thread.
#[derive(Debug)]
pub struct Writer {
    memory: Memory,
    watch: Arc<Watch>,
    slots: Mapping,
    slot_bytes: usize,
    number: u32,
    blocked: Duration,
    /// Other nodes, each with its first rank: their connections write the lines of their ranks here.
    nodes: Vec<(usize, Arc<Wire>)>,
}

impl Writer {
    /// # Errors
    /// The kernel gives no memory.
    ///
    /// # Panics
    /// With more than `MAX_READERS`, or none.
    pub fn new(num_readers: usize) -> Result<Self, WriteError> {
        assert!((1..=MAX_READERS).contains(&num_readers), "{num_readers} readers");
        let control_bytes = size_of::<Control>().next_multiple_of(PAGE as usize);
        let slots_bytes = FIRST_SLOT_BYTES * NUM_SLOTS as usize;
        let memory = Memory::create((control_bytes + slots_bytes) as u64)?;
        let control = Mapping::new(&memory, 0, control_bytes)?;
        let slots = Mapping::new(&memory, control_bytes as u64, slots_bytes)?;
        let writer = Self {
            memory,
            watch: Arc::new(Watch { control, given_up: AtomicBool::new(false) }),
            slots,
            slot_bytes: FIRST_SLOT_BYTES,
            number: 0,
            blocked: Duration::ZERO,
            nodes: Vec::new(),
        };
        let control = writer.control();
        control.num_readers.store(num_readers as u32, Ordering::Relaxed);
        control.slots_start.store(control_bytes as u64, Ordering::Relaxed);
        control.slot_bytes.store(FIRST_SLOT_BYTES as u64, Ordering::Relaxed);
        // Release: a reader that sees the magic number sees what lies above.
        control.magic.store(MAGIC, Ordering::Release);
        Ok(writer)
    }

    /// What a child inherits.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// The last frame that was published; 0 before the first.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// How long this side has waited for slots.
    #[must_use]
    pub fn blocked(&self) -> Duration {
        self.blocked
    }

    /// Have slots for steps of these arrays. Every reader must have taken every frame.
    ///
    /// # Errors
    /// The kernel gives no memory.
    ///
    /// # Panics
    /// While a frame is on its way.
    pub fn make_room(&mut self, arrays: &StepArrays) -> Result<(), WriteError> {
        assert!(self.control().is_taken(self.number), "a frame is on its way");
        self.make_room_for(HEAD_BYTES + STEP_HEAD_BYTES + arrays.num_bytes())
    }

    /// Send every frame to a node as well, whose ranks are `first` (from 1) and `count - 1` after it.
    ///
    /// # Panics
    /// The channel has fewer ranks, or a frame was published already.
    pub(crate) fn add_wire(&mut self, first: usize, count: usize, wire: Arc<Wire>) {
        let num_readers = self.control().lines().len();
        assert!(first >= 1 && first + count <= num_readers + 1, "ranks {first} and {count} of {num_readers}");
        assert_eq!(self.number, 0, "a node came after the first frame");
        self.nodes.push((first, wire));
    }

    /// Publish a frame that another writer made, as it lies in that one's slot.
    ///
    /// # Errors
    /// It is not the one after the last, `give_up` was called, or the kernel gives no memory.
    pub(crate) fn relay(&mut self, slot: &[u8]) -> Result<(), WriteError> {
        let number = self.number.wrapping_add(1);
        let got = slot.first_chunk::<4>().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        if got != number || slot.len() < HEAD_BYTES {
            return Err(WriteError::OutOfTurn { number: self.number, got });
        }
        if slot.len() > self.slot_bytes {
            // Slots move: nothing may be on its way in the old ones.
            self.wait(self.number, RELAY_LIMIT, |deadline| {
                self.control().wait_free(self.number.wrapping_add(NUM_SLOTS), deadline)
            })?;
            self.make_room_for(slot.len())?;
        }
        self.wait(number, RELAY_LIMIT, |deadline| self.control().wait_free(number, deadline))?;
        // SAFETY: the slot lies within the mapping and is as long, by the check above; every reader has taken what was
        // in it, and reads it again only after `publish`.
        unsafe { self.slot(number).as_ptr().copy_from_nonoverlapping(slot.as_ptr(), slot.len()) };
        self.number = number;
        self.control().publish(number);
        Ok(())
    }

    fn make_room_for(&mut self, num_bytes: usize) -> Result<(), WriteError> {
        let needed = num_bytes.next_multiple_of(4096);
        if needed <= self.slot_bytes {
            return Ok(());
        }
        let all = needed * NUM_SLOTS as usize;
        let start = self.memory.extend(all as u64)?;
        self.slots = Mapping::new(&self.memory, start, all)?;
        self.slot_bytes = needed;
        let control = self.control();
        // Relaxed: the next frame's number publishes them, and none is read before that.
        control.slots_start.store(start, Ordering::Relaxed);
        control.slot_bytes.store(needed as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Publish a command with its numbers.
    ///
    /// # Errors
    /// A reader has not taken the frame that lies in the slot, or the frame is too long.
    pub fn publish(&mut self, command: u32, words: &[u64], limit: Duration) -> Result<u32, WriteError> {
        self.fill(command, limit, |slot| slot.words(words))
    }

    /// Publish a step.
    ///
    /// # Errors
    /// As `publish`.
    pub fn publish_step(
        &mut self,
        command: u32,
        step: &StepFrame,
        arrays: &StepArrays,
        limit: Duration,
    ) -> Result<u32, WriteError> {
        self.fill(command, limit, |slot| step.write(arrays, slot))
    }

    /// Wait until every reader did what a frame says.
    ///
    /// # Errors
    /// The first reader that was late, or `give_up` was called.
    pub fn wait_done(&self, number: u32, limit: Duration) -> Result<(), WriteError> {
        self.wait(number, limit, |deadline| self.control().wait_done(number, deadline))
    }

    /// For other threads.
    #[must_use]
    pub fn watch(&self) -> Arc<Watch> {
        Arc::clone(&self.watch)
    }

    fn control(&self) -> &Control {
        self.watch.control()
    }

    fn fill(
        &mut self,
        command: u32,
        limit: Duration,
        write: impl FnOnce(&mut Filling) -> Result<(), FrameError>,
    ) -> Result<u32, WriteError> {
        let number = self.number.wrapping_add(1);
        let began = Instant::now();
        let free = self.wait(number, limit, |deadline| self.control().wait_free(number, deadline));
        self.blocked += began.elapsed();
        free?;
        // SAFETY: the slot lies within the mapping, at a multiple of 4096; every reader has taken what was in it, and
        // reads it again only after `publish`.
        let mut filling = unsafe { Filling::new(self.slot(number), self.slot_bytes) };
        write(&mut filling)?;
        let num_bytes = filling.finish(number, command);
        self.number = number;
        self.control().publish(number);
        for (first, node) in &self.nodes {
            // SAFETY: the frame that was just written; the slot is written again only once the node's ranks took it.
            let slot = unsafe { std::slice::from_raw_parts(self.slot(number).as_ptr(), num_bytes) };
            node.send(SLOT, slot).map_err(|source| WriteError::Node { first: *first, source })?;
        }
        Ok(number)
    }

    fn slot(&self, number: u32) -> NonNull<u8> {
        let offset = (number % NUM_SLOTS) as usize * self.slot_bytes;
        debug_assert!(offset + self.slot_bytes <= self.slots.len());
        // SAFETY: within the mapping, which has NUM_SLOTS slots.
        unsafe { self.slots.start().add(offset) }
    }

    fn wait(
        &self,
        number: u32,
        limit: Duration,
        wait: impl Fn(Option<Instant>) -> Result<(), usize>,
    ) -> Result<(), WriteError> {
        let end = Instant::now() + limit;
        loop {
            let Err(index) = wait(Some(end.min(Instant::now() + LOOK))) else { return Ok(()) };
            if self.watch.is_given_up() {
                return Err(WriteError::GivenUp);
            }
            if Instant::now() >= end {
                return Err(WriteError::Late { rank: index + 1, number, seconds: limit.as_secs_f64() });
            }
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.watch.close();
    }
}
