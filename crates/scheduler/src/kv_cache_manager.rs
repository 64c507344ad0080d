//! `KVCacheManager`: the blocks of requests: which ones they have, get, share and give back.
//!
//! The pool knows blocks, this file knows requests: block tables, the hash chain, and how many blocks a step needs. A
//! method that answers "no" has changed nothing.

pub(crate) mod extra_keys;

use std::collections::VecDeque;

use kvblocks::{BlockHash, BlockId, BlockPool, ChainHasher, CpuBlockId, CpuTier};

use crate::{
    config::SchedulerConfig,
    kv_cache_manager::extra_keys::ExtraKeys,
    request::{Request, RequestStatus},
    requests::Requests,
};

/// What an admission requires in addition to the blocks for its next tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Admission {
    /// Blocks that must stay free afterwards.
    pub(crate) watermark_blocks: u32,
    /// Tokens that must fit now, although only a part of them is scheduled.
    pub(crate) full_sequence_tokens: u32,
}

#[derive(Debug)]
pub(crate) struct KVCacheManager {
    pub(crate) pool: BlockPool,
    pub(crate) cpu: CpuTier,
    hasher: ChainHasher,
    block_size: u32,
    enable_caching: bool,
    /// Registrations of the steps in flight and of the one being planned, oldest first.
    unsettled: VecDeque<(u64, BlockId)>,
}

impl KVCacheManager {
    pub(crate) fn new(config: &SchedulerConfig, hasher: ChainHasher, pool: BlockPool) -> Self {
        let blocks_per_step =
            (config.max_num_batched_tokens / config.block_size + config.max_num_seqs).min(config.num_blocks);
        Self {
            pool,
            cpu: CpuTier::new(config.num_cpu_blocks),
            hasher,
            block_size: config.block_size,
            enable_caching: config.enable_prefix_caching,
            unsettled: VecDeque::with_capacity((blocks_per_step * config.max_steps_in_flight) as usize),
        }
    }

    /// Collect the blocks of the longest cached prefix of at most `num_tokens` tokens, without taking references.
    /// Returns `false` if nothing was looked up, because the cache is off or the request may not read it.
    pub(crate) fn longest_cache_hit(
        &mut self,
        request: &mut Request,
        num_tokens: u32,
        hits: &mut Vec<BlockId>,
    ) -> bool {
        hits.clear();
        if !self.enable_caching || request.cold.skip_reading_prefix_cache {
            return false;
        }
        let max_blocks = (num_tokens / self.block_size) as usize;
        self.extend_hashes(request, max_blocks);
        for hash in request.cold.block_hashes.iter().take(max_blocks) {
            match self.pool.lookup(hash) {
                Some(block) => hits.push(block),
                None => break,
            }
        }
        true
    }

