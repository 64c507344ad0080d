//! The handshake of two nodes that run one model. It resembles an engine's, but over a stream that a thread reads and
//! writes.
//!
//! ```text
//! head ── Challenge {magic, version, nonce} ────▶ node
//! head ◀── Hello {magic, version, nonce, proof} ── node
//! head ── Answer {1, proof}, or {0, why} ────────▶ node
//! ```
//!
//! The proofs are those of `handshake.rs`, with other labels. Each message has a fixed length, so a stranger can
//! neither make this side allocate memory nor occupy it for longer than the time limit.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use thiserror::Error;

use crate::handshake::{Nonce, Proof, Secret, Side, new_nonce};

/// Version of the protocol between nodes; both sides must have the same.
pub const NODE_PROTOCOL_VERSION: u16 = 1;

const MAGIC: [u8; 4] = *b"rvln";
const WELCOME: u8 = 1;
const WRONG_SECRET: u8 = 2;
const WRONG_VERSION: u8 = 3;

/// Why a handshake failed.
#[derive(Debug, Error)]
pub enum NodeHandshakeError {
    /// The other side speaks another protocol.
    #[error("the other side does not speak this protocol: its first bytes are {got:02x?}")]
    NotThisProtocol {
        /// Its first bytes.
        got: [u8; 4],
    },
    /// The other side speaks another version.
    #[error("the other side speaks version {theirs} of the protocol between nodes, this one version {own}")]
    Version {
        /// This side's version.
        own: u16,
        /// The other side's version.
        theirs: u16,
    },
    /// One side has no secret, or the secrets differ.
    #[error("the two sides have different secrets")]
    Secret,
    /// The other side took too long.
    #[error("the other side did not answer within {seconds:.1} s")]
    Late {
        /// The time limit.
        seconds: f64,
    },
    /// An error of the network.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The head's side, with a node that has connected.
///
/// # Errors
/// The other side is not a node of this version that knows the secret. It has been sent the reason.
pub fn welcome_node(
    stream: &mut TcpStream,
    secret: &Secret,
    limit: Duration,
) -> Result<(), NodeHandshakeError> {
    let mut stream = Timed::new(stream, limit)?;
    let own = new_nonce()?;
    stream.write(&hello(&own))?;
    let theirs = read_hello(&mut stream);
    if let Err(NodeHandshakeError::Version { .. }) = theirs {
        stream.write(&answer(WRONG_VERSION, &[0; 32]))?;
    }
    let theirs = theirs?;
    let proof: Proof = stream.read()?;
    if !secret.verify(Side::Node, &own, &theirs, &proof) {
        stream.write(&answer(WRONG_SECRET, &[0; 32]))?;
        return Err(NodeHandshakeError::Secret);
    }
    stream.write(&answer(WELCOME, &secret.prove(Side::Head, &own, &theirs)))
}

/// The node's side, after it has connected to the head.
///
/// # Errors
/// The other side is not a head of this version that knows the secret.
pub fn prove_to_head(
    stream: &mut TcpStream,
    secret: &Secret,
    limit: Duration,
) -> Result<(), NodeHandshakeError> {
    let mut stream = Timed::new(stream, limit)?;
    let theirs = read_hello(&mut stream)?;
    let own = new_nonce()?;
    stream.write(&hello(&own))?;
    stream.write(&secret.prove(Side::Node, &theirs, &own))?;
    let [code]: [u8; 1] = stream.read()?;
    let proof: Proof = stream.read()?;
    if code == WELCOME && secret.verify(Side::Head, &theirs, &own, &proof) {
        return Ok(());
    }
    Err(NodeHandshakeError::Secret)
}

fn hello(nonce: &Nonce) -> [u8; 38] {
    let mut message = [0; 38];
    message[..4].copy_from_slice(&MAGIC);
    message[4..6].copy_from_slice(&NODE_PROTOCOL_VERSION.to_le_bytes());
    message[6..].copy_from_slice(nonce);
    message
}

fn answer(code: u8, proof: &Proof) -> [u8; 33] {
    let mut message = [code; 33];
    message[1..].copy_from_slice(proof);
    message
}

fn read_hello(stream: &mut Timed<'_>) -> Result<Nonce, NodeHandshakeError> {
    let got: [u8; 4] = stream.read()?;
    if got != MAGIC {
        return Err(NodeHandshakeError::NotThisProtocol { got });
    }
    let theirs = u16::from_le_bytes(stream.read()?);
    if theirs != NODE_PROTOCOL_VERSION {
        return Err(NodeHandshakeError::Version { own: NODE_PROTOCOL_VERSION, theirs });
    }
    stream.read()
}

/// A stream with a deadline: returns whole messages, or an error that names what was waited for.
struct Timed<'a> {
    stream: &'a mut TcpStream,
    limit: Duration,
    end: Instant,
}

