//! Lanes as an array, for the compiler to turn into what the machine has; with one lane, the path for odd head sizes.

#![allow(clippy::inline_always, reason = "see `simd`")]

use half::{bf16, f16};

use crate::simd::Simd;

pub(crate) struct Portable<const N: usize>;

/// A machine without a fused instruction would call a function for each `mul_add`.
#[inline(always)]
fn fused(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) { a.mul_add(b, c) } else { a * b + c }
}

impl<const N: usize> Simd for Portable<N> {
    type V = [f32; N];
    const LANES: usize = N;
    const SCORE_ROWS: usize = 1;
    const VALUE_ROWS: usize = 1;
    const STREAM_ROWS: usize = 0;

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; N] {
        [x; N]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; N] {
        // SAFETY: the caller promises N readable elements.
        unsafe { from.cast::<[f32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> [f32; N] {
        // SAFETY: the caller promises N readable elements.
        unsafe { from.cast::<[bf16; N]>().read_unaligned() }
            .map(|x| f32::from_bits(u32::from(x.to_bits()) << 16))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> [f32; N] {
        // SAFETY: the caller promises N readable elements.
        let halves = unsafe { from.cast::<[u16; N]>().read_unaligned() };
        // Not `to_f32`, which looks for the machine's instruction each time.
        halves.map(|bits| f16::from_bits(bits).to_f32_const())
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: [f32; N]) {
        // SAFETY: the caller promises N writable elements.
        unsafe { to.cast::<[f32; N]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut bf16, x: [f32; N]) {
        // SAFETY: the caller promises N writable elements.
        unsafe { to.cast::<[bf16; N]>().write_unaligned(x.map(bf16::from_f32)) }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> [f32; N] {
        // SAFETY: the caller promises N readable elements.
        unsafe { from.cast::<[i8; N]>().read_unaligned() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_pair_bf16(from: *const u16) -> [[f32; N]; 2] {
        // SAFETY: the caller promises twice N readable elements.
        let pairs = unsafe { from.cast::<[[u16; 2]; N]>().read_unaligned() };
        [0, 1].map(|place| pairs.map(|pair| f32::from_bits(u32::from(pair[place]) << 16)))
    }
    #[inline(always)]
    fn prefetch(_from: *const u8) {}
    #[inline(always)]
    unsafe fn add(a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn prefetch_near(_from: *const u8) {}
    #[inline(always)]
    unsafe fn mul(a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| fused(a[i], b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn min(a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn max(a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn round(x: [f32; N]) -> [f32; N] {
        // Adding and taking away 1.5 · 2²³ leaves no room for a fraction; `round_ties_even` would be a call.
        const NO_FRACTION: f32 = 12_582_912.0;
        x.map(|x| (x + NO_FRACTION) - NO_FRACTION)
    }
    #[inline(always)]
    unsafe fn scale_by_power(y: [f32; N], n: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| y[i] * f32::from_bits(((n[i] as i32 + 127) << 23) as u32))
    }
    #[inline(always)]
    unsafe fn zero_below(x: [f32; N], limit: [f32; N], y: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| if x[i] < limit[i] { 0.0 } else { y[i] })
    }
    #[inline(always)]
    unsafe fn sum(x: [f32; N]) -> f32 {
        x.iter().sum()
    }
    #[inline(always)]
    unsafe fn largest(x: [f32; N]) -> f32 {
        x.iter().fold(f32::NEG_INFINITY, |a, &b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn store_sums(x: [[f32; N]; 4], to: *mut f32) {
        let sums = x.map(|x| x.iter().sum::<f32>());
        // SAFETY: the caller promises four writable elements.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(sums) }
    }
}
