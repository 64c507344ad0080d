//! Drawing an id from a row of logits: temperature, top-n-sigma, min-p, top-k, top-p, and one uniform number; nothing is sorted but
//! what may be at the cut.
//!
//! The row is divided by the temperature once, and the largest logit of each block of 64 is kept. The `k` largest logits
//! lie in blocks whose largest is among the `k` largest of these: so few blocks are looked into again. Where top-p stands
//! alone, candidates found in this way are tried first; they are not enough only where a distribution is flat ([`flat`]).
//!
//! What equals the smallest logit that is kept is kept too. A row's id depends on the row and its parameters alone.

mod flat;
pub(crate) mod greedy;
mod penalties;

pub use self::penalties::{RowPenalties, penalize};
#[cfg(target_arch = "x86_64")]
use crate::simd::instructions;
use crate::{simd::Simd, threads::Threads};

/// Logits whose exponentials are summed together.
const BLOCK: usize = 64;

/// Sums of a row that are taken side by side.
const LANES: usize = 8;

/// Candidates that top-p tries, one number after the other.
const CANDIDATES: [usize; 3] = [32, 128, 512];

/// Rows from which on threads share them.
const MIN_SHARED_LOGITS: usize = 1 << 16;

/// How a row is sampled. Values that ask for nothing: `top_n_sigma`, `min_p` and `top_k` 0, `top_p` 1.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RowOptions {
    /// Divides the logits; above 0.
    pub temperature: f32,
    /// How many standard deviations of the logits below the largest are kept; 0 or less: all.
    pub top_n_sigma: f32,
    /// Smallest probability that is kept, as a share of the largest.
    pub min_p: f32,
    /// How many of the largest are kept; 0 or less: all.
    pub top_k: i64,
    /// The fewest of the largest whose probabilities reach it are kept.
    pub top_p: f32,
    /// In `[0, 1)`: where the running sum of probabilities, in the order of the ids, is cut.
    pub uniform: f64,
}

/// Draw an id from each of some rows.
///
/// `logits` are rows of `vocab_size`, of which `rows` are overwritten; `out[i]` becomes the id drawn from `rows[i]`, or −1
/// when its logits have no finite distribution.
///
/// # Panics
/// When a row lies outside of `logits`, occurs twice, or the lengths differ.
pub fn draw(
    logits: &mut [f32],
    vocab_size: usize,
    rows: &[usize],
    options: &[RowOptions],
    threads: &Threads,
    out: &mut [i64],
) {
    assert!(rows.len() == options.len() && rows.len() == out.len(), "as many options and places as rows");
    let parts = own_rows(logits, vocab_size, rows).into_iter().zip(options).zip(out);
    let work: Vec<_> =
        parts.map(|((row, options), out)| std::sync::Mutex::new((row, options, out))).collect();
    let passes = Passes::best();
    threads.for_each(work.len(), rows.len() * vocab_size >= MIN_SHARED_LOGITS, |index| {
        // Each part is taken once: the lock is never waited for.
        let mut part = work[index].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (row, options, out) = &mut *part;
        **out = passes.draw(row, **options).map_or(-1, |id| id as i64);
    });
}

/// Make ids impossible that rows may not take: `masks` has `ceil(vocab_size / 32)` words for each of `rows`, of which bit
/// `i % 32` of word `i / 32` is for id `i`.
///
/// # Panics
/// When a row lies outside of `logits`, occurs twice, or the lengths differ.
pub fn mask(logits: &mut [f32], vocab_size: usize, rows: &[usize], masks: &[i32], threads: &Threads) {
    let num_words = vocab_size.div_ceil(32);
    assert_eq!(masks.len(), rows.len() * num_words, "as many masks as rows");
    let parts = own_rows(logits, vocab_size, rows).into_iter().zip(masks.chunks_exact(num_words.max(1)));
    let work: Vec<_> = parts.map(std::sync::Mutex::new).collect();
    threads.for_each(work.len(), rows.len() * vocab_size >= MIN_SHARED_LOGITS, |index| {
        // Each part is taken once: the lock is never waited for.
        let mut part = work[index].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (row, mask) = &mut *part;
        mask_row(row, mask);
    });
}

/// Most words of a mask allow all of their ids or none: neither looks at the logits.
fn mask_row(row: &mut [f32], mask: &[i32]) {
    for (logits, &word) in row.chunks_mut(32).zip(mask) {
        match word {
            0 => logits.fill(f32::NEG_INFINITY),
            -1 => {}
            _ => {
                for (place, logit) in logits.iter_mut().enumerate() {
                    *logit = if word >> place & 1 == 0 { f32::NEG_INFINITY } else { *logit };
                }
            }
        }
    }
}

