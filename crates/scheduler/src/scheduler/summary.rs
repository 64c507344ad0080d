//! A summary of the whole scheduler, cheap enough for a viewer that asks several times a second: a row per request,
//! without its tokens, and a byte per block.

use kvblocks::{BlockId, BlockUse};

use super::Scheduler;
use crate::request::RequestStatus;

/// A request as a row of a table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RequestSummary {
    /// Its id.
    pub request_id: String,
    /// Its status.
    pub status: RequestStatus,
    /// Prompt and output.
    pub num_tokens: u32,
    /// Prompt.
    pub num_prompt_tokens: u32,
    /// Tokens with KV in the cache.
    pub num_computed_tokens: u32,
    /// Prompt tokens that came from the cache at first admission.
    pub num_cached_tokens: u32,
    /// Blocks that it holds.
    pub num_blocks: u32,
    /// How often it was preempted.
    pub num_preemptions: u32,
    /// The number of its adapter; 0: none.
    pub adapter: i64,
}

/// A byte per cell, with the values of [`BlockUse`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockMap {
    /// The cells in the order of the block ids.
    pub cells: Vec<u8>,
    /// Number of consecutive blocks per cell; the last cell may have fewer.
    pub blocks_per_cell: u32,
    /// Number of blocks of each [`BlockUse`].
    pub counts: [u32; 5],
}

impl Scheduler {
    /// The first `limit` requests: running ones in admission order, then those whose blocks are leaving, then waiting
    /// ones in the order in which they are tried. O(limit).
    #[must_use]
    pub fn request_summaries(&self, limit: usize) -> Vec<RequestSummary> {
        let slots = self.running.iter().chain(&self.leaving).copied().chain(self.waiting.iter());
        slots
            .take(limit)
            .map(|slot| {
                let request = &self.requests[slot as usize];
                RequestSummary {
                    request_id: request.cold.request_id.to_string(),
                    status: request.status,
                    num_tokens: request.num_tokens,
                    num_prompt_tokens: request.cold.num_prompt_tokens,
                    num_computed_tokens: request.num_computed_tokens,
                    num_cached_tokens: request.num_cached_tokens,
                    num_blocks: request.block_table.len() as u32,
                    num_preemptions: request.cold.num_preemptions,
                    adapter: request.cold.params.adapter,
                }
            })
            .collect()
    }

    /// The use of every block. If there are more than `max_cells` blocks, several share a cell, which shows the most
    /// frequent use among them; of equally frequent ones, the later in [`BlockUse`], except that the null block comes
    /// last. O(blocks).
    #[must_use]
    pub fn block_map(&self, max_cells: u32) -> BlockMap {
        let num_blocks = self.config.num_blocks;
        let blocks_per_cell = num_blocks.div_ceil(max_cells.max(1)).max(1);
        let use_of = |block| self.kv.pool.block_use(BlockId(block));
        let mut totals = [0; 5];
        let cells = (0..num_blocks.div_ceil(blocks_per_cell))
            .map(|cell| {
                let start = cell * blocks_per_cell;
                let mut counts = [0u32; 5];
                (start..num_blocks.min(start.saturating_add(blocks_per_cell)))
                    .for_each(|block| counts[use_of(block) as usize] += 1);
                totals.iter_mut().zip(counts).for_each(|(total, count)| *total += count);
                let rank = |&use_: &usize| (counts[use_], use_ != BlockUse::Null as usize, use_);
                (0..counts.len()).max_by_key(rank).unwrap_or(0) as u8
            })
            .collect();
        BlockMap { cells, blocks_per_cell, counts: totals }
    }
}
