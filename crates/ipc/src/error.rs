//! What can go wrong between two processes. Each error carries its numbers; none is about another connection.

use std::{io, path::PathBuf};

use scheduler::AddRequestError;
use thiserror::Error;

/// A frame that does not say what a frame of its kind says.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum DecodeError {
    /// The body ends too early.
    #[error("the frame is truncated: {needed} bytes are needed, {left} are left")]
    Truncated {
        /// Bytes that the next value takes.
        needed: usize,
        /// Bytes that there are.
        left: usize,
    },
    /// The body goes on.
    #[error("the frame has {count} bytes too many")]
    TrailingBytes {
        /// Behind the last value.
        count: usize,
    },
    /// A kind that this version does not know, or one that this side never gets.
    #[error("frame kind {kind:#04x} is unknown here")]
    UnknownKind {
        /// The kind's byte.
        kind: u8,
    },
    /// A value that is none of those possible.
    #[error("{value} is not {what}")]
    BadValue {
        /// What was expected.
        what: &'static str,
        /// What was there.
        value: u64,
    },
    /// A text that is not valid UTF-8.
    #[error("a text is not UTF-8 from byte {at} on")]
    NotUtf8 {
        /// First wrong byte.
        at: usize,
    },
    /// Parameters of a request that cannot be.
    #[error("the extras of a request are wrong: {0}")]
    BadExtras(String),
    /// A frame larger than this side takes; nothing of it was read.
    #[error("the other side announced a frame of {num_bytes} bytes; the limit is {limit}")]
    TooLarge {
        /// Announced.
        num_bytes: usize,
        /// Limit.
        limit: usize,
    },
}

/// Why the other side refused to talk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Refusal {
    /// Another version of the protocol.
    #[error(
        "it speaks version {engine} of the protocol and this process version {client}; run the same rustvllm on both sides"
    )]
    Version {
        /// The engine's.
        engine: u16,
        /// The client's.
        client: u16,
    },
    /// The client needs something that the engine does not have.
    #[error("it lacks the capabilities {missing:#x}")]
    Capabilities {
        /// Bits asked for and not there.
        missing: u64,
    },
    /// The proof of the shared secret is wrong or absent.
    #[error("the shared secret is wrong or missing; give both sides the same one")]
    Secret,
    /// As many clients as there may be.
    #[error("{limit} clients are connected, no more are taken")]
    TooManyClients {
        /// `max_clients`.
        limit: u32,
    },
}

