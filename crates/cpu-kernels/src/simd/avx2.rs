//! Lanes of AVX2 with FMA and F16C.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(clippy::wildcard_imports, reason = "the intrinsics carry their origin in their names")]

use std::arch::x86_64::*;

use half::bf16;

use crate::simd::Simd;

pub(crate) struct Avx2;

macro_rules! avx2 {
    ($body:expr) => {
        // SAFETY: the caller promises a machine with AVX2, FMA and F16C, and memory that may be touched.
        unsafe { $body }
    };
}

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const SCORE_ROWS: usize = 2;
    const VALUE_ROWS: usize = 1;
    const STREAM_ROWS: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        avx2!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        avx2!(_mm256_loadu_ps(from))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> __m256 {
        avx2!({
            let halves = _mm_loadu_si128(from.cast());
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
        })
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m256 {
        avx2!(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())))
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m256) {
        avx2!(_mm256_storeu_ps(to, x));
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut bf16, x: __m256) {
        avx2!({
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let halves = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, is_nan));
            let (low, high) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
            _mm_storeu_si128(to.cast(), _mm_packus_epi32(low, high));
        });
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m256 {
        avx2!(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))))
    }
    #[inline(always)]
    unsafe fn load_pair_bf16(from: *const u16) -> [__m256; 2] {
        avx2!({
            let pairs = _mm256_loadu_si256(from.cast());
            let odd = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(odd)]
        })
    }
    #[inline(always)]
    fn prefetch(from: *const u8) {
        // SAFETY: any machine with AVX2 has it, and it touches nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) }
    }
    #[inline(always)]
    fn prefetch_near(from: *const u8) {
        // SAFETY: any machine with AVX2 has it, and it touches nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        avx2!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    unsafe fn round(x: __m256) -> __m256 {
        avx2!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x))
    }
    #[inline(always)]
    unsafe fn scale_by_power(y: __m256, n: __m256) -> __m256 {
        avx2!({
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
        })
    }
    #[inline(always)]
    unsafe fn zero_below(x: __m256, limit: __m256, y: __m256) -> __m256 {
        avx2!(_mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, limit), y))
    }
    #[inline(always)]
    unsafe fn sum(x: __m256) -> f32 {
        avx2!({
            let halves = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let pairs = _mm_add_ps(halves, _mm_movehl_ps(halves, halves));
            _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)))
        })
    }
    #[inline(always)]
    unsafe fn largest(x: __m256) -> f32 {
        avx2!({
            let halves = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let pairs = _mm_max_ps(halves, _mm_movehl_ps(halves, halves));
            _mm_cvtss_f32(_mm_max_ss(pairs, _mm_movehdup_ps(pairs)))
        })
    }
    #[inline(always)]
    unsafe fn store_sums([a, b, c, d]: [__m256; 4], to: *mut f32) {
        avx2!({
            let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)); // in each half: a b a b
            let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let low = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd); // in each half: a b c d
            let high = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
            let abcd = _mm256_add_ps(low, high);
            _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps::<1>(abcd)));
        });
    }
}
