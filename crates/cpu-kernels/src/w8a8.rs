//! Products of weights of 8 or 4 bits with activations that are rounded to 8 bits: sums of whole numbers, which are exact.
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

pub(crate) use self::rows::RoundedRows;
use self::{
    form::{Variant, chosen},
    product::Product,
    rows::round_rows,
};
use crate::{
    attention::TokenRows,
    element::Element,
    lines::Lines,
    packed::{
        LinearError, PackedLinear, Quantized, WeightKind,
        quantized::{GROUPS_TOGETHER, ReadyScales},
    },
    threads::Threads,
};

/// Rows that are handed out together: a multiple of what any form computes at once.
pub(crate) const TILE_ROWS: usize = 16;
/// Rows that lie together for forms that compute a few at once: a multiple of 6, 4, 3 and 2.
const BUNDLE: usize = 12;
/// How far ahead of their use weights are asked for where they are used but once.
const AHEAD: usize = 8192;

/// Blocks of a group, which shares a scale of the weight.
fn blocks_per_group(layer: &PackedLinear) -> usize {
    let block = layer.kind().block();
    if layer.group_size() >= layer.in_features() {
        layer.padded_inputs() / block
    } else {
        layer.group_size() / block
    }
}

/// Round rows for a layer.
pub(crate) fn round_for<X: Element>(
    layer: &PackedLinear,
    x: &TokenRows<'_, X>,
    num_rows: usize,
    threads: &Threads,
    room: &mut Option<Lines>,
) -> Result<RoundedRows, LinearError> {
    let sums_of = match layer.kind() {
        WeightKind::Quantized(form) if form.has_offsets() => Some(blocks_per_group(layer)),
        _ => None,
    };
    let takes_all = chosen(layer.kernel().w8a8, usize::MAX, variant_of(layer)).takes_any_rows;
    let bundle = if takes_all { num_rows } else { BUNDLE.min(num_rows) };
    round_rows(x, num_rows, layer.in_features(), layer.kind().block(), bundle, sums_of, threads, room)
}

fn variant_of(layer: &PackedLinear) -> Variant {
    let quantized = if let WeightKind::Quantized(form) = layer.kind() { Some(form) } else { None };
    Variant {
        block: layer.kind().block(),
        bits: quantized.map_or(8, |form| form.bits),
        has_mins: quantized.is_some_and(Quantized::has_offsets),
    }
}

/// Rows that are computed at once: at most `most`, and of one bundle.
fn tiles(
    rows: std::ops::Range<usize>,
    bundle: usize,
    most: usize,
) -> impl Iterator<Item = std::ops::Range<usize>> + Clone {
    (rows.start / bundle..rows.end.div_ceil(bundle)).flat_map(move |index| {
        let (start, end) = (rows.start.max(index * bundle), rows.end.min((index + 1) * bundle));
        let (len, count) = (end - start, (end - start).div_ceil(most));
        (0..count).map(move |tile| start + len * tile / count..start + len * (tile + 1) / count)
    })
}

/// Sums of some rows and one panel, to `[row][output]`; `fetch` is called before each tile of rows, with
/// its number and how many there are.
///
/// # Safety
///
/// The layer's kind rounds activations, the rows were rounded for it, and `sums` has room for `num_rows` of them.
#[expect(clippy::too_many_arguments, reason = "the parts of a product")]
pub(crate) unsafe fn sum(
    layer: &PackedLinear,
    panel: usize,
    rows: &RoundedRows,
    first_row: usize,
    num_rows: usize,
    sums: *mut f32,
    ready: &mut ReadyScales,
    fetch: impl Fn(usize, usize),
) {
    let (outputs, block) = (layer.kernel().panel(), layer.kind().block());
    let quantized = if let WeightKind::Quantized(form) = layer.kind() { Some(form) } else { None };
    let variant = variant_of(layer);
    let form = chosen(layer.kernel().w8a8, num_rows, variant);
    let num_blocks = layer.padded_inputs() / block;
    let blocks_per_group = blocks_per_group(layer);
    let weights = layer.panel_weights(panel);
    let tiles = tiles(first_row..first_row + num_rows, rows.bundle(), form.most_rows(variant));
    let num_tiles = tiles.clone().count();
    let block_bytes = layer.panel_bytes() / num_blocks;
    // One tile asks for its own weights a little ahead; several, and several passes, share out the next panel among them.
    let passes = form.passes(outputs);
    let (ahead, share) = if num_tiles * passes == 1 {
        (weights.wrapping_add(AHEAD), block_bytes)
    } else {
        (weights.wrapping_add(layer.panel_bytes()), block_bytes.div_ceil(num_tiles * passes))
    };
    // Scales of 32 bits are read where they lie; others are made ready for some groups at a time.
    let together = if quantized.is_some() { GROUPS_TOGETHER } else { usize::MAX };
    let num_groups = layer.num_groups();
    let scale_bytes = layer.panel_scale_bytes();
    for first_group in (0..num_groups).step_by(together) {
        let groups = first_group..num_groups.min(first_group.saturating_add(together));
        let blocks =
            groups.start * blocks_per_group..num_blocks.min(groups.end.saturating_mul(blocks_per_group));
        let weight_scales = if let Some(form) = quantized {
            layer.ready_scales(form, panel, groups.clone(), ready);
            ready.scales.as_ptr()
        } else {
            layer.panel_scales(panel)
        };
        for (tile, tile_rows) in tiles.clone().enumerate() {
            if first_group == 0 {
                fetch(tile, num_tiles);
            }
            let (row, offset) = (tile_rows.start, blocks.start * rows.bundle());
            let ahead_pass = share * num_blocks;
            let ahead = ahead.wrapping_add(tile * passes * ahead_pass);
            let what = Product {
                numbers: rows.numbers(row).wrapping_add(offset * block),
                scales: rows.scales(row).wrapping_add(offset),
                starts: rows.starts(row).wrapping_add(offset),
                group_sums: rows.group_sums(first_group, row),
                num_rows: tile_rows.len(),
                row_stride: rows.bundle(),
                num_blocks: blocks.len(),
                blocks_per_group,
                weights: weights.wrapping_add(blocks.start * block_bytes),
                panel: outputs,
                weight_scales,
                weight_mins: ready.mins.as_ptr(),
                sums: sums.wrapping_add((row - first_row) * outputs),
                is_first: first_group == 0,
                ahead: ahead.wrapping_add(blocks.start * share),
                ahead_step: share,
                ahead_pass,
                scales_ahead: layer.scales_after(panel, groups.end),
                scales_ahead_step: if tile == 0 { scale_bytes.div_ceil(num_blocks) } else { 0 },
            };
            // SAFETY: a tile has at least one row and at most as many as there are products; the caller gives rows that were
            // rounded for the layer and sums with room for them; a form is chosen only where its instructions were found.
            unsafe { form.product(variant, tile_rows.len())(&what) };
        }
    }
}
