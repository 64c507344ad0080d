//! What the owner of a server sends to its I/O thread.

use crate::message::QueryOutcome;

/// The answer to a query, on its way to the client.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) client_index: u32,
    pub(crate) id: u64,
    pub(crate) outcome: QueryOutcome,
}

/// The error of the last failed step.
#[derive(Debug, Default)]
pub(crate) struct StepError {
    /// Number of the error, from 1.
    pub(crate) number: u64,
    pub(crate) message: String,
}

/// A command for the I/O thread.
#[derive(Debug)]
pub(crate) enum Control {
    /// Say goodbye to the clients and end.
    Stop,
    /// Tell the clients why the engine died, and end.
    Fail(String),
    /// Send an answer to the client that asked.
    Reply(Reply),
}
