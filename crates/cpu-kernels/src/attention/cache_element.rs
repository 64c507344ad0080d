//! Which elements of a KV cache queries of a type meet, and the compiled forms for both.

#![allow(
    private_interfaces,
    reason = "`Number` is sealed: the hidden functions are called in this crate alone"
)]

use half::bf16;

use crate::{
    attention::{
        cached::{Cached, Int8Head},
        tile::Tiles,
    },
    kernel::Kernel,
    number::Number,
};

/// An element of a KV cache that queries of `E` meet: `E` itself, or one that takes less memory.
pub trait CacheElement<E: Number>: Cached {
    #[doc(hidden)]
    fn tiles_of(kernel: &Kernel) -> Tiles<E, Self>;
    /// Keys or values of a token, in heads of `dim` features, as the cache holds them.
    #[doc(hidden)]
    fn keep(from: &[E], dim: usize, to: &mut [Self], kernel: &Kernel);
}

impl CacheElement<Self> for f32 {
    fn tiles_of(kernel: &Kernel) -> Tiles<Self, Self> {
        kernel.tiles.f32
    }
    fn keep(from: &[Self], _dim: usize, to: &mut [Self], _kernel: &Kernel) {
        to.copy_from_slice(from);
    }
}

impl CacheElement<Self> for bf16 {
    fn tiles_of(kernel: &Kernel) -> Tiles<Self, Self> {
        kernel.tiles.bf16
    }
    fn keep(from: &[Self], _dim: usize, to: &mut [Self], _kernel: &Kernel) {
        to.copy_from_slice(from);
    }
}

impl CacheElement<f32> for bf16 {
    fn tiles_of(kernel: &Kernel) -> Tiles<f32, Self> {
        kernel.tiles.f32_over_bf16
    }
    fn keep(from: &[f32], _dim: usize, to: &mut [Self], kernel: &Kernel) {
        // SAFETY: a kernel is only reachable where its instructions were found.
        unsafe { (kernel.keeping.narrow)(from, to) };
    }
}

impl CacheElement<f32> for Int8Head {
    fn tiles_of(kernel: &Kernel) -> Tiles<f32, Self> {
        kernel.tiles.f32_over_int8
    }
    fn keep(from: &[f32], dim: usize, to: &mut [Self], kernel: &Kernel) {
        // SAFETY: a kernel is only reachable where its instructions were found.
        unsafe { (kernel.keeping.round_f32)(from, dim, to) };
    }
}

impl CacheElement<bf16> for Int8Head {
    fn tiles_of(kernel: &Kernel) -> Tiles<bf16, Self> {
        kernel.tiles.bf16_over_int8
    }
    fn keep(from: &[bf16], dim: usize, to: &mut [Self], kernel: &Kernel) {
        // SAFETY: a kernel is only reachable where its instructions were found.
        unsafe { (kernel.keeping.round_bf16)(from, dim, to) };
    }
}
