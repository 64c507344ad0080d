//! `NodeLink`: one connection between the head and another node, after each has proved that it knows the secret.
//!
//! ```text
//! head ── SLOT: a frame as it lies in its slot ─▶ node, which publishes it in a channel of its own
//! head ◀── LINES: how far each of its ranks is ── node
//! head ◀── TEXT: orders, and what ranks say ────▶ node
//! ```
//!
//! One thread reads. A node has another thread, which sends lines when a rank has taken or executed a frame; if only
//! what ranks wait in has changed, it does so four times a second. The kernel notices a host that vanishes.

use std::{
    io::{self, BufReader, Read},
    net::TcpStream,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::net::sockopt;

use crate::{
    line_record::{LineRecord, RECORD_BYTES},
    wire::{HEADER_BYTES, LINES, MAX_BYTES, SLOT, TEXT, Wire},
    writer::{Watch, WriteError, Writer},
};

const READ_BYTES: usize = 256 << 10;
/// Interval between two looks at what ranks wait in.
const LOOK: Duration = Duration::from_millis(250);
/// How long a host may leave data, or a keep-alive probe of the kernel, unacknowledged.
const SILENCE: Duration = Duration::from_secs(5);

/// The result of waiting for a text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Received {
    /// A text.
    Text(String),
    /// There was none in time.
    Nothing,
    /// There will be none; says why.
    Ended(String),
}

/// One end of a connection; dropping it cuts the connection.
#[derive(Debug)]
pub struct NodeLink {
    shared: Arc<Shared>,
    texts: Mutex<Receiver<String>>,
}

/// The state that threads share.
#[derive(Debug)]
struct Shared {
    wire: Arc<Wire>,
    target: OnceLock<Target>,
    end: OnceLock<String>,
}

/// Where frames other than texts go.
#[derive(Debug)]
enum Target {
    /// The lines of `count` ranks, from index `first` on.
    Lines { watch: Arc<Watch>, first: usize, count: usize },
    /// The slots of another channel.
    Slots(Mutex<Writer>),
}

impl NodeLink {
    /// # Errors
    /// The kernel refuses a setting or a thread.
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        sockopt::set_tcp_user_timeout(&stream, SILENCE.as_millis() as u32)?;
        sockopt::set_tcp_keepidle(&stream, Duration::from_secs(1))?;
        sockopt::set_tcp_keepintvl(&stream, Duration::from_secs(1))?;
        sockopt::set_socket_keepalive(&stream, true)?;
        let reading = stream.try_clone()?;
        let shared = Arc::new(Shared {
            wire: Arc::new(Wire::new(stream)),
            target: OnceLock::new(),
            end: OnceLock::new(),
        });
        let (sender, texts) = channel();
        let listening = Arc::clone(&shared);
        thread::Builder::new()
            .name("rustvllm-node-in".into())
            .spawn(move || listening.listen(reading, &sender))?;
        Ok(Self { shared, texts: Mutex::new(texts) })
    }

    /// Send a text.
    ///
    /// # Errors
    /// The text is too long, or the connection has ended.
    pub fn send(&self, text: &str) -> io::Result<()> {
        self.shared.wire.send(TEXT, text.as_bytes())
    }

    /// Wait for the next text.
    #[must_use]
    pub fn receive(&self, limit: Duration) -> Received {
        match self.texts.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(limit) {
            Ok(text) => Received::Text(text),
            Err(RecvTimeoutError::Timeout) => Received::Nothing,
            Err(RecvTimeoutError::Disconnected) => {
                Received::Ended(self.shared.end.get().cloned().unwrap_or_else(|| "it was cut".into()))
            }
        }
    }

    /// The node's side: make a channel for its ranks. From now on, everything that the head publishes is written into
    /// it. Returns the descriptor that the ranks inherit, and the watch of the channel.
    ///
    /// # Errors
    /// The kernel has no memory, descriptor or thread.
    ///
    /// # Panics
    /// It is called twice, or at the head.
    pub fn follow(&self, num_ranks: usize) -> Result<(OwnedFd, Arc<Watch>), WriteError> {
        let writer = Writer::new(num_ranks)?;
        let (fd, watch) = (writer.fd().try_clone_to_owned()?, writer.watch());
        self.shared.aim(Target::Slots(Mutex::new(writer)));
        let (wire, of_ranks) = (Arc::clone(&self.shared.wire), Arc::clone(&watch));
        thread::Builder::new().name("rustvllm-node-out".into()).spawn(move || tell(&wire, &of_ranks))?;
        Ok((fd, watch))
    }

    /// The head's side: from now on, everything that the writer publishes goes to this node too. The node has rank
    /// `first` (from 1) and the `count - 1` ranks after it, and its reports on them are written into their lines.
    ///
    /// # Panics
    /// The channel has fewer ranks, or a frame was published already; or it is called twice, or at a node.
    pub fn lead(&self, writer: &mut Writer, first: usize, count: usize) {
        writer.add_wire(first, count, Arc::clone(&self.shared.wire));
        self.shared.aim(Target::Lines { watch: writer.watch(), first: first - 1, count });
    }

    /// Announce that nothing more is sent; what was sent still arrives.
    pub fn close(&self) {
        self.shared.wire.close();
    }

    /// End the connection at once, on both sides.
    pub fn cut(&self) {
        self.shared.wire.cut();
    }
}

