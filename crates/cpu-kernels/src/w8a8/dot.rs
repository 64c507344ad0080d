//! Four products of whole numbers of 8 bits and their sum, for each lane of an instruction set.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![cfg_attr(
    target_arch = "x86_64",
    allow(clippy::wildcard_imports, reason = "the intrinsics carry their origin in their names")
)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

#[cfg(target_arch = "x86_64")]
use crate::{avx2::Avx2, avx512::Avx512};
use crate::{portable::Portable, simd::Simd};

/// Inputs whose products one lane adds at once: those of an output lie side by side.
pub(crate) const QUAD: usize = 4;

/// Sums of products of whole numbers.
///
/// # Safety
///
/// Every function needs a machine that has the instructions; loads need [`QUAD`] numbers, for weights in each lane, that may
/// be read, and `start` one. No sum leaves 32 bits while at most 2¹⁷ products are added; activations are not below −127.
pub(crate) trait Dot {
    type Lanes: Simd;
    /// Weights of all lanes, four inputs each.
    type Weights: Copy;
    /// Activations of four inputs.
    type Inputs: Copy;
    /// A whole number of 32 bits in each lane.
    type Sums: Copy;

    /// What a block's sums begin with; `starts` is −128 times the sum of the block's activations, for forms that take 128 more
    /// than each weight.
    unsafe fn start(starts: *const i32) -> Self::Sums;
    /// `[output][input]`
    unsafe fn weights(from: *const i8) -> Self::Weights;
    unsafe fn inputs(from: *const i8) -> Self::Inputs;
    unsafe fn add(sums: Self::Sums, weights: Self::Weights, inputs: Self::Inputs) -> Self::Sums;
    /// The nearest numbers.
    unsafe fn to_float(sums: Self::Sums) -> <Self::Lanes as Simd>::V;
}

/// What the compiler makes of arrays.
pub(crate) struct PortableDot<const N: usize>;

impl<const N: usize> Dot for PortableDot<N> {
    type Lanes = Portable<N>;
    type Weights = [[i8; QUAD]; N];
    type Inputs = [i8; QUAD];
    type Sums = [i32; N];

