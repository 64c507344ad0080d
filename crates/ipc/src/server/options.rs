//! The options of a server, and the facts that follow from them for its clients.

use std::{sync::Arc, time::Duration};

use scheduler::{EngineHandle, RequestLimits, egress::Consumer};

use crate::{endpoint::Listener, handshake::facts::EngineFacts, notifier::Notifier};

/// Most bytes of `ServerOptions::info`.
pub const MAX_INFO_BYTES: usize = 64 << 10;

/// The options of a server.
#[derive(Debug)]
pub struct ServerOptions {
    /// The scheduler's handle.
    pub handle: EngineHandle,
    /// The scheduler's outputs.
    pub consumer: Consumer,
    /// The scheduler's thread calls `notify` after it has published outputs.
    pub notifier: Arc<Notifier>,
    /// Where to listen.
    pub listeners: Vec<Listener>,
    /// For `EngineFacts::info`; cut at `MAX_INFO_BYTES`.
    pub info: Box<[u8]>,
    /// Most connected clients.
    pub max_clients: u32,
    /// While a client leaves more bytes than this unread, the server does not read from it.
    pub max_unsent_bytes: usize,
    /// How long a handshake may take, and how long a TCP client may be silent.
    pub silence_timeout: Duration,
}

impl ServerOptions {
    /// Options with the usual limits.
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

    /// What clients learn about the engine.
    pub(crate) fn facts(&self) -> EngineFacts {
        let config = self.handle.config();
        let info = &self.info[..self.info.len().min(MAX_INFO_BYTES)];
        EngineFacts {
            limits: RequestLimits::of(config),
            max_num_seqs: config.max_num_seqs,
            max_num_queued_reqs: config.max_num_queued_reqs,
            max_frame_bytes: max_frame_bytes(config.max_model_len, config.max_multimodal_bytes),
            pid: std::process::id(),
            info: info.into(),
        }
    }
}

/// Size limit of a frame to the engine: a prompt of `max_model_len` tokens, its multimodal inputs, and 4 MB for everything
/// else that comes with it (`MAX_SAMPLING_EXTRAS_BYTES` takes 3 of them).
#[must_use]
pub fn max_frame_bytes(max_model_len: u32, max_multimodal_bytes: u32) -> u32 {
    max_model_len.saturating_mul(4).saturating_add(4 << 20).saturating_add(max_multimodal_bytes)
}
