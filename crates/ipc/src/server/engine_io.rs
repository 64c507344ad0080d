//! `EngineIo`: the state that the tasks of the engine's I/O thread share, and the paths between clients and scheduler.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap},
    rc::Rc,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering, mpsc as std_mpsc},
    time::{Duration, Instant},
};

use scheduler::{EngineCoreOutput, EngineHandle, TokenLogprobs, egress::Consumer};
use tokio::sync::mpsc;

use crate::{
    handshake::facts::EngineFacts,
    key::{MAX_CLIENT_INDEX, client_of},
    message::EngineMessage,
    server::{
        control::{Control, Reply, StepError},
        options::ServerOptions,
        query::{MAX_OPEN_QUERIES, MAX_WAITING_QUERIES, Queries, Query},
        served_client::ServedClient,
        stats::ServerCounters,
    },
};

/// Most connections that may be in their handshake at once, in addition to the welcomed ones.
const MAX_HANDSHAKES: u64 = 256;

/// The state that the thread shares with its `EngineServer`.
pub(crate) struct Context {
    pub(crate) counters: Arc<ServerCounters>,
    pub(crate) complain: std_mpsc::SyncSender<String>,
    pub(crate) step_error: Arc<Mutex<StepError>>,
    pub(crate) queries: Arc<Queries>,
    /// Sends answers to queries to the thread, through the same channel as the owner's commands.
    pub(crate) answers: mpsc::UnboundedSender<Control>,
}

/// The state that the tasks of the thread share.
pub(crate) struct EngineIo {
    pub(crate) handle: EngineHandle,
    pub(crate) facts: EngineFacts,
    pub(crate) counters: Arc<ServerCounters>,
    pub(crate) clients: RefCell<HashMap<u32, Rc<ServedClient>>>,
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

impl EngineIo {
    pub(crate) fn new(options: &ServerOptions, context: Context) -> Self {
        Self {
            handle: options.handle.clone(),
            facts: options.facts(),
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
        }
    }

    /// Count a new connection; `None` if too many are in their handshake.
    pub(crate) fn open(self: &Rc<Self>) -> Option<OpenConnection> {
        if self.num_open.get() >= u64::from(self.max_clients) + MAX_HANDSHAKES {
            return None;
        }
        self.num_open.set(self.num_open.get() + 1);
        Some(OpenConnection(self.clone()))
    }

    pub(crate) fn turned_away(&self, error: impl std::fmt::Display) {
        self.counters.num_refused.fetch_add(1, Ordering::Relaxed);
        self.complain(format!("a connection was refused: {error}"));
    }

    /// Keep a complaint for the log, or only count it if there are too many.
    pub(crate) fn complain(&self, what: String) {
        let _ = self.complain.try_send(what);
    }

    /// An unused index for a client. After 16 million clients, indices are used again.
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

    /// Pass a query to the stepping thread, unless too many wait.
    pub(crate) fn ask(&self, client: &ServedClient, id: u64, kind: Box<str>, payload: Box<[u8]>) {
        let num_open = client.num_open_queries.get();
        let refusal = if num_open >= MAX_OPEN_QUERIES {
            format!("{num_open} queries of this client have no answer yet; the limit is {MAX_OPEN_QUERIES}")
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

    /// Pass an answer to its client, if that is still connected.
    pub(crate) fn reply(&self, reply: Reply) {
        if let Some(client) = self.clients.borrow().get(&reply.client_index) {
            client.num_open_queries.set(client.num_open_queries.get().saturating_sub(1));
            client.send(&EngineMessage::Reply { id: reply.id, outcome: reply.outcome });
        }
    }

    /// For how long the scheduler has had requests without finishing a step.
    pub(crate) fn step_age(&self) -> Duration {
        self.progress.age(&self.handle)
    }

    /// Move what the scheduler has published to the outboxes of its clients.
    pub(crate) fn route(&self, consumer: &mut Consumer) {
        let clients = self.clients.borrow();
        let mut news: Vec<&ServedClient> = Vec::new();
        // Consecutive outputs mostly belong to the same client.
        let mut last: Option<&ServedClient> = None;
        let mut num_dropped = 0;
        consumer.look();
        let mut logprobs: BTreeMap<u32, Vec<TokenLogprobs>> = BTreeMap::new();
        consumer
            .take_logprobs(|of_token| logprobs.entry(client_of(of_token.key)).or_default().push(of_token));
        for (index, all) in &logprobs {
            // They are sent with the tokens that follow, at the latest with those of the next step.
            if let Some(client) = clients.get(index) {
                client.push_logprobs(all);
            }
        }
        consumer.take_prompt_logprobs(|all| {
            // A long prompt takes several steps, and the first ones give no token that these could be sent with.
            if let Some(client) = clients.get(&client_of(all.key)) {
                client.push_prompt_logprobs(&all);
                client.outbox.flush();
            }
        });
        consumer.take_pooled(|vector| {
            // It is sent with the output that ends its request, at the latest with those of the next step.
            if let Some(client) = clients.get(&client_of(vector.key)) {
                client.push_pooled(&vector);
            }
        });
        consumer.drain_seen(|output: EngineCoreOutput| {
            let index = client_of(output.key);
            let client = match last {
                Some(client) if client.index == index => Some(client),
                _ => clients.get(&index).map(|client| &**client),
            };
            if let Some(client) = client {
                if output.error.is_explained() {
                    client.explain(&self.step_error.lock().unwrap_or_else(PoisonError::into_inner));
                }
                if client.push(&output) {
                    news.push(client);
                }
                if let Some(reason) = output.unsettled_reason() {
                    client.await_settlement(output.key, reason, &self.handle);
                }
                last = Some(client);
            } else {
                num_dropped += 1;
                if let Some(reason) = output.unsettled_reason() {
                    self.handle.settle_end(reason);
                }
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

/// Counts a connection while its task lives, even if that ends by a panic.
pub(crate) struct OpenConnection(pub(crate) Rc<EngineIo>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.num_open.set(self.0.num_open.get() - 1);
    }
}

/// The last time when the scheduler was seen to make progress or to be idle. Heartbeats check this, so that the
/// scheduler's thread needs no clock.
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
