//! `EngineClient`: one engine in another process, as a front end sees it. Several behind one: `router.rs`.
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
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
        mpsc::{self as std_mpsc, RecvTimeoutError},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use scheduler::{
    AddRequestError, EngineCoreOutput, Inbox, MetricsSnapshot, NewRequest, PromptLogprobs, RequestKey,
    TokenLogprobs,
};
use tokio::sync::mpsc;

use crate::{
    client_io,
    endpoint::check_path,
    error::{ClientError, EndpointError},
    frame::HEADER_BYTES,
    handshake::{CAPABILITIES, EngineFacts, Secret, Welcome},
    key::{client_of, counter_of, key_of},
    message::{NUM_CLIENT_REQUESTS, encode_add_requests},
    notifier::Notifier,
    query::{MAX_QUERY_BYTES, MAX_QUERY_KIND_BYTES, QueryOutcome},
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
    /// What places of a prompt have beside them; the request's first token comes later.
    PromptLogprobs(PromptLogprobs),
    /// The engine did not take the request; there is no other output.
    Refused {
        /// Which.
        key: RequestKey,
        /// Why.
        error: AddRequestError,
    },
    /// The engine has gone. There is no other output.
    Died {
        /// Whose last output this is.
        key: RequestKey,
        /// Why, as [`EngineClient::death`] says it.
        reason: Arc<str>,
    },
}

impl ClientOutput {
    /// The request that this is about.
    #[must_use]
    pub fn key(&self) -> RequestKey {
        match self {
            Self::Output(output) => output.key,
            Self::Logprobs(logprobs) => logprobs.key,
            Self::PromptLogprobs(logprobs) => logprobs.key,
            Self::Refused { key, .. } | Self::Died { key, .. } => *key,
        }
    }

    /// Whether nothing else comes for the request.
    #[must_use]
    pub fn is_last(&self) -> bool {
        match self {
            Self::Output(output) => output.finish_reason.is_some(),
            Self::Logprobs(_) | Self::PromptLogprobs(_) => false,
            Self::Refused { .. } | Self::Died { .. } => true,
        }
    }
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
    /// They are complete.
    StopKeys(Vec<RequestKey>),
    GrammarReady(RequestKey),
    GrammarFailed(RequestKey),
    Stats(std_mpsc::SyncSender<Counters>),
    Metrics(std_mpsc::SyncSender<MetricsSnapshot>),
    Query {
        kind: Box<str>,
        payload: Box<[u8]>,
        answer: std_mpsc::SyncSender<QueryOutcome>,
    },
    /// Disconnect, and say this to whoever asks why.
    Close(&'static str),
}

/// Where outputs arrive, of one engine or of several.
#[derive(Debug)]
pub(crate) struct Delivery {
    /// In batches; lock-free, as in the scheduler.
    outputs: Inbox<Vec<ClientOutput>>,
    pub(crate) notifier: Notifier,
    /// Held for as long as it takes to exchange a pointer.
    step_error: Mutex<Option<Arc<str>>>,
}

impl Delivery {
    pub(crate) fn new() -> Result<Arc<Self>, ClientError> {
        let notifier = Notifier::new().map_err(|source| start_error("make an eventfd for", source))?;
        Ok(Arc::new(Self { outputs: Inbox::new(), notifier, step_error: Mutex::default() }))
    }

    /// Why outputs that come next say that a step failed.
    pub(crate) fn note_step_error(&self, message: Arc<str>) {
        *self.step_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(message);
    }

    /// What the last step that failed raised.
    pub(crate) fn last_step_error(&self) -> Option<Arc<str>> {
        self.step_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Hand a batch to whoever drains.
    pub(crate) fn deliver(&self, batch: Vec<ClientOutput>) {
        if !batch.is_empty() {
            self.outputs.push(batch);
            self.notifier.notify();
        }
    }

    /// Take everything that has arrived, oldest first.
    pub(crate) fn drain(&self, mut receive: impl FnMut(ClientOutput)) {
        self.notifier.clear();
        self.outputs.take(|batch| batch.into_iter().for_each(&mut receive));
    }
}

/// What the callers and the I/O thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) delivery: Arc<Delivery>,
    pub(crate) death: OnceLock<Arc<str>>,
    pub(crate) unsent: AtomicUsize,
    /// Held for as long as it takes to exchange a pointer.
    last_stats: Mutex<Counters>,
    /// The atomics below count from here.
    began: Instant,
    // Relaxed: they are looked at by people and by a health check, and order nothing.
    heartbeat_ns: AtomicU64,
    step_age_ns: AtomicU64,
    num_steps: AtomicU64,
    num_of_others: AtomicU32,
}

impl Shared {
    fn new(delivery: Arc<Delivery>) -> Self {
        Self {
            delivery,
            death: OnceLock::new(),
            unsent: AtomicUsize::new(0),
            last_stats: Mutex::default(),
            began: Instant::now(),
            heartbeat_ns: AtomicU64::new(0),
            step_age_ns: AtomicU64::new(0),
            num_steps: AtomicU64::new(0),
            num_of_others: AtomicU32::new(0),
        }
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

    /// The engine's counters have come.
    pub(crate) fn note_stats(&self, counters: &Counters) {
        self.last_stats().clone_from(counters);
        let of = |name: &str| counters.iter().find(|(entry, _)| entry == name).map_or(0, |(_, value)| *value);
        // What waits was either never admitted, in which case it is queued, or it was preempted.
        let in_all = of("num_running") + of("num_waiting").max(of("num_queued"));
        let of_others = in_all.saturating_sub(of(NUM_CLIENT_REQUESTS));
        self.num_of_others.store(u32::try_from(of_others).unwrap_or(u32::MAX), Ordering::Relaxed);
    }
}

/// See the module docs. Dropped, it disconnects, and the engine ends what it left running.
#[derive(Debug)]
pub struct EngineClient {
    shared: Arc<Shared>,
    commands: mpsc::UnboundedSender<Command>,
    thread: Option<JoinHandle<()>>,
    /// In the keys of this side.
    client_index: u32,
    /// In the keys of the engine's side; the same, unless this is one of several engines of a router.
    engine_index: u32,
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
        Self::connect_into(endpoint, options, Delivery::new()?, None)
    }

