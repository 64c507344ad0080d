//! Attention of few query rows to each KV head, as in decode: through the cache with all heads of the tile together.
//!
//! What such rows take is the time in which keys and values come from memory. A head's keys lie far apart, those of all heads
//! of a token side by side, so rows of the cache are read from first to last, and those that come some rows later asked for.

#![allow(clippy::inline_always, reason = "see `simd`")]

use std::ops::Range;

use crate::{
    attention::{
        cache_rows::CacheRows,
        cached::Cached,
        layer::{Layer, Tile},
        products::{CHUNK, HalfSums, add_stretch, ask_row, multiply_by_scales, scales, score},
        scratch::Scratch,
        softmax::{bend, soften},
    },
    number::Number,
    simd::Simd,
};

/// With as many query rows of a KV head or more, a chunk of that head is copied to one place instead: its rows lie far apart in
/// the cache, on addresses that compete for the same few places of the nearest cache, and `bf16` is widened once.
pub(crate) const MIN_ROWS_TO_PACK: usize = 8;
/// Rows of the cache between those that are computed with and those that are asked for. A multiple of four.
const AHEAD: usize = 16;
/// Keys that all heads are scored with before the next ones are. A multiple of four.
const KEYS: usize = 4;
/// Values that a head's sums take before those of the next head do: they are loaded and stored that often.
const VALUES: usize = 32;

/// Rows of the cache in the order in which they are read: keys, values, and those of the next chunk.
struct Order<C> {
    rows: [*const C; 2 * CHUNK + AHEAD],
    num_keys: usize,
}

impl<C> Order<C> {
    fn new(rows: &CacheRows<C>, next: Option<&CacheRows<C>>) -> Self {
        let num_keys = rows.num_keys;
        // Beyond the end of the context the last value is asked for again.
        let mut order = [rows.values[num_keys - 1]; 2 * CHUNK + AHEAD];
        order[..num_keys].copy_from_slice(&rows.keys[..num_keys]);
        order[num_keys..2 * num_keys].copy_from_slice(&rows.values[..num_keys]);
        if let Some(next) = next {
            order[2 * num_keys..][..AHEAD].copy_from_slice(&next.keys[..AHEAD]);
        }
        Self { rows: order, num_keys }
    }

    /// Ask for `len` elements from `offset` on of those that follow the keys from `first` on.
    #[inline(always)]
    fn ask_after_keys<S: Simd>(&self, first: usize, offset: usize, len: usize) {
        self.ask::<S>(first..first + 4, offset, len);
    }

    /// Likewise of two values.
    #[inline(always)]
    fn ask_after_values<S: Simd>(&self, first: usize, offset: usize, len: usize) {
        self.ask::<S>(self.num_keys + first..self.num_keys + first + 2, offset, len);
    }

    #[inline(always)]
    fn ask<S: Simd>(&self, places: Range<usize>, offset: usize, len: usize) {
        for row in &self.rows[places.start + AHEAD..places.end + AHEAD] {
            ask_row::<S, C>(row.wrapping_add(offset), len * size_of::<C>());
        }
    }
}

