//! `TokenizerPool`: long texts become token ids in threads of their own, so that a prompt of a hundred thousand tokens
//! does not delay other requests.
//!
//! ```text
//! submit ──▶ short ─┐                        ┌──▶ done ──▶ take
//!        └─▶ long  ─┴──▶ a few worker threads ┘ └─▶ notify
//! ```
//!
//! A worker takes short texts first, and one worker at least is never busy with a long one, so that a row of long prompts
//! lets the short ones through. One text occupies one worker: where a tokenizer may cut a text depends on its rules, and
//! ids that differ from those of the whole text would be worse than later ones. The texts that wait or are worked on are
//! bounded together. Threads start with the first text, sleep without work, and end with the pool.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::error::OutputError;
use crate::tokenizer::Tokenizer;

/// Most threads of a pool.
pub const MAX_TOKENIZER_THREADS: usize = 4;
/// Longer texts (some ten milliseconds of work) wait behind shorter ones.
pub const LONG_TEXT_BYTES: usize = 32 << 10;
/// Most bytes of the texts that wait and are worked on.
pub const MAX_WAITING_TEXT_BYTES: usize = 256 << 20;
/// Workers give way to the threads that stream: the event loop, the transport, the engine.
const NICENESS: i32 = 5;

/// A text that is done.
#[derive(Debug)]
pub struct EncodedText {
    /// What [`TokenizerPool::submit`] gave.
    pub id: u64,
    /// Its token ids.
    pub result: Result<Vec<u32>, OutputError>,
}

/// See the module docs. Shared between threads.
pub struct TokenizerPool {
    shared: Arc<Shared>,
}

struct Shared {
    tokenizer: Arc<Tokenizer>,
    num_threads: usize,
    state: Mutex<State>,
    /// Something to do for a worker, or the end.
    work: Condvar,
    notify: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct State {
    short: VecDeque<Job>,
    long: VecDeque<Job>,
    /// Jobs that are worked on and still wanted.
    running: Vec<u64>,
    num_long_running: usize,
    num_threads: usize,
    num_bytes: usize,
    last_id: u64,
    done: Vec<EncodedText>,
    is_closed: bool,
}

struct Job {
    id: u64,
    text: String,
    add_special_tokens: bool,
}

impl Job {
    fn is_long(&self) -> bool {
        self.text.len() > LONG_TEXT_BYTES
    }
}

impl TokenizerPool {
    /// A pool of at most `num_threads` workers (2 to [`MAX_TOKENIZER_THREADS`]). `notify` is called, in a worker, when a
    /// text is done.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        num_threads: usize,
        notify: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let shared = Shared {
            tokenizer,
            // Two at least, so that a long text never has them all.
            num_threads: num_threads.clamp(2, MAX_TOKENIZER_THREADS),
            state: Mutex::default(),
            work: Condvar::new(),
            notify: Box::new(notify),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Hands a text in; returns the number under which it comes back.
    ///
    /// # Errors
    /// Too much text waits already; no thread can be started.
    pub fn submit(&self, text: String, add_special_tokens: bool) -> Result<u64, OutputError> {
        let mut state = self.shared.lock();
        let num_bytes = text.len();
        if state.num_bytes.saturating_add(num_bytes) > MAX_WAITING_TEXT_BYTES {
            let num_waiting = state.num_bytes;
            return Err(OutputError::TokenizerBusy { num_bytes, num_waiting, limit: MAX_WAITING_TEXT_BYTES });
        }
        let num_jobs = state.short.len() + state.long.len() + state.running.len() + 1;
        if state.num_threads < self.shared.num_threads.min(num_jobs)
            && let Err(source) = self.start_thread(&mut state)
            && state.num_threads == 0
        {
            return Err(OutputError::NoTokenizerThread { source });
        }
        state.last_id += 1;
        let id = state.last_id;
        state.num_bytes += num_bytes;
        let job = Job { id, text, add_special_tokens };
        if job.is_long() {
            state.long.push_back(job);
        } else {
            state.short.push_back(job);
        }
        drop(state);
        self.shared.work.notify_one();
        Ok(id)
    }

    /// Drop a text whose caller no longer waits: it is not begun, or what is done of it is dropped.
    pub fn cancel(&self, id: u64) {
        let mut state = self.shared.lock();
        let State { short, long, running, done, num_bytes, .. } = &mut *state;
        for queue in [short, long] {
            if let Some(at) = queue.iter().position(|job| job.id == id)
                && let Some(job) = queue.remove(at)
            {
                *num_bytes -= job.text.len();
            }
        }
        running.retain(|&other| other != id);
        done.retain(|other| other.id != id);
    }

    /// What is done since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<EncodedText> {
        std::mem::take(&mut self.shared.lock().done)
    }

    /// Bytes of the texts that wait and are worked on.
    #[must_use]
    pub fn num_waiting_bytes(&self) -> usize {
        self.shared.lock().num_bytes
    }

    /// Threads that were started.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        self.shared.lock().num_threads
    }

    fn start_thread(&self, state: &mut State) -> std::io::Result<()> {
        let shared = Arc::clone(&self.shared);
        thread::Builder::new().name("rustvllm-tokens".to_owned()).spawn(move || shared.work())?;
        state.num_threads += 1;
        Ok(())
    }
}

impl fmt::Debug for TokenizerPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenizerPool").field("num_threads", &self.shared.num_threads).finish_non_exhaustive()
    }
}

impl Drop for TokenizerPool {
    fn drop(&mut self) {
        // The workers end by themselves; one that works on a text does so when it is done.
        let mut state = self.shared.lock();
        state.is_closed = true;
        state.short.clear();
        state.long.clear();
        drop(state);
        self.shared.work.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic happens under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A worker's life.
    fn work(&self) {
        // Refused by some sandboxes; then they compete as equals.
        let _ = rustix::process::setpriority_process(None, NICENESS);
        while let Some(job) = self.next_job() {
            let (id, num_bytes, is_long) = (job.id, job.text.len(), job.is_long());
            let result = self.tokenizer.encode(&job.text, job.add_special_tokens);
            drop(job);
            let mut state = self.lock();
            state.num_bytes -= num_bytes;
            state.num_long_running -= usize::from(is_long);
            let is_wanted = state.running.contains(&id) && !state.is_closed;
            state.running.retain(|&other| other != id);
            if is_wanted {
                state.done.push(EncodedText { id, result });
            }
            // Others may have passed over a long text because this one was long.
            let has_long = is_long && !state.long.is_empty();
            drop(state);
            if has_long {
                self.work.notify_one();
            }
            if is_wanted {
                (self.notify)();
            }
        }
    }

    /// Waits for a job; `None` when the pool has gone.
    fn next_job(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            let mut job = state.short.pop_front();
            if job.is_none() && state.num_long_running + 1 < self.num_threads {
                job = state.long.pop_front();
                state.num_long_running += usize::from(job.is_some());
            }
            if let Some(job) = job {
                state.running.push(job.id);
                return Some(job);
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
