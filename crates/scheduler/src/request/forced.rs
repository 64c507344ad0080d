//! `ForcedTokens`: tokens that a request has without a step that gave them, until the step that computes them tells them.

/// Some of the tokens of a request, one behind another.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct ForcedTokens {
    /// Position of the first.
    start: u32,
    count: u32,
}

impl ForcedTokens {
    /// A request that has so many tokens gets more of this kind; what is noted here already are its last ones.
    pub(crate) fn extend(&mut self, num_tokens: u32, count: u32) {
        if self.count == 0 {
            self.start = num_tokens;
        }
        self.count += count;
        debug_assert_eq!(self.start + self.count, num_tokens + count, "no other token came between them");
    }

    /// There are none.
    pub(crate) fn is_empty(self) -> bool {
        self.count == 0
    }

    /// Position of the first one.
    pub(crate) fn start(self) -> usize {
        self.start as usize
    }

    /// How many there are.
    pub(crate) fn len(self) -> usize {
        self.count as usize
    }
}
