//! The kernel: a few query tokens of one request and the query heads of some KV heads, over the request's whole context.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over registers, of which several arrays are indexed alike"
)]

use std::ops::Range;

use half::bf16;

use crate::{
    attention::options::AttentionOptions,
    number::Number,
    simd::{Simd, exp, tanh},
};

/// Positions of the context whose scores exist at once. Chunks begin at its multiples in every batch.
pub const CHUNK: usize = 64;
/// A chunk is copied to one place when at least this many query rows read it: rows of one head lie far apart in the
/// cache, on addresses that compete for the same few places of the nearest cache, and `bf16` is widened once.
const MIN_ROWS_TO_PACK: usize = 8;
/// Vectors of an output that are summed in registers at once.
const PANEL: usize = 4;

/// One compiled form of [`tile`].
pub(crate) type TileFn<E> = unsafe fn(&Layer<'_, E>, &Tile<'_>, &mut Scratch);

/// What all tiles of a layer share. Pointers, because outputs of different tiles interleave in one array.
pub(crate) struct Layer<'a, E> {
    /// `[num_tokens, num_heads, head_dim]`, tokens `query_stride` elements apart.
    pub(crate) query: *const E,
    pub(crate) query_stride: usize,
    /// `[num_slots, num_kv_heads, head_dim]` each.
    pub(crate) keys: *const E,
    pub(crate) values: *const E,
    /// `[num_tokens, num_heads, head_dim]`, contiguous.
    pub(crate) out: *mut E,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) block_size: usize,
    pub(crate) options: &'a AttentionOptions<'a>,
}

// SAFETY: everything but `out` is only read; of `out` each tile writes the rows of its own tokens and heads, which no
// other tile has.
unsafe impl<E: Number> Sync for Layer<'_, E> {}

/// Which part of a layer.
pub(crate) struct Tile<'a> {
    /// Blocks of the request, as many as its context needs.
    pub(crate) blocks: &'a [u32],
    /// Tokens in the flattened batch.
    pub(crate) tokens: Range<usize>,
    /// Position of the first of them in its request.
    pub(crate) position: usize,
    pub(crate) kv_heads: Range<usize>,
}

/// Memory of one thread, used again by every tile.
#[derive(Default)]
pub(crate) struct Scratch {
    query: Vec<f32>,
    sums: Vec<f32>,
    softmax: Vec<Softmax>,
    packed_keys: Vec<f32>,
    packed_values: Vec<f32>,
}

/// The online softmax of a row: the largest score so far, and the sum of exponentials relative to it.
#[derive(Clone, Copy)]
struct Softmax {
    largest: f32,
    sum: f32,
}

/// Scores of up to four rows, then their exponentials.
type Scores = [[f32; CHUNK]; 4];

