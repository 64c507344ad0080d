//! `EngineServer`: the engine's side. One thread accepts clients, feeds the scheduler's inbox and sends its outputs away.
//!
//! ```text
//!  clients ──frames──▶ reader task ──EngineHandle──▶ Inbox ──▶ scheduler's thread
//!     ▲                                                             │ publish, notify
//!     └──────────── writer task ◀── Outbox ◀── egress task ◀── Egress
//! ```
//!
//! One thread with a current-thread runtime is enough and better than several: a step costs it one wake-up, one pass over
//! the egress and one `write` per client (some 10 µs for 256 tokens), the cores belong to the model and the front ends, and what
//! its tasks share needs no lock. It never takes the interpreter's lock, so frames are read and heartbeats answered while
//! Python computes.

use std::{
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc as std_mpsc,
    },
    thread::JoinHandle,
    time::Duration,
};

use scheduler::{EngineHandle, RequestLimits, egress::Consumer};
use tokio::sync::mpsc;

use crate::{
    endpoint::Listener,
    engine_io,
    error::EndpointError,
    handshake::EngineFacts,
    notifier::Notifier,
    query::{Queries, Reply},
};

/// How long a stopping server waits for its last words to be taken.
pub const FAREWELL_TIMEOUT: Duration = Duration::from_millis(500);

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

    /// What clients are told.
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

/// Counters that any thread may read. Relaxed: each is exact by itself, none orders another.
#[derive(Debug, Default)]
#[expect(clippy::struct_field_names, reason = "named as in ServerStats")]
pub(crate) struct ServerCounters {
    pub(crate) num_clients: AtomicU64,
    pub(crate) num_connections: AtomicU64,
    pub(crate) num_refused: AtomicU64,
    pub(crate) num_failed: AtomicU64,
    pub(crate) num_requests: AtomicU64,
    pub(crate) num_dropped_outputs: AtomicU64,
    pub(crate) num_bytes_sent: AtomicU64,
}

/// A copy of the counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServerStats {
    /// Welcomed and still there.
    pub num_clients: u64,
    /// Connections that were accepted, whatever became of them.
    pub num_connections: u64,
    /// Connections that were turned away: another user, version or secret, or too many.
    pub num_refused: u64,
    /// Connections that were cut because of what came over them.
    pub num_failed: u64,
    /// Requests handed to the scheduler.
    pub num_requests: u64,
    /// Outputs whose client has gone.
    pub num_dropped_outputs: u64,
    /// Bytes that clients took.
    pub num_bytes_sent: u64,
}

impl ServerCounters {
    fn read(&self) -> ServerStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ServerStats {
            num_clients: read(&self.num_clients),
            num_connections: read(&self.num_connections),
            num_refused: read(&self.num_refused),
            num_failed: read(&self.num_failed),
            num_requests: read(&self.num_requests),
            num_dropped_outputs: read(&self.num_dropped_outputs),
            num_bytes_sent: read(&self.num_bytes_sent),
        }
    }
}

/// Why the last failed step failed.
#[derive(Debug, Default)]
pub(crate) struct StepError {
    /// From 1.
    pub(crate) number: u64,
    pub(crate) message: String,
}

/// What the owner tells the I/O thread.
#[derive(Debug)]
pub(crate) enum Control {
    /// Say goodbye and end.
    Stop,
    /// Tell every client why the engine died, and end.
    Fail(String),
    /// Send an answer to the client that asked.
    Reply(Reply),
}

/// See the module docs. Dropped, it stops.
#[derive(Debug)]
pub struct EngineServer {
    control: mpsc::UnboundedSender<Control>,
    thread: Option<JoinHandle<()>>,
    counters: Arc<ServerCounters>,
    complaints: std_mpsc::Receiver<String>,
    /// Held for as long as it takes to write it down, or to copy it into a frame.
    step_error: Arc<Mutex<StepError>>,
    queries: Arc<Queries>,
}

impl EngineServer {
    /// Start the I/O thread.
    ///
    /// # Errors
    /// When a listener cannot be used or no thread or descriptor is left.
    pub fn start(options: ServerOptions) -> Result<Self, EndpointError> {
        let counters = Arc::new(ServerCounters::default());
        let (control, commands) = mpsc::unbounded_channel();
        let (complain, complaints) = std_mpsc::sync_channel(MAX_COMPLAINTS);
        let (started, outcome) = std_mpsc::sync_channel(1);
        let step_error = Arc::new(Mutex::default());
        let queries = Arc::<Queries>::default();
        let context = engine_io::Context {
            commands,
            counters: counters.clone(),
            complain,
            step_error: step_error.clone(),
            queries: queries.clone(),
            answers: control.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("rustvllm-ipc".to_owned())
            .spawn(move || engine_io::run(options, context, &started))
            .map_err(|source| start_error("start", source))?;
        match outcome.recv() {
            Ok(Ok(())) => {
                Ok(Self { control, thread: Some(thread), counters, complaints, step_error, queries })
            }
            Ok(Err(source)) => Err(start_error("listen on", source)),
            Err(_) => Err(start_error("start", io::Error::other("it ended at once"))),
        }
    }

    /// What a step raised. Called before the scheduler is told that it failed, it reaches every client whose requests that
    /// ends, before their last outputs.
    pub fn note_step_error(&self, message: &str) {
        let mut step_error = self.step_error.lock().unwrap_or_else(PoisonError::into_inner);
        step_error.number += 1;
        message.clone_into(&mut step_error.message);
    }

    /// What clients ask of the thread that steps the engine.
    #[must_use]
    pub fn queries(&self) -> Arc<Queries> {
        self.queries.clone()
    }

    /// Tell every client that the engine died and why, and end. Returns when they have been told, or after half a second.
    pub fn fail(&mut self, message: &str) {
        self.end(Control::Fail(message.to_owned()));
    }

    /// Say goodbye to every client and end. Idempotent.
    pub fn stop(&mut self) {
        self.end(Control::Stop);
    }

    /// Whether the I/O thread runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        self.counters.read()
    }

    /// Why connections were refused or cut, for the log, since the last call. Beyond 64 that nobody took, further ones are
    /// only counted.
    #[must_use]
    pub fn take_complaints(&self) -> Vec<String> {
        self.complaints.try_iter().collect()
    }

    fn end(&mut self, control: Control) {
        let Some(thread) = self.thread.take() else { return };
        // An error means that the thread has ended already.
        let _ = self.control.send(control);
        let _ = thread.join();
    }
}

/// Complaints that wait for somebody to take them.
const MAX_COMPLAINTS: usize = 64;

fn start_error(action: &'static str, source: io::Error) -> EndpointError {
    EndpointError::System { action, what: "the engine's I/O thread".to_owned(), source }
}

impl Drop for EngineServer {
    fn drop(&mut self) {
        self.stop();
    }
}
