//! `Meeting`: shared memory in which the ranks of one machine add and gather numbers.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

use thiserror::Error;

use crate::{
    memory::{Mapping, Memory, PAGE},
    seats::{MAX_RANKS, NUM_PLACES, Seats},
    summand::{Summand, add_in_order},
    sync::Ordering,
};

/// "meets" and the version of the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"meets\0\0\x01");
/// The part of a tensor that is exchanged at once; longer tensors are exchanged piece by piece.
pub(crate) const PIECE_BYTES: usize = 256 << 10;
/// The shortest time that a rank spins for another.
const LEAST_SPIN: Duration = Duration::from_micros(1);
/// Interval between two looks at the clock while waiting for another rank.
const LOOK: Duration = Duration::from_millis(200);

/// Why ranks cannot meet.
#[derive(Debug, Error)]
pub enum MeetingError {
    /// A rank took too long.
    #[error("rank {rank} has not come to {kind} within {seconds:.1} s")]
    Late {
        /// The rank that was late, from 0.
        rank: usize,
        /// What it should have come to.
        kind: Kind,
        /// The limit.
        seconds: f64,
    },
    /// The ranks called different operations.
    #[error("rank {own} came to {kind} of {bytes} bytes, rank {other} to {other_kind} of {other_bytes}")]
    Unlike {
        /// This rank.
        own: usize,
        /// Its operation.
        kind: Kind,
        /// Bytes of its part.
        bytes: u64,
        /// The other rank.
        other: usize,
        /// The other rank's operation.
        other_kind: Kind,
        /// Bytes of the other rank's part.
        other_bytes: u64,
    },
    /// `give_up` was called.
    #[error("the ranks meet no more: one has ended")]
    GivenUp,
    /// The descriptor is not a meeting, or one of another version.
    #[error("the descriptor is not a meeting of ranks of this version")]
    NoMeeting,
    /// The meeting has no such rank.
    #[error("the meeting has {num_ranks} ranks, so {rank} is not one of them: 0 to {} are", num_ranks - 1)]
    NoSeat {
        /// The rank that was asked for.
        rank: usize,
        /// Number of ranks.
        num_ranks: usize,
    },
    /// The result does not have the size of all parts.
    #[error("{num_ranks} ranks with {own_bytes} bytes each fill {}, but there are {out_bytes}", own_bytes * num_ranks)]
    Room {
        /// Number of ranks.
        num_ranks: usize,
        /// Bytes of one rank's part.
        own_bytes: usize,
        /// Bytes of the result.
        out_bytes: usize,
    },
    /// An error of the kernel.
    #[error("the memory that ranks share: {0}")]
    Memory(#[from] io::Error),
}

/// The operation that ranks meet for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Add.
    AllReduce = 1,
    /// All ranks get every rank's part.
    AllGather = 2,
    /// The first rank gets every rank's part.
    Gather = 3,
    /// A value that no rank of this version writes.
    Unknown = 0,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::AllReduce => "an all_reduce",
            Self::AllGather => "an all_gather",
            Self::Gather => "a gather",
            Self::Unknown => "a collective of another version",
        })
    }
}

/// Ends a meeting from any thread of any rank.
#[derive(Clone, Debug)]
pub struct MeetingEnd {
    seats: Arc<Mapping>,
}

impl MeetingEnd {
    /// Make every wait of every rank fail, now and later.
    pub fn give_up(&self) {
        seats_of(&self.seats).give_up();
    }
}

/// One rank's side. All ranks must make the same calls in the same order.
#[derive(Debug)]
pub struct Meeting {
    memory: Memory,
    seats: Arc<Mapping>,
    places: Mapping,
    rank: usize,
    num_ranks: usize,
    round: u32,
    /// How long this rank spins for another before it sleeps: the longest, and currently.
    longest_spin: Duration,
    spin: Duration,
}

impl Meeting {
    /// Make a meeting, as its first rank.
    ///
    /// # Errors
    /// The kernel has no memory.
    ///
    /// # Panics
    /// There are more ranks than `Meeting::MAX_RANKS`, or fewer than two.
    pub fn new(num_ranks: usize, spin: Duration) -> Result<Self, MeetingError> {
        assert!((2..=MAX_RANKS).contains(&num_ranks), "{num_ranks} ranks");
        let memory = Memory::create((seats_bytes() + places_bytes(num_ranks)) as u64)?;
        let seats = Mapping::new(&memory, 0, seats_bytes())?;
        seats_of(&seats).num_ranks.store(num_ranks as u32, Ordering::Relaxed);
        // Release: a rank that sees the magic number also sees what was written above.
        seats_of(&seats).magic.store(MAGIC, Ordering::Release);
        Self::of(memory, seats, 0, num_ranks, spin)
    }