/// Attention of one tile.
///
/// # Safety
///
/// The machine has the instructions of `S`; `head_dim` is a multiple of its lanes; the tile lies within the arrays of the
/// layer, its blocks within the cache, and they cover the positions up to that of its last token.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd, E: Number>(layer: &Layer<'_, E>, tile: &Tile<'_>, scratch: &mut Scratch) {
    let dim = layer.head_dim;
    let group = layer.num_heads / layer.num_kv_heads;
    let rows_per_head = tile.tokens.len() * group;
    let num_rows = tile.kv_heads.len() * rows_per_head;
    let seq_end = tile.position + tile.tokens.len();

    // SAFETY: the caller gives a tile whose tokens and heads lie within `query`.
    unsafe { load_queries(layer, tile, group, &mut scratch.query) };
    scratch.sums.clear();
    scratch.sums.resize(num_rows * dim, 0.0);
    scratch.softmax.clear();
    scratch.softmax.resize(num_rows, Softmax { largest: f32::NEG_INFINITY, sum: 0.0 });

    let context = visible(layer.options, tile.position).start..seq_end;
    for chunk in context.start / CHUNK..seq_end.div_ceil(CHUNK) {
        let base = chunk * CHUNK;
        let num_keys = CHUNK.min(seq_end - base);
        let mut offsets = [0; CHUNK];
        for (j, offset) in offsets[..num_keys].iter_mut().enumerate() {
            let position = base + j;
            let block = tile.blocks[position / layer.block_size] as usize;
            *offset = (block * layer.block_size + position % layer.block_size) * layer.num_kv_heads * dim;
        }
        let last = offsets[num_keys - 1];
        offsets[num_keys..].fill(last); // a neighbour of the last key is scored with it, and dropped
        let chunk = base..base + num_keys;
        // The heads of a token lie side by side: the next head's keys are near while this one's are read.
        for kv_head in tile.kv_heads.clone() {
            let first_row = (kv_head - tile.kv_heads.start) * rows_per_head;
            let place = |start: *const E| {
                // SAFETY: the block lies within the cache, so does each of its slots and heads.
                offsets.map(|offset| unsafe { start.add(offset + kv_head * dim) })
            };
            let (keys, values) = (place(layer.keys), place(layer.values));
            if rows_per_head >= MIN_ROWS_TO_PACK {
                // SAFETY: the pointers are those of whole rows; the caller promises the instructions.
                let (keys, values) = unsafe {
                    (
                        pack::<S, E>(&keys, num_keys.next_multiple_of(4), dim, &mut scratch.packed_keys),
                        pack::<S, E>(&values, num_keys, dim, &mut scratch.packed_values),
                    )
                };
                // SAFETY: the blocks cover the positions of the chunk, by the contract of `tile`; the packed rows are of
                // `head_dim` elements.
                unsafe {
                    attend_chunk::<S, E, f32>(
                        layer, tile, &chunk, kv_head, first_row, &keys, &values, scratch,
                    );
                }
            } else {
                // SAFETY: the blocks cover the positions of the chunk, by the contract of `tile`, and lie within the
                // cache.
                unsafe {
                    attend_chunk::<S, E, E>(layer, tile, &chunk, kv_head, first_row, &keys, &values, scratch);
                };
            }
        }
    }

    for row in 0..num_rows {
        let (kv_head, row_of_head) = (tile.kv_heads.start + row / rows_per_head, row % rows_per_head);
        let token = tile.tokens.start + row_of_head / group;
        let head = kv_head * group + row_of_head % group;
        let sum = scratch.softmax[row].sum;
        let sums = &scratch.sums[row * dim..][..dim];
        for (i, &x) in sums.iter().enumerate() {
            // SAFETY: the token's row of `out`, which is this tile's alone.
            unsafe { layer.out.add((token * layer.num_heads + head) * dim + i).write(E::narrow(x / sum)) };
        }
    }
}

/// Positions that the query at `position` sees.
#[inline(always)]
fn visible(options: &AttentionOptions<'_>, position: usize) -> Range<usize> {
    let start =
        options.sliding_window.map_or(0, |window| (position + 1).saturating_sub(window.get() as usize));
    start..position + 1
}

/// The tile's queries in 32 bits and scaled, `[kv_heads, tokens, group, head_dim]`.
///
/// # Safety
///
/// Tokens and heads lie within `layer.query`.
#[inline(always)]
unsafe fn load_queries<E: Number>(layer: &Layer<'_, E>, tile: &Tile<'_>, group: usize, query: &mut Vec<f32>) {
    query.clear();
    for kv_head in tile.kv_heads.clone() {
        for token in tile.tokens.clone() {
            // SAFETY: the caller gives tokens and heads that lie within `layer.query`, so this row does.
            let row = unsafe {
                let start = layer.query.add(token * layer.query_stride + kv_head * group * layer.head_dim);
                std::slice::from_raw_parts(start, group * layer.head_dim)
            };
            query.extend(row.iter().map(|x| x.widen() * layer.options.scale));
        }
    }
}

/// Copy rows to one place, in 32 bits, and say where each lies.
///
/// # Safety
///
/// The first `num_rows` pointers are those of `dim` elements, a multiple of the lanes of `S`; the machine has its
/// instructions.
#[inline(always)]
unsafe fn pack<S: Simd, E: Number>(
    rows: &[*const E; CHUNK],
    num_rows: usize,
    dim: usize,
    packed: &mut Vec<f32>,
) -> [*const f32; CHUNK] {
    packed.resize(CHUNK * dim, 0.0);
    let start = packed.as_mut_ptr();
    for (j, row) in rows[..num_rows].iter().enumerate() {
        for i in (0..dim).step_by(S::LANES) {
            // SAFETY: `dim` elements are there to be read, and in row `j` of `packed` to be written.
            unsafe { S::store(start.add(j * dim + i), E::load::<S>(row.add(i))) };
        }
    }
    // SAFETY: `packed` has CHUNK rows.
    std::array::from_fn(|j| unsafe { start.add(j * dim).cast_const() })
}

