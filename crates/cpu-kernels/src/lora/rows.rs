//! The two products of an adapter for some rows, compiled for each instruction set.
//!
//! Every sum has one order, whatever rows are computed with it: down to the ranks four sums of every fourth input each, up to
//! the outputs one sum over the ranks, which is then added to what is there.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over registers, of which several arrays are indexed alike"
)]

use half::bf16;

use crate::{
    linear::panel::PANEL_VECTORS,
    norm::row::{load, store},
    number::Number,
    simd::Simd,
};

/// Sums of a rank, each of every so-many-th input.
const SUMS: usize = 4;
/// Panels of outputs that are computed together: a panel of packed weights has as many.
const PANELS: usize = PANEL_VECTORS;
/// Bytes by which weights down to the ranks are asked for ahead of their use.
const AHEAD: usize = 4096;

/// From inputs to ranks: `ranks = x · downᵀ`.
pub(crate) struct Shrink<E> {
    /// `[panel][input][lane]`, of 16 bits or of 32.
    pub(crate) weights: *const u8,
    pub(crate) is_bf16: bool,
    pub(crate) num_panels: usize,
    pub(crate) num_inputs: usize,
    /// Row 0 of the step.
    pub(crate) x: *const E,
    pub(crate) x_stride: usize,
    /// Which of its rows.
    pub(crate) tokens: *const u32,
    pub(crate) num_rows: usize,
    /// A row of ranks for each of these, whole panels.
    pub(crate) ranks: *mut f32,
    pub(crate) ranks_stride: usize,
}

/// From ranks to outputs: `out += ranks · upᵀ`.
pub(crate) struct Expand<E> {
    /// `[panel][rank][lane]`, of 16 bits or of 32.
    pub(crate) weights: *const u8,
    pub(crate) is_bf16: bool,
    /// The last panel may be of fewer outputs than it has room for.
    pub(crate) num_outputs: usize,
    pub(crate) num_ranks: usize,
    pub(crate) ranks: *const f32,
    pub(crate) ranks_stride: usize,
    /// Rows of the step.
    pub(crate) tokens: *const u32,
    pub(crate) num_rows: usize,
    /// The first output of row 0 of the step.
    pub(crate) out: *mut E,
    pub(crate) out_stride: usize,
}

/// One compiled form of [`shrink`].
pub(crate) type ShrinkFn<E> = unsafe fn(&Shrink<E>);
/// One compiled form of [`expand`].
pub(crate) type ExpandFn<E> = unsafe fn(&Expand<E>);

/// # Safety
///
/// The arrays are as [`Shrink`] says; the machine has the instructions of `S`.
#[inline(always)]
unsafe fn shrink<S: Simd, E: Number>(what: &Shrink<E>) {
    // SAFETY: the caller gives arrays as `Shrink` says, whose weights are of the type that it names.
    unsafe { if what.is_bf16 { shrink_by::<S, E, bf16>(what) } else { shrink_by::<S, E, f32>(what) } }
}

/// # Safety
///
/// See [`shrink`]; the weights are of type `W`.
#[inline(always)]
unsafe fn shrink_by<S: Simd, E: Number, W: Number>(what: &Shrink<E>) {
    for panel in 0..what.num_panels {
        let mut row = 0;
        while row < what.num_rows {
            let rows = together::<S>(what.num_rows - row);
            // SAFETY: the caller gives arrays with these rows and panels.
            unsafe {
                match rows {
                    4 => shrink_tile::<S, E, W, 4>(what, panel, row),
                    2 => shrink_tile::<S, E, W, 2>(what, panel, row),
                    _ => shrink_tile::<S, E, W, 1>(what, panel, row),
                }
            }
            row += rows;
        }
    }
}

/// Rows whose sums the registers hold.
#[inline(always)]
fn together<S: Simd>(left: usize) -> usize {
    match left.min(S::SCORE_ROWS) {
        4.. => 4,
        2 | 3 => 2,
        _ => 1,
    }
}

/// # Safety
///
/// See [`shrink_by`]; there are `R` rows from `row` on.
#[inline(always)]
unsafe fn shrink_tile<S: Simd, E: Number, W: Number, const R: usize>(
    what: &Shrink<E>,
    panel: usize,
    row: usize,
) {
    let num_inputs = what.num_inputs;
    // SAFETY: the caller gives a panel of weights, rows of inputs and room for the ranks of each.
    unsafe {
        let weights = what.weights.cast::<W>().add(panel * num_inputs * S::LANES);
        let x: [*const E; R] =
            std::array::from_fn(|r| what.x.add(*what.tokens.add(row + r) as usize * what.x_stride));
        let mut sums = [[S::splat(0.0); SUMS]; R];
        let mut input = 0;
        while input + SUMS <= num_inputs {
            for n in 0..SUMS {
                let at = weights.add((input + n) * S::LANES);
                if row == 0 {
                    S::prefetch(at.cast::<u8>().wrapping_add(AHEAD));
                }
                let weight = W::load::<S>(at);
                for r in 0..R {
                    sums[r][n] = S::fma(S::splat((*x[r].add(input + n)).widen()), weight, sums[r][n]);
                }
            }
            input += SUMS;
        }
        let mut n = 0;
        while input < num_inputs {
            let weight = W::load::<S>(weights.add(input * S::LANES));
            for r in 0..R {
                sums[r][n] = S::fma(S::splat((*x[r].add(input)).widen()), weight, sums[r][n]);
            }
            (input, n) = (input + 1, n + 1);
        }
        for r in 0..R {
            let sum = S::add(S::add(sums[r][0], sums[r][1]), S::add(sums[r][2], sums[r][3]));
            S::store(what.ranks.add((row + r) * what.ranks_stride + panel * S::LANES), sum);
        }
    }
}

