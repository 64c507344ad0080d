//! The product: a few rounded rows times one panel of packed weights.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over registers, of which several arrays are indexed alike"
)]

use super::dot::{Dot, QUAD};
use crate::simd::Simd;

/// Bytes that are asked for at once.
pub(super) const LINE: usize = 64;
/// Vectors of outputs that are computed at once: each activation that is read meets so many weights.
pub(super) const VECTORS: usize = 2;

/// What one call computes.
pub(crate) struct Product {
    /// Rounded activations in blocks, `[block][row][input]`, from the first row of this call on.
    pub(crate) numbers: *const i8,
    /// Their scales, `[block][row]`.
    pub(crate) scales: *const f32,
    /// −128 times the sum of a block's numbers, `[block][row]`.
    pub(crate) starts: *const i32,
    /// The activations of a group, as they were rounded, summed: `[group][row]`; only where weights have a minimum.
    pub(crate) group_sums: *const f32,
    /// Rows of this call, of which forms for one number of them take no notice.
    pub(crate) num_rows: usize,
    /// Rows of a block.
    pub(crate) row_stride: usize,
    /// Blocks of inputs.
    pub(crate) num_blocks: usize,
    /// Blocks that share a scale of the weight.
    pub(crate) blocks_per_group: usize,
    /// The panel, `[quad of inputs][output][input]`; of 4 bits `[two quads][output][input]`, the first quad's in the lower
    /// halves; of 6 bits three of four quads in the lower bits, and of the fourth two bits above each of theirs.
    pub(crate) weights: *const u8,
    /// Its outputs.
    pub(crate) panel: usize,
    /// Its scales, `[group][output]`, numbers of 32 bits or, for forms that take such, of 16.
    pub(crate) weight_scales: *const u8,
    /// Its minima, likewise, less than nothing where they are taken away; only where weights have a minimum.
    pub(crate) weight_mins: *const f32,
    /// `[row][output]`: what is added to, or written.
    pub(crate) sums: *mut f32,
    /// Whether these inputs are the first ones, so that the sums begin with 0.
    pub(crate) is_first: bool,
    /// Where to begin to ask for weights that come later, and how many bytes further with each block. Any address will do.
    pub(crate) ahead: *const u8,
    pub(crate) ahead_step: usize,
    /// How much further where a panel takes several passes, with each of them.
    pub(crate) ahead_pass: usize,
    /// How far ahead weights of this panel are asked for to come into the first cache, and how many bytes with each block; 0 bytes:
    /// one row of 8 bits asks for nothing.
    pub(crate) near: usize,
    pub(crate) near_step: usize,
    /// As `ahead`, of scales, with the first pass.
    pub(crate) scales_ahead: *const u8,
    pub(crate) scales_ahead_step: usize,
}

/// A compiled form of [`product`] for a number of rows.
pub(crate) type ProductFn = unsafe fn(&Product);

/// The sums of `ROWS` rows, [`VECTORS`] vectors of outputs at a time, in blocks of `BLOCK` inputs, of weights of 8, 6 or 4
/// `BITS`, with a minimum for each group or without (`MINS`), with scales of 16 bits (`NARROW`) or 32, and of 4 bits that are
/// codes (`CODED`) or numbers.
///
/// # Safety
///
/// The arrays are as [`Product`] says, with `ROWS` rows; the panel is a multiple of [`VECTORS`] vectors; the machine has the
/// instructions of `D`.
#[inline(always)]
pub(crate) unsafe fn product<
    D: Dot,
    const ROWS: usize,
    const BLOCK: usize,
    const BITS: u8,
    const MINS: bool,
    const NARROW: bool,
    const CODED: bool,
>(
    what: &Product,
) {
    for first in (0..what.panel).step_by(VECTORS * D::Lanes::LANES) {
        // SAFETY: the caller gives arrays as `Product` says, with `ROWS` rows, and a panel that is a multiple of the vectors.
        unsafe {
            if what.blocks_per_group == 1 {
                outputs::<D, ROWS, BLOCK, BITS, MINS, NARROW, CODED, true>(what, first);
            } else {
                outputs::<D, ROWS, BLOCK, BITS, MINS, NARROW, CODED, false>(what, first);
            }
        }
    }
}

/// The sums of the outputs from `first` on; where each block is a group (`SINGLE`) none is added to others before it is
/// scaled.
///
/// # Safety
///
/// As [`product`], with [`VECTORS`] vectors of outputs from `first` on.
#[inline(always)]
unsafe fn outputs<
    D: Dot,
    const ROWS: usize,
    const BLOCK: usize,
    const BITS: u8,
    const MINS: bool,
    const NARROW: bool,
    const CODED: bool,
    const SINGLE: bool,