/// The rows of one KV head, from `first_row` on, over one chunk of the context, whose keys and values are of type `K`.
///
/// # Safety
///
/// See [`tile`]; `keys` (padded to a multiple of four) and `values` point at rows of `head_dim` elements.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the inner part of one loop, taken out so that it can be read")]
unsafe fn attend_chunk<S: Simd, E: Number, K: Number>(
    layer: &Layer<'_, E>,
    tile: &Tile<'_>,
    chunk: &Range<usize>,
    kv_head: usize,
    first_row: usize,
    keys: &[*const K; CHUNK],
    values: &[*const K; CHUNK],
    scratch: &mut Scratch,
) {
    let group = layer.num_heads / layer.num_kv_heads;
    let num_rows = tile.tokens.len() * group;
    let mut scores: Scores = [[0.0; CHUNK]; 4];
    let mut row = 0;
    while row < num_rows {
        let range = seen(layer.options, tile, chunk, row / group);
        // Rows that see the same keys are done together. What each sums, and in which order, does not depend on it.
        let mut rows = 1;
        if S::SCORE_ROWS >= 2 && row + S::SCORE_ROWS <= num_rows {
            let last = seen(layer.options, tile, chunk, (row + S::SCORE_ROWS - 1) / group);
            if range == last {
                rows = S::SCORE_ROWS;
            }
        }
        if !range.is_empty() {
            let who = RowGroup { kv_head, first_row, rows: row..row + rows };
            // SAFETY: the rows lie within the tile, `keys` and `values` have rows of `head_dim` elements by the contract
            // of this function, and the scratch has a place for each.
            unsafe {
                attend_rows::<S, E, K>(layer, tile, chunk, &who, &range, keys, values, &mut scores, scratch);
            };
        }
        row += rows;
    }
}

/// Rows of a KV head that are done together: which of its own, and where its own begin in the scratch.
struct RowGroup {
    kv_head: usize,
    first_row: usize,
    rows: Range<usize>,
}

/// Which keys of the chunk, counted from its start, a token of the tile sees.
#[inline(always)]
fn seen(options: &AttentionOptions<'_>, tile: &Tile<'_>, chunk: &Range<usize>, token: usize) -> Range<usize> {
    let visible = visible(options, tile.position + token);
    let start = visible.start.saturating_sub(chunk.start);
    start..visible.end.min(chunk.end).saturating_sub(chunk.start).max(start)
}

/// Rows that see the same keys, those in `range` of the chunk.
///
/// # Safety
///
/// See [`attend_chunk`]; there is one row, or `S::SCORE_ROWS`.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the inner part of one loop, taken out so that it can be read")]
unsafe fn attend_rows<S: Simd, E: Number, K: Number>(
    layer: &Layer<'_, E>,
    tile: &Tile<'_>,
    chunk: &Range<usize>,
    who: &RowGroup,
    range: &Range<usize>,
    keys: &[*const K; CHUNK],
    values: &[*const K; CHUNK],
    scores: &mut Scores,
    scratch: &mut Scratch,
) {
    let dim = layer.head_dim;
    let group = layer.num_heads / layer.num_kv_heads;
    let num_rows = who.rows.len();
    let first = who.first_row + who.rows.start;
    let query = scratch.query[first * dim..].as_ptr();
    let mut factors = [1.0; 4];
    // SAFETY: `query` has `num_rows` rows of `dim` elements; `keys` are padded to a multiple of four.
    unsafe {
        match num_rows {
            4 => score::<S, K, 4>(query, dim, keys, range, scores),
            2 => score::<S, K, 2>(query, dim, keys, range, scores),
            _ => score::<S, K, 1>(query, dim, keys, range, scores),
        }
    }
    for (i, row) in who.rows.clone().enumerate() {
        let head = who.kv_head * group + row % group;
        let distance = chunk.start as f32 - (tile.position + row / group) as f32;
        // SAFETY: the caller promises the instructions.
        factors[i] = unsafe {
            bend::<S>(layer.options, head, distance, &mut scores[i]);
            soften::<S>(&mut scores[i], range, &mut scratch.softmax[first + i])
        };
    }
    let sums = scratch.sums[first * dim..].as_mut_ptr();
    let mut i = 0;
    while i < num_rows {
        // SAFETY: `sums` has `num_rows` rows of `dim` elements.
        unsafe {
            let to = sums.add(i * dim);
            if S::VALUE_ROWS == 2 && i + 2 <= num_rows {
                add_values::<S, K, 2>(&scores[i..], &factors[i..], values, range, dim, to);
                i += 2;
            } else {
                add_values::<S, K, 1>(&scores[i..], &factors[i..], values, range, dim, to);
                i += 1;
            }
        }
    }
}

