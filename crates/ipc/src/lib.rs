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
//! | `message.rs`, `codec/` | what frames say; how the parts of messages are written, a module per kind |
//! | `handshake.rs`, `handshake/` | who may talk; what a front end learns of the engine, and the same between the nodes of one model |
//! | `endpoint.rs`, `key.rs` | where an engine listens; whose a request is |
//! | `outbox.rs`, `notifier.rs` | bytes on their way; the eventfd that wakes a sleeper |
//! | `server.rs` | the engine's side, as its owner sees it; in `server/`: |
//! | `io_thread.rs`, `connection.rs` | its thread; one client's connection |
//! | `engine_io.rs`, `control.rs` | what the tasks of that thread share; what its owner tells it |
//! | `served_client.rs` | one client, as its outputs see it |
//! | `options.rs`, `stats.rs`, `query.rs` | what a server is made of; what it counts; questions to the stepping thread |
//! | `client.rs` | the other side, as a front end sees it; in `client/`: |
//! | `io_thread.rs`, `state.rs`, `delivery.rs` | its thread; what the two share; where outputs arrive |
//! | `router.rs` | several engines behind one client; in `router/`: |
//! | `placement.rs`, `prefix_table.rs` | who gets a request; who knows its prefix |

#![deny(unsafe_code)]

mod client;
mod codec;
mod endpoint;
mod error;
mod frame;
mod handshake;
mod key;
mod message;
mod notifier;
mod outbox;
mod router;
mod server;
mod wire;

pub use client::EngineClient;
pub use client::delivery::ClientOutput;
pub use client::state::{ClientOptions, Counters, Health};
pub use endpoint::{Endpoint, Listener, MAX_PATH_BYTES, SocketFile};
pub use error::{ClientError, ConnectionError, DecodeError, EndpointError, Refusal};
pub use frame::HEADER_BYTES;
pub use handshake::facts::EngineFacts;
pub use handshake::node::{NODE_PROTOCOL_VERSION, NodeHandshakeError, prove_to_head, welcome_node};
pub use handshake::{CAPABILITIES, Challenge, Hello, Nonce, PROTOCOL_VERSION, Proof, Secret, Welcome};
pub use key::{COUNTER_BITS, MAX_CLIENT_INDEX, client_of, counter_of, key_of};
pub use message::{
    ClientMessage, EngineMessage, MAX_QUERY_BYTES, MAX_QUERY_KIND_BYTES, MAX_REPLY_BYTES, QueryOutcome,
};
pub use notifier::Notifier;
pub use router::EngineRouter;
pub use router::placement::{MAX_REMEMBERED, Placement, slack};
pub use router::prefix_table::{PrefixHasher, PrefixTable};
pub use server::EngineServer;
pub use server::io_thread::FAREWELL_TIMEOUT;
pub use server::options::{MAX_INFO_BYTES, ServerOptions, max_frame_bytes};
pub use server::query::{MAX_OPEN_QUERIES, MAX_WAITING_QUERIES, Queries, Query};
pub use server::stats::ServerStats;
