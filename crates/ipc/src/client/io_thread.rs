//! A client's I/O thread. Only this thread knows which requests have no last output yet, so it can give each one when
//! the connection is lost.

use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    sync::{Arc, atomic::Ordering, mpsc as std_mpsc},
    time::Duration,
};

use scheduler::{MetricsSnapshot, RequestKey};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    net::{TcpStream, UnixStream},
    sync::mpsc,
    time::{Instant, MissedTickBehavior, sleep, timeout_at},
};

use crate::{
    client::{
        delivery::ClientOutput,
        state::{ClientOptions, Command, Counters, Shared},
    },
    codec,
    endpoint::{Endpoint, check_peer, own_uid},
    error::{ConnectionError, DecodeError, Refusal},
    frame::FrameReader,
    handshake::{Hello, PROTOCOL_VERSION, Secret, Side, Welcome, new_nonce},
    key::{counter_of, key_of},
    message::{ClientMessage, EngineMessage, MAX_REPLY_BYTES, QueryOutcome, kind},
    outbox::Outbox,
    server::query::MAX_OPEN_QUERIES,
};

/// Size limit of a frame from the engine.
const MAX_ENGINE_FRAME_BYTES: usize = MAX_REPLY_BYTES + 64;

/// Most queries for metrics that may wait for an answer.
const MAX_METRICS_QUERIES: usize = 64;

/// Pause between two attempts to connect.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

type Connected = std_mpsc::SyncSender<Result<Welcome, ConnectionError>>;
type BoxedReader = Box<dyn AsyncRead + Unpin>;
type BoxedWriter = Box<dyn AsyncWrite + Unpin>;

/// Run the thread until the client is closed.
pub(crate) fn run(
    endpoint: &Endpoint,
    options: ClientOptions,
    client_index: Option<u32>,
    shared: &Arc<Shared>,
    mut commands: mpsc::UnboundedReceiver<Command>,
    connected: &Connected,
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return connected.send(Err(error.into())).unwrap_or(()),
    };
    runtime.block_on(async {
        let (mut reader, writer, welcome) = match connect(endpoint, &options).await {
            Ok(parts) => parts,
            Err(error) => return connected.send(Err(error)).unwrap_or(()),
        };
        let pid = welcome.facts.pid;
        let mut connection = Connection {
            shared: shared.clone(),
            client_index: client_index.unwrap_or(welcome.client_index),
            engine_index: welcome.client_index,
            live: HashMap::new(),
            by_id: HashMap::new(),
            stats_queries: HashMap::new(),
            queries: HashMap::new(),
            metrics_queries: HashMap::new(),
            next_id: 0,
            awaits_pong: false,
        };
        shared.note_heartbeat(0, 0);
        if connected.send(Ok(welcome)).is_err() {
            return;
        }
        let silence = matches!(endpoint, Endpoint::Tcp { .. }).then_some(options.silence_timeout);
        let end = connection.serve(&mut reader, writer, &mut commands, &options, silence).await;
        if matches!(end, End::ClosedHere(_)) {
            commands.close();
        }
        let reason: Arc<str> = end.reason(pid).into();
        connection.die(&reason);
        drop(reader);
        // Until the client is closed, end every further request at once, also those that were sent before the death was
        // known.
        while let Some(command) = commands.recv().await {
            match command {
                Command::Add { requests, .. } => {
                    let ends = requests.into_iter().map(|(key, _)| died(key, &reason));
                    shared.delivery.deliver(ends.collect());
                }
                Command::Close(_) => commands.close(),
                _ => {}
            }
        }
    });
}

async fn connect(
    endpoint: &Endpoint,
    options: &ClientOptions,
) -> Result<(FrameReader<BoxedReader>, BoxedWriter, Welcome), ConnectionError> {
    let deadline = Instant::now() + options.connect_timeout;
    let attempt = async {
        let (reader, mut writer, secret): (BoxedReader, BoxedWriter, _) = match endpoint {
            Endpoint::Unix(path) => {
                let stream = until_there(deadline, || UnixStream::connect(path)).await?;
                check_peer(stream.peer_cred()?.uid(), own_uid())?;
                let (reader, writer) = stream.into_split();
                (Box::new(reader), Box::new(writer), None)
            }
            Endpoint::Tcp { address, secret } => {
                let stream = until_there(deadline, || TcpStream::connect(*address)).await?;
                let _ = stream.set_nodelay(true);
                let (reader, writer) = stream.into_split();
                (Box::new(reader), Box::new(writer), Some(secret))
            }
        };
        let mut reader = FrameReader::new(reader, MAX_ENGINE_FRAME_BYTES);
        let welcome = greet(&mut reader, &mut writer, secret, options.capabilities).await?;
        Ok((reader, writer, welcome))
    };
    match timeout_at(deadline, attempt).await {
        Ok(result) => result,
        Err(_) => Err(ConnectionError::Timeout { seconds: options.connect_timeout.as_secs_f64() }),
    }
}

