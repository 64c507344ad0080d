//! `KVCacheManager`: which blocks a request has, gets, shares and gives back.
//!
//! The pool knows blocks, this file knows requests: block tables, the hash chain, how many blocks a
//! step needs. Nothing here has side effects when it answers "no".

use kvblocks::{BlockHash, BlockId, BlockPool, ChainHasher};

use crate::{config::SchedulerConfig, request::Request};

/// What an admission wants beside the blocks for its next tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Admission {
    /// Blocks that must stay free afterwards.
    pub(crate) watermark_blocks: u32,
    /// Tokens that must fit now although only a part of them is scheduled.
    pub(crate) full_sequence_tokens: u32,
}

#[derive(Debug)]
pub(crate) struct KVCacheManager {
    pub(crate) pool: BlockPool,
    hasher: ChainHasher,
    block_size: u32,
    enable_caching: bool,
}

impl KVCacheManager {
    pub(crate) fn new(config: &SchedulerConfig, hasher: ChainHasher, pool: BlockPool) -> Self {
        Self { pool, hasher, block_size: config.block_size, enable_caching: config.enable_prefix_caching }
    }

    /// Collect the blocks of the longest cached prefix, at most `num_tokens - 1` tokens of it: the last
    /// token is always computed, because its logits are needed. Takes no reference.
    pub(crate) fn longest_cache_hit(&mut self, request: &mut Request, hits: &mut Vec<BlockId>) {
        hits.clear();
        if !self.enable_caching || request.cold.skip_reading_prefix_cache {
            return;
        }
        let max_blocks = ((request.num_tokens - 1) / self.block_size) as usize;
        self.extend_hashes(request, max_blocks);
        for hash in request.cold.block_hashes.iter().take(max_blocks) {
            match self.pool.lookup(hash) {
                Some(block) => hits.push(block),
                None => break,
            }
        }
    }

    /// Give a request room for `num_new_tokens` more: touch `hits`, take new blocks, register what becomes full.
    ///
    /// For a waiting request `hits` are the blocks found for it and `num_computed_tokens` is still 0.
    /// `false` when the pool cannot, with nothing changed.
    pub(crate) fn allocate_slots(
        &mut self,
        request: &mut Request,
        hits: &[BlockId],
        num_new_tokens: u32,
        admission: Option<Admission>,
        step: u64,
    ) -> bool {
        let num_computed = request.num_computed_tokens + hits.len() as u32 * self.block_size;
        let owned = request.block_table.len() as u32 + hits.len() as u32;
        let end = num_computed + num_new_tokens;
        let needed = end.div_ceil(self.block_size).saturating_sub(owned);
        if needed > 0 || !hits.is_empty() {
            // A hit that nobody holds leaves the free order too.
            let idle_hits = hits.iter().filter(|&&block| self.pool.ref_count(block) == 0).count() as u32;
            let free = self.pool.num_free();
            let mut required = needed + idle_hits;
            if let Some(admission) = admission {
                let whole = admission.full_sequence_tokens.div_ceil(self.block_size).saturating_sub(owned);
                required = required.max(whole + idle_hits) + admission.watermark_blocks;
            }
            if required > free {
                return false;
            }
            for &block in hits {
                self.pool.touch(block);
            }
            request.block_table.extend_from_slice(hits);
            request.num_registered_blocks += hits.len() as u32;
            let enough = self.pool.allocate(needed, &mut request.block_table);
            debug_assert!(enough, "the free count was checked above");
        }
        self.register_full_blocks(request, end.min(request.num_tokens), step);
        true
    }

    /// Make the blocks that `num_tokens` tokens fill findable.
    pub(crate) fn register_full_blocks(&mut self, request: &mut Request, num_tokens: u32, step: u64) {
        let full = num_tokens / self.block_size;
        if !self.enable_caching || full <= request.num_registered_blocks {
            return;
        }
        self.extend_hashes(request, full as usize);
        for index in request.num_registered_blocks..full {
            let hash = request.cold.block_hashes[index as usize];
            self.pool.register(request.block_table[index as usize], hash, step);
        }
        request.num_registered_blocks = full;
    }

    /// Take back what `request` registered in `step`, because the step will not compute it.
    pub(crate) fn withdraw(&mut self, request: &Request, step: u64) {
        for &block in request.block_table.iter().rev() {
            self.pool.withdraw(block, step);
        }
    }

    /// Make nothing of `request` findable any more, whichever step registered it.
    pub(crate) fn forget(&mut self, request: &Request) {
        for &block in request.block_table.iter().rev() {
            if let Some(step) = self.pool.registered_in(block) {
                self.pool.withdraw(block, step);
            }
        }
    }

    /// Give back all blocks, last first, so that the tail of a chain is evicted before its head.
    pub(crate) fn free(&mut self, request: &mut Request) {
        while let Some(block) = request.block_table.pop() {
            self.pool.free(block);
        }
        request.num_registered_blocks = 0;
        request.slots_left = 0;
    }

    /// Blocks of `tokens` that are cached now (a debug question: nothing is touched).
    pub(crate) fn prefix_hit_blocks(&self, token_ids: &[i32], extra_keys: &[u8]) -> u32 {
        if !self.enable_caching || token_ids.is_empty() {
            return 0;
        }
        let max_blocks = (token_ids.len() - 1) / self.block_size as usize;
        let hashes = hash_blocks(
            &self.hasher,
            self.block_size,
            &token_ids[..max_blocks * self.block_size as usize],
            extra_keys,
        );
        hashes.iter().take_while(|hash| self.pool.lookup(hash).is_some()).count() as u32
    }

    fn extend_hashes(&self, request: &mut Request, num_blocks: usize) {
        extend_block_hashes(
            &self.hasher,
            self.block_size,
            &request.token_ids,
            &request.cold.extra_keys,
            num_blocks,
            &mut request.cold.block_hashes,
        );
    }
}

/// Hashes of all full blocks of `token_ids`.
pub(crate) fn hash_blocks(
    hasher: &ChainHasher,
    block_size: u32,
    token_ids: &[i32],
    extra_keys: &[u8],
) -> Vec<BlockHash> {
    let mut hashes = Vec::with_capacity(token_ids.len() / block_size as usize);
    let num_blocks = token_ids.len() / block_size as usize;
    extend_block_hashes(hasher, block_size, token_ids, extra_keys, num_blocks, &mut hashes);
    hashes
}

/// Continue a chain up to `num_blocks` blocks. Extra keys enter the first block; the chain spreads them.
fn extend_block_hashes(
    hasher: &ChainHasher,
    block_size: u32,
    token_ids: &[i32],
    extra_keys: &[u8],
    num_blocks: usize,
    hashes: &mut Vec<BlockHash>,
) {
    let block_size = block_size as usize;
    while hashes.len() < num_blocks {
        let index = hashes.len();
        let tokens = &token_ids[index * block_size..(index + 1) * block_size];
        let extra = if index == 0 { extra_keys } else { &[] };
        hashes.push(hasher.hash_block(hashes.last(), tokens, extra));
    }
}