/// The tile's rows over its whole context; `scratch` has their queries, and a place for what they sum.
///
/// # Safety
///
/// The machine has the instructions of `S`; `head_dim` is a multiple of its lanes; the tile lies within the arrays of the layer,
/// its blocks within the cache, and they cover the chunks up to the tile's last token; there are fewer than
/// [`MIN_ROWS_TO_PACK`] rows to a KV head.
#[inline(always)]
pub(crate) unsafe fn walk<S: Simd, E: Number, C: Cached>(
    layer: &Layer<'_, E, C>,
    tile: &Tile<'_>,
    mut chunks: Range<usize>,
    scratch: &mut Scratch,
) {
    let group = layer.num_heads / layer.num_kv_heads;
    let rows_per_head = tile.tokens.len() * group;
    debug_assert!(rows_per_head < MIN_ROWS_TO_PACK);
    let num_rows = tile.kv_heads.len() * rows_per_head;
    scratch.scores.resize(num_rows, [0.0; CHUNK]);
    scratch.factors.resize(num_rows, 1.0);
    let locate = |chunk| CacheRows::of(layer, tile, chunk, tile.kv_heads.start);
    let mut next = chunks.next().map(locate);
    while let Some(found) = next {
        next = chunks.next().map(locate);
        let order = Order::new(&found, next.as_ref());
        let seen: [Range<usize>; MIN_ROWS_TO_PACK] =
            std::array::from_fn(|row| found.seen(layer.options, tile, row.min(rows_per_head - 1) / group));
        let (num_heads, dim) = (tile.kv_heads.len(), layer.head_dim);
        let chunk = Chunk { rows: found, order, seen: &seen[..rows_per_head], num_heads, dim };
        // SAFETY: the chunk has rows of the tile's heads, and the scratch a place for each of the tile's rows.
        unsafe { chunk.score_keys::<S>(scratch) };
        let mut key_scales = [1.0; CHUNK];
        for row in 0..num_rows {
            let (kv_head, row_of_head) = (row / rows_per_head, row % rows_per_head);
            if C::SCALE_LEN > 0 && row_of_head == 0 {
                // SAFETY: the rows have the tile's heads, each with its scale behind its features.
                key_scales = unsafe { scales(&chunk.rows.keys, kv_head * chunk.head_len() + dim) };
            }
            let seen = &chunk.seen[row_of_head];
            if seen.is_empty() {
                continue;
            }
            let head = (tile.kv_heads.start + kv_head) * group + row_of_head % group;
            let distance = (chunk.rows.chunk * CHUNK) as f32 - (tile.position + row_of_head / group) as f32;
            let scores = &mut scratch.scores[row];
            // SAFETY: the caller has found the instructions of `S`.
            unsafe {
                if C::SCALE_LEN > 0 {
                    multiply_by_scales::<S>(scores, &key_scales);
                }
                bend::<S>(layer.options, head, distance, scores);
                scratch.factors[row] = soften::<S>(scores, seen, &mut scratch.softmax[row]);
            }
        }
        // SAFETY: the chunk has rows of the tile's heads, and the scratch sums of each of the tile's rows.
        unsafe { chunk.add_values::<S>(scratch) };
    }
}

/// A chunk of the context, as the tile's rows meet it: those of each KV head that belong to it, a token's heads side by side.
struct Chunk<'a, C> {
    /// Keys and values, from those of the tile's first KV head on.
    rows: CacheRows<C>,
    order: Order<C>,
    /// Which keys each row of a KV head sees; all heads have as many rows.
    seen: &'a [Range<usize>],
    /// KV heads of the tile.
    num_heads: usize,
    dim: usize,
}

