//! What queries, keys, values and outputs are made of: `f32` or `bf16`.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(
    private_interfaces,
    private_bounds,
    reason = "`Element` is sealed: nobody outside names what its hidden functions take"
)]

use half::bf16;

use crate::{kernel::Kernel, simd::Simd, tile::TileFn};

mod sealed {
    pub trait Sealed {}
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
    /// # Safety
    ///
    /// See `Simd`: as many elements as it has lanes may be read, and the machine has its instructions.
    #[doc(hidden)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V;
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
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller's promise is passed on.
        unsafe { S::load(from) }
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
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller's promise is passed on.
        unsafe { S::load_bf16(from) }
    }
}
