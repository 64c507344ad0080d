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
    /// Cut each of `candidates` to the drafts that a step should run which has `num_rows` rows and `num_tokens` tokens
    /// without drafts: those that give the most tokens per second, if that is enough more than without, and no row's
    /// next token is expected noticeably later than without.
    pub fn choose(
        &mut self,
        costs: &StepCosts,
        num_rows: u32,
        num_tokens: u32,
        candidates: &mut [Candidate],
    ) {
        let num_chosen = self.count(costs, num_rows, num_tokens, candidates);
        for candidate in candidates.iter_mut() {
            candidate.num_drafts = 0;
        }
        for draft in &self.drafts[..num_chosen] {
            candidates[draft.candidate as usize].num_drafts += 1;
        }
    }

    /// Sort the drafts, likeliest first; returns how many of them pay.
    fn count(
        &mut self,
        costs: &StepCosts,
        num_rows: u32,
        num_tokens: u32,
        candidates: &[Candidate],
    ) -> usize {
        self.drafts.clear();
        let Some(plain_ns) = costs.expected(num_tokens) else { return 0 };
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
        let all_rows_draft = num_rows as usize <= candidates.len();
        let (mut best, mut best_rate) = (0, LEAST_GAIN * num_rows as f32 / plain_ns);
        let mut expected_tokens = num_rows as f32;
        for (index, draft) in self.drafts.iter().enumerate() {
            expected_tokens += draft.survival;
            self.gains[draft.candidate as usize] += draft.survival;
            let size = num_tokens + index as u32 + 1;
            let is_last = index + 1 == self.drafts.len();
            if !is_last && same_class(size, size + 1) {
                continue; // One more costs nothing.
            }
            let Some(ns) = costs.expected(size) else { continue };
            let rate = expected_tokens / ns;
            if rate <= best_rate {
                continue;
            }
            let least_gain =
                if all_rows_draft { self.gains.iter().copied().fold(f32::INFINITY, f32::min) } else { 0.0 };
            if ns <= MOST_DELAY * plain_ns * (1.0 + least_gain) {
                (best, best_rate) = (index + 1, rate);
            }
        }
        best
    }
}
