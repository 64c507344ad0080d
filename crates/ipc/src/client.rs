//! `EngineClient`: one engine in another process, as a front end sees it. Several behind one: `router.rs`.
//!
//! Calls from any thread; none waits for the engine but `connect` and `fresh_stats`. What is wrong with a request by the
//! engine's fixed numbers is an error of the call, in the engine's own words; what depends on its load comes back as
//! [`ClientOutput::Refused`]. When the connection is lost, every request that has no last output yet gets
//! [`ClientOutput::Died`] at once, and so does every later one.

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

/// See the module docs. Dropped, it disconnects, and the engine ends what it left running.
#[derive(Debug)]
pub struct EngineClient {
    shared: Arc<Shared>,
    commands: mpsc::UnboundedSender<Command>,
    thread: Option<JoinHandle<()>>,
    keys: NewKeys,
    /// In the keys of the engine's side; the same, unless this is one of several engines of a router.
    engine_index: u32,
    facts: EngineFacts,
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

    /// What the engine is.
    #[must_use]
    pub fn facts(&self) -> &EngineFacts {
        &self.facts
    }

    /// The number in the upper bits of this client's keys.
    #[must_use]
    pub fn client_index(&self) -> u32 {
        self.keys.client_index
    }

    /// A fresh name for a request.
    #[must_use]
    pub fn new_key(&self) -> RequestKey {
        self.keys.next()
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

    /// End requests; each gives a last output. Keys of finished and of other clients' requests are ignored.
    pub fn abort_keys(&self, keys: Vec<RequestKey>) {
        let _ = self.command(Command::AbortKeys(keys));
    }

    /// End requests by their ids; unknown and finished ones are ignored.
    pub fn abort_requests<'a>(&self, request_ids: impl IntoIterator<Item = &'a str>) {
        let _ = self.command(Command::AbortIds(request_ids.into_iter().map(Into::into).collect()));
    }

    /// End requests whose texts have come to a stop string; they count as complete.
    pub fn stop_keys(&self, keys: Vec<RequestKey>) {
        let _ = self.command(Command::StopKeys(keys));
    }

    /// Say why a request ended whose last output was not settled: by a stop string, or by its length.
    pub fn settle_end(&self, key: RequestKey, found_stop: bool) {
        let _ = self.command(Command::SettleEnd { key, found_stop });
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
        self.shared.num_of_others()
    }

    /// What the last heartbeat showed, and how old it is.
    #[must_use]
    pub fn health(&self) -> Health {
        self.shared.health()
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

    /// Disconnect for a `reason`, which ends its requests and is what [`Self::death`] returns.
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