/// Some rows of `logits`, in the order asked for.
fn own_rows<'a>(logits: &'a mut [f32], vocab_size: usize, rows: &[usize]) -> Vec<&'a mut [f32]> {
    assert!(vocab_size > 0 || rows.is_empty(), "rows have logits");
    let mut all: Vec<Option<&mut [f32]>> = logits.chunks_exact_mut(vocab_size.max(1)).map(Some).collect();
    rows.iter().map(|&row| all.get_mut(row).and_then(Option::take).expect("a row of its own")).collect()
}

/// The passes over a whole row, compiled for an instruction set.
#[derive(Clone, Copy, Debug)]
pub struct Passes {
    name: &'static str,
    is_detected: fn() -> bool,
    /// Divides a row in place and writes the largest of each block; `false` when one of them is not a number.
    temper: unsafe fn(&mut [f32], f32, &mut [f32]) -> bool,
    /// `exp(x − max)` of a block, or 0 where `x` is below a cut.
    weigh: unsafe fn(&[f32; BLOCK], f32, f32, &mut [f32; BLOCK]),
    /// Sums of `exp(x − max)` over each block, of what is not below a cut.
    sum_blocks: unsafe fn(&[f32], f32, f32, &mut [f64]),
}

macro_rules! passes {
    ($module:ident, $simd:ty $(, $feature:literal)?) => {
        mod $module {
            /// # Safety
            /// The machine has the instruction set.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn temper(row: &mut [f32], temperature: f32, largest: &mut [f32]) -> bool {
                // SAFETY: the caller promises the instruction set.
                unsafe { super::temper::<$simd>(row, temperature, largest) }
            }
            /// # Safety
            /// The machine has the instruction set.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn weigh(
                block: &[f32; super::BLOCK],
                max: f32,
                cut: f32,
                weights: &mut [f32; super::BLOCK],
            ) {
                // SAFETY: the caller promises the instruction set.
                unsafe { super::weigh::<$simd>(block, max, cut, weights) }
            }
            /// # Safety
            /// The machine has the instruction set.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn sum_blocks(row: &[f32], max: f32, cut: f32, sums: &mut [f64]) {
                // SAFETY: the caller promises the instruction set.
                unsafe { super::sum_blocks::<$simd>(row, max, cut, sums) }
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
        temper: avx512::temper,
        weigh: avx512::weigh,
        sum_blocks: avx512::sum_blocks,
    },
    #[cfg(target_arch = "x86_64")]
    Passes {
        name: "avx2",
        is_detected: instructions::have_avx2,
        temper: avx2::temper,
        weigh: avx2::weigh,
        sum_blocks: avx2::sum_blocks,
    },
    Passes {
        name: "portable",
        is_detected: || true,
        temper: portable::temper,
        weigh: portable::weigh,
        sum_blocks: portable::sum_blocks,
    },
];

