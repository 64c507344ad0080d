//! Lanes of AVX-512 F.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(clippy::wildcard_imports, reason = "the intrinsics carry their origin in their names")]

use std::arch::x86_64::*;

use half::bf16;

use crate::simd::Simd;

pub(crate) struct Avx512;

macro_rules! avx512 {
    ($body:expr) => {
        // SAFETY: the caller promises a machine with AVX-512 F, and memory that may be touched.
        unsafe { $body }
    };
}

impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const SCORE_ROWS: usize = 4;
    const VALUE_ROWS: usize = 2;
    const STREAM_ROWS: usize = 6;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        avx512!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        avx512!(_mm512_loadu_ps(from))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> __m512 {
        avx512!({
            let halves = _mm256_loadu_si256(from.cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        })
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        avx512!(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())))
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m512) {
        avx512!(_mm512_storeu_ps(to, x));
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut bf16, x: __m512) {
        avx512!({
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let halves = _mm512_srli_epi32::<16>(_mm512_mask_mov_epi32(rounded, is_nan, quiet));
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(halves));
        });
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m512 {
        avx512!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))))
    }
    #[inline(always)]
    unsafe fn load_pair_bf16(from: *const u16) -> [__m512; 2] {
        avx512!({
            let pairs = _mm512_loadu_si512(from.cast());
            let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(odd)]
        })
    }
    #[inline(always)]
    fn prefetch(from: *const u8) {
        // SAFETY: any machine with AVX-512 has it, and it touches nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) }
    }
    #[inline(always)]
    fn prefetch_near(from: *const u8) {
        // SAFETY: any machine with AVX-512 has it, and it touches nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        avx512!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    unsafe fn round(x: __m512) -> __m512 {
        avx512!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x))
    }
    #[inline(always)]
    unsafe fn scale_by_power(y: __m512, n: __m512) -> __m512 {
        avx512!(_mm512_scalef_ps(y, n))
    }
    #[inline(always)]
    unsafe fn zero_below(x: __m512, limit: __m512, y: __m512) -> __m512 {
        avx512!(_mm512_mask_mov_ps(y, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, limit), _mm512_setzero_ps()))
    }
    #[inline(always)]
    unsafe fn sum(x: __m512) -> f32 {
        avx512!(_mm512_reduce_add_ps(x))
    }
    #[inline(always)]
    unsafe fn largest(x: __m512) -> f32 {
        avx512!(_mm512_reduce_max_ps(x))
    }
    #[inline(always)]
    unsafe fn store_sums([a, b, c, d]: [__m512; 4], to: *mut f32) {
        avx512!({
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); // in each quarter: a b a b
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let low = _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd); // in each quarter: a b c d
            let high = _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd);
            let abcd = _mm512_add_ps(low, high);
            let swapped = _mm512_shuffle_f32x4::<0b01_00_11_10>(abcd, abcd); // the other half
            let halves = _mm512_castps512_ps256(_mm512_add_ps(abcd, swapped));
            let sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
            _mm_storeu_ps(to, sums);
        });
    }
}
