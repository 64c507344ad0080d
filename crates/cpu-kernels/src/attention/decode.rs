//! Attention of few query rows to each KV head, as in decode: through the cache with all heads of the tile together.
//!
//! What such rows take is the time in which keys and values come from memory. A head's keys lie far apart, those of all heads
//! of a token side by side, so keys are read row by row of the cache, and the rows that come next are asked for meanwhile.

#![allow(clippy::inline_always, reason = "see `simd`")]

use std::ops::Range;

use crate::{
    attention::{
        cache_rows::{CacheRows, first_chunk},
        cached::Cached,
        layer::{Layer, Tile},
        products::{CHUNK, KEYS_AT_ONCE, add_values, multiply_by_scales, num_panels, scales, score},
        scratch::Scratch,
        softmax::{bend, soften},
    },
    lines::LINE,
    number::Number,
    simd::{Simd, memory},
};

/// With as many query rows of a KV head or more, a chunk of that head is copied to one place instead: its rows lie far apart in
/// the cache, on addresses that compete for the same few places of the nearest cache, and `bf16` is widened once.
pub(crate) const MIN_ROWS_TO_PACK: usize = 8;
/// Rows of the cache that are read next: a chunk's values while its keys are, the next chunk's keys while its values are. They
/// are asked for line by line as they lie in memory, so that the processor sees what follows, and a few lines at a time: it
/// keeps track of few requests, and computes nothing while it waits for one to end.
struct NextRows<'a, C> {
    rows: std::slice::Iter<'a, *const C>,
    /// The row whose lines are asked for, and the byte of it that is next.
    row: *const u8,
    at: usize,
    /// Of the tile's heads in a row.
    row_bytes: usize,
    num_lines: usize,
    num_calls: usize,
    /// Lines that should have been asked for by now and were not, times `num_calls`.
    due: usize,
    /// Whether they are asked for into the first cache and not the second one.
    into_first: bool,
}

impl<'a, C> NextRows<'a, C> {
    /// All lines of `rows`, in as many calls of [`Self::ask`].
    fn new(rows: &'a [*const C], row_bytes: usize, num_calls: usize) -> Self {
        let (num_lines, num_calls) = (rows.len() * row_bytes.div_ceil(LINE), num_calls.max(1));
        Self {
            rows: rows.iter(),
            row: std::ptr::null(),
            at: row_bytes,
            row_bytes,
            num_lines,
            num_calls,
            due: 0,
            into_first: !memory::is_one_stream(),
        }
    }

    /// Ask for the lines of one call.
    #[inline(always)]
    fn ask<S: Simd>(&mut self) {
        self.due += self.num_lines;
        while self.due >= self.num_calls {
            self.due -= self.num_calls;
            if self.at >= self.row_bytes {
                let Some(row) = self.rows.next() else { return };
                (self.row, self.at) = (row.cast(), 0);
            }
            let line = self.row.wrapping_add(self.at);
            if self.into_first {
                S::prefetch_near(line);
            } else {
                S::prefetch(line);
            }
            self.at += LINE;
        }
    }
}

/// The tile's rows over its whole context; `scratch` has their queries, and a place for what they sum.
///
/// # Safety
///
/// The machine has the instructions of `S`; `head_dim` is a multiple of its lanes; the tile lies within the arrays of the layer,
/// its blocks within the cache, and they cover the chunks that the tile's tokens see; there are fewer than
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
    let row_bytes = tile.kv_heads.len() * (layer.head_dim + C::SCALE_LEN) * size_of::<C>();
    let locate = |chunk| CacheRows::of(layer, tile, chunk, tile.kv_heads.start);
    let mut next = chunks.next().map(locate);
    if let Some(first) = &next {
        // Nothing asked for these, or the tile before did.
        NextRows::new(&first.keys[..first.num_keys], row_bytes, 1).ask::<S>();
    }
    let tile_after = tile.next.filter(|next| next.tokens.len() * group < MIN_ROWS_TO_PACK);
    while let Some(found) = next {
        next = chunks.next().map(locate);
        let seen: [Range<usize>; MIN_ROWS_TO_PACK] =
            std::array::from_fn(|row| found.seen(layer.options, tile, row.min(rows_per_head - 1) / group));
        let (num_heads, dim) = (tile.kv_heads.len(), layer.head_dim);
        let chunk = Chunk { rows: found, seen: &seen[..rows_per_head], num_heads, dim };
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
                scratch.factors[row] = 1.0;
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
        // Behind the last chunk come the first keys of another tile.
        let after = if next.is_none() { tile_after } else { None };
        let after = after
            .map(|tile| CacheRows::of(layer, tile, first_chunk(layer.options, tile), tile.kv_heads.start));
        let keys = next.as_ref().or(after.as_ref()).map_or(&[][..], |rows| &rows.keys[..rows.num_keys]);
        // SAFETY: the chunk has rows of the tile's heads, and the scratch sums of each of the tile's rows.
        unsafe { chunk.add_values::<S>(keys, scratch) };
    }
}

