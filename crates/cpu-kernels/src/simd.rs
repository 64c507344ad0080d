//! A vector of `f32` lanes: what the kernel needs of an instruction set, and the exponential built on it.

#![allow(
    clippy::inline_always,
    reason = "an intrinsic is only inlined into a function that has its instruction set, \
    so everything between the entry point, which has it, and the intrinsic must dissolve into the entry point"
)]

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod instructions;
pub(crate) mod memory;
pub(crate) mod portable;
pub(crate) mod rounding;

use half::bf16;

/// Lanes of one instruction set.
///
/// # Safety
///
/// Every function needs a machine that has the instruction set; the entry points of [`crate::kernel`] see to that. Loads
/// and stores need `LANES` elements (`store_sums`: four) of memory that may be read or written; alignment does not matter.
///
/// `min` and `max` return their second operand when one of them is not a number.
pub(crate) trait Simd {
    type V: Copy;
    const LANES: usize;
    /// Query rows whose products with four keys are summed at once: as many as the registers hold.
    const SCORE_ROWS: usize;
    /// Query rows whose outputs are summed at once.
    const VALUE_ROWS: usize;
    /// The most rows of a product whose weights are read at two places at once: as the registers hold sums of both.
    const STREAM_ROWS: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn load_bf16(from: *const bf16) -> Self::V;
    /// `LANES` numbers of IEEE's 16 bits, exactly.
    unsafe fn load_f16(from: *const u16) -> Self::V;
    unsafe fn store(to: *mut f32, x: Self::V);
    /// The nearest numbers of 16 bits, ties to even; what is not a number stays none.
    unsafe fn store_bf16(to: *mut bf16, x: Self::V);
    /// `LANES` whole numbers.
    unsafe fn load_i8(from: *const i8) -> Self::V;
    /// Twice `LANES` numbers of 16 bits: those at even places, then those at odd ones.
    unsafe fn load_pair_bf16(from: *const u16) -> [Self::V; 2];
    /// Ask for the line at `from`, which need not be memory of this process, to come as near as the second cache.
    fn prefetch(from: *const u8);
    /// Ask for the line at `from`, which need not be memory of this process, to come into the first cache.
    fn prefetch_near(from: *const u8);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// To the nearest whole number; ties either way.
    unsafe fn round(x: Self::V) -> Self::V;
    /// `y · 2ⁿ` for whole `n` from −126 to 127.
    unsafe fn scale_by_power(y: Self::V, n: Self::V) -> Self::V;
    /// `y`, but 0 where `x` is below `limit`; `y` where `x` is not a number.
    unsafe fn zero_below(x: Self::V, limit: Self::V, y: Self::V) -> Self::V;
    unsafe fn sum(x: Self::V) -> f32;
    /// The largest lane; any lane when one is not a number.
    unsafe fn largest(x: Self::V) -> f32;
    /// The sums of four vectors, each in the same order, to four places.
    unsafe fn store_sums(x: [Self::V; 4], to: *mut f32);
}

/// Below it the exponential is not a normal number, and counts as 0.
const SMALLEST_EXPONENT: f32 = -87.0;
const LARGEST_EXPONENT: f32 = 87.0;
/// ln 2 in two parts, the first with so few bits that its product with a whole number is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Of `(eˣ − 1 − x) / x²` on ±ln 2 / 2, highest power first (Cephes, `expf`).
const POLYNOMIAL: [f32; 6] = [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// `eˣ` to within two units in the last place, for `x` of at most 87; 0 below −87.
///
/// # Safety
///
/// See [`Simd`].
#[inline(always)]
#[expect(clippy::many_single_char_names, reason = "the names of the formula")]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller found the machine to have the instructions of `S`; no memory is touched.
    unsafe {
        let limit = S::splat(SMALLEST_EXPONENT);
        let clamped = S::min(S::splat(LARGEST_EXPONENT), S::max(limit, x));
        let n = S::round(S::mul(clamped, S::splat(std::f32::consts::LOG2_E)));
        let r = S::fma(n, S::splat(-LN_2_HIGH), clamped);
        let r = S::fma(n, S::splat(-LN_2_LOW), r);
        let mut p = S::splat(POLYNOMIAL[0]);
        let mut i = 1;
        while i < POLYNOMIAL.len() {
            p = S::fma(p, r, S::splat(POLYNOMIAL[i]));
            i += 1;
        }
        let y = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        S::zero_below(x, limit, S::scale_by_power(y, n))
    }
}

/// `tanh x` to within 2·10⁻⁷.
///
/// # Safety
///
/// See [`Simd`].
#[inline(always)]
pub(crate) unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller found the machine to have the instructions of `S`; no memory is touched.
    unsafe {
        // 1 − 2 / (e²ˣ + 1); beyond ±10 it is ±1 in 32 bits.
        let doubled = S::mul(x, S::splat(2.0));
        let doubled = S::min(S::splat(20.0), S::max(S::splat(-20.0), doubled));
        let e = exp::<S>(doubled);
        S::add(S::splat(1.0), S::div(S::splat(-2.0), S::add(e, S::splat(1.0))))
    }
}
