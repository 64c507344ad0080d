//! What queries, keys, values and outputs are made of: `f32` or `bf16`.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(
    private_interfaces,
    private_bounds,
    reason = "`Element` is sealed: nobody outside names what its hidden functions take"
)]

use half::bf16;

use crate::{finish::FinishFn, kernel::Kernel, norm::NormFn, simd::Simd, tile::TileFn};

mod sealed {
    pub trait Sealed: crate::lines::Plain {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
}

/// An element of the cache and of what meets it.
pub trait Element: Copy + Send + Sync + sealed::Sealed + 'static {
    /// The number as 32 bits, exactly.
    fn widen(self) -> f32;
    /// The nearest number of this type, ties to even.
    fn narrow(x: f32) -> Self;
    #[doc(hidden)]
    fn tile_of(kernel: &Kernel) -> TileFn<Self>;
    #[doc(hidden)]
    fn finish_of(kernel: &Kernel) -> FinishFn<Self>;
    #[doc(hidden)]
    fn norm_of(kernel: &Kernel) -> NormFn<Self>;
    /// The same numbers, where they are 32 bits.
    #[doc(hidden)]
    fn as_f32(numbers: &[Self]) -> Option<&[f32]>;
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

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        x
    }
    fn tile_of(kernel: &Kernel) -> TileFn<Self> {
        kernel.tile_f32
    }
    fn finish_of(kernel: &Kernel) -> FinishFn<Self> {
        kernel.finish_f32
    }
    fn norm_of(kernel: &Kernel) -> NormFn<Self> {
        kernel.norm_f32
    }
    fn as_f32(numbers: &[Self]) -> Option<&[f32]> {
        Some(numbers)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller's promise is passed on.
        unsafe { S::load(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, x: S::V) {
        // SAFETY: the caller's promise is passed on.
        unsafe { S::store(to, x) }
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn tile_of(kernel: &Kernel) -> TileFn<Self> {
        kernel.tile_bf16
    }
    fn finish_of(kernel: &Kernel) -> FinishFn<Self> {
        kernel.finish_bf16
    }
    fn norm_of(kernel: &Kernel) -> NormFn<Self> {
        kernel.norm_bf16
    }
    fn as_f32(_numbers: &[Self]) -> Option<&[f32]> {
        None
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller's promise is passed on.
        unsafe { S::load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, x: S::V) {
        // SAFETY: the caller's promise is passed on.
        unsafe { S::store_bf16(to, x) }
    }
}
