//! The engine's I/O thread, and the connections that it accepts.

use std::{
    borrow::Borrow,
    io,
    rc::Rc,
    sync::{Arc, atomic::Ordering, mpsc as std_mpsc},
    time::Duration,
};

use scheduler::egress::Consumer;
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, unix::AsyncFd},
    net::{TcpListener, UnixListener},
    sync::mpsc,
    task::{self, LocalSet},
};

use crate::{
    endpoint::{Listener, SocketFile, check_peer, own_uid},
    error::{ConnectionError, EndpointError},
    handshake::Secret,
    message::EngineMessage,
    notifier::Notifier,
    server::{
        connection,
        control::Control,
        engine_io::{Context, EngineIo},
        options::ServerOptions,
    },
};

/// How long a stopping server waits until its clients have received its last messages.
pub const FAREWELL_TIMEOUT: Duration = Duration::from_millis(500);

/// Pause before accepting again if no descriptor is left for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Interval between two checks that a socket's name still exists.
const LOOK_PAUSE: Duration = Duration::from_secs(1);

/// Run the thread until its owner ends it.
pub(crate) fn run(
    options: ServerOptions,
    mut commands: mpsc::UnboundedReceiver<Control>,
    context: Context,
    started: &std_mpsc::SyncSender<io::Result<()>>,
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return started.send(Err(error)).unwrap_or(()),
    };
    let local = LocalSet::new();
    local.block_on(&runtime, async {
        let (io, mut outputs) = match begin(options, context) {
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
    });
    // When the listening tasks end, the names of their sockets are removed.
    drop(local);
}

/// Start the tasks: one per listener, and one that carries the outputs.
fn begin(options: ServerOptions, context: Context) -> io::Result<(Rc<EngineIo>, task::JoinHandle<()>)> {
    let io = Rc::new(EngineIo::new(&options, context));
    let ServerOptions { consumer, notifier, listeners, .. } = options;
    for listener in listeners {
        match listener {
            Listener::Unix { socket, file } => {
                socket.set_nonblocking(true)?;
                let socket = UnixListener::from_std(socket)?;
                match file {
                    Some(file) => task::spawn_local(listen_under(io.clone(), socket, file)),
                    None => task::spawn_local(accept_unix(io.clone(), socket)),
                };
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
    Ok((io, outputs))
}

/// Wait for the notifier's eventfd in this thread's runtime.
fn listen_to(notifier: Arc<Notifier>) -> io::Result<AsyncFd<Arc<Notifier>>> {
    // Only readable: an eventfd is nearly always writable, and each read would report that again.
    #[expect(unsafe_code, reason = "tokio has no safe door for a descriptor that is shared")]
    // SAFETY: the notifier owns its eventfd, gives out the same one always, and lives as long as the `AsyncFd` that
    // holds it.
    let signal = unsafe { AsyncFd::register_with_interest(notifier, Interest::READABLE) };
    signal.map_err(io::Error::from)
}

/// Drain the egress each time the scheduler has published, no matter how fast the clients read.
async fn carry_outputs(io: Rc<EngineIo>, mut consumer: Consumer, signal: AsyncFd<Arc<Notifier>>) {
    // Route what was published before this task started.
    io.route(&mut consumer);
    while let Ok(mut guard) = signal.readable().await {
        // Clear before reading the descriptor: a `notify` from now on makes it ready again.
        guard.clear_ready();
        signal.get_ref().clear();
        io.route(&mut consumer);
        // There is room again, so the parked scheduler can pass on what it held back.
        if io.handle.num_held_back() > 0 {
            io.handle.wake();
        }
    }
}

/// Accept from a named socket. If the name is removed, listen again under the same name.
async fn listen_under(io: Rc<EngineIo>, mut listener: UnixListener, mut file: SocketFile) {
    let mut has_complained = false;
    loop {
        tokio::select! {
            () = accept_unix(io.clone(), &listener) => {}
            () = until_gone(&file) => {}
        }
        let path = file.path().display().to_string();
        let again = file.listen_again().and_then(|socket| {
            socket
                .set_nonblocking(true)
                .and_then(|()| UnixListener::from_std(socket))
                .map_err(|source| EndpointError::System { action: "listen on", what: path.clone(), source })
        });
        match again {
            Ok(socket) => {
                listener = socket;
                has_complained = false;
                io.complain(format!(
                    "the socket {path} was removed, as by what cleans a folder of temporary files; the engine \
                     listens there again"
                ));
            }
            Err(error) if !has_complained => {
                has_complained = true;
                io.complain(format!(
                    "the socket {path} was removed and cannot be made again, so no process can connect any more; \
                     those that are connected stay: {error}"
                ));
            }
            Err(_) => {}
        }
    }
}

/// Wait until a socket's name leads elsewhere or is gone.
async fn until_gone(file: &SocketFile) {
    loop {
        tokio::time::sleep(LOOK_PAUSE).await;
        if !file.is_there() {
            return;
        }
    }
}

async fn accept_unix(io: Rc<EngineIo>, listener: impl Borrow<UnixListener>) {
    let own_uid = own_uid();
    loop {
        let stream = match listener.borrow().accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                cannot_accept(&io, &error).await;
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
        open(&io, reader, writer, None);
    }
}

async fn accept_tcp(io: Rc<EngineIo>, listener: TcpListener, secret: Rc<Secret>) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                cannot_accept(&io, &error).await;
                continue;
            }
        };
        io.counters.num_connections.fetch_add(1, Ordering::Relaxed);
        // Send a step's frame without delay.
        let _ = stream.set_nodelay(true);
        let (reader, writer) = stream.into_split();
        open(&io, reader, writer, Some(secret.clone()));
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

/// Serve a connection in a task of its own.
fn open<R, W>(io: &Rc<EngineIo>, reader: R, writer: W, secret: Option<Rc<Secret>>)
where
    R: AsyncRead + Unpin + 'static,
    W: AsyncWrite + Unpin + 'static,
{
    let Some(is_open) = io.open() else {
        // Close without an answer: a peer that opens so many connections does not read answers.
        io.turned_away("too many connections are in their handshake");
        return;
    };
    task::spawn_local(async move {
        let io = &is_open.0;
        match connection::serve(io, reader, writer, secret).await {
            Ok(()) | Err(ConnectionError::Closed) => {}
            Err(error @ ConnectionError::Refused(_)) => io.turned_away(&error),
            Err(ConnectionError::Io(error))
                if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {}
            Err(error) => {
                io.counters.num_failed.fetch_add(1, Ordering::Relaxed);
                io.complain(format!("a client was cut off: {error}"));
            }
        }
    });
}

async fn cannot_accept(io: &EngineIo, error: &io::Error) {
    io.complain(format!("cannot accept a connection: {error}"));
    tokio::time::sleep(ACCEPT_PAUSE).await;
}