/// Why a connection ended, or did not begin.
#[derive(Debug, Error)]
pub enum ConnectionError {
    /// The operating system's word.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A frame was wrong.
    #[error("{0}")]
    Decode(#[from] DecodeError),
    /// A frame that makes sense, at a time or with numbers that do not.
    #[error("{what}: got {got}")]
    Protocol {
        /// What was expected.
        what: &'static str,
        /// What came.
        got: u64,
    },
    /// The first bytes are not ours.
    #[error("the other side does not speak this protocol")]
    NotOurs,
    /// Another user's process.
    #[error("the process at the other end belongs to uid {peer_uid}, only uid {own_uid} is accepted")]
    ForeignUser {
        /// Theirs.
        peer_uid: u32,
        /// Ours.
        own_uid: u32,
    },
    /// The engine said no.
    #[error("the engine refused the connection: {0}")]
    Refused(Refusal),
    /// The engine could not prove that it knows the shared secret.
    #[error("the engine does not know the shared secret")]
    EngineUnproven,
    /// No answer in time.
    #[error("no answer within {seconds} s")]
    Timeout {
        /// How long.
        seconds: f64,
    },
    /// The stream ended between two frames.
    #[error("the connection was closed")]
    Closed,
    /// The stream ended within a frame.
    #[error("the connection was closed within a frame: {got} of {expected} bytes came")]
    ClosedWithinFrame {
        /// Bytes that came.
        got: usize,
        /// Bytes that the frame has, as far as known.
        expected: usize,
    },
}

/// Why the engine cannot listen, or a client not begin.
#[derive(Debug, Error)]
pub enum EndpointError {
    /// More than `sun_path` holds.
    #[error("the socket path {} has {num_bytes} bytes; the limit is {limit}: use a shorter directory", path.display())]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        num_bytes: usize,
        /// The system's limit.
        limit: usize,
    },
    /// The path has no directory or no name.
    #[error("the socket path {} must name a file in a directory", path.display())]
    NotAFilePath {
        /// The path.
        path: PathBuf,
    },
    /// Others could reach the socket.
    #[error(
        "the directory {} of the socket has mode {mode:o} and belongs to uid {owner_uid}; it must belong to uid {own_uid} with mode 700",
        path.display()
    )]
    DirectoryNotPrivate {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
        /// Its owner.
        owner_uid: u32,
        /// Us.
        own_uid: u32,
    },
    /// A living process listens there.
    #[error("another process listens on {}", path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// Something that is not a socket is in the way; it is left alone.
    #[error("{} exists and is not a socket", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// An inherited descriptor of another kind.
    #[error("descriptor {fd} is not a Unix socket that listens")]
    NotAListener {
        /// The descriptor.
        fd: i32,
    },
    /// No engine to connect to.
    #[error("a client needs at least one engine to connect to")]
    NoEngine,
    /// A secret that can be guessed.
    #[error("the shared secret has {num_bytes} bytes, at least {minimum} are needed")]
    SecretTooShort {
        /// Its length.
        num_bytes: usize,
        /// The least.
        minimum: usize,
    },
    /// TCP without a secret.
    #[error("a TCP endpoint needs a shared secret")]
    SecretMissing,
    /// The operating system's word.
    #[error("cannot {action} {what}: {source}")]
    System {
        /// The attempt.
        action: &'static str,
        /// On what.
        what: String,
        /// What it said.
        source: io::Error,
    },
}

/// Why a client cannot be used, or a request was not sent.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The endpoint cannot be used.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// There is no connection.
    #[error("cannot connect to the engine at {endpoint}: {source}")]
    Connect {
        /// Where.
        endpoint: String,
        /// Why.
        source: ConnectionError,
    },
    /// The engine is gone.
    #[error("{reason}")]
    Dead {
        /// Why.
        reason: String,
    },
    /// The request itself is wrong.
    #[error(transparent)]
    Request(#[from] AddRequestError),
    /// A rank beyond the last.
    #[error("there is no engine of rank {rank}; this client has {num_engines}, counted from 0")]
    NoSuchRank {
        /// Asked for.
        rank: usize,
        /// How many there are.
        num_engines: usize,
    },
    /// An engine that does not fit the others.
    #[error(
        "the engine of rank {rank} has {what} = {got}, the first one {expected}; start all with the same numbers"
    )]
    NotAlike {
        /// Which.
        rank: usize,
        /// The number's name.
        what: &'static str,
        /// Its.
        got: u32,
        /// The first one's.
        expected: u32,
    },
    /// A key of another client.
    #[error("key {key} is not one of this client's; keys come from new_key")]
    ForeignKey {
        /// The key.
        key: u64,
    },
    /// A request larger than the engine takes.
    #[error("the request has {num_bytes} bytes; the engine accepts at most {limit}")]
    RequestTooLarge {
        /// Encoded.
        num_bytes: usize,
        /// Limit.
        limit: usize,
    },
    /// A query longer than the engine takes.
    #[error("the {what} of a query has {num_bytes} bytes; the limit is {limit}")]
    QueryTooLarge {
        /// Its kind or its payload.
        what: &'static str,
        /// Its length.
        num_bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The engine said why there is no answer.
    #[error("{message}")]
    QueryFailed {
        /// Why.
        message: String,
    },
    /// The engine said nothing.
    #[error("the engine gave no answer within {seconds} s: it is in a long step or has stalled")]
    QueryTimeout {
        /// How long it had.
        seconds: f64,
    },
    /// The engine does not take what was sent already.
    #[error("{unsent} bytes are waiting for the engine; the limit is {limit}: try again later")]
    Backlogged {
        /// Waiting.
        unsent: usize,
        /// Limit.
        limit: usize,
    },
}
