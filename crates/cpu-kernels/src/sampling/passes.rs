//! The passes over a whole row of logits, compiled for each instruction set.

use crate::simd::Simd;
#[cfg(target_arch = "x86_64")]
use crate::simd::instructions;

/// Logits that are looked at together.
pub(super) const BLOCK: usize = 64;

/// What each logit of a pass is divided by, taken relative to, and dropped below.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cutoff {
    /// Above 0.
    pub(super) temperature: f32,
    /// The largest logit, divided by the temperature.
    pub(super) max: f32,
    /// The least that is kept, likewise.
    pub(super) least: f32,
}

/// The passes over a whole row, compiled for an instruction set.
#[derive(Clone, Copy, Debug)]
pub struct Passes {
    name: &'static str,
    is_detected: fn() -> bool,
    /// Writes the largest logit of each block; `false` when one of them is not a number.
    survey: unsafe fn(&[f32], &mut [f32]) -> bool,
    /// A block by a temperature, and `exp(x − max)` of it, or 0 where `x` is below a cut.
    weigh: unsafe fn(&[f32; BLOCK], Cutoff, &mut [f32; BLOCK], &mut [f32; BLOCK]),
    /// Sums of `exp(x − max)` over each block by a temperature, of what is not below a cut.
    sum_blocks: unsafe fn(&[f32], Cutoff, &mut [f64]),
}

