//! How a request's output leaves the processor: as deltas, as one delta at the end, or as events that are ready to be
//! sent.

use std::sync::{Arc, Mutex, PoisonError};

use scheduler::RequestKey;

use crate::event_template::EventTemplate;
use crate::response_events::ResponseEvents;
use crate::turn_events::TurnEvents;

/// How the caller of a request takes its output.
#[derive(Debug, Clone, Default)]
pub enum Delivery {
    /// A delta whenever there is something new.
    #[default]
    Deltas,
    /// One delta at the end; the caller does not look earlier.
    AtTheEnd,
    /// New text as rendered events; everything else, such as the end and the token ids, as one delta at the end.
    Events(EventTemplate),
    /// Like `Events`, for an answer that is parsed for reasoning and tool calls: all of its text goes out as events.
    Turn(Box<TurnEvents>),
    /// Like `Turn`, as the events of a response. The caller has them, too, and renders the end.
    Response(Arc<Mutex<ResponseEvents>>),
}

/// Text of a request that waits to be taken, and where one piece ends and the next one begins: the text of one token, or of
/// the tokens of an [interval](crate::OutputOptions::stream_interval).
///
/// While the reader keeps up, each piece becomes an event of its own, so that clients see the pace of the engine. If the
/// reader is far behind, so that more than [`Pieces::MAX`] pieces wait, they are joined.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    ends: [usize; Self::MAX],
    len: usize,
}

impl Pieces {
    const MAX: usize = 32;

    /// Record that a piece ends at byte `end` of the waiting text. Returns whether it has any text.
    pub(crate) fn push(&mut self, end: usize) -> bool {
        let has_text = end > self.end();
        if has_text {
            self.len = Self::MAX.min(self.len + 1);
            self.ends[self.len - 1] = end;
        }
        has_text
    }

    /// The end of the last piece.
    pub(crate) fn end(&self) -> usize {
        self.ends[..self.len].last().copied().unwrap_or(0)
    }

    /// Split the beginning of `text` into its pieces.
    pub(crate) fn of<'a>(&self, text: &'a str) -> impl Iterator<Item = &'a str> + use<'a> {
        let starts = std::iter::once(0).chain(self.ends);
        starts.zip(self.ends).take(self.len).map(|(start, end)| &text[start..end])
    }
}

/// The events of many requests in one buffer, those of each request side by side.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct EventBatch {
    bytes: Vec<u8>,
    /// For each request, where its events end.
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

    /// Append the events of an answer that is parsed. `rest` is the last part of its text if it has ended.
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
        // The beginning of an answer counts as news, whatever it says: the chunk that opens a stream is sent with it.
        // An end without a beginning does not: it may be an error, and the stream must report that first.
        let has_begun = rest.is_none() && turn.begin();
        if has_begun || self.bytes.len() > start {
            self.ends.push((key, self.bytes.len()));
        }
    }

    /// Append the events of a response. `rest` is the last part of its text if it has ended.
    pub(crate) fn push_response<'a>(
        &mut self,
        key: RequestKey,
        response: &Mutex<ResponseEvents>,
        pieces: impl Iterator<Item = &'a str>,
        rest: Option<&'a str>,
    ) {
        let start = self.bytes.len();
        let mut response = response.lock().unwrap_or_else(PoisonError::into_inner);
        pieces.chain(rest).for_each(|text| response.read(text, &[], &mut self.bytes));
        // As in `push_turn`.
        let has_begun = rest.is_none() && response.begin();
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

    /// Whether there are no events.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}
