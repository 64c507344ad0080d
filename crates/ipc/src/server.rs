//! `EngineServer`: the engine's side. One thread accepts clients, feeds the scheduler's inbox and sends its outputs.
//!
//! ```text
//!  clients ──frames──▶ reader task ──EngineHandle──▶ Inbox ──▶ scheduler's thread
//!     ▲                                                             │ publish, notify
//!     └──────────── writer task ◀── Outbox ◀── egress task ◀── Egress
//! ```
//!
//! One thread with a current-thread runtime is better than several. A step costs it one wake-up, one pass over the
//! egress and one `write` per client (about 10 µs for 256 tokens); the cores are left to the model and the front ends;
//! and what its tasks share needs no lock. The thread never takes the GIL, so it reads frames and answers heartbeats
//! while Python computes.

mod connection;
mod control;
mod engine_io;
pub(crate) mod io_thread;
pub(crate) mod options;
pub(crate) mod query;
mod served_client;
pub(crate) mod stats;

use std::{
    io,
    sync::{Arc, Mutex, PoisonError, mpsc as std_mpsc},
    thread::JoinHandle,
};

use tokio::sync::mpsc;

use crate::{
    error::EndpointError,
    server::{
        control::{Control, StepError},
        engine_io::Context,
        options::ServerOptions,
        query::Queries,
        stats::{ServerCounters, ServerStats},
    },
};

/// See the module docs. Dropping it stops the server.
#[derive(Debug)]
pub struct EngineServer {
    control: mpsc::UnboundedSender<Control>,
    thread: Option<JoinHandle<()>>,
    counters: Arc<ServerCounters>,
    complaints: std_mpsc::Receiver<String>,
    /// The lock is held only while the error is stored or copied into a frame.
    step_error: Arc<Mutex<StepError>>,
    queries: Arc<Queries>,
}

impl EngineServer {
    /// Start the I/O thread.
    ///
    /// # Errors
    /// A listener cannot be used, or no thread or descriptor is left.
    pub fn start(options: ServerOptions) -> Result<Self, EndpointError> {
        let counters = Arc::new(ServerCounters::default());
        let (control, commands) = mpsc::unbounded_channel();
        let (complain, complaints) = std_mpsc::sync_channel(MAX_COMPLAINTS);
        let (started, outcome) = std_mpsc::sync_channel(1);
        let step_error = Arc::new(Mutex::default());
        let queries = Arc::<Queries>::default();
        let context = Context {
            counters: counters.clone(),
            complain,
            step_error: step_error.clone(),
            queries: queries.clone(),
            answers: control.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("rustvllm-ipc".to_owned())
            .spawn(move || io_thread::run(options, commands, context, &started))
            .map_err(|source| start_error("start", source))?;
        match outcome.recv() {
            Ok(Ok(())) => {
                Ok(Self { control, thread: Some(thread), counters, complaints, step_error, queries })
            }
            Ok(Err(source)) => Err(start_error("listen on", source)),
            Err(_) => Err(start_error("start", io::Error::other("it ended at once"))),
        }
    }

    /// Record the error of a step. Call it before [`scheduler::Scheduler::fail_step`]: then it reaches every client
    /// whose requests end with the step, before their last outputs.
    pub fn note_step_error(&self, message: &str) {
        let mut step_error = self.step_error.lock().unwrap_or_else(PoisonError::into_inner);
        step_error.number += 1;
        message.clone_into(&mut step_error.message);
    }

    /// The queries of clients to the thread that steps the engine.
    #[must_use]
    pub fn queries(&self) -> Arc<Queries> {
        self.queries.clone()
    }

    /// Tell every client that the engine died and why, then end. Returns when they have received it, or after half a
    /// second.
    pub fn fail(&mut self, message: &str) {
        self.end(Control::Fail(message.to_owned()));
    }

    /// Say goodbye to every client and end. Idempotent.
    pub fn stop(&mut self) {
        self.end(Control::Stop);
    }

    /// Whether the I/O thread runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// The server's counters.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        self.counters.read()
    }

    /// The reasons for refused or cut connections since the last call, for the log. At most 64 are kept; further ones
    /// are only counted.
    #[must_use]
    pub fn take_complaints(&self) -> Vec<String> {
        self.complaints.try_iter().collect()
    }

    fn end(&mut self, control: Control) {
        let Some(thread) = self.thread.take() else { return };
        // An error means that the thread has already ended.
        let _ = self.control.send(control);
        let _ = thread.join();
    }
}

/// Most complaints that are kept until they are taken.
const MAX_COMPLAINTS: usize = 64;

fn start_error(action: &'static str, source: io::Error) -> EndpointError {
    EndpointError::System { action, what: "the engine's I/O thread".to_owned(), source }
}

impl Drop for EngineServer {
    fn drop(&mut self) {
        self.stop();
    }
}
