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
        cache_rows::{CacheRows, first_chunk},
        cached::{Cached, Int8Head},
        decode::{self, MIN_ROWS_TO_PACK},
        layer::{Layer, Tile},
        products::{Ahead, CHUNK, add_values, multiply_by_scales, scales, score},
        scratch::{Numbers, OnLine, Scratch},
        softmax::{Softmax, bend, soften},
    },
    number::Number,
    simd::Simd,
};

/// The most rows that any instruction set scores at once.
const MOST_SCORE_ROWS: usize = 4;

/// One compiled form of [`tile`].
pub(crate) type TileFn<E, C> = unsafe fn(&Layer<'_, E, C>, &Tile<'_>, &mut Scratch);

/// The forms of [`tile`] for few and for many rows of a KV head: functions apart, or the one takes registers from the other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiles<E: 'static, C: 'static> {
    few: TileFn<E, C>,
    many: TileFn<E, C>,
}

impl<E, C> Tiles<E, C> {
    pub(crate) fn taking(&self, rows_per_head: usize) -> TileFn<E, C> {
        if rows_per_head < MIN_ROWS_TO_PACK { self.few } else { self.many }
    }
}

/// The forms of [`tile`] of one instruction set: by what queries are made of, and the cache where that is something else.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileForms {
    pub(crate) f32: Tiles<f32, f32>,
    pub(crate) bf16: Tiles<bf16, bf16>,
    pub(crate) f32_over_bf16: Tiles<f32, bf16>,
    pub(crate) f32_over_int8: Tiles<f32, Int8Head>,
    pub(crate) bf16_over_int8: Tiles<bf16, Int8Head>,
}

/// Attention of one tile, whose KV heads have few rows each or not.
///
/// # Safety
///
/// The machine has the instructions of `S`; `head_dim` is a multiple of its lanes; the tile lies within the arrays of the
/// layer, its blocks within the cache, and they cover the positions that its tokens see.
#[inline(always)]
unsafe fn tile<S: Simd, E: Number, C: Cached, const FEW: bool>(
    layer: &Layer<'_, E, C>,
    tile: &Tile<'_>,
    scratch: &mut Scratch,
) {
    let dim = layer.head_dim;
    let group = layer.num_heads / layer.num_kv_heads;
    let rows_per_head = tile.tokens.len() * group;
    let num_rows = tile.kv_heads.len() * rows_per_head;

    // SAFETY: the caller gives a tile whose tokens and heads lie within `query`.
    unsafe { load_queries(layer, tile, group, &mut scratch.query) };
    scratch.sums.set_zeros(num_rows * dim);
    scratch.softmax.clear();
    let head_of = |row: usize| {
        let kv_head = tile.kv_heads.start + row / rows_per_head;
        kv_head * group + row % rows_per_head % group
    };
    scratch.softmax.extend((0..num_rows).map(|row| Softmax::of(layer.options, head_of(row))));

    let chunks = first_chunk(layer.options, tile)..tile.context_end().div_ceil(CHUNK);
    // SAFETY: the caller gives a tile of the layer's arrays, and promises the instructions.
    unsafe {
        if FEW {
            decode::walk::<S, E, C>(layer, tile, chunks, scratch);
        } else {
            attend_heads::<S, E, C>(layer, tile, chunks, scratch);
        }
    }

    for row in 0..num_rows {
        let (token, head) = (tile.tokens.start + row % rows_per_head / group, head_of(row));
        let sum = scratch.softmax[row].sum;
        let sums = &scratch.sums[row * dim..][..dim];
        for (i, &x) in sums.iter().enumerate() {
            // SAFETY: the token's row of `out`, which is this tile's alone.
            unsafe { layer.out.add((token * layer.num_heads + head) * dim + i).write(E::narrow(x / sum)) };
        }
    }
}

/// Many rows of each head: a chunk of one head after the other, copied to one place.
///
/// # Safety
///
/// See [`tile`]; the scratch has a place for each row.
#[inline(always)]
unsafe fn attend_heads<S: Simd, E: Number, C: Cached>(
    layer: &Layer<'_, E, C>,
    tile: &Tile<'_>,
    chunks: Range<usize>,
    scratch: &mut Scratch,
) {
    let dim = layer.head_dim;
    let rows_per_head = tile.tokens.len() * (layer.num_heads / layer.num_kv_heads);
    // The heads of a token lie side by side: the next head's keys are near while this one's are read.
    let mut places = chunks.flat_map(|chunk| tile.kv_heads.clone().map(move |kv_head| (chunk, kv_head)));
    let locate = |(chunk, kv_head)| CacheRows::of(layer, tile, chunk, kv_head);
    let mut next = places.next().map(locate);
    while let Some(rows) = next {
        next = places.next().map(locate);
        let first_row = (rows.kv_head - tile.kv_heads.start) * rows_per_head;
        // SAFETY: the blocks cover the positions of the chunk, by the contract of `tile`, and lie within the cache; the
        // caller promises the instructions.
        unsafe {
            let num_keys = rows.num_keys;
            let packed = CacheRows {
                keys: pack::<S, C>(&rows.keys, num_keys.next_multiple_of(4), dim, &mut scratch.packed_keys),
                values: pack::<S, C>(&rows.values, num_keys, dim, &mut scratch.packed_values),
                chunk: rows.chunk,
                kv_head: rows.kv_head,
                num_keys,
            };
            let packed = PackedChunk {
                key_scales: scales(&rows.keys, dim),
                value_scales: scales(&rows.values, dim),
                rows: packed,
            };
            attend_chunk::<S, E, C>(layer, tile, &packed, next.as_ref().unwrap_or(&rows), first_row, scratch);
        }
    }
}

