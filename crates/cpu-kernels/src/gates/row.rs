//! The gates of one row, compiled for each instruction set.

#![allow(clippy::inline_always, reason = "see `simd`")]

use half::bf16;

use crate::{
    finish::Activation,
    norm::row::{load, store},
    number::Number,
    simd::Simd,
};

/// One compiled form of [`gate`].
pub(crate) type GateFn<E> = unsafe fn(*mut E, usize, Activation);

/// One row of `size` gates and as many features.
///
/// # Safety
///
/// They may be read, and the gates written; the machine has the instructions of `S`.
#[inline(always)]
unsafe fn gate<S: Simd, E: Number>(row: *mut E, size: usize, activation: Activation) {
    for at in (0..size).step_by(S::LANES) {
        let count = size - at;
        // SAFETY: the caller lets the row be read and its gates be written; a vector that is not full is of `count`
        // elements.
        unsafe {
            let gates = activation.apply::<S>(load::<S, E>(row.add(at), count));
            let features = activation.features::<S>(load::<S, E>(row.add(size + at), count));
            store::<S, E>(row.add(at), S::mul(gates, features), count);
        }
    }
}

/// Entry points: the one place where it gets its instruction set.
macro_rules! entry_points {
    ($f32:ident, $bf16:ident, $simd:ty $(, $features:literal)?) => {
        /// # Safety
        ///
        /// See [`gate`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $f32(row: *mut f32, size: usize, activation: Activation) {
            // SAFETY: the caller gives a row of gates and features; `Kernel::available` lists this form only where its
            // instructions were found.
            unsafe { gate::<$simd, f32>(row, size, activation) }
        }
        /// # Safety
        ///
        /// See [`gate`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $bf16(row: *mut bf16, size: usize, activation: Activation) {
            // SAFETY: the caller gives a row of gates and features; `Kernel::available` lists this form only where its
            // instructions were found.
            unsafe { gate::<$simd, bf16>(row, size, activation) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
entry_points!(avx512_f32, avx512_bf16, crate::simd::avx512::Avx512, "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
entry_points!(avx2_f32, avx2_bf16, crate::simd::avx2::Avx2, "avx2,fma");
entry_points!(portable_f32, portable_bf16, crate::simd::portable::Portable<8>);
entry_points!(scalar_f32, scalar_bf16, crate::simd::portable::Portable<1>);
