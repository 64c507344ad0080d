//! Keys and values on their way into a cache that holds them in fewer bits, compiled for each instruction set.

#![allow(clippy::inline_always, reason = "see `simd`")]

use half::bf16;

use crate::{
    attention::cached::{Cached, Int8Head},
    number::Number,
    simd::{
        Simd,
        rounding::{LARGEST, Rounding, SIZE},
    },
};

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

/// Vectors that are rounded together where a head has so many.
const TOGETHER: usize = 4;

/// Heads of `dim` features in whole numbers: the largest feature is 127 times the scale, the others are rounded to the nearest.
/// A head with an infinite feature or NaN becomes NaN; one whose features all lie below 4 · 10⁻³⁷ becomes zeros.
///
/// # Safety
///
/// The machine has the instructions of `R`.
#[inline(always)]
unsafe fn round<R: Rounding, E: Number>(from: &[E], dim: usize, to: &mut [Int8Head]) {
    for (features, head) in from.chunks_exact(dim).zip(to.chunks_exact_mut(dim + Int8Head::SCALE_LEN)) {
        let (numbers, scale_bytes) = head.split_at_mut(dim);
        let (many, few) = features.split_at(dim - dim % (TOGETHER * R::LANES));
        let (one, rest) = few.split_at(few.len() - few.len() % R::LANES);
        let size = |x: &E| x.widen().to_bits() as i32 & SIZE;
        let mut largest = rest.iter().map(size).fold(0, i32::max);
        // SAFETY: each part is as many whole vectors as it is read in; the caller promises the instructions.
        unsafe {
            for from in many.chunks_exact(TOGETHER * R::LANES) {
                largest = largest.max(R::largest_size(&vectors::<R, E>(from)));
            }
            for from in one.chunks_exact(R::LANES) {
                largest = largest.max(R::largest_size(&[E::load::<R>(from.as_ptr())]));
            }
        }
        let largest = f32::from_bits(largest as u32);
        let (mut scale, factor) = (largest / LARGEST, LARGEST / largest);
        if largest.is_finite() && factor.is_finite() {
            let whole = numbers.as_mut_ptr().cast::<i8>();
            // SAFETY: the caller promises the instructions; each part is as many whole vectors as it is read in, and there is a
            // number of each feature to write.
            unsafe {
                for (index, from) in many.chunks_exact(TOGETHER * R::LANES).enumerate() {
                    R::to_whole(&vectors::<R, E>(from), factor, whole.add(index * TOGETHER * R::LANES));
                }
                for (index, from) in one.chunks_exact(R::LANES).enumerate() {
                    let to = whole.add(many.len() + index * R::LANES);
                    R::to_whole(&[E::load::<R>(from.as_ptr())], factor, to);
                }
            }
            for (number, x) in numbers[many.len() + one.len()..].iter_mut().zip(rest) {
                *number = Int8Head((x.widen() * factor).round_ties_even() as i8);
            }
        } else {
            scale = if largest.is_finite() { 0.0 } else { f32::NAN };
            numbers.fill(Int8Head(0));
        }
        for (byte, value) in scale_bytes.iter_mut().zip(scale.to_ne_bytes()) {
            *byte = Int8Head(value.cast_signed());
        }
    }
}

/// # Safety
///
/// `from` has [`TOGETHER`] vectors; the machine has the instructions of `R`.
#[inline(always)]
unsafe fn vectors<R: Rounding, E: Number>(from: &[E]) -> [R::V; TOGETHER] {
    // SAFETY: the caller gives so many vectors, and promises the instructions.
    unsafe {
        let mut x = [E::load::<R>(from.as_ptr()); TOGETHER];
        for (i, x) in x.iter_mut().enumerate().skip(1) {
            *x = E::load::<R>(from.as_ptr().add(i * R::LANES));
        }
        x
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
                // SAFETY: `Kernel::available` lists this form only where its instructions were found.
                unsafe { super::round::<$simd, E>(from, dim, to) };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Kernel;

    /// The naive version.
    fn naive(features: &[f32]) -> (Vec<i8>, f32) {
        let largest =
            features.iter().fold(0.0, |largest: f32, x| if x.is_nan() { *x } else { x.abs().max(largest) });
        let is_good = features.iter().all(|x| x.is_finite());
        let factor = LARGEST / largest;
        if !is_good || !factor.is_finite() {
            return (vec![0; features.len()], if is_good { 0.0 } else { f32::NAN });
        }
        let numbers = features.iter().map(|x| (x * factor).round_ties_even() as i8).collect();
        (numbers, largest / LARGEST)
    }

    fn check<E: Number>(round: impl Fn(&Keeping) -> RoundFn<E>, dim: usize) {
        let mut state = 3_u32;
        let mut number = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 1e6 - 8.0
        };
        let mut x: Vec<E> = (0..7 * dim).map(|_| E::narrow(number())).collect();
        x[dim..2 * dim].fill(E::narrow(-0.0));
        x[3 * dim - 1] = E::narrow(f32::NAN);
        x[3 * dim] = E::narrow(f32::NEG_INFINITY);
        x[4 * dim..5 * dim].fill(E::narrow(-3e-38));
        x[5 * dim..6 * dim].fill(E::narrow(2.5));
        x[5 * dim] = E::narrow(-127.0);
        for kernel in Kernel::available() {
            let mut kept = vec![Int8Head(99); 7 * (dim + Int8Head::SCALE_LEN)];
            // SAFETY: the kernel is one of those that the machine has the instructions of.
            unsafe { round(&kernel.keeping)(&x, dim, &mut kept) };
            for (index, (head, features)) in
                kept.chunks(dim + Int8Head::SCALE_LEN).zip(x.chunks(dim)).enumerate()
            {
                let features: Vec<f32> = features.iter().map(|x| x.widen()).collect();
                let (numbers, scale) = naive(&features);
                let found: Vec<i8> = head.iter().map(|number| number.0).collect();
                let what = format!("{}, head {index} of {dim}", kernel.name());
                assert_eq!(found[..dim], numbers, "{what}");
                let bytes: Vec<i8> = scale.to_ne_bytes().map(u8::cast_signed).to_vec();
                assert!(found[dim..] == bytes || (scale.is_nan() && index > 1), "{what}");
            }
        }
    }

    #[test]
    fn every_form_rounds_heads_as_the_naive_one() {
        for dim in [1, 7, 8, 16, 20, 32, 64, 72, 80, 96, 128, 200, 256] {
            check::<f32>(|keeping| keeping.round_f32, dim);
            check::<bf16>(|keeping| keeping.round_bf16, dim);
        }
    }
}
