//! `Candidate`: the drafts that were found for a row; `Likeliest`: sorts the drafts of all rows of a step by the
//! probability that they are reached and right.

use crate::estimate::Belief;

/// Classes per halving of the probability. Drafts of one class count as equally likely; among them, each row's first
/// draft comes before any row's second.
const PER_HALVING: u32 = 128;
const MANTISSA_BITS: u32 = f32::MANTISSA_DIGITS - 1 - PER_HALVING.ilog2();

/// Halvings that are distinguished; less likely drafts never pay.
const NUM_HALVINGS: u32 = 12;
const NUM_CLASSES: usize = (PER_HALVING * NUM_HALVINGS) as usize;

/// The drafts that were found for one row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Candidate {
    /// The row's place in the step.
    pub index: u32,
    /// Number of drafts found; after the choice, the number that runs.
    pub num_drafts: u32,
    /// How likely they are to be right.
    pub belief: Belief,
    /// Steps by which the row may come later, out of what its drafts saved before.
    pub credit: f32,
}

/// A draft: its candidate, and the probability that it and all drafts before it are right.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Draft {
    pub(crate) candidate: u32,
    pub(crate) survival: f32,
}

/// Sorts drafts; holds the buffers for that.
#[derive(Clone, Debug, Default)]
pub(crate) struct Likeliest {
    /// The drafts by depth, then by row.
    found: Vec<Draft>,
    gains: Vec<f32>,
    /// The drafts by class; only the first `num_sorted` count.
    sorted: Vec<Draft>,
    num_sorted: usize,
    /// For each class, where its next draft goes.
    places: Vec<u32>,
}

impl Likeliest {
    /// Sort the `most` likeliest of the drafts that were looked at. The drafts of one row stay in order, so that those
    /// taken of each row are a prefix.
    pub(crate) fn sort(&mut self, most: u32) {
        self.places.clear();
        self.places.resize(NUM_CLASSES, 0);
        for draft in &self.found {
            self.places[class_of(draft.survival)] += 1;
        }
        let mut place = 0;
        for count in &mut self.places {
            place += std::mem::replace(count, place);
        }
        if self.sorted.len() < self.found.len() {
            self.sorted.resize(self.found.len(), Draft::default());
        }
        for &draft in &self.found {
            let place = &mut self.places[class_of(draft.survival)];
            self.sorted[*place as usize] = draft;
            *place += 1;
        }
        self.num_sorted = self.found.len().min(most as usize);
    }

    /// For each candidate, the expected number of tokens from all its drafts.
    pub(crate) fn gains(&self) -> &[f32] {
        &self.gains
    }

    /// The sorted drafts.
    pub(crate) fn sorted(&self) -> &[Draft] {
        &self.sorted[..self.num_sorted]
    }

    /// Look at all drafts: first at the first one of each row, then at the second ones, and so on.
    pub(crate) fn find(&mut self, candidates: &[Candidate]) {
        self.found.clear();
        self.gains.clear();
        self.gains.resize(candidates.len(), 0.0);
        for (index, (candidate, gain)) in (0..).zip(candidates.iter().zip(&mut self.gains)) {
            if candidate.num_drafts > 0 {
                let survival = candidate.belief.acceptance_after(0);
                *gain += survival;
                self.found.push(Draft { candidate: index, survival });
            }
        }
        let (mut depth, mut shallower) = (1, 0..self.found.len());
        while !shallower.is_empty() {
            for place in shallower.clone() {
                let Draft { candidate: index, mut survival } = self.found[place];
                let candidate = &candidates[index as usize];
                if candidate.num_drafts > depth {
                    survival *= candidate.belief.acceptance_after(depth);
                    self.gains[index as usize] += survival;
                    self.found.push(Draft { candidate: index, survival });
                }
            }
            (depth, shallower) = (depth + 1, shallower.end..self.found.len());
        }
    }
}

/// The class of a probability, the likeliest first. The bits of non-negative floats sort like the numbers.
fn class_of(survival: f32) -> usize {
    let distance = (1.0_f32.to_bits().saturating_sub(survival.to_bits())) >> MANTISSA_BITS;
    (distance as usize).min(NUM_CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_drafts_come_first_among_those_that_are_equally_likely() {
        let of = |num_drafts, acceptance| Candidate {
            index: 0,
            num_drafts,
            belief: Belief::new(acceptance, 1e6),
            credit: 0.0,
        };
        let mut likeliest = Likeliest::default();
        likeliest.find(&[of(3, 0.999), of(0, 0.999), of(2, 0.4), of(2, 0.999)]);
        assert!(likeliest.gains()[1].abs() < 1e-6, "it has none");
        assert!((likeliest.gains()[2] - 0.56).abs() < 1e-4, "{:?}", likeliest.gains());
        likeliest.sort(6);
        let order: Vec<u32> = likeliest.sorted().iter().map(|draft| draft.candidate).collect();
        assert_eq!(order, [0, 3, 0, 3, 0, 2]);
        for (likelier, draft) in [(1.0, 0.99), (0.5, 0.49), (0.04, 0.035), (1e-3, 1e-9)] {
            assert!(class_of(likelier) < class_of(draft), "{likelier} {draft}");
        }
        assert_eq!(class_of(0.0), NUM_CLASSES - 1);
    }
}
