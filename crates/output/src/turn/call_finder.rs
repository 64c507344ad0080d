//! `CallFinder`: finds where the first call of an answer ends.

use super::event::TurnEvent;
use super::parser::TurnParser;
use super::reading::TurnReading;

/// Reads an answer until it contains a whole call.
#[derive(Debug)]
pub(crate) struct CallFinder {
    parser: TurnParser,
    has_found: bool,
}

impl CallFinder {
    /// Start at the beginning of an answer.
    pub(crate) fn new(reading: &TurnReading) -> Self {
        Self { parser: reading.parser(), has_found: false }
    }

    /// Read more text; returns whether a call has ended by now.
    pub(crate) fn read(&mut self, text: &str) -> bool {
        if !self.has_found && !text.is_empty() {
            self.has_found = self.parser.push(text).contains(&TurnEvent::CallEnd);
        }
        self.has_found
    }
}
