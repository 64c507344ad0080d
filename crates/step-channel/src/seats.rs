//! `Seats`: where each rank of a meeting reports how far it has come.
//!
//! Rounds have numbers, which start at 1 and wrap around at 32 bits. In round `n` a rank writes its part to its place
//! `n mod 2`, reports that, and reads the parts of the others once they have reported theirs. A part stays until its
//! rank writes that of round `n + 2`. It does so only when all others have come to round `n + 1`, so that they have
//! read it.

use std::time::{Duration, Instant};

use crate::{
    gate::{Gate, has_reached},
    sync::{AtomicU32, AtomicU64, Ordering},
};

/// Most ranks of one meeting.
#[cfg(not(loom))]
pub(crate) const MAX_RANKS: usize = 64;
/// In loom's model every atomic costs time.
#[cfg(loom)]
pub(crate) const MAX_RANKS: usize = 3;
/// Parts of one rank that exist at the same time.
pub(crate) const NUM_PLACES: usize = 2;

/// What one rank reports. Only that rank writes the fields.
#[derive(Debug, Default)]
#[repr(C, align(128))]
struct Seat {
    /// The last round for which its part is written.
    laid: Gate,
    /// Kind and bytes of its operation, in each of the two rounds that may be in progress.
    purposes: [AtomicU64; NUM_PLACES],
}

/// The seats of all ranks.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Seats {
    /// Identifies the memory as a meeting; written before any other rank looks.
    pub(crate) magic: AtomicU64,
    pub(crate) num_ranks: AtomicU32,
    /// 1 if a rank has ended, so that the others need not wait.
    given_up: AtomicU32,
    ranks: [Seat; MAX_RANKS],
}

impl Seats {
    /// Wait until all others have read what `rank` wrote two rounds before `round`; otherwise returns the first that
    /// was late.
    pub(crate) fn wait_read(
        &self,
        rank: usize,
        round: u32,
        spin: Duration,
        deadline: Option<Instant>,
    ) -> Result<(), usize> {
        let before = round.wrapping_sub(1);
        self.others(rank).try_for_each(|other| self.wait_one(other, before, spin, deadline))
    }

    /// Report that the part of `rank` for this round is written.
    pub(crate) fn lay(&self, rank: usize, round: u32, purpose: u64) {
        let seat = &self.ranks[rank];
        seat.purposes[round as usize % NUM_PLACES].store(purpose, Ordering::Relaxed); // published by the round
        seat.laid.raise(round);
    }

    /// Wait until all others have written their parts; otherwise returns the first that was late.
    pub(crate) fn wait_laid(
        &self,
        rank: usize,
        round: u32,
        spin: Duration,
        deadline: Option<Instant>,
    ) -> Result<(), usize> {
        self.others(rank).try_for_each(|other| self.wait_one(other, round, spin, deadline))
    }

    /// The operation of a rank, in a round for which it has written its part.
    pub(crate) fn purpose(&self, rank: usize, round: u32) -> u64 {
        self.ranks[rank].purposes[round as usize % NUM_PLACES].load(Ordering::Relaxed)
    }

    /// Make every wait end, now and later.
    #[cfg(not(loom))]
    pub(crate) fn give_up(&self) {
        // Relaxed: nothing else depends on it, and waiters look again and again.
        self.given_up.store(1, Ordering::Relaxed);
        for rank in 0..self.num_ranks() {
            self.ranks[rank].laid.ring();
        }
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn num_ranks(&self) -> usize {
        (self.num_ranks.load(Ordering::Relaxed) as usize).min(MAX_RANKS)
    }

    fn others(&self, rank: usize) -> impl Iterator<Item = usize> {
        (0..self.num_ranks()).filter(move |other| *other != rank)
    }

    fn wait_one(
        &self,
        other: usize,
        round: u32,
        spin: Duration,
        deadline: Option<Instant>,
    ) -> Result<(), usize> {
        let is_there = |laid| has_reached(laid, round) || self.is_given_up();
        self.ranks[other].laid.wait(is_there, spin, deadline).ok_or(other)?;
        if self.is_given_up() { Err(other) } else { Ok(()) }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;

    struct Model {
        seats: Seats,
        parts: Vec<[UnsafeCell<u32>; NUM_PLACES]>,
    }

    // SAFETY: the protocol under test must keep a writer and a reader out of one place; loom's cell reports where it
    // does not.
    unsafe impl Sync for Model {}
    // SAFETY: it holds numbers and loom's own objects, which may move to another thread.
    unsafe impl Send for Model {}

    /// Write a number and read all others', round after round. In the last round only the first rank reads, as for a
    /// gather.
    fn meet(model: &Model, rank: usize, first: u32, num_rounds: u32, gathers: bool) {
        let value = |rank: usize, round: u32| round.wrapping_mul(10).wrapping_add(rank as u32);
        for round in (0..num_rounds).map(|index| first.wrapping_add(index)) {
            let place = round as usize % NUM_PLACES;
            assert_eq!(model.seats.wait_read(rank, round, Duration::ZERO, None), Ok(()));
            // SAFETY: every other rank has read the former content.
            model.parts[rank][place].with_mut(|part| unsafe { *part = value(rank, round) });
            model.seats.lay(rank, round, u64::from(round));
            if gathers && rank != 0 {
                continue;
            }
            assert_eq!(model.seats.wait_laid(rank, round, Duration::ZERO, None), Ok(()));
            for other in (0..model.parts.len()).filter(|other| *other != rank) {
                assert_eq!(model.seats.purpose(other, round), u64::from(round));
                // SAFETY: written, and not overwritten before this rank comes to the next round.
                let found = model.parts[other][place].with(|part| unsafe { *part });
                assert_eq!(found, value(other, round), "a part was laid over before it was read");
            }
        }
    }

    fn run(num_ranks: usize, num_rounds: u32, first: u32, gathers: bool) {
        loom::model(move || {
            let seats = Seats {
                magic: AtomicU64::new(0),
                num_ranks: AtomicU32::new(num_ranks as u32),
                given_up: AtomicU32::new(0),
                ranks: std::array::from_fn(|_| Seat::default()),
            };
            for seat in &seats.ranks {
                seat.laid.raise(first.wrapping_sub(1));
            }
            let parts = (0..num_ranks).map(|_| std::array::from_fn(|_| UnsafeCell::new(0))).collect();
            let model = Arc::new(Model { seats, parts });
            let others: Vec<_> = (1..num_ranks)
                .map(|rank| {
                    let model = Arc::clone(&model);
                    thread::spawn(move || meet(&model, rank, first, num_rounds, gathers))
                })
                .collect();
            meet(&model, 0, first, num_rounds, gathers);
            for other in others {
                other.join().expect("no rank panicked");
            }
        });
    }

    #[test]
    fn two_ranks_read_each_others_part_of_every_round() {
        run(2, 3, 1, false);
    }

    #[test]
    fn three_ranks_do_so() {
        run(3, 1, 1, false);
    }

    #[test]
    fn a_rank_that_reads_nothing_runs_ahead_no_further_than_its_places() {
        run(2, 3, 1, true);
    }

    #[test]
    fn the_rounds_go_around_their_end() {
        run(2, 3, u32::MAX, false);
    }
}
