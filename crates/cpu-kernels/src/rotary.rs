//! Rotary positions: pairs of a head's features, turned by angles that grow with the token's position.

#![allow(clippy::inline_always, reason = "see `simd`")]

use std::sync::{Mutex, PoisonError};

use half::bf16;
use thiserror::Error;

use crate::{
    norm::row::{load, store},
    number::Number,
    simd::Simd,
    threads::Threads,
};

/// Tokens whose angles a thread computes at once.
const TOGETHER: usize = 64;

/// What is wrong with what heads are turned by.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RotaryError {
    /// Cosines and sines that do not fit the heads.
    #[error(
        "cosines and sines have {width} features, but heads of {head_dim} need an even number from 2 to {head_dim}"
    )]
    Width {
        /// As given.
        width: usize,
        /// Features of a head.
        head_dim: usize,
    },
    /// Cosines or sines of other tokens.
    #[error("{name} has {found} elements, but {expected} are needed")]
    Length {
        /// Which of them.
        name: &'static str,
        /// Its elements.
        found: usize,
        /// What it should have.
        expected: usize,
    },
}

/// What the tokens of a step are turned by: the first `width` features of each head, of which `i` and `i + width / 2` are a
/// pair.
#[derive(Debug, Clone, Copy)]
pub struct Rotary<'a> {
    /// `[num_tokens, width]`
    pub cos: &'a [f32],
    /// `[num_tokens, width]`; those of the first half are negative.
    pub sin: &'a [f32],
    /// Features that are turned.
    pub width: usize,
}

impl Rotary<'_> {
    /// Whether there are cosines and sines for all tokens, and no more than a head has features.
    pub(crate) fn check(&self, num_tokens: usize, head_dim: usize) -> Result<(), RotaryError> {
        let width = self.width;
        if width == 0 || width > head_dim || !width.is_multiple_of(2) {
            return Err(RotaryError::Width { width, head_dim });
        }
        let expected = num_tokens.saturating_mul(width);
        for (name, found) in [("cos", self.cos.len()), ("sin", self.sin.len())] {
            if found != expected {
                return Err(RotaryError::Length { name, found, expected });
            }
        }
        Ok(())
    }
}

/// How fast pairs of features turn from one position to the next.
#[derive(Debug, Clone)]
pub struct Turn {
    /// Radians per position of each pair.
    pub inv_freq: Vec<f32>,
    /// What turned heads are multiplied by.
    pub scaling: f32,
    /// Which part of a position turns each pair, where a token's position has several parts; pairs beyond the last entry are
    /// turned by the first part.
    pub axes: Vec<usize>,
}

/// Cosines and sines of the positions of the last step, of each kind of turn.
#[derive(Debug)]
pub struct Angles {
    turns: Vec<Turn>,
    positions: Vec<i32>,
    parts: usize,
    /// Of each kind, as in [`Rotary`].
    cos_sin: Vec<[Vec<f32>; 2]>,
}

impl Angles {
    /// Of no step yet.
    #[must_use]
    pub fn new(turns: Vec<Turn>) -> Self {
        let cos_sin = turns.iter().map(|_| [Vec::new(), Vec::new()]).collect();
        Self { turns, positions: Vec::new(), parts: 1, cos_sin }
    }

    /// Those of a step's tokens; they are computed once for calls with the same positions, one after the other.
    ///
    /// # Arguments
    ///
    /// * `positions`: `[parts, num_tokens]`. A pair is turned by the part that [`Turn::axes`] names, or by the first if there
    ///   are not so many. Parts that are equal turn heads as one part does, bit for bit.
    /// * `parts`: how many parts a position has, at least 1.
    pub fn of(&mut self, positions: &[i32], parts: usize, threads: &Threads) -> Vec<Rotary<'_>> {
        if self.parts != parts || self.positions != positions {
            self.positions.clear();
            for (turn, cos_sin) in self.turns.iter().zip(&mut self.cos_sin) {
                turn.fill(positions, parts.max(1), threads, cos_sin);
            }
            self.positions.extend(positions);
            self.parts = parts;
        }
        let widths = self.turns.iter().map(|turn| 2 * turn.inv_freq.len());
        self.cos_sin.iter().zip(widths).map(|([cos, sin], width)| Rotary { cos, sin, width }).collect()
    }
}

