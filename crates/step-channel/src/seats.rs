//! `Seats`: where each rank of a meeting says how far it has come.
//!
//! Rounds have numbers, from 1 and around the end of 32 bits. In round `n` a rank lays its part in its place `n mod 2`,
//! says so, and reads what others laid once they have said so. A part lies until its rank lays that of round `n + 2`,
//! which it does only once all others have come to round `n + 1`: they have read it by then.

use std::time::{Duration, Instant};

use crate::{
    gate::{Gate, has_reached},
    sync::{AtomicU32, AtomicU64, Ordering},
};

/// Ranks of one meeting at most.
#[cfg(not(loom))]
pub(crate) const MAX_RANKS: usize = 64;
/// A model pays for every atomic that there is.
#[cfg(loom)]
pub(crate) const MAX_RANKS: usize = 3;
/// Parts of one rank that lie at the same time.
pub(crate) const NUM_PLACES: usize = 2;

/// What one rank says. Every field has one writer, the rank.
#[derive(Debug, Default)]
#[repr(C, align(128))]
struct Seat {
    /// The last round for which its part lies there.
    laid: Gate,
    /// What it came for, in each of the two rounds that may be under way: kind and bytes.
    purposes: [AtomicU64; NUM_PLACES],
}

/// All of them.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Seats {
    /// What says that this is a meeting; written before any other rank looks.
    pub(crate) magic: AtomicU64,
    pub(crate) num_ranks: AtomicU32,
    /// 1: a rank has ended, and the others wait in vain.
    given_up: AtomicU32,
    ranks: [Seat; MAX_RANKS],
}

impl Seats {
    /// Wait until all others have read what `rank` laid two rounds before `round`; the first that was late.
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

    /// Say that the part of `rank` for this round lies there.
    pub(crate) fn lay(&self, rank: usize, round: u32, purpose: u64) {
        let seat = &self.ranks[rank];
        seat.purposes[round as usize % NUM_PLACES].store(purpose, Ordering::Relaxed); // published by the round
        seat.laid.raise(round);
    }

    /// Wait until all others have laid theirs; the first that was late.
    pub(crate) fn wait_laid(
        &self,
        rank: usize,
        round: u32,
        spin: Duration,
        deadline: Option<Instant>,
    ) -> Result<(), usize> {
        self.others(rank).try_for_each(|other| self.wait_one(other, round, spin, deadline))
    }

    /// What a rank came for, in a round for which it has laid its part.
    pub(crate) fn purpose(&self, rank: usize, round: u32) -> u64 {
        self.ranks[rank].purposes[round as usize % NUM_PLACES].load(Ordering::Relaxed)
    }

    /// Let every wait end, now and later.
    #[cfg(not(loom))]
    pub(crate) fn give_up(&self) {
        // Relaxed: it says nothing but itself, and who waits looks again and again.
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

    // SAFETY: the protocol under test is what keeps a writer and a reader out of one place; loom's cell finds where not.
    unsafe impl Sync for Model {}
    // SAFETY: numbers and loom's own objects, which may go to another thread.
    unsafe impl Send for Model {}

    /// Lay a number of its own and read all others', round after round; the last one only if it is the first rank, as
    /// where numbers are gathered.
    fn meet(model: &Model, rank: usize, first: u32, num_rounds: u32, gathers: bool) {
        let value = |rank: usize, round: u32| round.wrapping_mul(10).wrapping_add(rank as u32);
        for round in (0..num_rounds).map(|index| first.wrapping_add(index)) {
            let place = round as usize % NUM_PLACES;
            assert_eq!(model.seats.wait_read(rank, round, Duration::ZERO, None), Ok(()));
            // SAFETY: every other rank has read what lay there.
            model.parts[rank][place].with_mut(|part| unsafe { *part = value(rank, round) });
            model.seats.lay(rank, round, u64::from(round));
            if gathers && rank != 0 {
                continue;
            }
            assert_eq!(model.seats.wait_laid(rank, round, Duration::ZERO, None), Ok(()));
            for other in (0..model.parts.len()).filter(|other| *other != rank) {
                assert_eq!(model.seats.purpose(other, round), u64::from(round));
                // SAFETY: laid, and not laid over before this rank comes to the next round.
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
