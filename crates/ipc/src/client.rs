//! `EngineClient`: an engine in another process, as a front end sees it.
//!
//! Calls from any thread; none waits for the engine but `connect` and `fresh_stats`. What is wrong with a request by the
//! engine's fixed numbers is an error of the call, in the engine's own words; what depends on its load comes back as
//! [`ClientOutput::Refused`]. When the connection is lost, every request that has no last output yet gets
//! [`ClientOutput::Died`] at once, and so does every later one.

use std::{
    io,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc as std_mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use scheduler::{AddRequestError, EngineCoreOutput, Inbox, NewRequest, RequestKey, TokenLogprobs};
use tokio::sync::mpsc;

use crate::{
    client_io,
    endpoint::check_path,
    error::{ClientError, EndpointError},
    frame::HEADER_BYTES,
    handshake::{CAPABILITIES, EngineFacts, Secret, Welcome},
    key::{client_of, key_of},
    message::encode_add_requests,
    notifier::Notifier,
};

/// Where an engine listens.
#[derive(Clone, Debug)]
pub enum Endpoint {
    /// A Unix socket of this user.
    Unix(PathBuf),
    /// Another host, or this one.
    Tcp {
        /// Address and port.
        address: SocketAddr,
        /// What both sides know.
        secret: Secret,
    },
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp { address, .. } => address.fmt(f),
        }
    }
}

/// Times and limits of a client.
#[derive(Clone, Copy, Debug)]
pub struct ClientOptions {
    /// How long to try to connect; an engine that does not listen yet is waited for.
    pub connect_timeout: Duration,
    /// How often to look whether the engine lives.
    pub heartbeat_interval: Duration,
    /// A TCP connection that is silent for so long is lost.
    pub silence_timeout: Duration,
    /// Requests are refused while more bytes than these wait for the engine to read them.
    pub max_unsent_bytes: usize,
    /// What the engine must be able to do.
    pub capabilities: u64,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            heartbeat_interval: Duration::from_millis(200),
            silence_timeout: Duration::from_secs(10),
            max_unsent_bytes: 64 << 20,
            capabilities: CAPABILITIES,
        }
    }
}

/// What became of requests.
#[derive(Clone, PartialEq, Debug)]
pub enum ClientOutput {
    /// A token, an end, or both.
    Output(EngineCoreOutput),
    /// What a token that follows has beside it.
    Logprobs(TokenLogprobs),
    /// The engine did not take the request; there is no other output.
    Refused {
        /// Which.
        key: RequestKey,
        /// Why.
        error: AddRequestError,
    },
    /// The engine has gone; [`EngineClient::death`] says why. There is no other output.
    Died {
        /// Whose last output this is.
        key: RequestKey,
    },
}

/// What the heartbeat shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Health {
    /// Since the engine's process answered last.
    pub heartbeat_age: Duration,
    /// For how long the engine has had something to do and done nothing.
    pub step_age: Duration,
    /// Steps that it has scheduled.
    pub num_steps: u64,
}

/// Names and values of counters.
pub type Counters = Arc<Vec<(String, u64)>>;

/// What the I/O thread is told.
#[derive(Debug)]
pub(crate) enum Command {
    /// An `AddRequests` frame, and whose ends to wait for.
    Add {
        frame: Vec<u8>,
        requests: Vec<(RequestKey, Box<str>)>,
    },
    AbortKeys(Vec<RequestKey>),
    AbortIds(Vec<Box<str>>),
    GrammarReady(RequestKey),
    GrammarFailed(RequestKey),
    Stats(std_mpsc::SyncSender<Counters>),
    Close,
}

/// What the callers and the I/O thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// What arrived, in batches; lock-free, as in the scheduler.
    pub(crate) outputs: Inbox<Vec<ClientOutput>>,
    pub(crate) notifier: Notifier,
    pub(crate) death: OnceLock<String>,
    pub(crate) unsent: AtomicUsize,
    /// Held for as long as it takes to exchange a pointer.
    last_stats: Mutex<Counters>,
    /// The atomics below count from here.
    began: Instant,
    // Relaxed: they are looked at by people and by a health check, and order nothing.
    heartbeat_ns: AtomicU64,
    step_age_ns: AtomicU64,
    num_steps: AtomicU64,
}

