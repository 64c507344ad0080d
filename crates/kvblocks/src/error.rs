//! Invalid arguments for a pool.

use crate::block::MAX_BLOCKS;

/// Why a pool could not be made. Running out of blocks is a value (`None`, `false`), never an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// Block 0 is the null block, so one more is the least that can hold anything.
    #[error(
        "num_blocks is {num_blocks}, but a pool needs at least 2 blocks: the null block and one usable block"
    )]
    TooFewBlocks {
        /// The requested number.
        num_blocks: u32,
    },
    /// The index is sized at twice the number of blocks and addressed with 32 bits.
    #[error(
        "num_blocks is {num_blocks}, but a pool has at most {MAX_BLOCKS} blocks; use a larger block size"
    )]
    TooManyBlocks {
        /// The requested number.
        num_blocks: u32,
    },
}
