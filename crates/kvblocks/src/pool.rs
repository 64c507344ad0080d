//! The block pool: reference counts, the free order, and which blocks can be found. Its owner is one thread.

use std::cell::Cell;
use std::fmt;
use std::hint::black_box;
use std::marker::PhantomData;

use crate::block::{BlockHash, BlockId, BlockState, BlockUse, MAX_BLOCKS};
use crate::counters::PoolCounters;
use crate::error::PoolError;
use crate::shared::SharedBlocks;
use crate::sync::Arc;

/// The null block's links are the ends of the free order, so that no operation has a special case.
const ENDS: usize = 0;

/// What the owner touches on every operation: four to a cache line.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Meta {
    ref_count: u32,
    /// Neighbours in the free order; meaningless while the block is held.
    previous: u32,
    next: u32,
    /// Whether the block is in the prefix index.
    registered: bool,
}

/// The owner of all blocks: allocates, shares, frees, registers and evicts them, each in constant time and in an exact
/// order. See the [crate] documentation for a block's life.
///
/// It is `Send` but not `Sync`: one thread at a time. What others may do is in [`SharedBlocks`].
///
/// ```
/// use kvblocks::{BlockPool, ChainHasher};
/// # fn main() -> Result<(), kvblocks::PoolError> {
/// let mut pool = BlockPool::new(4)?; // the null block and three others
/// let hash = ChainHasher::random().hash_block(None, &[1, 2, 3, 4], b"");
///
/// let block = pool.allocate_one().expect("three blocks are free");
/// pool.register(block, hash, 0); // full: can be found from step 0 on
/// pool.free(block); // free, but still cached
///
/// let hit = pool.lookup(&hash).expect("nothing has evicted it");
/// pool.touch(hit); // held again: no longer evictable
/// assert_eq!((hit, pool.ref_count(hit), pool.num_free()), (block, 1, 2));
/// # Ok(())
/// # }
/// ```
///
/// Sharing the owner between threads does not compile:
/// ```compile_fail
/// fn shared<T: Sync>(_: T) {}
/// shared(kvblocks::BlockPool::new(4));
/// ```
pub struct BlockPool {
    metas: Box<[Meta]>,
    /// The step that a registration belongs to; valid while the block is registered.
    steps: Box<[u64]>,
    num_free: u32,
    shared: Arc<SharedBlocks>,
    counters: Arc<PoolCounters>,
    not_sync: PhantomData<Cell<()>>,
}

impl BlockPool {
    /// A pool in which every block but the null block is free, in the order 1, 2, 3, ….
    ///
    /// # Errors
    /// [`PoolError`] if `num_blocks` is below 2 or above [`MAX_BLOCKS`].
    pub fn new(num_blocks: u32) -> Result<Self, PoolError> {
        if num_blocks < 2 {
            return Err(PoolError::TooFewBlocks { num_blocks });
        }
        if num_blocks > MAX_BLOCKS {
            return Err(PoolError::TooManyBlocks { num_blocks });
        }
        let last = num_blocks - 1;
        let meta = |id: u32| Meta {
            ref_count: 0,
            previous: id.checked_sub(1).unwrap_or(last),
            next: if id == last { 0 } else { id + 1 },
            registered: false,
        };
        let shared = Arc::new(SharedBlocks::new(num_blocks));
        shared.counters.set_num_free(last);
        Ok(Self {
            metas: (0..num_blocks).map(meta).collect(),
            steps: vec![0; num_blocks as usize].into_boxed_slice(),
            num_free: last,
            counters: Arc::clone(&shared.counters),
            shared,
            not_sync: PhantomData,
        })
    }

    /// Blocks of the pool, the null block included.
    #[inline]
    #[must_use]
    pub fn num_blocks(&self) -> u32 {
        self.metas.len() as u32
    }

    /// Blocks that can be allocated now: the uncached free ones and the cached ones that no request holds.
    #[inline]
    #[must_use]
    pub fn num_free(&self) -> u32 {
        self.num_free
    }

    /// Takes the first block of the free order with one reference; if it was cached, it no longer is. `None` when
    /// no block is free.
    #[inline]
    pub fn allocate_one(&mut self) -> Option<BlockId> {
        let block = BlockId(self.metas[ENDS].next);
        if block.is_null() {
            return None;
        }
        self.unlink(block);
        let meta = &mut self.metas[block.index()];
        meta.ref_count = 1;
        if meta.registered {
            meta.registered = false;
            self.shared.index.remove(block);
            self.counters.evicted();
        }
        Some(block)
    }

