//! `EngineClient`: a front end's connection to one engine in another process. `router.rs` combines several.
//!
//! Any thread may call it. Only `connect`, `fresh_stats` and `query` wait for the engine. A request that the engine's
//! fixed limits forbid is an error of the call, with the engine's own message; a request that the engine refuses
//! because of its load comes back as [`ClientOutput::Refused`]. When the connection is lost, every request without a
//! last output gets [`ClientOutput::Died`] at once, and so does every later request.

pub(crate) mod delivery;
mod io_thread;
pub(crate) mod state;

use std::{
    io,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{self as std_mpsc, RecvTimeoutError},
    },
    thread::JoinHandle,
    time::Duration,
};

use scheduler::{AddRequestError, MetricsSnapshot, NewRequest, RequestKey};
use tokio::sync::mpsc;

use crate::{
    client::{
        delivery::{ClientOutput, Delivery},
        state::{ClientOptions, Command, Counters, Health, Shared},
    },
    endpoint::{Endpoint, check_path},
    error::{ClientError, EndpointError},
    frame::HEADER_BYTES,
    handshake::{Welcome, facts::EngineFacts},
    key::{NewKeys, client_of, counter_of, key_of},
    message::{MAX_QUERY_BYTES, MAX_QUERY_KIND_BYTES, encode_add_requests},
    notifier::Notifier,
};

/// See the module docs. Dropping it disconnects, and the engine ends the requests that still run.
#[derive(Debug)]
pub struct EngineClient {
    shared: Arc<Shared>,
    commands: mpsc::UnboundedSender<Command>,
    thread: Option<JoinHandle<()>>,
    keys: NewKeys,
    /// The number in the upper bits of keys on the engine's side. It differs from `client_index` only behind a router.
    engine_index: u32,
    facts: EngineFacts,
    max_unsent_bytes: usize,
}

impl EngineClient {
    /// Connect and shake hands. Until `connect_timeout` has passed, wait for an engine that does not listen yet.
    ///
    /// # Errors
    /// There is no connection; says why.
    pub fn connect(endpoint: Endpoint, options: ClientOptions) -> Result<Self, ClientError> {
        Self::connect_into(endpoint, options, Delivery::new()?, None)
    }

    /// Connect as [`Self::connect`] does; outputs go to an existing `delivery`, under keys of `client_index`.
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
                io_thread::run(&endpoint, options, client_index, &its_shared, receiver, &connected);
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
            keys: NewKeys::of(client_index.unwrap_or(welcome.client_index)),
            engine_index: welcome.client_index,
            facts: welcome.facts,
            max_unsent_bytes: options.max_unsent_bytes,
        })
    }

    /// What the engine reported about itself in the handshake.
    #[must_use]
    pub fn facts(&self) -> &EngineFacts {
        &self.facts
    }

    /// The number in the upper bits of this client's keys.
    #[must_use]
    pub fn client_index(&self) -> u32 {
        self.keys.client_index
    }

    /// A new key for a request.
    #[must_use]
    pub fn new_key(&self) -> RequestKey {
        self.keys.next()
    }

    /// Submit a request together with the requests that fork it. The engine takes all of them in this order, or none.
    /// The frame is encoded on the caller's thread.
    ///
    /// # Errors
    /// One of the requests is invalid, or the engine is gone. Nothing was sent then.
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
                .find(|key| client_of(*key) != self.client_index());
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

    /// Abort requests; each gets a last output. Keys of finished requests and of other clients' requests are ignored.
    pub fn abort_keys(&self, keys: Vec<RequestKey>) {
        let _ = self.command(Command::AbortKeys(keys));
    }

    /// Abort requests by their ids; unknown and finished ones are ignored.
    pub fn abort_requests<'a>(&self, request_ids: impl IntoIterator<Item = &'a str>) {
        let _ = self.command(Command::AbortIds(request_ids.into_iter().map(Into::into).collect()));
    }

    /// End requests whose text has reached a stop string; they count as complete.
    pub fn stop_keys(&self, keys: Vec<RequestKey>) {
        let _ = self.command(Command::StopKeys(keys));
    }

    /// Report why a request ended whose last output left that open: at a stop string, or for the engine's own reason.
    pub fn settle_end(&self, key: RequestKey, found_stop: bool) {
        let _ = self.command(Command::SettleEnd { key, found_stop });
    }

    /// Report that the grammar of a request is compiled, so that the request may run.
    pub fn grammar_ready(&self, key: RequestKey) {
        let _ = self.command(Command::GrammarReady(key));
    }

    /// Report that the grammar of a request cannot be compiled; the request ends with an error.
    pub fn grammar_failed(&self, key: RequestKey) {
        let _ = self.command(Command::GrammarFailed(key));
    }

    /// Take all outputs that have arrived, oldest first. Call it from one thread at a time; otherwise each thread gets
    /// only a part.
    pub fn drain_outputs(&self, receive: impl FnMut(ClientOutput)) {
        self.shared.delivery.drain(receive);
    }

    /// The notifier; its eventfd is readable while outputs wait.
    #[must_use]
    pub fn notifier(&self) -> &Notifier {
        &self.shared.delivery.notifier
    }

    /// The engine's counters as of the last heartbeat; empty before the first.
    #[must_use]
    pub fn stats(&self) -> Counters {
        self.shared.last_stats().clone()
    }

    /// Ask for the engine's current counters; after `timeout`, return the last known ones.
    #[must_use]
    pub fn fresh_stats(&self, timeout: Duration) -> Counters {
        self.query_stats().recv_timeout(timeout).unwrap_or_else(|_| self.stats())
    }

    /// Ask for the counters. If the engine is gone, the channel closes at once.
    pub(crate) fn query_stats(&self) -> std_mpsc::Receiver<Counters> {
        let (sender, answer) = std_mpsc::sync_channel(1);
        let _ = self.command(Command::Stats(sender));
        answer
    }

    /// Ask for all metrics of the engine. If the engine is gone, the channel closes at once.
    #[must_use]
    pub fn query_metrics(&self) -> std_mpsc::Receiver<MetricsSnapshot> {
        let (sender, answer) = std_mpsc::sync_channel(1);
        let _ = self.command(Command::Metrics(sender));
        answer
    }

    /// Send a query to the thread that steps the engine and wait for the reply, which comes after the current step.
    ///
    /// # Errors
    /// The query is too long, the engine is gone, refuses it, fails to answer it, or does not answer in time.
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

    /// Number of requests of other clients that the engine had at the last heartbeat.
    #[must_use]
    pub fn num_of_others(&self) -> u32 {
        self.shared.num_of_others()
    }

    /// What the last heartbeat reported, and how old it is.
    #[must_use]
    pub fn health(&self) -> Health {
        self.shared.health()
    }

    /// Whether the engine is connected.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.death().is_none()
    }

    /// The error of the last failed step that ended requests of this client; set before their last outputs arrive.
    #[must_use]
    pub fn last_step_error(&self) -> Option<Arc<str>> {
        self.shared.delivery.last_step_error()
    }

    /// Why the engine is gone; `None` while it is connected.
    #[must_use]
    pub fn death(&self) -> Option<&str> {
        self.shared.death.get().map(|reason| &**reason)
    }

    /// Disconnect; running requests get their last output. Idempotent.
    pub fn close(&self) {
        self.close_because("this client was closed");
    }

    /// Disconnect for a `reason`; the requests end with it, and [`Self::death`] returns it.
    pub fn close_because(&self, reason: &str) {
        let _ = self.commands.send(Command::Close(reason.into()));
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
