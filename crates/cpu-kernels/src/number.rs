//! `Number`: `f32` or `bf16` in memory, 32 bits in registers.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(
    private_interfaces,
    private_bounds,
    reason = "`Number` is sealed: its hidden functions are called in this crate alone"
)]

use half::bf16;

use crate::simd::Simd;

mod sealed {
    pub trait Sealed: crate::lines::Plain {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
}

/// A number as arrays hold it.
pub trait Number: Copy + Send + Sync + sealed::Sealed + 'static {
    /// The number as 32 bits, exactly.
    fn widen(self) -> f32;
    /// The nearest number of this type, ties to even.
    fn narrow(x: f32) -> Self;
    /// These numbers as `f32`, where they are 32 bits.
    #[doc(hidden)]
    fn as_f32(numbers: &[Self]) -> Option<&[f32]>;
    /// These numbers as `bf16`, where they are 16 bits.
    #[doc(hidden)]
    fn as_bf16(numbers: &[Self]) -> Option<&[bf16]>;
    /// # Safety
    ///
    /// See `Simd`: as many elements as it has lanes may be read, and the machine has its instructions.
    #[doc(hidden)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V;
    /// # Safety
    ///
    /// See `Simd`: as many elements as it has lanes may be written, and the machine has its instructions.
    #[doc(hidden)]
    unsafe fn store<S: Simd>(to: *mut Self, x: S::V);
}

impl Number for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        x
    }
    fn as_f32(numbers: &[Self]) -> Option<&[f32]> {
        Some(numbers)
    }
    fn as_bf16(_numbers: &[Self]) -> Option<&[bf16]> {
        None
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller lets a vector of elements be read at `from`, and has found the instructions of `S`.
        unsafe { S::load(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, x: S::V) {
        // SAFETY: the caller lets a vector of elements be written at `to`, and has found the instructions of `S`.
        unsafe { S::store(to, x) }
    }
}

impl Number for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn as_f32(_numbers: &[Self]) -> Option<&[f32]> {
        None
    }
    fn as_bf16(numbers: &[Self]) -> Option<&[bf16]> {
        Some(numbers)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller lets a vector of elements be read at `from`, and has found the instructions of `S`.
        unsafe { S::load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, x: S::V) {
        // SAFETY: the caller lets a vector of elements be written at `to`, and has found the instructions of `S`.
        unsafe { S::store_bf16(to, x) }
    }
}