    /// Join a meeting, as another rank.
    ///
    /// # Errors
    /// The descriptor is not a meeting, or the meeting has no such rank.
    pub fn join(fd: OwnedFd, rank: usize, spin: Duration) -> Result<Self, MeetingError> {
        let memory = Memory::adopt(fd);
        if memory.num_bytes()? < seats_bytes() as u64 {
            return Err(MeetingError::NoMeeting);
        }
        let seats = Mapping::new(&memory, 0, seats_bytes())?;
        // Acquire: what was written before the magic number is seen after it.
        if seats_of(&seats).magic.load(Ordering::Acquire) != MAGIC {
            return Err(MeetingError::NoMeeting);
        }
        let num_ranks = seats_of(&seats).num_ranks();
        if rank >= num_ranks {
            return Err(MeetingError::NoSeat { rank, num_ranks });
        }
        Self::of(memory, seats, rank, num_ranks, spin)
    }

    fn of(
        memory: Memory,
        seats: Mapping,
        rank: usize,
        num_ranks: usize,
        spin: Duration,
    ) -> Result<Self, MeetingError> {
        let places = Mapping::new(&memory, seats_bytes() as u64, places_bytes(num_ranks))?;
        Ok(Self {
            memory,
            seats: Arc::new(seats),
            places,
            rank,
            num_ranks,
            round: 0,
            longest_spin: spin,
            spin,
        })
    }

    /// Most ranks of one meeting.
    pub const MAX_RANKS: usize = MAX_RANKS;

    /// The descriptor, which children inherit.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// A handle with which any thread can end the meeting.
    #[must_use]
    pub fn end(&self) -> MeetingEnd {
        MeetingEnd { seats: Arc::clone(&self.seats) }
    }

    /// Replace `data` by the sum over all ranks. It is added in float32, in the order of the ranks, and rounded once,
    /// so that its bits depend on nothing else.
    ///
    /// # Errors
    /// A rank is late or called another operation, or the meeting was given up. The content of `data` is then
    /// unspecified.
    pub fn all_reduce<T: Summand>(&mut self, data: &mut [T], limit: Duration) -> Result<(), MeetingError> {
        let end = Instant::now() + limit;
        let bytes = size_of_val(data);
        let whole = Purpose { kind: Kind::AllReduce, bytes, limit, end };
        for piece in data.chunks_mut(PIECE_BYTES / size_of::<T>()) {
            let round = self.lay(T::as_bytes(piece), whole)?;
            self.wait_for_all(round, whole)?;
            let length = piece.len();
            // SAFETY: every rank has written as many bytes for this round, which `wait_for_all` compared, at a place
            // that is aligned to a page, and overwrites them only after this rank has come to the next round.
            let part =
                |rank| unsafe { std::slice::from_raw_parts(self.place(rank, round).cast().as_ptr(), length) };
            let parts = (0..self.num_ranks).map(part);
            add_in_order(piece, &parts);
        }
        Ok(())
    }

    /// Fill `out` with every rank's part, in the order of the ranks.
    ///
    /// # Errors
    /// See `all_reduce`; or `out` does not have the size of all parts.
    pub fn all_gather(&mut self, own: &[u8], out: &mut [u8], limit: Duration) -> Result<(), MeetingError> {
        self.gather_into(Kind::AllGather, own, Some(out), limit)
    }

    /// Fill `out` with every rank's part on the first rank; the others pass no `out`.
    ///
    /// # Errors
    /// See `all_gather`.
    pub fn gather(
        &mut self,
        own: &[u8],
        out: Option<&mut [u8]>,
        limit: Duration,
    ) -> Result<(), MeetingError> {
        self.gather_into(Kind::Gather, own, out, limit)
    }

    fn gather_into(
        &mut self,
        kind: Kind,
        own: &[u8],
        mut out: Option<&mut [u8]>,
        limit: Duration,
    ) -> Result<(), MeetingError> {
        if let Some(out) = out.as_deref().filter(|out| out.len() != own.len() * self.num_ranks) {
            let (num_ranks, own_bytes, out_bytes) = (self.num_ranks, own.len(), out.len());
            return Err(MeetingError::Room { num_ranks, own_bytes, out_bytes });
        }
        let whole = Purpose { kind, bytes: own.len(), limit, end: Instant::now() + limit };
        for (index, piece) in own.chunks(PIECE_BYTES).enumerate() {
            let round = self.lay(piece, whole)?;
            let Some(out) = out.as_deref_mut() else { continue };
            self.wait_for_all(round, whole)?;
            for (rank, part) in out.chunks_exact_mut(own.len()).enumerate() {
                let target = &mut part[index * PIECE_BYTES..][..piece.len()];
                // SAFETY: as in `all_reduce`.
                let laid =
                    unsafe { std::slice::from_raw_parts(self.place(rank, round).as_ptr(), piece.len()) };
                target.copy_from_slice(laid);
            }
        }
        Ok(())
    }

