//! Errors between two processes. Each carries its numbers, and each concerns one connection only.

use std::{io, path::PathBuf};

use scheduler::{AddRequestError, RepetitionDetectionError};
use thiserror::Error;

/// A frame whose body is not valid for its kind.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum DecodeError {
    /// The body ends too early.
    #[error("the frame is truncated: {needed} bytes are needed, {left} are left")]
    Truncated {
        /// Bytes that the next value takes.
        needed: usize,
        /// Bytes left in the body.
        left: usize,
    },
    /// Bytes follow the last value.
    #[error("the frame has {count} bytes too many")]
    TrailingBytes {
        /// Number of bytes after the last value.
        count: usize,
    },
    /// A kind that this version does not know, or that this side never receives.
    #[error("frame kind {kind:#04x} is unknown here")]
    UnknownKind {
        /// The kind's byte.
        kind: u8,
    },
    /// A value outside its valid range.
    #[error("{value} is not {what}")]
    BadValue {
        /// The name of what was expected.
        what: &'static str,
        /// The value that came.
        value: u64,
    },
    /// A text that is not valid UTF-8.
    #[error("a text is not UTF-8 from byte {at} on")]
    NotUtf8 {
        /// First wrong byte.
        at: usize,
    },
    /// Invalid sampling parameters of a request.
    #[error("the extras of a request are wrong: {0}")]
    BadExtras(String),
    /// Repetitions that no request may look for.
    #[error(transparent)]
    BadRepetition(#[from] RepetitionDetectionError),
    /// A frame larger than this side accepts; its body was not read.
    #[error("the other side announced a frame of {num_bytes} bytes; the limit is {limit}")]
    TooLarge {
        /// Announced length.
        num_bytes: usize,
        /// Limit.
        limit: usize,
    },
}

/// Why the other side rejected the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Refusal {
    /// The versions of the protocol differ.
    #[error(
        "it speaks version {engine} of the protocol and this process version {client}; run the same rustvllm on both sides"
    )]
    Version {
        /// The engine's.
        engine: u16,
        /// The client's.
        client: u16,
    },
    /// The engine lacks a capability that the client needs.
    #[error("it lacks the capabilities {missing:#x}")]
    Capabilities {
        /// Bits of the missing capabilities.
        missing: u64,
    },
    /// The proof of the shared secret is wrong or absent.
    #[error("the shared secret is wrong or missing; give both sides the same one")]
    Secret,
    /// The engine has as many clients as it accepts.
    #[error("{limit} clients are connected, no more are taken")]
    TooManyClients {
        /// `max_clients`.
        limit: u32,
    },
}

/// Why a connection ended or could not be made.
#[derive(Debug, Error)]
pub enum ConnectionError {
    /// An error of the operating system.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A frame was invalid.
    #[error("{0}")]
    Decode(#[from] DecodeError),
    /// A valid frame at the wrong time, or with numbers that it must not have.
    #[error("{what}: got {got}")]
    Protocol {
        /// What was expected.
        what: &'static str,
        /// What came.
        got: u64,
    },
    /// The first bytes are not those of this protocol.
    #[error("the other side does not speak this protocol")]
    NotOurs,
    /// Another user's process.
    #[error("the process at the other end belongs to uid {peer_uid}, only uid {own_uid} is accepted")]
    ForeignUser {
        /// The peer's user.
        peer_uid: u32,
        /// The user of this process.
        own_uid: u32,
    },
    /// The engine refused the client.
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

/// Why an engine cannot listen, or a client cannot connect.
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
        /// The user of this process.
        own_uid: u32,
    },
    /// A living process listens there.
    #[error("another process listens on {}", path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// A file that is not a socket has this name; it is left alone.
    #[error("{} exists and is not a socket", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// An inherited descriptor is not a listening Unix socket.
    #[error("descriptor {fd} is not a Unix socket that listens")]
    NotAListener {
        /// The descriptor.
        fd: i32,
    },
    /// A client was given no endpoint.
    #[error("a client needs at least one engine to connect to")]
    NoEngine,
    /// A secret that can be guessed.
    #[error("the shared secret has {num_bytes} bytes, at least {minimum} are needed")]
    SecretTooShort {
        /// Its length.
        num_bytes: usize,
        /// The shortest allowed length.
        minimum: usize,
    },
    /// TCP without a secret.
    #[error("a TCP endpoint needs a shared secret")]
    SecretMissing,
    /// An error of the operating system.
    #[error("cannot {action} {what}: {source}")]
    System {
        /// What was attempted.
        action: &'static str,
        /// The object of the attempt.
        what: String,
        /// The system's error.
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
    /// There is no engine of this rank.
    #[error("there is no engine of rank {rank}; this client has {num_engines}, counted from 0")]
    NoSuchRank {
        /// The rank that was asked for.
        rank: usize,
        /// Number of engines.
        num_engines: usize,
    },
    /// An engine's numbers differ from the first engine's.
    #[error(
        "the engine of rank {rank} has {what} = {got}, the first one {expected}; start all with the same numbers"
    )]
    NotAlike {
        /// The engine's rank.
        rank: usize,
        /// The number's name.
        what: &'static str,
        /// Its value.
        got: u32,
        /// The first engine's value.
        expected: u32,
    },
    /// A key of another client.
    #[error("key {key} is not one of this client's; keys come from new_key")]
    ForeignKey {
        /// The key.
        key: u64,
    },
    /// A request larger than the engine accepts.
    #[error("the request has {num_bytes} bytes; the engine accepts at most {limit}")]
    RequestTooLarge {
        /// Its encoded size.
        num_bytes: usize,
        /// Limit.
        limit: usize,
    },
    /// A query longer than the engine accepts.
    #[error("the {what} of a query has {num_bytes} bytes; the limit is {limit}")]
    QueryTooLarge {
        /// Its kind or its payload.
        what: &'static str,
        /// Its length.
        num_bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The engine reported why there is no answer.
    #[error("{message}")]
    QueryFailed {
        /// Why.
        message: String,
    },
    /// The engine did not answer in time.
    #[error("the engine gave no answer within {seconds} s: it is in a long step or has stalled")]
    QueryTimeout {
        /// The time limit.
        seconds: f64,
    },
    /// The engine does not read what was sent before.
    #[error("{unsent} bytes are waiting for the engine; the limit is {limit}: try again later")]
    Backlogged {
        /// Bytes that wait to be sent.
        unsent: usize,
        /// Limit.
        limit: usize,
    },
}
