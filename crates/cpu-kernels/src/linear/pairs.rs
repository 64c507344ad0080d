//! Products of weights of `bf16` whose inputs lie in pairs: `vdpbf16ps`, which adds two products of numbers of 16 bits to a
//! sum of 32, where activations have 16 bits, too; multiply-adds of widened weights where they have 32.
//!
//! Pieces, and the order in which they are added, are those of [`crate::linear::product`]. With activations of 32 bits the bits are
//! the same as with weights in the other order. `vdpbf16ps` takes a pair at once, and processors may round within it in
//! their own way, so its sums are compared with plain code before the first use, and it is not used where they are wrong.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(clippy::wildcard_imports, reason = "the intrinsics carry their origin in their names")]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over registers, of which several arrays are indexed alike"
)]

use std::{arch::x86_64::*, sync::OnceLock};

use half::bf16;

use crate::{
    linear::{
        panel::{CHUNK, PANEL_VECTORS, Product},
        product::{ProductFn, WidenFn},
    },
    simd::{
        Simd, amx,
        avx512::Avx512,
        instructions,
        memory::{self, SECOND_ASK, WAITING_ROWS},
    },
};

/// Inputs that lie together.
pub(crate) const PAIR: usize = 2;
/// Outputs of a panel for AVX-512.
const OUTPUTS: usize = PANEL_VECTORS * LANES;
const LANES: usize = 16;
/// Bytes of a pair of inputs in a panel.
const PAIR_BYTES: usize = OUTPUTS * PAIR * 2;
/// Bytes that are asked for at once.
const LINE: usize = 64;
/// The second number of each pair of a vector.
const SECOND: __mmask32 = 0xaaaa_aaaa;

/// The forms of the product: entry `r − 1` takes `r` rows.
#[derive(Debug)]
pub(crate) struct Pairs {
    /// Of activations of 16 bits.
    pub(crate) bf16: &'static [ProductFn<bf16>],
    /// Of activations of 32 bits.
    pub(crate) f32: &'static [ProductFn],
    /// Weights as panels of `f32`.
    pub(crate) widen: WidenFn,
}

/// The products of this machine; None where it has none, where they are wrong, or where it has a matrix unit, which takes
/// weights in another order.
pub(crate) fn available() -> Option<&'static Pairs> {
    static FOUND: OnceLock<bool> = OnceLock::new();
    let is_used = *FOUND.get_or_init(|| is_detected() && is_right(PAIRS.bf16));
    is_used.then_some(PAIRS)
}

/// Whether the machine has them but computes something else than plain code does.
pub(crate) fn is_refused() -> bool {
    is_detected() && available().is_none()
}

fn is_detected() -> bool {
    instructions::have_avx512_bf16() && !amx::is_available()
}

/// Pieces of the sums of `R` rows: what both forms share. `$asks_for_one`: whether one row asks for weights where each core reads one
/// stream; a Zen 4 reads ahead by itself at least as fast.
macro_rules! pieces {
    ($what:ident, $rows:ident, $asks_for_one:literal, |$a:ident, $b:ident, $place:ident, $sums:ident| $add:block) => {{
        let (mut $a, mut $b, mut ahead) = ($what.a, $what.b, $what.ahead);
        let (mut k, end) = ($what.first_k, $what.first_k + $what.num_k);
        // One tile, as its step ahead says: what is asked for is its own.
        let asks_near = PAIR * $what.ahead_step == PAIR_BYTES && memory::is_one_stream();
        while k < end {
            let chunk_end = k - k % CHUNK + CHUNK;
            let piece_end = end.min(chunk_end);
            let mut $sums = [[_mm512_setzero_ps(); PANEL_VECTORS]; $rows];
            let mut $place = k % CHUNK;
            while $place < k % CHUNK + (piece_end - k) {
                let mut line = 0;
                while line < PAIR * $what.ahead_step {
                    if !asks_near {
                        Avx512::prefetch(ahead.wrapping_add(line));
                    } else if $rows > WAITING_ROWS {
                        Avx512::prefetch(ahead.wrapping_add(line));
                        Avx512::prefetch_near($b.wrapping_add(SECOND_ASK + line));
                    } else if $rows > 1 || $asks_for_one {
                        Avx512::prefetch_near(ahead.wrapping_add(line));
                    }
                    line += LINE;
                }
                $add
                $b = $b.wrapping_add(PAIR_BYTES);
                ahead = ahead.wrapping_add(PAIR * $what.ahead_step);
                $place += PAIR;
            }
            for r in 0..$rows {
                for n in 0..PANEL_VECTORS {
                    let to = $what.c.add(r * OUTPUTS + n * LANES);
                    let before = if k == 0 { _mm512_setzero_ps() } else { _mm512_loadu_ps(to) };
                    _mm512_storeu_ps(to, _mm512_add_ps($sums[r][n], before));
                }
            }
            k = piece_end;
            if k == chunk_end {
                $a = $a.wrapping_add($what.chunk_stride);
            }
        }
    }};
}

