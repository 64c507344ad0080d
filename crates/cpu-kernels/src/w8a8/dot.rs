//! Four products of whole numbers of 8 bits and their sum, for each lane of an instruction set.

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

/// Inputs whose products one lane adds at once: those of an output lie side by side.
pub(crate) const QUAD: usize = 4;
/// What codes of 4 bits stand for, where weights are such: see [`crate::ZeroForm::Codes`].
pub(crate) const CODES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

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
    /// Weights of 4 bits of all lanes, four inputs each, as bytes.
    type Halves: Copy;
    /// Sums of a block of those.
    type HalfSums: Copy;
    /// The most rows whose totals stay in registers beside a block's sums; those of more rows lie in memory.
    const TOTAL_ROWS: usize = usize::MAX;

    /// What a block's sums begin with; `starts` is −128 times the sum of the block's activations, for forms that take 128 more
    /// than each weight.
    unsafe fn start(starts: *const i32) -> Self::Sums;
    /// `[output][input]`
    unsafe fn weights(from: *const i8) -> Self::Weights;
    unsafe fn inputs(from: *const i8) -> Self::Inputs;
    unsafe fn add(sums: Self::Sums, weights: Self::Weights, inputs: Self::Inputs) -> Self::Sums;
    /// The nearest numbers.
    unsafe fn to_float(sums: Self::Sums) -> <Self::Lanes as Simd>::V;
    /// `a · b + c`, rounded once on every processor.
    unsafe fn fma(
        a: <Self::Lanes as Simd>::V,
        b: <Self::Lanes as Simd>::V,
        c: <Self::Lanes as Simd>::V,
    ) -> <Self::Lanes as Simd>::V {
        // SAFETY: the caller promises a machine with the instructions of the lanes.
        unsafe { Self::Lanes::fma(a, b, c) }
    }

    /// What a block's sums of such weights begin with; `starts` as in [`Self::start`], of which a sixteenth is −8 times the
    /// sum of the activations, or 0 for weights that are counted from 0.
    unsafe fn half_start(starts: *const i32) -> Self::HalfSums;
    /// Weights of 4 bits, without a sign, in the upper halves of [`QUAD`] bytes for each lane.
    unsafe fn upper(from: *const u8) -> Self::Halves;
    /// Those in the lower halves.
    unsafe fn lower(from: *const u8) -> Self::Halves;
    unsafe fn add_half(sums: Self::HalfSums, weights: Self::Halves, inputs: Self::Inputs) -> Self::HalfSums;
    /// A block's sums, of at most 32 inputs.
    unsafe fn whole(sums: Self::HalfSums, starts: *const i32) -> Self::Sums;

    /// Weights of 4 bits that are codes, of the lower halves of [`QUAD`] bytes for each lane and of the upper ones, as what they
    /// stand for; see [`crate::ZeroForm::Codes`].
    unsafe fn codes(from: *const u8) -> [Self::Weights; 2];

    /// What a block's sums of weights of 6 bits begin with; a quarter of `starts` is −32 times the sum of the activations.
    unsafe fn six_start(starts: *const i32) -> Self::Sums;
    /// Weights of 6 bits, without a sign, of four quads: three have the lower bits of the bytes at three places, and one the
    /// upper two of each.
    unsafe fn sixes(from: [*const u8; 3]) -> [Self::Halves; QUAD];
    unsafe fn add_six(sums: Self::Sums, weights: Self::Halves, inputs: Self::Inputs) -> Self::Sums;
}

/// What codes stand for, for instructions that look up bytes.
#[cfg(target_arch = "x86_64")]
#[repr(align(16))]
struct Table([i8; 16]);

/// The lower halves of bytes.
const LOWER: i8 = 15;
/// The lower six bits of bytes.
const SIX: i8 = 63;

/// What the compiler makes of arrays.
pub(crate) struct PortableDot<const N: usize>;

