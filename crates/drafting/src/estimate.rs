//! `Estimate`: how often the drafts of one request were right; and `Belief`: the probabilities for its next drafts that
//! follow.

/// The weight that an observation keeps after one more trial: half after 32 trials.
const KEPT: f64 = 0.978_572_062_087_700_1;

/// More trials than one observation can have: the drafts of a step, and one after them.
const NUM_TRIALS: usize = 66;

/// The remaining weight after each number of trials.
static KEPT_AFTER: [f32; NUM_TRIALS] = kept_after();

const fn kept_after() -> [f32; NUM_TRIALS] {
    let mut table = [1.0; NUM_TRIALS];
    let (mut kept, mut trials) = (1.0, 0);
    while trials < NUM_TRIALS {
        table[trials] = kept as f32;
        kept *= KEPT;
        trials += 1;
    }
    table
}

/// A further token costs about this share of a step, so drafts that are less likely never pay.
const LEAST_SURVIVAL: f32 = 0.03;

/// The assumption about a new request counts like this many trials.
const PRIOR_TRIALS: f32 = 2.0;

/// Counts of right guesses and trials, in which older ones weigh less.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Estimate {
    hits: f32,
    trials: f32,
}

impl Estimate {
    /// Whether nothing has been observed yet.
    pub(crate) fn is_new(self) -> bool {
        self.trials == 0.0
    }

    /// Record that `num_right` guesses were right, and, if `missed`, that the next one was wrong.
    pub fn observe(&mut self, num_right: u32, missed: bool) {
        let trials = num_right + u32::from(missed);
        let kept = KEPT_AFTER[(trials as usize).min(NUM_TRIALS - 1)];
        self.hits = self.hits * kept + num_right as f32;
        self.trials = self.trials * kept + trials as f32;
    }

    /// The probabilities that follow from the counts, if a share `prior` of the drafts was assumed to be right at
    /// first.
    #[must_use]
    pub fn belief(self, prior: f32) -> Belief {
        Belief { hits: self.hits + PRIOR_TRIALS * prior, trials: self.trials + PRIOR_TRIALS }
    }
}

/// The probabilities of drafts. The less is known, the more each right draft says about those after it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Belief {
    hits: f32,
    trials: f32,
}

impl Belief {
    /// Make a belief as after this many trials, of which a share `acceptance` was right.
    #[must_use]
    pub fn new(acceptance: f32, trials: f32) -> Self {
        Self { hits: acceptance * trials, trials }
    }

    /// The probability that the next draft is right.
    #[must_use]
    pub fn acceptance(self) -> f32 {
        self.hits / self.trials
    }

    /// The probability that a draft is right, given that `num_right` before it were.
    #[must_use]
    pub fn acceptance_after(self, num_right: u32) -> f32 {
        (self.hits + num_right as f32) / (self.trials + num_right as f32)
    }

    /// How many drafts in a row are likely enough to be worth finding; more would hardly be reached.
    #[must_use]
    pub fn reach(self) -> usize {
        (LEAST_SURVIVAL.ln() / self.acceptance_after(1).clamp(0.01, 0.99).ln()).max(1.0) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_observation_counts_half_after_32_trials() {
        for (trials, &kept) in KEPT_AFTER.iter().enumerate() {
            assert!((kept - (-(trials as f32) / 32.0).exp2()).abs() < 1e-6, "{trials}");
        }
    }
}
