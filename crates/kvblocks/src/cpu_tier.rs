//! The CPU tier: blocks in host memory to which the KV of preempted requests moves, and from which it comes back.
//!
//! ```text
//!            swap_out                  swap_in                  take_copies
//!   Free ───────────────▶ Held ─────────────────────▶ Leaving ──────────────▶ Free
//!                           └───────── discard ─────────────────────────────▶ Free
//! ```
//!
//! `Leaving` exists because a step's copies run in the order out, in, copy. A swap-out of a step must not overwrite a
//! CPU block that the same step reads, so such a block can be taken again only from the next step on.

use std::fmt;

use crate::block::{BlockId, CpuBlockId};
use crate::copies::BlockCopies;
use crate::pool::BlockPool;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    Held,
    Leaving,
}

/// Owner of the CPU blocks and of the copies that the step being scheduled needs. Belongs to the thread that owns the
/// [`BlockPool`]; nothing of it is shared.
///
/// ```
/// use kvblocks::{BlockCopies, BlockPool, CpuTier};
/// # fn main() -> Result<(), kvblocks::PoolError> {
/// let mut pool = BlockPool::new(4)?;
/// let mut cpu_tier = CpuTier::new(2);
/// let mut table = Vec::new();
/// pool.allocate(2, &mut table);
///
/// // Step 1: the request is preempted.
/// let pairs = cpu_tier.swap_out(&table).expect("two CPU blocks are free");
/// table.drain(..).rev().for_each(|block| pool.free(block));
/// let mut copies = BlockCopies::default();
/// cpu_tier.take_copies(&mut copies);
/// assert_eq!(copies.blocks_to_swap_out, pairs);
///
/// // Step 2: it comes back, into whatever blocks are free.
/// let on_cpu: Vec<_> = pairs.iter().map(|pair| pair.1).collect();
/// pool.allocate(2, &mut table);
/// cpu_tier.swap_in(&on_cpu, &table);
/// cpu_tier.take_copies(&mut copies);
/// assert_eq!(copies.blocks_to_swap_in.len(), 2);
/// assert_eq!(cpu_tier.num_free(), 2);
/// # Ok(())
/// # }
/// ```
pub struct CpuTier {
    states: Box<[State]>,
    /// Last in, first out.
    free: Vec<CpuBlockId>,
    /// Read by this step's swap-ins; free from the next step on.
    leaving: Vec<CpuBlockId>,
    copies: BlockCopies,
}