impl Shared {
    fn new() -> io::Result<Self> {
        Ok(Self {
            outputs: Inbox::new(),
            notifier: Notifier::new()?,
            death: OnceLock::new(),
            unsent: AtomicUsize::new(0),
            last_stats: Mutex::default(),
            began: Instant::now(),
            heartbeat_ns: AtomicU64::new(0),
            step_age_ns: AtomicU64::new(0),
            num_steps: AtomicU64::new(0),
        })
    }

    /// The engine has answered.
    pub(crate) fn note_heartbeat(&self, step_age_ns: u64, num_steps: u64) {
        self.heartbeat_ns.store(self.began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.step_age_ns.store(step_age_ns, Ordering::Relaxed);
        self.num_steps.store(num_steps, Ordering::Relaxed);
    }

    pub(crate) fn heartbeat_age(&self) -> Duration {
        let heartbeat = Duration::from_nanos(self.heartbeat_ns.load(Ordering::Relaxed));
        self.began.elapsed().saturating_sub(heartbeat)
    }

    pub(crate) fn last_stats(&self) -> MutexGuard<'_, Counters> {
        self.last_stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hand a batch to whoever drains.
    pub(crate) fn deliver(&self, batch: Vec<ClientOutput>) {
        if !batch.is_empty() {
            self.outputs.push(batch);
            self.notifier.notify();
        }
    }
}

/// See the module docs. Dropped, it disconnects, and the engine ends what it left running.
#[derive(Debug)]
pub struct EngineClient {
    shared: Arc<Shared>,
    commands: mpsc::UnboundedSender<Command>,
    thread: Option<JoinHandle<()>>,
    client_index: u32,
    facts: EngineFacts,
    next_counter: AtomicU64,
    max_unsent_bytes: usize,
}

impl EngineClient {
    /// Connect and shake hands. Waits for an engine that does not listen yet, until the time is over.
    ///
    /// # Errors
    /// Why there is no connection.
    pub fn connect(endpoint: Endpoint, options: ClientOptions) -> Result<Self, ClientError> {
        if let Endpoint::Unix(path) = &endpoint {
            check_path(path)?;
        }
        let shared = Arc::new(Shared::new().map_err(|source| start_error("make an eventfd for", source))?);
        let (commands, receiver) = mpsc::unbounded_channel();
        let (connected, outcome) = std_mpsc::sync_channel(1);
        let name = endpoint.to_string();
        let its_shared = shared.clone();
        let thread = std::thread::Builder::new()
            .name("rustvllm-ipc".to_owned())
            .spawn(move || client_io::run(&endpoint, options, &its_shared, receiver, &connected))
            .map_err(|source| start_error("start", source))?;
        let welcome: Welcome = match outcome.recv() {
            Ok(Ok(welcome)) => welcome,
            Ok(Err(source)) => return Err(ClientError::Connect { endpoint: name, source }),
            Err(_) => return Err(start_error("start", io::Error::other("it ended at once")).into()),
        };
        Ok(Self {
            shared,
            commands,
            thread: Some(thread),
            client_index: welcome.client_index,
            facts: welcome.facts,
            next_counter: AtomicU64::new(1),
            max_unsent_bytes: options.max_unsent_bytes,
        })
    }

    /// What the engine is.
    #[must_use]
    pub fn facts(&self) -> &EngineFacts {
        &self.facts
    }

    /// The number that the engine knows this client by.
    #[must_use]
    pub fn client_index(&self) -> u32 {
        self.client_index
    }

    /// A fresh name for a request.
    #[must_use]
    pub fn new_key(&self) -> RequestKey {
        // Relaxed: only uniqueness counts.
        key_of(self.client_index, self.next_counter.fetch_add(1, Ordering::Relaxed))
    }

