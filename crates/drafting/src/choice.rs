//! `Chooser`: decides which of the found drafts a step should run.

use crate::{
    costs::{StepCosts, last_of_class},
    likeliest::{Candidate, Likeliest},
};

/// The least gain over a step without drafts, as a factor of the tokens per second of the rows with drafts; less could
/// be chance.
const LEAST_GAIN: f32 = 1.03;

/// How much longer a token of any row may take than without drafts, as a factor.
const MOST_DELAY: f32 = 1.03;

/// How much longer a token of a row without drafts may take in one step, as a factor.
const OTHERS_DELAY: f32 = 1.025;

/// Most sizes of step that are tried, the most promising first. Nearly always the first one is chosen.
const MOST_TRIES: usize = 8;

/// The least tokens per second of a shortened step, as a share of the best: a shorter step makes arriving requests wait
/// less.
const LEAST_SHARE: f32 = 0.93;

/// A step without drafts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PlainStep {
    /// Number of rows that give a token.
    pub num_rows: u32,
    /// Number of tokens.
    pub num_tokens: u32,
    /// Its duration (ns).
    pub ns: f32,
    /// The least `Candidate::credit` of the rows for which no drafts were found.
    pub credit: f32,
    /// Whether these rows may come a little later, although they have saved nothing.
    pub is_patient: bool,
    /// How long it may take with drafts before a request that arrives meanwhile notices (ns).
    pub unnoticed_ns: f32,
}

/// A number of drafts that may pay.
#[derive(Clone, Copy, Debug)]
struct Edge {
    num_drafts: u32,
    /// The duration of a step with this many drafts (ns).
    ns: f32,
    /// Tokens per nanosecond if it runs the likeliest drafts of all rows; no choice gives more.
    most_rate: f32,
}

/// Chooses drafts; holds the buffers for that.
#[derive(Clone, Debug, Default)]
pub struct Chooser {
    likeliest: Likeliest,
    edges: Vec<Edge>,
    /// For each candidate, the drafts that it needs so as not to wait too long, and those that it gets.
    needed: Vec<u32>,
    chosen: Vec<u32>,
    /// For each candidate, its drafts among those that were shared out, less those that it needs.
    passed: Vec<i32>,
}

impl Chooser {
    /// Cut each of `candidates` to the drafts that should run with the step `plain`. These give the most tokens per
    /// second, if that is enough more than without drafts, and delay no row's next token noticeably, except by the time
    /// that its drafts have saved before.
    pub fn choose(&mut self, costs: &StepCosts, plain: PlainStep, candidates: &mut [Candidate]) {
        let best = self.find(costs, plain, candidates);
        for candidate in candidates.iter_mut() {
            candidate.num_drafts = 0;
        }
        let Some(edge) = best else { return };
        for (candidate, &num_drafts) in candidates.iter_mut().zip(&self.chosen) {
            candidate.num_drafts = num_drafts;
        }
        debug_assert_eq!(self.chosen.iter().sum::<u32>(), edge.num_drafts, "the size that was priced");
    }

    /// Find the number of drafts that pays most and set `chosen`; `None` if drafts do not pay.
    fn find(&mut self, costs: &StepCosts, plain: PlainStep, candidates: &[Candidate]) -> Option<Edge> {
        self.likeliest.find(candidates);
        self.find_edges(costs, plain, candidates);
        let most = self.edges.last()?.num_drafts;
        self.likeliest.sort(most);
        self.rate_edges(plain, candidates);
        let (mut best, mut best_rate, mut is_shared_out) = (None, 0.0, false);
        for _ in 0..MOST_TRIES {
            let Some((index, edge)) = self.most_promising().filter(|(_, edge)| edge.most_rate > best_rate)
            else {
                break;
            };
            self.edges.swap_remove(index);
            let rate = self.share_out(edge, plain, candidates);
            is_shared_out = rate.is_some_and(|rate| rate > best_rate);
            if is_shared_out {
                (best, best_rate) = (Some(edge), rate.unwrap_or(best_rate));
            }
        }
        let best = best?;
        if best.ns > plain.unnoticed_ns {
            if let Some(shorter) = self.shorten(best, best_rate, plain, candidates) {
                return Some(shorter);
            }
            is_shared_out = false;
        }
        if !is_shared_out {
            self.share_out(best, plain, candidates)?;
        }
        Some(best)
    }

    /// Among the remaining sizes, the one whose likeliest drafts give the most tokens per second.
    fn most_promising(&self) -> Option<(usize, Edge)> {
        let edges = self.edges.iter().copied().enumerate();
        edges.max_by(|(_, one), (_, other)| one.most_rate.total_cmp(&other.most_rate))
    }

