//! `Estimate`: how often the drafts of one request are right.

/// What is left of an observation after one more trial: after 32 of them it counts half.
const KEPT: f64 = 0.978_572_062_087_700_1;

/// More trials than one observation has: the drafts of a step and one behind them.
const NUM_TRIALS: usize = 66;

/// What is left after so many trials.
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

/// A further token costs a step about so much of its time, so drafts that are less likely never pay.
const LEAST_SURVIVAL: f32 = 0.03;

/// What is believed of a request before anything is known: a quarter of its drafts are right. That pays with few rows
/// in a step; with many, guesses that are not run show first what they are worth.
const PRIOR_TRIALS: f32 = 2.0;
const PRIOR_HITS: f32 = 0.5;

/// What is believed of a second model: most of its guesses are right, or an engine would not have it. They are not
/// known before they run, so that only a trial shows what they are worth.
const PRIOR_HITS_OF_MODEL: f32 = 1.2;

/// Counts with forgetting.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Estimate {
    hits: f32,
    trials: f32,
}

impl Default for Estimate {
    fn default() -> Self {
        Self { hits: PRIOR_HITS, trials: PRIOR_TRIALS }
    }
}

impl Estimate {
    /// Of the guesses of a second model.
    #[must_use]
    pub fn of_model() -> Self {
        Self { hits: PRIOR_HITS_OF_MODEL, trials: PRIOR_TRIALS }
    }

    /// The probability that a draft is right, given that those before it were.
    #[must_use]
    pub fn acceptance(self) -> f32 {
        self.hits / self.trials
    }

    /// Whether nothing was observed yet.
    pub(crate) fn is_new(self) -> bool {
        self == Self::default()
    }

    /// Believe this of drafts of which nothing is known, if it is more than is believed anyhow.
    pub(crate) fn believe(&mut self, acceptance: f32) {
        self.hits = self.hits.max(acceptance * self.trials);
    }

    /// How many drafts in a row are likely enough to be worth finding: more would hardly be reached.
    #[must_use]
    pub fn reach(self) -> usize {
        (LEAST_SURVIVAL.ln() / self.acceptance().clamp(0.01, 0.99).ln()).max(1.0) as usize
    }

    /// `num_right` guesses were right, and the one behind them was wrong if `missed`.
    pub fn observe(&mut self, num_right: u32, missed: bool) {
        let trials = num_right + u32::from(missed);
        let kept = KEPT_AFTER[(trials as usize).min(NUM_TRIALS - 1)];
        self.hits = self.hits * kept + num_right as f32;
        self.trials = self.trials * kept + trials as f32;
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
