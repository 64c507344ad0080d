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
    unsafe fn store(to: *mut f32, x: __m512) {
        avx512!(_mm512_storeu_ps(to, x));
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
