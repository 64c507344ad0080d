//! The messages and their encoding. Kinds below 0x80 are sent to the engine, the others by the engine.

use scheduler::{
    AddRequestError, EngineCoreOutput, MetricsSnapshot, NewRequest, PooledVector, PromptLogprobs, RequestKey,
    TokenLogprobs,
};

use crate::{
    codec,
    error::{DecodeError, Refusal},
    frame::write_frame,
    handshake::{Challenge, Hello, Welcome},
    wire::{Reader, Writer},
};

/// Kinds of frames.
pub(crate) mod kind {
    pub(crate) const HELLO: u8 = 0x01;
    pub(crate) const ADD_REQUESTS: u8 = 0x02;
    pub(crate) const ABORT: u8 = 0x03;
    pub(crate) const GRAMMAR_READY: u8 = 0x04;
    pub(crate) const GRAMMAR_FAILED: u8 = 0x05;
    pub(crate) const STATS_QUERY: u8 = 0x06;
    pub(crate) const PING: u8 = 0x07;
    pub(crate) const METRICS_QUERY: u8 = 0x08;
    pub(crate) const STOP: u8 = 0x0A;
    pub(crate) const SETTLE: u8 = 0x0B;
    pub(crate) const QUERY: u8 = 0x09;
    pub(crate) const CHALLENGE: u8 = 0x80;
    pub(crate) const WELCOME: u8 = 0x81;
    pub(crate) const REJECTED: u8 = 0x82;
    pub(crate) const REFUSED: u8 = 0x83;
    pub(crate) const OUTPUTS: u8 = 0x84;
    pub(crate) const STATS: u8 = 0x85;
    pub(crate) const PONG: u8 = 0x86;
    pub(crate) const FATAL: u8 = 0x87;
    pub(crate) const GOODBYE: u8 = 0x88;
    pub(crate) const STEP_FAILED: u8 = 0x89;
    pub(crate) const LOGPROBS: u8 = 0x8A;
    pub(crate) const PROMPT_LOGPROBS: u8 = 0x8B;
    pub(crate) const METRICS: u8 = 0x8C;
    pub(crate) const REPLY: u8 = 0x8D;
    pub(crate) const POOLED: u8 = 0x8E;
}

/// The counter of `Stats` that concerns the asking client alone: requests that it has submitted and that have not
/// finished.
pub(crate) const NUM_CLIENT_REQUESTS: &str = "num_client_requests";

/// Most bytes of a query's kind.
pub const MAX_QUERY_KIND_BYTES: usize = 64;
/// Most bytes of a query's payload.
pub const MAX_QUERY_BYTES: usize = 64 << 10;
/// Most bytes of an answer.
pub const MAX_REPLY_BYTES: usize = 8 << 20;

/// Most bytes of the message of a death or a failed step.
const MAX_MESSAGE_BYTES: usize = 16 << 10;

/// The outcome of a query: the answer's bytes, or why there is none.
pub type QueryOutcome = Result<Vec<u8>, String>;

/// A message from a client.
#[derive(Clone, Debug)]
pub enum ClientMessage {
    /// The client's half of the handshake.
    Hello(Hello),
    /// A request and its samples: the engine accepts all or none.
    AddRequests(Vec<NewRequest>),
    /// Abort these requests; each gets a last output.
    Abort(Vec<RequestKey>),
    /// End requests whose text has reached a stop string; each gets a last output.
    Stop(Vec<RequestKey>),
    /// Why a request ended whose last output left that open.
    Settle {
        /// The request's key.
        key: RequestKey,
        /// Whether it ended at a stop string; else it reached its length limit.
        found_stop: bool,
    },
    /// The grammar of a request is compiled.
    GrammarReady(RequestKey),
    /// The grammar of a request cannot be compiled.
    GrammarFailed(RequestKey),
    /// Asks for `Stats`, which carries the same id.
    StatsQuery(u64),
    /// Asks for `Pong`, which carries the same id.
    Ping(u64),
    /// Asks for `Metrics`, which carries the same id.
    MetricsQuery(u64),
    /// Asks the thread that steps the engine for a `Reply`.
    Query {
        /// An id that the client chooses; the reply carries it.
        id: u64,
        /// The kind of the query.
        kind: Box<str>,
        /// Its argument.
        payload: Box<[u8]>,
    },
}

