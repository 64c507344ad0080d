//! How a request's news leaves the processor: as deltas, at the end only, or as events that are ready to be sent.

use scheduler::RequestKey;

use crate::event_template::EventTemplate;
use crate::turn_events::TurnEvents;

/// How a request's caller wants its news.
#[derive(Debug, Clone, Default)]
pub enum Delivery {
    /// A delta whenever something is new.
    #[default]
    Deltas,
    /// One delta, with the end: the caller does not look before.
    AtTheEnd,
    /// New text as rendered events; all else, the end and the token ids, as a delta at the end.
    Events(EventTemplate),
    /// The same of an answer that is read for thoughts and calls: its text goes out as events to the last of it.
    Turn(Box<TurnEvents>),
}

/// Text of a request that waits to be taken, with the places where one piece ends and the next one begins: a token's text,
/// or that of the tokens of an [interval](crate::OutputOptions::stream_interval).
///
/// A piece is an event of its own as long as they are taken as fast as they come: clients see the pace of the engine. Of a
/// reader that is far behind, more than [`Pieces::MAX`] are joined.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    ends: [usize; Self::MAX],
    len: usize,
}

impl Pieces {
    const MAX: usize = 32;

    /// A piece ends at byte `end` of what waits. Returns whether it has any text.
    pub(crate) fn push(&mut self, end: usize) -> bool {
        let has_text = end > self.end();
        if has_text {
            self.len = Self::MAX.min(self.len + 1);
            self.ends[self.len - 1] = end;
        }
        has_text
    }

    /// Where the last of them ends.
    pub(crate) fn end(&self) -> usize {
        self.ends[..self.len].last().copied().unwrap_or(0)
    }

    /// The pieces of `text`, which begins with them.
    pub(crate) fn of<'a>(&self, text: &'a str) -> impl Iterator<Item = &'a str> + use<'a> {
        let starts = std::iter::once(0).chain(self.ends);
        starts.zip(self.ends).take(self.len).map(|(start, end)| &text[start..end])
    }
}

/// Events of many requests, those of each side by side, in one buffer.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct EventBatch {
    bytes: Vec<u8>,
    /// Whose events end where.
    ends: Vec<(RequestKey, usize)>,
}

impl EventBatch {
    pub(crate) fn push<'a>(
        &mut self,
        key: RequestKey,
        template: &EventTemplate,
        pieces: impl Iterator<Item = &'a str>,
    ) {
        pieces.for_each(|text| template.render(text, &mut self.bytes));
        self.ends.push((key, self.bytes.len()));
    }

    /// Events of an answer that is read; `rest` is the end of its text, once it has ended.
    pub(crate) fn push_turn<'a>(
        &mut self,
        key: RequestKey,
        turn: &mut TurnEvents,
        pieces: impl Iterator<Item = &'a str>,
        rest: Option<&str>,
    ) {
        let start = self.bytes.len();
        pieces.for_each(|text| turn.read(text, &mut self.bytes));
        if let Some(rest) = rest {
            turn.read(rest, &mut self.bytes);
            turn.finish(&mut self.bytes);
        }
        // Its beginning is news, whatever it says: what opens a stream goes out with it. Not so an end without any: that
        // may be an error, and the stream is to say that first.
        let has_begun = rest.is_none() && turn.begin();
        if has_begun || self.bytes.len() > start {
            self.ends.push((key, self.bytes.len()));
        }
    }

    /// Each request with its events, in the order in which they got their news.
    #[must_use]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (RequestKey, &[u8])> {
        let mut start = 0;
        self.ends.iter().map(move |&(key, end)| {
            let event = &self.bytes[start..end];
            start = end;
            (key, event)
        })
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}
