//! One client of an engine: its handshake, its messages, and the clean-up when it is gone.

use std::{rc::Rc, sync::atomic::Ordering, time::Duration};

use scheduler::{FinishReason, NewRequest, RequestKey};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

use crate::{
    error::{ConnectionError, Refusal},
    frame::FrameReader,
    handshake::{
        CAPABILITIES, Challenge, Hello, MAX_HELLO_BYTES, PROTOCOL_VERSION, Secret, Side, Welcome, new_nonce,
    },
    key::client_of,
    message::{ClientMessage, EngineMessage, NUM_CLIENT_REQUESTS, kind},
    server::{engine_io::EngineIo, served_client::ServedClient},
};

/// Greet a client and serve it until it leaves or violates the protocol.
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
    // The end of its socket shows that a peer on this machine is gone; for a peer elsewhere, only silence does.
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
    client: &ServedClient,
    reader: &mut FrameReader<R>,
    silence: Option<Duration>,
) -> Result<(), ConnectionError> {
    let max_requests = io.facts.max_num_queued_reqs as usize;
    loop {
        // While a client does not read its answers, do not read from it, so that the answers cannot grow without end.
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
            ClientMessage::Settle { key, found_stop } => {
                own(client, key)?;
                if let Some(reason) = client.settle(key) {
                    io.handle.settle_end(if found_stop { FinishReason::Stop } else { reason });
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
                entries.push((NUM_CLIENT_REQUESTS.to_owned(), client.num_live() as u64));
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
/// The key belongs to another client.
fn own(client: &ServedClient, key: RequestKey) -> Result<(), ConnectionError> {
    if client_of(key) == client.index {
        Ok(())
    } else {
        Err(ConnectionError::Protocol { what: "a client names its own requests only", got: key.0 })
    }
}

fn add_requests(
    io: &EngineIo,
    client: &ServedClient,
    mut requests: Vec<NewRequest>,
) -> Result<(), ConnectionError> {
    let keys: Vec<RequestKey> = requests.iter().map(|request| request.key).collect();
    for request in &mut requests {
        own(client, request.key)?;
        if let Some(parent) = request.fork_from {
            own(client, parent)?;
        }
        if !client.begin(request.key) {
            return Err(ConnectionError::Protocol { what: "a key names one request", got: request.key.0 });
        }
        // Clients choose ids independently of each other, so ids of two clients may be equal.
        request.request_id = format!("{}@{}", request.request_id, client.index).into();
    }
    match io.handle.add_requests(requests) {
        Ok(()) => {
            io.counters.num_requests.fetch_add(keys.len() as u64, Ordering::Relaxed);
        }
        Err(error) => {
            for key in &keys {
                client.forget(*key);
            }
            client.send(&EngineMessage::Refused { keys, error });
        }
    }
    Ok(())
}

/// Keeps a client in the engine's table. Dropping it, for whatever reason, ends all requests that the client left
/// running.
struct Registered<'a> {
    io: &'a EngineIo,
    client: Rc<ServedClient>,
}

impl<'a> Registered<'a> {
    fn new(io: &'a EngineIo) -> Self {
        let client = Rc::new(ServedClient::new(io.new_index()));
        io.clients.borrow_mut().insert(client.index, client.clone());
        io.counters.num_clients.fetch_add(1, Ordering::Relaxed);
        Self { io, client }
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.io.clients.borrow_mut().remove(&self.client.index);
        self.io.counters.num_clients.fetch_sub(1, Ordering::Relaxed);
        for key in self.client.take_live() {
            self.io.handle.abort_key(key);
        }
        for reason in self.client.take_unsettled() {
            // Keep the engine's own reason: no client will report another.
            self.io.handle.settle_end(reason);
        }
    }
}