impl<'a> Timed<'a> {
    fn new(stream: &'a mut TcpStream, limit: Duration) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(limit))?;
        Ok(Self { stream, limit, end: Instant::now() + limit })
    }

    fn read<const N: usize>(&mut self) -> Result<[u8; N], NodeHandshakeError> {
        let (mut message, mut got) = ([0; N], 0);
        while got < N {
            let left = self.end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.late());
            }
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(&mut message[got..]) {
                Ok(0) => return Err(io::Error::from(ErrorKind::UnexpectedEof).into()),
                Ok(more) => got += more,
                Err(error) if is_late(&error) => return Err(self.late()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(message)
    }

    fn write(&mut self, message: &[u8]) -> Result<(), NodeHandshakeError> {
        self.stream
            .write_all(message)
            .map_err(|error| if is_late(&error) { self.late() } else { error.into() })
    }

    fn late(&self) -> NodeHandshakeError {
        NodeHandshakeError::Late { seconds: self.limit.as_secs_f64() }
    }
}

impl Drop for Timed<'_> {
    fn drop(&mut self) {
        // Reads after the handshake have no deadline.
        let _ = self.stream.set_read_timeout(None);
        let _ = self.stream.set_write_timeout(None);
    }
}

fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread};

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn secret(byte: u8) -> Secret {
        Secret::new(&[byte; 20]).expect("long enough")
    }

    /// Run both sides: what the head returns, and what `node` returns.
    fn meet<T: Send + 'static>(
        limit: Duration,
        node: impl FnOnce(TcpStream) -> T + Send + 'static,
    ) -> (Result<(), NodeHandshakeError>, T) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let node = thread::spawn(move || node(TcpStream::connect(address).expect("a connection")));
        let (mut stream, _) = listener.accept().expect("a connection");
        let found = welcome_node(&mut stream, &secret(1), limit);
        drop(stream);
        (found, node.join().expect("no panic"))
    }

    #[test]
    fn two_that_know_the_secret_know_each_other() {
        let (head, node) = meet(LONG, |mut stream| prove_to_head(&mut stream, &secret(1), LONG));
        head.expect("the node knows it");
        node.expect("the head knows it");
    }

    #[test]
    fn another_secret_is_refused_on_both_sides() {
        let (head, node) = meet(LONG, |mut stream| prove_to_head(&mut stream, &secret(2), LONG));
        assert!(matches!(head, Err(NodeHandshakeError::Secret)), "{head:?}");
        assert!(matches!(node, Err(NodeHandshakeError::Secret)), "{node:?}");
    }

    #[test]
    fn a_head_that_does_not_know_the_secret_is_not_followed() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let head = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            stream.write_all(&hello(&[9; 32])).expect("sent");
            let mut theirs = [0; 38 + 32];
            stream.read_exact(&mut theirs).expect("a hello");
            // Reflect the node's own proof.
            stream.write_all(&answer(WELCOME, theirs[38..].try_into().expect("32 bytes"))).expect("sent");
        });
        let mut stream = TcpStream::connect(address).expect("a connection");
        let node = prove_to_head(&mut stream, &secret(1), LONG);
        assert!(matches!(node, Err(NodeHandshakeError::Secret)), "{node:?}");
        head.join().expect("no panic");
    }

    #[test]
    fn strangers_other_versions_and_silence_are_named() {
        let (head, ()) = meet(LONG, |mut stream| {
            stream.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sent");
            let _ = stream.read(&mut [0; 64]);
        });
        assert!(
            matches!(head, Err(NodeHandshakeError::NotThisProtocol { got: [b'G', b'E', b'T', b' '] })),
            "{head:?}"
        );
        let (head, answered) = meet(LONG, |mut stream| {
            let mut newer = hello(&[1; 32]);
            newer[4] = 9;
            stream.write_all(&newer).expect("sent");
            let mut theirs = [0; 38 + 33];
            stream.read_exact(&mut theirs).expect("the head's hello and its answer");
            theirs[38]
        });
        assert!(matches!(head, Err(NodeHandshakeError::Version { own: 1, theirs: 9 })), "{head:?}");
        assert_eq!(answered, WRONG_VERSION);
        let short = Duration::from_millis(50);
        let (head, _) = meet(short, |mut stream| stream.read_to_end(&mut Vec::new()));
        assert!(matches!(head, Err(NodeHandshakeError::Late { .. })), "{head:?}");
    }
}
