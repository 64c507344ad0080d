//! Multiplications from registers alone: the most that products can reach on a processor without its matrix unit, for
//! measurements.

use std::time::Instant;

#[cfg(target_arch = "x86_64")]
use crate::simd::instructions;
use crate::threads::Threads;

/// What is multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeakKind {
    /// Numbers of 32 bits.
    F32,
    /// Numbers of 16 bits, summed in 32.
    Bf16,
    /// Whole numbers of 8 bits, summed in 32.
    Int8,
}

/// Rounds of a thread before the time is looked at: about a millisecond.
const ROUNDS: usize = 100_000;
const NUM_TRIALS: usize = 20;

/// Operations per second of all threads together, a multiplication and its addition being two: the best of some trials.
/// None where the processor multiplies no such numbers, several in a lane.
#[must_use]
pub fn peak(kind: PeakKind, threads: &Threads) -> Option<f64> {
    let form = form(kind)?;
    let trial = || {
        let began = Instant::now();
        // SAFETY: `form` gives what the machine has the instructions of.
        threads.for_each(threads.num_threads(), true, |_| unsafe { (form.run)(ROUNDS) });
        began.elapsed().as_secs_f64()
    };
    let fastest = (0..NUM_TRIALS).map(|_| trial()).fold(f64::INFINITY, f64::min);
    Some((2 * form.products * ROUNDS * threads.num_threads()) as f64 / fastest)
}

/// A loop, and the products of one of its rounds.
struct Form {
    run: unsafe fn(usize),
    products: usize,
}

#[cfg(not(target_arch = "x86_64"))]
fn form(_kind: PeakKind) -> Option<Form> {
    None
}

#[cfg(target_arch = "x86_64")]
fn form(kind: PeakKind) -> Option<Form> {
    let of = |run, lanes: usize, each: usize| Some(Form { run, products: x86::SUMS * lanes * each });
    match kind {
        PeakKind::F32 if instructions::have_avx512() => of(x86::f32_avx512, 16, 1),
        PeakKind::F32 if instructions::have_avx2() => of(x86::f32_avx2, 8, 1),
        PeakKind::Bf16 if instructions::have_avx512_bf16() => of(x86::bf16_avx512, 16, 2),
        PeakKind::Int8 if instructions::have_avx512_vnni() => of(x86::int8_avx512, 16, 4),
        PeakKind::Int8 if instructions::have_avx_vnni() => of(x86::int8_avx, 8, 4),
        PeakKind::Int8 if instructions::have_avx2() => of(x86::int8_avx2, 8, 4),
        _ => None,
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    #![allow(clippy::wildcard_imports, reason = "the intrinsics carry their origin in their names")]

    use std::{arch::x86_64::*, hint::black_box};

    /// Sums of a round, none of which waits for another: enough to hide how long an addition takes.
    pub(super) const SUMS: usize = 12;

    macro_rules! loops {
        ($($name:ident: $features:literal, $zero:expr, |$sum:ident| $add:expr;)*) => {
            $(
                /// # Safety
                ///
                /// A machine with the instructions.
                #[target_feature(enable = $features)]
                pub(super) unsafe fn $name(rounds: usize) {
                    let mut sums = [$zero; SUMS];
                    for _ in 0..rounds {
                        for $sum in &mut sums {
                            $add;
                        }
                    }
                    black_box(sums);
                }
            )*
        };
    }

    loops! {
        f32_avx512: "avx512f", _mm512_set1_ps(1.0),
            |sum| *sum = _mm512_fmadd_ps(*sum, _mm512_set1_ps(0.5), _mm512_set1_ps(0.25));
        f32_avx2: "avx2,fma", _mm256_set1_ps(1.0),
            |sum| *sum = _mm256_fmadd_ps(*sum, _mm256_set1_ps(0.5), _mm256_set1_ps(0.25));
        bf16_avx512: "avx512f,avx512bf16", _mm512_setzero_ps(),
            |sum| *sum = _mm512_dpbf16_ps(*sum, ones(), ones());
        int8_avx512: "avx512f,avx512vnni", _mm512_setzero_si512(),
            |sum| *sum = _mm512_dpbusd_epi32(*sum, _mm512_set1_epi32(0x0101_0101), _mm512_set1_epi32(0x0101_0101));
        int8_avx: "avx2,avxvnni", _mm256_setzero_si256(),
            |sum| *sum = _mm256_dpbusd_avx_epi32(*sum, _mm256_set1_epi32(0x0101_0101), _mm256_set1_epi32(0x0101_0101));
        int8_avx2: "avx2", _mm256_set1_epi8(1),
            |sum| *sum = _mm256_add_epi32(
                _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), *sum), _mm256_set1_epi16(1)),
                *sum,
            );
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn ones() -> __m512bh {
        const ONES: i32 = 0x3f80_3f80;
        // SAFETY: both are 64 bytes that may have any bits.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(ONES)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smaller_numbers_are_multiplied_no_slower() {
        let threads = Threads::new(1).expect("a thread");
        let [wide, half, byte] =
            [PeakKind::F32, PeakKind::Bf16, PeakKind::Int8].map(|kind| peak(kind, &threads));
        assert!(wide.is_none_or(|found| found > 1e8), "{wide:?}");
        // Twice and four times as many products to an instruction; the machine is shared, so only that it counts them.
        assert!(half.is_none_or(|half| half > 0.2 * wide.unwrap_or(0.0)), "{half:?} after {wide:?}");
        assert!(byte.is_none_or(|byte| byte > 0.2 * wide.unwrap_or(0.0)), "{byte:?} after {wide:?}");
    }
}
