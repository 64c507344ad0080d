//! `Beliefs`: what the first drafts of requests were worth lately, which is what a new request's are believed to be.

/// Where guesses come from, and by how many tokens they were found: each kind is judged apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Kind {
    /// The request's own tokens, by two.
    Few,
    /// By three to seven, or by an n-gram.
    #[default]
    Some,
    /// By eight or more.
    Many,
    /// What other requests were answered.
    Archive,
    /// What the caller predicts.
    Prediction,
    /// A second model.
    Model,
}

/// Kinds there are.
pub(crate) const NUM_KINDS: usize = 6;

/// What is left of a trial after one more: after 16 of them it counts half. Requests of one time are alike, and the
/// next hour's may be others.
const KEPT: f32 = 0.957_603_3;

/// What is believed before anything is known: a quarter of the drafts are right. That pays with few rows in a step;
/// with many, guesses that are not run show first what they are worth.
const PRIOR: f32 = 0.25;
const PRIOR_TRIALS: f32 = 2.0;

/// What is believed of a second model: most of its guesses are right, or an engine would not have it. They are not
/// known before they run, so that only a trial shows what they are worth: each request tries them.
const PRIOR_OF_MODEL: f32 = 0.6;

/// Trials of one kind and request that count: it is judged by its own afterwards, and a long answer counts no more than a
/// short one.
pub(crate) const NUM_FIRST: u8 = 4;

/// Shares of the first guesses that were right, of all requests together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Beliefs {
    hits: [f32; NUM_KINDS],
    trials: [f32; NUM_KINDS],
}

impl Beliefs {
    /// The share that is believed to be right of a request's drafts of which nothing is known.
    pub(crate) fn share(&self, kind: Kind) -> f32 {
        if kind == Kind::Model {
            return PRIOR_OF_MODEL;
        }
        let kind = kind as usize;
        (self.hits[kind] + PRIOR_TRIALS * PRIOR) / (self.trials[kind] + PRIOR_TRIALS)
    }

    /// One of the first guesses of a request was right or not.
    pub(crate) fn observe(&mut self, kind: Kind, is_right: bool) {
        let kind = kind as usize;
        self.hits[kind] = KEPT * self.hits[kind] + f32::from(is_right);
        self.trials[kind] = KEPT * self.trials[kind] + 1.0;
    }
}

#[cfg(test)]
mod tests {
    use super::{Beliefs, Kind};

    #[test]
    fn what_others_drafts_were_worth_is_believed_of_the_next_kind_by_kind() {
        let mut beliefs = Beliefs::default();
        assert!((beliefs.share(Kind::Some) - 0.25).abs() < 1e-6);
        for _ in 0..16 {
            beliefs.observe(Kind::Some, true);
            beliefs.observe(Kind::Many, false);
        }
        assert!(beliefs.share(Kind::Some) > 0.85, "{}", beliefs.share(Kind::Some));
        assert!(beliefs.share(Kind::Many) < 0.05, "{}", beliefs.share(Kind::Many));
        assert!((beliefs.share(Kind::Few) - 0.25).abs() < 1e-6, "of these nothing is known");
        for _ in 0..64 {
            beliefs.observe(Kind::Some, false);
        }
        assert!(beliefs.share(Kind::Some) < 0.1, "the next hour's requests may be others");
    }

    #[test]
    fn a_second_model_is_tried_by_each_request() {
        let mut beliefs = Beliefs::default();
        for _ in 0..100 {
            beliefs.observe(Kind::Model, false);
        }
        assert!((beliefs.share(Kind::Model) - 0.6).abs() < 1e-6);
    }
}
