//! What the events of a turn amount to.

use output::{TurnEvent, TurnParser};

/// All of a turn, however its text was cut.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Turn {
    pub(crate) content: String,
    pub(crate) reasoning: String,
    /// Name, arguments, and whether the call came to its end.
    pub(crate) calls: Vec<(String, String, bool)>,
}

impl Turn {
    fn add(&mut self, events: Vec<TurnEvent>) {
        for event in events {
            match event {
                TurnEvent::Content(text) => self.content.push_str(&text),
                TurnEvent::Reasoning(text) => self.reasoning.push_str(&text),
                TurnEvent::CallBegin { index, name } => {
                    assert_eq!(index as usize, self.calls.len());
                    self.calls.push((name, String::new(), false));
                }
                TurnEvent::CallArgs(text) => self.calls.last_mut().expect("a call").1.push_str(&text),
                TurnEvent::CallEnd => self.calls.last_mut().expect("a call").2 = true,
            }
        }
    }
}

/// The turn of a text that comes in pieces.
pub(crate) fn read<'a>(mut parser: TurnParser, pieces: impl IntoIterator<Item = &'a str>) -> Turn {
    let mut turn = Turn::default();
    for piece in pieces {
        turn.add(parser.push(piece));
    }
    turn.add(parser.finish());
    turn
}

/// The turn of a text: the same whole, cut in two anywhere, and character by character.
pub(crate) fn read_in_all_cuts(parser: &TurnParser, text: &str) -> Turn {
    let whole = read(parser.clone(), [text]);
    for (at, _) in text.char_indices() {
        assert_eq!(read(parser.clone(), [&text[..at], &text[at..]]), whole, "{text:?} cut at {at}");
    }
    let characters = text.char_indices().map(|(at, char)| &text[at..at + char.len_utf8()]);
    assert_eq!(read(parser.clone(), characters), whole, "{text:?} by characters");
    whole
}
