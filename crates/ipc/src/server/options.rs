//! What a server is made of, and what follows for its clients.

use std::{sync::Arc, time::Duration};

use scheduler::{EngineHandle, RequestLimits, egress::Consumer};

use crate::{endpoint::Listener, handshake::facts::EngineFacts, notifier::Notifier};

/// Most bytes of `ServerOptions::info`.
pub const MAX_INFO_BYTES: usize = 64 << 10;

/// What a server is made of.
#[derive(Debug)]
pub struct ServerOptions {
    /// The scheduler's shared side.
    pub handle: EngineHandle,
    /// Its outputs.
    pub consumer: Consumer,
    /// The scheduler's thread calls `notify` after it published outputs.
    pub notifier: Arc<Notifier>,
    /// Where to listen.
    pub listeners: Vec<Listener>,
    /// For `EngineFacts::info`; cut at `MAX_INFO_BYTES`.
    pub info: Box<[u8]>,
    /// Connected clients at most.
    pub max_clients: u32,
    /// A client that leaves more bytes than these unread is not read from until it has read.
    pub max_unsent_bytes: usize,
    /// How long a handshake may take, and how long a TCP client may be silent.
    pub silence_timeout: Duration,
}

impl ServerOptions {
    /// A server with the usual limits.
    #[must_use]
    pub fn new(handle: EngineHandle, consumer: Consumer, notifier: Arc<Notifier>) -> Self {
        Self {
            handle,
            consumer,
            notifier,
            listeners: Vec::new(),
            info: Box::default(),
            max_clients: 1024,
            max_unsent_bytes: 64 << 20,
            silence_timeout: Duration::from_secs(10),
        }
    }

    /// What clients learn of the engine.
    pub(crate) fn facts(&self) -> EngineFacts {
        let config = self.handle.config();
        let info = &self.info[..self.info.len().min(MAX_INFO_BYTES)];
        EngineFacts {
            limits: RequestLimits::of(config),
            max_num_seqs: config.max_num_seqs,
            max_num_queued_reqs: config.max_num_queued_reqs,
            max_frame_bytes: max_frame_bytes(config.max_model_len),
            pid: std::process::id(),
            info: info.into(),
        }
    }
}

/// Largest frame that an engine takes: a prompt of `max_model_len` tokens, and four megabytes for whatever comes with it
/// (`MAX_SAMPLING_EXTRAS_BYTES` are three).
#[must_use]
pub fn max_frame_bytes(max_model_len: u32) -> u32 {
    max_model_len.saturating_mul(4).saturating_add(4 << 20)
}
