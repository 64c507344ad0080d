//! `Credit`: the time that a request has saved by its drafts, which drafts of other rows may cost it later; and the
//! small delay that they may cause a request that has saved nothing.

/// Most steps of credit: what was saved long ago does not count.
const MOST_STEPS: f64 = 8.0;

/// The share of the credit that one step may use.
const SHARE: f64 = 0.25;

/// The average delay per token that a request without credit may have, in steps. It is half of the promised limit,
/// because a size of step that is chosen for its time tends to take longer than expected.
const LATER: f64 = 0.012;

/// Most of that delay that adds up, so that one step may use more of it.
const MOST_LATER: f64 = 0.1;

/// How far a request is ahead of where it would be without any drafts, in steps.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Credit {
    steps: f64,
    /// How much later it may still come.
    patience: f64,
    /// Number of its tokens, and the time, when that was last counted; no tokens: never.
    num_tokens: usize,
    clock: f64,
}

impl Default for Credit {
    fn default() -> Self {
        Self { steps: 0.0, patience: LATER, num_tokens: 0, clock: 0.0 }
    }
}

impl Credit {
    /// Record that the request has `num_tokens` tokens at `clock`. The clock counts steps without drafts, of one token
    /// each.
    pub(crate) fn count(&mut self, num_tokens: usize, clock: f64) {
        if self.num_tokens > 0 {
            let came = num_tokens.saturating_sub(self.num_tokens) as f64;
            let ahead = came - (clock - self.clock);
            self.steps = (self.steps + ahead).clamp(0.0, MOST_STEPS);
            self.patience = (self.patience + LATER * came + ahead.min(0.0)).clamp(-MOST_LATER, MOST_LATER);
        }
        (self.num_tokens, self.clock) = (num_tokens, clock);
    }

    /// Whether the next step may take a little longer although the request has saved nothing.
    pub(crate) fn is_patient(self) -> bool {
        self.patience > 0.0
    }

    /// How much longer than without drafts the next step may take, in steps.
    pub(crate) fn to_spend(self) -> f32 {
        (SHARE * self.steps) as f32
    }
}
