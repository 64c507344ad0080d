//! `Candidate`: what was found for a row; `Likeliest`: the drafts of all rows of a step, those first that are likeliest
//! to be reached and right.

use crate::estimate::Belief;

/// Classes of each halving of the probability: drafts of one class count as equally likely. The first draft of each row
/// comes before any row's second among these.
const PER_HALVING: u32 = 128;
const MANTISSA_BITS: u32 = f32::MANTISSA_DIGITS - 1 - PER_HALVING.ilog2();

/// Halvings that are told apart: what is less likely never pays.
const NUM_HALVINGS: u32 = 12;
const NUM_CLASSES: usize = (PER_HALVING * NUM_HALVINGS) as usize;

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

/// A draft: whose, and the probability that it and all before it are right.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Draft {
    pub(crate) candidate: u32,
    pub(crate) survival: f32,
}

/// Scratch of a sort.
#[derive(Clone, Debug, Default)]
pub(crate) struct Likeliest {
    /// By depth and then by row.
    found: Vec<Draft>,
    gains: Vec<f32>,
    sorted: Vec<Draft>,
    /// Of the rows that have drafts of the depth that is looked at: candidate, and what its last one had.
    survivals: Vec<Draft>,
    /// By class, where its next draft goes.
    places: Vec<u32>,
}

impl Likeliest {
    /// The `most` likeliest of the drafts that were looked at. A row's stay in their order, so that what is taken of
    /// each is a prefix.
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
        self.sorted.clear();
        self.sorted.resize(self.found.len(), Draft::default());
        for &draft in &self.found {
            let place = &mut self.places[class_of(draft.survival)];
            self.sorted[*place as usize] = draft;
            *place += 1;
        }
        self.sorted.truncate(most as usize);
    }

    /// By candidate: the tokens that all its drafts give.
    pub(crate) fn gains(&self) -> &[f32] {
        &self.gains
    }

    /// Those that were sorted, in their order.
    pub(crate) fn sorted(&self) -> &[Draft] {
        &self.sorted
    }

    /// Look at all drafts: the first of each row, then the second ones, and so on.
    pub(crate) fn find(&mut self, candidates: &[Candidate]) {
        self.found.clear();
        self.gains.clear();
        self.gains.resize(candidates.len(), 0.0);
        self.survivals.clear();
        self.survivals.extend(
            (0..candidates.len()).map(|candidate| Draft { candidate: candidate as u32, survival: 1.0 }),
        );
        let mut depth = 0;
        while !self.survivals.is_empty() {
            self.survivals.retain_mut(|draft| {
                let candidate = &candidates[draft.candidate as usize];
                draft.survival *= candidate.belief.acceptance_after(depth);
                candidate.num_drafts > depth
            });
            for draft in &self.survivals {
                self.gains[draft.candidate as usize] += draft.survival;
            }
            self.found.extend_from_slice(&self.survivals);
            depth += 1;
        }
    }
}

/// The class of a probability, the likeliest first: of numbers that are not negative the bits are in their order.
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