/// # Safety
///
/// The arrays are as [`Expand`] says, and no other thread touches these outputs; the machine has the instructions of `S`.
#[inline(always)]
unsafe fn expand<S: Simd, E: Number>(what: &Expand<E>) {
    // SAFETY: the caller gives arrays as `Expand` says, whose weights are of the type that it names.
    unsafe { if what.is_bf16 { expand_by::<S, E, bf16>(what) } else { expand_by::<S, E, f32>(what) } }
}

/// # Safety
///
/// See [`expand`]; the weights are of type `W`.
#[inline(always)]
unsafe fn expand_by<S: Simd, E: Number, W: Number>(what: &Expand<E>) {
    let num_panels = what.num_outputs.div_ceil(S::LANES);
    let mut panel = 0;
    while panel < num_panels {
        // SAFETY: the caller gives arrays with these panels.
        unsafe {
            if num_panels - panel >= PANELS {
                expand_panels::<S, E, W, PANELS>(what, panel);
                panel += PANELS;
            } else {
                expand_panels::<S, E, W, 1>(what, panel);
                panel += 1;
            }
        }
    }
}

/// # Safety
///
/// See [`expand_by`]; there are `P` panels from `panel` on.
#[inline(always)]
unsafe fn expand_panels<S: Simd, E: Number, W: Number, const P: usize>(what: &Expand<E>, panel: usize) {
    let mut row = 0;
    while row < what.num_rows {
        let rows = together::<S>(what.num_rows - row);
        // SAFETY: the caller gives arrays with these rows and panels.
        unsafe {
            match rows {
                4 => expand_tile::<S, E, W, P, 4>(what, panel, row),
                2 => expand_tile::<S, E, W, P, 2>(what, panel, row),
                _ => expand_tile::<S, E, W, P, 1>(what, panel, row),
            }
        }
        row += rows;
    }
}

/// # Safety
///
/// See [`expand_by`]; there are `P` panels from `panel` on and `R` rows from `row` on.
#[inline(always)]
unsafe fn expand_tile<S: Simd, E: Number, W: Number, const P: usize, const R: usize>(
    what: &Expand<E>,
    panel: usize,
    row: usize,
) {
    let num_ranks = what.num_ranks;
    // SAFETY: the caller gives panels of weights, the ranks of the rows, and rows of outputs that are this thread's; a vector
    // that is not full is of `count` elements.
    unsafe {
        let weights = what.weights.cast::<W>().add(panel * num_ranks * S::LANES);
        let ranks: [*const f32; R] = std::array::from_fn(|r| what.ranks.add((row + r) * what.ranks_stride));
        let mut sums = [[S::splat(0.0); P]; R];
        for rank in 0..num_ranks {
            let mut weight = [S::splat(0.0); P];
            for p in 0..P {
                weight[p] = W::load::<S>(weights.add((p * num_ranks + rank) * S::LANES));
            }
            for r in 0..R {
                let x = S::splat(*ranks[r].add(rank));
                for p in 0..P {
                    sums[r][p] = S::fma(x, weight[p], sums[r][p]);
                }
            }
        }
        for r in 0..R {
            let out = what.out.add(*what.tokens.add(row + r) as usize * what.out_stride);
            for p in 0..P {
                let first = (panel + p) * S::LANES;
                let (to, count) = (out.add(first), what.num_outputs - first);
                store::<S, E>(to, S::add(load::<S, E>(to, count), sums[r][p]), count);
            }
        }
    }
}

/// Entry points: the one place where it gets its instruction set.
macro_rules! entry_points {
    ($shrink:ident, $expand:ident, $number:ty, $simd:ty $(, $features:literal)?) => {
        /// # Safety
        ///
        /// See [`shrink`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $shrink(what: &Shrink<$number>) {
            // SAFETY: the caller gives arrays as `Shrink` says; `Kernel::available` lists this form only where its
            // instructions were found.
            unsafe { shrink::<$simd, $number>(what) }
        }
        /// # Safety
        ///
        /// See [`expand`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $expand(what: &Expand<$number>) {
            // SAFETY: the caller gives arrays as `Expand` says; `Kernel::available` lists this form only where its
            // instructions were found.
            unsafe { expand::<$simd, $number>(what) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
entry_points!(shrink_avx512_f32, expand_avx512_f32, f32, crate::simd::avx512::Avx512, "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
entry_points!(shrink_avx512_bf16, expand_avx512_bf16, bf16, crate::simd::avx512::Avx512, "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
entry_points!(shrink_avx2_f32, expand_avx2_f32, f32, crate::simd::avx2::Avx2, "avx2,fma");
#[cfg(target_arch = "x86_64")]
entry_points!(shrink_avx2_bf16, expand_avx2_bf16, bf16, crate::simd::avx2::Avx2, "avx2,fma");
entry_points!(shrink_portable_f32, expand_portable_f32, f32, crate::simd::portable::Portable<8>);
entry_points!(shrink_portable_bf16, expand_portable_bf16, bf16, crate::simd::portable::Portable<8>);
entry_points!(shrink_scalar_f32, expand_scalar_f32, f32, crate::simd::portable::Portable<1>);
entry_points!(shrink_scalar_bf16, expand_scalar_bf16, bf16, crate::simd::portable::Portable<1>);