/// A chunk of one head, copied to one place in 32 bits, and what it is multiplied by where the cache has scales: what is
/// summed has to be summed in the same order and rounded alike in a tile of few rows.
struct PackedChunk {
    rows: CacheRows<f32>,
    key_scales: [f32; CHUNK],
    value_scales: [f32; CHUNK],
}

/// The tile's queries in 32 bits and scaled, `[kv_heads, tokens, group, head_dim]`.
///
/// # Safety
///
/// Tokens and heads lie within `layer.query`.
#[inline(always)]
unsafe fn load_queries<E: Number, C>(
    layer: &Layer<'_, E, C>,
    tile: &Tile<'_>,
    group: usize,
    query: &mut Numbers,
) {
    let num_values = group * layer.head_dim;
    query.set_len(tile.kv_heads.len() * tile.tokens.len() * num_values);
    let mut rows = query.chunks_exact_mut(num_values);
    for kv_head in tile.kv_heads.clone() {
        for (token, to) in tile.tokens.clone().zip(&mut rows) {
            // SAFETY: the caller gives tokens and heads that lie within `layer.query`, so this row does.
            let row = unsafe {
                let start = layer.query.add(token * layer.query_stride + kv_head * num_values);
                std::slice::from_raw_parts(start, num_values)
            };
            for (to, x) in to.iter_mut().zip(row) {
                *to = x.widen() * layer.options.scale;
            }
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
unsafe fn pack<S: Simd, C: Cached>(
    rows: &[*const C; CHUNK],
    num_rows: usize,
    dim: usize,
    packed: &mut Numbers,
) -> [*const f32; CHUNK] {
    packed.set_len(CHUNK * dim);
    let start = packed.as_mut_ptr();
    for (j, row) in rows[..num_rows].iter().enumerate() {
        for i in (0..dim).step_by(S::LANES) {
            // SAFETY: `dim` elements are there to be read, and in row `j` of `packed` to be written.
            unsafe { S::store(start.add(j * dim + i), C::load_kept::<S>(row.add(i))) };
        }
    }
    // SAFETY: `packed` has CHUNK rows.
    std::array::from_fn(|j| unsafe { start.add(j * dim).cast_const() })
}

/// The rows of one KV head, from `first_row` on, over one chunk of the context.
///
/// # Safety
///
/// See [`tile`]; the rows of `packed` (its keys up to a multiple of four) have `head_dim` elements.
#[inline(always)]
unsafe fn attend_chunk<S: Simd, E: Number, C: Cached>(
    layer: &Layer<'_, E, C>,
    tile: &Tile<'_>,
    packed: &PackedChunk,
    next: &CacheRows<C>,
    first_row: usize,
    scratch: &mut Scratch,
) {
    let found = &packed.rows;
    let group = layer.num_heads / layer.num_kv_heads;
    let num_rows = tile.tokens.len() * group;
    let OnLine(scores) = &mut OnLine([[0.0; CHUNK]; MOST_SCORE_ROWS]);
    let num_calls = num_rows.div_ceil(S::SCORE_ROWS) * found.num_keys.div_ceil(4);
    let mut ahead =
        Ahead::new(&next.keys, &next.values, next.num_keys, layer.head_dim + C::SCALE_LEN, num_calls);
    let mut row = 0;
    while row < num_rows {
        // Rows that follow each other see nearly the same keys: they are done together, unless one sees none.
        let mut rows = 1;
        if S::SCORE_ROWS >= 2 && row + S::SCORE_ROWS <= num_rows {
            let is_seen = |row: usize| !found.seen(layer.options, tile, row / group).is_empty();
            if is_seen(row) && is_seen(row + S::SCORE_ROWS - 1) {
                rows = S::SCORE_ROWS;
            }
        }
        if rows > 1 || !found.seen(layer.options, tile, row / group).is_empty() {
            let who = RowGroup { first_row, rows: row..row + rows };
            // SAFETY: the rows lie within the tile, `packed` has rows of `head_dim` elements by the contract of this
            // function, and the scratch has a place for each.
            unsafe {
                attend_rows::<S, E, C>(layer, tile, packed, &who, scores, scratch, &mut ahead);
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

/// Rows each of which sees some keys of the chunk.
///
/// # Safety
///
/// See [`attend_chunk`]; there is one row, or `S::SCORE_ROWS`.
#[inline(always)]
unsafe fn attend_rows<S: Simd, E: Number, C: Cached>(
    layer: &Layer<'_, E, C>,
    tile: &Tile<'_>,
    packed: &PackedChunk,
    who: &RowGroup,
    scores: &mut [[f32; CHUNK]; MOST_SCORE_ROWS],
    scratch: &mut Scratch,
    ahead: &mut Ahead<'_, C>,
) {
    let dim = layer.head_dim;
    let found = &packed.rows;
    let group = layer.num_heads / layer.num_kv_heads;
    let num_rows = who.rows.len();
    let first = who.first_row + who.rows.start;
    let mut factors = [1.0; MOST_SCORE_ROWS];
    let ranges: [Range<usize>; MOST_SCORE_ROWS] = std::array::from_fn(|i| {
        found.seen(layer.options, tile, (who.rows.start + i.min(num_rows - 1)) / group)
    });
    // Keys that a row does not see are scored with those that another one sees, and dropped.
    let all = ranges[0].start..ranges[num_rows - 1].end;
    // SAFETY: `query` has `num_rows` rows of `dim` elements from there on; the keys go up to a multiple of four.
    unsafe {
        let query = scratch.query.as_ptr().add(first * dim);
        let ask = || ahead.ask::<S>();
        match num_rows {
            4 => score::<S, f32, 4>(query, dim, &found.keys, 0, &all, scores, ask),
            2 => score::<S, f32, 2>(query, dim, &found.keys, 0, &all, scores, ask),
            _ => score::<S, f32, 1>(query, dim, &found.keys, 0, &all, scores, ask),
        }
    }
    for (i, row) in who.rows.clone().enumerate() {
        let head = found.kv_head * group + row % group;
        let distance = (found.chunk * CHUNK) as f32 - (tile.position + row / group) as f32;
        // SAFETY: the caller promises the instructions.
        factors[i] = unsafe {
            if C::SCALE_LEN > 0 {
                multiply_by_scales::<S>(&mut scores[i], &packed.key_scales);
            }
            bend::<S>(layer.options, head, distance, &mut scores[i]);
            soften::<S>(&mut scores[i], &ranges[i], &mut scratch.softmax[first + i])
        };
        if C::SCALE_LEN > 0 {
            // SAFETY: likewise.
            unsafe { multiply_by_scales::<S>(&mut scores[i], &packed.value_scales) };
        }
    }
    let sums = scratch.sums.as_mut_ptr();
    let mut i = 0;
    while i < num_rows {
        // SAFETY: `sums` has `num_rows` rows of `dim` elements.
        unsafe {
            let to = sums.add((first + i) * dim);
            if S::VALUE_ROWS == 2 && i + 2 <= num_rows {
                add_values::<S, f32, 2>(
                    &scores[i..],
                    &factors[i..],
                    &found.values,
                    0,
                    &ranges[i..],
                    dim,
                    to,
                    || {},
                );
                i += 2;
            } else {
                add_values::<S, f32, 1>(
                    &scores[i..],
                    &factors[i..],
                    &found.values,
                    0,
                    &ranges[i..],
                    dim,
                    to,
                    || {},
                );
                i += 1;
            }
        }
    }
}

/// Entry points: the one place where a tile gets its instruction set.
macro_rules! entry_points {
    ($name:ident, $simd:ty $(, $features:literal)?) => {
        pub(crate) mod $name {
            use super::*;
            /// # Safety
            ///
            /// See [`tile`](super::tile).
            $(#[target_feature(enable = $features)])?
            unsafe fn form<E: Number, C: Cached, const FEW: bool>(
                layer: &Layer<'_, E, C>,
                part: &Tile<'_>,
                scratch: &mut Scratch,
            ) {
                // SAFETY: the caller gives a tile within the layer's arrays; `Kernel::available` lists this form only
                // where its instructions were found.
                unsafe { tile::<$simd, E, C, FEW>(layer, part, scratch) }
            }
            const fn tiles<E: Number, C: Cached>() -> Tiles<E, C> {
                Tiles { few: form::<E, C, true>, many: form::<E, C, false> }
            }
            pub(crate) const FORMS: TileForms = TileForms {
                f32: tiles(),
                bf16: tiles(),
                f32_over_bf16: tiles(),
                f32_over_int8: tiles(),
                bf16_over_int8: tiles(),
            };
        }
    };
}

#[cfg(target_arch = "x86_64")]
entry_points!(avx512, crate::simd::avx512::Avx512, "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
entry_points!(avx2, crate::simd::avx2::Avx2, "avx2,fma");
entry_points!(portable, crate::simd::portable::Portable<8>);
entry_points!(scalar, crate::simd::portable::Portable<1>);
