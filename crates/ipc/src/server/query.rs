//! Queries, which only the thread that steps the engine can answer: the limits per client, and those that wait.
//!
//! ```text
//! client ── Query ──▶ I/O thread ──▶ Queries ──▶ stepping thread, between two steps
//!   ▲                                                  │ answer, or fail
//!   └────── Reply ─── I/O thread ◀── Control::Reply ◀──┘
//! ```
//!
//! This module does not know what the queries mean: a kind is a short text, a payload and an answer are bytes.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::mpsc;

use crate::{
    message::{MAX_REPLY_BYTES, QueryOutcome},
    server::control::{Control, Reply},
};

/// Most queries of one client that may be unanswered.
pub const MAX_OPEN_QUERIES: u32 = 8;
/// Most queries of all clients that may wait for the engine: 16 MiB at most.
pub const MAX_WAITING_QUERIES: usize = 256;

/// A query, owned by the code that answers it. If it is dropped without an answer, its client gets an error.
#[derive(Debug)]
pub struct Query {
    kind: Box<str>,
    payload: Box<[u8]>,
    client_index: u32,
    id: u64,
    /// `None` once it is answered.
    control: Option<mpsc::UnboundedSender<Control>>,
}

impl Query {
    pub(crate) fn new(
        client_index: u32,
        id: u64,
        kind: Box<str>,
        payload: Box<[u8]>,
        control: mpsc::UnboundedSender<Control>,
    ) -> Self {
        Self { kind, payload, client_index, id, control: Some(control) }
    }

    /// The kind of the query.
    #[must_use]
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Its argument.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// Send the answer, or why there is none. An answer that is too long becomes an error.
    pub fn answer(mut self, outcome: QueryOutcome) {
        self.send(outcome);
    }

    fn send(&mut self, outcome: QueryOutcome) {
        let Some(control) = self.control.take() else { return };
        let outcome = outcome.and_then(|answer| match answer.len() {
            0..=MAX_REPLY_BYTES => Ok(answer),
            num_bytes => Err(format!("the answer has {num_bytes} bytes; the limit is {MAX_REPLY_BYTES}")),
        });
        // An error means that the server has stopped, which its clients know.
        let _ = control.send(Control::Reply(Reply { client_index: self.client_index, id: self.id, outcome }));
    }
}

impl Drop for Query {
    fn drop(&mut self) {
        self.send(Err("the engine gave no answer".to_owned()));
    }
}

/// Queries that wait for the stepping thread.
#[derive(Debug, Default)]
pub struct Queries {
    /// The lock is held only to append one query or to take all.
    waiting: Mutex<Vec<Query>>,
    /// Their number, to check without the lock.
    num_waiting: AtomicUsize,
}

impl Queries {
    /// Append a query; returns it if too many wait.
    pub(crate) fn push(&self, query: Query) -> Result<(), Query> {
        let mut waiting = self.lock();
        if waiting.len() >= MAX_WAITING_QUERIES {
            return Err(query);
        }
        waiting.push(query);
        // Relaxed: a sleeping scheduler is woken after this, and a stepping one checks again after its step.
        self.num_waiting.store(waiting.len(), Ordering::Relaxed);
        Ok(())
    }

    /// Take all, oldest first; takes no lock if there are none. Adding a query wakes the scheduler.
    #[must_use]
    pub fn take(&self) -> Vec<Query> {
        if self.num_waiting.load(Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        let mut waiting = self.lock();
        self.num_waiting.store(0, Ordering::Relaxed);
        std::mem::take(&mut *waiting)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Query>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
