//! The kernel: a few query tokens of one request and the query heads of some KV heads, over the request's whole context.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over registers, of which several arrays are indexed alike"
)]

use std::ops::Range;

use half::bf16;

use crate::{
    attention::{
        options::AttentionOptions,
        products::{Ahead, CHUNK, Scores, add_values, score},
    },
    number::Number,
    simd::{Simd, exp, tanh},
};

/// A chunk is copied to one place when at least this many query rows read it: rows of one head lie far apart in the
/// cache, on addresses that compete for the same few places of the nearest cache, and `bf16` is widened once.
const MIN_ROWS_TO_PACK: usize = 8;

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

/// Where the keys and values of one KV head in one chunk of the context lie; after the last of `num_keys` it is there
/// again, since keys are scored by fours, and what is too many dropped.
struct CacheRows<E> {
    chunk: usize,
    kv_head: usize,
    num_keys: usize,
    keys: [*const E; CHUNK],
    values: [*const E; CHUNK],
}

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
    let chunks = context.start / CHUNK..seq_end.div_ceil(CHUNK);
    // The heads of a token lie side by side: the next head's keys are near while this one's are read.
    let mut places = chunks.flat_map(|chunk| tile.kv_heads.clone().map(move |kv_head| (chunk, kv_head)));
    let locate = |(chunk, kv_head)| rows_of(layer, tile, chunk, kv_head, seq_end);
    let mut next = places.next().map(locate);
    while let Some(rows) = next {
        next = places.next().map(locate);
        let first_row = (rows.kv_head - tile.kv_heads.start) * rows_per_head;
        let ahead = next.as_ref().unwrap_or(&rows);
        // SAFETY: the blocks cover the positions of the chunk, by the contract of `tile`, and lie within the cache; the
        // caller promises the instructions.
        unsafe {
            if rows_per_head >= MIN_ROWS_TO_PACK {
                let num_keys = rows.num_keys;
                let rows = CacheRows {
                    keys: pack::<S, E>(
                        &rows.keys,
                        num_keys.next_multiple_of(4),
                        dim,
                        &mut scratch.packed_keys,
                    ),
                    values: pack::<S, E>(&rows.values, num_keys, dim, &mut scratch.packed_values),
                    chunk: rows.chunk,
                    kv_head: rows.kv_head,
                    num_keys,
                };
                attend_chunk::<S, E, f32>(layer, tile, &rows, ahead, first_row, scratch);
            } else {
                attend_chunk::<S, E, E>(layer, tile, &rows, ahead, first_row, scratch);
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

/// Where a chunk's keys and values of one head lie.
#[inline(always)]
fn rows_of<E>(
    layer: &Layer<'_, E>,
    tile: &Tile<'_>,
    chunk: usize,
    kv_head: usize,
    seq_end: usize,
) -> CacheRows<E> {
    let base = chunk * CHUNK;
    let num_keys = CHUNK.min(seq_end - base);
    let mut offsets = [0; CHUNK];
    for (j, offset) in offsets[..num_keys].iter_mut().enumerate() {
        let position = base + j;
        let block = tile.blocks[position / layer.block_size] as usize;
        let slot = block * layer.block_size + position % layer.block_size;
        *offset = (slot * layer.num_kv_heads + kv_head) * layer.head_dim;
    }
    let last = offsets[num_keys - 1];
    offsets[num_keys..].fill(last);
    // SAFETY: the block lies within the cache, by the contract of `tile`, so does each of its slots and heads.
    let place = |start: *const E| offsets.map(|offset| unsafe { start.add(offset) });
    CacheRows { chunk, kv_head, num_keys, keys: place(layer.keys), values: place(layer.values) }
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
/// See [`tile`]; `found` (its keys up to a multiple of four) points at rows of `head_dim` elements.
#[inline(always)]
unsafe fn attend_chunk<S: Simd, E: Number, K: Number>(
    layer: &Layer<'_, E>,
    tile: &Tile<'_>,
    found: &CacheRows<K>,
    next: &CacheRows<E>,
    first_row: usize,
    scratch: &mut Scratch,
) {
    let group = layer.num_heads / layer.num_kv_heads;
    let num_rows = tile.tokens.len() * group;
    let mut scores: Scores = [[0.0; CHUNK]; 4];
    let num_calls = num_rows.div_ceil(S::SCORE_ROWS) * found.num_keys.div_ceil(4);
    let mut ahead = Ahead::new(&next.keys, &next.values, next.num_keys, layer.head_dim, num_calls);
    let mut row = 0;
    while row < num_rows {
        // Rows that follow each other see nearly the same keys: they are done together, unless one sees none.
        let mut rows = 1;
        if S::SCORE_ROWS >= 2 && row + S::SCORE_ROWS <= num_rows {
            let is_seen = |row: usize| !seen(layer.options, tile, found, row / group).is_empty();
            if is_seen(row) && is_seen(row + S::SCORE_ROWS - 1) {
                rows = S::SCORE_ROWS;
            }
        }
        if rows > 1 || !seen(layer.options, tile, found, row / group).is_empty() {
            let who = RowGroup { first_row, rows: row..row + rows };
            // SAFETY: the rows lie within the tile, `found` has rows of `head_dim` elements by the contract of this
            // function, and the scratch has a place for each.
            unsafe {
                attend_rows::<S, E, K>(layer, tile, found, &who, &mut scores, scratch, &mut ahead);
            };
        }
        row += rows;
    }
}

/// Rows of a KV head that are done together: which of its own, and where its own begin in the scratch.
struct RowGroup {
    first_row: usize,
    rows: Range<usize>,
}

/// Which keys of a chunk, counted from its start, a token of the tile sees.
#[inline(always)]
fn seen<K>(
    options: &AttentionOptions<'_>,
    tile: &Tile<'_>,
    found: &CacheRows<K>,
    token: usize,
) -> Range<usize> {
    let first = found.chunk * CHUNK;
    let visible = visible(options, tile.position + token);
    let start = visible.start.saturating_sub(first);
    start..visible.end.min(first + found.num_keys).saturating_sub(first).max(start)
}

/// Rows each of which sees some keys of the chunk.
///
/// # Safety
///
/// See [`attend_chunk`]; there is one row, or `S::SCORE_ROWS`.
#[inline(always)]
unsafe fn attend_rows<S: Simd, E: Number, K: Number>(
    layer: &Layer<'_, E>,
    tile: &Tile<'_>,
    found: &CacheRows<K>,
    who: &RowGroup,
    scores: &mut Scores,
    scratch: &mut Scratch,
    ahead: &mut Ahead<'_, E>,
) {
    let dim = layer.head_dim;
    let group = layer.num_heads / layer.num_kv_heads;
    let num_rows = who.rows.len();
    let first = who.first_row + who.rows.start;
    let mut factors = [1.0; 4];
    let ranges: [Range<usize>; 4] = std::array::from_fn(|i| {
        seen(layer.options, tile, found, (who.rows.start + i.min(num_rows - 1)) / group)
    });
    // Keys that a row does not see are scored with those that another one sees, and dropped.
    let all = ranges[0].start..ranges[num_rows - 1].end;
    // SAFETY: `query` has `num_rows` rows of `dim` elements from there on; the keys go up to a multiple of four.
    unsafe {
        let query = scratch.query.as_ptr().add(first * dim);
        match num_rows {
            4 => score::<S, K, E, 4>(query, dim, &found.keys, &all, scores, ahead),
            2 => score::<S, K, E, 2>(query, dim, &found.keys, &all, scores, ahead),
            _ => score::<S, K, E, 1>(query, dim, &found.keys, &all, scores, ahead),
        }
    }
    for (i, row) in who.rows.clone().enumerate() {
        let head = found.kv_head * group + row % group;
        let distance = (found.chunk * CHUNK) as f32 - (tile.position + row / group) as f32;
        // SAFETY: the caller promises the instructions.
        factors[i] = unsafe {
            bend::<S>(layer.options, head, distance, &mut scores[i]);
            soften::<S>(&mut scores[i], &ranges[i], &mut scratch.softmax[first + i])
        };
    }
    let sums = scratch.sums.as_mut_ptr();
    let mut i = 0;
    while i < num_rows {
        // SAFETY: `sums` has `num_rows` rows of `dim` elements.
        unsafe {
            let to = sums.add((first + i) * dim);
            if S::VALUE_ROWS == 2 && i + 2 <= num_rows {
                add_values::<S, K, 2>(&scores[i..], &factors[i..], &found.values, &ranges[i..], dim, to);
                i += 2;
            } else {
                add_values::<S, K, 1>(&scores[i..], &factors[i..], &found.values, &ranges[i..], dim, to);
                i += 1;
            }
        }
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