    #[inline(always)]
    unsafe fn start(_: *const i32) -> [i32; N] {
        [0; N]
    }
    #[inline(always)]
    unsafe fn weights(from: *const i8) -> [[i8; QUAD]; N] {
        // SAFETY: the caller lets the weights of all lanes be read at `from`.
        unsafe { from.cast::<[[i8; QUAD]; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn inputs(from: *const i8) -> [i8; QUAD] {
        // SAFETY: the caller lets four activations be read at `from`.
        unsafe { from.cast::<[i8; QUAD]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn add(sums: [i32; N], weights: [[i8; QUAD]; N], inputs: [i8; QUAD]) -> [i32; N] {
        std::array::from_fn(|i| {
            (0..QUAD).fold(sums[i], |sum, k| sum + i32::from(weights[i][k]) * i32::from(inputs[k]))
        })
    }
    #[inline(always)]
    unsafe fn to_float(sums: [i32; N]) -> [f32; N] {
        sums.map(|sum| sum as f32)
    }
}

/// `vpmaddubsw`, which multiplies numbers without a sign by numbers with one and adds pairs in 16 bits: the sizes of weights,
/// at most 128, by activations that have taken over the weights' signs, at most 127. No pair leaves 16 bits.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Avx2Dot;

#[cfg(target_arch = "x86_64")]
impl Dot for Avx2Dot {
    type Lanes = Avx2;
    /// As they are, and their sizes.
    type Weights = (__m256i, __m256i);
    type Inputs = __m256i;
    type Sums = __m256i;

    #[inline(always)]
    unsafe fn start(_: *const i32) -> __m256i {
        // SAFETY: the caller promises a machine with AVX2.
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    unsafe fn weights(from: *const i8) -> (__m256i, __m256i) {
        // SAFETY: the caller promises a machine with AVX2, and 32 weights that may be read.
        unsafe {
            let weights = _mm256_loadu_si256(from.cast());
            (weights, _mm256_abs_epi8(weights))
        }
    }
    #[inline(always)]
    unsafe fn inputs(from: *const i8) -> __m256i {
        // SAFETY: the caller promises a machine with AVX2, and four activations that may be read.
        unsafe { _mm256_set1_epi32(from.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn add(sums: __m256i, (weights, sizes): (__m256i, __m256i), inputs: __m256i) -> __m256i {
        // SAFETY: the caller promises a machine with AVX2; no memory is touched.
        unsafe {
            let pairs = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(inputs, weights));
            _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
    #[inline(always)]
    unsafe fn to_float(sums: __m256i) -> __m256 {
        // SAFETY: the caller promises a machine with AVX2; no memory is touched.
        unsafe { _mm256_cvtepi32_ps(sums) }
    }
}

/// Makes of a weight, by an exclusive or, the number without a sign that is 128 more.
#[cfg(target_arch = "x86_64")]
const SIGNS: i8 = i8::MIN;

/// `vpdpbusd`, which adds four products to a lane at once, one factor without a sign: the weights and 128.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Vnni512Dot;

#[cfg(target_arch = "x86_64")]
impl Dot for Vnni512Dot {
    type Lanes = Avx512;
    type Weights = __m512i;
    type Inputs = __m512i;
    type Sums = __m512i;

    #[inline(always)]
    unsafe fn start(starts: *const i32) -> __m512i {
        // SAFETY: the caller promises a machine with AVX-512 F, and a number that may be read.
        unsafe { _mm512_set1_epi32(*starts) }
    }
    #[inline(always)]
    unsafe fn weights(from: *const i8) -> __m512i {
        // SAFETY: the caller promises a machine with AVX-512 F, and 64 weights that may be read.
        unsafe { _mm512_xor_si512(_mm512_loadu_si512(from.cast()), _mm512_set1_epi8(SIGNS)) }
    }
    #[inline(always)]
    unsafe fn inputs(from: *const i8) -> __m512i {
        // SAFETY: the caller promises a machine with AVX-512 F, and four activations that may be read.
        unsafe { _mm512_set1_epi32(from.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn add(sums: __m512i, weights: __m512i, inputs: __m512i) -> __m512i {
        // SAFETY: the caller promises a machine with AVX-512 VNNI; no memory is touched.
        unsafe { _mm512_dpbusd_epi32(sums, weights, inputs) }
    }
    #[inline(always)]
    unsafe fn to_float(sums: __m512i) -> __m512 {
        // SAFETY: the caller promises a machine with AVX-512 F; no memory is touched.
        unsafe { _mm512_cvtepi32_ps(sums) }
    }
}

/// The same instruction of processors without AVX-512 (AVX-VNNI), with half the lanes: see [`Vnni512Dot`].
#[cfg(target_arch = "x86_64")]
pub(crate) struct Vnni256Dot;

#[cfg(target_arch = "x86_64")]
impl Dot for Vnni256Dot {
    type Lanes = Avx2;
    type Weights = __m256i;
    type Inputs = __m256i;
    type Sums = __m256i;

    #[inline(always)]
    unsafe fn start(starts: *const i32) -> __m256i {
        // SAFETY: the caller promises a machine with AVX2, and a number that may be read.
        unsafe { _mm256_set1_epi32(*starts) }
    }
    #[inline(always)]
    unsafe fn weights(from: *const i8) -> __m256i {
        // SAFETY: the caller promises a machine with AVX2, and 32 weights that may be read.
        unsafe { _mm256_xor_si256(_mm256_loadu_si256(from.cast()), _mm256_set1_epi8(SIGNS)) }
    }
    #[inline(always)]
    unsafe fn inputs(from: *const i8) -> __m256i {
        // SAFETY: the caller promises a machine with AVX2, and four activations that may be read.
        unsafe { _mm256_set1_epi32(from.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn add(sums: __m256i, weights: __m256i, inputs: __m256i) -> __m256i {
        // SAFETY: the caller promises a machine with AVX-VNNI; no memory is touched.
        unsafe { _mm256_dpbusd_avx_epi32(sums, weights, inputs) }
    }
    #[inline(always)]
    unsafe fn to_float(sums: __m256i) -> __m256 {
        // SAFETY: the caller promises a machine with AVX2; no memory is touched.
        unsafe { _mm256_cvtepi32_ps(sums) }
    }
}