    /// Give a request room for positions `0..end`: touch `hits`, allocate new blocks, and register those that become
    /// full.
    ///
    /// `hits` must go to the front of an empty block table. Returns `false`, with nothing changed, if the pool has too
    /// few blocks.
    pub(crate) fn allocate_slots(
        &mut self,
        request: &mut Request,
        hits: &[BlockId],
        end: u32,
        admission: Option<Admission>,
        step: u64,
    ) -> bool {
        debug_assert!(hits.is_empty() || request.block_table.is_empty(), "hits come first");
        let owned = request.block_table.len() as u32 + hits.len() as u32;
        let needed = end.div_ceil(self.block_size).saturating_sub(owned);
        if needed > 0 || !hits.is_empty() {
            // A hit that no request holds leaves the free order too.
            let idle_hits = hits.iter().filter(|&&block| self.pool.ref_count(block) == 0).count() as u32;
            let mut required = needed + idle_hits;
            if let Some(admission) = admission {
                let whole = admission.full_sequence_tokens.div_ceil(self.block_size).saturating_sub(owned);
                required = required.max(whole + idle_hits) + admission.watermark_blocks;
            }
            if required > self.pool.num_free() {
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
        self.register_full_blocks(request, end.min(request.num_tokens), Some(step));
        true
    }

    /// Give a request room for drafts at positions up to `end`; the caller knows that there are enough free blocks.
    /// Nothing is registered, because it is not known yet whether the drafts are right.
    pub(crate) fn grow(&mut self, request: &mut Request, end: u32) {
        let needed = end.div_ceil(self.block_size).saturating_sub(request.block_table.len() as u32);
        let enough = self.pool.allocate(needed, &mut request.block_table);
        debug_assert!(enough, "drafts are cut to the free blocks");
    }

    /// Register the blocks that `num_tokens` known tokens fill. `step` computes them; `None`: they are computed.
    pub(crate) fn register_full_blocks(&mut self, request: &mut Request, num_tokens: u32, step: Option<u64>) {
        let full = num_tokens / self.block_size;
        if !self.enable_caching || full <= request.num_registered_blocks {
            return;
        }
        self.extend_hashes(request, full as usize);
        for index in request.num_registered_blocks..full {
            let block = request.block_table[index as usize];
            // Step 0 is never in flight, so its registrations are never withdrawn.
            self.pool.register(block, request.cold.block_hashes[index as usize], step.unwrap_or(0));
            if let Some(step) = step {
                self.unsettled.push_back((step, block));
            }
        }
        request.num_registered_blocks = full;
    }

    /// Register the blocks that known tokens fill, for several requests: slots, and their numbers of tokens. The result
    /// is that of [`register_full_blocks`](Self::register_full_blocks) for each; `step` computes the blocks.
    ///
    /// Blocks of two requests are hashed together, which takes little longer than those of one; and all are hashed before
    /// the first is registered, so that the waits for what registering touches overlap.
    pub(crate) fn register_together(&mut self, requests: &mut Requests, filled: &[(u32, u32)], step: u64) {
        if self.enable_caching {
            for pair in filled.chunks(2) {
                self.hash_pair(requests, pair);
                for &(slot, num_tokens) in pair {
                    self.prepare_to_register(&mut requests[slot as usize], num_tokens);
                }
            }
        }
        for &(slot, num_tokens) in filled {
            self.register_full_blocks(&mut requests[slot as usize], num_tokens, Some(step));
        }
    }

    /// Hash what a request has to register, and bring near what that will touch.
    fn prepare_to_register(&self, request: &mut Request, num_tokens: u32) {
        let full = (num_tokens / self.block_size) as usize;
        self.extend_hashes(request, full);
        let blocks = request.block_table.iter().zip(&request.cold.block_hashes);
        for (&block, hash) in blocks.take(full).skip(request.num_registered_blocks as usize) {
            self.pool.approach(block, hash);
        }
    }

    /// Make the registrations of steps up to `step` final, because it was updated.
    pub(crate) fn settle(&mut self, step: u64) {
        while self.unsettled.front().is_some_and(|&(registered_in, _)| registered_in <= step) {
            self.unsettled.pop_front();
        }
    }

    /// Withdraw every registration of the steps in flight, because none of them will compute anything.
    pub(crate) fn withdraw_unsettled(&mut self) {
        while let Some((step, block)) = self.unsettled.pop_back() {
            self.pool.withdraw(block, step);
        }
    }

    /// Withdraw what `request` registered in `step`, because it leaves that step before it runs.
    pub(crate) fn withdraw(&mut self, request: &mut Request, step: u64) {
        while let Some(last) = request.num_registered_blocks.checked_sub(1) {
            if !self.pool.withdraw(request.block_table[last as usize], step) {
                break;
            }
            request.num_registered_blocks = last;
        }
    }

    /// Unregister everything of `request`, whichever step registered it. If it has given up its blocks meanwhile,
    /// unregister all blocks with its content.
    pub(crate) fn forget(&mut self, request: &mut Request) {
        for &block in request.block_table.iter().rev() {
            self.forget_block(block);
        }
        if request.status != RequestStatus::Preempted || !self.enable_caching {
            return;
        }
        self.extend_hashes(request, (request.num_tokens / self.block_size) as usize);
        for hash in request.cold.block_hashes.iter().rev() {
            while let Some(block) = self.pool.lookup(hash) {
                self.forget_block(block);
            }
        }
    }

    fn forget_block(&mut self, block: BlockId) {
        if let Some(step) = self.pool.registered_in(block) {
            self.pool.withdraw(block, step);
        }
    }

    /// Give back all blocks, the last first, so that the tail of a chain is evicted before its head.
    pub(crate) fn free(&mut self, request: &mut Request) {
        while let Some(block) = request.block_table.pop() {
            self.pool.free(block);
        }
        request.num_registered_blocks = 0;
        request.slots_left = 0;
    }

    /// Plan to move a request's KV to CPU memory and give its blocks back; `false`, with nothing changed, if CPU memory
    /// is full.
    pub(crate) fn swap_out(&mut self, request: &mut Request) -> bool {
        let used = request.num_computed_tokens.div_ceil(self.block_size) as usize;
        let Some(pairs) = self.cpu.swap_out(&request.block_table[..used]) else { return false };
        request.cold.cpu_blocks.extend(pairs.iter().map(|&(_, cpu_block)| cpu_block));
        self.free(request);
        true
    }

    /// Plan to bring a request's KV back into the blocks that it has now; the first `num_hits` already hold theirs.
    pub(crate) fn swap_in(&mut self, request: &mut Request, num_hits: usize) {
        let cpu_blocks: Vec<CpuBlockId> = std::mem::take(&mut request.cold.cpu_blocks);
        self.cpu.discard(&cpu_blocks[..num_hits]);
        self.cpu.swap_in(&cpu_blocks[num_hits..], &request.block_table[num_hits..cpu_blocks.len()]);
    }

    /// Give up a request's KV in CPU memory.
    pub(crate) fn discard_swapped(&mut self, request: &mut Request) {
        self.cpu.discard(&request.cold.cpu_blocks);
        request.cold.cpu_blocks.clear();
    }

    /// Number of blocks of these tokens that are cached now. For debugging: nothing is touched.
    pub(crate) fn prefix_hit_blocks(&self, token_ids: &[i32], extra_keys: &ExtraKeys) -> u32 {
        if !self.enable_caching || token_ids.is_empty() {
            return 0;
        }
        let max_blocks = (token_ids.len() - 1) / self.block_size as usize;
        let known = &token_ids[..max_blocks * self.block_size as usize];
        let hashes = hash_blocks(&self.hasher, self.block_size, known, extra_keys);
        hashes.iter().take_while(|hash| self.pool.lookup(hash).is_some()).count() as u32
    }

    /// Continue the hashes of two requests for as long as both have blocks to hash; the rest is for `extend_hashes`.
    fn hash_pair(&self, requests: &mut Requests, pair: &[(u32, u32)]) {
        let &[(one, one_tokens), (other, other_tokens)] = pair else { return };
        let Some(both) = requests.two(one, other) else { return };
        let block_size = self.block_size as usize;
        let [one, other] = both.map(Request::hash_chain);
        if !one.1.is_empty() || !other.1.is_empty() {
            return;
        }
        while one.2.len() < one_tokens as usize / block_size
            && other.2.len() < other_tokens as usize / block_size
            && let (Some(one_parent), Some(other_parent)) = (one.2.last(), other.2.last())
        {
            let tokens = [(one.0, one.2.len()), (other.0, other.2.len())]
                .map(|(token_ids, at)| &token_ids[at * block_size..][..block_size]);
            let [one_hash, other_hash] = self.hasher.hash_pair([one_parent, other_parent], tokens);
            one.2.push(one_hash);
            other.2.push(other_hash);
        }
    }

    fn extend_hashes(&self, request: &mut Request, num_blocks: usize) {
        if request.cold.block_hashes.len() < num_blocks {
            let (token_ids, extra_keys, hashes) = request.hash_chain();
            extend_block_hashes(&self.hasher, self.block_size, token_ids, extra_keys, num_blocks, hashes);
        }
    }
}

/// Hashes of all full blocks of `token_ids`.
pub(crate) fn hash_blocks(
    hasher: &ChainHasher,
    block_size: u32,
    token_ids: &[i32],
    extra_keys: &ExtraKeys,
) -> Vec<BlockHash> {
    let num_blocks = token_ids.len() / block_size as usize;
    let mut hashes = Vec::with_capacity(num_blocks);
    extend_block_hashes(hasher, block_size, token_ids, extra_keys, num_blocks, &mut hashes);
    hashes
}

/// Continue a chain of hashes up to `num_blocks` blocks.
fn extend_block_hashes(
    hasher: &ChainHasher,
    block_size: u32,
    token_ids: &[i32],
    extra_keys: &ExtraKeys,
    num_blocks: usize,
    hashes: &mut Vec<BlockHash>,
) {
    // Nothing is allocated without extra keys, which is nearly always the case.
    let mut encoded = Vec::new();
    while hashes.len() < num_blocks {
        let start = hashes.len() * block_size as usize;
        extra_keys.of_block(start as u32, block_size, &mut encoded);
        let tokens = &token_ids[start..start + block_size as usize];
        hashes.push(hasher.hash_block(hashes.last(), tokens, &encoded));
    }
}
