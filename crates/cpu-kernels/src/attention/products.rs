//! The two products of attention: queries with the keys of a chunk, and what became of the scores with its values.
//!
//! What a row sums, and in which order, does not depend on the rows that are done with it.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over registers, of which several arrays are indexed alike"
)]

use std::ops::Range;

use crate::{attention::cached::Cached, lines::LINE, simd::Simd};

/// Positions of the context whose scores exist at once. Chunks begin at its multiples in every batch.
pub const CHUNK: usize = 64;
/// Keys that are scored at once.
pub(crate) const KEYS_AT_ONCE: usize = 4;
/// Vectors of an output that are summed in registers at once.
const PANEL: usize = 4;

/// Rows of the cache that are wanted next, keys and then values: they are asked for, a few at a time, while others are
/// computed with, because no processor guesses where the next block of a request lies.
pub(crate) struct Ahead<'a, E> {
    keys: &'a [*const E; CHUNK],
    values: &'a [*const E; CHUNK],
    num_rows: usize,
    row_bytes: usize,
    /// Rows that were asked for.
    done: usize,
    /// Rows that are asked for at once.
    at_once: usize,
}

impl<'a, E> Ahead<'a, E> {
    /// The first `num_rows` of both, of `dim` elements each, in `num_calls` calls of [`Self::ask`].
    pub(crate) fn new(
        keys: &'a [*const E; CHUNK],
        values: &'a [*const E; CHUNK],
        num_rows: usize,
        dim: usize,
        num_calls: usize,
    ) -> Self {
        let at_once = (2 * num_rows).div_ceil(num_calls.max(1));
        Self { keys, values, num_rows, row_bytes: dim * size_of::<E>(), done: 0, at_once }
    }

    /// Ask for the next few rows.
    #[inline(always)]
    pub(crate) fn ask<S: Simd>(&mut self) {
        let end = (2 * self.num_rows).min(self.done + self.at_once);
        for index in self.done..end {
            let row =
                index.checked_sub(self.num_rows).map_or_else(|| self.keys[index], |value| self.values[value]);
            ask_row::<S, E>(row, self.row_bytes);
        }
        self.done = end;
    }
}

/// Ask for `num_bytes` from `row` on.
#[inline(always)]
pub(crate) fn ask_row<S: Simd, E>(row: *const E, num_bytes: usize) {
    for at in (0..num_bytes).step_by(LINE) {
        S::prefetch(row.cast::<u8>().wrapping_add(at));
    }
}

/// What the heads at `at` of a chunk's rows are multiplied by.
///
/// # Safety
///
/// Each of `rows` has a head whose scale lies at element `at`.
#[inline(always)]
pub(crate) unsafe fn scales<K: Cached>(rows: &[*const K; CHUNK], at: usize) -> [f32; CHUNK] {
    // SAFETY: the caller gives rows with a scale at `at`.
    std::array::from_fn(|j| unsafe { K::scale(rows[j].add(at)) })
}

/// A row's scores, or what became of them, each multiplied by a scale of its key or value.
///
/// # Safety
///
/// The machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn multiply_by_scales<S: Simd>(scores: &mut [f32; CHUNK], scales: &[f32; CHUNK]) {
    for i in (0..CHUNK).step_by(S::LANES) {
        // SAFETY: both have CHUNK numbers, a multiple of the lanes.
        unsafe {
            let to = scores.as_mut_ptr().add(i);
            S::store(to, S::mul(S::load(to), S::load(scales.as_ptr().add(i))));
        }
    }
}