/// A message from the engine.
#[derive(Clone, PartialEq, Debug)]
pub enum EngineMessage {
    /// The first message of a connection.
    Challenge(Challenge),
    /// The engine accepts the client.
    Welcome(Welcome),
    /// The engine rejects the client and closes the connection.
    Rejected(Refusal),
    /// The engine did not accept a group of requests.
    Refused {
        /// The keys of the whole group.
        keys: Vec<RequestKey>,
        /// Why they were refused.
        error: AddRequestError,
    },
    /// The outputs of a step.
    Outputs(Vec<EngineCoreOutput>),
    /// Log-probabilities of tokens that later outputs hold.
    Logprobs(Vec<TokenLogprobs>),
    /// Log-probabilities of prompts; the first tokens of these requests come later.
    PromptLogprobs(Vec<PromptLogprobs>),
    /// Vectors of requests that end with one; it comes before the `Outputs` that end them.
    Pooled(Vec<PooledVector>),
    /// Counters.
    Stats {
        /// The id of the query.
        id: u64,
        /// Names and values.
        entries: Vec<(String, u64)>,
    },
    /// All metrics of the engine.
    Metrics {
        /// The id of the query.
        id: u64,
        /// Counters and histograms.
        metrics: MetricsSnapshot,
    },
    /// The engine's process is alive.
    Pong {
        /// The id of the ping.
        id: u64,
        /// For how long the engine has had requests without finishing a step (nanoseconds), as its I/O thread saw it.
        step_age_ns: u64,
        /// Steps scheduled since the engine's start.
        num_steps: u64,
    },
    /// The engine died; says why.
    Fatal(String),
    /// The engine ends because it was asked to.
    Goodbye,
    /// The error of a failed step; its failed outputs follow.
    StepFailed(String),
    /// The answer of the stepping thread to a query.
    Reply {
        /// The id of the query.
        id: u64,
        /// The answer, or why there is none.
        outcome: QueryOutcome,
    },
}

impl ClientMessage {
    /// Append this message as a frame.
    pub fn encode(&self, buffer: &mut Vec<u8>) {
        match self {
            Self::Hello(hello) => write_frame(buffer, kind::HELLO, |body| hello.encode(body)),
            Self::AddRequests(requests) => encode_add_requests(requests, |key| key, buffer),
            Self::Abort(keys) => write_frame(buffer, kind::ABORT, |body| write_keys(keys, body)),
            Self::Stop(keys) => write_frame(buffer, kind::STOP, |body| write_keys(keys, body)),
            Self::Settle { key, found_stop } => write_frame(buffer, kind::SETTLE, |body| {
                let mut body = Writer(body);
                body.u64(key.0);
                body.bool(*found_stop);
            }),
            Self::GrammarReady(key) => write_number(buffer, kind::GRAMMAR_READY, key.0),
            Self::GrammarFailed(key) => write_number(buffer, kind::GRAMMAR_FAILED, key.0),
            Self::StatsQuery(id) => write_number(buffer, kind::STATS_QUERY, *id),
            Self::Ping(id) => write_number(buffer, kind::PING, *id),
            Self::MetricsQuery(id) => write_number(buffer, kind::METRICS_QUERY, *id),
            Self::Query { id, kind, payload } => write_frame(buffer, kind::QUERY, |body| {
                let mut body = Writer(body);
                body.u64(*id);
                body.str(kind);
                body.bytes(payload);
            }),
        }
    }

    /// Decode a body; a group may have at most `max_requests` requests.
    ///
    /// # Errors
    /// The body is invalid; says how.
    pub fn decode(kind: u8, body: &[u8], max_requests: usize) -> Result<Self, DecodeError> {
        Ok(match kind {
            kind::HELLO => Self::Hello(Hello::decode(body)?),
            kind::ADD_REQUESTS => Self::AddRequests(codec::request::decode(body, max_requests)?),
            kind::ABORT => Self::Abort(read_only_keys(body)?),
            kind::STOP => Self::Stop(read_only_keys(body)?),
            kind::SETTLE => read_settlement(body)?,
            kind::GRAMMAR_READY => Self::GrammarReady(RequestKey(read_number(body)?)),
            kind::GRAMMAR_FAILED => Self::GrammarFailed(RequestKey(read_number(body)?)),
            kind::STATS_QUERY => Self::StatsQuery(read_number(body)?),
            kind::PING => Self::Ping(read_number(body)?),
            kind::METRICS_QUERY => Self::MetricsQuery(read_number(body)?),
            kind::QUERY => read_query(body)?,
            _ => return Err(DecodeError::UnknownKind { kind }),
        })
    }
}

