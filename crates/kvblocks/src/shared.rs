//! What threads other than the owner can do with a pool.

use std::fmt;

use crate::block::{BlockHash, BlockId};
use crate::counters::PoolCounters;
use crate::prefix_index::PrefixIndex;
use crate::return_stack::ReturnStack;
use crate::sync::Arc;

/// The part of a pool that any thread may use, without a lock, while the owner works.
pub struct SharedBlocks {
    pub(crate) index: PrefixIndex,
    pub(crate) returns: ReturnStack,
    pub(crate) counters: Arc<PoolCounters>,
}

impl SharedBlocks {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self {
            index: PrefixIndex::new(num_blocks),
            returns: ReturnStack::new(num_blocks),
            counters: Arc::new(PoolCounters::new(num_blocks)),
        }
    }

    /// Gives back one reference to a block.
    ///
    /// References are what the owner counts: [`allocate`](crate::BlockPool::allocate) makes the first,
    /// [`touch`](crate::BlockPool::touch) one more. The owner may let another thread answer for a reference; that
    /// thread then gives it back here, once, and the owner must not free it itself. A block of which other threads
    /// hold several references comes back as often, from the same thread or from several at once. It stays held until
    /// the owner's [`drain_returned`](crate::BlockPool::drain_returned), which frees references in the order in which
    /// their blocks arrived; so, like the owner, give the blocks of a request back last block first.
    ///
    /// Lock-free, allocates nothing, never full. More references given back than there are is a double free: the
    /// drain panics.
    ///
    /// # Panics
    /// If `block` is the null block or not of this pool.
    pub fn hand_back(&self, block: BlockId) {
        self.returns.push(block);
    }

    /// A block that was registered under `hash` at some moment during this call.
    ///
    /// The answer is a hint. It is never a block of other content, but the owner may evict the block before the
    /// caller looks at the answer, and a content that is there may be missed while a twin takes its entry over. Only
    /// the owner's [`lookup`](crate::BlockPool::lookup) decides. Wait-free.
    #[must_use]
    pub fn lookup_hint(&self, hash: &BlockHash) -> Option<BlockId> {
        self.index.lookup_hint(*hash)
    }

    /// The number of leading blocks of a chain that [`lookup_hint`](Self::lookup_hint) finds.
    #[must_use]
    pub fn prefix_hint(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|hash| self.lookup_hint(hash).is_some()).count()
    }

    /// The statistics of the pool.
    #[must_use]
    pub fn counters(&self) -> &PoolCounters {
        &self.counters
    }
}

impl fmt::Debug for SharedBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBlocks").field("counters", &self.counters).finish_non_exhaustive()
    }
}
