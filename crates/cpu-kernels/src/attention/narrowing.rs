//! Keys and values on their way into a cache of `bf16`, compiled for each instruction set.

#![allow(clippy::inline_always, reason = "see `simd`")]

use half::bf16;

use crate::{number::Number, simd::Simd};

/// One compiled form of [`narrow`].
pub(crate) type NarrowFn = unsafe fn(&[f32], &mut [bf16]);

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

/// Entry points: the one place where it gets its instruction set.
macro_rules! entry_point {
    ($name:ident, $simd:ty $(, $features:literal)?) => {
        /// # Safety
        ///
        /// See [`narrow`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $name(from: &[f32], to: &mut [bf16]) {
            // SAFETY: `Kernel::available` lists this form only where its instructions were found.
            unsafe { narrow::<$simd>(from, to) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
entry_point!(avx512, crate::simd::avx512::Avx512, "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
entry_point!(avx2, crate::simd::avx2::Avx2, "avx2,fma");
entry_point!(portable, crate::simd::portable::Portable<8>);
entry_point!(scalar, crate::simd::portable::Portable<1>);
