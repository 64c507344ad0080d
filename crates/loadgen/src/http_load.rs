//! `http_load`: requests sent to an OpenAI-compatible server and their streams timed, for `rustvllm bench serve`.
//!
//! ```text
//!  caller's thread           load thread (tokio, one thread; never takes Python's lock)
//!  watches, every 100 ms ◀── Progress
//!                            dispatcher: next prompt → body → its time → a permit ─┐
//!                            one task per open request:  Client ▶ SseParser ▶ Chunk ▶ Record
//! ```
//!
//! | file | noun |
//! |---|---|
//! | `options.rs` | how much load, how fast, what counts as good |
//! | `prompts.rs`, `random.rs` | what is sent, reproducibly |
//! | `arrivals.rs` | when |
//! | `target.rs`, `client.rs` | the server, connections to it |
//! | `exchange.rs` | one request and its stream |
//! | `sse.rs`, `chunk.rs` | bytes → events → what they say |
//! | `record.rs`, `report.rs` | what became of one request, of all |
//! | `progress.rs` | how far a run is |
//!
//! A token is what the server counts as one (`usage`); an event is what came in one piece. Where a server merges
//! several tokens into one event the two differ, and the report has both.

mod arrivals;
mod chunk;
mod client;
mod exchange;
mod models;
mod options;
mod progress;
mod prompts;
mod random;
mod record;
mod report;
mod sse;
mod target;

use std::{
    cell::{Cell, RefCell},
    io,
    rc::Rc,
    sync::{
        Arc,
        mpsc::{RecvTimeoutError, channel},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use rustix::time::{ClockId, clock_gettime};
use scheduler::ConfigError;
use thiserror::Error;
use tokio::{
    runtime::{Builder, Runtime},
    sync::{Semaphore, oneshot},
    task::LocalSet,
};

pub use arrivals::arrivals;
pub use chunk::{Choices, Chunk, StreamError, Usage};
pub use models::served_model;
pub use options::{Goodput, HttpLoadOptions, MAX_LENGTH, MAX_REQUESTS, Rate};
pub use progress::ProgressCounts;
pub use prompts::{Content, FIRST_ID, LoadRequest, Prompts, RandomPrompts, TextPrompt, Vocabulary};
pub use random::Random;
pub use record::{Failure, Record};
pub use report::{Distribution, FailureCount, HttpLoadReport, RunTotals};
pub use sse::{EventTooLong, MAX_EVENT_BYTES, SseParser};
pub use target::{Target, TargetError};

use client::Client;
use exchange::Exchange;
use progress::Progress;

use crate::TraceError;

/// How often the caller is asked whether to go on.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// Why a run brought no report. A failed request is not one: the report counts it.
#[derive(Debug, Error)]
pub enum HttpLoadError {
    /// A number outside its limits.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The server's address.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A field that no header can carry.
    #[error("the API key or the host has characters that an HTTP header cannot carry")]
    Header,
    /// A body that is not a JSON object.
    #[error("the fields of a request must be one JSON object, got {fields}")]
    Fields {
        /// Given.
        fields: String,
    },
    /// A trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// No server there.
    #[error("{base_url}: {failure}")]
    Unreachable {
        /// Its address.
        base_url: String,
        /// What happened.
        failure: Failure,
    },
    /// An answer to a question about models that makes no sense.
    #[error("{base_url}/v1/models: {problem}; name the model with --model")]
    Models {
        /// The server's address.
        base_url: String,
        /// What it answered.
        problem: String,
    },
    /// The requests before the measured ones.
    #[error("a warm-up request failed: {failure}")]
    Warmup {
        /// The first failure.
        failure: Failure,
    },
    /// No thread, no event loop.
    #[error("cannot start the load generator: {error}")]
    Start {
        /// What the system says.
        error: io::Error,
    },
    /// The caller ended it.
    #[error("interrupted")]
    Interrupted,
    /// The load thread panicked: a bug.
    #[error("the load generator ended without a report: this is a bug")]
    Vanished,
}

/// Send a run's requests and report. `watch` is asked every 100 ms with the counts so far; `false` ends the run.
///
/// # Errors
/// A number outside its limits, an address without a server, a trace that cannot be read, a failed warm-up, or
/// `Interrupted`.
pub fn http_load(
    options: &HttpLoadOptions,
    prompts: &Prompts,
    watch: &mut dyn FnMut(ProgressCounts) -> bool,
) -> Result<HttpLoadReport, HttpLoadError> {
    options.check()?;
    prompts.check()?;
    let run = Run::new(options, prompts)?;
    let progress = Arc::new(Progress::default());
    let (result_sender, result_receiver) = channel();
    let (stop_sender, stop_receiver) = oneshot::channel::<()>();
    std::thread::scope(|scope| {
        let load = {
            let progress = Arc::clone(&progress);
            move || {
                let result = run.run(&progress, stop_receiver);
                drop(result_sender.send(result)); // an error: the caller has ended the run and does not wait
            }
        };
        std::thread::Builder::new()
            .name("rustvllm-load".to_owned())
            .spawn_scoped(scope, load)
            .map_err(|error| HttpLoadError::Start { error })?;
        loop {
            match result_receiver.recv_timeout(WATCH_INTERVAL) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) if watch(progress.counts()) => {}
                Err(RecvTimeoutError::Timeout) => {
                    drop(stop_sender);
                    return Err(HttpLoadError::Interrupted);
                }
                Err(RecvTimeoutError::Disconnected) => return Err(HttpLoadError::Vanished),
            }
        }
    })
}