macro_rules! passes {
    ($module:ident, $simd:ty $(, $feature:literal)?) => {
        mod $module {
            /// # Safety
            /// The machine has the instruction set.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn survey(row: &[f32], largest: &mut [f32]) -> bool {
                // SAFETY: the caller promises the instruction set.
                unsafe { super::survey::<$simd>(row, largest) }
            }
            /// # Safety
            /// The machine has the instruction set.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn weigh(
                block: &[f32; super::BLOCK],
                cutoff: super::Cutoff,
                tempered: &mut [f32; super::BLOCK],
                weights: &mut [f32; super::BLOCK],
            ) {
                // SAFETY: the caller promises the instruction set.
                unsafe { super::weigh::<$simd>(block, cutoff, tempered, weights) }
            }
            /// # Safety
            /// The machine has the instruction set.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn sum_blocks(row: &[f32], cutoff: super::Cutoff, sums: &mut [f64]) {
                // SAFETY: the caller promises the instruction set.
                unsafe { super::sum_blocks::<$simd>(row, cutoff, sums) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
passes!(avx512, crate::simd::avx512::Avx512, "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
passes!(avx2, crate::simd::avx2::Avx2, "avx2,fma");
passes!(portable, crate::simd::portable::Portable<8>);

/// Best first.
static PASSES: &[Passes] = &[
    #[cfg(target_arch = "x86_64")]
    Passes {
        name: "avx512",
        is_detected: instructions::have_avx512,
        survey: avx512::survey,
        weigh: avx512::weigh,
        sum_blocks: avx512::sum_blocks,
    },
    #[cfg(target_arch = "x86_64")]
    Passes {
        name: "avx2",
        is_detected: instructions::have_avx2,
        survey: avx2::survey,
        weigh: avx2::weigh,
        sum_blocks: avx2::sum_blocks,
    },
    Passes {
        name: "portable",
        is_detected: || true,
        survey: portable::survey,
        weigh: portable::weigh,
        sum_blocks: portable::sum_blocks,
    },
];

/// A block as it lies, or the last one of a row with what weighs nothing behind it.
#[expect(clippy::inline_always, reason = "it is a copy of few numbers at most, in the middle of loops")]
#[inline(always)]
pub(super) fn padded<'a>(block: &'a [f32], room: &'a mut [f32; BLOCK]) -> &'a [f32; BLOCK] {
    if let Ok(block) = block.try_into() {
        return block;
    }
    *room = [f32::NEG_INFINITY; BLOCK];
    room[..block.len()].copy_from_slice(block);
    room
}

/// # Safety
/// The machine has the instruction set.
#[expect(clippy::inline_always, reason = "see `simd`")]
#[inline(always)]
unsafe fn survey<S: Simd>(row: &[f32], largest: &mut [f32]) -> bool {
    let mut room = [0.0; BLOCK];
    // SAFETY: the caller promises the instruction set; every load is of lanes within a block's 64 elements.
    unsafe {
        let infinity = S::splat(f32::INFINITY);
        // What is not a number stays none in these sums, of which the rest is zeros and infinities.
        let mut doubts = S::splat(0.0);
        for (block, largest) in row.chunks(BLOCK).zip(largest) {
            let from = padded(block, &mut room);
            let mut most = S::splat(f32::NEG_INFINITY);
            for place in (0..BLOCK).step_by(S::LANES) {
                let x = S::load(from.as_ptr().add(place));
                most = S::max(x, most);
                doubts = S::add(doubts, S::zero_below(x, infinity, x));
            }
            *largest = S::largest(most);
        }
        !S::sum(doubts).is_nan()
    }
}

/// # Safety
/// The machine has the instruction set.
#[expect(clippy::inline_always, reason = "see `simd`")]
#[inline(always)]
unsafe fn weigh<S: Simd>(
    block: &[f32; BLOCK],
    cutoff: Cutoff,
    tempered: &mut [f32; BLOCK],
    weights: &mut [f32; BLOCK],
) {
    // SAFETY: the caller promises the instruction set; every load and store is of lanes within the 64 elements.
    unsafe {
        let (by, negated, least) =
            (S::splat(cutoff.temperature), S::splat(-cutoff.max), S::splat(cutoff.least));
        for place in (0..BLOCK).step_by(S::LANES) {
            let x = S::div(S::load(block.as_ptr().add(place)), by);
            S::store(tempered.as_mut_ptr().add(place), x);
            let weight = crate::simd::exp::<S>(S::add(x, negated));
            S::store(weights.as_mut_ptr().add(place), S::zero_below(x, least, weight));
        }
    }
}

/// # Safety
/// The machine has the instruction set.
#[expect(clippy::inline_always, reason = "see `simd`")]
#[inline(always)]
unsafe fn sum_blocks<S: Simd>(row: &[f32], cutoff: Cutoff, sums: &mut [f64]) {
    let mut room = [0.0; BLOCK];
    for (block, sum) in row.chunks(BLOCK).zip(sums) {
        let block = padded(block, &mut room);
        // SAFETY: the caller promises the instruction set; every load is of lanes within the block's 64 elements.
        unsafe {
            let (by, negated, least) =
                (S::splat(cutoff.temperature), S::splat(-cutoff.max), S::splat(cutoff.least));
            let mut total = S::splat(0.0);
            for place in (0..BLOCK).step_by(S::LANES) {
                let x = S::div(S::load(block.as_ptr().add(place)), by);
                let weight = crate::simd::exp::<S>(S::add(x, negated));
                total = S::add(total, S::zero_below(x, least, weight));
            }
            *sum = f64::from(S::sum(total));
        }
    }
}

impl Passes {
    /// All that this machine runs, best first.
    pub fn available() -> impl Iterator<Item = &'static Self> {
        PASSES.iter().filter(|passes| (passes.is_detected)())
    }

    /// The best that this machine runs.
    #[must_use]
    pub fn best() -> &'static Self {
        Self::available().next().unwrap_or(&PASSES[PASSES.len() - 1])
    }

    /// `avx512`, `avx2` or `portable`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Write the largest logit of each block of a row.
    ///
    /// Returns whether all logits are numbers.
    pub(super) fn survey(&self, row: &[f32], largest: &mut [f32]) -> bool {
        assert_eq!(row.len().div_ceil(BLOCK), largest.len(), "a place for each block");
        // SAFETY: `Passes` are given out only where the machine was found to have their instruction set.
        unsafe { (self.survey)(row, largest) }
    }

    /// Write a block divided by the temperature, and `exp(x − max)` of it, or 0 where it is below the cut.
    pub(super) fn weigh(
        &self,
        block: &[f32; BLOCK],
        cutoff: Cutoff,
        tempered: &mut [f32; BLOCK],
        weights: &mut [f32; BLOCK],
    ) {
        // SAFETY: as in `survey`.
        unsafe { (self.weigh)(block, cutoff, tempered, weights) }
    }

    /// Write the sum of `exp(x − max)` over each block of a row divided by the temperature, of what is not below the cut.
    pub(super) fn sum_blocks(&self, row: &[f32], cutoff: Cutoff, sums: &mut [f64]) {
        assert_eq!(row.len().div_ceil(BLOCK), sums.len(), "a place for each block");
        // SAFETY: as in `survey`.
        unsafe { (self.sum_blocks)(row, cutoff, sums) }
    }
}