/// Products of `R` queries with the keys of `range`, four at a time; neighbours of the range get scores, too.
///
/// # Safety
///
/// `query` has `R` rows of `dim` elements, and so has each of `keys` that a group of four touches; the machine has the
/// instructions of `S`.
#[inline(always)]
unsafe fn score<S: Simd, K: Number, const R: usize>(
    query: *const f32,
    dim: usize,
    keys: &[*const K; CHUNK],
    range: &Range<usize>,
    scores: &mut Scores,
) {
    let mut j = range.start / 4 * 4;
    while j < range.end {
        // SAFETY: the caller gives `R` query rows and keys, in whole groups of four, of `dim` elements; `j + 4` is at
        // most CHUNK.
        unsafe {
            let mut sums = [[S::splat(0.0); 4]; R];
            let mut i = 0;
            while i < dim {
                let mut key = [S::splat(0.0); 4];
                for n in 0..4 {
                    key[n] = K::load::<S>(keys[j + n].add(i));
                }
                for r in 0..R {
                    let q = S::load(query.add(r * dim + i));
                    for n in 0..4 {
                        sums[r][n] = S::fma(q, key[n], sums[r][n]);
                    }
                }
                i += S::LANES;
            }
            for r in 0..R {
                S::store_sums(sums[r], scores[r].as_mut_ptr().add(j));
            }
        }
        j += 4;
    }
}

/// Soft cap and `ALiBi`, where the model has them. `distance` is the chunk's first position less the query's.
///
/// # Safety
///
/// The machine has the instructions of `S`.
#[inline(always)]
unsafe fn bend<S: Simd>(
    options: &AttentionOptions<'_>,
    head: usize,
    distance: f32,
    scores: &mut [f32; CHUNK],
) {
    if let Some(cap) = options.soft_cap {
        for j in (0..CHUNK).step_by(S::LANES) {
            // SAFETY: the lanes of `S` divide CHUNK.
            unsafe {
                let at = scores.as_mut_ptr().add(j);
                S::store(at, S::mul(S::splat(cap), tanh::<S>(S::mul(S::load(at), S::splat(1.0 / cap)))));
            }
        }
    }
    if let Some(&slope) = options.alibi_slopes.get(head) {
        for (j, score) in scores.iter_mut().enumerate() {
            *score += slope * (distance + j as f32);
        }
    }
}

/// Scores become exponentials relative to the largest score so far, 0 outside `range`.
///
/// Returns what the sums over earlier chunks are to be multiplied with.
///
/// # Safety
///
/// The machine has the instructions of `S`.
#[inline(always)]
unsafe fn soften<S: Simd>(scores: &mut [f32; CHUNK], range: &Range<usize>, softmax: &mut Softmax) -> f32 {
    scores[..range.start].fill(f32::NEG_INFINITY);
    scores[range.end..].fill(f32::NEG_INFINITY);
    let at = scores.as_mut_ptr();
    // SAFETY: the lanes of `S` divide CHUNK.
    unsafe {
        let mut largest = S::splat(softmax.largest);
        for j in (0..CHUNK).step_by(S::LANES) {
            largest = S::max(largest, S::load(at.add(j)));
        }
        let largest = S::largest(largest);
        let factor = if largest > softmax.largest { (softmax.largest - largest).exp() } else { 1.0 };
        let negated = S::splat(-largest);
        let mut sum = S::splat(0.0);
        for j in (0..CHUNK).step_by(S::LANES) {
            let p = exp::<S>(S::add(S::load(at.add(j)), negated));
            S::store(at.add(j), p);
            sum = S::add(sum, p);
        }
        softmax.sum = softmax.sum * factor + S::sum(sum);
        softmax.largest = largest;
        factor
    }
}

