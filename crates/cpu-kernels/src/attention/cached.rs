//! What a KV cache is made of: numbers, or heads of whole numbers with a scale each.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(
    private_interfaces,
    private_bounds,
    reason = "`Cached` is sealed: its hidden functions are called in this crate alone"
)]

use half::bf16;

use crate::{lines::Plain, simd::Simd};

/// An element of a KV cache. A head is `head_dim` of them, its features, and [`Self::SCALE_LEN`] more.
pub trait Cached: Copy + Send + Sync + Plain + 'static {
    /// Elements behind a head's features that hold its scale; 0: its features are what is multiplied.
    const SCALE_LEN: usize;
    /// Features as they are kept, in 32 bits.
    ///
    /// # Safety
    ///
    /// See `Simd`: as many features as it has lanes may be read, and the machine has its instructions.
    #[doc(hidden)]
    unsafe fn load_kept<S: Simd>(from: *const Self) -> S::V;
    /// What a head's features are multiplied by.
    ///
    /// # Safety
    ///
    /// [`Self::SCALE_LEN`] elements, those behind the features, may be read at `from`.
    #[doc(hidden)]
    unsafe fn scale(from: *const Self) -> f32;
}

/// An element of a head that is kept in 8 bits: a whole number for each feature, from −127 to 127, and then the four bytes of
/// an `f32` that all are multiplied by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Int8Head(pub i8);

// SAFETY: a byte, of which any bits are a value.
unsafe impl Plain for Int8Head {}

impl Cached for f32 {
    const SCALE_LEN: usize = 0;
    #[inline(always)]
    unsafe fn load_kept<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller lets a vector be read at `from`, and has found the instructions of `S`.
        unsafe { S::load(from) }
    }
    #[inline(always)]
    unsafe fn scale(_from: *const Self) -> f32 {
        1.0
    }
}

impl Cached for bf16 {
    const SCALE_LEN: usize = 0;
    #[inline(always)]
    unsafe fn load_kept<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller lets a vector be read at `from`, and has found the instructions of `S`.
        unsafe { S::load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn scale(_from: *const Self) -> f32 {
        1.0
    }
}

impl Cached for Int8Head {
    const SCALE_LEN: usize = size_of::<f32>();
    #[inline(always)]
    unsafe fn load_kept<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller lets a vector be read at `from`, and has found the instructions of `S`.
        unsafe { S::load_i8(from.cast()) }
    }
    #[inline(always)]
    unsafe fn scale(from: *const Self) -> f32 {
        // SAFETY: the caller lets as many bytes be read at `from` as an f32 has.
        unsafe { from.cast::<f32>().read_unaligned() }
    }
}