/// A block as it lies, or the last one of a row with what weighs nothing behind it.
#[expect(clippy::inline_always, reason = "it is a copy of few numbers at most, in the middle of loops")]
#[inline(always)]
fn padded<'a>(block: &'a [f32], room: &'a mut [f32; BLOCK]) -> &'a [f32; BLOCK] {
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
unsafe fn temper<S: Simd>(row: &mut [f32], temperature: f32, largest: &mut [f32]) -> bool {
    let mut room = [0.0; BLOCK];
    // SAFETY: the caller promises the instruction set; every load and store is of lanes within a block's 64 elements.
    unsafe {
        let (by, infinity) = (S::splat(temperature), S::splat(f32::INFINITY));
        // What is not a number stays none in these sums, of which the rest is zeros and infinities.
        let mut doubts = S::splat(0.0);
        for (block, largest) in row.chunks_mut(BLOCK).zip(largest) {
            let mut tempered = [0.0; BLOCK];
            let from = padded(block, &mut room);
            let mut most = S::splat(f32::NEG_INFINITY);
            for place in (0..BLOCK).step_by(S::LANES) {
                let x = S::div(S::load(from.as_ptr().add(place)), by);
                S::store(tempered.as_mut_ptr().add(place), x);
                most = S::max(x, most);
                doubts = S::add(doubts, S::zero_below(x, infinity, x));
            }
            block.copy_from_slice(&tempered[..block.len()]);
            *largest = S::largest(most);
        }
        !S::sum(doubts).is_nan()
    }
}

/// # Safety
/// The machine has the instruction set.
#[expect(clippy::inline_always, reason = "see `simd`")]
#[inline(always)]
unsafe fn weigh<S: Simd>(block: &[f32; BLOCK], max: f32, cut: f32, weights: &mut [f32; BLOCK]) {
    // SAFETY: the caller promises the instruction set; every load and store is of lanes within the 64 elements.
    unsafe {
        let (negated, cut) = (S::splat(-max), S::splat(cut));
        for place in (0..BLOCK).step_by(S::LANES) {
            let x = S::load(block.as_ptr().add(place));
            let weight = crate::simd::exp::<S>(S::add(x, negated));
            S::store(weights.as_mut_ptr().add(place), S::zero_below(x, cut, weight));
        }
    }
}

/// # Safety
/// The machine has the instruction set.
#[expect(clippy::inline_always, reason = "see `simd`")]
#[inline(always)]
unsafe fn sum_blocks<S: Simd>(row: &[f32], max: f32, cut: f32, sums: &mut [f64]) {
    let mut room = [0.0; BLOCK];
    for (block, sum) in row.chunks(BLOCK).zip(sums) {
        let block = padded(block, &mut room);
        // SAFETY: the caller promises the instruction set; every load is of lanes within the block's 64 elements.
        unsafe {
            let (negated, cut) = (S::splat(-max), S::splat(cut));
            let mut total = S::splat(0.0);
            for place in (0..BLOCK).step_by(S::LANES) {
                let x = S::load(block.as_ptr().add(place));
                let weight = crate::simd::exp::<S>(S::add(x, negated));
                total = S::add(total, S::zero_below(x, cut, weight));
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

    /// An id of a row, which is overwritten; `None` when the row has no finite distribution.
    #[must_use]
    pub fn draw(&self, row: &mut [f32], options: RowOptions) -> Option<usize> {
        let num_blocks = row.len().div_ceil(BLOCK);
        let mut largest = vec![0.0; num_blocks];
        // SAFETY: the machine was found to have the instruction set.
        let all_numbers = unsafe { (self.temper)(row, options.temperature, &mut largest) };
        let max = largest.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if !all_numbers || !max.is_finite() {
            return None;
        }
        let row = Row { values: row, largest: &largest, max };
        let floor = row.floor(&options);
        let mut sums = vec![0.0; num_blocks];
        // SAFETY: `Passes` are given out only where the machine was found to have their instruction set; slices carry
        // their lengths.
        let mut sum = |cut: f32| unsafe { (self.sum_blocks)(row.values, max, cut, &mut sums) };
        let k = usize::try_from(options.top_k).unwrap_or(0);
        let found = if (1..row.values.len()).contains(&k) {
            Some(row.cut_by_count(k, f64::from(options.top_p), floor))
        } else if options.top_p < 1.0 {
            sum(floor);
            let total: f64 = sums.iter().sum();
            let target = f64::from(options.top_p) * total;
            Some(row.cut_by_mass(target, floor).unwrap_or_else(|| Cut {
                value: flat::least_kept(row, self, target, floor),
                candidates: None,
            }))
        } else {
            None
        };
        match found {
            Some(Cut { candidates: Some(candidates), value }) => {
                Some(row.draw_from(&candidates, value, options.uniform))
            }
            found => {
                let cut = found.map_or(floor, |cut| cut.value);
                // SAFETY: `Passes` are given out only where the machine was found to have their instruction set; slices
                // carry their lengths.
                unsafe { (self.sum_blocks)(row.values, max, cut, &mut sums) };
                row.draw_from_blocks(&sums, cut, options.uniform)
            }
        }
    }
}

/// A logit and its id.
type Candidate = (usize, f32);

/// The smallest logit that is kept, and, when they were looked at one by one, all that are not below it, and some others.
struct Cut {
    value: f32,
    /// In the order of ids.
    candidates: Option<Vec<Candidate>>,
}

/// A row behind the temperature.
#[derive(Clone, Copy)]
struct Row<'a> {
    values: &'a [f32],
    /// Of each block.
    largest: &'a [f32],
    max: f32,
}

impl Row<'_> {
    fn weight(&self, value: f32) -> f64 {
        (f64::from(value) - f64::from(self.max)).exp()
    }

    /// What top-n-sigma and min-p drop is below it.
    fn floor(&self, options: &RowOptions) -> f32 {
        let mut floor = f32::NEG_INFINITY;
        if options.min_p > 0.0 {
            floor = self.max + options.min_p.ln();
        }
        if options.top_n_sigma > 0.0 {
            let distance = f64::from(options.top_n_sigma) * self.deviation();
            // Infinitely often nothing is not a number, which `max` leaves out.
            floor = floor.max((f64::from(self.max) - distance) as f32);
        }
        floor
    }

    /// Standard deviation of the logits that are not minus infinity.
    ///
    /// One pass is enough: they are taken relative to one of themselves, so that the mean's square is at most as many times
    /// the variance as there are logits.
    fn deviation(&self) -> f64 {
        let (mut counts, mut sums, mut squares) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
        for chunk in self.values.chunks(LANES) {
            for (lane, &value) in chunk.iter().enumerate() {
                if value > f32::NEG_INFINITY {
                    let below = f64::from(value) - f64::from(self.max);
                    counts[lane] += 1.0;
                    sums[lane] += below;
                    squares[lane] += below * below;
                }
            }
        }
        let [count, sum, squares] = [counts, sums, squares].map(|lanes| lanes.iter().sum::<f64>());
        let mean = sum / count;
        (squares / count - mean * mean).max(0.0).sqrt()
    }

    /// A value that at least `k` logits are not below: the `k`-th of the largest of blocks.
    fn bound(&self, k: usize) -> f32 {
        if k > self.largest.len() {
            return f32::NEG_INFINITY;
        }
        let mut largest = self.largest.to_vec();
        *largest.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
    }

    /// What is not below `bound`.
    fn candidates(&self, bound: f32) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        for (index, block) in self.values.chunks(BLOCK).enumerate() {
            if self.largest[index] >= bound {
                let ids = index * BLOCK..;
                candidates.extend(ids.zip(block.iter().copied()).filter(|(_, value)| *value >= bound));
            }
        }
        candidates
    }

    /// Top-k, and top-p within what it keeps.
    fn cut_by_count(&self, k: usize, top_p: f64, floor: f32) -> Cut {
        let candidates = self.candidates(self.bound(k).max(floor));
        let mut values: Vec<f32> = candidates.iter().map(|(_, value)| *value).collect();
        if values.len() > k {
            values.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
            values.truncate(k);
        }
        let value = if top_p < 1.0 {
            values.sort_unstable_by(|a, b| b.total_cmp(a));
            let total: f64 = values.iter().map(|&value| self.weight(value)).sum();
            self.walk(&values, top_p * total).unwrap_or(self.max)
        } else {
            values.into_iter().fold(self.max, f32::min)
        };
        Cut { value, candidates: Some(candidates) }
    }

    /// Top-p over all that is not below `floor`: the fewest of the largest whose weights reach `target`. None if they are too
    /// many to be tried one by one.
    fn cut_by_mass(&self, target: f64, floor: f32) -> Option<Cut> {
        for k in CANDIDATES {
            if k > self.largest.len() {
                break;
            }
            let candidates = self.candidates(self.bound(k).max(floor));
            let mass: f64 = candidates.iter().map(|(_, value)| self.weight(*value)).sum();
            if mass >= target {
                let mut values: Vec<f32> = candidates.iter().map(|(_, value)| *value).collect();
                values.sort_unstable_by(|a, b| b.total_cmp(a));
                if let Some(value) = self.walk(&values, target) {
                    return Some(Cut { value, candidates: Some(candidates) });
                }
            }
        }
        None
    }

    /// The last of `values`, which descend, before which the weights do not reach `target` yet; `None` when all together
    /// do not reach it.
    fn walk(&self, values: &[f32], target: f64) -> Option<f32> {
        let mut mass = 0.0;
        for &value in values {
            mass += self.weight(value);
            if mass >= target {
                return Some(value);
            }
        }
        // Rounding: a share of nearly 1 of what these weigh is what they weigh.
        values.last().copied().filter(|_| mass > target * (1.0 - 1e-12))
    }

    fn draw_from(&self, candidates: &[Candidate], cut: f32, uniform: f64) -> usize {
        let kept = || candidates.iter().filter(|(_, value)| *value >= cut);
        let target = uniform * kept().map(|(_, value)| self.weight(*value)).sum::<f64>();
        self.first_beyond(kept().copied(), 0.0, target).unwrap_or(0)
    }

    fn draw_from_blocks(&self, sums: &[f64], cut: f32, uniform: f64) -> Option<usize> {
        let target = uniform * sums.iter().sum::<f64>();
        let mut before = 0.0;
        let mut chosen = None;
        for (index, &sum) in sums.iter().enumerate() {
            if sum > 0.0 {
                chosen = Some((index, before));
                if before + sum > target {
                    break;
                }
            }
            before += sum;
        }
        let (index, before) = chosen?;
        let block = self.values.iter().copied().enumerate().skip(index * BLOCK).take(BLOCK);
        self.first_beyond(block.filter(|(_, value)| *value >= cut), before, target)
    }

    /// The first id at which the running sum of weights exceeds `target`; the last with a weight where rounding keeps it
    /// from that.
    fn first_beyond(
        &self,
        kept: impl Iterator<Item = Candidate>,
        mut before: f64,
        target: f64,
    ) -> Option<usize> {
        let mut last = None;
        for (id, value) in kept {
            let weight = self.weight(value);
            if weight > 0.0 {
                last = Some(id);
                before += weight;
                if before > target {
                    break;
                }
            }
        }
        last
    }
}