    /// Write this rank's part for the next round; returns the round's number.
    fn lay(&mut self, part: &[u8], whole: Purpose) -> Result<u32, MeetingError> {
        let round = self.round.wrapping_add(1);
        self.wait(whole, |deadline| {
            seats_of(&self.seats).wait_read(self.rank, round, self.spin, Some(deadline))
        })?;
        assert!(part.len() <= PIECE_BYTES);
        // SAFETY: the place has PIECE_BYTES and belongs to this rank; every other rank has read its former content.
        unsafe {
            std::ptr::copy_nonoverlapping(part.as_ptr(), self.place(self.rank, round).as_ptr(), part.len());
        }
        self.round = round;
        seats_of(&self.seats).lay(self.rank, round, whole.word());
        Ok(round)
    }

    fn wait_for_all(&mut self, round: u32, whole: Purpose) -> Result<(), MeetingError> {
        let began = Instant::now();
        let seats = seats_of(&self.seats);
        self.wait(whole, |deadline| seats.wait_laid(self.rank, round, self.spin, Some(deadline)))?;
        self.spin = next_spin(self.spin, self.longest_spin, began.elapsed());
        let seats = seats_of(&self.seats);
        let unlike = (0..self.num_ranks).find(|other| seats.purpose(*other, round) != whole.word());
        unlike.map_or(Ok(()), |other| {
            let (other_kind, other_bytes) = Purpose::read(seats.purpose(other, round));
            let bytes = whole.bytes as u64;
            Err(MeetingError::Unlike {
                own: self.rank,
                kind: whole.kind,
                bytes,
                other,
                other_kind,
                other_bytes,
            })
        })
    }

    fn wait(&self, whole: Purpose, wait: impl Fn(Instant) -> Result<(), usize>) -> Result<(), MeetingError> {
        loop {
            let now = Instant::now();
            let Err(rank) = wait(whole.end.min(now + LOOK)) else { return Ok(()) };
            if seats_of(&self.seats).is_given_up() {
                return Err(MeetingError::GivenUp);
            }
            if Instant::now() >= whole.end {
                let seconds = whole.limit.as_secs_f64();
                return Err(MeetingError::Late { rank, kind: whole.kind, seconds });
            }
        }
    }

    /// The place of a rank's part for a round.
    fn place(&self, rank: usize, round: u32) -> NonNull<u8> {
        let offset = (rank * NUM_PLACES + round as usize % NUM_PLACES) * PIECE_BYTES;
        debug_assert!(offset + PIECE_BYTES <= self.places.len());
        // SAFETY: within the mapping, which has NUM_PLACES places for each rank.
        unsafe { self.places.start().add(offset) }
    }
}

/// The purpose of one call.
#[derive(Clone, Copy)]
struct Purpose {
    kind: Kind,
    bytes: usize,
    limit: Duration,
    end: Instant,
}

impl Purpose {
    fn word(self) -> u64 {
        (self.bytes as u64) << 8 | self.kind as u64
    }

    fn read(word: u64) -> (Kind, u64) {
        let known = [Kind::AllReduce, Kind::AllGather, Kind::Gather];
        let kind = known.into_iter().find(|kind| *kind as u64 == word & 0xFF);
        (kind.unwrap_or(Kind::Unknown), word >> 8)
    }
}

/// How long to spin next time: longer if spinning finds the others, shorter if they come later than that. Where other
/// work needs the processors, a rank that spins in vain would lose its turn there.
fn next_spin(now: Duration, longest: Duration, waited: Duration) -> Duration {
    if waited <= longest { (now * 2).min(longest) } else { (now / 2).max(LEAST_SPIN.min(longest)) }
}

fn seats_bytes() -> usize {
    size_of::<Seats>().next_multiple_of(PAGE as usize)
}

fn places_bytes(num_ranks: usize) -> usize {
    num_ranks * NUM_PLACES * PIECE_BYTES
}

fn seats_of(mapping: &Mapping) -> &Seats {
    // SAFETY: the mapping is long enough, aligned to a page, made of zeros at first, which are `Seats`, and lives as
    // long as the borrow; every field is atomic.
    unsafe { mapping.start().cast::<Seats>().as_ref() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_looks_longer_where_it_finds_and_shorter_where_it_does_not() {
        let (longest, soon, late) =
            (Duration::from_micros(200), Duration::from_micros(30), Duration::from_millis(2));
        let mut spin = longest;
        for _ in 0..20 {
            spin = next_spin(spin, longest, late);
        }
        assert_eq!(spin, LEAST_SPIN);
        for _ in 0..20 {
            spin = next_spin(spin, longest, soon);
        }
        assert_eq!(spin, longest);
    }
}