impl Turn {
    fn fill(&self, positions: &[i32], parts: usize, threads: &Threads, [cos, sin]: &mut [Vec<f32>; 2]) {
        let half = self.inv_freq.len();
        let num_tokens = positions.len() / parts;
        for numbers in [&mut *cos, &mut *sin] {
            numbers.clear();
            numbers.resize(num_tokens * 2 * half, 0.0);
        }
        // Where the part of each pair begins.
        let axes = self.axes.iter().map(|&axis| if axis < parts { axis } else { 0 });
        let begins: Vec<usize> =
            axes.chain(std::iter::repeat(0)).take(half).map(|axis| axis * num_tokens).collect();
        let together = 2 * half * TOGETHER;
        let parts = cos.chunks_mut(together).zip(sin.chunks_mut(together)).enumerate();
        let parts: Vec<_> = parts.map(Mutex::new).collect();
        threads.for_each(parts.len(), parts.len() > 1, |part| {
            // Each part is taken once: the lock is never waited for.
            let (number, (cos, sin)) = &mut *parts[part].lock().unwrap_or_else(PoisonError::into_inner);
            let rows = cos.chunks_exact_mut(2 * half).zip(sin.chunks_exact_mut(2 * half));
            for (token, (cos, sin)) in (*number * TOGETHER..).zip(rows) {
                let (cos, second_cos) = cos.split_at_mut(half);
                let (sin, second_sin) = sin.split_at_mut(half);
                for (i, (inv_freq, begin)) in self.inv_freq.iter().zip(&begins).enumerate() {
                    let (s, c) = (positions[begin + token] as f32 * inv_freq).sin_cos();
                    let (s, c) = (s * self.scaling, c * self.scaling);
                    (cos[i], second_cos[i], sin[i], second_sin[i]) = (c, c, -s, s);
                }
            }
        });
    }
}

/// One compiled form of [`turn`].
pub(crate) type TurnFn<E> = unsafe fn(*mut E, *const f32, *const f32, usize);

/// Turn a head's first `width` features in place.
///
/// # Safety
///
/// As many may be read and written, and as many cosines and sines read; the machine has the instructions of `S`.
#[inline(always)]
unsafe fn turn<S: Simd, E: Number>(head: *mut E, cos: *const f32, sin: *const f32, width: usize) {
    let half = width / 2;
    for at in (0..half).step_by(S::LANES) {
        let count = half - at;
        // SAFETY: the caller lets `width` features, cosines and sines be read, and the features be written; a vector that
        // is not full is of `count` elements, within its half.
        unsafe {
            let first = load::<S, E>(head.add(at), count);
            let second = load::<S, E>(head.add(half + at), count);
            let turned = |x, y, at: usize| {
                let (cos, sin) = (load::<S, f32>(cos.add(at), count), load::<S, f32>(sin.add(at), count));
                S::fma(y, sin, S::mul(x, cos))
            };
            store::<S, E>(head.add(at), turned(first, second, at), count);
            store::<S, E>(head.add(half + at), turned(second, first, half + at), count);
        }
    }
}

/// Entry points: the one place where it gets its instruction set.
macro_rules! entry_points {
    ($f32:ident, $bf16:ident, $simd:ty $(, $features:literal)?) => {
        /// # Safety
        ///
        /// See [`turn`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $f32(head: *mut f32, cos: *const f32, sin: *const f32, width: usize) {
            // SAFETY: the caller gives `width` features, cosines and sines; `Kernel::available` lists this form only where
            // its instructions were found.
            unsafe { turn::<$simd, f32>(head, cos, sin, width) }
        }
        /// # Safety
        ///
        /// See [`turn`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $bf16(head: *mut bf16, cos: *const f32, sin: *const f32, width: usize) {
            // SAFETY: the caller gives `width` features, cosines and sines; `Kernel::available` lists this form only where
            // its instructions were found.
            unsafe { turn::<$simd, bf16>(head, cos, sin, width) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
entry_points!(avx512_f32, avx512_bf16, crate::simd::avx512::Avx512, "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
entry_points!(avx2_f32, avx2_bf16, crate::simd::avx2::Avx2, "avx2,fma");
entry_points!(portable_f32, portable_bf16, crate::simd::portable::Portable<8>);
entry_points!(scalar_f32, scalar_bf16, crate::simd::portable::Portable<1>);
