//! `TokenizerPool`: tokenises long texts in threads of its own, so that a prompt of a hundred thousand tokens does not
//! delay other requests.
//!
//! ```text
//! submit ──▶ short ─┐                        ┌──▶ done ──▶ take
//!        └─▶ long  ─┴──▶ a few worker threads ┘ └─▶ notify
//! ```
//!
//! A worker takes short texts first, and at least one worker is never busy with a long text, so that short texts pass a
//! queue of long ones. One worker tokenises a whole text: where a text could be split depends on the tokenizer's rules,
//! and wrong ids would be worse than a longer wait. The total size of the texts that wait or are being tokenised is
//! limited. Threads start with the first text, sleep without work, and end with the pool.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::error::OutputError;
use crate::tokenizer::Tokenizer;

/// Most threads of a pool.
pub const MAX_TOKENIZER_THREADS: usize = 4;
/// Texts longer than this (about ten milliseconds of work) wait behind shorter ones.
pub const LONG_TEXT_BYTES: usize = 32 << 10;
/// Most bytes of all texts that wait or are being tokenised.
pub const MAX_WAITING_TEXT_BYTES: usize = 256 << 20;
/// Workers have a lower priority than the threads that stream: the event loop, the transport, the engine.
const NICENESS: i32 = 5;

/// A text that has been tokenised.
#[derive(Debug)]
pub struct EncodedText {
    /// The number that [`TokenizerPool::submit`] returned.
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
    /// Signals a job for a worker, or the end.
    work: Condvar,
    notify: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct State {
    short: VecDeque<Job>,
    long: VecDeque<Job>,
    /// Jobs in progress whose callers still wait.
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
    /// Make a pool of at most `num_threads` workers (2 to [`MAX_TOKENIZER_THREADS`]). A worker calls `notify` when a
    /// text is done.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        num_threads: usize,
        notify: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let shared = Shared {
            tokenizer,
            // At least two, so that long texts never occupy all of them.
            num_threads: num_threads.clamp(2, MAX_TOKENIZER_THREADS),
            state: Mutex::default(),
            work: Condvar::new(),
            notify: Box::new(notify),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Submit a text; returns the number that its result carries.
    ///
    /// # Errors
    /// Too much text waits already, or no thread can be started.
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

    /// Drop a text whose caller no longer waits: it is not begun, or its result is dropped.
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

    /// Take the texts that were finished since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<EncodedText> {
        std::mem::take(&mut self.shared.lock().done)
    }

    /// Total bytes of the texts that wait or are being tokenised.
    #[must_use]
    pub fn num_waiting_bytes(&self) -> usize {
        self.shared.lock().num_bytes
    }

    /// Number of threads that were started.
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
        // The workers end by themselves; one that is tokenising ends after its text.
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

    /// Run a worker.
    fn work(&self) {
        // Some sandboxes forbid this; the workers then run with normal priority.
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
            // Other workers may have skipped a long text because this one was long.
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

    /// Wait for a job; `None` when the pool has been dropped.
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
