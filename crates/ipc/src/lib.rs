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
//! | `handshake.rs`, `facts.rs` | who may talk; what a front end learns of the engine |
//! | `node_handshake.rs` | the same between the nodes of one model |
//! | `endpoint.rs`, `key.rs` | where an engine listens; whose a request is |
//! | `outbox.rs`, `notifier.rs` | bytes on their way; the eventfd that wakes a sleeper |
//! | `server.rs`, `engine_thread.rs`, `connection.rs` | the engine's side: its owner's face, its thread, one client's connection |
//! | `engine_io.rs`, `served_client.rs`, `control.rs` | what the tasks of that thread share; what it sends one client; its owner's words to it |
//! | `server_options.rs`, `server_stats.rs` | what a server is made of; what it counts |
//! | `query.rs` | questions to the stepping thread: their limits, and those that wait |
//! | `client.rs`, `client_io.rs` | the other side: the front end's face, its thread |
//! | `client_state.rs`, `delivery.rs` | what those two share; where outputs arrive |
//! | `router.rs`, `placement.rs`, `prefix_table.rs` | several engines behind one client; who gets a request; who knows its prefix |

#![deny(unsafe_code)]

mod client;
mod client_io;
mod client_state;
mod connection;
mod control;
mod delivery;
mod endpoint;
mod engine_io;
mod engine_thread;
mod error;
mod facts;
mod frame;
mod grammar_codec;
mod handshake;
mod key;
mod logprobs_codec;
mod message;
mod metrics_codec;
mod node_handshake;
mod notifier;
mod outbox;
mod outputs_codec;
mod placement;
mod prefix_table;
mod prompt_logprobs_codec;
mod query;
mod request_codec;
mod router;
mod served_client;
mod server;
mod server_options;
mod server_stats;
mod wire;

pub use client::EngineClient;
pub use client_state::{ClientOptions, Counters, Health};
pub use delivery::ClientOutput;
pub use endpoint::{Endpoint, Listener, MAX_PATH_BYTES, SocketFile};
pub use engine_thread::FAREWELL_TIMEOUT;
pub use error::{ClientError, ConnectionError, DecodeError, EndpointError, Refusal};
pub use facts::EngineFacts;
pub use frame::HEADER_BYTES;
pub use handshake::{CAPABILITIES, Challenge, Hello, Nonce, PROTOCOL_VERSION, Proof, Secret, Welcome};
pub use key::{COUNTER_BITS, MAX_CLIENT_INDEX, client_of, counter_of, key_of};
pub use message::{
    ClientMessage, EngineMessage, MAX_QUERY_BYTES, MAX_QUERY_KIND_BYTES, MAX_REPLY_BYTES, QueryOutcome,
};
pub use node_handshake::{NODE_PROTOCOL_VERSION, NodeHandshakeError, prove_to_head, welcome_node};
pub use notifier::Notifier;
pub use placement::{MAX_REMEMBERED, Placement, slack};
pub use prefix_table::{PrefixHasher, PrefixTable};
pub use query::{MAX_OPEN_QUERIES, MAX_WAITING_QUERIES, Queries, Query};
pub use router::EngineRouter;
pub use server::EngineServer;
pub use server_options::{MAX_INFO_BYTES, ServerOptions, max_frame_bytes};
pub use server_stats::ServerStats;
