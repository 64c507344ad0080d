//! `Credit`: the time that a request has saved by its drafts, which its neighbours' drafts may take from it, and the
//! little that they may take from one that saves nothing.

/// Most that is kept: what was saved long ago does not count.
const MOST_STEPS: f64 = 8.0;

/// Share of it that one step may take.
const SHARE: f64 = 0.25;

/// How much later each token of a request may come on average that saves nothing, in steps. Half of what is promised,
/// since a size of step that is chosen for its time seems to take less than it does.
const LATER: f64 = 0.012;

/// So much of it adds up, for one step to take more of.
const MOST_LATER: f64 = 0.1;

/// How far a request is ahead of where it would be without any drafts, in steps.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Credit {
    steps: f64,
    /// By how much it may come later still.
    patience: f64,
    /// Its tokens, and the time, when that was last counted; no tokens: never.
    num_tokens: usize,
    clock: f64,
}

impl Default for Credit {
    fn default() -> Self {
        Self { steps: 0.0, patience: LATER, num_tokens: 0, clock: 0.0 }
    }
}

impl Credit {
    /// The request has `num_tokens` tokens at `clock`, the time in steps without drafts: one token each.
    pub(crate) fn count(&mut self, num_tokens: usize, clock: f64) {
        if self.num_tokens > 0 {
            let came = num_tokens.saturating_sub(self.num_tokens) as f64;
            let ahead = came - (clock - self.clock);
            self.steps = (self.steps + ahead).clamp(0.0, MOST_STEPS);
            self.patience = (self.patience + LATER * came + ahead.min(0.0)).clamp(-MOST_LATER, MOST_LATER);
        }
        (self.num_tokens, self.clock) = (num_tokens, clock);
    }

    /// Whether the next step may take a little longer though the request has saved nothing.
    pub(crate) fn is_patient(self) -> bool {
        self.patience > 0.0
    }

    /// Steps that the next step may take longer than without drafts.
    pub(crate) fn to_spend(self) -> f32 {
        (SHARE * self.steps) as f32
    }
}
