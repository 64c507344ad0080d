//! The transport of rustvllm: typed messages in length-prefixed frames between API processes and the engine process.
//!
//! ```text
//!  API process                                             engine process
//!  EngineClient ── commands ──▶ I/O thread ──Unix or TCP──▶ I/O thread ── EngineHandle ──▶ Inbox
//!       ▲                          │                            ▲
//!       └─ outputs, eventfd ◀──────┘                            └── Egress, eventfd ◀── scheduler's thread
//! ```
//!
//! Each side has one thread of its own with a current-thread tokio runtime. Nothing here knows Python, and no input from
//! the other side makes it panic: a wrong frame closes its connection with a typed error, and no other is touched.
//!
//! | file | noun |
//! |---|---|
//! | `wire.rs`, `frame.rs` | values as bytes; frames, and reading them from a stream |
//! | `message.rs`, `request_codec.rs`, `outputs_codec.rs` | what frames say |
//! | `handshake.rs`, `endpoint.rs`, `key.rs` | who may talk; where; whose a request is |
//! | `outbox.rs`, `notifier.rs` | bytes on their way; the eventfd that wakes a sleeper |
//! | `server.rs`, `engine_io.rs`, `connection.rs` | the engine's side: its owner's face, its thread, one client of it |
//! | `query.rs` | questions to the stepping thread: their limits, and those that wait |
//! | `client.rs`, `client_io.rs` | the other side: the front end's face, its thread |
//! | `router.rs`, `placement.rs`, `prefix_table.rs` | several engines behind one client; who gets a request; who knows its prefix |

#![deny(unsafe_code)]

mod client;
mod client_io;
mod connection;
mod endpoint;
mod engine_io;
mod error;
mod frame;
mod handshake;
mod key;
mod logprobs_codec;
mod message;
mod metrics_codec;
mod notifier;
mod outbox;
mod outputs_codec;
mod placement;
mod prefix_table;
mod prompt_logprobs_codec;
mod query;
mod request_codec;
mod router;
mod server;
mod wire;

pub use client::{ClientOptions, ClientOutput, Counters, Endpoint, EngineClient, Health};
pub use endpoint::{Listener, MAX_PATH_BYTES, SocketFile};
pub use error::{ClientError, ConnectionError, DecodeError, EndpointError, Refusal};
pub use frame::HEADER_BYTES;
pub use handshake::{
    CAPABILITIES, Challenge, EngineFacts, Hello, Nonce, PROTOCOL_VERSION, Proof, Secret, Welcome,
};
pub use key::{COUNTER_BITS, MAX_CLIENT_INDEX, client_of, counter_of, key_of};
pub use message::{ClientMessage, EngineMessage};
pub use notifier::Notifier;
pub use placement::{MAX_REMEMBERED, Placement, slack};
pub use prefix_table::{PrefixHasher, PrefixTable};
pub use query::{
    MAX_OPEN_QUERIES, MAX_QUERY_BYTES, MAX_QUERY_KIND_BYTES, MAX_REPLY_BYTES, MAX_WAITING_QUERIES, Queries,
    Query, QueryOutcome,
};
pub use router::EngineRouter;
pub use server::{
    EngineServer, FAREWELL_TIMEOUT, MAX_INFO_BYTES, ServerOptions, ServerStats, max_frame_bytes,
};