/// Append an `AddRequests` frame; `rename` translates keys to the engine's side.
pub(crate) fn encode_add_requests(
    requests: &[NewRequest],
    rename: impl Fn(RequestKey) -> RequestKey,
    buffer: &mut Vec<u8>,
) {
    write_frame(buffer, kind::ADD_REQUESTS, |body| codec::request::encode(requests, rename, body));
}

impl EngineMessage {
    /// Append this message as a frame. All outputs of a frame get the time of the first.
    pub fn encode(&self, buffer: &mut Vec<u8>) {
        match self {
            Self::Challenge(challenge) => write_frame(buffer, kind::CHALLENGE, |body| challenge.encode(body)),
            Self::Welcome(welcome) => write_frame(buffer, kind::WELCOME, |body| welcome.encode(body)),
            Self::Rejected(refusal) => {
                write_frame(buffer, kind::REJECTED, |body| write_refusal(*refusal, &mut Writer(body)));
            }
            Self::Refused { keys, error } => write_frame(buffer, kind::REFUSED, |body| {
                write_keys(keys, body);
                write_add_error(error, &mut Writer(body));
            }),
            Self::Outputs(outputs) => write_frame(buffer, kind::OUTPUTS, |body| {
                Writer(body).u64(outputs.first().map_or(0, |output| output.timestamp_ns));
                for output in outputs {
                    codec::outputs::encode_record(output, body);
                }
            }),
            Self::Logprobs(all) => write_frame(buffer, kind::LOGPROBS, |body| {
                for logprobs in all {
                    codec::logprobs::encode_record(logprobs, body);
                }
            }),
            Self::PromptLogprobs(all) => write_frame(buffer, kind::PROMPT_LOGPROBS, |body| {
                for logprobs in all {
                    codec::prompt_logprobs::encode_record(logprobs, 0..logprobs.ranks.len(), body);
                }
            }),
            Self::Pooled(all) => write_frame(buffer, kind::POOLED, |body| {
                for vector in all {
                    codec::pooled::encode_record(vector, body);
                }
            }),
            Self::Stats { id, entries } => write_frame(buffer, kind::STATS, |body| {
                let mut body = Writer(body);
                body.u64(*id);
                body.u32(entries.len() as u32);
                for (name, value) in entries {
                    body.str(name);
                    body.u64(*value);
                }
            }),
            Self::Metrics { id, metrics } => {
                write_frame(buffer, kind::METRICS, |body| codec::metrics::encode(*id, metrics, body));
            }
            Self::Pong { id, step_age_ns, num_steps } => write_frame(buffer, kind::PONG, |body| {
                let mut body = Writer(body);
                body.u64(*id);
                body.u64(*step_age_ns);
                body.u64(*num_steps);
            }),
            Self::Fatal(message) => write_frame(buffer, kind::FATAL, |body| {
                Writer(body).str(cut(message));
            }),
            Self::Goodbye => write_frame(buffer, kind::GOODBYE, |_| {}),
            Self::StepFailed(message) => write_frame(buffer, kind::STEP_FAILED, |body| {
                Writer(body).str(cut(message));
            }),
            Self::Reply { id, outcome } => write_frame(buffer, kind::REPLY, |body| {
                let mut body = Writer(body);
                body.u64(*id);
                body.bool(outcome.is_ok());
                match outcome {
                    Ok(answer) => body.bytes(answer),
                    Err(message) => body.str(cut(message)),
                }
            }),
        }
    }