    /// Appends `n` new blocks to `out` and returns true, or does nothing and returns false if fewer are free.
    pub fn allocate(&mut self, n: u32, out: &mut Vec<BlockId>) -> bool {
        if n > self.num_free {
            return false;
        }
        out.extend((0..n).map_while(|_| self.allocate_one()));
        true
    }

    /// Takes one more reference; a block without a holder leaves the free order and keeps its content.
    ///
    /// # Panics
    /// If `block` is the null block or not of this pool: the caller's block table is wrong.
    #[inline]
    pub fn touch(&mut self, block: BlockId) {
        self.check_usable(block, "touch");
        let ref_count = self.metas[block.index()].ref_count;
        if ref_count == 0 {
            self.unlink(block);
        }
        let Some(more) = ref_count.checked_add(1) else {
            broken(block, "touch", "its reference count is full")
        };
        self.metas[block.index()].ref_count = more;
    }

    /// Drops one reference. With the last one the block becomes free: at the front of the free order if it was not
    /// cached (its memory is the warmest), else at the end (it is the most recently used).
    ///
    /// Free the blocks of a request in reverse, so that the tail of a chain is evicted before its head: a tail without
    /// its head can never be hit.
    ///
    /// # Panics
    /// If no request holds the block (a double free), or it is the null block or not of this pool.
    #[inline]
    pub fn free(&mut self, block: BlockId) {
        self.check_usable(block, "free");
        let meta = &mut self.metas[block.index()];
        let Some(fewer) = meta.ref_count.checked_sub(1) else {
            broken(block, "free", "no request holds it: a double free")
        };
        meta.ref_count = fewer;
        if fewer == 0 {
            let after = if meta.registered { self.metas[ENDS].previous as usize } else { ENDS };
            self.link_after(after, block);
        }
    }

