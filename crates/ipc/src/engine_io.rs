//! The engine's I/O thread: accepting, the egress, and the end. What one client says is handled in `connection.rs`.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap},
    io,
    rc::Rc,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering, mpsc as std_mpsc},
    time::{Duration, Instant},
};

use scheduler::{EngineCoreOutput, EngineHandle, RequestError, TokenLogprobs, egress::Consumer};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, unix::AsyncFd},
    net::{TcpListener, UnixListener},
    sync::mpsc,
    task::{self, LocalSet},
};

use crate::{
    connection::{self, Client},
    endpoint::{Listener, SocketFile, check_peer, own_uid},
    error::ConnectionError,
    handshake::{EngineFacts, Secret},
    key::{MAX_CLIENT_INDEX, client_of},
    message::EngineMessage,
    notifier::Notifier,
    query::{MAX_OPEN_QUERIES, MAX_WAITING_QUERIES, Queries, Query, Reply},
    server::{Control, FAREWELL_TIMEOUT, ServerCounters, ServerOptions, StepError},
};

/// How long to wait when no descriptor is left for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections that may be in their handshake, beside the welcomed ones.
const MAX_HANDSHAKES: u64 = 256;

/// What the thread has from its `EngineServer`.
pub(crate) struct Context {
    pub(crate) commands: mpsc::UnboundedReceiver<Control>,
    pub(crate) counters: Arc<ServerCounters>,
    pub(crate) complain: std_mpsc::SyncSender<String>,
    pub(crate) step_error: Arc<Mutex<StepError>>,
    pub(crate) queries: Arc<Queries>,
    /// The other end of `commands`, for queries.
    pub(crate) answers: mpsc::UnboundedSender<Control>,
}

/// What the tasks of the thread share.
pub(crate) struct EngineIo {
    pub(crate) handle: EngineHandle,
    pub(crate) facts: EngineFacts,
    pub(crate) counters: Arc<ServerCounters>,
    pub(crate) clients: RefCell<HashMap<u32, Rc<Client>>>,
    pub(crate) max_clients: u32,
    pub(crate) max_unsent_bytes: usize,
    pub(crate) silence_timeout: Duration,
    last_index: Cell<u32>,
    num_open: Cell<u64>,
    complain: std_mpsc::SyncSender<String>,
    step_error: Arc<Mutex<StepError>>,
    queries: Arc<Queries>,
    answers: mpsc::UnboundedSender<Control>,
    progress: Progress,
}

/// The thread's life.
pub(crate) fn run(options: ServerOptions, context: Context, started: &std_mpsc::SyncSender<io::Result<()>>) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return started.send(Err(error)).unwrap_or(()),
    };
    let local = LocalSet::new();
    local.block_on(&runtime, async {
        let (io, mut commands, files, mut outputs) = match begin(options, context) {
            Ok(parts) => parts,
            Err(error) => return started.send(Err(error)).unwrap_or(()),
        };
        let _ = started.send(Ok(()));
        let last_word = loop {
            tokio::select! {
                control = commands.recv() => match control {
                    Some(Control::Reply(reply)) => io.reply(reply),
                    Some(Control::Fail(message)) => break EngineMessage::Fatal(message),
                    Some(Control::Stop) | None => break EngineMessage::Goodbye,
                },
                _ = &mut outputs => break EngineMessage::Fatal("outputs cannot be sent any more".to_owned()),
            }
        };
        farewell(&io, &last_word).await;
        drop(files);
    });
}

type Parts = (Rc<EngineIo>, mpsc::UnboundedReceiver<Control>, Vec<Option<SocketFile>>, task::JoinHandle<()>);

/// Start the tasks.
fn begin(options: ServerOptions, context: Context) -> io::Result<Parts> {
    let facts = options.facts();
    let ServerOptions { handle, consumer, notifier, listeners, .. } = options;
    let io = Rc::new(EngineIo {
        handle,
        facts,
        counters: context.counters,
        clients: RefCell::default(),
        max_clients: options.max_clients,
        max_unsent_bytes: options.max_unsent_bytes,
        silence_timeout: options.silence_timeout,
        last_index: Cell::new(0),
        num_open: Cell::new(0),
        complain: context.complain,
        step_error: context.step_error,
        queries: context.queries,
        answers: context.answers,
        progress: Progress::new(),
    });
    let mut files = Vec::new();
    for listener in listeners {
        match listener {
            Listener::Unix { socket, file } => {
                socket.set_nonblocking(true)?;
                task::spawn_local(accept_unix(io.clone(), UnixListener::from_std(socket)?));
                files.push(file);
            }
            Listener::Tcp { socket, secret } => {
                socket.set_nonblocking(true)?;
                let socket = TcpListener::from_std(socket)?;
                task::spawn_local(accept_tcp(io.clone(), socket, Rc::new(secret)));
            }
        }
    }
    let signal = listen_to(notifier)?;
    let outputs = task::spawn_local(carry_outputs(io.clone(), consumer, signal));
    Ok((io, context.commands, files, outputs))
}