>(
    what: &Product,
    first: usize,
) {
    let lanes = D::Lanes::LANES;
    // SAFETY: the caller gives arrays as `Product` says, with `ROWS` rows, so every offset below stays within them.
    unsafe {
        let zero = D::Lanes::splat(0.0);
        let places = what.sums.add(first);
        let scale_bytes = if NARROW { 2 } else { 4 };
        // Where each block is a group no registers hold sums of groups, and there may be enough of them for the totals.
        let keeps_totals = SINGLE && ROWS <= D::TOTAL_ROWS;
        let mut totals = [[zero; VECTORS]; ROWS];
        for r in 0..ROWS {
            for n in 0..VECTORS {
                let place = places.add(r * what.panel + n * lanes);
                if what.is_first && !keeps_totals {
                    D::Lanes::store(place, zero);
                } else if !what.is_first && keeps_totals {
                    totals[r][n] = D::Lanes::load(place);
                }
            }
        }
        let mut groups = [[zero; VECTORS]; ROWS];
        let (mut numbers, mut scales, mut starts) = (what.numbers, what.scales, what.starts);
        let (mut weight_scales, mut offset) = (what.weight_scales.add(first * scale_bytes), first);
        let mut weights = what.weights.add(first * QUAD);
        let mut ahead = what.ahead.wrapping_add(first / (VECTORS * lanes) * what.ahead_pass);
        let (mut left_of_group, mut group_sums) = (what.blocks_per_group, what.group_sums);
        let mut scales_ahead = what.scales_ahead;
        let turns = if BITS == 8 { BLOCK / QUAD } else { BLOCK / (2 * QUAD) };
        let asked = Asks::of_blocks(turns, what);
        for left in (0..what.num_blocks).rev() {
            let mut asks = Asks { far: ahead, near: weights.wrapping_add(what.near), ..asked };
            ahead = ahead.wrapping_add(what.ahead_step);
            if first == 0 {
                for line in (0..what.scales_ahead_step).step_by(LINE) {
                    D::Lanes::prefetch(scales_ahead.wrapping_add(line));
                }
                scales_ahead = scales_ahead.wrapping_add(what.scales_ahead_step);
            }
            let sums = if CODED {
                coded_halves::<D, ROWS, BLOCK>(&mut weights, what.panel, numbers, starts, &mut asks)
            } else if BITS == 4 {
                half_bytes::<D, ROWS, BLOCK, MINS>(&mut weights, what.panel, numbers, starts, &mut asks)
            } else if BITS == 6 {
                six_bits::<D, ROWS, BLOCK>(&mut weights, what.panel, numbers, starts, &mut asks)
            } else if ROWS == 1 && what.near_step == 0 {
                whole_bytes::<D, ROWS, BLOCK, false>(&mut weights, what.panel, numbers, starts, &mut asks)
            } else {
                whole_bytes::<D, ROWS, BLOCK, true>(&mut weights, what.panel, numbers, starts, &mut asks)
            };
            for r in 0..ROWS {
                let scale = D::Lanes::splat(*scales.add(r));
                for n in 0..VECTORS {
                    let sum = D::to_float(sums[r][n]);
                    groups[r][n] =
                        if SINGLE { D::Lanes::mul(sum, scale) } else { D::fma(sum, scale, groups[r][n]) };
                }
            }
            numbers = numbers.wrapping_add(what.row_stride * BLOCK);
            scales = scales.wrapping_add(what.row_stride);
            starts = starts.wrapping_add(what.row_stride);
            left_of_group -= 1;
            if SINGLE || left_of_group == 0 || left == 0 {
                for n in 0..VECTORS {
                    let from = weight_scales.add(n * lanes * scale_bytes);
                    let scale =
                        if NARROW { D::Lanes::load_f16(from.cast()) } else { D::Lanes::load(from.cast()) };
                    for r in 0..ROWS {
                        let place = places.add(r * what.panel + n * lanes);
                        let before = if keeps_totals { totals[r][n] } else { D::Lanes::load(place) };
                        let mut total = D::fma(groups[r][n], scale, before);
                        if MINS {
                            let min = D::Lanes::load(what.weight_mins.wrapping_add(offset + n * lanes));
                            total = D::fma(min, D::Lanes::splat(*group_sums.add(r)), total);
                        }
                        if keeps_totals {
                            totals[r][n] = total;
                        } else {
                            D::Lanes::store(place, total);
                        }
                    }
                }
                groups = [[zero; VECTORS]; ROWS];
                weight_scales = weight_scales.wrapping_add(what.panel * scale_bytes);
                offset += what.panel;
                if MINS {
                    group_sums = group_sums.wrapping_add(what.row_stride);
                }
                left_of_group = what.blocks_per_group;
            }
        }
        if keeps_totals {
            for r in 0..ROWS {
                for n in 0..VECTORS {
                    D::Lanes::store(places.add(r * what.panel + n * lanes), totals[r][n]);
                }
            }
        }
    }
}