/// Retry while no engine listens. After the time limit, return the error of the last attempt.
async fn until_there<T, F: Future<Output = io::Result<T>>>(
    deadline: Instant,
    connect: impl Fn() -> F,
) -> io::Result<T> {
    loop {
        match connect().await {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock
                ) && Instant::now() + RETRY_PAUSE < deadline =>
            {
                sleep(RETRY_PAUSE).await;
            }
            result => return result,
        }
    }
}

async fn greet(
    reader: &mut FrameReader<BoxedReader>,
    writer: &mut BoxedWriter,
    secret: Option<&Secret>,
    capabilities: u64,
) -> Result<Welcome, ConnectionError> {
    let (frame_kind, body) = reader.next().await?;
    if frame_kind != kind::CHALLENGE {
        return Err(ConnectionError::NotOurs);
    }
    let EngineMessage::Challenge(challenge) = EngineMessage::decode(frame_kind, body, 0)? else {
        return Err(ConnectionError::NotOurs);
    };
    if challenge.version != PROTOCOL_VERSION {
        let refusal = Refusal::Version { engine: challenge.version, client: PROTOCOL_VERSION };
        return Err(ConnectionError::Refused(refusal));
    }
    if secret.is_some() && !challenge.needs_secret {
        return Err(ConnectionError::EngineUnproven);
    }
    let nonce = new_nonce()?;
    let hello = Hello {
        version: PROTOCOL_VERSION,
        capabilities,
        nonce,
        proof: secret.map(|secret| secret.prove(Side::Client, &challenge.nonce, &nonce)),
    };
    let mut frame = Vec::new();
    ClientMessage::Hello(hello).encode(&mut frame);
    writer.write_all(&frame).await?;
    let (frame_kind, body) = reader.next().await?;
    match EngineMessage::decode(frame_kind, body, 0)? {
        EngineMessage::Welcome(welcome) => {
            let is_proven = secret.is_none_or(|secret| {
                welcome
                    .proof
                    .is_some_and(|proof| secret.verify(Side::Engine, &challenge.nonce, &nonce, &proof))
            });
            if is_proven { Ok(welcome) } else { Err(ConnectionError::EngineUnproven) }
        }
        EngineMessage::Rejected(refusal) => Err(ConnectionError::Refused(refusal)),
        _ => Err(ConnectionError::Protocol { what: "a welcome follows a hello", got: frame_kind.into() }),
    }
}

/// How a connection ended.
enum End {
    /// The client's owner closed it.
    ClosedHere(Box<str>),
    Goodbye,
    Fatal(String),
    Lost(ConnectionError),
}

impl End {
    fn reason(&self, pid: u32) -> String {
        match self {
            Self::ClosedHere(reason) => reason.clone().into_string(),
            Self::Goodbye => "the engine was shut down".to_owned(),
            Self::Fatal(message) => format!("the engine died: {message}"),
            Self::Lost(
                error @ (ConnectionError::Io(_)
                | ConnectionError::Closed
                | ConnectionError::ClosedWithinFrame { .. }),
            ) => {
                format!("the engine died: its process {pid} ended without a word ({error})")
            }
            Self::Lost(error) => format!("the engine is lost: {error}"),
        }
    }
}

fn died(key: RequestKey, reason: &Arc<str>) -> ClientOutput {
    ClientOutput::Died { key, reason: reason.clone() }
}

struct Connection {
    shared: Arc<Shared>,
    /// The upper bits of keys on this side, as in `live`.
    client_index: u32,
    /// The upper bits of keys on the engine's side.
    engine_index: u32,
    /// Requests without a last output.
    live: HashMap<RequestKey, Box<str>>,
    /// Keys of the requests in `live`, by id.
    by_id: HashMap<Box<str>, RequestKey>,
    metrics_queries: HashMap<u64, std_mpsc::SyncSender<MetricsSnapshot>>,
    stats_queries: HashMap<u64, std_mpsc::SyncSender<Counters>>,
    /// Open queries. They stay until they are answered, even if the caller no longer waits, because the engine still
    /// counts them.
    queries: HashMap<u64, std_mpsc::SyncSender<QueryOutcome>>,
    next_id: u64,
    awaits_pong: bool,
}

