//! Keys and values on their way into a cache that holds them in fewer bits, compiled for each instruction set.

#![allow(clippy::inline_always, reason = "see `simd`")]

use half::bf16;

use crate::{
    attention::cached::{Cached, Int8Head},
    number::Number,
    simd::Simd,
};

/// The largest whole number of a head, and less the sign the smallest one.
const LARGEST: f32 = 127.0;

/// The compiled forms of one instruction set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keeping {
    /// See [`narrow`].
    pub(crate) narrow: unsafe fn(&[f32], &mut [bf16]),
    /// See [`round`].
    pub(crate) round_f32: RoundFn<f32>,
    /// See [`round`].
    pub(crate) round_bf16: RoundFn<bf16>,
}

type RoundFn<E> = unsafe fn(&[E], usize, &mut [Int8Head]);

/// Each number to the nearest `bf16`, ties to even; as many as the shorter of both has.
///
/// # Safety
///
/// The machine has the instructions of `S`.
#[inline(always)]
unsafe fn narrow<S: Simd>(from: &[f32], to: &mut [bf16]) {
    let (mut from, mut to) = (from.chunks_exact(S::LANES), to.chunks_exact_mut(S::LANES));
    for (from, to) in from.by_ref().zip(to.by_ref()) {
        // SAFETY: both have a vector of numbers; the caller promises the instructions.
        unsafe { S::store_bf16(to.as_mut_ptr(), S::load(from.as_ptr())) };
    }
    for (from, to) in from.remainder().iter().zip(to.into_remainder()) {
        *to = bf16::narrow(*from);
    }
}

/// Heads of `dim` features in whole numbers: the largest feature is 127 times the scale, the others are rounded to the nearest.
/// A head with an infinite feature or NaN becomes NaN; one whose features all lie below 4 · 10⁻³⁷ becomes zeros.
#[inline(always)]
fn round<E: Number>(from: &[E], dim: usize, to: &mut [Int8Head]) {
    for (features, head) in from.chunks_exact(dim).zip(to.chunks_exact_mut(dim + Int8Head::SCALE_LEN)) {
        let (numbers, scale_bytes) = head.split_at_mut(dim);
        // Without its sign a number is as large as its bits are, and NaN is larger than all: a loop over whole numbers, which
        // the compiler vectorises.
        let size = |x: &E| x.widen().to_bits() & !(1 << 31);
        let largest = f32::from_bits(features.iter().map(size).fold(0, u32::max));
        let (mut scale, mut factor) = (largest / LARGEST, LARGEST / largest);
        if !largest.is_finite() {
            (scale, factor) = (f32::NAN, 0.0);
        } else if !factor.is_finite() {
            (scale, factor) = (0.0, 0.0);
        }
        for (number, x) in numbers.iter_mut().zip(features) {
            *number = Int8Head((x.widen() * factor).round_ties_even() as i8);
        }
        for (byte, value) in scale_bytes.iter_mut().zip(scale.to_ne_bytes()) {
            *byte = Int8Head(value.cast_signed());
        }
    }
}

/// Entry points: the one place where they get their instruction set.
macro_rules! entry_points {
    ($name:ident, $module:ident, $simd:ty $(, $features:literal)?) => {
        mod $module {
            use super::*;
            /// # Safety
            ///
            /// See [`narrow`](super::narrow).
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn narrow(from: &[f32], to: &mut [bf16]) {
                // SAFETY: `Kernel::available` lists this form only where its instructions were found.
                unsafe { super::narrow::<$simd>(from, to) }
            }
            /// # Safety
            ///
            /// The machine has the instructions.
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn round<E: Number>(from: &[E], dim: usize, to: &mut [Int8Head]) {
                super::round(from, dim, to);
            }
        }
        pub(crate) const $name: Keeping = Keeping {
            narrow: $module::narrow,
            round_f32: $module::round::<f32>,
            round_bf16: $module::round::<bf16>,
        };
    };
}

#[cfg(target_arch = "x86_64")]
entry_points!(AVX512, avx512, crate::simd::avx512::Avx512, "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
entry_points!(AVX2, avx2, crate::simd::avx2::Avx2, "avx2,fma");
entry_points!(PORTABLE, portable, crate::simd::portable::Portable<8>);
entry_points!(SCALAR, scalar, crate::simd::portable::Portable<1>);
