//! Products of few rows, whose time is that of reading the weights: a panel is read at two places at once.
//!
//! A core that reads two streams has more lines of memory under way than with one. Pieces, and the order in which they are
//! added, are those of [`crate::linear::product`]; only when a piece is summed is another matter.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over registers, of which several arrays are indexed alike"
)]

use crate::{
    linear::panel::{CHUNK, PANEL_VECTORS, Product, Weights, ask_near, multiply},
    simd::Simd,
};

/// Places of a panel that are read at once.
const STREAMS: usize = 2;
/// The most chunks that a stream reads before both go on behind what they read: the sums of the second one wait until the
/// first is done with its own.
const STRETCH: usize = 8;
/// Bytes between weights that are multiplied and those of the same stream that are asked for. With 8 KiB, half of a first cache
/// of 32 for both, four and six rows took 1.01 to 1.02 times as long.
const AHEAD: usize = 4096;

/// How many chunks each stream reads next, of so many.
const fn stretch(num_chunks: usize) -> usize {
    let each = num_chunks / STREAMS;
    if each < STRETCH { each } else { STRETCH }
}

/// Sum the pieces of `R` rows for as many whole chunks as the streams share evenly, and say how many these are; the sums are
/// in their places then.
///
/// # Safety
///
/// The arrays are as [`Product`] says, with `R` rows, inputs from the first on, and no scales; the machine has the
/// instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn sum_chunks<S: Simd, W: Weights, const R: usize>(what: &Product) -> usize {
    let outputs = PANEL_VECTORS * S::LANES;
    let step = outputs * W::BYTES;
    let num_chunks = what.num_k / CHUNK;
    // SAFETY: the caller found the instructions of `S`; there are sums of `R` rows.
    unsafe {
        let mut totals = [[S::splat(0.0); PANEL_VECTORS]; R];
        let mut done = 0;
        loop {
            let len = stretch(num_chunks - done);
            if len == 0 {
                break;
            }
            let end = done + STREAMS * len;
            let after = places_after(what.num_k, end);
            let mut late = [[[S::splat(0.0); PANEL_VECTORS]; R]; STRETCH];
            for i in 0..len {
                let chunks = [done + i, done + len + i];
                let next = if i + 1 < len { chunks.map(|chunk| chunk + 1) } else { after };
                let [first, second] = sum_two::<S, W, R>(what, chunks, next, step);
                add_to::<S, R>(&first, &mut totals);
                late[i] = second;
            }
            for sums in &late[..len] {
                add_to::<S, R>(sums, &mut totals);
            }
            done = end;
        }
        for r in 0..R {
            for n in 0..PANEL_VECTORS {
                S::store(what.c.add(r * outputs + n * S::LANES), totals[r][n]);
            }
        }
        done
    }
}

/// Chunks with which the streams go on behind `end`: those of the next stretch, or else what is left of this panel and the
/// second stream's place in the next one.
fn places_after(num_k: usize, end: usize) -> [usize; STREAMS] {
    let num_chunks = num_k / CHUNK;
    let second = match stretch(num_chunks - end) {
        0 => num_k.div_ceil(CHUNK) + stretch(num_chunks),
        len => end + len,
    };
    [end, second]
}

/// The pieces of two chunks, while the beginnings of the `next` two are asked for.
///
/// # Safety
///
/// As [`sum_chunks`], with two whole chunks of the panel; `step` is what an input's weights take.
#[inline(always)]
unsafe fn sum_two<S: Simd, W: Weights, const R: usize>(
    what: &Product,
    chunks: [usize; STREAMS],
    next: [usize; STREAMS],
    step: usize,
) -> [[[S::V; PANEL_VECTORS]; R]; STREAMS] {
    let ahead = (AHEAD / step).min(CHUNK);
    debug_assert!(CHUNK.is_multiple_of(ahead), "the last inputs of a chunk ask for the next one");
    // SAFETY: the caller gives chunks of the panel and of the rows, and found the instructions of `S`; what is asked for may lie
    // anywhere.
    unsafe {
        let mut sums = [[[S::splat(0.0); PANEL_VECTORS]; R]; STREAMS];
        for begin in (0..CHUNK).step_by(ahead) {
            let is_last = begin + ahead == CHUNK;
            let wanted = |stream: usize| {
                let input =
                    if is_last { next[stream] * CHUNK } else { chunks[stream] * CHUNK + begin + ahead };
                what.b.wrapping_add(input * step)
            };
            let wanted = [wanted(0), wanted(1)];
            for i in 0..ahead {
                for stream in 0..STREAMS {
                    ask_near::<S>(wanted[stream].wrapping_add(i * step), step);
                }
                for stream in 0..STREAMS {
                    let a = what.a.add(chunks[stream] * what.chunk_stride + begin + i);
                    let b = what.b.add((chunks[stream] * CHUNK + begin + i) * step);
                    multiply::<S, W, R>(a, b, &mut sums[stream]);
                }
            }
        }
        sums
    }
}

/// `totals = sums + totals`
///
/// # Safety
///
/// The machine has the instructions of `S`.
#[inline(always)]
unsafe fn add_to<S: Simd, const R: usize>(
    sums: &[[S::V; PANEL_VECTORS]; R],
    totals: &mut [[S::V; PANEL_VECTORS]; R],
) {
    for r in 0..R {
        for n in 0..PANEL_VECTORS {
            // SAFETY: the caller found the instructions of `S`.
            totals[r][n] = unsafe { S::add(sums[r][n], totals[r][n]) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_share_whole_chunks_and_go_on_where_the_next_stretch_or_panel_has_them() {
        assert_eq!([0, 1, 2, 3, 15, 16, 17, 40].map(stretch), [0, 0, 1, 1, 7, 8, 8, 8]);
        // 20 chunks: 8 each, then 2 each, then the next panel, of which each stream begins with 8 chunks.
        assert_eq!(places_after(20 * CHUNK, 16), [16, 18]);
        assert_eq!(places_after(20 * CHUNK, 20), [20, 28]);
        // 6 chunks and some inputs: what is left, and the second stream of the next panel behind it.
        assert_eq!(places_after(6 * CHUNK + 5, 6), [6, 10]);
    }
}