/// Wait for the notifier's eventfd in this thread's runtime.
fn listen_to(notifier: Arc<Notifier>) -> io::Result<AsyncFd<Arc<Notifier>>> {
    // Readable alone: an eventfd is nearly always writable, and each read would announce it again.
    #[expect(unsafe_code, reason = "tokio has no safe door for a descriptor that is shared")]
    // SAFETY: the notifier owns its eventfd, gives out the same one always, and lives as long as the `AsyncFd` that
    // holds it.
    let signal = unsafe { AsyncFd::register_with_interest(notifier, Interest::READABLE) };
    signal.map_err(io::Error::from)
}

/// Drain the egress whenever the scheduler has published, whatever its clients do with it.
async fn carry_outputs(io: Rc<EngineIo>, mut consumer: Consumer, signal: AsyncFd<Arc<Notifier>>) {
    // What was published before anybody listened.
    io.route(&mut consumer);
    while let Ok(mut guard) = signal.readable().await {
        // Before the descriptor is read: a `notify` from now on makes it ready again.
        guard.clear_ready();
        signal.get_ref().clear();
        io.route(&mut consumer);
        // There is room again: the parked scheduler hands over what it kept back.
        if io.handle.num_held_back() > 0 {
            io.handle.wake();
        }
    }
}

async fn accept_unix(io: Rc<EngineIo>, listener: UnixListener) {
    let own_uid = own_uid();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                io.cannot_accept(&error).await;
                continue;
            }
        };
        io.counters.num_connections.fetch_add(1, Ordering::Relaxed);
        let peer = stream.peer_cred().map_err(ConnectionError::from);
        if let Err(error) = peer.and_then(|peer| check_peer(peer.uid(), own_uid)) {
            io.turned_away(&error);
            continue;
        }
        let (reader, writer) = stream.into_split();
        io.open(reader, writer, None);
    }
}

async fn accept_tcp(io: Rc<EngineIo>, listener: TcpListener, secret: Rc<Secret>) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                io.cannot_accept(&error).await;
                continue;
            }
        };
        io.counters.num_connections.fetch_add(1, Ordering::Relaxed);
        // A step's frame is to leave at once.
        let _ = stream.set_nodelay(true);
        let (reader, writer) = stream.into_split();
        io.open(reader, writer, Some(secret.clone()));
    }
}