/// A chunk of the context, as the tile's rows meet it: those of each KV head that belong to it, a token's heads side by side.
struct Chunk<'a, C> {
    /// Keys and values, from those of the tile's first KV head on.
    rows: CacheRows<C>,
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

    /// Of the tile's heads in a row of keys or values.
    fn row_bytes(&self) -> usize {
        self.num_heads * self.head_len() * size_of::<C>()
    }

    /// Scores of all rows with the keys.
    ///
    /// # Safety
    ///
    /// `scratch` has a query and a place for scores of each row; the chunk's rows have the tile's heads, of a size that is a
    /// multiple of the lanes; the machine has the instructions of `S`.
    #[inline(always)]
    unsafe fn score_keys<S: Simd>(&self, scratch: &mut Scratch) {
        let Self { rows: found, seen, num_heads, .. } = self;
        let (dim, head_len) = (self.dim, self.head_len());
        let num_calls = found.num_keys.div_ceil(KEYS_AT_ONCE) * num_heads;
        let mut ahead = NextRows::new(&found.values[..found.num_keys], self.row_bytes(), num_calls);
        for first in (0..found.num_keys).step_by(KEYS_AT_ONCE) {
            for head in 0..*num_heads {
                ahead.ask::<S>();
                let mut row = 0;
                while row < seen.len() {
                    let (rows, range) = rows_together(seen, row, S::SCORE_ROWS);
                    let range = within(&range, &(first..first + KEYS_AT_ONCE));
                    let at = head * seen.len() + row;
                    let scores = &mut scratch.scores[at..at + rows];
                    // SAFETY: the rows' queries and scores are in the scratch; the keys go up to a multiple of four.
                    unsafe {
                        let query = scratch.query.as_ptr().add(at * dim);
                        let (keys, offset) = (&found.keys, head * head_len);
                        match rows {
                            4 => score::<S, C, 4>(query, dim, keys, offset, &range, scores, || {}),
                            3 => score::<S, C, 3>(query, dim, keys, offset, &range, scores, || {}),
                            2 => score::<S, C, 2>(query, dim, keys, offset, &range, scores, || {}),
                            _ => score::<S, C, 1>(query, dim, keys, offset, &range, scores, || {}),
                        }
                    }
                    row += rows;
                }
            }
        }
    }

    /// The values, weighed with what became of the scores, added to the sums of all rows; `next` are the keys of the next
    /// chunk.
    ///
    /// # Safety
    ///
    /// As [`Self::score_keys`].
    #[inline(always)]
    unsafe fn add_values<S: Simd>(&self, next: &[*const C], scratch: &mut Scratch) {
        let Self { rows: found, seen, num_heads, .. } = self;
        let (dim, head_len) = (self.dim, self.head_len());
        let Scratch { sums, scores, factors, .. } = scratch;
        let num_calls = found.num_keys / 2 * num_panels::<S>(dim) * num_heads;
        let mut ahead = NextRows::new(next, self.row_bytes(), num_calls);
        for head in 0..*num_heads {
            let mut row = 0;
            while row < seen.len() {
                let rows = if S::VALUE_ROWS == 2 && row + 2 <= seen.len() { 2 } else { 1 };
                let at = head * seen.len() + row;
                let (scores, ranges, offset) =
                    (&scores[at..at + rows], &seen[row..row + rows], head * head_len);
                let is_first = row == 0;
                let ask = || {
                    if is_first {
                        ahead.ask::<S>();
                    }
                };
                // SAFETY: the rows' sums are in the scratch, and the values in the ranges are rows of the tile's heads.
                unsafe {
                    let sums = sums.as_mut_ptr().add(at * dim);
                    if rows == 2 {
                        add_values::<S, C, 2>(
                            scores,
                            &factors[at..],
                            &found.values,
                            offset,
                            ranges,
                            dim,
                            sums,
                            ask,
                        );
                    } else {
                        add_values::<S, C, 1>(
                            scores,
                            &factors[at..],
                            &found.values,
                            offset,
                            ranges,
                            dim,
                            sums,
                            ask,
                        );
                    }
                }
                row += rows;
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

/// Keys that lie in both; where there are none, an empty range within `group`.
#[inline(always)]
fn within(keys: &Range<usize>, group: &Range<usize>) -> Range<usize> {
    let start = keys.start.clamp(group.start, group.end);
    start..keys.end.clamp(start, group.end)
}
