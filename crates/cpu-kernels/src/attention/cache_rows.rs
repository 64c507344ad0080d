//! Where the keys and values of one chunk of a request's context lie, and which of them a token sees.

#![allow(clippy::inline_always, reason = "see `simd`")]

use std::ops::Range;

use crate::attention::{
    cached::Cached,
    layer::{Layer, Tile},
    options::AttentionOptions,
    products::CHUNK,
};

/// Rows of one chunk, from those of one KV head on; after the last of `num_keys` it is there again, since keys are scored by
/// fours, and what is too many dropped.
pub(crate) struct CacheRows<C> {
    pub(crate) chunk: usize,
    pub(crate) kv_head: usize,
    pub(crate) num_keys: usize,
    pub(crate) keys: [*const C; CHUNK],
    pub(crate) values: [*const C; CHUNK],
}

impl<C: Cached> CacheRows<C> {
    /// Those of a tile, which has positions in the chunk or behind it.
    #[inline(always)]
    pub(crate) fn of<E>(layer: &Layer<'_, E, C>, tile: &Tile<'_>, chunk: usize, kv_head: usize) -> Self {
        let base = chunk * CHUNK;
        let num_keys = CHUNK.min(tile.context_end() - base);
        let mut offsets = [0; CHUNK];
        let (mut block, mut slot) = (base / layer.block_size, base % layer.block_size);
        for offset in &mut offsets[..num_keys] {
            let token = tile.blocks[block] as usize * layer.block_size + slot;
            *offset = (token * layer.num_kv_heads + kv_head) * (layer.head_dim + C::SCALE_LEN);
            // No division for each: some processors take as long for one as for the products of a key.
            slot += 1;
            if slot == layer.block_size {
                (block, slot) = (block + 1, 0);
            }
        }
        let last = offsets[num_keys - 1];
        offsets[num_keys..].fill(last);
        // SAFETY: the block lies within the cache, by the contract of the tile, so does each of its slots and heads.
        let place = |start: *const C| offsets.map(|offset| unsafe { start.add(offset) });
        Self { chunk, kv_head, num_keys, keys: place(layer.keys), values: place(layer.values) }
    }

    /// Which keys, counted from the chunk's first, a token of the tile sees.
    #[inline(always)]
    pub(crate) fn seen(&self, options: &AttentionOptions<'_>, tile: &Tile<'_>, token: usize) -> Range<usize> {
        let first = self.chunk * CHUNK;
        let start = first_visible(options, tile.position + token).saturating_sub(first);
        start..tile.visible_end(token).min(first + self.num_keys).saturating_sub(first).max(start)
    }
}

/// The first position that the query at `position` sees.
#[inline(always)]
pub(crate) fn first_visible(options: &AttentionOptions<'_>, position: usize) -> usize {
    options.sliding_window.map_or(0, |window| (position + 1).saturating_sub(window.get() as usize))
}

/// The first chunk that any token of a tile sees.
#[inline(always)]
pub(crate) fn first_chunk(options: &AttentionOptions<'_>, tile: &Tile<'_>) -> usize {
    first_visible(options, tile.position) / CHUNK
}
