//! Products of weights of 8 or 4 bits with activations that are rounded to 8 bits: sums of whole numbers, which are exact.
//!
//! Each row is rounded in blocks of inputs, once for all outputs ([`rows`]). A block's products are summed as whole numbers,
//! which have one sum in any order; block after block that sum is scaled and added in 32 bits, by a multiplication and an
//! addition, each rounded. So a row's bits depend neither on the other rows nor on the instructions that compute them
//! ([`form`]): they are the same on every processor.

pub(crate) mod dot;
pub(crate) mod form;
mod product;
mod rounding;
mod rows;
#[cfg(target_arch = "x86_64")]
mod unit;

pub(crate) use self::rows::RoundedRows;
use self::{
    form::{Form, Groups, Variant, chosen},
    product::Product,
    rows::round_rows,
};
use crate::{
    attention::TokenRows,
    element::Element,
    lines::Lines,
    packed::{
        LinearError, PackedLinear, Quantized, WeightKind,
        ready::{GROUPS_TOGETHER, ReadyScales},
    },
    simd::memory,
    threads::Threads,
};

/// Rows that are handed out together: a multiple of what any form computes at once.
pub(crate) const TILE_ROWS: usize = 16;
/// Rows that lie together for forms that compute at most so many at once: a multiple of 12, 6, 4, 3 and 2.
const BUNDLE: usize = 12;
/// How far ahead of their use weights are asked for to come into the first cache, where memory is what a product waits for: once
/// each, since to ask for the second cache as well takes up to a fifth longer.
const FROM_MEMORY: usize = 6144;
/// Rows up to which that is so of 4 bits; more of them are multiplied more slowly than weights come.
const MEMORY_ROWS: usize = 4;
/// How far ahead they are asked for to come into the second cache, where multiplying takes longer, and from there into the first.
const FAR: usize = 8192;
const FROM_CACHE: usize = 1024;
/// How far ahead where each core reads one stream and memory is waited for: into the second cache, and from there into the first
/// with [`memory::SECOND_ASK`]. With [`FROM_MEMORY`], two to eight rows took 1.1 to 1.2 times as long on a Zen 4.
const FARTHER: usize = 16384;

/// Round rows for a layer.
pub(crate) fn round_for<X: Element>(
    layer: &PackedLinear,
    x: &TokenRows<'_, X>,
    num_rows: usize,
    threads: &Threads,
    room: &mut Option<Lines>,
) -> Result<RoundedRows, LinearError> {
    let sums_of = match layer.kind() {
        WeightKind::Quantized(form) if form.has_offsets() => Some(layer.layout.blocks_per_group),
        _ => None,
    };
    let takes_all = chosen(layer.kernel().w8a8, usize::MAX, variant_of(layer)).takes_any_rows;
    let bundle = if takes_all { num_rows } else { BUNDLE.min(num_rows) };
    round_rows(x, num_rows, layer.in_features(), layer.kind().block(), bundle, sums_of, threads, room)
}

/// What the layer's weights are for products that have their scales made ready.
fn variant_of(layer: &PackedLinear) -> Variant {
    let quantized = if let WeightKind::Quantized(form) = layer.kind() { Some(form) } else { None };
    Variant {
        block: layer.kind().block(),
        bits: quantized.map_or(8, |form| form.bits),
        groups: if quantized.is_some_and(Quantized::has_offsets) { Groups::Minima } else { Groups::Scales },
        is_coded: quantized.is_some_and(Quantized::has_codes),
    }
}

/// The product for so many rows, and what it takes: scales that lie in memory as one of its variants reads them are not made
/// ready.
fn product_for(layer: &PackedLinear, num_rows: usize) -> (&'static Form, Variant, bool) {
    let variant = variant_of(layer);
    let form = chosen(layer.kernel().w8a8, num_rows, variant);
    let WeightKind::Quantized(quantized) = layer.kind() else { return (form, variant, false) };
    let narrow = Variant { groups: Groups::NarrowScales, ..variant };
    if quantized.has_narrow_scales() && form.takes(narrow) {
        (form, narrow, false)
    } else {
        (form, variant, true)
    }
}

