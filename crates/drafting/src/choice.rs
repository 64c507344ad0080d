//! `Chooser`: which of the drafts that were found a step should run.

use crate::{
    costs::{StepCosts, last_of_class},
    estimate::Belief,
};

/// What drafts must gain over none, as a factor of tokens per second: chance must not choose them. One among many rows
/// that have none gains less, and so never runs: what it was measured to cost them was more than it was believed to.
const LEAST_GAIN: f32 = 1.03;

/// How much longer a token of any row may take than without drafts, as a factor.
const MOST_DELAY: f32 = 1.03;

/// How much longer a token of a row without drafts may take in one step.
const OTHERS_DELAY: f32 = 1.025;

/// The drafts that were found for one row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Candidate {
    /// The row's place in the step.
    pub index: u32,
    /// How many were found; afterwards how many are to run.
    pub num_drafts: u32,
    /// How likely they are.
    pub belief: Belief,
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
    /// Whether these rows may come a little later though they have saved nothing.
    pub is_patient: bool,
}

/// A draft in 64 bits that sort as drafts are wanted: the likeliest to be reached and right first, then the first ones
/// of their rows, then by candidate. A row's drafts stay in their order, so what is chosen of each is a prefix.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Draft(u64);

/// Bits of a candidate's index: more than rows that a step may have.
const CANDIDATE_BITS: u32 = 24;

impl Draft {
    fn new(survival: f32, depth: u32, candidate: u32) -> Self {
        // Of numbers that are not negative the bits are in the order of the numbers.
        let key = u64::from(!survival.to_bits()) << 32;
        Self(key | u64::from(depth & 0xff) << CANDIDATE_BITS | u64::from(candidate))
    }

    fn survival(self) -> f32 {
        f32::from_bits(!((self.0 >> 32) as u32))
    }

    fn candidate(self) -> usize {
        (self.0 & ((1 << CANDIDATE_BITS) - 1)) as usize
    }
}

/// Scratch of a choice.
#[derive(Clone, Debug, Default)]
pub struct Chooser {
    drafts: Vec<Draft>,
    /// Tokens that each candidate's row is expected to give beyond the one that it gives anyway.
    gains: Vec<f32>,
    /// Numbers of drafts that may pay, and what a step with so many takes (ns).
    edges: Vec<(u32, f32)>,
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
            candidates[draft.candidate()].num_drafts += 1;
        }
    }

    /// Sort the drafts, likeliest first; returns how many of them pay.
    fn count(&mut self, costs: &StepCosts, plain: PlainStep, candidates: &[Candidate]) -> usize {
        self.drafts.clear();
        let others = if plain.num_rows as usize <= candidates.len() { f32::INFINITY } else { plain.credit };
        let (mut best, mut best_rate) = (0, LEAST_GAIN * plain.num_rows as f32 / plain.ns);
        self.find_edges(costs, plain, candidates, others);
        let Some(&(most, _)) = self.edges.last() else { return 0 };
        self.sort(candidates, most as usize);
        self.gains.clear();
        self.gains.resize(candidates.len(), 0.0);
        let mut expected_tokens = plain.num_rows as f32;
        let mut done = 0;
        for &(edge, ns) in &self.edges {
            for draft in &self.drafts[done..edge as usize] {
                expected_tokens += draft.survival();
                self.gains[draft.candidate()] += draft.survival();
            }
            done = edge as usize;
            let rate = expected_tokens / ns;
            if rate <= best_rate {
                continue;
            }
            let delays =
                candidates.iter().zip(&self.gains).map(|(row, gain)| MOST_DELAY * (1.0 + gain) + row.credit);
            if ns <= plain.ns * delays.fold(f32::INFINITY, f32::min) {
                (best, best_rate) = (done, rate);
            }
        }
        best
    }

    /// One draft more costs nothing but where the next class of sizes begins. Of these numbers of drafts those that
    /// could pay if all were as likely as the likeliest, and that do not keep rows without drafts waiting.
    fn find_edges(&mut self, costs: &StepCosts, plain: PlainStep, candidates: &[Candidate], others: f32) {
        self.edges.clear();
        let total: u32 = candidates.iter().map(|candidate| candidate.num_drafts).sum();
        let likeliest = candidates.iter().map(|candidate| candidate.belief.acceptance()).fold(0.0, f32::max);
        let (num_rows, mut edge, mut least_ns) = (plain.num_rows as f32, 0, plain.ns);
        let others = others + if plain.is_patient { OTHERS_DELAY } else { 1.0 };
        while edge < total {
            edge = total.min(last_of_class(plain.num_tokens + edge + 1) - plain.num_tokens);
            let Some(ns) = costs.expected(plain.num_tokens + edge) else { continue };
            // More tokens take no less time, whatever was measured: chance must not choose a size.
            let ns = ns.max(least_ns);
            least_ns = ns;
            let rate = (num_rows + likeliest * edge as f32) / ns;
            if rate > LEAST_GAIN * num_rows / plain.ns && ns <= plain.ns * others {
                self.edges.push((edge, ns));
            }
        }
    }

    /// The `most` likeliest drafts, in their order.
    fn sort(&mut self, candidates: &[Candidate], most: usize) {
        for (index, candidate) in candidates.iter().enumerate() {
            let mut survival = 1.0;
            for depth in 0..candidate.num_drafts {
                survival *= candidate.belief.acceptance_after(depth);
                self.drafts.push(Draft::new(survival, depth, index as u32));
            }
        }
        if most < self.drafts.len() {
            self.drafts.select_nth_unstable(most);
            self.drafts.truncate(most);
        }
        self.drafts.sort_unstable();
    }
}