    /// Decode a body that was sent to client `client_index`.
    ///
    /// # Errors
    /// The body is invalid; says how.
    pub fn decode(kind: u8, body: &[u8], client_index: u32) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        let message = match kind {
            kind::CHALLENGE => return Ok(Self::Challenge(Challenge::decode(body)?)),
            kind::WELCOME => return Ok(Self::Welcome(Welcome::decode(body)?)),
            kind::OUTPUTS => {
                let mut outputs = Vec::new();
                codec::outputs::decode(body, client_index, |output| outputs.push(output))?;
                return Ok(Self::Outputs(outputs));
            }
            kind::LOGPROBS => return Ok(Self::Logprobs(codec::logprobs::decode(body, client_index)?)),
            kind::PROMPT_LOGPROBS => {
                return Ok(Self::PromptLogprobs(codec::prompt_logprobs::decode(body, client_index)?));
            }
            kind::POOLED => return Ok(Self::Pooled(codec::pooled::decode(body, client_index)?)),
            kind::REJECTED => Self::Rejected(read_refusal(&mut reader)?),
            kind::REFUSED => {
                Self::Refused { keys: read_keys(&mut reader)?, error: read_add_error(&mut reader)? }
            }
            kind::STATS => {
                let (id, count) = (reader.u64()?, reader.count(12)?);
                let entries = (0..count)
                    .map(|_| Ok((reader.str()?.to_owned(), reader.u64()?)))
                    .collect::<Result<_, DecodeError>>()?;
                Self::Stats { id, entries }
            }
            kind::METRICS => {
                let (id, metrics) = codec::metrics::decode(&mut reader)?;
                Self::Metrics { id, metrics }
            }
            kind::PONG => {
                Self::Pong { id: reader.u64()?, step_age_ns: reader.u64()?, num_steps: reader.u64()? }
            }
            kind::FATAL => Self::Fatal(reader.str()?.to_owned()),
            kind::GOODBYE => Self::Goodbye,
            kind::STEP_FAILED => Self::StepFailed(reader.str()?.to_owned()),
            kind::REPLY => {
                let (id, is_answered) = (reader.u64()?, reader.bool()?);
                let outcome =
                    if is_answered { Ok(reader.bytes()?.to_vec()) } else { Err(reader.str()?.to_owned()) };
                Self::Reply { id, outcome }
            }
            _ => return Err(DecodeError::UnknownKind { kind }),
        };
        reader.finish()?;
        Ok(message)
    }
}

/// Cut a text to `MAX_MESSAGE_BYTES`.
fn cut(text: &str) -> &str {
    let end = (0..=text.len().min(MAX_MESSAGE_BYTES)).rev().find(|&at| text.is_char_boundary(at));
    &text[..end.unwrap_or(0)]
}

fn write_number(buffer: &mut Vec<u8>, kind: u8, value: u64) {
    write_frame(buffer, kind, |body| Writer(body).u64(value));
}

fn read_number(body: &[u8]) -> Result<u64, DecodeError> {
    let mut body = Reader::new(body);
    let value = body.u64()?;
    body.finish()?;
    Ok(value)
}

fn read_settlement(body: &[u8]) -> Result<ClientMessage, DecodeError> {
    let mut body = Reader::new(body);
    let (key, found_stop) = (RequestKey(body.u64()?), body.bool()?);
    body.finish()?;
    Ok(ClientMessage::Settle { key, found_stop })
}

fn read_query(body: &[u8]) -> Result<ClientMessage, DecodeError> {
    let mut body = Reader::new(body);
    let (id, kind, payload) = (body.u64()?, body.str()?, body.bytes()?);
    body.finish()?;
    for (what, length, limit) in [
        ("a length of a query's kind", kind.len(), MAX_QUERY_KIND_BYTES),
        ("a length of a query", payload.len(), MAX_QUERY_BYTES),
    ] {
        if length > limit {
            return Err(DecodeError::BadValue { what, value: length as u64 });
        }
    }
    Ok(ClientMessage::Query { id, kind: kind.into(), payload: payload.into() })
}

fn write_keys(keys: &[RequestKey], body: &mut Vec<u8>) {
    let mut body = Writer(body);
    body.u32(keys.len() as u32);
    for key in keys {
        body.u64(key.0);
    }
}

/// Read a body that consists of keys only.
fn read_only_keys(body: &[u8]) -> Result<Vec<RequestKey>, DecodeError> {
    let mut body = Reader::new(body);
    let keys = read_keys(&mut body)?;
    body.finish()?;
    Ok(keys)
}

fn read_keys(body: &mut Reader<'_>) -> Result<Vec<RequestKey>, DecodeError> {
    (0..body.count(8)?).map(|_| body.u64().map(RequestKey)).collect()
}

fn write_refusal(refusal: Refusal, body: &mut Writer<'_>) {
    match refusal {
        Refusal::Version { engine, client } => {
            body.u8(1);
            body.u16(engine);
            body.u16(client);
        }
        Refusal::Capabilities { missing } => {
            body.u8(2);
            body.u64(missing);
        }
        Refusal::Secret => body.u8(3),
        Refusal::TooManyClients { limit } => {
            body.u8(4);
            body.u32(limit);
        }
    }
}

