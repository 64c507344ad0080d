//! `Estimate`: how often the drafts of one request are right.

/// Trials after which an observation counts half.
const HALF_LIFE: f32 = 32.0;

/// A further token costs a step about so much of its time, so drafts that are less likely never pay.
const LEAST_SURVIVAL: f32 = 0.03;

/// What is believed of a request before anything is known: a quarter of its drafts are right. That pays with few rows
/// in a step; with many, guesses that are not run show first what they are worth.
const PRIOR_TRIALS: f32 = 2.0;
const PRIOR_HITS: f32 = 0.5;

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
    /// The probability that a draft is right, given that those before it were.
    #[must_use]
    pub fn acceptance(self) -> f32 {
        self.hits / self.trials
    }

    /// How many drafts in a row are likely enough to be worth finding: more would hardly be reached.
    #[must_use]
    pub fn reach(self) -> usize {
        (LEAST_SURVIVAL.ln() / self.acceptance().clamp(0.01, 0.99).ln()).max(1.0) as usize
    }

    /// `num_right` guesses were right, and the one behind them was wrong if `missed`.
    pub fn observe(&mut self, num_right: u32, missed: bool) {
        let trials = num_right as f32 + f32::from(u8::from(missed));
        let kept = (-trials / HALF_LIFE).exp2();
        self.hits = self.hits * kept + num_right as f32;
        self.trials = self.trials * kept + trials;
    }
}
