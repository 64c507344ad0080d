//! The blocks of a paged KV cache: who holds them, in which order they are reused, and what can be found in them.
#![forbid(unsafe_code)]

mod block;
mod copies;
mod counters;
mod cpu_tier;
mod error;
mod hash;
mod pool;
mod prefix_index;
mod return_stack;
mod shared;
mod sync;

pub use block::{BlockHash, BlockId, BlockState};
pub use copies::BlockCopies;
pub use counters::PoolCounters;
pub use cpu_tier::{CpuBlockId, CpuTier};
pub use error::PoolError;
pub use hash::ChainHasher;
pub use pool::{BlockPool, MAX_BLOCKS};
pub use shared::SharedBlocks;