fn read_refusal(body: &mut Reader<'_>) -> Result<Refusal, DecodeError> {
    Ok(match body.u8()? {
        1 => Refusal::Version { engine: body.u16()?, client: body.u16()? },
        2 => Refusal::Capabilities { missing: body.u64()? },
        3 => Refusal::Secret,
        4 => Refusal::TooManyClients { limit: body.u32()? },
        value => {
            return Err(DecodeError::BadValue { what: "a reason to refuse a client", value: value.into() });
        }
    })
}

fn write_add_error(error: &AddRequestError, body: &mut Writer<'_>) {
    match *error {
        AddRequestError::EmptyPrompt => body.u8(1),
        AddRequestError::PromptTooLong { num_prompt_tokens, max_model_len } => {
            body.u8(2);
            body.u32(num_prompt_tokens);
            body.u32(max_model_len);
        }
        AddRequestError::NeverFits { needed_blocks, usable_blocks, block_size } => {
            body.u8(3);
            body.u32(needed_blocks);
            body.u32(usable_blocks);
            body.u32(block_size);
        }
        AddRequestError::PromptExceedsBudget { num_prompt_tokens, max_num_batched_tokens } => {
            body.u8(4);
            body.u32(num_prompt_tokens);
            body.u32(max_num_batched_tokens);
        }
        AddRequestError::TooManyStopTokenIds { got } => {
            body.u8(5);
            body.u64(got as u64);
        }
        AddRequestError::NegativeTokenId { token_id, position } => {
            body.u8(6);
            body.i32(token_id);
            body.u64(position as u64);
        }
        AddRequestError::QueueFull { queued, wanted, limit } => {
            body.u8(7);
            for value in [queued, wanted, limit] {
                body.u32(value);
            }
        }
        AddRequestError::QueueTokensFull { queued, wanted, limit } => {
            body.u8(8);
            for value in [queued, wanted, limit] {
                body.u64(value);
            }
        }
        AddRequestError::TooManyBeams { beam_width, limit } => {
            body.u8(9);
            body.i64(beam_width);
            body.u32(limit);
        }
        AddRequestError::WrongNumberOfBeams { beam_width, got } => {
            body.u8(10);
            body.i64(beam_width);
            body.u64(got as u64);
        }
        AddRequestError::InputNotWhole { offset, length, most, num_prompt_tokens } => {
            body.u8(11);
            for value in [offset, length, most, num_prompt_tokens] {
                body.u32(value);
            }
        }
    }
}

fn read_add_error(body: &mut Reader<'_>) -> Result<AddRequestError, DecodeError> {
    Ok(match body.u8()? {
        1 => AddRequestError::EmptyPrompt,
        2 => AddRequestError::PromptTooLong { num_prompt_tokens: body.u32()?, max_model_len: body.u32()? },
        3 => AddRequestError::NeverFits {
            needed_blocks: body.u32()?,
            usable_blocks: body.u32()?,
            block_size: body.u32()?,
        },
        4 => AddRequestError::PromptExceedsBudget {
            num_prompt_tokens: body.u32()?,
            max_num_batched_tokens: body.u32()?,
        },
        5 => AddRequestError::TooManyStopTokenIds { got: body.u64()? as usize },
        6 => AddRequestError::NegativeTokenId { token_id: body.i32()?, position: body.u64()? as usize },
        7 => AddRequestError::QueueFull { queued: body.u32()?, wanted: body.u32()?, limit: body.u32()? },
        8 => {
            AddRequestError::QueueTokensFull { queued: body.u64()?, wanted: body.u64()?, limit: body.u64()? }
        }
        9 => AddRequestError::TooManyBeams { beam_width: body.i64()?, limit: body.u32()? },
        10 => AddRequestError::WrongNumberOfBeams { beam_width: body.i64()?, got: body.u64()? as usize },
        11 => AddRequestError::InputNotWhole {
            offset: body.u32()?,
            length: body.u32()?,
            most: body.u32()?,
            num_prompt_tokens: body.u32()?,
        },
        value => {
            return Err(DecodeError::BadValue { what: "a reason to refuse a request", value: value.into() });
        }
    })
}
