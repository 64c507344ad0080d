//! `Outbox`: bytes that wait to be sent to one peer. Appending never waits; one task writes to the socket.
//!
//! Everything appended during a write goes out with the next one, so that a slow peer gets fewer and larger writes. The
//! outbox belongs to one thread, so it needs no lock.

use std::{
    cell::{Cell, RefCell},
    io,
};

use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    sync::Notify,
};

/// A buffer that grew beyond this is freed when it is empty.
const KEEP_BYTES: usize = 1 << 20;

/// See the module docs.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    buffer: RefCell<Vec<u8>>,
    /// Bytes of the write in progress.
    in_flight: Cell<usize>,
    is_closed: Cell<bool>,
    filled: Notify,
    drained: Notify,
}

impl Outbox {
    /// Append bytes and start a write. `fill` must not use the outbox itself.
    pub(crate) fn fill<T>(&self, fill: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let result = fill(&mut self.buffer.borrow_mut());
        self.filled.notify_one();
        result
    }

    /// Append without starting a write; call `flush` afterwards.
    pub(crate) fn buffer(&self) -> std::cell::RefMut<'_, Vec<u8>> {
        self.buffer.borrow_mut()
    }

    /// Start writing what was appended.
    pub(crate) fn flush(&self) {
        self.filled.notify_one();
    }

    /// Bytes that the system has not accepted yet.
    pub(crate) fn num_unsent(&self) -> usize {
        self.buffer.borrow().len() + self.in_flight.get()
    }

    /// Write what waits, then end.
    pub(crate) fn close(&self) {
        self.is_closed.set(true);
        self.filled.notify_one();
    }

    /// Wait until at most `limit` bytes are unsent.
    pub(crate) async fn wait_below(&self, limit: usize) {
        while self.num_unsent() > limit {
            self.drained.notified().await;
        }
    }

    /// Write until `close` or an error. Only one task calls this.
    pub(crate) async fn write_to(
        &self,
        stream: &mut (impl AsyncWrite + Unpin),
        written: impl Fn(usize),
    ) -> io::Result<()> {
        let mut batch = Vec::new();
        loop {
            std::mem::swap(&mut batch, &mut *self.buffer.borrow_mut());
            if batch.is_empty() {
                if self.is_closed.get() {
                    return stream.shutdown().await;
                }
                self.filled.notified().await;
                continue;
            }
            self.in_flight.set(batch.len());
            stream.write_all(&batch).await?;
            self.in_flight.set(0);
            written(batch.len());
            batch.clear();
            if batch.capacity() > KEEP_BYTES {
                batch = Vec::new();
            }
            self.drained.notify_one();
        }
    }
}
