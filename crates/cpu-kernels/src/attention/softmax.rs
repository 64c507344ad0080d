//! What becomes of a row's scores over one chunk of the context: soft cap, `ALiBi`, exponentials.

#![allow(clippy::inline_always, reason = "see `simd`")]

use std::ops::Range;

use crate::{
    attention::{options::AttentionOptions, products::CHUNK},
    simd::{Simd, exp, tanh},
};

/// The online softmax of a row: the largest score so far, and the sum of exponentials relative to it.
#[derive(Clone, Copy)]
pub(crate) struct Softmax {
    pub(crate) largest: f32,
    pub(crate) sum: f32,
}

impl Softmax {
    /// Of no score.
    const EMPTY: Self = Self { largest: f32::NEG_INFINITY, sum: 0.0 };

    /// Of what a head's rows have before any key: its sink, if it has one.
    pub(crate) fn of(options: &AttentionOptions<'_>, head: usize) -> Self {
        options.sinks.get(head).map_or(Self::EMPTY, |&sink| Self { largest: sink, sum: 1.0 })
    }
}

/// Soft cap and `ALiBi`, where the model has them. `distance` is the chunk's first position less the query's.
///
/// # Safety
///
/// The machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn bend<S: Simd>(
    options: &AttentionOptions<'_>,
    head: usize,
    distance: f32,
    scores: &mut [f32; CHUNK],
) {
    if let Some(cap) = options.soft_cap {
        for j in (0..CHUNK).step_by(S::LANES) {
            // SAFETY: the lanes of `S` divide CHUNK.
            unsafe {
                let at = scores.as_mut_ptr().add(j);
                S::store(at, S::mul(S::splat(cap), tanh::<S>(S::mul(S::load(at), S::splat(1.0 / cap)))));
            }
        }
    }
    if let Some(&slope) = options.alibi_slopes.get(head) {
        for (j, score) in scores.iter_mut().enumerate() {
            *score += slope * (distance + j as f32);
        }
    }
}

/// Scores become exponentials relative to the largest score so far, 0 outside `range`.
///
/// Returns what the sums over earlier chunks are to be multiplied with.
///
/// # Safety
///
/// The machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn soften<S: Simd>(
    scores: &mut [f32; CHUNK],
    range: &Range<usize>,
    softmax: &mut Softmax,
) -> f32 {
    scores[..range.start].fill(f32::NEG_INFINITY);
    scores[range.end..].fill(f32::NEG_INFINITY);
    let at = scores.as_mut_ptr();
    // SAFETY: the lanes of `S` divide CHUNK.
    unsafe {
        let mut largest = S::splat(softmax.largest);
        for j in (0..CHUNK).step_by(S::LANES) {
            largest = S::max(largest, S::load(at.add(j)));
        }
        let largest = S::largest(largest);
        let factor = if largest > softmax.largest { (softmax.largest - largest).exp() } else { 1.0 };
        let negated = S::splat(-largest);
        let mut sum = S::splat(0.0);
        for j in (0..CHUNK).step_by(S::LANES) {
            let p = exp::<S>(S::add(S::load(at.add(j)), negated));
            S::store(at.add(j), p);
            sum = S::add(sum, p);
        }
        softmax.sum = softmax.sum * factor + S::sum(sum);
        softmax.largest = largest;
        factor
    }
}
