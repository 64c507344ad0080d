//! A row of logits as the passes leave it: what is kept of it, and which id a uniform number draws.

use super::passes::{BLOCK, Cutoff};

/// Sums of a row that are taken side by side.
const LANES: usize = 8;

/// Candidates that top-p tries, one number after the other.
const CANDIDATES: [usize; 3] = [32, 128, 512];

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

/// A logit and its id.
pub(super) type Candidate = (usize, f32);

/// The smallest logit that is kept, and, when they were looked at one by one, all that are not below it, and some others.
pub(super) struct Cut {
    pub(super) value: f32,
    /// In the order of ids.
    pub(super) candidates: Option<Vec<Candidate>>,
}

/// A row of logits, which are divided by a temperature whenever they are read.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) logits: &'a [f32],
    temperature: f32,
    /// Of each block, divided by the temperature, as `max` is.
    pub(super) largest: &'a [f32],
    pub(super) max: f32,
}

impl<'a> Row<'a> {
    /// A row and the largest logit of each block of it, which become those divided by the temperature.
    pub(super) fn new(logits: &'a [f32], temperature: f32, largest: &'a mut [f32]) -> Self {
        let mut max = f32::NEG_INFINITY;
        for each in &mut *largest {
            *each /= temperature;
            max = max.max(*each);
        }
        Self { logits, temperature, largest, max }
    }

    /// For a pass over the row that drops what is below `least`.
    pub(super) fn cutoff(&self, least: f32) -> Cutoff {
        Cutoff { temperature: self.temperature, max: self.max, least }
    }

    /// Logits divided by the temperature.
    fn tempered(&self, logits: &'a [f32]) -> impl Iterator<Item = f32> {
        let by = self.temperature;
        logits.iter().map(move |logit| logit / by)
    }

    fn weight(&self, value: f32) -> f64 {
        (f64::from(value) - f64::from(self.max)).exp()
    }

    /// What top-n-sigma and min-p drop is below it.
    pub(super) fn floor(&self, options: &RowOptions) -> f32 {
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
        for chunk in self.logits.chunks(LANES) {
            for (lane, value) in self.tempered(chunk).enumerate() {
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
    pub(super) fn bound(&self, k: usize) -> f32 {
        if k > self.largest.len() {
            return f32::NEG_INFINITY;
        }
        let mut largest = self.largest.to_vec();
        *largest.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
    }

    /// What is not below `bound`.
    pub(super) fn candidates(&self, bound: f32) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        for (index, block) in self.logits.chunks(BLOCK).enumerate() {
            if self.largest[index] >= bound {
                let ids = index * BLOCK..;
                candidates.extend(ids.zip(self.tempered(block)).filter(|(_, value)| *value >= bound));
            }
        }
        candidates
    }

    /// Top-k, and top-p within what it keeps.
    pub(super) fn cut_by_count(&self, k: usize, top_p: f64, floor: f32) -> Cut {
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
    pub(super) fn cut_by_mass(&self, target: f64, floor: f32) -> Option<Cut> {
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

    pub(super) fn draw_from(&self, candidates: &[Candidate], cut: f32, uniform: f64) -> usize {
        let kept = || candidates.iter().filter(|(_, value)| *value >= cut);
        let target = uniform * kept().map(|(_, value)| self.weight(*value)).sum::<f64>();
        self.first_beyond(kept().copied(), 0.0, target).unwrap_or(0)
    }

    pub(super) fn draw_from_blocks(&self, sums: &[f64], cut: f32, uniform: f64) -> Option<usize> {
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
        let first = index * BLOCK;
        let block = &self.logits[first..self.logits.len().min(first + BLOCK)];
        let block = (first..).zip(self.tempered(block));
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
