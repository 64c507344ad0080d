//! What a client's callers and its I/O thread share: commands go one way, what is known of the engine comes the other.

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
    /// How long to try to connect; an engine that does not listen yet is waited for.
    pub connect_timeout: Duration,
    /// How often to look whether the engine lives.
    pub heartbeat_interval: Duration,
    /// A TCP connection that is silent for so long is lost.
    pub silence_timeout: Duration,
    /// Requests are refused while more bytes than these wait for the engine to read them.
    pub max_unsent_bytes: usize,
    /// What the engine must be able to do.
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

/// What the heartbeat shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Health {
    /// Since the engine's process answered last.
    pub heartbeat_age: Duration,
    /// For how long the engine has had something to do and done nothing.
    pub step_age: Duration,
    /// Steps that it has scheduled.
    pub num_steps: u64,
}

/// Names and values of counters.
pub type Counters = Arc<Vec<(String, u64)>>;

/// What callers send to the I/O thread.
#[derive(Debug)]
pub(crate) enum Command {
    /// An `AddRequests` frame, and whose ends to wait for.
    Add {
        frame: Vec<u8>,
        requests: Vec<(RequestKey, Box<str>)>,
    },
    AbortKeys(Vec<RequestKey>),
    AbortIds(Vec<Box<str>>),
    /// They are complete.
    StopKeys(Vec<RequestKey>),
    /// Why a request ended, which the engine cannot know.
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

/// What the callers and the I/O thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) delivery: Arc<Delivery>,
    pub(crate) death: OnceLock<Arc<str>>,
    pub(crate) unsent: AtomicUsize,
    /// Held for as long as it takes to exchange a pointer.
    last_stats: Mutex<Counters>,
    /// The atomics below count from here.
    began: Instant,
    // Relaxed: they are looked at by people and by a health check, and order nothing.
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

    /// The engine has answered.
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

    /// The engine's counters have come.
    pub(crate) fn note_stats(&self, counters: &Counters) {
        self.last_stats().clone_from(counters);
        let of = |name: &str| counters.iter().find(|(entry, _)| entry == name).map_or(0, |(_, value)| *value);
        // What waits was either never admitted, in which case it is queued, or it was preempted.
        let in_all = of("num_running") + of("num_waiting").max(of("num_queued"));
        let of_others = in_all.saturating_sub(of(NUM_CLIENT_REQUESTS));
        self.num_of_others.store(u32::try_from(of_others).unwrap_or(u32::MAX), Ordering::Relaxed);
    }
}
