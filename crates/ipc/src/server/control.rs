//! What the owner of a server tells its I/O thread.

use crate::message::QueryOutcome;

/// An answer on its way to its client.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) client_index: u32,
    pub(crate) id: u64,
    pub(crate) outcome: QueryOutcome,
}

/// Why the last failed step failed.
#[derive(Debug, Default)]
pub(crate) struct StepError {
    /// From 1.
    pub(crate) number: u64,
    pub(crate) message: String,
}

/// What the owner tells the I/O thread.
#[derive(Debug)]
pub(crate) enum Control {
    /// Say goodbye and end.
    Stop,
    /// Tell every client why the engine died, and end.
    Fail(String),
    /// Send an answer to the client that asked.
    Reply(Reply),
}