/// The sums of `R` rows of 16 bits.
///
/// # Safety
///
/// The arrays are as [`Product`] says, with `R` rows, weights and inputs in pairs, an even number of them; the machine has
/// the instructions.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn narrow_rows<const R: usize>(what: &Product<bf16>) {
    // SAFETY: the caller gives arrays as `Product` says, with `R` rows, so every offset stays within them; any bits are
    // numbers of these vectors.
    unsafe {
        pieces!(what, R, false, |a, b, i, sums| {
            let weights = [
                bf16s(_mm512_loadu_si512(b.cast())),
                bf16s(_mm512_loadu_si512(b.add(PAIR_BYTES / 2).cast())),
            ];
            for r in 0..R {
                let pair = a.add(r * CHUNK + i).cast::<i32>().read_unaligned();
                let x = bf16s(_mm512_set1_epi32(pair));
                for n in 0..PANEL_VECTORS {
                    sums[r][n] = _mm512_dpbf16_ps(sums[r][n], weights[n], x);
                }
            }
        });
    }
}

/// The same bits as numbers of 16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16s(bits: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes that may have any bits.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(bits) }
}

/// The sums of `R` rows of 32 bits.
///
/// # Safety
///
/// As [`narrow_rows`].
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn wide_rows<const R: usize>(what: &Product) {
    // SAFETY: the caller gives arrays as `Product` says, with `R` rows, so every offset stays within them.
    unsafe {
        pieces!(what, R, true, |a, b, i, sums| {
            for input in 0..PAIR {
                let weights = if input == 0 { first(b) } else { second(b) };
                for r in 0..R {
                    let x = _mm512_set1_ps(*a.add(r * CHUNK + i + input));
                    for n in 0..PANEL_VECTORS {
                        sums[r][n] = _mm512_fmadd_ps(x, weights[n], sums[r][n]);
                    }
                }
            }
        });
    }
}

/// A panel's weights of the first input of a pair.
///
/// # Safety
///
/// The pair may be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn first(pair: *const u8) -> [__m512; PANEL_VECTORS] {
    // SAFETY: the caller lets both vectors be read.
    let both =
        unsafe { [_mm512_loadu_si512(pair.cast()), _mm512_loadu_si512(pair.add(PAIR_BYTES / 2).cast())] };
    [
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(both[0])),
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(both[1])),
    ]
}

/// Those of the second one.
///
/// # Safety
///
/// As [`first`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn second(pair: *const u8) -> [__m512; PANEL_VECTORS] {
    // By a mask of the load and not by one of bits, for which there is no register left.
    // SAFETY: the caller lets both vectors be read.
    unsafe {
        [
            _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(SECOND, pair.cast())),
            _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(SECOND, pair.add(PAIR_BYTES / 2).cast())),
        ]
    }
}

/// `num_k` steps of a panel as `f32`, `[k][output]`.
///
/// # Safety
///
/// As many weights may be read and written, an even number; the machine has the instructions.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn widen(from: *const u8, num_k: usize, to: *mut f32) {
    for pair in 0..num_k / PAIR {
        // SAFETY: the caller lets these weights be read and as many numbers be written.
        unsafe {
            let from = from.add(pair * PAIR_BYTES);
            let to = to.add(pair * PAIR * OUTPUTS);
            for (input, weights) in [first(from), second(from)].into_iter().enumerate() {
                for n in 0..PANEL_VECTORS {
                    _mm512_storeu_ps(to.add(input * OUTPUTS + n * LANES), weights[n]);
                }
            }
        }
    }
}

macro_rules! forms {
    ($function:ident: $($rows:literal)*) => {
        &[$($function::<$rows>),*]
    };
}

