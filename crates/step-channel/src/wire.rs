//! `Wire`: sends frames to another node: length, kind, body. Several threads may send.

use std::{
    io::{self, IoSlice, Write},
    net::{Shutdown, TcpStream},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

pub(crate) const TEXT: u8 = 1;
pub(crate) const SLOT: u8 = 2;
pub(crate) const LINES: u8 = 3;
/// Length and kind.
pub(crate) const HEADER_BYTES: usize = 5;
/// Most bytes of one text or frame.
pub(crate) const MAX_BYTES: usize = 256 << 20;

/// The sending half of a connection.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: TcpStream,
    sending: Mutex<()>,
    is_over: AtomicBool,
}

impl Wire {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self { stream, sending: Mutex::new(()), is_over: AtomicBool::new(false) }
    }

    /// Whether the connection has ended, or is about to.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Relaxed) // it says nothing but itself
    }

    pub(crate) fn note_end(&self) {
        self.is_over.store(true, Relaxed);
    }

    /// Announce that nothing more is sent; what was sent still arrives.
    pub(crate) fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// End the connection at once, on both sides.
    pub(crate) fn cut(&self) {
        self.note_end();
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    pub(crate) fn send(&self, kind: u8, body: &[u8]) -> io::Result<()> {
        if body.len() > MAX_BYTES {
            return Err(io::Error::other(format!("{} bytes are more than {MAX_BYTES}", body.len())));
        }
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
        header[4] = kind;
        let _alone = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stream = &self.stream;
        let sent = loop {
            match stream.write_vectored(&[IoSlice::new(&header), IoSlice::new(body)]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        if let Some(left) = header.get(sent..) {
            stream.write_all(left)?;
        }
        stream.write_all(body.get(sent.saturating_sub(HEADER_BYTES)..).unwrap_or_default())
    }
}