/// `sums = sums · factor + Σ p · value` for `R` rows, a panel of the output at a time.
///
/// # Safety
///
/// `to` has `R` rows of `dim` elements, and so has each of `values` in `range`; the machine has the instructions of `S`.
#[inline(always)]
unsafe fn add_values<S: Simd, K: Number, const R: usize>(
    p: &[[f32; CHUNK]],
    factors: &[f32],
    values: &[*const K; CHUNK],
    range: &Range<usize>,
    dim: usize,
    to: *mut f32,
) {
    let mut i = 0;
    while i + PANEL * S::LANES <= dim {
        // SAFETY: the panel lies within the rows.
        unsafe { add_panel::<S, K, R, PANEL>(p, factors, values, range, dim, i, to) };
        i += PANEL * S::LANES;
    }
    while i < dim {
        // SAFETY: `dim` is a multiple of the lanes.
        unsafe { add_panel::<S, K, R, 1>(p, factors, values, range, dim, i, to) };
        i += S::LANES;
    }
}

/// See [`add_values`]: `N` vectors from element `i` on.
///
/// # Safety
///
/// See [`add_values`]; `i + N · LANES` is at most `dim`.
#[inline(always)]
unsafe fn add_panel<S: Simd, K: Number, const R: usize, const N: usize>(
    p: &[[f32; CHUNK]],
    factors: &[f32],
    values: &[*const K; CHUNK],
    range: &Range<usize>,
    dim: usize,
    i: usize,
    to: *mut f32,
) {
    // SAFETY: `i + N · LANES` is at most `dim`, by the contract of this function, so every vector lies within its row.
    unsafe {
        // Keys at even and at odd places are summed apart: half as many additions wait for one another.
        let mut even = [[S::splat(0.0); N]; R];
        let mut odd = [[S::splat(0.0); N]; R];
        let mut j = range.start;
        if j % 2 == 1 {
            add_value::<S, K, R, N>(p, j, values[j].add(i), &mut odd);
            j += 1;
        }
        while j + 1 < range.end {
            add_value::<S, K, R, N>(p, j, values[j].add(i), &mut even);
            add_value::<S, K, R, N>(p, j + 1, values[j + 1].add(i), &mut odd);
            j += 2;
        }
        if j < range.end {
            add_value::<S, K, R, N>(p, j, values[j].add(i), &mut even);
        }
        for r in 0..R {
            for n in 0..N {
                let at = to.add(r * dim + i + n * S::LANES);
                S::store(at, S::fma(S::load(at), S::splat(factors[r]), S::add(even[r][n], odd[r][n])));
            }
        }
    }
}

/// One key's value, weighed for each row.
///
/// # Safety
///
/// `value` has `N · LANES` elements; the machine has the instructions of `S`.
#[inline(always)]
unsafe fn add_value<S: Simd, K: Number, const R: usize, const N: usize>(
    p: &[[f32; CHUNK]],
    j: usize,
    value: *const K,
    sums: &mut [[S::V; N]; R],
) {
    // SAFETY: the caller gives a value of `N · LANES` elements.
    unsafe {
        for n in 0..N {
            let v = K::load::<S>(value.add(n * S::LANES));
            for r in 0..R {
                sums[r][n] = S::fma(S::splat(p[r][j]), v, sums[r][n]);
            }
        }
    }
}

/// Entry points: the one place where a tile gets its instruction set.
macro_rules! entry_points {
    ($f32:ident, $bf16:ident, $simd:ty $(, $features:literal)?) => {
        /// # Safety
        ///
        /// See [`tile`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $f32(layer: &Layer<'_, f32>, part: &Tile<'_>, scratch: &mut Scratch) {
            // SAFETY: the caller gives a tile within the layer's arrays; `Kernel::available` lists this form only where
            // its instructions were found.
            unsafe { tile::<$simd, f32>(layer, part, scratch) }
        }
        /// # Safety
        ///
        /// See [`tile`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $bf16(layer: &Layer<'_, bf16>, part: &Tile<'_>, scratch: &mut Scratch) {
            // SAFETY: the caller gives a tile within the layer's arrays; `Kernel::available` lists this form only where
            // its instructions were found.
            unsafe { tile::<$simd, bf16>(layer, part, scratch) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
entry_points!(avx512_f32, avx512_bf16, crate::simd::avx512::Avx512, "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
entry_points!(avx2_f32, avx2_bf16, crate::simd::avx2::Avx2, "avx2,fma");
entry_points!(portable_f32, portable_bf16, crate::simd::portable::Portable<8>);
entry_points!(scalar_f32, scalar_bf16, crate::simd::portable::Portable<1>);
