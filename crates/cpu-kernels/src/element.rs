//! What queries, keys, values and outputs are made of: a type of numbers for which each kernel has a compiled form.

#![allow(
    private_interfaces,
    reason = "`Number` is sealed: the hidden functions are called in this crate alone"
)]

use half::bf16;

use crate::{
    attention::cache_element::CacheElement,
    finish::FinishFn,
    gates::row::GateFn,
    kernel::Kernel,
    lora::rows::{ExpandFn, ShrinkFn},
    norm::row::NormFn,
    number::Number,
    rotary::TurnFn,
};

/// An element of queries, keys, values and outputs.
pub trait Element: Number + CacheElement<Self> {
    #[doc(hidden)]
    fn finish_of(kernel: &Kernel) -> FinishFn<Self>;
    #[doc(hidden)]
    fn norm_of(kernel: &Kernel) -> NormFn<Self>;
    #[doc(hidden)]
    fn turn_of(kernel: &Kernel) -> TurnFn<Self>;
    #[doc(hidden)]
    fn gate_of(kernel: &Kernel) -> GateFn<Self>;
    #[doc(hidden)]
    fn shrink_of(kernel: &Kernel) -> ShrinkFn<Self>;
    #[doc(hidden)]
    fn expand_of(kernel: &Kernel) -> ExpandFn<Self>;
}

impl Element for f32 {
    fn finish_of(kernel: &Kernel) -> FinishFn<Self> {
        kernel.finish_f32
    }
    fn norm_of(kernel: &Kernel) -> NormFn<Self> {
        kernel.norm_f32
    }
    fn turn_of(kernel: &Kernel) -> TurnFn<Self> {
        kernel.turn_f32
    }
    fn gate_of(kernel: &Kernel) -> GateFn<Self> {
        kernel.gate_f32
    }
    fn shrink_of(kernel: &Kernel) -> ShrinkFn<Self> {
        kernel.shrink_f32
    }
    fn expand_of(kernel: &Kernel) -> ExpandFn<Self> {
        kernel.expand_f32
    }
}

impl Element for bf16 {
    fn finish_of(kernel: &Kernel) -> FinishFn<Self> {
        kernel.finish_bf16
    }
    fn norm_of(kernel: &Kernel) -> NormFn<Self> {
        kernel.norm_bf16
    }
    fn turn_of(kernel: &Kernel) -> TurnFn<Self> {
        kernel.turn_bf16
    }
    fn gate_of(kernel: &Kernel) -> GateFn<Self> {
        kernel.gate_bf16
    }
    fn shrink_of(kernel: &Kernel) -> ShrinkFn<Self> {
        kernel.shrink_bf16
    }
    fn expand_of(kernel: &Kernel) -> ExpandFn<Self> {
        kernel.expand_bf16
    }
}
