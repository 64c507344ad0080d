//! How a request's news leaves the processor: as deltas, at the end only, or as events that are ready to be sent.

use scheduler::RequestKey;

/// Who waits for a request's news, and for which.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Delivery {
    /// A delta whenever something is new.
    #[default]
    Deltas,
    /// One delta, with the end: nobody looks before.
    AtTheEnd,
    /// New text as a rendered event; all else, the end and the token ids, as a delta at the end.
    Events(EventTemplate),
}

/// A server-sent event of one choice of one request, of which only the text changes from token to token.
///
/// What is before and after the text was rendered once, when the request came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventTemplate {
    before: Box<[u8]>,
    after: Box<[u8]>,
}

impl EventTemplate {
    /// Bytes that are sent as they are, before and after the text as a JSON string.
    #[must_use]
    pub fn new(before: impl Into<Box<[u8]>>, after: impl Into<Box<[u8]>>) -> Self {
        Self { before: before.into(), after: after.into() }
    }

    fn render(&self, text: &str, into: &mut Vec<u8>) {
        into.extend_from_slice(&self.before);
        serde_json::to_writer(&mut *into, text).expect("a string is JSON, and memory takes it");
        into.extend_from_slice(&self.after);
    }
}

/// Events of many requests, one per request, in one buffer.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct EventBatch {
    bytes: Vec<u8>,
    /// Whose event ends where.
    ends: Vec<(RequestKey, usize)>,
}

impl EventBatch {
    pub(crate) fn push(&mut self, key: RequestKey, template: &EventTemplate, text: &str) {
        template.render(text, &mut self.bytes);
        self.ends.push((key, self.bytes.len()));
    }

    /// Each request with its event, in the order in which they got their news.
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
