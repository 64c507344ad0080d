//! The constant bytes around the part of an event that changes.

/// A server-sent event of one choice of one request, in which only the text changes from token to token.
///
/// The bytes before and after the text were rendered once, when the request arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventTemplate {
    before: Box<[u8]>,
    after: Box<[u8]>,
}

impl EventTemplate {
    /// `before` and `after` are sent unchanged, around the text as a JSON string.
    #[must_use]
    pub fn new(before: impl Into<Box<[u8]>>, after: impl Into<Box<[u8]>>) -> Self {
        Self { before: before.into(), after: after.into() }
    }

    pub(crate) fn before(&self) -> &[u8] {
        &self.before
    }

    pub(crate) fn after(&self) -> &[u8] {
        &self.after
    }

    pub(crate) fn render(&self, text: &str, into: &mut Vec<u8>) {
        into.extend_from_slice(&self.before);
        serde_json::to_writer(&mut *into, text).expect("a string is JSON, and memory takes it");
        into.extend_from_slice(&self.after);
    }
}