    /// Hand requests in that the engine is to take at once and in this order, all or none: a request and those that fork
    /// it. The frame is made here, on the caller's thread.
    ///
    /// # Errors
    /// What is wrong with one of them, or that the engine has gone; nothing was sent then.
    pub fn add_requests(&self, requests: &[NewRequest]) -> Result<(), ClientError> {
        self.check_alive()?;
        let limit = self.facts.max_num_queued_reqs;
        if requests.len() > limit as usize {
            return Err(AddRequestError::QueueFull { limit }.into());
        }
        for request in requests {
            self.facts.limits.check(&request.prompt_token_ids, &request.params)?;
            let foreign = [Some(request.key), request.fork_from]
                .into_iter()
                .flatten()
                .find(|key| client_of(*key) != self.client_index);
            if let Some(key) = foreign {
                return Err(ClientError::ForeignKey { key: key.0 });
            }
        }
        if requests.is_empty() {
            return Ok(());
        }
        let unsent = self.shared.unsent.load(Ordering::Relaxed);
        if unsent > self.max_unsent_bytes {
            return Err(ClientError::Backlogged { unsent, limit: self.max_unsent_bytes });
        }
        let mut frame = Vec::new();
        encode_add_requests(requests, &mut frame);
        let (num_bytes, limit) = (frame.len() - HEADER_BYTES, self.facts.max_frame_bytes as usize);
        if num_bytes > limit {
            return Err(ClientError::RequestTooLarge { num_bytes, limit });
        }
        let requests = requests.iter().map(|request| (request.key, request.request_id.clone())).collect();
        self.command(Command::Add { frame, requests })
    }

    /// End requests; each gives a last output. Keys of finished and of other clients' requests are ignored.
    pub fn abort_keys(&self, keys: Vec<RequestKey>) {
        let _ = self.command(Command::AbortKeys(keys));
    }

    /// End requests by their ids; unknown and finished ones are ignored.
    pub fn abort_requests<'a>(&self, request_ids: impl IntoIterator<Item = &'a str>) {
        let _ = self.command(Command::AbortIds(request_ids.into_iter().map(Into::into).collect()));
    }

    /// The grammar of a request is compiled: it may run.
    pub fn grammar_ready(&self, key: RequestKey) {
        let _ = self.command(Command::GrammarReady(key));
    }

    /// The grammar of a request cannot be compiled: it ends with an error.
    pub fn grammar_failed(&self, key: RequestKey) {
        let _ = self.command(Command::GrammarFailed(key));
    }

    /// Take everything that has arrived, oldest first. One thread at a time, or each gets a part.
    pub fn drain_outputs(&self, mut receive: impl FnMut(ClientOutput)) {
        self.shared.notifier.clear();
        self.shared.outputs.take(|batch| batch.into_iter().for_each(&mut receive));
    }

    /// Its eventfd is readable while something has arrived.
    #[must_use]
    pub fn notifier(&self) -> &Notifier {
        &self.shared.notifier
    }

    /// The engine's counters as of the last heartbeat; empty before the first.
    #[must_use]
    pub fn stats(&self) -> Counters {
        self.shared.last_stats().clone()
    }

    /// The engine's counters now, or after `timeout` the last that are known.
    #[must_use]
    pub fn fresh_stats(&self, timeout: Duration) -> Counters {
        let (sender, answer) = std_mpsc::sync_channel(1);
        if self.command(Command::Stats(sender)).is_err() {
            return self.stats();
        }
        answer.recv_timeout(timeout).unwrap_or_else(|_| self.stats())
    }

    /// What the last heartbeat showed, and how old it is.
    #[must_use]
    pub fn health(&self) -> Health {
        let heartbeat_age = self.shared.heartbeat_age();
        let at_heartbeat = Duration::from_nanos(self.shared.step_age_ns.load(Ordering::Relaxed));
        let step_age = if at_heartbeat.is_zero() { at_heartbeat } else { at_heartbeat + heartbeat_age };
        Health { heartbeat_age, step_age, num_steps: self.shared.num_steps.load(Ordering::Relaxed) }
    }

    /// Whether the engine is connected.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.death().is_none()
    }

    /// Why there is no engine any more.
    #[must_use]
    pub fn death(&self) -> Option<&str> {
        self.shared.death.get().map(String::as_str)
    }

    /// Disconnect: requests that run get their last output. Idempotent.
    pub fn close(&self) {
        let _ = self.commands.send(Command::Close);
    }

    fn check_alive(&self) -> Result<(), ClientError> {
        match self.death() {
            None => Ok(()),
            Some(reason) => Err(ClientError::Dead { reason: reason.to_owned() }),
        }
    }

    fn command(&self, command: Command) -> Result<(), ClientError> {
        self.commands.send(command).map_err(|_| ClientError::Dead {
            reason: self.death().unwrap_or("the client's I/O thread has ended").to_owned(),
        })
    }
}

fn start_error(action: &'static str, source: io::Error) -> EndpointError {
    EndpointError::System { action, what: "a client's I/O thread".to_owned(), source }
}

impl Drop for EngineClient {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
