//! Thoughts before an answer: how far a sample is with them, by its tokens alone.

use scheduler::ThinkingGate;

/// What may follow, as far as thoughts decide it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// Any token.
    Any,
    /// Any token that does not end the output: an answer is still to come.
    AnyButEnd,
    /// This token.
    Only(u32),
    /// What the grammar takes, or the token that begins thoughts.
    GrammarOr(u32),
    /// What the grammar takes.
    Grammar,
}

/// Where a sample is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// No thoughts, which may begin.
    Before,
    Within,
    /// The budget is spent: so many of the tokens that end thoughts have come.
    Ending(usize),
    /// The grammar has begun: thoughts begin no more.
    Behind,
}

/// Follows the thoughts of one sample.
#[derive(Clone, Debug)]
pub(crate) struct Thinking {
    gate: ThinkingGate,
    /// A grammar holds what is not thought.
    has_grammar: bool,
    state: State,
    num_tokens: u32,
}

impl Thinking {
    /// A sample without tokens.
    pub(crate) fn new(gate: &ThinkingGate, has_grammar: bool) -> Self {
        let mut thinking = Self { gate: gate.clone(), has_grammar, state: State::Before, num_tokens: 0 };
        if gate.begins_within {
            thinking.state = thinking.going_on();
        }
        thinking
    }

    /// Take a token; false if it is not of thoughts, but for the grammar.
    pub(crate) fn take(&mut self, token: u32) -> bool {
        let end = if self.has_grammar { State::Behind } else { State::Before };
        match self.state {
            State::Before if token == self.gate.open_id => self.state = self.going_on(),
            State::Before => {
                self.state = end;
                return false;
            }
            State::Within if token == self.gate.close_id => self.state = end,
            State::Within => {
                self.num_tokens += 1;
                self.state = self.going_on();
            }
            State::Ending(count) if count + 1 < self.gate.end_ids.len() => {
                self.state = State::Ending(count + 1);
            }
            State::Ending(_) => self.state = end,
            State::Behind => return false,
        }
        true
    }

    /// What may follow.
    pub(crate) fn next(&self) -> Next {
        match self.state {
            State::Before if self.has_grammar => Next::GrammarOr(self.gate.open_id),
            State::Within if self.has_grammar => Next::AnyButEnd,
            State::Before | State::Within => Next::Any,
            State::Ending(count) => {
                Next::Only(self.gate.end_ids.get(count).copied().unwrap_or(self.gate.close_id))
            }
            State::Behind => Next::Grammar,
        }
    }

    /// Within thoughts, or at their end where the budget is spent.
    fn going_on(&self) -> State {
        let is_spent = self.gate.budget.is_some_and(|budget| self.num_tokens >= budget);
        if is_spent { State::Ending(0) } else { State::Within }
    }
}

#[cfg(test)]
mod tests {
    use scheduler::ThinkingGate;

    use super::{Next, Thinking};

    const OPEN: u32 = 1;
    const CLOSE: u32 = 2;

    fn gate(begins_within: bool, budget: Option<u32>) -> ThinkingGate {
        ThinkingGate { open_id: OPEN, close_id: CLOSE, begins_within, budget, end_ids: [7, CLOSE].into() }
    }

    fn taken(thinking: &mut Thinking, tokens: &[u32]) -> Vec<bool> {
        tokens.iter().map(|&token| thinking.take(token)).collect()
    }

    #[test]
    fn a_budget_that_is_spent_forces_the_end() {
        let mut thinking = Thinking::new(&gate(true, Some(2)), true);
        assert_eq!(thinking.next(), Next::AnyButEnd);
        assert_eq!(taken(&mut thinking, &[9, 9]), [true, true]);
        assert_eq!(thinking.next(), Next::Only(7));
        assert!(thinking.take(7));
        assert_eq!(thinking.next(), Next::Only(CLOSE));
        assert!(thinking.take(CLOSE));
        assert_eq!(thinking.next(), Next::Grammar);
        assert!(!thinking.take(OPEN), "the grammar's business");
    }

    #[test]
    fn a_budget_of_nothing_ends_thoughts_where_they_begin() {
        assert_eq!(Thinking::new(&gate(true, Some(0)), false).next(), Next::Only(7));
        let mut thinking = Thinking::new(&gate(false, Some(0)), false);
        assert_eq!(thinking.next(), Next::Any);
        assert!(thinking.take(OPEN));
        assert_eq!(thinking.next(), Next::Only(7));
    }

    #[test]
    fn thoughts_that_begin_again_have_what_is_left() {
        let mut thinking = Thinking::new(&gate(false, Some(3)), false);
        assert_eq!(taken(&mut thinking, &[5, OPEN, 9, 9, CLOSE, 5]), [false, true, true, true, true, false]);
        assert_eq!(taken(&mut thinking, &[OPEN, 9]), [true, true]);
        assert_eq!(thinking.next(), Next::Only(7));
        assert_eq!(taken(&mut thinking, &[7, CLOSE, OPEN]), [true; 3]);
        assert_eq!(thinking.next(), Next::Only(7), "nothing is left");
    }

    #[test]
    fn a_grammar_begins_where_thoughts_end_or_do_not_begin() {
        let mut thinking = Thinking::new(&gate(false, None), true);
        assert_eq!(thinking.next(), Next::GrammarOr(OPEN));
        assert!(!thinking.take(5));
        assert_eq!(thinking.next(), Next::Grammar);
        let mut thinking = Thinking::new(&gate(false, None), true);
        assert_eq!(taken(&mut thinking, &[OPEN, 9, 9, 9, CLOSE, 5]), [true, true, true, true, true, false]);
    }
}
