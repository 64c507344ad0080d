//! `Record`: what became of one request, and when.

use std::time::Duration;

use thiserror::Error;

/// Why a request brought nothing. Its `kind` is what reports count.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum Failure {
    /// No connection.
    #[error("cannot connect: {error}")]
    Connect {
        /// What the system says.
        error: String,
    },
    /// Another status than 200.
    #[error("HTTP status {status}: {message}")]
    Status {
        /// Status.
        status: u16,
        /// From the body.
        message: String,
    },
    /// The server gave up inside the stream.
    #[error("error in the stream: {message}")]
    ErrorEvent {
        /// What it says.
        message: String,
    },
    /// The answer ended before its end.
    #[error("the answer was cut off: {error}")]
    Cut {
        /// How.
        error: String,
    },
    /// It took longer than a request may.
    #[error("no end after {} s", timeout.as_secs_f64())]
    Timeout {
        /// Allowed.
        timeout: Duration,
    },
    /// Something else than a stream of chunks.
    #[error("not a stream of chunks: {problem}")]
    Invalid {
        /// What it is.
        problem: String,
    },
    /// A whole stream without any text in it.
    #[error("the stream had no text")]
    Empty,
}

impl Failure {
    /// Name of its kind: `connect`, `http_503`, `error_event`, `cut`, `timeout`, `invalid`, `empty`.
    #[must_use]
    pub fn kind(&self) -> String {
        match self {
            Self::Connect { .. } => "connect".to_owned(),
            Self::Status { status, .. } => format!("http_{status}"),
            Self::ErrorEvent { .. } => "error_event".to_owned(),
            Self::Cut { .. } => "cut".to_owned(),
            Self::Timeout { .. } => "timeout".to_owned(),
            Self::Invalid { .. } => "invalid".to_owned(),
            Self::Empty => "empty".to_owned(),
        }
    }
}

/// One request. Times are from when it was sent, but for `sent`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Record {
    /// Its place among the requests of its run, from 0.
    pub number: usize,
    /// When it was sent, from the run's start.
    pub sent: Duration,
    /// Until the first event with text.
    pub first_token: Duration,
    /// Until the last event with a choice.
    pub end: Duration,
    /// Between one event with text and the next, in nanoseconds.
    pub gaps_ns: Vec<u64>,
    /// Events with text.
    pub num_events: u64,
    /// Of the prompt: the server's count, else what was sent if that is known.
    pub num_prompt_tokens: Option<u64>,
    /// Of the answer: the server's count, else None.
    pub num_output_tokens: Option<u64>,
    /// Bytes of the answer's body.
    pub num_bytes: u64,
    /// None: it came to its end.
    pub failure: Option<Failure>,
}

impl Record {
    /// Tokens of the answer; one per event where the server did not say.
    #[must_use]
    pub fn output_tokens(&self) -> u64 {
        self.num_output_tokens.unwrap_or(self.num_events)
    }

    /// Time per output token after the first one; None for an answer of one token.
    #[must_use]
    pub fn time_per_token(&self) -> Option<Duration> {
        let tokens = self.output_tokens();
        (tokens > 1).then(|| self.end.saturating_sub(self.first_token).div_f64((tokens - 1) as f64))
    }
}
