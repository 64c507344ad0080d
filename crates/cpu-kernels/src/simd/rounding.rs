//! Rounding to whole numbers of 8 bits, and what it needs of an instruction set besides [`Simd`].
//!
//! Numbers stay in registers: the compiler's own vectors of arrays went through the stack.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![cfg_attr(
    target_arch = "x86_64",
    allow(clippy::wildcard_imports, reason = "the intrinsics carry their origin in their names")
)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use crate::simd::{Simd, portable::Portable};
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2::Avx2, avx512::Avx512};

/// The largest whole number, and less the sign the smallest one.
pub(crate) const LARGEST: f32 = 127.0;
/// Adding 1.5 · 2²³ leaves no room for a fraction, and the whole number in the lowest bits.
const NO_FRACTION: f32 = 12_582_912.0;
/// All bits of a number but its sign. Such bits are in the order of the numbers; what is no number is above infinity.
pub(crate) const SIZE: i32 = i32::MAX;

/// What rounding needs of an instruction set.
///
/// # Safety
///
/// As [`Simd`]. `to_whole` writes `N · LANES` numbers, for products of at most 2²².
pub(crate) trait Rounding: Simd {
    /// The largest [`SIZE`] of all lanes.
    unsafe fn largest_size<const N: usize>(x: &[Self::V; N]) -> i32;
    /// The products with `inverse`, rounded, and their sum.
    unsafe fn to_whole<const N: usize>(x: &[Self::V; N], inverse: f32, to: *mut i8) -> i32;
}

/// The whole number in the lowest byte.
fn lowest_byte(x: f32, inverse: f32) -> i8 {
    (x * inverse + NO_FRACTION).to_bits() as i8
}

impl<const L: usize> Rounding for Portable<L> {
    #[inline(always)]
    unsafe fn largest_size<const N: usize>(x: &[[f32; L]; N]) -> i32 {
        x.as_flattened().iter().fold(0, |largest, x| (x.to_bits() as i32 & SIZE).max(largest))
    }
    #[inline(always)]
    unsafe fn to_whole<const N: usize>(x: &[[f32; L]; N], inverse: f32, to: *mut i8) -> i32 {
        let mut sum = 0;
        for (i, x) in x.as_flattened().iter().enumerate() {
            let number = lowest_byte(*x, inverse);
            sum += i32::from(number);
            // SAFETY: the caller lets as many numbers be written as there are lanes.
            unsafe { to.add(i).write(number) };
        }
        sum
    }
}

#[cfg(target_arch = "x86_64")]
impl Rounding for Avx512 {
    #[inline(always)]
    unsafe fn largest_size<const N: usize>(x: &[__m512; N]) -> i32 {
        // SAFETY: the caller promises a machine with AVX-512; no memory is touched.
        unsafe {
            let mut largest = _mm512_setzero_si512();
            for x in x {
                let size = _mm512_and_si512(_mm512_castps_si512(*x), _mm512_set1_epi32(SIZE));
                largest = _mm512_max_epi32(largest, size);
            }
            let half =
                _mm256_max_epi32(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64::<1>(largest));
            largest_of_eight(half)
        }
    }
    #[inline(always)]
    unsafe fn to_whole<const N: usize>(x: &[__m512; N], inverse: f32, to: *mut i8) -> i32 {
        // SAFETY: the caller promises a machine with AVX-512, and room for a number of each lane.
        unsafe {
            let (inverse, no_fraction) = (_mm512_set1_ps(inverse), _mm512_set1_ps(NO_FRACTION));
            let mut sums = _mm512_setzero_si512();
            for (i, x) in x.iter().enumerate() {
                let rounded = _mm512_castps_si512(_mm512_add_ps(_mm512_mul_ps(*x, inverse), no_fraction));
                _mm_storeu_si128(to.add(16 * i).cast(), _mm512_cvtepi32_epi8(rounded));
                sums = _mm512_add_epi32(sums, rounded);
            }
            let half = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64::<1>(sums));
            sum_of_eight(half).wrapping_sub(bits_without_fraction(16 * N))
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Rounding for Avx2 {
    #[inline(always)]
    unsafe fn largest_size<const N: usize>(x: &[__m256; N]) -> i32 {
        // SAFETY: the caller promises a machine with AVX2; no memory is touched.
        unsafe {
            let mut largest = _mm256_setzero_si256();
            for x in x {
                let size = _mm256_and_si256(_mm256_castps_si256(*x), _mm256_set1_epi32(SIZE));
                largest = _mm256_max_epi32(largest, size);
            }
            largest_of_eight(largest)
        }
    }
    #[inline(always)]
    unsafe fn to_whole<const N: usize>(x: &[__m256; N], inverse: f32, to: *mut i8) -> i32 {
        // SAFETY: the caller promises a machine with AVX2, and room for a number of each lane.
        unsafe {
            let (inverse, no_fraction) = (_mm256_set1_ps(inverse), _mm256_set1_ps(NO_FRACTION));
            let mut sums = _mm256_setzero_si256();
            for (i, x) in x.iter().enumerate() {
                let rounded = _mm256_castps_si256(_mm256_add_ps(_mm256_mul_ps(*x, inverse), no_fraction));
                sums = _mm256_add_epi32(sums, rounded);
                // The lowest bytes of all lanes: those of each half beside each other, then both halves'.
                let pick = _mm256_set1_epi32(0x0c08_0400);
                let bytes = _mm256_shuffle_epi8(rounded, pick);
                let halves =
                    _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes));
                _mm_storel_epi64(to.add(8 * i).cast(), halves);
            }
            sum_of_eight(sums).wrapping_sub(bits_without_fraction(8 * N))
        }
    }
}

/// What so many lanes of [`NO_FRACTION`] add to a sum of bits.
#[cfg(target_arch = "x86_64")]
const fn bits_without_fraction(lanes: usize) -> i32 {
    (NO_FRACTION.to_bits() as i32).wrapping_mul(lanes as i32)
}

/// # Safety
///
/// A machine with AVX2.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn largest_of_eight(x: __m256i) -> i32 {
    // SAFETY: the caller promises a machine with AVX2; no memory is touched.
    unsafe {
        let x = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
        let x = _mm_max_epi32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
        _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x)))
    }
}

/// # Safety
///
/// A machine with AVX2.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn sum_of_eight(x: __m256i) -> i32 {
    // SAFETY: the caller promises a machine with AVX2; no memory is touched.
    unsafe {
        let x = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
        let x = _mm_add_epi32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
        _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x)))
    }
}
