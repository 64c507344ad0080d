//! The state that a client's callers share with its I/O thread: commands go to the thread, facts about the engine come
//! back.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
        mpsc as std_mpsc,
    },
    time::{Duration, Instant},
};

use scheduler::{MetricsSnapshot, RequestKey};

use crate::{
    client::delivery::Delivery,
    handshake::CAPABILITIES,
    message::{NUM_CLIENT_REQUESTS, QueryOutcome},
};

/// Times and limits of a client.
#[derive(Clone, Copy, Debug)]
pub struct ClientOptions {
    /// How long to try to connect, waiting for an engine that does not listen yet.
    pub connect_timeout: Duration,
    /// Interval between two pings to the engine.
    pub heartbeat_interval: Duration,
    /// A TCP connection counts as lost after this long without data.
    pub silence_timeout: Duration,
    /// Requests are refused while more bytes than this wait to be sent to the engine.
    pub max_unsent_bytes: usize,
    /// Capabilities that the engine must have.
    pub capabilities: u64,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            heartbeat_interval: Duration::from_millis(200),
            silence_timeout: Duration::from_secs(10),
            max_unsent_bytes: 64 << 20,
            capabilities: CAPABILITIES,
        }
    }
}

/// What the last heartbeat reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Health {
    /// Time since the engine's process last answered.
    pub heartbeat_age: Duration,
    /// For how long the engine has had requests without finishing a step.
    pub step_age: Duration,
    /// Number of steps scheduled since the engine's start.
    pub num_steps: u64,
}

/// Names and values of counters.
pub type Counters = Arc<Vec<(String, u64)>>;

/// What callers send to the I/O thread.
#[derive(Debug)]
pub(crate) enum Command {
    /// An `AddRequests` frame, and the requests whose ends to wait for.
    Add {
        frame: Vec<u8>,
        requests: Vec<(RequestKey, Box<str>)>,
    },
    AbortKeys(Vec<RequestKey>),
    AbortIds(Vec<Box<str>>),
    /// These requests are complete: their text has reached a stop string.
    StopKeys(Vec<RequestKey>),
    /// Why a request ended, which the engine cannot know by itself.
    SettleEnd {
        key: RequestKey,
        found_stop: bool,
    },
    GrammarReady(RequestKey),
    GrammarFailed(RequestKey),
    Stats(std_mpsc::SyncSender<Counters>),
    Metrics(std_mpsc::SyncSender<MetricsSnapshot>),
    Query {
        kind: Box<str>,
        payload: Box<[u8]>,
        answer: std_mpsc::SyncSender<QueryOutcome>,
    },
    /// Disconnect, for this reason.
    Close(Box<str>),
}

/// The state that callers share with the I/O thread.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) delivery: Arc<Delivery>,
    pub(crate) death: OnceLock<Arc<str>>,
    pub(crate) unsent: AtomicUsize,
    /// The lock is held only while a pointer is exchanged.
    last_stats: Mutex<Counters>,
    /// The start of the time that the atomics below count.
    began: Instant,
    // Relaxed: only people and a health check read them, and they order nothing.
    heartbeat_ns: AtomicU64,
    step_age_ns: AtomicU64,
    num_steps: AtomicU64,
    num_of_others: AtomicU32,
}

impl Shared {
    pub(crate) fn new(delivery: Arc<Delivery>) -> Self {
        Self {
            delivery,
            death: OnceLock::new(),
            unsent: AtomicUsize::new(0),
            last_stats: Mutex::default(),
            began: Instant::now(),
            heartbeat_ns: AtomicU64::new(0),
            step_age_ns: AtomicU64::new(0),
            num_steps: AtomicU64::new(0),
            num_of_others: AtomicU32::new(0),
        }
    }

    /// Record the engine's answer to a ping.
    pub(crate) fn note_heartbeat(&self, step_age_ns: u64, num_steps: u64) {
        self.heartbeat_ns.store(self.began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.step_age_ns.store(step_age_ns, Ordering::Relaxed);
        self.num_steps.store(num_steps, Ordering::Relaxed);
    }

    pub(crate) fn heartbeat_age(&self) -> Duration {
        let heartbeat = Duration::from_nanos(self.heartbeat_ns.load(Ordering::Relaxed));
        self.began.elapsed().saturating_sub(heartbeat)
    }

    pub(crate) fn health(&self) -> Health {
        let heartbeat_age = self.heartbeat_age();
        let at_heartbeat = Duration::from_nanos(self.step_age_ns.load(Ordering::Relaxed));
        let step_age = if at_heartbeat.is_zero() { at_heartbeat } else { at_heartbeat + heartbeat_age };
        Health { heartbeat_age, step_age, num_steps: self.num_steps.load(Ordering::Relaxed) }
    }

    /// Requests of other clients that the engine had at the last heartbeat.
    pub(crate) fn num_of_others(&self) -> u32 {
        self.num_of_others.load(Ordering::Relaxed)
    }

    pub(crate) fn last_stats(&self) -> MutexGuard<'_, Counters> {
        self.last_stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Store the engine's counters.
    pub(crate) fn note_stats(&self, counters: &Counters) {
        self.last_stats().clone_from(counters);
        let of = |name: &str| counters.iter().find(|(entry, _)| entry == name).map_or(0, |(_, value)| *value);
        // A waiting request was either never admitted, and then counted as queued too, or preempted.
        let in_all = of("num_running") + of("num_waiting").max(of("num_queued"));
        let of_others = in_all.saturating_sub(of(NUM_CLIENT_REQUESTS));
        self.num_of_others.store(u32::try_from(of_others).unwrap_or(u32::MAX), Ordering::Relaxed);
    }
}
