//! The product by the matrix unit: a tile of sums for each block of inputs, scaled and added by vectors as everywhere else.
//!
//! A block has its own scales, so each tile of sums leaves the unit after one instruction. That takes vectors about as long as
//! three instructions of theirs for each sum, whatever the block's inputs, where they multiply by themselves in eleven.

#![allow(clippy::wildcard_imports, reason = "the intrinsics carry their origin in their names")]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over registers, of which several arrays are indexed alike"
)]

use std::arch::x86_64::*;

use super::{dot::QUAD, product::Product};
use crate::{
    amx::{self, TILE_ROWS, Tiles},
    avx512::Avx512,
    simd::Simd,
};

/// Outputs of a tile.
const OUTPUTS: usize = 16;
/// Outputs of a panel for AVX-512.
const PANEL: usize = 2 * OUTPUTS;

/// Sums of a block, as whole numbers, and those of the next, which the unit makes meanwhile.
#[repr(C, align(64))]
struct Whole([[[i32; OUTPUTS]; TILE_ROWS]; 2]);

/// The sums of `ROWS` rows, in blocks of `BLOCK` inputs: the bits of [`super::product::product`].
///
/// # Safety
///
/// The arrays are as [`Product`] says, with `ROWS` rows, at most [`TILE_ROWS`], and a panel of [`PANEL`] outputs;
/// [`amx::multiplies_whole_numbers`].
#[target_feature(enable = "avx512f,avx2,fma")]
pub(crate) unsafe fn product<const ROWS: usize, const BLOCK: usize>(what: &Product) {
    debug_assert!(what.panel == PANEL);
    let mut whole = Whole([[[0; OUTPUTS]; TILE_ROWS]; 2]);
    // SAFETY: the caller gives arrays as `Product` says, with `ROWS` rows, so every offset below stays within them, and no
    // other code of this thread uses tiles meanwhile.
    unsafe {
        let _tiles = Tiles::with_inputs(ROWS, BLOCK);
        let [mut ready, mut next] = whole.0.each_mut().map(|tile| tile.as_mut_ptr().cast::<i32>());
        for first in [0, OUTPUTS] {
            let (mut numbers, mut weights) = (what.numbers, what.weights.add(first * QUAD));
            let (mut scales, mut weight_scales) = (what.scales, what.weight_scales.add(first));
            let (mut ahead, mut left_of_group) = (what.ahead, what.blocks_per_group);
            let totals = what.sums.add(first);
            for r in 0..ROWS {
                _mm512_storeu_ps(totals.add(r * PANEL), _mm512_setzero_ps());
            }
            let mut groups = [_mm512_setzero_ps(); ROWS];
            amx::multiply_whole_numbers::<BLOCK, { PANEL * QUAD }>(numbers, weights, ready);
            for left in (0..what.num_blocks).rev() {
                if left > 0 {
                    numbers = numbers.add(what.row_stride * BLOCK);
                    weights = weights.add(PANEL * BLOCK);
                    amx::multiply_whole_numbers::<BLOCK, { PANEL * QUAD }>(numbers, weights, next);
                }
                if first == 0 {
                    for line in (0..what.ahead_step).step_by(64) {
                        Avx512::prefetch(ahead.wrapping_add(line));
                    }
                    ahead = ahead.wrapping_add(what.ahead_step);
                }
                for r in 0..ROWS {
                    let sum = _mm512_cvtepi32_ps(_mm512_load_si512(ready.add(r * OUTPUTS).cast()));
                    groups[r] = _mm512_add_ps(groups[r], _mm512_mul_ps(sum, _mm512_set1_ps(*scales.add(r))));
                }
                std::mem::swap(&mut ready, &mut next);
                scales = scales.wrapping_add(what.row_stride);
                left_of_group -= 1;
                if left_of_group == 0 || left == 0 {
                    let scale = _mm512_loadu_ps(weight_scales);
                    for r in 0..ROWS {
                        let total = totals.add(r * PANEL);
                        let scaled = _mm512_mul_ps(groups[r], scale);
                        _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), scaled));
                        groups[r] = _mm512_setzero_ps();
                    }
                    weight_scales = weight_scales.wrapping_add(PANEL);
                    left_of_group = what.blocks_per_group;
                }
            }
        }
    }
}