static PAIRS: &Pairs = &Pairs {
    bf16: forms!(narrow_rows: 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
    f32: forms!(wide_rows: 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
    widen,
};

/// Inputs of the product that is tried: more than a chunk.
const TRIAL_INPUTS: usize = CHUNK + 34;
/// How far its sums may be from plain ones, as a share of the sum of the products' sizes: 16 units in the last place.
const TRIAL_TOLERANCE: f64 = 16.0 / (1 << 24) as f64;

/// Whether each form gives the sums of a small product, and a row's bits whatever other rows there are.
fn is_right(forms: &[ProductFn<bf16>]) -> bool {
    const LARGEST_STEP: f32 = 16.0;
    let mut state = 1_u32;
    let mut number = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let fraction = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
        let power = ((state >> 4) % 32) as f32 - LARGEST_STEP;
        if state >> 29 == 0 { 0.0 } else { fraction * power.exp2() }
    };
    let rows = forms.len();
    let weights: Vec<bf16> = (0..TRIAL_INPUTS * OUTPUTS).map(|_| bf16::from_f32(number())).collect();
    // `[chunk][row][CHUNK]`, the last chunk as long as the others.
    let num_chunks = TRIAL_INPUTS.div_ceil(CHUNK);
    let x: Vec<bf16> = (0..num_chunks * rows * CHUNK).map(|_| bf16::from_f32(number())).collect();
    let sums_of = |form: ProductFn<bf16>, first: usize, count: usize| {
        let mut sums = vec![0.0_f32; count * OUTPUTS];
        let what = Product {
            a: x[first * CHUNK..].as_ptr(),
            chunk_stride: rows * CHUNK,
            first_k: 0,
            num_k: TRIAL_INPUTS,
            b: weights.as_ptr().cast(),
            c: sums.as_mut_ptr(),
            scales: std::ptr::null(),
            group_size: TRIAL_INPUTS,
            ahead: weights.as_ptr().cast(),
            ahead_step: 0,
            next_a: std::ptr::null(),
        };
        // SAFETY: the arrays have as many rows, inputs and outputs as `what` says; forms are tried only where their
        // instructions were found.
        unsafe { form(&what) };
        sums
    };
    let alone: Vec<Vec<f32>> = (0..rows).map(|row| sums_of(forms[0], row, 1)).collect();
    let is_near = |row: usize, output: usize| {
        let (mut sum, mut size) = (0.0_f64, 0.0_f64);
        for k in 0..TRIAL_INPUTS {
            let at = k / CHUNK * rows * CHUNK + row * CHUNK + k % CHUNK;
            let weight = weights[k / PAIR * PAIR * OUTPUTS + output * PAIR + k % PAIR];
            let product = x[at].to_f64() * weight.to_f64();
            sum += product;
            size += product.abs();
        }
        (f64::from(alone[row][output]) - sum).abs() <= TRIAL_TOLERANCE * size
    };
    let bits = |sums: &[f32]| sums.iter().map(|sum| sum.to_bits()).collect::<Vec<_>>();
    (0..rows).all(|row| (0..OUTPUTS).all(|output| is_near(row, output)))
        && (1..=rows).all(|count| {
            let together = sums_of(forms[count - 1], 0, count);
            together.chunks(OUTPUTS).zip(&alone).all(|(sums, alone)| bits(sums) == bits(alone))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plain sums of pairs, but `WRONG` added to one of the last row when there are three.
    unsafe fn plain<const R: usize, const WRONG: bool>(what: &Product<bf16>) {
        for r in 0..R {
            for output in 0..OUTPUTS {
                let mut total = 0.0;
                for k in 0..what.num_k {
                    let at = k / CHUNK * what.chunk_stride + r * CHUNK + k % CHUNK;
                    let weight = k / PAIR * PAIR * OUTPUTS + output * PAIR + k % PAIR;
                    // SAFETY: the caller gives arrays as `Product` says.
                    let (x, weight) =
                        unsafe { (*what.a.add(at), what.b.add(2 * weight).cast::<bf16>().read_unaligned()) };
                    total += x.to_f32() * weight.to_f32();
                }
                let is_wrong = WRONG && R == 3 && r == 2 && output == 5;
                // SAFETY: likewise, with room for the sums of `R` rows.
                unsafe { *what.c.add(r * OUTPUTS + output) = if is_wrong { total.next_up() } else { total } };
            }
        }
    }

    /// Sums of the first of each pair alone.
    unsafe fn halves<const R: usize>(what: &Product<bf16>) {
        // SAFETY: the caller gives arrays as `Product` says.
        unsafe {
            plain::<R, false>(&Product { ..*what });
            for place in 0..R * OUTPUTS {
                *what.c.add(place) *= 0.5;
            }
        }
    }

    #[test]
    fn forms_that_compute_something_else_are_not_used() {
        assert!(is_right(&[plain::<1, false>, plain::<2, false>, plain::<3, false>]));
        assert!(
            !is_right(&[plain::<1, true>, plain::<2, true>, plain::<3, true>]),
            "a bit of a row among others"
        );
        assert!(!is_right(&[halves::<1>, halves::<2>]), "wrong alone");
    }

    #[test]
    fn this_machines_forms_are_right() {
        assert_eq!(available().is_some(), is_detected());
        assert!(!is_refused());
    }
}