impl<const N: usize> Dot for PortableDot<N> {
    type Lanes = Portable<N>;
    type Weights = [[i8; QUAD]; N];
    type Inputs = [i8; QUAD];
    type Sums = [i32; N];
    type Halves = [[u8; QUAD]; N];
    type HalfSums = [i32; N];

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
    #[inline(always)]
    unsafe fn fma(a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn half_start(_: *const i32) -> [i32; N] {
        [0; N]
    }
    #[inline(always)]
    unsafe fn upper(from: *const u8) -> [[u8; QUAD]; N] {
        // SAFETY: the caller lets the weights of all lanes be read at `from`.
        unsafe { from.cast::<[[u8; QUAD]; N]>().read_unaligned() }.map(|quad| quad.map(|pair| pair >> 4))
    }
    #[inline(always)]
    unsafe fn lower(from: *const u8) -> [[u8; QUAD]; N] {
        // SAFETY: the caller lets the weights of all lanes be read at `from`.
        let pairs = unsafe { from.cast::<[[u8; QUAD]; N]>().read_unaligned() };
        pairs.map(|quad| quad.map(|pair| pair & LOWER as u8))
    }
    #[inline(always)]
    unsafe fn add_half(sums: [i32; N], weights: [[u8; QUAD]; N], inputs: [i8; QUAD]) -> [i32; N] {
        std::array::from_fn(|i| {
            (0..QUAD).fold(sums[i], |sum, k| sum + i32::from(weights[i][k]) * i32::from(inputs[k]))
        })
    }
    #[inline(always)]
    unsafe fn whole(sums: [i32; N], starts: *const i32) -> [i32; N] {
        // SAFETY: the caller lets a number be read at `starts`.
        let start = unsafe { *starts } >> 4;
        sums.map(|sum| sum + start)
    }
    #[inline(always)]
    unsafe fn codes(from: *const u8) -> [[[i8; QUAD]; N]; 2] {
        let stand_for =
            |halves: [[u8; QUAD]; N]| halves.map(|quad| quad.map(|half| CODES[usize::from(half)]));
        // SAFETY: the caller lets the weights of all lanes be read at `from`.
        unsafe { [stand_for(Self::lower(from)), stand_for(Self::upper(from))] }
    }
    #[inline(always)]
    unsafe fn six_start(starts: *const i32) -> [i32; N] {
        // SAFETY: the caller lets a number be read at `starts`.
        [unsafe { *starts } >> 2; N]
    }
    #[inline(always)]
    unsafe fn sixes(from: [*const u8; 3]) -> [[[u8; QUAD]; N]; QUAD] {
        // SAFETY: the caller lets the weights of all lanes be read at each place.
        let [a, b, c] = from.map(|from| unsafe { from.cast::<[[u8; QUAD]; N]>().read_unaligned() });
        let low = |bytes: [[u8; QUAD]; N]| bytes.map(|quad| quad.map(|byte| byte & SIX as u8));
        let last = std::array::from_fn(|i| {
            std::array::from_fn(|k| a[i][k] >> 6 | b[i][k] >> 6 << 2 | c[i][k] >> 6 << 4)
        });
        [low(a), low(b), low(c), last]
    }
    #[inline(always)]
    unsafe fn add_six(sums: [i32; N], weights: [[u8; QUAD]; N], inputs: [i8; QUAD]) -> [i32; N] {
        // SAFETY: no memory is touched, and any machine has what arrays become.
        unsafe { Self::add_half(sums, weights, inputs) }
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
    type Halves = __m256i;
    /// In 16 bits, two in a lane, each of which takes half of a block's inputs and begins with half of the start, −4 times the
    /// sum of all inputs. So it is the sum of w − 4 times 16 inputs and −4 times 16 others: at most 16 · 127 · (11 + 4).
    type HalfSums = __m256i;

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
    #[inline(always)]
    unsafe fn half_start(starts: *const i32) -> __m256i {
        // SAFETY: the caller promises a machine with AVX2, and a number that may be read.
        unsafe { _mm256_set1_epi16((*starts >> 5) as i16) }
    }
    #[inline(always)]
    unsafe fn upper(from: *const u8) -> __m256i {
        // SAFETY: the caller promises a machine with AVX2, and 32 bytes that may be read.
        unsafe {
            let shifted = _mm256_srli_epi16::<4>(_mm256_loadu_si256(from.cast()));
            _mm256_and_si256(shifted, _mm256_set1_epi8(LOWER))
        }
    }
    #[inline(always)]
    unsafe fn lower(from: *const u8) -> __m256i {
        // SAFETY: the caller promises a machine with AVX2, and 32 bytes that may be read.
        unsafe { _mm256_and_si256(_mm256_loadu_si256(from.cast()), _mm256_set1_epi8(LOWER)) }
    }
    #[inline(always)]
    unsafe fn add_half(sums: __m256i, weights: __m256i, inputs: __m256i) -> __m256i {
        // SAFETY: the caller promises a machine with AVX2; no memory is touched.
        unsafe { _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, inputs)) }
    }
    #[inline(always)]
    unsafe fn whole(sums: __m256i, _: *const i32) -> __m256i {
        // SAFETY: the caller promises a machine with AVX2; no memory is touched.
        unsafe { _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) }
    }
    #[inline(always)]
    unsafe fn codes(from: *const u8) -> [(__m256i, __m256i); 2] {
        static TABLE: Table = Table(CODES);
        // SAFETY: the caller promises a machine with AVX2, and 32 bytes that may be read; the table has 16.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_load_si128(TABLE.0.as_ptr().cast()));
            let lower = _mm256_shuffle_epi8(table, Self::lower(from));
            let upper = _mm256_shuffle_epi8(table, Self::upper(from));
            [(lower, _mm256_abs_epi8(lower)), (upper, _mm256_abs_epi8(upper))]
        }
    }
    #[inline(always)]
    unsafe fn six_start(starts: *const i32) -> __m256i {
        // SAFETY: the caller promises a machine with AVX2, and a number that may be read.
        unsafe { _mm256_set1_epi32(*starts >> 2) }
    }
    #[inline(always)]
    unsafe fn sixes([a, b, c]: [*const u8; 3]) -> [__m256i; QUAD] {
        // SAFETY: the caller promises a machine with AVX2, and 32 bytes at each place that may be read.
        unsafe {
            let (a, b, c) =
                (_mm256_loadu_si256(a.cast()), _mm256_loadu_si256(b.cast()), _mm256_loadu_si256(c.cast()));
            let low = _mm256_set1_epi8(SIX);
            let first = _mm256_and_si256(_mm256_srli_epi16::<6>(a), _mm256_set1_epi8(3));
            let second = _mm256_and_si256(_mm256_srli_epi16::<4>(b), _mm256_set1_epi8(12));
            let third = _mm256_and_si256(_mm256_srli_epi16::<2>(c), _mm256_set1_epi8(48));
            let last = _mm256_or_si256(_mm256_or_si256(first, second), third);
            [_mm256_and_si256(a, low), _mm256_and_si256(b, low), _mm256_and_si256(c, low), last]
        }
    }
    #[inline(always)]
    unsafe fn add_six(sums: __m256i, weights: __m256i, inputs: __m256i) -> __m256i {
        // A pair is at most 2 · 63 · 127, so one fits 16 bits, but three do not.
        // SAFETY: the caller promises a machine with AVX2; no memory is touched.
        unsafe {
            let pairs = _mm256_maddubs_epi16(weights, inputs);
            _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
}

/// Makes of a weight, by an exclusive or, the number without a sign that is 128 more.
#[cfg(target_arch = "x86_64")]
const SIGNS: i8 = i8::MIN;
/// Codes, likewise 128 more.
#[cfg(target_arch = "x86_64")]
const LIFTED_CODES: [i8; 16] = {
    let mut codes = CODES;
    let mut code = 0;
    while code < codes.len() {
        codes[code] ^= SIGNS;
        code += 1;
    }
    codes
};

/// Entries of both forms of `vpdpbusd`, which adds four products to a lane at once, one factor without a sign: weights of 8
/// bits and 128, or weights of 4 bits.
#[cfg(target_arch = "x86_64")]
macro_rules! vnni {
    (
        $name:ident, $lanes:ty, $vector:ty, $float:ty, $feature:literal, $total_rows:literal,
        $load:ident, $splat_8:ident, $splat_32:ident, $xor:ident, $and:ident, $or:ident, $dot:ident, $shift:ident,
        $convert:ident, $repeat:ident, $look_up:ident
    ) => {
        #[doc = concat!("`vpdpbusd` of ", $feature, ".")]
        pub(crate) struct $name;

        impl Dot for $name {
            type Lanes = $lanes;
            type Weights = $vector;
            type Inputs = $vector;
            type Sums = $vector;
            type Halves = $vector;
            type HalfSums = $vector;
            const TOTAL_ROWS: usize = $total_rows;

            #[inline(always)]
            unsafe fn start(starts: *const i32) -> $vector {
                // SAFETY: the caller promises a machine with the instructions, and a number that may be read.
                unsafe { $splat_32(*starts) }
            }
            #[inline(always)]
            unsafe fn weights(from: *const i8) -> $vector {
                // SAFETY: the caller promises a machine with the instructions, and weights of all lanes that may be read.
                unsafe { $xor($load(from.cast()), $splat_8(SIGNS)) }
            }
            #[inline(always)]
            unsafe fn inputs(from: *const i8) -> $vector {
                // SAFETY: the caller promises a machine with the instructions, and four activations that may be read.
                unsafe { $splat_32(from.cast::<i32>().read_unaligned()) }
            }
            #[inline(always)]
            unsafe fn add(sums: $vector, weights: $vector, inputs: $vector) -> $vector {
                // SAFETY: the caller promises a machine with the instructions; no memory is touched.
                unsafe { $dot(sums, weights, inputs) }
            }
            #[inline(always)]
            unsafe fn to_float(sums: $vector) -> $float {
                // SAFETY: the caller promises a machine with the instructions; no memory is touched.
                unsafe { $convert(sums) }
            }
            #[inline(always)]
            unsafe fn half_start(starts: *const i32) -> $vector {
                // SAFETY: the caller promises a machine with the instructions, and a number that may be read.
                unsafe { $splat_32(*starts >> 4) }
            }
            #[inline(always)]
            unsafe fn upper(from: *const u8) -> $vector {
                // SAFETY: the caller promises a machine with the instructions, and weights of all lanes that may be read.
                unsafe { $and($shift::<4>($load(from.cast())), $splat_8(LOWER)) }
            }
            #[inline(always)]
            unsafe fn lower(from: *const u8) -> $vector {
                // SAFETY: the caller promises a machine with the instructions, and weights of all lanes that may be read.
                unsafe { $and($load(from.cast()), $splat_8(LOWER)) }
            }
            #[inline(always)]
            unsafe fn add_half(sums: $vector, weights: $vector, inputs: $vector) -> $vector {
                // SAFETY: the caller promises a machine with the instructions; no memory is touched.
                unsafe { $dot(sums, weights, inputs) }
            }
            #[inline(always)]
            unsafe fn whole(sums: $vector, _: *const i32) -> $vector {
                sums
            }
            #[inline(always)]
            unsafe fn codes(from: *const u8) -> [$vector; 2] {
                static TABLE: Table = Table(LIFTED_CODES);
                // SAFETY: the caller promises a machine with the instructions, and weights of all lanes that may be read; the
                // table has 16 bytes.
                unsafe {
                    let table = $repeat(_mm_load_si128(TABLE.0.as_ptr().cast()));
                    [$look_up(table, Self::lower(from)), $look_up(table, Self::upper(from))]
                }
            }
            #[inline(always)]
            unsafe fn six_start(starts: *const i32) -> $vector {
                // SAFETY: the caller promises a machine with the instructions, and a number that may be read.
                unsafe { $splat_32(*starts >> 2) }
            }
            #[inline(always)]
            unsafe fn sixes([a, b, c]: [*const u8; 3]) -> [$vector; QUAD] {
                // SAFETY: the caller promises a machine with the instructions, and weights of all lanes at each place that
                // may be read.
                unsafe {
                    let (a, b, c) = ($load(a.cast()), $load(b.cast()), $load(c.cast()));
                    let low = $splat_8(SIX);
                    let first = $and($shift::<6>(a), $splat_8(3));
                    let second = $and($shift::<4>(b), $splat_8(12));
                    let third = $and($shift::<2>(c), $splat_8(48));
                    [$and(a, low), $and(b, low), $and(c, low), $or($or(first, second), third)]
                }
            }
            #[inline(always)]
            unsafe fn add_six(sums: $vector, weights: $vector, inputs: $vector) -> $vector {
                // SAFETY: the caller promises a machine with the instructions; no memory is touched.
                unsafe { $dot(sums, weights, inputs) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
vnni!(
    Vnni512Dot,
    Avx512,
    __m512i,
    __m512,
    "AVX-512",
    6,
    _mm512_loadu_si512,
    _mm512_set1_epi8,
    _mm512_set1_epi32,
    _mm512_xor_si512,
    _mm512_and_si512,
    _mm512_or_si512,
    _mm512_dpbusd_epi32,
    _mm512_srli_epi16,
    _mm512_cvtepi32_ps,
    _mm512_broadcast_i32x4,
    _mm512_shuffle_epi8
);
#[cfg(target_arch = "x86_64")]
vnni!(
    Vnni256Dot,
    Avx2,
    __m256i,
    __m256,
    "AVX-VNNI, for processors without AVX-512",
    4,
    _mm256_loadu_si256,
    _mm256_set1_epi8,
    _mm256_set1_epi32,
    _mm256_xor_si256,
    _mm256_and_si256,
    _mm256_or_si256,
    _mm256_dpbusd_avx_epi32,
    _mm256_srli_epi16,
    _mm256_cvtepi32_ps,
    _mm256_broadcastsi128_si256,
    _mm256_shuffle_epi8
);