/// Rows that are computed at once: at most `most`, and of one bundle.
fn tiles(
    rows: std::ops::Range<usize>,
    bundle: usize,
    most: usize,
) -> impl Iterator<Item = std::ops::Range<usize>> + Clone {
    // Few rows are one tile, which takes no division to say.
    let is_one = rows.end <= bundle && rows.len() <= most;
    let one = is_one.then_some(rows.clone());
    let bundles = if is_one { 0..0 } else { rows.start / bundle..rows.end.div_ceil(bundle) };
    let several = bundles.flat_map(move |index| {
        let (start, end) = (rows.start.max(index * bundle), rows.end.min((index + 1) * bundle));
        let (len, count) = (end - start, (end - start).div_ceil(most));
        (0..count).map(move |tile| start + len * tile / count..start + len * (tile + 1) / count)
    });
    one.into_iter().chain(several)
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
    let (outputs, block, layout) = (layer.kernel().panel(), layer.kind().block(), layer.layout);
    let (form, variant, makes_ready) = product_for(layer, num_rows);
    let num_blocks = layout.num_blocks;
    let weights = layer.panel_weights(panel);
    let tiles = tiles(first_row..first_row + num_rows, rows.bundle(), form.tile_rows(variant, num_rows));
    let num_tiles = tiles.clone().count();
    let block_bytes = outputs * block * usize::from(variant.bits) / 8;
    let passes = form.passes(outputs);
    let (ahead, share, near, near_step) = if num_tiles * passes > 1 {
        // Several tiles, and several passes, share out the next panel among them.
        let share = block_bytes.div_ceil(num_tiles * passes);
        (weights.wrapping_add(layer.panel_bytes()), share, FROM_CACHE, share)
    } else if form.takes_any_rows {
        (weights.wrapping_add(FAR), block_bytes, 0, 0)
    } else if variant.bits == 4 && num_rows > MEMORY_ROWS {
        (weights.wrapping_add(FAR), block_bytes, FROM_CACHE, block_bytes)
    } else if memory::is_one_stream() {
        (weights.wrapping_add(FARTHER), block_bytes, memory::SECOND_ASK, block_bytes)
    } else {
        (weights, 0, FROM_MEMORY, block_bytes)
    };
    // Scales are read where they lie, or made ready for some groups at a time.
    let num_groups = layout.num_groups;
    let together = if makes_ready { GROUPS_TOGETHER } else { num_groups };
    for first_group in (0..num_groups).step_by(together) {
        let groups = first_group..num_groups.min(first_group + together);
        let blocks =
            groups.start * layout.blocks_per_group..num_blocks.min(groups.end * layout.blocks_per_group);
        let weight_scales = match layer.kind() {
            WeightKind::Quantized(form) if makes_ready => {
                layer.ready_scales(form, panel, groups.clone(), ready);
                ready.scales.as_ptr().cast()
            }
            _ => layer.scales_at(panel),
        };
        // Those of the next groups, or of the next panel.
        let scales_ahead = layer.scales_at(panel).wrapping_add(layout.group_scale_bytes * groups.end);
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
                blocks_per_group: layout.blocks_per_group,
                weights: weights.wrapping_add(blocks.start * block_bytes),
                panel: outputs,
                weight_scales,
                weight_mins: ready.mins.as_ptr(),
                sums: sums.wrapping_add((row - first_row) * outputs),
                is_first: first_group == 0,
                ahead: ahead.wrapping_add(blocks.start * share),
                ahead_step: share,
                ahead_pass,
                near,
                near_step,
                scales_ahead,
                scales_ahead_step: if tile == 0 { layout.block_scale_bytes } else { 0 },
            };
            // SAFETY: a tile has at least one row and at most as many as there are products; the caller gives rows that were
            // rounded for the layer and sums with room for them; a form is chosen only where its instructions were found.
            unsafe { form.product(variant, tile_rows.len())(&what) };
        }
    }
}
