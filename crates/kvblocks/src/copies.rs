//! The block copies of one step, as lists of pairs; `SchedulerOutput` passes them to the worker.

use crate::block::{BlockId, CpuBlockId};

/// Copies that the worker makes before a step's forward pass, **in this order**: all of `blocks_to_swap_out`, then all
/// of `blocks_to_swap_in`, then all of `blocks_to_copy`. So a block that is swapped out may be given to another request
/// in the same step, and a block may be copied right after it was swapped in. Steps, and therefore their copies, run in
/// order. Within a list the order does not matter: no two pairs of one list have the same target.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct BlockCopies {
    /// From GPU to CPU. The GPU blocks may be free by now.
    pub blocks_to_swap_out: Vec<(BlockId, CpuBlockId)>,
    /// From CPU to GPU. The GPU blocks are held.
    pub blocks_to_swap_in: Vec<(CpuBlockId, BlockId)>,
    /// From GPU to GPU, for copy-on-write. Source and target are held until the step is launched.
    pub blocks_to_copy: Vec<(BlockId, BlockId)>,
}

impl BlockCopies {
    /// Whether there is nothing to copy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks_to_swap_out.is_empty()
            && self.blocks_to_swap_in.is_empty()
            && self.blocks_to_copy.is_empty()
    }

    /// Empties the lists and keeps their memory.
    pub fn clear(&mut self) {
        self.blocks_to_swap_out.clear();
        self.blocks_to_swap_in.clear();
        self.blocks_to_copy.clear();
    }
}
