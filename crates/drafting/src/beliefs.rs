//! `Beliefs`: how often the first drafts of recent requests were right. A new request's drafts are expected to be right
//! as often.

/// Where guesses come from, and how long the match was that gave them. Each kind is judged separately.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Kind {
    /// The request's own tokens, after a match of two tokens.
    Few,
    /// After a match of three to seven tokens, or an n-gram.
    #[default]
    Some,
    /// After a match of eight or more tokens.
    Many,
    /// The answers of other requests.
    Archive,
    /// The caller's prediction.
    Prediction,
    /// A second model.
    Model,
}

/// Number of kinds.
pub(crate) const NUM_KINDS: usize = 6;

/// The weight that a trial keeps after one more: half after 16 trials. Requests of one time are alike, but those of the
/// next hour may differ.
const KEPT: f32 = 0.957_603_3;

/// The share of right drafts that is assumed before anything is known: a quarter. With few rows in a step, drafts then
/// pay and run; with many, guesses that do not run first show what they are worth.
const PRIOR: f32 = 0.25;
const PRIOR_TRIALS: f32 = 2.0;

/// The share that is assumed for a second model: most of its guesses are right, or the engine would not have one. Its
/// guesses are only known when they run, so only a trial shows what they are worth; each request makes one.
const PRIOR_OF_MODEL: f32 = 0.6;

/// Trials of each kind that count per request. After them a request is judged by its own trials, so that a long answer
/// counts no more than a short one.
pub(crate) const NUM_FIRST: u8 = 4;

/// The shares of first guesses that were right, over all requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Beliefs {
    hits: [f32; NUM_KINDS],
    trials: [f32; NUM_KINDS],
}

impl Beliefs {
    /// The share of drafts of this kind that is assumed to be right for a request about which nothing is known.
    pub(crate) fn share(&self, kind: Kind) -> f32 {
        if kind == Kind::Model {
            return PRIOR_OF_MODEL;
        }
        let kind = kind as usize;
        (self.hits[kind] + PRIOR_TRIALS * PRIOR) / (self.trials[kind] + PRIOR_TRIALS)
    }

    /// Record whether one of a request's first guesses was right.
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
