//! Products of weights of 8 bits with activations that are rounded to 8 bits: sums of whole numbers, which are exact.
//!
//! Each row is rounded in blocks of inputs, once for all outputs ([`rows`]). A block's products are summed as whole numbers,
//! which have one sum in any order; block after block that sum is scaled and added in 32 bits, by a multiplication and an
//! addition, each rounded. So a row's bits depend neither on the other rows nor on the instructions that compute them
//! ([`form`]): they are the same on every processor.

pub(crate) mod dot;
pub(crate) mod form;
mod product;
mod rows;
#[cfg(target_arch = "x86_64")]
mod unit;

use self::form::chosen;
use self::product::Product;
pub(crate) use self::rows::{RoundedRows, round_rows};
use crate::packed::PackedLinear;

/// Rows that are handed out together: a multiple of what any form computes at once.
pub(crate) const TILE_ROWS: usize = 16;
/// How far ahead of their use weights are asked for where they are used but once.
const AHEAD: usize = 8192;

/// Sums of some rows and one panel, to `[row][output]`.
///
/// # Safety
///
/// The layer is of [`crate::WeightKind::W8A8`], the rows were rounded for it, and `sums` has room for `num_rows` of them.
pub(crate) unsafe fn sum(
    layer: &PackedLinear,
    panel: usize,
    rows: &RoundedRows,
    first_row: usize,
    num_rows: usize,
    sums: *mut f32,
) {
    let form = chosen(layer.kernel().w8a8, num_rows);
    let (outputs, block) = (layer.kernel().panel(), layer.kind().block());
    let num_blocks = layer.padded_inputs() / block;
    let group_size = layer.group_size();
    let blocks_per_group = if group_size >= layer.in_features() { num_blocks } else { group_size / block };
    let weights = layer.panel_weights(panel);
    let products = form.products(block);
    let num_tiles = num_rows.div_ceil(products.len());
    let block_bytes = block * outputs;
    // One tile asks for its own weights a little ahead; several share out the next panel among them.
    let (ahead, share) = if num_tiles == 1 {
        (weights.wrapping_add(AHEAD), block_bytes)
    } else {
        (weights.wrapping_add(num_blocks * block_bytes), block_bytes.div_ceil(num_tiles))
    };
    for tile in 0..num_tiles {
        let start = num_rows * tile / num_tiles;
        let tile_rows = num_rows * (tile + 1) / num_tiles - start;
        let what = Product {
            numbers: rows.numbers(first_row + start),
            scales: rows.scales(first_row + start),
            starts: rows.starts(first_row + start),
            row_stride: rows.num_rows(),
            num_blocks,
            blocks_per_group,
            weights: weights.cast(),
            panel: outputs,
            weight_scales: layer.panel_scales(panel),
            sums: sums.wrapping_add(start * outputs),
            ahead: if num_tiles == 1 { ahead } else { ahead.wrapping_add(tile * share * num_blocks) },
            ahead_step: share,
        };
        // SAFETY: a tile has at least one row and at most as many as there are products; the caller gives rows that were
        // rounded for the layer and sums with room for them; a form is chosen only where its instructions were found.
        unsafe { products[tile_rows - 1](&what) };
    }
}
