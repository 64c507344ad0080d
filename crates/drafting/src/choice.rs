//! `Chooser`: which of the drafts that were found a step should run.

use crate::costs::{StepCosts, same_class};

/// What drafts must gain over none, as a factor of tokens per second.
const LEAST_GAIN: f32 = 1.03;

/// How much longer a token of any row may take than without drafts, as a factor.
const MOST_DELAY: f32 = 1.03;

/// The drafts that were found for one row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Candidate {
    /// The row's place in the step.
    pub index: u32,
    /// How many were found; afterwards how many are to run.
    pub num_drafts: u32,
    /// Probability that each is right if those before it are.
    pub acceptance: f32,
    /// Steps by which the row may come later, out of what its drafts saved it before.
    pub credit: f32,
}

/// A step without drafts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PlainStep {
    /// Rows that give a token.
    pub num_rows: u32,
    /// Its tokens.
    pub num_tokens: u32,
    /// What it takes (ns).
    pub ns: f32,
    /// `Candidate::credit` of the rows for which no drafts were found: the least.
    pub credit: f32,
}

/// One draft: the probability that it is reached and right.
#[derive(Clone, Copy, Debug)]
struct Draft {
    survival: f32,
    depth: u32,
    candidate: u32,
}

/// Scratch of a choice.
#[derive(Clone, Debug, Default)]
pub struct Chooser {
    drafts: Vec<Draft>,
    /// Tokens that each candidate's row is expected to give beyond the one that it gives anyway.
    gains: Vec<f32>,
}

impl Chooser {
    /// Cut each of `candidates` to the drafts that should run with the step `plain`: those that give the most tokens
    /// per second, if that is enough more than without, and no row's next token is expected noticeably later than
    /// without, but for what its drafts saved it before.
    pub fn choose(&mut self, costs: &StepCosts, plain: PlainStep, candidates: &mut [Candidate]) {
        let num_chosen = self.count(costs, plain, candidates);
        for candidate in candidates.iter_mut() {
            candidate.num_drafts = 0;
        }
        for draft in &self.drafts[..num_chosen] {
            candidates[draft.candidate as usize].num_drafts += 1;
        }
    }

    /// Sort the drafts, likeliest first; returns how many of them pay.
    fn count(&mut self, costs: &StepCosts, plain: PlainStep, candidates: &[Candidate]) -> usize {
        self.drafts.clear();
        for (index, candidate) in candidates.iter().enumerate() {
            let mut survival = 1.0;
            for depth in 0..candidate.num_drafts {
                survival *= candidate.acceptance;
                self.drafts.push(Draft { survival, depth, candidate: index as u32 });
            }
        }
        // A row's drafts stay in their order: what is chosen of each is a prefix.
        self.drafts.sort_unstable_by(|a, b| {
            b.survival.total_cmp(&a.survival).then(a.depth.cmp(&b.depth)).then(a.candidate.cmp(&b.candidate))
        });
        self.gains.clear();
        self.gains.resize(candidates.len(), 0.0);
        let others = if plain.num_rows as usize <= candidates.len() { f32::INFINITY } else { plain.credit };
        let (mut best, mut best_rate) = (0, LEAST_GAIN * plain.num_rows as f32 / plain.ns);
        let mut expected_tokens = plain.num_rows as f32;
        for (index, draft) in self.drafts.iter().enumerate() {
            expected_tokens += draft.survival;
            self.gains[draft.candidate as usize] += draft.survival;
            let size = plain.num_tokens + index as u32 + 1;
            let is_last = index + 1 == self.drafts.len();
            if !is_last && same_class(size, size + 1) {
                continue; // One more costs nothing.
            }
            let Some(ns) = costs.expected(size) else { continue };
            let rate = expected_tokens / ns;
            if rate <= best_rate {
                continue;
            }
            let delays =
                candidates.iter().zip(&self.gains).map(|(row, gain)| MOST_DELAY * (1.0 + gain) + row.credit);
            if ns <= plain.ns * delays.fold(MOST_DELAY + others, f32::min) {
                (best, best_rate) = (index + 1, rate);
            }
        }
        best
    }
}
