//! `Credit`: the time that a request has saved by its drafts, which its neighbours' drafts may take from it.

/// Most that is kept: what was saved long ago does not count.
const MOST_STEPS: f64 = 8.0;

/// Share of it that one step may take.
const SHARE: f64 = 0.25;

/// How far a request is ahead of where it would be without any drafts, in steps.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Credit {
    steps: f64,
    /// Its tokens, and the time, when that was last counted; no tokens: never.
    num_tokens: usize,
    clock: f64,
}

impl Credit {
    /// The request has `num_tokens` tokens at `clock`, the time in steps without drafts: one token each.
    pub(crate) fn count(&mut self, num_tokens: usize, clock: f64) {
        if self.num_tokens > 0 {
            let came = num_tokens.saturating_sub(self.num_tokens) as f64;
            self.steps = (self.steps + came - (clock - self.clock)).clamp(0.0, MOST_STEPS);
        }
        (self.num_tokens, self.clock) = (num_tokens, clock);
    }

    /// Steps that the next step may take longer than without drafts.
    pub(crate) fn to_spend(self) -> f32 {
        (SHARE * self.steps) as f32
    }
}