/// A current-thread runtime: one thread makes the load, so that its processor time says how busy it was.
fn runtime() -> Result<Runtime, HttpLoadError> {
    Builder::new_current_thread().enable_all().build().map_err(|error| HttpLoadError::Start { error })
}

/// A run whose settings are in order.
struct Run<'a> {
    options: &'a HttpLoadOptions,
    prompts: &'a Prompts,
    target: Target,
    /// The body's constant part, without its closing brace.
    fields: String,
    is_chat: bool,
}

/// What one phase brought.
struct Phase {
    records: Vec<Record>,
    totals: RunTotals,
}

impl<'a> Run<'a> {
    fn new(options: &'a HttpLoadOptions, prompts: &'a Prompts) -> Result<Self, HttpLoadError> {
        let wrong = || HttpLoadError::Fields { fields: options.fields.clone() };
        let fields: serde_json::Value = serde_json::from_str(&options.fields).map_err(|_| wrong())?;
        let mut fields = fields.is_object().then(|| fields.to_string()).ok_or_else(wrong)?;
        fields.pop();
        Ok(Self {
            options,
            prompts,
            target: Target::parse(&options.base_url)?,
            fields,
            is_chat: options.endpoint.ends_with("/chat/completions"),
        })
    }

    /// In the load thread. Leaving it drops every open request.
    fn run(
        &self,
        progress: &Arc<Progress>,
        stop: oneshot::Receiver<()>,
    ) -> Result<HttpLoadReport, HttpLoadError> {
        let runtime = runtime()?;
        let result = LocalSet::new().block_on(&runtime, async {
            tokio::select! {
                result = self.both_phases(progress) => result,
                _ = stop => Err(HttpLoadError::Interrupted),
            }
        });
        runtime.shutdown_background(); // a name that is still being looked up does not delay it
        result
    }

    async fn both_phases(&self, progress: &Arc<Progress>) -> Result<HttpLoadReport, HttpLoadError> {
        let options = self.options;
        let client =
            Client::new(self.target.clone(), options.api_key.as_deref()).ok_or(HttpLoadError::Header)?;
        match client.connect().await {
            Ok(connection) => client.keep(connection),
            Err(failure) => {
                return Err(HttpLoadError::Unreachable { base_url: options.base_url.clone(), failure });
            }
        }
        if options.num_warmups > 0 {
            progress.start_phase(true);
            let warmup = self.phase(&client, progress, options.num_warmups, true).await?;
            if let Some(failure) = report::first_failure(&warmup.records) {
                return Err(HttpLoadError::Warmup { failure: failure.clone() });
            }
        }
        progress.start_phase(false);
        let measured = self.phase(&client, progress, options.num_requests, false).await?;
        let report =
            HttpLoadReport::of(measured.totals, &measured.records, &options.percentiles, options.goodput);
        Ok(HttpLoadReport { records: measured.records, ..report })
    }

    /// Send `count` requests, each at its time, and wait for all.
    async fn phase(
        &self,
        client: &Rc<Client>,
        progress: &Arc<Progress>,
        count: usize,
        is_warmup: bool,
    ) -> Result<Phase, HttpLoadError> {
        let cpu_before = thread_cpu();
        let options = self.options;
        let limit = options.max_concurrency.unwrap_or(count).min(Semaphore::MAX_PERMITS);
        let permits = Arc::new(Semaphore::new(limit));
        // Those before the measured ones only have to be over soon.
        let times = if is_warmup { Vec::new() } else { arrivals(options.rate, count, options.seed) };
        let follows_trace = options.rate == Rate::Recorded && !is_warmup;
        let records = Rc::new(RefCell::new(Vec::with_capacity(count)));
        let open = Rc::new(Cell::new(0_usize));
        let mut max_open = 0;
        let path: Rc<str> = options.endpoint.as_str().into();
        let start = Instant::now();
        for (index, request) in self.prompts.requests(options.seed, count, is_warmup)?.enumerate() {
            let request = request?;
            let body = Bytes::from(request.body(&self.fields, self.is_chat));
            let at =
                if follows_trace { request.arrival } else { times.get(index).copied().unwrap_or_default() };
            if !at.is_zero() {
                tokio::time::sleep_until((start + at).into()).await;
            }
            let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { break }; // never closed
            open.set(open.get() + 1);
            max_open = max_open.max(open.get());
            let (client, progress, records) = (Rc::clone(client), Arc::clone(progress), Rc::clone(&records));
            let (open, path, timeout) = (Rc::clone(&open), Rc::clone(&path), options.timeout);
            tokio::task::spawn_local(async move {
                let exchange = Exchange { client: &client, path: &path, timeout, progress: &progress };
                let sent = start.elapsed();
                let exchanged = exchange.run(body, request.num_prompt_tokens).await;
                let record = Record { number: index, sent, ..exchanged };
                progress.add_request(record.failure.is_some());
                records.borrow_mut().push(record);
                open.set(open.get() - 1);
                drop(permit);
            });
        }
        let all = u32::try_from(limit).unwrap_or(u32::MAX);
        drop(permits.acquire_many(all).await); // all are back: every request has ended
        let totals = RunTotals {
            duration: start.elapsed(),
            max_concurrent_requests: max_open,
            client_cpu: thread_cpu().saturating_sub(cpu_before),
        };
        let mut records = records.take();
        records.sort_unstable_by_key(|record| record.number); // they came as they ended
        Ok(Phase { records, totals })
    }
}

fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}