/// What is asked for while a block is computed, a little with each turn: as many requests at once as a block has lines would
/// wait for each other, and what is computed with them. Turns ask without a look at what is left, which would take them longer
/// than to ask for a line that is there.
#[derive(Clone, Copy)]
struct Asks {
    /// For the second cache, and bytes from one request to the next.
    far: *const u8,
    far_step: usize,
    /// For the first, likewise.
    near: *const u8,
    near_step: usize,
    /// Whether each line of weights that a turn reads goes with a request, or each turn.
    each_line: bool,
}

impl Asks {
    /// Steps for blocks that are computed in so many turns.
    #[inline(always)]
    fn of_blocks(turns: usize, what: &Product) -> Self {
        let each_line = what.ahead_step.max(what.near_step) > turns * LINE;
        let step = |bytes: usize| match (each_line, bytes) {
            (true, 1..) => LINE,
            _ => bytes.div_ceil(turns),
        };
        let (far_step, near_step) = (step(what.ahead_step), step(what.near_step));
        Self { far: what.ahead, far_step, near: what.weights, near_step, each_line }
    }

    /// Ask with a turn that reads so many bytes of weights.
    #[inline(always)]
    fn ask<D: Dot>(&mut self, num_bytes: usize) {
        let mut at = 0;
        while at < num_bytes && (at == 0 || self.each_line) {
            D::Lanes::prefetch(self.far);
            self.far = self.far.wrapping_add(self.far_step);
            D::Lanes::prefetch_near(self.near);
            self.near = self.near.wrapping_add(self.near_step);
            at += LINE;
        }
    }
}

/// A number of turns that the compiler does not know, where there are several rows, or one for which nothing is asked (`ASKS`). It
/// would unroll the loop and read all of a block before it multiplies. Of several rows it would keep on the stack what registers do
/// not hold: with AVX-512 that took 1.2 to 2 times as long, and two rows whose groups have several blocks 1.9 times. Of one row that
/// comes from memory as the processor itself reads ahead, it took 1.04 to 1.1 times as long on a Zen 4.
#[inline(always)]
fn stays_a_loop<const ROWS: usize, const ASKS: bool>(turns: usize) -> usize {
    if ROWS > 1 || !ASKS { std::hint::black_box(turns) } else { turns }
}

/// A block's sums of weights of 8 bits; later ones are asked for (`ASKS`), or the processor reads ahead by itself.
///
/// # Safety
///
/// As [`product`], with a block from `weights` and `numbers` on.
#[inline(always)]
unsafe fn whole_bytes<D: Dot, const ROWS: usize, const BLOCK: usize, const ASKS: bool>(
    weights: &mut *const u8,
    panel: usize,
    numbers: *const i8,
    starts: *const i32,
    asks: &mut Asks,
) -> [[D::Sums; VECTORS]; ROWS] {
    let bytes = D::Lanes::LANES * QUAD;
    // SAFETY: the caller gives a block of weights and of `ROWS` rows.
    unsafe {
        let mut sums = [[D::start(starts); VECTORS]; ROWS];
        for r in 1..ROWS {
            sums[r] = [D::start(starts.add(r)); VECTORS];
        }
        for quad in 0..stays_a_loop::<ROWS, ASKS>(BLOCK / QUAD) {
            let mut loaded = [D::weights(weights.cast()); VECTORS];
            for n in 1..VECTORS {
                loaded[n] = D::weights(weights.add(n * bytes).cast());
            }
            if ASKS {
                asks.ask::<D>(VECTORS * bytes);
            }
            for r in 0..ROWS {
                let inputs = D::inputs(numbers.add(r * BLOCK + quad * QUAD));
                for n in 0..VECTORS {
                    sums[r][n] = D::add(sums[r][n], loaded[n], inputs);
                }
            }
            *weights = weights.wrapping_add(panel * QUAD);
        }
        sums
    }
}

