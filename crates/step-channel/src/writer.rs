//! `Writer`: rank 0's end of the channel.

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

/// "ranks" and the version of the layout.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"ranks\0\0\x01");
/// Room for commands other than steps.
const FIRST_SLOT_BYTES: usize = 4096;
/// Interval between two checks, while waiting for a reader, whether the channel was given up.
const LOOK: Duration = Duration::from_millis(20);

/// How long a relayed frame may wait for a slot. Effectively without a limit: the head's writer reports when a wait is
/// too long.
const RELAY_LIMIT: Duration = Duration::from_secs(1_000_000);

/// Why a frame was not published, or its execution not seen.
#[derive(Debug, Error)]
pub enum WriteError {
    /// A reader took too long.
    #[error("rank {rank} has not taken frame {number} within {seconds:.1} s")]
    Late {
        /// The rank, from 1.
        rank: usize,
        /// The frame that it should have taken or executed.
        number: u32,
        /// The limit.
        seconds: f64,
    },
    /// `give_up` was called.
    #[error("the step channel was given up: a rank has ended")]
    GivenUp,
    /// The frame is invalid.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// An error of the kernel.
    #[error("the step channel's memory: {0}")]
    Memory(#[from] io::Error),
    /// A node's connection failed.
    #[error("the connection to the node of ranks {first} and up: {source}")]
    Node {
        /// The node's first rank.
        first: usize,
        /// The error of its connection.
        source: io::Error,
    },
    /// A frame of another writer is not the next one.
    #[error("frame {got} came after frame {number}")]
    OutOfTurn {
        /// The number of the last frame.
        number: u32,
        /// The number of the frame that came.
        got: u32,
    },
}

/// A reader's report at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LineView {
    /// The last frame that it took.
    pub taken: u32,
    /// The last frame that it executed.
    pub done: u32,
    /// Whether it cannot follow any more.
    pub failed: bool,
    /// A number for what it waits in; 0: nothing.
    pub activity: u32,
    /// When that changed (ns, monotonic).
    pub since_ns: u64,
    /// Total time in activities that have ended (ns).
    pub activity_ns: u64,
    /// Number of activities that have ended.
    pub activities: u64,
    /// Its last answer.
    pub value: u64,
}

/// What any thread of rank 0 may read from a channel, and do to it, while one thread writes.
#[derive(Debug)]
pub struct Watch {
    control: Mapping,
    given_up: AtomicBool,
}

impl Watch {
    /// Make every wait of the writer fail, now and later.
    pub fn give_up(&self) {
        // Relaxed: nothing else depends on it, and the writer looks again and again.
        self.given_up.store(true, Ordering::Relaxed);
    }

    /// Announce to the readers that nothing more comes.
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

    /// What each reader reports, in the order of the ranks, from 1.
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

/// Publishes frames, from one thread.
#[derive(Debug)]
pub struct Writer {
    memory: Memory,
    watch: Arc<Watch>,
    slots: Mapping,
    slot_bytes: usize,
    number: u32,
    blocked: Duration,
    /// Other nodes, each with its first rank. Their connections write the lines of their ranks here.
    nodes: Vec<(usize, Arc<Wire>)>,
}

impl Writer {
    /// # Errors
    /// The kernel has no memory.
    ///
    /// # Panics
    /// There are more than `MAX_READERS` readers, or none.
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
        // Release: a reader that sees the magic number also sees what was written above.
        control.magic.store(MAGIC, Ordering::Release);
        Ok(writer)
    }

    /// The descriptor, which children inherit.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// The last frame that was published; 0 before the first.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// How long this side has waited for slots in total.
    #[must_use]
    pub fn blocked(&self) -> Duration {
        self.blocked
    }

    /// Make the slots large enough for steps with these arrays. Every reader must have taken every frame.
    ///
    /// # Errors
    /// The kernel has no memory.
    ///
    /// # Panics
    /// A frame was not taken yet.
    pub fn make_room(&mut self, arrays: &StepArrays) -> Result<(), WriteError> {
        assert!(self.control().is_taken(self.number), "a frame is on its way");
        self.make_room_for(HEAD_BYTES + STEP_HEAD_BYTES + arrays.num_bytes())
    }

    /// From now on, send every frame to a node as well, which has rank `first` (from 1) and the `count - 1` ranks after
    /// it.
    ///
    /// # Panics
    /// The channel has fewer ranks, or a frame was published already.
    pub(crate) fn add_wire(&mut self, first: usize, count: usize, wire: Arc<Wire>) {
        let num_readers = self.control().lines().len();
        assert!(first >= 1 && first + count <= num_readers + 1, "ranks {first} and {count} of {num_readers}");
        assert_eq!(self.number, 0, "a node came after the first frame");
        self.nodes.push((first, wire));
    }

    /// Publish a frame as another writer has written it into its slot.
    ///
    /// # Errors
    /// The frame is not the next one, `give_up` was called, or the kernel has no memory.
    pub(crate) fn relay(&mut self, slot: &[u8]) -> Result<(), WriteError> {
        let number = self.number.wrapping_add(1);
        let got = slot.first_chunk::<4>().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        if got != number || slot.len() < HEAD_BYTES {
            return Err(WriteError::OutOfTurn { number: self.number, got });
        }
        if slot.len() > self.slot_bytes {
            // The slots move, so every frame in the old ones must have been taken.
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
        // Relaxed: the next frame's number publishes them, and they are not read before that.
        control.slots_start.store(start, Ordering::Relaxed);
        control.slot_bytes.store(needed as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Publish a command with its arguments.
    ///
    /// # Errors
    /// A reader has not taken the frame that is in the slot, or the new frame is too long.
    pub fn publish(&mut self, command: u32, words: &[u64], limit: Duration) -> Result<u32, WriteError> {
        self.fill(command, limit, |slot| slot.words(words))
    }

    /// Publish a step.
    ///
    /// # Errors
    /// See `publish`.
    pub fn publish_step(
        &mut self,
        command: u32,
        step: &StepFrame,
        arrays: &StepArrays,
        limit: Duration,
    ) -> Result<u32, WriteError> {
        self.fill(command, limit, |slot| step.write(arrays, slot))
    }

    /// Wait until every reader has executed a frame.
    ///
    /// # Errors
    /// A reader was late (the first one is named), or `give_up` was called.
    pub fn wait_done(&self, number: u32, limit: Duration) -> Result<(), WriteError> {
        self.wait(number, limit, |deadline| self.control().wait_done(number, deadline))
    }

    /// A watch for other threads.
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
            // SAFETY: this is the frame that was just written; its slot is written again only after the node's ranks
            // have taken it.
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