    /// How many references to the block there are; 0 for a free block and for the null block.
    ///
    /// # Panics
    /// If `block` is not of this pool.
    #[inline]
    #[must_use]
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.metas[block.index()].ref_count
    }

    /// The block to use for this content, held or free; of several with the same content, the one registered first.
    /// Takes no reference: [`touch`](Self::touch) it before anything is allocated.
    #[inline]
    #[must_use]
    pub fn lookup(&self, hash: &BlockHash) -> Option<BlockId> {
        self.shared.index.lookup(*hash)
    }

    /// Makes a held block findable: it is full, and it holds `hash`'s content from `step` on. Does nothing if it is
    /// registered under this hash already (that registration stands, with its own step).
    ///
    /// The same content may be in several blocks; each is registered for itself.
    ///
    /// # Panics
    /// If no request holds the block, if it is registered under another hash, or if it is the null block or not of
    /// this pool.
    #[inline]
    pub fn register(&mut self, block: BlockId, hash: BlockHash, step: u64) {
        self.check_usable(block, "register");
        let meta = &mut self.metas[block.index()];
        if meta.ref_count == 0 {
            broken(block, "register", "no request holds it");
        }
        if meta.registered {
            if self.shared.index.hash_of(block) != Some(hash) {
                broken(block, "register", "it is registered under another hash");
            }
            return;
        }
        meta.registered = true;
        self.steps[block.index()] = step;
        self.shared.index.insert(block, hash);
        self.counters.registered();
    }

    /// Brings what [`register`](Self::register) of this block will touch nearer to the processor, and changes nothing.
    /// These lines are far apart and far away: who registers many blocks asks for all of them first, so that the waits
    /// overlap.
    ///
    /// # Panics
    /// If `block` is not of this pool.
    #[inline]
    pub fn approach(&self, block: BlockId, hash: &BlockHash) {
        let meta = self.metas[block.index()].ref_count ^ self.steps[block.index()] as u32;
        // Only the loads are wanted: the compiler must not leave them out because their result is not used.
        black_box(meta ^ self.shared.index.approach(block, *hash));
    }

    /// Undoes a registration made in `step`, because its request left the step before it ran or because the step
    /// failed: the content was never written. Returns whether there was one; a registration of another step stands.
    ///
    /// References do not change. If the block is free already, it moves to the front of the free order, where
    /// uncached blocks are.
    ///
    /// # Panics
    /// If `block` is the null block or not of this pool.
    pub fn withdraw(&mut self, block: BlockId, step: u64) -> bool {
        self.check_usable(block, "withdraw");
        let meta = &mut self.metas[block.index()];
        if !meta.registered || self.steps[block.index()] != step {
            return false;
        }
        meta.registered = false;
        let is_free = meta.ref_count == 0;
        self.shared.index.remove(block);
        self.counters.withdrawn();
        if is_free {
            self.unlink(block);
            self.link_after(ENDS, block);
        }
        true
    }

    /// The content under which the block can be found.
    ///
    /// # Panics
    /// If `block` is not of this pool.
    #[inline]
    #[must_use]
    pub fn block_hash(&self, block: BlockId) -> Option<BlockHash> {
        self.shared.index.hash_of(block)
    }

    /// The step that the block's registration belongs to.
    ///
    /// # Panics
    /// If `block` is not of this pool.
    #[inline]
    #[must_use]
    pub fn registered_in(&self, block: BlockId) -> Option<u64> {
        self.metas[block.index()].registered.then(|| self.steps[block.index()])
    }

    /// Forgets all cached content. Returns false and does nothing while any block is held. The free order stays.
    /// O(blocks).
    pub fn reset_prefix_cache(&mut self) -> bool {
        if self.num_free != self.num_blocks() - 1 {
            return false;
        }
        self.shared.index.clear();
        for meta in &mut self.metas {
            meta.registered = false;
        }
        self.counters.uncached(self.counters.num_cached());
        true
    }

    /// Frees every reference that other threads have handed back, in the order of arrival; returns how many.
    ///
    /// # Panics
    /// If more references to a block came back than there were: a double free in another thread. The lists are sound, but
    /// what had come back after it stays held: the pool is not to be used further.
    pub fn drain_returned(&mut self) -> u32 {
        let mut returned = self.shared.returns.take();
        let mut drained = 0;
        while let Some((block, references)) = self.shared.returns.next(&mut returned) {
            for _ in 0..references {
                self.free(block);
            }
            drained += references;
        }
        self.counters.add_returned(drained);
        drained
    }

    /// Counts one admission's use of the prefix cache: of `queried` full blocks, `hits` were there. Once per
    /// admission, not per attempt.
    pub fn record_prefix_query(&mut self, queried: u64, hits: u64) {
        self.counters.add_prefix_query(queried, hits);
    }

    /// Share of the usable blocks that are held, 0.0 to 1.0.
    #[must_use]
    pub fn usage(&self) -> f64 {
        self.counters.usage()
    }

    /// The statistics, readable from any thread.
    #[must_use]
    pub fn counters(&self) -> Arc<PoolCounters> {
        Arc::clone(&self.counters)
    }

    /// What other threads may use.
    #[must_use]
    pub fn shared(&self) -> Arc<SharedBlocks> {
        Arc::clone(&self.shared)
    }

    /// A snapshot of one block, for tests and people. O(blocks): it counts its way along the free order.
    ///
    /// # Panics
    /// If `block` is not of this pool.
    #[must_use]
    pub fn block_state(&self, block: BlockId) -> BlockState {
        let free_position = self.free_blocks().position(|free| free == block);
        self.state_at(block, free_position.map(|position| position as u32))
    }

    /// Snapshots of all blocks, in the order of their numbers. O(blocks): one walk along the free order serves all.
    #[must_use]
    pub fn block_states(&self) -> Vec<BlockState> {
        let mut free_positions = vec![None; self.metas.len()];
        for (position, block) in (0..).zip(self.free_blocks()) {
            free_positions[block.index()] = Some(position);
        }
        (0..).zip(free_positions).map(|(id, position)| self.state_at(BlockId(id), position)).collect()
    }

    fn state_at(&self, block: BlockId, free_position: Option<u32>) -> BlockState {
        BlockState {
            block,
            ref_count: self.ref_count(block),
            hash: self.block_hash(block),
            registered_in: self.registered_in(block),
            free_position,
            is_null: block.is_null(),
        }
    }

    /// What a block is used for, in constant time.
    ///
    /// # Panics
    /// If `block` is not of this pool.
    #[inline]
    #[must_use]
    pub fn block_use(&self, block: BlockId) -> BlockUse {
        let meta = &self.metas[block.index()];
        match (meta.ref_count, meta.registered) {
            _ if block.is_null() => BlockUse::Null,
            (0, false) => BlockUse::Free,
            (0, true) => BlockUse::Cached,
            (1, _) => BlockUse::Used,
            _ => BlockUse::Shared,
        }
    }

    /// The order in which [`allocate`](Self::allocate) would take the free blocks, for tests and people.
    #[must_use]
    pub fn free_order(&self) -> Vec<BlockId> {
        self.free_blocks().collect()
    }

    /// Panics unless every invariant of the [crate] documentation holds. O(blocks); allocates.
    ///
    /// # Panics
    /// With the violated invariant.
    pub fn check_invariants(&self) {
        let mut in_free_order = vec![false; self.metas.len()];
        let mut previous = ENDS as u32;
        let mut count = 0;
        let mut cached_seen = false;
        loop {
            let id = self.metas[previous as usize].next;
            assert_eq!(
                self.metas[id as usize].previous, previous,
                "free order: block {id} does not link back"
            );
            if id == ENDS as u32 {
                break;
            }
            let meta = &self.metas[id as usize];
            assert!(!in_free_order[id as usize], "free order: block {id} is in it twice");
            in_free_order[id as usize] = true;
            assert_eq!(meta.ref_count, 0, "free order: block {id} is held");
            assert!(
                !cached_seen || meta.registered,
                "free order: uncached block {id} is behind a cached one"
            );
            cached_seen |= meta.registered;
            previous = id;
            count += 1;
        }
        assert_eq!(count, self.num_free, "num_free is not the length of the free order");
        for (id, meta) in self.metas.iter().enumerate().skip(1) {
            assert_eq!(meta.ref_count == 0, in_free_order[id], "block {id} is lost, or both free and held");
        }
        let null = &self.metas[ENDS];
        assert!(null.ref_count == 0 && !null.registered, "the null block was held or cached");
        self.shared.index.check_invariants(|block| self.metas[block.index()].registered);
        let num_cached = self.metas.iter().filter(|meta| meta.registered).count();
        assert_eq!(self.counters.num_cached(), num_cached as u64, "counter num_cached is wrong");
        assert_eq!(self.counters.num_free(), u64::from(self.num_free), "counter num_free is wrong");
    }

    /// The free order, lazily.
    fn free_blocks(&self) -> impl Iterator<Item = BlockId> {
        let next =
            |block: &BlockId| Some(BlockId(self.metas[block.index()].next)).filter(|next| !next.is_null());
        std::iter::successors(next(&BlockId::NULL), next)
    }

    /// A block table that names a block which cannot be held must not go on: the caches of others are at stake.
    #[inline]
    fn check_usable(&self, block: BlockId, operation: &str) {
        if block.is_null() {
            broken(block, operation, "it is the null block");
        }
        if block.index() >= self.metas.len() {
            broken(block, operation, "it is not of this pool");
        }
    }

    /// Takes a block out of the free order.
    #[inline]
    fn unlink(&mut self, block: BlockId) {
        let Meta { previous, next, .. } = self.metas[block.index()];
        self.metas[previous as usize].next = next;
        self.metas[next as usize].previous = previous;
        self.num_free -= 1;
        self.counters.set_num_free(self.num_free);
    }

    /// Puts a block into the free order.
    #[inline]
    fn link_after(&mut self, previous: usize, block: BlockId) {
        let next = self.metas[previous].next;
        self.metas[previous].next = block.0;
        self.metas[next as usize].previous = block.0;
        let meta = &mut self.metas[block.index()];
        meta.previous = previous as u32;
        meta.next = next;
        self.num_free += 1;
        self.counters.set_num_free(self.num_free);
    }
}

impl fmt::Debug for BlockPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockPool").field("counters", &self.counters).finish_non_exhaustive()
    }
}

/// A caller broke the rules: stop before the lists do. Whatever catches the panic marks the engine as dead.
#[cold]
#[inline(never)]
fn broken(block: BlockId, operation: &str, reason: &str) -> ! {
    panic!("{operation} of {block}: {reason}");
}