    /// The same, with outputs going to a `delivery` that there is already, under keys of `client_index`.
    pub(crate) fn connect_into(
        endpoint: Endpoint,
        options: ClientOptions,
        delivery: Arc<Delivery>,
        client_index: Option<u32>,
    ) -> Result<Self, ClientError> {
        if let Endpoint::Unix(path) = &endpoint {
            check_path(path)?;
        }
        let shared = Arc::new(Shared::new(delivery));
        let (commands, receiver) = mpsc::unbounded_channel();
        let (connected, outcome) = std_mpsc::sync_channel(1);
        let name = endpoint.to_string();
        let its_shared = shared.clone();
        let thread = std::thread::Builder::new()
            .name("rustvllm-ipc".to_owned())
            .spawn(move || {
                client_io::run(&endpoint, options, client_index, &its_shared, receiver, &connected);
            })
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
            client_index: client_index.unwrap_or(welcome.client_index),
            engine_index: welcome.client_index,
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

    /// The number in the upper bits of this client's keys.
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
            let wanted = u32::try_from(requests.len()).unwrap_or(u32::MAX);
            return Err(AddRequestError::QueueFull { queued: 0, wanted, limit }.into());
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
        encode_add_requests(requests, |key| key_of(self.engine_index, counter_of(key)), &mut frame);
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

    /// End requests whose texts have come to a stop string: they are complete, for whoever counts.
    pub fn stop_keys(&self, keys: Vec<RequestKey>) {
        let _ = self.command(Command::StopKeys(keys));
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
    pub fn drain_outputs(&self, receive: impl FnMut(ClientOutput)) {
        self.shared.delivery.drain(receive);
    }

    /// Its eventfd is readable while something has arrived.
    #[must_use]
    pub fn notifier(&self) -> &Notifier {
        &self.shared.delivery.notifier
    }

    /// The engine's counters as of the last heartbeat; empty before the first.
    #[must_use]
    pub fn stats(&self) -> Counters {
        self.shared.last_stats().clone()
    }

    /// The engine's counters now, or after `timeout` the last that are known.
    #[must_use]
    pub fn fresh_stats(&self, timeout: Duration) -> Counters {
        self.query_stats().recv_timeout(timeout).unwrap_or_else(|_| self.stats())
    }

    /// Ask for the counters. An engine that has gone ends the channel at once.
    pub(crate) fn query_stats(&self) -> std_mpsc::Receiver<Counters> {
        let (sender, answer) = std_mpsc::sync_channel(1);
        let _ = self.command(Command::Stats(sender));
        answer
    }

    /// Ask for all that the engine has counted. An engine that has gone ends the channel at once.
    #[must_use]
    pub fn query_metrics(&self) -> std_mpsc::Receiver<MetricsSnapshot> {
        let (sender, answer) = std_mpsc::sync_channel(1);
        let _ = self.command(Command::Metrics(sender));
        answer
    }

    /// Ask the thread that steps the engine, and wait for its answer: it comes when the present step has ended.
    ///
    /// # Errors
    /// The query is too long, the engine has gone, refuses or fails to answer it, or does not answer in time.
    pub fn query(&self, kind: &str, payload: &[u8], timeout: Duration) -> Result<Vec<u8>, ClientError> {
        for (what, num_bytes, limit) in
            [("kind", kind.len(), MAX_QUERY_KIND_BYTES), ("payload", payload.len(), MAX_QUERY_BYTES)]
        {
            if num_bytes > limit {
                return Err(ClientError::QueryTooLarge { what, num_bytes, limit });
            }
        }
        self.check_alive()?;
        let (sender, answer) = std_mpsc::sync_channel(1);
        self.command(Command::Query { kind: kind.into(), payload: payload.into(), answer: sender })?;
        match answer.recv_timeout(timeout) {
            Ok(outcome) => outcome.map_err(|message| ClientError::QueryFailed { message }),
            Err(RecvTimeoutError::Timeout) => {
                Err(ClientError::QueryTimeout { seconds: timeout.as_secs_f64() })
            }
            Err(RecvTimeoutError::Disconnected) => {
                let reason = self.death().unwrap_or("the connection to the engine was closed").to_owned();
                Err(ClientError::Dead { reason })
            }
        }
    }

    /// Requests of other clients that the engine had at the last heartbeat.
    #[must_use]
    pub fn num_of_others(&self) -> u32 {
        self.shared.num_of_others.load(Ordering::Relaxed)
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

    /// What the last step that failed for a request of this client raised; known before the request's last output is.
    #[must_use]
    pub fn last_step_error(&self) -> Option<Arc<str>> {
        self.shared.delivery.last_step_error()
    }

    /// Why there is no engine any more.
    #[must_use]
    pub fn death(&self) -> Option<&str> {
        self.shared.death.get().map(|reason| &**reason)
    }

    /// Disconnect: requests that run get their last output. Idempotent.
    pub fn close(&self) {
        self.close_because("this client was closed");
    }

    pub(crate) fn close_because(&self, reason: &'static str) {
        let _ = self.commands.send(Command::Close(reason));
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
