//! The norm of one row, compiled for each instruction set.
//!
//! Each row is summed by itself and in one order, so its bits depend on nothing else. Sums are of 32 bits, over the lanes of
//! the kernel first; the variance is that of the differences from the mean.

#![allow(clippy::inline_always, reason = "see `simd`")]

use half::bf16;

use crate::{number::Number, simd::Simd};

/// What rows are divided by, and whether their mean is taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// Less the mean, over the standard deviation.
    Layer,
    /// Over the root of the mean square.
    Rms,
}

/// The numbers of a norm.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// Which.
    pub kind: NormKind,
    /// A factor per feature.
    pub weight: &'a [f32],
    /// Added per feature, or nothing.
    pub bias: Option<&'a [f32]>,
    /// Added to the variance or the mean square.
    pub eps: f32,
}

/// All rows of a call. Pointers, because what is read and what is written may be the same place.
pub(crate) struct NormRows<'a, E> {
    pub(crate) x: *const E,
    pub(crate) x_stride: usize,
    /// Null: none.
    pub(crate) residual: *const E,
    pub(crate) residual_stride: usize,
    /// Null: none; may be the residual.
    pub(crate) sum_out: *mut E,
    pub(crate) sum_out_stride: usize,
    pub(crate) out: *mut E,
    pub(crate) out_stride: usize,
    /// Whether the normed row is added to what `out` holds.
    pub(crate) adds: bool,
    pub(crate) norm: &'a Norm<'a>,
}

// SAFETY: parts write rows of their own and read no others.
unsafe impl<E: Number> Sync for NormRows<'_, E> {}

/// One compiled form of [`norm_row`].
pub(crate) type NormFn<E> = unsafe fn(&NormRows<'_, E>, usize, *mut f32);

/// Row `i`. `sums` has room for it, up to a whole vector.
///
/// # Safety
///
/// The row lies in all arrays, and no other thread touches it; the machine has the instructions of `S`.
#[inline(always)]
unsafe fn norm_row<S: Simd, E: Number>(rows: &NormRows<'_, E>, i: usize, sums: *mut f32) {
    let norm = rows.norm;
    let row = norm.weight.len();
    // SAFETY: the caller gives a row that lies in all arrays and that no other thread touches; a vector that is not full
    // goes through a place with room for all lanes.
    unsafe {
        let x = rows.x.add(i * rows.x_stride);
        let mut total = S::splat(0.0);
        for at in (0..row).step_by(S::LANES) {
            let count = row - at;
            let mut value = load::<S, E>(x.add(at), count);
            if !rows.residual.is_null() {
                value = S::add(value, load::<S, E>(rows.residual.add(i * rows.residual_stride + at), count));
                value = rounded::<S, E>(value);
            }
            if !rows.sum_out.is_null() {
                store::<S, E>(rows.sum_out.add(i * rows.sum_out_stride + at), value, count);
            }
            S::store(sums.add(at), value);
            total = match norm.kind {
                NormKind::Layer => S::add(total, value),
                NormKind::Rms => S::fma(value, value, total),
            };
        }
        if norm.kind == NormKind::Layer {
            let mean = S::sum(total) / row as f32;
            total = S::splat(0.0);
            for at in (0..row).step_by(S::LANES) {
                S::store(sums.add(at), S::add(S::load(sums.add(at)), S::splat(-mean)));
                if row - at < S::LANES {
                    // What fills the last vector does not belong to the row.
                    std::slice::from_raw_parts_mut(sums.add(row), at + S::LANES - row).fill(0.0);
                }
                let difference = S::load(sums.add(at));
                total = S::fma(difference, difference, total);
            }
        }
        let factor = S::splat(1.0 / (S::sum(total) / row as f32 + norm.eps).sqrt());
        for at in (0..row).step_by(S::LANES) {
            let count = row - at;
            let weight = load::<S, f32>(norm.weight.as_ptr().add(at), count);
            let mut value = S::mul(S::mul(S::load(sums.add(at)), factor), weight);
            if let Some(bias) = norm.bias {
                value = S::add(value, load::<S, f32>(bias.as_ptr().add(at), count));
            }
            let out = rows.out.add(i * rows.out_stride + at);
            if rows.adds {
                value = S::add(load::<S, E>(out, count), rounded::<S, E>(value));
            }
            store::<S, E>(out, value, count);
        }
    }
}

/// The most lanes that any instruction set has.
pub(crate) const MAX_LANES: usize = 16;

/// A vector of which `count` elements, or all where they are more, are read; the others are 0.
///
/// # Safety
///
/// As many may be read; the machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn load<S: Simd, E: Number>(from: *const E, count: usize) -> S::V {
    // SAFETY: the caller lets `count` elements be read at `from`; `room` has all lanes.
    unsafe {
        if count >= S::LANES {
            return E::load::<S>(from);
        }
        let mut room = [E::narrow(0.0); MAX_LANES];
        room.as_mut_ptr().copy_from_nonoverlapping(from, count);
        E::load::<S>(room.as_ptr())
    }
}

/// Write `count` elements, or all where they are more.
///
/// # Safety
///
/// As many may be written; the machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd, E: Number>(to: *mut E, x: S::V, count: usize) {
    // SAFETY: the caller lets `count` elements be written at `to`; `room` has all lanes.
    unsafe {
        if count >= S::LANES {
            return E::store::<S>(to, x);
        }
        let mut room = [E::narrow(0.0); MAX_LANES];
        E::store::<S>(room.as_mut_ptr(), x);
        to.copy_from_nonoverlapping(room.as_ptr(), count);
    }
}

/// What is left of `x` as an `E`.
///
/// # Safety
///
/// The machine has the instructions of `S`.
#[inline(always)]
unsafe fn rounded<S: Simd, E: Number>(x: S::V) -> S::V {
    let mut room = [E::narrow(0.0); MAX_LANES];
    // SAFETY: `room` has all lanes.
    unsafe {
        E::store::<S>(room.as_mut_ptr(), x);
        E::load::<S>(room.as_ptr())
    }
}

/// Entry points: the one place where it gets its instruction set.
macro_rules! entry_points {
    ($f32:ident, $bf16:ident, $simd:ty $(, $features:literal)?) => {
        /// # Safety
        ///
        /// See [`norm_row`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $f32(rows: &NormRows<'_, f32>, i: usize, sums: *mut f32) {
            const { assert!(<$simd>::LANES <= MAX_LANES) };
            // SAFETY: the caller gives a row within the arrays; `Kernel::available` lists this form only where its
            // instructions were found.
            unsafe { norm_row::<$simd, f32>(rows, i, sums) }
        }
        /// # Safety
        ///
        /// See [`norm_row`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $bf16(rows: &NormRows<'_, bf16>, i: usize, sums: *mut f32) {
            // SAFETY: the caller gives a row within the arrays; `Kernel::available` lists this form only where its
            // instructions were found.
            unsafe { norm_row::<$simd, bf16>(rows, i, sums) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
entry_points!(avx512_f32, avx512_bf16, crate::simd::avx512::Avx512, "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
entry_points!(avx2_f32, avx2_bf16, crate::simd::avx2::Avx2, "avx2,fma");
entry_points!(portable_f32, portable_bf16, crate::simd::portable::Portable<8>);
entry_points!(scalar_f32, scalar_bf16, crate::simd::portable::Portable<1>);