/// Products of `R` queries with the keys of `range`, four at a time; neighbours of the range get scores, too. `ask` is
/// called before each four, and asks for what is wanted later.
///
/// # Safety
///
/// `query` has `R` rows of `dim` elements, and so has, from element `offset` on, each of `keys` that a group of four touches;
/// there are `R` rows of scores; the machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn score<S: Simd, K: Cached, const R: usize>(
    query: *const f32,
    dim: usize,
    keys: &[*const K; CHUNK],
    offset: usize,
    range: &Range<usize>,
    scores: &mut [[f32; CHUNK]],
    mut ask: impl FnMut(),
) {
    // SAFETY: `query` has `R` rows of `dim` elements.
    let queries: [*const f32; R] = std::array::from_fn(|r| unsafe { query.add(r * dim) });
    let mut j = range.start / 4 * 4;
    while j < range.end {
        ask();
        // SAFETY: the caller gives `R` query rows and keys, in whole groups of four, of `dim` elements; `j + 4` is at
        // most CHUNK.
        unsafe {
            let mut sums = [[S::splat(0.0); 4]; R];
            let mut i = 0;
            while i < dim {
                let mut key = [S::splat(0.0); 4];
                for n in 0..4 {
                    key[n] = K::load_kept::<S>(keys[j + n].add(offset + i));
                }
                for r in 0..R {
                    let q = S::load(queries[r].add(i));
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

/// `sums = sums · factor + Σ p · value` for `R` rows, a panel of the output at a time, over the keys that each row sees. `ask` is
/// called before each two of the values that all rows see, and asks for what is wanted later.
///
/// # Safety
///
/// `to` has `R` rows of `dim` elements, and each of `values` in the ranges has a head of as many features from element `offset`
/// on; the ranges end at [`CHUNK`] at most; the machine has the instructions of `S`.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the parts of a product")]
pub(crate) unsafe fn add_values<S: Simd, K: Cached, const R: usize>(
    p: &[[f32; CHUNK]],
    factors: &[f32],
    values: &[*const K; CHUNK],
    offset: usize,
    ranges: &[Range<usize>],
    dim: usize,
    to: *mut f32,
    mut ask: impl FnMut(),
) {
    let mut i = 0;
    while i + PANEL * S::LANES <= dim {
        // SAFETY: the panel lies within the rows.
        unsafe { add_panel::<S, K, R, PANEL>(p, factors, values, offset, ranges, dim, i, to, &mut ask) };
        i += PANEL * S::LANES;
    }
    while i < dim {
        // SAFETY: `dim` is a multiple of the lanes.
        unsafe { add_panel::<S, K, R, 1>(p, factors, values, offset, ranges, dim, i, to, &mut ask) };
        i += S::LANES;
    }
}

/// Panels of an output of `dim` elements.
pub(crate) fn num_panels<S: Simd>(dim: usize) -> usize {
    let panel = PANEL * S::LANES;
    dim / panel + dim % panel / S::LANES
}

/// See [`add_values`]: `N` vectors from element `i` on.
///
/// # Safety
///
/// See [`add_values`]; `i + N · LANES` is at most `dim`.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the parts of a product")]
unsafe fn add_panel<S: Simd, K: Cached, const R: usize, const N: usize>(
    p: &[[f32; CHUNK]],
    factors: &[f32],
    values: &[*const K; CHUNK],
    offset: usize,
    ranges: &[Range<usize>],
    dim: usize,
    i: usize,
    to: *mut f32,
    ask: impl FnMut(),
) {
    // SAFETY: `i + N · LANES` is at most `dim`, by the contract of this function, so every vector lies within its row.
    unsafe {
        // Keys at even and at odd places are summed apart: half as many additions wait for one another.
        let mut even = [[S::splat(0.0); N]; R];
        let mut odd = [[S::splat(0.0); N]; R];
        add_seen::<S, K, R, N>(p, values, ranges, offset + i, offset + dim, &mut even, &mut odd, ask);
        for r in 0..R {
            for n in 0..N {
                let at = to.add(r * dim + i + n * S::LANES);
                S::store(at, S::fma(S::load(at), S::splat(factors[r]), S::add(even[r][n], odd[r][n])));
            }
        }
    }
}

/// Values, from element `i` on, of the keys that each row sees, with the scales at `scale_at` of those that have any. Those of
/// a row are added from the first to the last, whatever the other rows see.
///
/// # Safety
///
/// See [`add_panel`].
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the parts of a product")]
unsafe fn add_seen<S: Simd, K: Cached, const R: usize, const N: usize>(
    p: &[[f32; CHUNK]],
    values: &[*const K; CHUNK],
    ranges: &[Range<usize>],
    i: usize,
    scale_at: usize,
    even: &mut [[S::V; N]; R],
    odd: &mut [[S::V; N]; R],
    mut ask: impl FnMut(),
) {
    let (mut start, mut end) = (0, CHUNK);
    for range in &ranges[..R] {
        (start, end) = (start.max(range.start), end.min(range.end));
    }
    if start >= end {
        (start, end) = (0, 0);
    }
    // SAFETY: the caller gives values with a panel from element `i` on.
    unsafe {
        for r in 0..R {
            let keys = ranges[r].start..start;
            add_alone::<S, K, N>(&p[r], keys, values, i, scale_at, &mut even[r], &mut odd[r]);
        }
        // The values that all rows see are read once.
        // No bounds are checked: a check that may fail keeps the compiler from leaving the sums in registers.
        let value = |j: usize| *values.get_unchecked(j);
        let scale = |j: usize| K::scale(value(j).add(scale_at));
        let mut j = start;
        if j % 2 == 1 && j < end {
            add_value::<S, K, R, N>(p, j, value(j).add(i), scale(j), odd);
            j += 1;
        }
        while j + 1 < end {
            ask();
            add_value::<S, K, R, N>(p, j, value(j).add(i), scale(j), even);
            add_value::<S, K, R, N>(p, j + 1, value(j + 1).add(i), scale(j + 1), odd);
            j += 2;
        }
        if j < end {
            add_value::<S, K, R, N>(p, j, value(j).add(i), scale(j), even);
        }
        for r in 0..R {
            let keys = end.max(ranges[r].start)..ranges[r].end;
            add_alone::<S, K, N>(&p[r], keys, values, i, scale_at, &mut even[r], &mut odd[r]);
        }
    }
}

/// Values that one row sees and another does not.
///
/// # Safety
///
/// See [`add_seen`].
#[inline(always)]
unsafe fn add_alone<S: Simd, K: Cached, const N: usize>(
    p: &[f32; CHUNK],
    keys: Range<usize>,
    values: &[*const K; CHUNK],
    i: usize,
    scale_at: usize,
    even: &mut [S::V; N],
    odd: &mut [S::V; N],
) {
    for j in keys {
        // SAFETY: the caller gives values with a panel from element `i` on, and keys of a chunk.
        unsafe {
            // No bounds are checked, as in `add_seen`.
            let value = *values.get_unchecked(j);
            let (p, value, scale) = (std::slice::from_ref(p), value.add(i), K::scale(value.add(scale_at)));
            // A choice of two places for the sums, instead of two calls, would keep all sums on the stack.
            if j.is_multiple_of(2) {
                add_value::<S, K, 1, N>(p, j, value, scale, std::array::from_mut(even));
            } else {
                add_value::<S, K, 1, N>(p, j, value, scale, std::array::from_mut(odd));
            }
        }
    }
}

/// One key's value, weighed for each row, and multiplied by its scale where it has one.
///
/// # Safety
///
/// There are `R` rows of `p`, and `j` is a place in them; `value` has `N · LANES` elements; the machine has the instructions of
/// `S`.
#[inline(always)]
unsafe fn add_value<S: Simd, K: Cached, const R: usize, const N: usize>(
    p: &[[f32; CHUNK]],
    j: usize,
    value: *const K,
    scale: f32,
    sums: &mut [[S::V; N]; R],
) {
    // SAFETY: the caller gives `R` rows, a place in the chunk and a value of `N · LANES` elements.
    unsafe {
        let weights: [f32; R] = std::array::from_fn(|r| {
            let p = *p.get_unchecked(r).get_unchecked(j);
            if K::SCALE_LEN == 0 { p } else { p * scale }
        });
        for n in 0..N {
            let v = K::load_kept::<S>(value.add(n * S::LANES));
            for r in 0..R {
                sums[r][n] = S::fma(S::splat(weights[r]), v, sums[r][n]);
            }
        }
    }
}