impl<C: Cached> Chunk<'_, C> {
    /// Elements from one head of a token to the next.
    fn head_len(&self) -> usize {
        self.dim + C::SCALE_LEN
    }

    /// Scores of all rows with the keys.
    ///
    /// # Safety
    ///
    /// `scratch` has a query and a place for scores of each row; the chunk's rows have the tile's heads, of a size that is a
    /// multiple of the lanes; the machine has the instructions of `S`.
    #[inline(always)]
    unsafe fn score_keys<S: Simd>(&self, scratch: &mut Scratch) {
        let Self { rows: found, order, seen, num_heads, .. } = self;
        let (dim, head_len) = (self.dim, self.head_len());
        for first in (0..found.num_keys).step_by(KEYS) {
            for head in 0..*num_heads {
                let mut row = 0;
                while row < seen.len() {
                    let (rows, range) = rows_together(seen, row, S::SCORE_ROWS);
                    let range = within(&range, &(first..first + KEYS));
                    let at = head * seen.len() + row;
                    let scores = &mut scratch.scores[at..at + rows];
                    let is_first = row == 0;
                    let ask = |j| {
                        if is_first {
                            order.ask_after_keys::<S>(j, head * head_len, head_len);
                        }
                    };
                    // SAFETY: the rows' queries and scores are in the scratch; the keys go up to a multiple of four.
                    unsafe {
                        let query = scratch.query.as_ptr().add(at * dim);
                        let (keys, offset) = (&found.keys, head * head_len);
                        match rows {
                            4 => score::<S, C, 4>(query, dim, keys, offset, &range, scores, ask),
                            3 => score::<S, C, 3>(query, dim, keys, offset, &range, scores, ask),
                            2 => score::<S, C, 2>(query, dim, keys, offset, &range, scores, ask),
                            _ => score::<S, C, 1>(query, dim, keys, offset, &range, scores, ask),
                        }
                    }
                    row += rows;
                }
            }
        }
    }

    /// The values, weighed with what became of the scores, added to the sums of all rows.
    ///
    /// # Safety
    ///
    /// As [`Self::score_keys`].
    #[inline(always)]
    unsafe fn add_values<S: Simd>(&self, scratch: &mut Scratch) {
        let Self { rows: found, order, seen, num_heads, .. } = self;
        let (dim, head_len) = (self.dim, self.head_len());
        let Scratch { sums, scores, factors, even, odd, .. } = scratch;
        for half in [&mut *even, &mut *odd] {
            half.set_zeros(sums.len());
        }
        for first in (0..found.num_keys).step_by(VALUES) {
            let stretch = first..found.num_keys.min(first + VALUES);
            for head in 0..*num_heads {
                let mut row = 0;
                while row < seen.len() {
                    let rows = if S::VALUE_ROWS == 2 && row + 2 <= seen.len() { 2 } else { 1 };
                    let at = head * seen.len() + row;
                    let ranges: [Range<usize>; 2] =
                        std::array::from_fn(|i| within(&seen[row + i.min(rows - 1)], &stretch));
                    let is_first = row == 0;
                    let ask = |j, offset, len| {
                        if is_first {
                            order.ask_after_values::<S>(j, offset, len);
                        }
                    };
                    let (scores, offset) = (&scores[at..at + rows], head * head_len);
                    // SAFETY: the rows' sums are in the scratch, and the values in the ranges are rows of the tile's heads.
                    unsafe {
                        let sums = HalfSums {
                            even: even.as_mut_ptr().add(at * dim),
                            odd: odd.as_mut_ptr().add(at * dim),
                        };
                        if rows == 2 {
                            add_stretch::<S, C, 2>(scores, &found.values, offset, &ranges, dim, &sums, ask);
                        } else {
                            add_stretch::<S, C, 1>(scores, &found.values, offset, &ranges, dim, &sums, ask);
                        }
                    }
                    row += rows;
                }
            }
        }
        for (row, &factor) in factors.iter().enumerate() {
            if seen[row % seen.len()].is_empty() {
                continue;
            }
            for i in (row * dim..(row + 1) * dim).step_by(S::LANES) {
                // SAFETY: each of the three has `dim` numbers of the row, a multiple of the lanes.
                unsafe {
                    let of_chunk = S::add(S::load(even.as_ptr().add(i)), S::load(odd.as_ptr().add(i)));
                    let at = sums.as_mut_ptr().add(i);
                    S::store(at, S::fma(S::load(at), S::splat(factor), of_chunk));
                }
            }
        }
    }
}

/// How many rows from `row` on are scored together, at most `most`, and the keys that any of them sees.
#[inline(always)]
fn rows_together(seen: &[Range<usize>], row: usize, most: usize) -> (usize, Range<usize>) {
    let rows = most.min(seen.len() - row);
    let last = row + rows - 1;
    if rows > 1 && !seen[row].is_empty() && !seen[last].is_empty() {
        return (rows, seen[row].start..seen[last].end);
    }
    (1, seen[row].clone())
}

/// Keys that lie in both; where there are none, an empty range within `stretch`.
#[inline(always)]
fn within(keys: &Range<usize>, stretch: &Range<usize>) -> Range<usize> {
    let start = keys.start.clamp(stretch.start, stretch.end);
    start..keys.end.clamp(start, stretch.end)
}