impl Connection {
    async fn serve(
        &mut self,
        reader: &mut FrameReader<BoxedReader>,
        mut writer: BoxedWriter,
        commands: &mut mpsc::UnboundedReceiver<Command>,
        options: &ClientOptions,
        silence: Option<Duration>,
    ) -> End {
        let outbox = Outbox::default();
        let shared = self.shared.clone();
        let writing = outbox.write_to(&mut writer, |_| {
            shared.unsent.store(outbox.num_unsent(), Ordering::Relaxed);
        });
        tokio::pin!(writing);
        let mut is_writing = true;
        let mut heartbeat = tokio::time::interval(options.heartbeat_interval);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                frame = reader.next() => {
                    let end = match frame {
                        Ok((frame_kind, body)) => self.take_frame(frame_kind, body),
                        Err(error) => Some(End::Lost(error)),
                    };
                    if let Some(end) = end {
                        return end;
                    }
                }
                command = commands.recv() => match command {
                    None => return End::ClosedHere("this client was dropped".into()),
                    Some(Command::Close(reason)) => return End::ClosedHere(reason),
                    Some(command) => outbox.fill(|buffer| self.obey(command, buffer)),
                },
                _ = heartbeat.tick() => {
                    if silence.is_some_and(|limit| self.shared.heartbeat_age() > limit) {
                        let seconds = self.shared.heartbeat_age().as_secs_f64();
                        return End::Lost(ConnectionError::Timeout { seconds });
                    }
                    if !self.awaits_pong {
                        outbox.fill(|buffer| self.ask(buffer));
                    }
                }
                // The reader reports the loss of the connection, after everything that arrived before it.
                _ = &mut writing, if is_writing => is_writing = false,
            }
            self.shared.unsent.store(outbox.num_unsent(), Ordering::Relaxed);
        }
    }

    /// Send a ping and ask for the counters.
    fn ask(&mut self, buffer: &mut Vec<u8>) {
        self.awaits_pong = true;
        self.next_id += 1;
        ClientMessage::Ping(self.next_id).encode(buffer);
        ClientMessage::StatsQuery(self.next_id).encode(buffer);
    }

    fn obey(&mut self, command: Command, buffer: &mut Vec<u8>) {
        match command {
            Command::Add { frame, requests } => {
                for (key, request_id) in requests {
                    self.by_id.entry(request_id.clone()).or_insert(key);
                    self.live.insert(key, request_id);
                }
                buffer.extend_from_slice(&frame);
            }
            Command::AbortKeys(keys) => self.end(keys, ClientMessage::Abort, buffer),
            Command::StopKeys(keys) => self.end(keys, ClientMessage::Stop, buffer),
            Command::SettleEnd { key, found_stop } => {
                ClientMessage::Settle { key: self.abroad(key), found_stop }.encode(buffer);
            }
            Command::AbortIds(request_ids) => {
                let keys = request_ids.iter().filter_map(|id| self.by_id.get(id).copied()).collect();
                self.end(keys, ClientMessage::Abort, buffer);
            }
            Command::GrammarReady(key) => ClientMessage::GrammarReady(self.abroad(key)).encode(buffer),
            Command::GrammarFailed(key) => ClientMessage::GrammarFailed(self.abroad(key)).encode(buffer),
            Command::Stats(answer) => {
                self.next_id += 1;
                self.stats_queries.insert(self.next_id, answer);
                ClientMessage::StatsQuery(self.next_id).encode(buffer);
            }
            Command::Metrics(answer) => {
                self.next_id += 1;
                // A stopped engine must not collect queries without end. Dropping the sender tells the caller that
                // there is no answer.
                if self.metrics_queries.len() < MAX_METRICS_QUERIES {
                    self.metrics_queries.insert(self.next_id, answer);
                    ClientMessage::MetricsQuery(self.next_id).encode(buffer);
                }
            }
            Command::Query { kind, payload, answer } => {
                if self.queries.len() >= MAX_OPEN_QUERIES as usize {
                    let refusal = format!(
                        "{MAX_OPEN_QUERIES} queries have no answer yet, which is the limit; the engine is in a long step or has stalled"
                    );
                    let _ = answer.try_send(Err(refusal));
                    return;
                }
                self.next_id += 1;
                self.queries.insert(self.next_id, answer);
                ClientMessage::Query { id: self.next_id, kind, payload }.encode(buffer);
            }
            Command::Close(_) => {}
        }
    }

    /// Translate a key of this side to the engine's side.
    fn abroad(&self, key: RequestKey) -> RequestKey {
        key_of(self.engine_index, counter_of(key))
    }

    fn end(
        &self,
        mut keys: Vec<RequestKey>,
        message: fn(Vec<RequestKey>) -> ClientMessage,
        buffer: &mut Vec<u8>,
    ) {
        keys.retain(|key| self.live.contains_key(key));
        // A frame could hold many more, but nothing else limits how many keys a caller passes.
        for keys in keys.chunks(1 << 16) {
            let keys = keys.iter().map(|key| self.abroad(*key)).collect();
            message(keys).encode(buffer);
        }
    }

    fn take_frame(&mut self, frame_kind: u8, body: &[u8]) -> Option<End> {
        match self.try_take_frame(frame_kind, body) {
            Ok(end) => end,
            Err(error) => Some(End::Lost(error)),
        }
    }

    fn try_take_frame(&mut self, frame_kind: u8, body: &[u8]) -> Result<Option<End>, ConnectionError> {
        if frame_kind == kind::OUTPUTS {
            self.take_outputs(body)?;
            return Ok(None);
        }
        match EngineMessage::decode(frame_kind, body, self.client_index)? {
            EngineMessage::PromptLogprobs(all) => {
                self.shared.delivery.deliver(all.into_iter().map(ClientOutput::PromptLogprobs).collect());
            }
            EngineMessage::Pooled(all) => {
                self.shared.delivery.deliver(all.into_iter().map(ClientOutput::Pooled).collect());
            }
            EngineMessage::Logprobs(all) => {
                self.shared.delivery.deliver(all.into_iter().map(ClientOutput::Logprobs).collect());
            }
            EngineMessage::Refused { keys, error } => {
                let outputs = keys.into_iter().map(|key| {
                    let key = key_of(self.client_index, counter_of(key));
                    self.forget(key);
                    ClientOutput::Refused { key, error: error.clone() }
                });
                let batch = outputs.collect();
                self.shared.delivery.deliver(batch);
            }
            EngineMessage::Stats { id, entries } => {
                let counters = Arc::new(entries);
                self.shared.note_stats(&counters);
                if let Some(answer) = self.stats_queries.remove(&id) {
                    let _ = answer.try_send(counters);
                }
            }
            EngineMessage::Metrics { id, metrics } => {
                if let Some(answer) = self.metrics_queries.remove(&id) {
                    let _ = answer.try_send(metrics);
                }
            }
            EngineMessage::Reply { id, outcome } => {
                if let Some(answer) = self.queries.remove(&id) {
                    let _ = answer.try_send(outcome);
                }
            }
            EngineMessage::Pong { step_age_ns, num_steps, .. } => {
                self.awaits_pong = false;
                self.shared.note_heartbeat(step_age_ns, num_steps);
            }
            EngineMessage::StepFailed(message) => self.shared.delivery.note_step_error(message.into()),
            EngineMessage::Fatal(message) => return Ok(Some(End::Fatal(message))),
            EngineMessage::Goodbye => return Ok(Some(End::Goodbye)),
            EngineMessage::Challenge(_)
            | EngineMessage::Welcome(_)
            | EngineMessage::Rejected(_)
            | EngineMessage::Outputs(_) => {
                let what = "an engine shakes hands once";
                return Err(ConnectionError::Protocol { what, got: frame_kind.into() });
            }
        }
        Ok(None)
    }

    fn take_outputs(&mut self, body: &[u8]) -> Result<(), DecodeError> {
        let mut batch = Vec::with_capacity(body.len() / 12);
        codec::outputs::decode(body, self.client_index, |output| batch.push(ClientOutput::Output(output)))?;
        for output in &batch {
            if let ClientOutput::Output(output) = output
                && output.finish_reason.is_some()
            {
                self.forget(output.key);
            }
        }
        self.shared.delivery.deliver(batch);
        Ok(())
    }

    fn forget(&mut self, key: RequestKey) {
        if let Some(request_id) = self.live.remove(&key)
            && let Entry::Occupied(entry) = self.by_id.entry(request_id)
            && *entry.get() == key
        {
            entry.remove();
        }
    }

    /// The connection is lost: give each request its last output.
    fn die(&mut self, reason: &Arc<str>) {
        // Set it before the outputs arrive: a caller that gets one may ask why.
        let _ = self.shared.death.set(reason.clone());
        self.stats_queries.clear();
        self.queries.clear();
        self.metrics_queries.clear();
        let batch = self.live.drain().map(|(key, _)| died(key, reason)).collect();
        self.shared.delivery.deliver(batch);
        // Notify even if nothing ran: a sleeping reader must see that the engine is gone.
        self.shared.delivery.notifier.notify();
    }
}
