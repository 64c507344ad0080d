//! One client of an engine: its handshake, what it says, and what is left to do when it has gone.

use std::{
    cell::{Cell, RefCell},
    collections::HashSet,
    rc::Rc,
    sync::atomic::Ordering,
    time::Duration,
};

use scheduler::{EngineCoreOutput, NewRequest, PromptLogprobs, RequestKey, TokenLogprobs};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

use crate::{
    engine_io::EngineIo,
    error::{ConnectionError, Refusal},
    frame::{FrameReader, begin_frame, end_frame},
    handshake::{
        CAPABILITIES, Challenge, Hello, MAX_HELLO_BYTES, PROTOCOL_VERSION, Secret, Side, Welcome, new_nonce,
    },
    key::client_of,
    logprobs_codec,
    message::{ClientMessage, EngineMessage, NUM_CLIENT_REQUESTS, kind},
    outbox::Outbox,
    outputs_codec, prompt_logprobs_codec,
    server::StepError,
};

/// A client that was welcomed.
pub(crate) struct Client {
    pub(crate) index: u32,
    pub(crate) outbox: Outbox,
    /// Requests that the engine was given and has not finished.
    live: RefCell<HashSet<RequestKey>>,
    /// Where the frame of outputs that is being written begins, and its time.
    open_frame: Cell<Option<(usize, u64)>>,
    /// The failed step that it was told of last.
    last_step_error: Cell<u64>,
    /// That the engine has not answered.
    pub(crate) num_open_queries: Cell<u32>,
}

impl Client {
    /// Say why a step failed, once, before the outputs that say that it did.
    pub(crate) fn explain(&self, step_error: &StepError) {
        if self.last_step_error.replace(step_error.number) == step_error.number {
            return;
        }
        let mut buffer = self.outbox.buffer();
        if let Some((start, _)) = self.open_frame.take() {
            end_frame(&mut buffer, start);
        }
        EngineMessage::StepFailed(step_error.message.clone()).encode(&mut buffer);
    }

    /// Append an output. `true` when it is the first since `end_frame`.
    pub(crate) fn push(&self, output: &EngineCoreOutput) -> bool {
        let mut buffer = self.outbox.buffer();
        let open_frame = self.open_frame.get();
        let is_continued = open_frame.is_some_and(|(start, time)| {
            time == output.timestamp_ns && buffer.len() - start < outputs_codec::FULL_BYTES
        });
        if !is_continued {
            if let Some((start, _)) = open_frame {
                end_frame(&mut buffer, start);
            }
            let start = begin_frame(&mut buffer, kind::OUTPUTS);
            buffer.extend_from_slice(&output.timestamp_ns.to_le_bytes());
            self.open_frame.set(Some((start, output.timestamp_ns)));
        }
        outputs_codec::encode_record(output, &mut buffer);
        if output.finish_reason.is_some() {
            self.live.borrow_mut().remove(&output.key);
        }
        open_frame.is_none()
    }

    /// Append log-probabilities; their tokens are pushed afterwards.
    pub(crate) fn push_logprobs(&self, all: &[TokenLogprobs]) {
        let mut buffer = self.outbox.buffer();
        let mut rest = all.iter().peekable();
        while rest.peek().is_some() {
            let start = begin_frame(&mut buffer, kind::LOGPROBS);
            while buffer.len() - start < outputs_codec::FULL_BYTES
                && let Some(logprobs) = rest.next()
            {
                logprobs_codec::encode_record(logprobs, &mut buffer);
            }
            end_frame(&mut buffer, start);
        }
    }

    /// Append log-probabilities of a prompt; the request's first token is pushed afterwards.
    pub(crate) fn push_prompt_logprobs(&self, all: &PromptLogprobs) {
        let mut buffer = self.outbox.buffer();
        let mut next = 0;
        while next < all.ranks.len() {
            let start = begin_frame(&mut buffer, kind::PROMPT_LOGPROBS);
            let rows = prompt_logprobs_codec::rows_that_fit(all, next, buffer.len() - start);
            next = rows.end;
            prompt_logprobs_codec::encode_record(all, rows, &mut buffer);
            end_frame(&mut buffer, start);
        }
    }

