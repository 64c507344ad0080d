//! Rounds the blocks of a row to whole numbers of 8 bits, compiled for each instruction set.
//!
//! A block's numbers are read once and stay in registers. As arrays they lay on the stack; where that lay badly, which changed
//! from process to process, a block of 32 took 76 cycles of a Zen 4 longer, and products of eight rows 1.2 times as long.

#![allow(clippy::inline_always, reason = "see `simd`")]

#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2::Avx2, avx512::Avx512, instructions};
use crate::{
    number::Number,
    simd::{
        portable::Portable,
        rounding::{LARGEST, Rounding},
    },
};

/// Where a row's blocks go: of each array the place of the first, the others `stride` rows further.
pub(super) struct RowTarget {
    pub(super) numbers: *mut i8,
    pub(super) scales: *mut f32,
    /// −128 times the sum of a block's numbers.
    pub(super) starts: *mut i32,
    pub(super) stride: usize,
}

/// Round a row, with the widest instructions that there are; the numbers are the same with any.
///
/// # Safety
///
/// The places of `to` may be written, in as many blocks of 16 or 32 as the row takes, and are no other thread's.
pub(super) unsafe fn round_row<X: Number>(from: &[X], block: usize, to: &RowTarget) {
    // SAFETY: the caller lets the row's places in every block be written; forms with instructions are called where these were
    // found.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        {
            if instructions::have_avx512_vnni() {
                return avx512(from, block, to);
            }
            if instructions::have_avx2() {
                return avx2(from, block, to);
            }
        }
        portable(from, block, to);
    }
}

