//! The product: a few rounded rows times one panel of packed weights.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over registers, of which several arrays are indexed alike"
)]

use super::dot::{Dot, QUAD};
use crate::simd::Simd;

/// Vectors of outputs that are summed at once: they divide every panel that the form is for.
const VECTORS: usize = 2;

/// What one call computes.
pub(crate) struct Product {
    /// Rounded activations in blocks, `[block][row][input]`, from the first row of this call on.
    pub(crate) numbers: *const i8,
    /// Their scales, `[block][row]`.
    pub(crate) scales: *const f32,
    /// −128 times the sum of a block's numbers, `[block][row]`.
    pub(crate) starts: *const i32,
    /// Rows of a block.
    pub(crate) row_stride: usize,
    /// Blocks of inputs.
    pub(crate) num_blocks: usize,
    /// Blocks that share a scale of the weight.
    pub(crate) blocks_per_group: usize,
    /// The panel, `[quad of inputs][output][input]`.
    pub(crate) weights: *const i8,
    /// Its outputs.
    pub(crate) panel: usize,
    /// Its scales, `[group][output]`.
    pub(crate) weight_scales: *const f32,
    /// `[row][output]`, written.
    pub(crate) sums: *mut f32,
    /// Where to begin to ask for weights that come later, and how many bytes further with each block. Any address will do.
    pub(crate) ahead: *const u8,
    pub(crate) ahead_step: usize,
}

/// A compiled form of [`product`] for a number of rows.
pub(crate) type ProductFn = unsafe fn(&Product);

/// The sums of `ROWS` rows, in blocks of `BLOCK` inputs.
///
/// # Safety
///
/// The arrays are as [`Product`] says, with `ROWS` rows; the panel is a multiple of `VECTORS` vectors; the machine has the
/// instructions of `D`.
#[inline(always)]
pub(crate) unsafe fn product<D: Dot, const ROWS: usize, const BLOCK: usize>(what: &Product) {
    let lanes = D::Lanes::LANES;
    for first in (0..what.panel).step_by(VECTORS * lanes) {
        // SAFETY: the caller gives arrays as `Product` says, with `ROWS` rows, so every offset below stays within them.
        unsafe {
            let zero = D::Lanes::splat(0.0);
            let totals = what.sums.add(first);
            for r in 0..ROWS {
                for n in 0..VECTORS {
                    D::Lanes::store(totals.add(r * what.panel + n * lanes), zero);
                }
            }
            let mut groups = [[zero; VECTORS]; ROWS];
            let (mut numbers, mut scales, mut starts) = (what.numbers, what.scales, what.starts);
            let mut weight_scales = what.weight_scales.add(first);
            let (mut weights, mut ahead) = (what.weights.add(first * QUAD), what.ahead);
            let mut left_of_group = what.blocks_per_group;
            for block in 0..what.num_blocks {
                if first == 0 {
                    for line in (0..what.ahead_step).step_by(64) {
                        D::Lanes::prefetch(ahead.wrapping_add(line));
                    }
                    ahead = ahead.wrapping_add(what.ahead_step);
                }
                let mut sums = [[D::start(starts); VECTORS]; ROWS];
                for r in 1..ROWS {
                    sums[r] = [D::start(starts.add(r)); VECTORS];
                }
                for quad in 0..BLOCK / QUAD {
                    let mut loaded = [D::weights(weights); VECTORS];
                    for n in 1..VECTORS {
                        loaded[n] = D::weights(weights.add(n * lanes * QUAD));
                    }
                    for r in 0..ROWS {
                        let inputs = D::inputs(numbers.add(r * BLOCK + quad * QUAD));
                        for n in 0..VECTORS {
                            sums[r][n] = D::add(sums[r][n], loaded[n], inputs);
                        }
                    }
                    weights = weights.wrapping_add(what.panel * QUAD);
                }
                for r in 0..ROWS {
                    let scale = D::Lanes::splat(*scales.add(r));
                    for n in 0..VECTORS {
                        let scaled = D::Lanes::mul(D::to_float(sums[r][n]), scale);
                        groups[r][n] = D::Lanes::add(groups[r][n], scaled);
                    }
                }
                numbers = numbers.wrapping_add(what.row_stride * BLOCK);
                scales = scales.wrapping_add(what.row_stride);
                starts = starts.wrapping_add(what.row_stride);
                left_of_group -= 1;
                if left_of_group == 0 || block + 1 == what.num_blocks {
                    for n in 0..VECTORS {
                        let scale = D::Lanes::load(weight_scales.add(n * lanes));
                        for r in 0..ROWS {
                            // Totals are touched once for each group, so they leave the registers to the blocks.
                            let total = totals.add(r * what.panel + n * lanes);
                            let scaled = D::Lanes::mul(groups[r][n], scale);
                            D::Lanes::store(total, D::Lanes::add(D::Lanes::load(total), scaled));
                            groups[r][n] = zero;
                        }
                    }
                    weight_scales = weight_scales.wrapping_add(what.panel);
                    left_of_group = what.blocks_per_group;
                }
            }
        }
    }
}