    /// Complete what `push` wrote and send it.
    pub(crate) fn end_frame(&self) {
        if let Some((start, _)) = self.open_frame.take() {
            end_frame(&mut self.outbox.buffer(), start);
        }
        self.outbox.flush();
    }

    pub(crate) fn send(&self, message: &EngineMessage) {
        self.outbox.fill(|buffer| message.encode(buffer));
    }
}

/// Greet a client and serve it until it goes or does something that no client does.
pub(crate) async fn serve<R, W>(
    io: &Rc<EngineIo>,
    reader: R,
    mut writer: W,
    secret: Option<Rc<Secret>>,
) -> Result<(), ConnectionError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut reader = FrameReader::new(reader, MAX_HELLO_BYTES);
    let challenge = Challenge {
        version: PROTOCOL_VERSION,
        capabilities: CAPABILITIES,
        needs_secret: secret.is_some(),
        nonce: new_nonce()?,
    };
    let greeting = greet(&mut reader, &mut writer, &challenge, secret.as_deref());
    let hello = within(io.silence_timeout, greeting).await?;
    if io.clients.borrow().len() >= io.max_clients as usize {
        return refuse(&mut writer, Refusal::TooManyClients { limit: io.max_clients }).await;
    }
    let registered = Registered::new(io);
    let client = &registered.client;
    client.send(&EngineMessage::Welcome(Welcome {
        client_index: client.index,
        proof: secret.as_ref().map(|secret| secret.prove(Side::Engine, &challenge.nonce, &hello.nonce)),
        facts: io.facts.clone(),
    }));
    reader.set_limit(io.facts.max_frame_bytes as usize);
    // A peer on this machine is known to be gone by the end of its socket; one elsewhere only by its silence.
    let silence = secret.is_some().then_some(io.silence_timeout);
    tokio::select! {
        result = listen(io, client, &mut reader, silence) => result,
        result = client.outbox.write_to(&mut writer, |written| {
            io.counters.num_bytes_sent.fetch_add(written as u64, Ordering::Relaxed);
        }) => Ok(result?),
    }
}

async fn within<T>(
    limit: Duration,
    future: impl Future<Output = Result<T, ConnectionError>>,
) -> Result<T, ConnectionError> {
    match tokio::time::timeout(limit, future).await {
        Ok(result) => result,
        Err(_) => Err(ConnectionError::Timeout { seconds: limit.as_secs_f64() }),
    }
}

async fn greet<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    reader: &mut FrameReader<R>,
    writer: &mut W,
    challenge: &Challenge,
    secret: Option<&Secret>,
) -> Result<Hello, ConnectionError> {
    let mut frame = Vec::new();
    EngineMessage::Challenge(challenge.clone()).encode(&mut frame);
    writer.write_all(&frame).await?;
    let (frame_kind, body) = reader.next().await?;
    if frame_kind != kind::HELLO {
        return Err(ConnectionError::NotOurs);
    }
    let hello = Hello::decode(body)?;
    match hello.check(challenge, secret) {
        Ok(()) => Ok(hello),
        Err(refusal) => refuse(writer, refusal).await,
    }
}

async fn refuse<T, W: AsyncWrite + Unpin>(writer: &mut W, refusal: Refusal) -> Result<T, ConnectionError> {
    let mut frame = Vec::new();
    EngineMessage::Rejected(refusal).encode(&mut frame);
    writer.write_all(&frame).await?;
    writer.shutdown().await?;
    Err(ConnectionError::Refused(refusal))
}