/// A form of [`round_blocks`] for blocks of 16 and of 32.
macro_rules! form {
    ($name:ident, $lanes:ty, $of_16:literal, $of_32:literal $(, $features:literal)?) => {
        /// # Safety
        ///
        /// As [`round_row`], and a machine with the instructions.
        $(#[target_feature(enable = $features)])?
        unsafe fn $name<X: Number>(from: &[X], block: usize, to: &RowTarget) {
            // SAFETY: the caller lets the row's places in every block be written, and promises the instructions.
            unsafe {
                if block == 16 {
                    round_blocks::<$lanes, X, 16, $of_16>(from, to);
                } else {
                    round_blocks::<$lanes, X, 32, $of_32>(from, to);
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
form!(avx512, Avx512, 1, 2, "avx512f,avx512bw,avx512vl,avx2");
#[cfg(target_arch = "x86_64")]
form!(avx2, Avx2, 2, 4, "avx2,fma,f16c");
form!(portable, Portable<16>, 1, 2);

/// # Safety
///
/// As [`round_row`], with blocks of `BLOCK`, which are `N` vectors, and a machine with the instructions of `R`.
#[inline(always)]
unsafe fn round_blocks<R: Rounding, X: Number, const BLOCK: usize, const N: usize>(
    from: &[X],
    to: &RowTarget,
) {
    let (whole, rest) = from.as_chunks::<BLOCK>();
    for (index, from) in whole.iter().enumerate() {
        // SAFETY: the caller lets the place of this block be written; a whole block is read.
        unsafe { round_block::<R, X, BLOCK, N>(from, index * to.stride, to) };
    }
    if !rest.is_empty() {
        let mut last = [X::narrow(0.0); BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        // SAFETY: the caller lets the place of the last block be written.
        unsafe { round_block::<R, X, BLOCK, N>(&last, whole.len() * to.stride, to) };
    }
}

/// Round a block, and note its scale and −128 times the sum of its numbers.
///
/// # Safety
///
/// As [`round_blocks`]; the `place` of each array of `to` may be written.
#[inline(always)]
unsafe fn round_block<R: Rounding, X: Number, const BLOCK: usize, const N: usize>(
    from: &[X; BLOCK],
    place: usize,
    to: &RowTarget,
) {
    debug_assert_eq!(BLOCK, N * R::LANES);
    // SAFETY: the caller lets this place be written; the block has `N` vectors of numbers, and the machine the instructions.
    unsafe {
        let mut x = [X::load::<R>(from.as_ptr()); N];
        for (i, x) in x.iter_mut().enumerate().skip(1) {
            *x = X::load::<R>(from.as_ptr().add(i * R::LANES));
        }
        let largest = f32::from_bits(R::largest_size(&x) as u32);
        let inverse = LARGEST / largest;
        let numbers = to.numbers.add(place * BLOCK);
        let (scale, sum) = if largest.is_finite() && inverse.is_finite() {
            (largest / LARGEST, R::to_whole(&x, inverse, numbers))
        } else {
            // A block of zeros, or of numbers so small that their scale is none, is zeros.
            numbers.write_bytes(0, BLOCK);
            (if largest.is_finite() { 0.0 } else { f32::NAN }, 0)
        };
        to.scales.add(place).write(scale);
        to.starts.add(place).write(-128 * sum);
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::simd::rounding::SIZE;

    /// The naive version: number by number, with nothing in registers on purpose.
    fn naive(x: &[f32]) -> (Vec<i8>, f32, i32) {
        let largest = x.iter().map(|x| x.to_bits() & SIZE as u32).max().map_or(0.0, f32::from_bits);
        let inverse = LARGEST / largest;
        if !largest.is_finite() || !inverse.is_finite() {
            return (vec![0; x.len()], if largest.is_finite() { 0.0 } else { f32::NAN }, 0);
        }
        let numbers: Vec<i8> = x.iter().map(|x| (x * inverse).round_ties_even() as i8).collect();
        let sum = numbers.iter().map(|&number| i32::from(number)).sum::<i32>();
        (numbers, largest / LARGEST, -128 * sum)
    }

    /// A row whose blocks are odd in different ways.
    fn row(len: usize) -> Vec<f32> {
        let mut state = 7_u32;
        let mut x = Vec::new();
        while x.len() < len {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let number = (state >> 8) as f32 / 1e6 - 8.0;
            let block = x.len() / 32;
            x.push(match block {
                1 => 0.0,
                2 => -number * 1e30,
                3 => number * 1e-44,
                4 if x.len() % 32 == 5 => f32::NAN,
                5 if x.len() % 32 == 21 => f32::NEG_INFINITY,
                6 => (x.len() % 32) as f32 - 0.5,
                7 => -0.0,
                8 if x.len() % 32 > 0 => number * 1e-3,
                _ => number,
            });
        }
        x
    }

    type RoundFn<X> = unsafe fn(&[X], usize, &RowTarget);

    fn forms<X: Number>() -> Vec<(&'static str, RoundFn<X>)> {
        let mut forms: Vec<(&'static str, RoundFn<X>)> = vec![("any", round_row), ("portable", portable)];
        #[cfg(target_arch = "x86_64")]
        {
            if instructions::have_avx2() {
                forms.push(("avx2", avx2));
            }
            if instructions::have_avx512_vnni() {
                forms.push(("avx512", avx512));
            }
        }
        forms
    }

    fn check<X: Number>(len: usize, block: usize) {
        const STRIDE: usize = 3;
        let x: Vec<X> = row(len).into_iter().map(X::narrow).collect();
        let mut wide: Vec<f32> = x.iter().map(|x| x.widen()).collect();
        let num_blocks = len.div_ceil(block);
        wide.resize(num_blocks * block, 0.0);
        for (name, form) in forms::<X>() {
            let places = num_blocks * STRIDE;
            let (mut numbers, mut scales, mut starts) =
                (vec![99_i8; places * block], vec![9.0_f32; places], vec![9; places]);
            let to = RowTarget {
                numbers: numbers.as_mut_ptr(),
                scales: scales.as_mut_ptr(),
                starts: starts.as_mut_ptr(),
                stride: STRIDE,
            };
            // SAFETY: the arrays have `STRIDE` places of each block; a form is listed where its instructions were found.
            unsafe { form(&x, block, &to) };
            for (index, from) in wide.chunks(block).enumerate() {
                let (expected, scale, start) = naive(from);
                let place = index * STRIDE;
                let what = format!("{name}, block {index} of {block}");
                assert_eq!(numbers[place * block..][..block], expected, "{what}");
                assert_eq!(scales[place].to_bits(), scale.to_bits(), "{what}");
                assert_eq!(starts[place], start, "{what}");
                assert!(numbers[(place + 1) * block..][..2 * block].iter().all(|&x| x == 99), "{what}");
            }
        }
    }

    #[test]
    fn every_form_rounds_as_the_naive_one() {
        for block in [16, 32] {
            for len in [1, 15, 16, 31, 32, 33, 320, 333] {
                check::<f32>(len, block);
                check::<bf16>(len, block);
            }
        }
    }
}