    /// The shortest step that gives nearly as many tokens per nanosecond as the best, but not shorter than necessary.
    fn shorten(
        &mut self,
        best: Edge,
        best_rate: f32,
        plain: PlainStep,
        candidates: &[Candidate],
    ) -> Option<Edge> {
        let least_rate = LEAST_SHARE * best_rate;
        self.edges.retain(|edge| edge.ns < best.ns && edge.most_rate >= least_rate);
        self.edges.sort_unstable_by_key(|edge| edge.num_drafts);
        let num_unnoticed = self.edges.iter().filter(|edge| edge.ns <= plain.unnoticed_ns).count();
        let edges = self.edges.split_off(num_unnoticed.saturating_sub(1));
        edges
            .into_iter()
            .take(MOST_TRIES)
            .find(|&edge| self.share_out(edge, plain, candidates).is_some_and(|rate| rate >= least_rate))
    }

    /// Find the numbers of drafts to try. One more draft costs something only at the beginning of the next class of
    /// sizes, so only the largest number of each class counts. This keeps those that could pay if all drafts were as
    /// likely as the likeliest, and that keep no rows waiting: neither rows without drafts, nor rows that would be too
    /// late even with all of theirs.
    fn find_edges(&mut self, costs: &StepCosts, plain: PlainStep, candidates: &[Candidate]) {
        self.edges.clear();
        let total: u32 = candidates.iter().map(|candidate| candidate.num_drafts).sum();
        let likeliest = candidates.iter().map(|candidate| candidate.belief.acceptance()).fold(0.0, f32::max);
        let mut others = if plain.is_patient { OTHERS_DELAY } else { 1.0 };
        others += if plain.num_rows as usize <= candidates.len() { f32::INFINITY } else { plain.credit };
        let latest = candidates.iter().zip(self.likeliest.gains());
        let latest = latest.map(|(row, gain)| MOST_DELAY * (1.0 + gain) + row.credit).fold(others, f32::min);
        let (num_rows, mut edge, mut least_ns) = (plain.num_rows as f32, 0, plain.ns);
        while edge < total {
            edge = total.min(last_of_class(plain.num_tokens + edge + 1) - plain.num_tokens);
            let Some(ns) = costs.expected(plain.num_tokens + edge) else { continue };
            // More tokens cannot take less time, whatever was measured: chance must not choose a size.
            let ns = ns.max(least_ns);
            least_ns = ns;
            if ns > plain.ns * latest {
                break;
            }
            if (num_rows + likeliest * edge as f32) / ns > num_rows / plain.ns {
                self.edges.push(Edge { num_drafts: edge, ns, most_rate: 0.0 });
            }
        }
    }

    /// Compute the most that each size can give, and drop those that gain too little.
    fn rate_edges(&mut self, plain: PlainStep, candidates: &[Candidate]) {
        let num_rows = plain.num_rows as f32;
        let num_drafting = candidates.len() as f32;
        let (mut done, mut expected) = (0, 0.0);
        let drafts = self.likeliest.sorted();
        self.edges.retain_mut(|edge| {
            let new = &drafts[done..edge.num_drafts as usize];
            expected += new.iter().map(|draft| draft.survival).sum::<f32>();
            done = edge.num_drafts as usize;
            edge.most_rate = (num_rows + expected) / edge.ns;
            let gain = |rows: f32| (rows + expected) * plain.ns / (rows * edge.ns);
            gain(num_drafting) >= LEAST_GAIN && gain(num_rows) > 1.0
        });
    }

    /// Distribute the drafts of a step of this size: each row gets as many as it needs so that its next token is not
    /// too late; the rest go to the likeliest. Returns the tokens per nanosecond; `None` if that is impossible or gains
    /// too little.
    fn share_out(&mut self, edge: Edge, plain: PlainStep, candidates: &[Candidate]) -> Option<f32> {
        let Edge { num_drafts, ns, .. } = edge;
        let (mut left, mut expected) = (num_drafts, 0.0);
        self.needed.clear();
        for candidate in candidates {
            let least = (ns / plain.ns - candidate.credit) / MOST_DELAY - 1.0;
            let (mut needed, mut gain, mut survival) = (0, 0.0, 1.0);
            while gain < least {
                if needed == candidate.num_drafts.min(left) {
                    return None;
                }
                survival *= candidate.belief.acceptance_after(needed);
                gain += survival;
                needed += 1;
            }
            left -= needed;
            expected += gain;
            self.needed.push(needed);
        }
        // A row's first drafts are the likeliest that it has, so those that it needs are the first to be passed over.
        self.passed.clear();
        self.passed.extend(self.needed.iter().map(|&needed| -(needed as i32)));
        for draft in self.likeliest.sorted() {
            if left == 0 {
                break;
            }
            let passed = &mut self.passed[draft.candidate as usize];
            *passed += 1;
            if *passed > 0 {
                left -= 1;
                expected += draft.survival;
            }
        }
        // Drafts that are needed may be less likely than all those that were sorted.
        self.chosen.clear();
        let shares = self.needed.iter().zip(&self.passed);
        self.chosen.extend(shares.map(|(&needed, &passed)| needed + passed.max(0) as u32));
        let (num_rows, num_drafting) = (plain.num_rows as f32, candidates.len() as f32);
        let gain = |rows: f32| (rows + expected) * plain.ns / (rows * ns);
        let pays = left == 0 && gain(num_drafting) >= LEAST_GAIN && gain(num_rows) > 1.0;
        pays.then_some((num_rows + expected) / ns)
    }
}