impl CpuTier {
    /// Make a tier of `num_blocks` free blocks. With 0, the tier is always full, and every preempted request is
    /// recomputed.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        Self {
            states: vec![State::Free; num_blocks as usize].into_boxed_slice(),
            free: (0..num_blocks).rev().map(CpuBlockId).collect(),
            leaving: Vec::with_capacity(num_blocks as usize),
            copies: BlockCopies::default(),
        }
    }

    /// CPU blocks in all.
    #[must_use]
    pub fn num_blocks(&self) -> u32 {
        self.states.len() as u32
    }

    /// CPU blocks that a swap-out of the current step can take.
    #[must_use]
    pub fn num_free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Plan to copy these GPU blocks, in order, to CPU blocks that this call takes. Returns `(GPU, CPU)` pairs, which
    /// are also added to the step's `blocks_to_swap_out`. If too few CPU blocks are free, returns `None` and changes
    /// nothing.
    ///
    /// The GPU blocks may be freed at once, because the copies out come first in the step. They must hold finished KV,
    /// so no step that writes them may be in flight.
    ///
    /// # Panics
    /// If a block is the null block.
    pub fn swap_out(&mut self, blocks: &[BlockId]) -> Option<Vec<(BlockId, CpuBlockId)>> {
        if blocks.len() > self.free.len() {
            return None;
        }
        assert!(!blocks.contains(&BlockId::NULL), "swap_out of the null block");
        let taken = self.free.split_off(self.free.len() - blocks.len());
        for cpu_block in &taken {
            self.states[cpu_block.0 as usize] = State::Held;
        }
        let pairs: Vec<_> = blocks.iter().copied().zip(taken.into_iter().rev()).collect();
        self.copies.blocks_to_swap_out.extend_from_slice(&pairs);
        Some(pairs)
    }

    /// Plan to copy CPU blocks to GPU blocks that the caller has allocated, pair by pair, and give up the CPU blocks.
    /// Returns `(CPU, GPU)` pairs, which are also added to the step's `blocks_to_swap_in`. A request comes back with
    /// all its blocks in one step. Those whose content is still in the prefix cache need no copy: touch them, and
    /// [`discard`] the CPU blocks.
    ///
    /// [`discard`]: Self::discard
    ///
    /// # Panics
    /// If the slices differ in length, a CPU block is not held, or a GPU block is the null block.
    pub fn swap_in(&mut self, cpu_blocks: &[CpuBlockId], blocks: &[BlockId]) -> Vec<(CpuBlockId, BlockId)> {
        assert_eq!(
            cpu_blocks.len(),
            blocks.len(),
            "swap_in of {} CPU blocks: as many GPU blocks",
            cpu_blocks.len()
        );
        assert!(!blocks.contains(&BlockId::NULL), "swap_in to the null block");
        for &cpu_block in cpu_blocks {
            self.change(cpu_block, State::Leaving, "swap_in");
            self.leaving.push(cpu_block);
        }
        let pairs: Vec<_> = cpu_blocks.iter().copied().zip(blocks.iter().copied()).collect();
        self.copies.blocks_to_swap_in.extend_from_slice(&pairs);
        pairs
    }

    /// Give up CPU blocks unread, because their request has finished or will be recomputed. Planned swap-outs to them
    /// are dropped, unless their step was launched.
    ///
    /// # Panics
    /// If a CPU block is not held.
    pub fn discard(&mut self, cpu_blocks: &[CpuBlockId]) {
        for &cpu_block in cpu_blocks.iter().rev() {
            self.change(cpu_block, State::Free, "discard");
            self.free.push(cpu_block);
            self.copies.blocks_to_swap_out.retain(|pair| pair.1 != cpu_block);
        }
    }

    /// Plan to copy one held GPU block to another (copy-on-write).
    ///
    /// # Panics
    /// If the blocks are the same, or one is the null block.
    pub fn copy(&mut self, from: BlockId, to: BlockId) {
        assert!(from != to && !from.is_null() && !to.is_null(), "copy of {from} to {to}");
        self.copies.blocks_to_copy.push((from, to));
    }

    /// Drop this step's planned copies *into* a GPU block, because its request left the step before it ran. Call this
    /// before the block is freed, so that its next holder is not overwritten. A cancelled swap-in has given up its CPU
    /// block nevertheless: the request is recomputed.
    pub fn cancel_copies_to(&mut self, block: BlockId) {
        self.copies.blocks_to_swap_in.retain(|pair| pair.1 != block);
        self.copies.blocks_to_copy.retain(|pair| pair.1 != block);
    }

    /// The copies planned for the step so far.
    #[must_use]
    pub fn planned(&self) -> &BlockCopies {
        &self.copies
    }

    /// End the planning of a step: exchange the planned copies for the lists in `into`, which are cleared and reused
    /// for the next step. CPU blocks that the step reads can be taken again afterwards.
    pub fn take_copies(&mut self, into: &mut BlockCopies) {
        into.clear();
        std::mem::swap(into, &mut self.copies);
        for cpu_block in self.leaving.drain(..).rev() {
            self.states[cpu_block.0 as usize] = State::Free;
            self.free.push(cpu_block);
        }
    }

    /// Panic unless each CPU block is in exactly one state and place, and the planned copies are valid for the GPU
    /// blocks' pool. May be called before [`take_copies`](Self::take_copies) and after it.
    ///
    /// # Panics
    /// An invariant is violated; names it.
    pub fn check_invariants(&self, pool: &BlockPool) {
        let mut places = vec![State::Held; self.states.len()];
        for (list, state) in [(&self.free, State::Free), (&self.leaving, State::Leaving)] {
            for cpu_block in list {
                let place = &mut places[cpu_block.0 as usize];
                assert_eq!(*place, State::Held, "{cpu_block} is listed twice");
                *place = state;
            }
        }
        assert_eq!(*places, *self.states, "a CPU block is not where its state says");

        let copies = &self.copies;
        let mut cpu_targets = vec![false; self.states.len()];
        for &(_, cpu_block) in &copies.blocks_to_swap_out {
            let state = self.states[cpu_block.0 as usize];
            assert_ne!(state, State::Free, "{cpu_block} is free, but a swap-out writes it");
            let seen = std::mem::replace(&mut cpu_targets[cpu_block.0 as usize], true);
            assert!(!seen, "two swap-outs write {cpu_block}");
        }
        let mut targets = vec![false; pool.num_blocks() as usize];
        let into = copies.blocks_to_swap_in.iter().map(|pair| pair.1);
        for block in into.chain(copies.blocks_to_copy.iter().map(|pair| pair.1)) {
            assert_ne!(pool.ref_count(block), 0, "{block} is free, but a copy writes it");
            assert!(!std::mem::replace(&mut targets[block.index()], true), "two copies write {block}");
        }
        for &(cpu_block, _) in &copies.blocks_to_swap_in {
            assert_eq!(
                self.states[cpu_block.0 as usize],
                State::Leaving,
                "{cpu_block} is read, but was not given up"
            );
        }
        for &(from, _) in &copies.blocks_to_copy {
            assert_ne!(pool.ref_count(from), 0, "{from} is free, but a copy reads it");
        }
    }

    /// Change the state of a held block.
    fn change(&mut self, cpu_block: CpuBlockId, to: State, operation: &str) {
        match self.states.get_mut(cpu_block.0 as usize) {
            Some(state @ State::Held) => *state = to,
            Some(state) => panic!("{operation} of {cpu_block}: it is {state:?}, not held"),
            None => panic!("{operation} of {cpu_block}: the tier has {} blocks", self.states.len()),
        }
    }
}

impl fmt::Debug for CpuTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuTier")
            .field("num_blocks", &self.num_blocks())
            .field("num_free", &self.num_free())
            .field("planned", &self.copies)
            .finish_non_exhaustive()
    }
}