async fn farewell(io: &Rc<EngineIo>, message: &EngineMessage) {
    for client in io.clients.borrow().values() {
        client.outbox.fill(|buffer| message.encode(buffer));
        client.outbox.close();
    }
    let all_gone = async {
        while !io.clients.borrow().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let _ = tokio::time::timeout(FAREWELL_TIMEOUT, all_gone).await;
}

impl EngineIo {
    /// Serve a connection in a task of its own.
    fn open<R, W>(self: &Rc<Self>, reader: R, writer: W, secret: Option<Rc<Secret>>)
    where
        R: AsyncRead + Unpin + 'static,
        W: AsyncWrite + Unpin + 'static,
    {
        if self.num_open.get() >= u64::from(self.max_clients) + MAX_HANDSHAKES {
            // Not even an answer: whoever opens so many does not read them.
            self.turned_away("too many connections are in their handshake");
            return;
        }
        self.num_open.set(self.num_open.get() + 1);
        let io = self.clone();
        task::spawn_local(async move {
            let is_open = OpenConnection(io);
            let io = &is_open.0;
            match connection::serve(io, reader, writer, secret).await {
                Ok(()) | Err(ConnectionError::Closed) => {}
                Err(error @ ConnectionError::Refused(_)) => io.turned_away(&error),
                Err(ConnectionError::Io(error))
                    if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                }
                Err(error) => {
                    io.counters.num_failed.fetch_add(1, Ordering::Relaxed);
                    let _ = io.complain.try_send(format!("a client was cut off: {error}"));
                }
            }
        });
    }

    fn turned_away(&self, error: impl std::fmt::Display) {
        self.counters.num_refused.fetch_add(1, Ordering::Relaxed);
        let _ = self.complain.try_send(format!("a connection was refused: {error}"));
    }

    async fn cannot_accept(&self, error: &io::Error) {
        let _ = self.complain.try_send(format!("cannot accept a connection: {error}"));
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }

    /// A number for a client, not in use. After 16 million clients they come round again.
    pub(crate) fn new_index(&self) -> u32 {
        let clients = self.clients.borrow();
        let mut index = self.last_index.get();
        loop {
            index = if index >= MAX_CLIENT_INDEX { 1 } else { index + 1 };
            if !clients.contains_key(&index) {
                self.last_index.set(index);
                return index;
            }
        }
    }

    /// Hand a question to the stepping thread, unless too many wait.
    pub(crate) fn ask(&self, client: &Client, id: u64, kind: Box<str>, payload: Box<[u8]>) {
        let num_open = client.num_open_queries.get();
        let refusal = if num_open >= MAX_OPEN_QUERIES {
            format!("{num_open} queries of this client have no answer yet, at most {MAX_OPEN_QUERIES} may")
        } else {
            client.num_open_queries.set(num_open + 1);
            let query = Query::new(client.index, id, kind, payload, self.answers.clone());
            let Err(query) = self.queries.push(query) else {
                self.handle.wake();
                return;
            };
            return query.answer(Err(format!(
                "{MAX_WAITING_QUERIES} queries wait for the engine, no more are taken; try again later"
            )));
        };
        client.send(&EngineMessage::Reply { id, outcome: Err(refusal) });
    }

    /// Pass an answer on; its client may have gone.
    fn reply(&self, reply: Reply) {
        if let Some(client) = self.clients.borrow().get(&reply.client_index) {
            client.num_open_queries.set(client.num_open_queries.get().saturating_sub(1));
            client.send(&EngineMessage::Reply { id: reply.id, outcome: reply.outcome });
        }
    }

    /// For how long the scheduler had something to do and did nothing.
    pub(crate) fn step_age(&self) -> Duration {
        self.progress.age(&self.handle)
    }

    /// Move what the scheduler published to its clients' outboxes.
    fn route(&self, consumer: &mut Consumer) {
        let clients = self.clients.borrow();
        let mut news: Vec<&Client> = Vec::new();
        // Neighbours mostly have the same client.
        let mut last: Option<&Client> = None;
        let mut num_dropped = 0;
        consumer.look();
        let mut logprobs: BTreeMap<u32, Vec<TokenLogprobs>> = BTreeMap::new();
        consumer.take_logprobs(|beside| logprobs.entry(client_of(beside.key)).or_default().push(beside));
        for (index, all) in &logprobs {
            // They leave with the tokens that follow, at the latest those of the next step.
            if let Some(client) = clients.get(index) {
                client.push_logprobs(all);
            }
        }
        consumer.take_prompt_logprobs(|all| {
            // A long prompt takes several steps, of which the first give no token to leave with.
            if let Some(client) = clients.get(&client_of(all.key)) {
                client.push_prompt_logprobs(&all);
                client.outbox.flush();
            }
        });
        consumer.drain_seen(|output: EngineCoreOutput| {
            let index = client_of(output.key);
            let client = match last {
                Some(client) if client.index == index => Some(client),
                _ => clients.get(&index).map(|client| &**client),
            };
            match client {
                Some(client) => {
                    if matches!(output.error, RequestError::StepFailed | RequestError::ProcessorFailed) {
                        client.explain(&self.step_error.lock().unwrap_or_else(PoisonError::into_inner));
                    }
                    if client.push(&output) {
                        news.push(client);
                    }
                    last = Some(client);
                }
                None => num_dropped += 1,
            }
        });
        for client in news {
            client.end_frame();
        }
        if num_dropped > 0 {
            self.counters.num_dropped_outputs.fetch_add(num_dropped, Ordering::Relaxed);
        }
        self.progress.age(&self.handle);
    }
}

/// Counts a connection for as long as its task lives, also when that ends by a panic.
struct OpenConnection(Rc<EngineIo>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.num_open.set(self.0.num_open.get() - 1);
    }
}

/// When the scheduler was last seen to have done something, or to have nothing to do. It is looked at with every
/// heartbeat, so that the scheduler's thread needs no clock for it.
struct Progress {
    num_steps: Cell<(u64, u64)>,
    seen: Cell<Instant>,
}

impl Progress {
    fn new() -> Self {
        Self { num_steps: Cell::new((0, 0)), seen: Cell::new(Instant::now()) }
    }

    fn age(&self, handle: &EngineHandle) -> Duration {
        let stats = handle.stats();
        let num_steps = (stats.num_steps, stats.last_updated_step);
        let now = Instant::now();
        if num_steps != self.num_steps.replace(num_steps) || !handle.is_busy() {
            self.seen.set(now);
        }
        now.duration_since(self.seen.get())
    }
}