async fn listen<R: AsyncRead + Unpin>(
    io: &EngineIo,
    client: &Client,
    reader: &mut FrameReader<R>,
    silence: Option<Duration>,
) -> Result<(), ConnectionError> {
    let max_requests = io.facts.max_num_queued_reqs as usize;
    loop {
        // Whoever does not read is not read from, so that its answers cannot grow without end.
        client.outbox.wait_below(io.max_unsent_bytes).await;
        let (frame_kind, body) = match silence {
            None => reader.next().await?,
            Some(limit) => within(limit, reader.next()).await?,
        };
        match ClientMessage::decode(frame_kind, body, max_requests)? {
            ClientMessage::Hello(_) => {
                let got = frame_kind.into();
                return Err(ConnectionError::Protocol { what: "a client says hello once", got });
            }
            ClientMessage::AddRequests(requests) => add_requests(io, client, requests)?,
            ClientMessage::Abort(keys) => {
                for key in keys {
                    own(client, key)?;
                    io.handle.abort_key(key);
                }
            }
            ClientMessage::Stop(keys) => {
                for key in keys {
                    own(client, key)?;
                    io.handle.stop_key(key);
                }
            }
            ClientMessage::GrammarReady(key) => {
                own(client, key)?;
                io.handle.grammar_ready(key);
            }
            ClientMessage::GrammarFailed(key) => {
                own(client, key)?;
                io.handle.grammar_failed(key);
            }
            ClientMessage::StatsQuery(id) => {
                let stats = io.handle.stats();
                let mut entries: Vec<(String, u64)> =
                    stats.entries().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
                entries.push(("num_queued".to_owned(), io.handle.num_queued().into()));
                entries.push(("num_queued_tokens".to_owned(), io.handle.num_queued_tokens()));
                entries.push((NUM_CLIENT_REQUESTS.to_owned(), client.live.borrow().len() as u64));
                client.send(&EngineMessage::Stats { id, entries });
            }
            ClientMessage::MetricsQuery(id) => {
                client.send(&EngineMessage::Metrics { id, metrics: io.handle.metrics() });
            }
            ClientMessage::Query { id, kind, payload } => io.ask(client, id, kind, payload),
            ClientMessage::Ping(id) => {
                let step_age_ns = io.step_age().as_nanos() as u64;
                let num_steps = io.handle.stats().num_steps;
                client.send(&EngineMessage::Pong { id, step_age_ns, num_steps });
            }
        }
    }
}

/// # Errors
/// A key of another client.
fn own(client: &Client, key: RequestKey) -> Result<(), ConnectionError> {
    if client_of(key) == client.index {
        Ok(())
    } else {
        Err(ConnectionError::Protocol { what: "a client names its own requests only", got: key.0 })
    }
}

fn add_requests(
    io: &EngineIo,
    client: &Client,
    mut requests: Vec<NewRequest>,
) -> Result<(), ConnectionError> {
    let keys: Vec<RequestKey> = requests.iter().map(|request| request.key).collect();
    for request in &mut requests {
        own(client, request.key)?;
        if let Some(parent) = request.fork_from {
            own(client, parent)?;
        }
        if !client.live.borrow_mut().insert(request.key) {
            return Err(ConnectionError::Protocol { what: "a key names one request", got: request.key.0 });
        }
        // Clients choose ids without knowing of each other.
        request.request_id = format!("{}@{}", request.request_id, client.index).into();
    }
    match io.handle.add_requests(requests) {
        Ok(()) => {
            io.counters.num_requests.fetch_add(keys.len() as u64, Ordering::Relaxed);
        }
        Err(error) => {
            for key in &keys {
                client.live.borrow_mut().remove(key);
            }
            client.send(&EngineMessage::Refused { keys, error });
        }
    }
    Ok(())
}

/// Keeps a client in the engine's table. Dropped, for whatever reason, it ends all that the client left running.
struct Registered<'a> {
    io: &'a EngineIo,
    client: Rc<Client>,
}

impl<'a> Registered<'a> {
    fn new(io: &'a EngineIo) -> Self {
        let client = Rc::new(Client {
            index: io.new_index(),
            outbox: Outbox::default(),
            live: RefCell::default(),
            open_frame: Cell::new(None),
            last_step_error: Cell::new(0),
            num_open_queries: Cell::new(0),
        });
        io.clients.borrow_mut().insert(client.index, client.clone());
        io.counters.num_clients.fetch_add(1, Ordering::Relaxed);
        Self { io, client }
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.io.clients.borrow_mut().remove(&self.client.index);
        self.io.counters.num_clients.fetch_sub(1, Ordering::Relaxed);
        for key in self.client.live.borrow_mut().drain() {
            self.io.handle.abort_key(key);
        }
    }
}
