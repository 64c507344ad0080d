//! Questions that only the thread that steps the engine can answer, at a human's pace: who may ask how much, and what
//! waits.
//!
//! ```text
//! client ── Query ──▶ I/O thread ──▶ Queries ──▶ stepping thread, between two steps
//!   ▲                                                  │ answer, or fail
//!   └────── Reply ─── I/O thread ◀── Control::Reply ◀──┘
//! ```
//!
//! What the questions are is not known here: a kind is a short text, a payload and an answer are bytes.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::mpsc;

use crate::{
    message::{MAX_REPLY_BYTES, QueryOutcome},
    server::control::{Control, Reply},
};

/// Queries of one client without an answer.
pub const MAX_OPEN_QUERIES: u32 = 8;
/// Queries of all clients that the engine has not taken yet: 16 MiB at most.
pub const MAX_WAITING_QUERIES: usize = 256;

/// A question, owned by what answers it. Dropped without an answer, it tells its client so.
#[derive(Debug)]
pub struct Query {
    kind: Box<str>,
    payload: Box<[u8]>,
    client_index: u32,
    id: u64,
    /// `None`: answered.
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

    /// What is asked.
    #[must_use]
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// What is said about it.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// Give the answer, or say why there is none. One that is too long says that instead.
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
    /// Held for as long as it takes to append one or to take all.
    waiting: Mutex<Vec<Query>>,
    /// Their number, for a look without the lock.
    num_waiting: AtomicUsize,
}

impl Queries {
    /// Append one; gives it back when too many wait.
    pub(crate) fn push(&self, query: Query) -> Result<(), Query> {
        let mut waiting = self.lock();
        if waiting.len() >= MAX_WAITING_QUERIES {
            return Err(query);
        }
        waiting.push(query);
        // Relaxed: a scheduler that sleeps is woken after this, and one that steps looks again after the next step.
        self.num_waiting.store(waiting.len(), Ordering::Relaxed);
        Ok(())
    }

    /// Take all, oldest first; without a lock when there is none. Adding one wakes the scheduler.
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