/// A block's sums of weights of 4 bits: of the numbers as they are where groups have a minimum (`MINS`), else of 8 less.
///
/// # Safety
///
/// As [`product`], with a block from `weights` and `numbers` on.
#[inline(always)]
unsafe fn half_bytes<D: Dot, const ROWS: usize, const BLOCK: usize, const MINS: bool>(
    weights: &mut *const u8,
    panel: usize,
    numbers: *const i8,
    starts: *const i32,
    asks: &mut Asks,
) -> [[D::Sums; VECTORS]; ROWS] {
    static NOTHING: i32 = 0;
    let bytes = D::Lanes::LANES * QUAD;
    let from = *weights;
    // SAFETY: the caller gives a block of weights and of `ROWS` rows.
    unsafe {
        // Without closures around instructions: one that is not inlined would be compiled without them.
        let first = if MINS { &raw const NOTHING } else { starts };
        let step = usize::from(!MINS);
        let mut sums = [[D::half_start(first); VECTORS]; ROWS];
        for r in 1..ROWS {
            sums[r] = [D::half_start(first.add(r * step)); VECTORS];
        }
        for quads in 0..stays_a_loop::<ROWS, true>(BLOCK / (2 * QUAD)) {
            let from = from.wrapping_add(quads * panel * QUAD);
            let mut lower = [D::lower(from); VECTORS];
            let mut upper = [D::upper(from); VECTORS];
            for n in 1..VECTORS {
                lower[n] = D::lower(from.add(n * bytes));
                upper[n] = D::upper(from.add(n * bytes));
            }
            asks.ask::<D>(VECTORS * bytes);
            for (half, weights) in [lower, upper].iter().enumerate() {
                for r in 0..ROWS {
                    let inputs = D::inputs(numbers.add(r * BLOCK + (2 * quads + half) * QUAD));
                    for n in 0..VECTORS {
                        sums[r][n] = D::add_half(sums[r][n], weights[n], inputs);
                    }
                }
            }
        }
        *weights = from.wrapping_add(BLOCK / (2 * QUAD) * panel * QUAD);
        let mut out = [[D::whole(sums[0][0], first); VECTORS]; ROWS];
        for r in 0..ROWS {
            for n in 0..VECTORS {
                out[r][n] = D::whole(sums[r][n], first.add(r * step));
            }
        }
        out
    }
}

/// A block's sums of weights of 4 bits that are codes.
///
/// # Safety
///
/// As [`product`], with a block from `weights` and `numbers` on.
#[inline(always)]
unsafe fn coded_halves<D: Dot, const ROWS: usize, const BLOCK: usize>(
    weights: &mut *const u8,
    panel: usize,
    numbers: *const i8,
    starts: *const i32,
    asks: &mut Asks,
) -> [[D::Sums; VECTORS]; ROWS] {
    let bytes = D::Lanes::LANES * QUAD;
    let from = *weights;
    // SAFETY: the caller gives a block of weights and of `ROWS` rows.
    unsafe {
        let mut sums = [[D::start(starts); VECTORS]; ROWS];
        for r in 1..ROWS {
            sums[r] = [D::start(starts.add(r)); VECTORS];
        }
        for quads in 0..stays_a_loop::<ROWS, true>(BLOCK / (2 * QUAD)) {
            let from = from.wrapping_add(quads * panel * QUAD);
            let mut loaded = [D::codes(from); VECTORS];
            for n in 1..VECTORS {
                loaded[n] = D::codes(from.add(n * bytes));
            }
            asks.ask::<D>(VECTORS * bytes);
            for half in 0..2 {
                for r in 0..ROWS {
                    let inputs = D::inputs(numbers.add(r * BLOCK + (2 * quads + half) * QUAD));
                    for n in 0..VECTORS {
                        sums[r][n] = D::add(sums[r][n], loaded[n][half], inputs);
                    }
                }
            }
        }
        *weights = from.wrapping_add(BLOCK / (2 * QUAD) * panel * QUAD);
        sums
    }
}

/// A block's sums of weights of 6 bits, of 32 less than the numbers.
///
/// # Safety
///
/// As [`product`], with a block from `weights` and `numbers` on.
#[inline(always)]
unsafe fn six_bits<D: Dot, const ROWS: usize, const BLOCK: usize>(
    weights: &mut *const u8,
    panel: usize,
    numbers: *const i8,
    starts: *const i32,
    asks: &mut Asks,
) -> [[D::Sums; VECTORS]; ROWS] {
    let bytes = D::Lanes::LANES * QUAD;
    let line = panel * QUAD;
    // SAFETY: the caller gives a block of weights and of `ROWS` rows.
    unsafe {
        let mut sums = [[D::six_start(starts); VECTORS]; ROWS];
        for r in 1..ROWS {
            sums[r] = [D::six_start(starts.add(r)); VECTORS];
        }
        for quads in 0..BLOCK / (QUAD * QUAD) {
            for n in 0..VECTORS {
                asks.ask::<D>(3 * bytes);
                let from = weights.add(n * bytes);
                let loaded = D::sixes([from, from.add(line), from.add(2 * line)]);
                for (quad, loaded) in loaded.iter().enumerate() {
                    for r in 0..ROWS {
                        let inputs = D::inputs(numbers.add(r * BLOCK + (quads * QUAD + quad) * QUAD));
                        sums[r][n] = D::add_six(sums[r][n], *loaded, inputs);
                    }
                }
            }
            *weights = weights.wrapping_add(3 * line);
        }
        sums
    }
}
