//! Multimodal inputs: the tokens of one are computed in the same step, if they are not to be cut.

use std::cell::Cell;

use super::NaiveScheduler;

/// Position of an input's first token, and how many it has.
pub type Input = (usize, usize);

/// Those that begin before a position: what the tokens before it depend on.
pub fn inputs_before(inputs: &[Input], end: usize) -> Vec<Input> {
    inputs.iter().copied().filter(|&(offset, _)| offset < end).collect()
}

/// What became of chunks that would have cut an input.
#[derive(Clone, Debug, Default)]
pub struct Cuts {
    /// They end before it.
    pub shorter: Cell<usize>,
    /// They wait for a step that has room.
    pub waiting: Cell<usize>,
    /// They begin within one, of which the prefix cache has the first tokens.
    pub begun_within: Cell<usize>,
}

impl NaiveScheduler {
    /// The most of the next tokens from `start` on that do not end within an input.
    pub(super) fn without_cutting(&self, arrival: u64, start: usize, num_tokens: usize) -> usize {
        if !self.config.base.disable_chunked_mm_input {
            return num_tokens;
        }
        let inputs = &self.requests[&arrival].new.inputs;
        let is_within = |end: usize| inputs.iter().any(|&(offset, len)| offset < end && end < offset + len);
        let found = (0..=num_tokens).rev().find(|&n| !is_within(start + n)).unwrap_or(0);
        let count = |counter: &Cell<usize>, is: bool| counter.set(counter.get() + usize::from(is));
        count(&self.cuts.shorter, 0 < found && found < num_tokens);
        count(&self.cuts.waiting, found == 0 && num_tokens > 0);
        count(&self.cuts.begun_within, found > 0 && is_within(start));
        found
    }
}
