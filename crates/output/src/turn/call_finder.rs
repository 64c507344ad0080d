//! `CallFinder`: where the first call of an answer ends.

use super::event::TurnEvent;
use super::parser::TurnParser;
use super::reading::TurnReading;

/// Reads an answer until it has a whole call.
#[derive(Debug)]
pub(crate) struct CallFinder {
    parser: TurnParser,
    has_found: bool,
}

impl CallFinder {
    /// At the beginning of an answer.
    pub(crate) fn new(reading: &TurnReading) -> Self {
        Self { parser: reading.parser(), has_found: false }
    }

    /// Take more text; whether a call has ended by now.
    pub(crate) fn read(&mut self, text: &str) -> bool {
        if !self.has_found && !text.is_empty() {
            self.has_found = self.parser.push(text).contains(&TurnEvent::CallEnd);
        }
        self.has_found
    }
}