impl Drop for NodeLink {
    fn drop(&mut self) {
        self.cut();
    }
}

impl Shared {
    fn aim(&self, target: Target) {
        assert!(self.target.set(target).is_ok(), "the frames of a connection have one target");
    }

    /// Read until the connection ends; then no reader waits for more.
    fn listen(&self, stream: TcpStream, texts: &Sender<String>) {
        let end = self.take_all(&mut BufReader::with_capacity(READ_BYTES, stream), texts);
        let _ = self
            .end
            .set(end.err().map_or_else(|| "the other side closed it".into(), |error| error.to_string()));
        if let Some(Target::Slots(writer)) = self.target.get() {
            writer.lock().unwrap_or_else(PoisonError::into_inner).watch().close();
        }
        self.wire.note_end();
    }

    fn take_all(&self, stream: &mut impl Read, texts: &Sender<String>) -> io::Result<()> {
        let mut body = Vec::new();
        while let Some((kind, num_bytes)) = read_header(stream)? {
            body.clear();
            // Memory grows with what has arrived, not with what a header announces.
            if stream.take(num_bytes as u64).read_to_end(&mut body)? < num_bytes {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            match (kind, self.target.get()) {
                (TEXT, _) => {
                    let text = std::str::from_utf8(&body).map_err(io::Error::other)?;
                    let _ = texts.send(text.to_owned()); // the owner may be gone
                }
                (SLOT, Some(Target::Slots(writer))) => {
                    let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
                    writer.relay(&body).map_err(io::Error::other)?;
                }
                (LINES, Some(Target::Lines { watch, first, count }))
                    if body.len() == count * RECORD_BYTES =>
                {
                    let lines = &watch.control().lines()[*first..first + count];
                    for (record, line) in body.as_chunks::<RECORD_BYTES>().0.iter().zip(lines) {
                        LineRecord::decode(record).write(line);
                    }
                }
                _ => {
                    return Err(io::Error::other(format!(
                        "a frame of kind {kind} and {num_bytes} bytes came"
                    )));
                }
            }
        }
        Ok(())
    }
}

/// Report to the head how far the ranks are, whenever that changes.
fn tell(wire: &Wire, watch: &Watch) {
    let (mut told, mut body) = (Vec::new(), Vec::new());
    while !wire.is_over() {
        let seen = watch.control().news.number();
        let records: Vec<LineRecord> = watch.lines().iter().map(LineRecord::of).collect();
        if records != told {
            body.clear();
            for record in &records {
                record.encode(&mut body);
            }
            if wire.send(LINES, &body).is_err() {
                return; // the reading side says so
            }
            told = records;
        }
        watch.control().news.wait(|news| news != seen, Duration::ZERO, Some(Instant::now() + LOOK));
    }
}

/// Read kind and length of the next frame; `None` at the end of the stream.
fn read_header(stream: &mut impl Read) -> io::Result<Option<(u8, usize)>> {
    let mut header = [0; HEADER_BYTES];
    let mut got = 0;
    while got < HEADER_BYTES {
        match stream.read(&mut header[got..]) {
            Ok(0) if got == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let num_bytes = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
    if num_bytes > MAX_BYTES {
        return Err(io::Error::other(format!(
            "the other side announced a frame of {num_bytes} bytes; the limit is {MAX_BYTES}"
        )));
    }
    Ok(Some((header[4], num_bytes)))
}
