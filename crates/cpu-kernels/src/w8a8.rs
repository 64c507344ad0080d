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
/// How far ahead where each core reads one stream and memory is waited for: into the second cache, and from there into the first.
/// With [`FROM_MEMORY`], two to eight rows took 1.1 to 1.2 times as long on a Zen 4; half as far ahead into the first, 1.01 to 1.05.
const FARTHER: usize = 16384;
const FROM_SECOND: usize = 4096;

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

/// What the products of some rows with each panel of a layer have in common. It is made once for all panels: made for each, it
/// took up to a twenty-fifth of the time of a product of one row within the second cache.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    form: &'static Form,
    variant: Variant,
    makes_ready: bool,
    first_row: usize,
    num_rows: usize,
    /// Rows that are computed at once, at most, and how many times the weights are read for that.
    tile_rows: usize,
    num_tiles: usize,
    /// How often the form goes through a panel.
    passes: usize,
    /// Bytes of a panel that a block of inputs has.
    block_bytes: usize,
    /// Groups whose scales are read at once.
    groups_together: usize,
    /// Where weights are asked for, see [`Product`]: `ahead` behind a panel's first one.
    ahead: usize,
    ahead_step: usize,
    near: usize,
    near_step: usize,
}

impl Plan {
    /// For rows that were rounded for the layer.
    pub(crate) fn new(layer: &PackedLinear, rows: &RoundedRows, first_row: usize, num_rows: usize) -> Self {
        let (form, variant, makes_ready) = product_for(layer, num_rows);
        let tile_rows = form.tile_rows(variant, num_rows);
        let num_tiles = tiles(first_row..first_row + num_rows, rows.bundle(), tile_rows).count();
        let panel = layer.kernel().panel();
        let block_bytes = panel * layer.kind().block() * usize::from(variant.bits) / 8;
        let passes = form.passes(panel);
        let (ahead, ahead_step, near, near_step) = if num_tiles * passes > 1 {
            // Several tiles, and several passes, share out the next panel among them.
            let share = block_bytes.div_ceil(num_tiles * passes);
            (layer.panel_bytes(), share, FROM_CACHE, share)
        } else if form.takes_any_rows {
            (FAR, block_bytes, 0, 0)
        } else if variant.bits == 4 && num_rows > MEMORY_ROWS {
            (FAR, block_bytes, FROM_CACHE, block_bytes)
        } else if memory::is_one_stream() && variant.bits == 8 && num_rows == 1 && form.reads_lines() {
            // Such a processor reads ahead by itself faster than it is asked to, as long as it does little else with each line. Asked,
            // a Zen 4 took 1.06 to 1.25 times as long; but with 4 bits 0.7 times, and with half as long vectors 0.8 to 0.9 times.
            (0, 0, 0, 0)
        } else if memory::is_one_stream() {
            (FARTHER, block_bytes, FROM_SECOND, block_bytes)
        } else {
            (0, 0, FROM_MEMORY, block_bytes)
        };
        // Scales are read where they lie, or made ready for some groups at a time.
        let groups_together = if makes_ready { GROUPS_TOGETHER } else { layer.layout.num_groups };
        Self {
            form,
            variant,
            makes_ready,
            first_row,
            num_rows,
            tile_rows,
            num_tiles,
            passes,
            block_bytes,
            groups_together,
            ahead,
            ahead_step,
            near,
            near_step,
        }
    }

    /// Sums of the rows and one panel, to `[row][output]`; `fetch` is called before each tile of rows, with its number and how
    /// many there are.
    ///
    /// # Safety
    ///
    /// The plan is of this layer, whose kind rounds activations, and of these rows, which were rounded for it; `sums` has room
    /// for as many rows as the plan.
    pub(crate) unsafe fn sum(
        &self,
        layer: &PackedLinear,
        panel: usize,
        rows: &RoundedRows,
        sums: *mut f32,
        ready: &mut ReadyScales,
        fetch: impl Fn(usize, usize),
    ) {
        let (block, layout, bundle) = (layer.kind().block(), layer.layout, rows.bundle());
        let weights = layer.panel_weights(panel);
        let all_rows = self.first_row..self.first_row + self.num_rows;
        for first_group in (0..layout.num_groups).step_by(self.groups_together) {
            let groups = first_group..layout.num_groups.min(first_group + self.groups_together);
            let blocks = groups.start * layout.blocks_per_group
                ..layout.num_blocks.min(groups.end * layout.blocks_per_group);
            let weight_scales = match layer.kind() {
                WeightKind::Quantized(form) if self.makes_ready => {
                    layer.ready_scales(form, panel, groups.clone(), ready);
                    ready.scales.as_ptr().cast()
                }
                _ => layer.scales_at(panel),
            };
            // Those of the next groups, or of the next panel.
            let scales_ahead = layer.scales_at(panel).wrapping_add(layout.group_scale_bytes * groups.end);
            for (tile, tile_rows) in tiles(all_rows.clone(), bundle, self.tile_rows).enumerate() {
                if first_group == 0 {
                    fetch(tile, self.num_tiles);
                }
                let (row, offset) = (tile_rows.start, blocks.start * bundle);
                let ahead_pass = self.ahead_step * layout.num_blocks;
                let ahead = self.ahead + tile * self.passes * ahead_pass + blocks.start * self.ahead_step;
                let what = Product {
                    numbers: rows.numbers(row).wrapping_add(offset * block),
                    scales: rows.scales(row).wrapping_add(offset),
                    starts: rows.starts(row).wrapping_add(offset),
                    group_sums: rows.group_sums(first_group, row),
                    num_rows: tile_rows.len(),
                    row_stride: bundle,
                    num_blocks: blocks.len(),
                    blocks_per_group: layout.blocks_per_group,
                    weights: weights.wrapping_add(blocks.start * self.block_bytes),
                    panel: layer.kernel().panel(),
                    weight_scales,
                    weight_mins: ready.mins.as_ptr(),
                    sums: sums.wrapping_add((row - self.first_row) * layer.kernel().panel()),
                    is_first: first_group == 0,
                    ahead: weights.wrapping_add(ahead),
                    ahead_step: self.ahead_step,
                    ahead_pass,
                    near: self.near,
                    near_step: self.near_step,
                    scales_ahead,
                    scales_ahead_step: if tile == 0 { layout.block_scale_bytes } else { 0 },
                };
                // SAFETY: a tile has at least one row and at most as many as there are products; the caller gives rows that were
                // rounded for the layer and sums with room for them; a form is chosen only where its instructions were found.
                unsafe { self.form.product(self.variant, tile_rows.len())(&what) };
            }
        }
    }
}
