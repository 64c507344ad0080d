//! `EngineHandle`: the shared side of the scheduler. Any thread can add and abort requests and read counters, without a
//! lock.

pub(crate) mod inbox;

use std::{
    hash::{BuildHasher, RandomState},
    sync::{Arc, OnceLock},
    thread::{self, Thread, ThreadId},
    time::{Duration, Instant},
};

use drafting::History;
use kvblocks::{BlockHash, ChainHasher, SharedBlocks};
use thiserror::Error;

use crate::{
    clock::monotonic_ns,
    config::SchedulerConfig,
    grammar::{GrammarCompiler, GrammarWork},
    handle::inbox::Inbox,
    kv_cache_manager::{extra_keys::ExtraKeys, hash_blocks},
    metrics::{
        Metrics, MetricsSnapshot,
        stats::{Counters, SchedulerStats},
    },
    output::{FinishReason, RequestError, RequestKey},
    request::{
        NewRequest,
        limits::{AddRequestError, RequestLimits},
    },
    sync::{AtomicU32, AtomicU64, Ordering, fence},
};

/// Output tokens for which memory is reserved when a request is submitted.
pub(crate) const RESERVED_OUTPUT_TOKENS: u32 = 4096;

/// What the submitting thread prepares from a request.
#[derive(Clone, Debug)]
pub(crate) struct PromptWork {
    /// The hash of each full block; empty without prefix caching.
    pub(crate) block_hashes: Vec<BlockHash>,
    /// The source of its drafts; `None`: the request gets no drafts.
    pub(crate) history: Option<Box<History>>,
    /// Its grammar; `None` if it has none, or if there is no compiler yet.
    pub(crate) grammar: Option<Arc<dyn GrammarWork>>,
}

/// A message in the inbox.
#[derive(Debug)]
pub(crate) enum Message {
    /// Requests that enter together, in this order, with what was prepared from their prompts.
    Add {
        requests: Vec<(NewRequest, PromptWork)>,
        /// When they were submitted (monotonic nanoseconds).
        since_ns: u64,
    },
    AbortId(Box<str>),
    AbortKey(RequestKey),
    StopKey(RequestKey),
    GrammarReady(RequestKey),
    GrammarFailed(RequestKey, RequestError),
}

/// The state that the owner and all handles share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: SchedulerConfig,
    pub(crate) hasher: ChainHasher,
    blocks: Arc<SharedBlocks>,
    pub(crate) inbox: Inbox<Message>,
    /// Requests that wait, in the inbox or in the queue, and were never admitted.
    pub(crate) num_queued: AtomicU32,
    /// The tokens of their prompts.
    pub(crate) num_queued_tokens: AtomicU64,
    /// When the first of them will have waited too long (monotonic nanoseconds); 0 = never. Written by the owner.
    pub(crate) next_deadline_ns: AtomicU64,
    pub(crate) counters: Counters,
    pub(crate) metrics: Metrics,
    next_key: AtomicU64,
    /// Makes the seeds of hashes over drafts, so that no client knows which tokens or salts collide.
    draft_seeds: RandomState,
    /// Number of `wake` calls.
    wakes: AtomicU32,
    /// The thread that parks in `wait_for_work`.
    waiter: OnceLock<Thread>,
    /// The compiler of grammars.
    grammar_compiler: OnceLock<Box<dyn GrammarCompiler>>,
}

/// Cheap to clone; `Send + Sync`.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    pub(crate) shared: Arc<Shared>,
}

/// `wait_for_work` was called by another thread than at first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("only the scheduler's thread ({owner:?}) waits for work, not {caller:?}")]
pub struct NotTheWaiter {
    /// The thread that waited first.
    pub owner: ThreadId,
    /// The thread that called now.
    pub caller: ThreadId,
}

impl EngineHandle {
    pub(crate) fn new(config: SchedulerConfig, hasher: ChainHasher, blocks: Arc<SharedBlocks>) -> Self {
        Self {
            shared: Arc::new(Shared {
                metrics: Metrics::new(&config),
                config,
                hasher,
                blocks,
                inbox: Inbox::new(),
                num_queued: AtomicU32::new(0),
                num_queued_tokens: AtomicU64::new(0),
                next_deadline_ns: AtomicU64::new(0),
                counters: Counters::default(),
                next_key: AtomicU64::new(1),
                draft_seeds: RandomState::new(),
                wakes: AtomicU32::new(0),
                waiter: OnceLock::new(),
                grammar_compiler: OnceLock::new(),
            }),
        }
    }

    /// A new key for a request.
    #[must_use]
    pub fn new_key(&self) -> RequestKey {
        // Relaxed: keys only have to be unique.
        RequestKey(self.shared.next_key.fetch_add(1, Ordering::Relaxed))
    }

    /// Submit a request. The caller's thread hashes the prompt's blocks and builds the index for drafts.
    ///
    /// # Errors
    /// The request was refused; says why. Nothing has changed then.
    pub fn add_request(&self, request: NewRequest) -> Result<(), AddRequestError> {
        self.add_requests(vec![request])
    }

    /// Submit requests that the scheduler takes together and in this order, or not at all: a request and those that
    /// fork it.
    ///
    /// # Errors
    /// One of them was refused; says why the first such request was. Nothing has changed then.
    pub fn add_requests(&self, mut requests: Vec<NewRequest>) -> Result<(), AddRequestError> {
        let limits = RequestLimits::of(&self.shared.config);
        for request in &requests {
            limits.check(&request.prompt_token_ids, &request.params)?;
            self.check_inputs(request)?;
            let (beam_width, got) = (request.params.beam_width, requests.len());
            if beam_width > 0 && beam_width != got as i64 {
                return Err(AddRequestError::WrongNumberOfBeams { beam_width, got });
            }
        }
        self.reserve(&requests).inspect_err(|error| self.shared.metrics.count_rejection(error))?;
        let since_ns = monotonic_ns();
        let mut message: Vec<(NewRequest, PromptWork)> = Vec::with_capacity(requests.len());
        for mut request in requests.drain(..) {
            let room = self.reserve_output(&mut request);
            // Forks in one message mostly have the same prompt as the request before them.
            let same = message.last().filter(|(last, _)| {
                last.prompt_token_ids == request.prompt_token_ids
                    && last.extra_keys == request.extra_keys
                    && last.prediction == request.prediction
            });
            let mut work = match same {
                Some((_, work)) => work.clone(),
                None => self.prepare_prompt(&request, room),
            };
            if self.shared.config.enable_prefix_caching {
                let total_blocks =
                    (request.prompt_token_ids.len() + room).div_ceil(self.shared.config.block_size as usize);
                work.block_hashes.reserve_exact(total_blocks - work.block_hashes.len());
            }
            work.grammar = self.begin_grammar(&request);
            message.push((request, work));
        }
        self.shared.inbox.push(Message::Add { requests: message, since_ns });
        self.wake();
        Ok(())
    }

    /// Where a multimodal input is computed as a whole: refuse one that never could be.
    fn check_inputs(&self, request: &NewRequest) -> Result<(), AddRequestError> {
        let config = &self.shared.config;
        if !config.disable_chunked_mm_input {
            return Ok(());
        }
        let (most, num_prompt_tokens) = (config.longest_sure_chunk(), request.prompt_token_ids.len());
        match request.extra_keys.uncomputable(most, num_prompt_tokens) {
            None => Ok(()),
            Some(span) => Err(AddRequestError::InputNotWhole {
                offset: span.offset,
                length: span.length,
                most,
                num_prompt_tokens: num_prompt_tokens as u32,
            }),
        }
    }

    /// Reserve memory for what the step path will append, so that it allocates nothing later. There is a limit: an
    /// answer that may be very long, but seldom is, grows as it comes. Returns the number of tokens that fit.
    fn reserve_output(&self, request: &mut NewRequest) -> usize {
        let num_prompt = request.prompt_token_ids.len() as u32;
        let room = request.params.max_tokens.min(self.shared.config.max_model_len - num_prompt);
        let room = room.min(RESERVED_OUTPUT_TOKENS) as usize;
        request.prompt_token_ids.reserve_exact(room);
        room
    }

    fn prepare_prompt(&self, request: &NewRequest, room: usize) -> PromptWork {
        let config = &self.shared.config;
        let prompt = &request.prompt_token_ids[..];
        let block_hashes = if config.enable_prefix_caching {
            hash_blocks(&self.shared.hasher, config.block_size, prompt, &request.extra_keys)
        } else {
            Vec::new()
        };
        let history =
            config.drafter.as_ref().filter(|drafter| request.may_have_drafts(drafter)).map(|drafter| {
                let prediction = request.prediction.as_deref().unwrap_or_default();
                let num_tokens = prompt.len() + room;
                let seed = self.shared.draft_seeds.hash_one(&request.extra_keys);
                Box::new(History::new(drafter, prompt, prediction, num_tokens, seed))
            });
        PromptWork { block_hashes, history, grammar: None }
    }

    /// Set the compiler for grammars; it starts on each grammar when its request is submitted. Only the first call has
    /// an effect.
    pub fn compile_grammars_with(&self, compiler: Box<dyn GrammarCompiler>) {
        let _ = self.shared.grammar_compiler.set(compiler);
    }

    fn begin_grammar(&self, request: &NewRequest) -> Option<Arc<dyn GrammarWork>> {
        let (compiler, spec) = self.shared.grammar_compiler.get().zip(request.grammar.as_ref())?;
        Some(compiler.begin(request.key, spec, request.params.eos_token_id.is_none()))
    }

    /// Report that the grammar of a request is compiled, so that the request may run. Ignored if the request does not
    /// wait for one.
    pub fn grammar_ready(&self, key: RequestKey) {
        self.shared.inbox.push(Message::GrammarReady(key));
        self.wake();
    }

    /// Report that the grammar of a request cannot be compiled; the request ends with an error.
    pub fn grammar_failed(&self, key: RequestKey) {
        self.shared.inbox.push(Message::GrammarFailed(key, RequestError::GrammarFailed));
        self.wake();
    }

    /// Report that the grammar of a request cannot be compiled, because the tokenizer of the model cannot be read; the
    /// request ends with an error that blames the server.
    pub fn tokenizer_unreadable(&self, key: RequestKey) {
        self.shared.inbox.push(Message::GrammarFailed(key, RequestError::TokenizerUnreadable));
        self.wake();
    }

    /// Report that there is no room for the grammar of a request; the request ends with an error that says to try
    /// again.
    pub fn grammars_full(&self, key: RequestKey) {
        self.shared.inbox.push(Message::GrammarFailed(key, RequestError::GrammarsFull));
        self.wake();
    }

    /// The thread-safe side of the block pool: prefix look-ups, handing back references, counters.
    #[must_use]
    pub fn blocks(&self) -> &SharedBlocks {
        &self.shared.blocks
    }

    /// Number of a prompt's tokens that the prefix cache holds: a hint from any thread, for choosing between engines.
    #[must_use]
    pub fn prefix_hint(&self, token_ids: &[i32], extra_keys: &ExtraKeys) -> u32 {
        let config = &self.shared.config;
        if !config.enable_prefix_caching || token_ids.is_empty() {
            return 0;
        }
        let known = &token_ids[..token_ids.len() - 1];
        let hashes = hash_blocks(&self.shared.hasher, config.block_size, known, extra_keys);
        self.shared.blocks.prefix_hint(&hashes) as u32 * config.block_size
    }

    /// Abort requests by their ids; unknown and finished ids are ignored. Each aborted request gives one final output.
    pub fn abort_requests<'a>(&self, request_ids: impl IntoIterator<Item = &'a str>) {
        for request_id in request_ids {
            self.shared.inbox.push(Message::AbortId(request_id.into()));
        }
        self.wake();
    }

    /// Abort a request by its key.
    pub fn abort_key(&self, key: RequestKey) {
        self.shared.inbox.push(Message::AbortKey(key));
        self.wake();
    }

    /// End a request whose text has reached a stop string. It counts as complete, and its last output says `stop`.
    pub fn stop_key(&self, key: RequestKey) {
        self.shared.inbox.push(Message::StopKey(key));
        self.wake();
    }

    /// Report why a request ended whose last output [left that open](crate::EngineCoreOutput::unsettled_reason): `Stop`
    /// if the front end found a stop string in the last text, else the reason of that output. Call this once for each
    /// such end; until then, no reason is counted for it.
    pub fn settle_end(&self, reason: FinishReason) {
        self.shared.metrics.settle_end(reason);
    }

    /// Wake the thread in `wait_for_work`, or let its next call return at once.
    pub fn wake(&self) {
        // Release: what happened before is visible after the Acquire in `wait_for_work`.
        self.shared.wakes.fetch_add(1, Ordering::Release);
        // SeqCst fence: pairs with the one in `wait_for_work`. Either the waiter registered before this
        // load and is unparked, or it sees the new count before it parks.
        fence(Ordering::SeqCst);
        if let Some(waiter) = self.shared.waiter.get() {
            waiter.unpark();
        }
    }

    /// Park until there is a message, `wake` was called, a request has waited too long in the queue, or `timeout` is
    /// over. Returns `false` in the last case.
    ///
    /// # Errors
    /// It is called by another thread than the first that waited.
    pub fn wait_for_work(
        &self,
        seen_wakes: &mut u32,
        timeout: Option<Duration>,
    ) -> Result<bool, NotTheWaiter> {
        let waiter = self.shared.waiter.get_or_init(thread::current);
        let caller = thread::current().id();
        if waiter.id() != caller {
            return Err(NotTheWaiter { owner: waiter.id(), caller });
        }
        // SeqCst fence: see `wake`.
        fence(Ordering::SeqCst);
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            // Acquire: pairs with the Release in `wake`.
            let wakes = self.shared.wakes.load(Ordering::Acquire);
            if wakes != *seen_wakes || !self.shared.inbox.is_empty() {
                *seen_wakes = wakes;
                return Ok(true);
            }
            let until_overdue = self.until_overdue();
            if until_overdue.is_some_and(|left| left.is_zero()) {
                return Ok(true);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            match until_overdue.into_iter().chain(left).min() {
                None => thread::park(),
                Some(left) => thread::park_timeout(left),
            }
        }
    }

    /// The time left until the first waiting request has waited too long, if there is a limit.
    fn until_overdue(&self) -> Option<Duration> {
        // Relaxed: the owner wrote it, and only the owner parks.
        match self.shared.next_deadline_ns.load(Ordering::Relaxed) {
            0 => None,
            due_ns => Some(Duration::from_nanos(due_ns.saturating_sub(monotonic_ns()))),
        }
    }

    /// All counters.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        let mut stats = self.shared.counters.read();
        self.shared.metrics.add_settled(&mut stats);
        stats
    }

    /// All metrics.
    #[must_use]
    pub fn metrics(&self) -> MetricsSnapshot {
        let mut metrics = self.shared.metrics.snapshot(&self.stats());
        metrics.counters.push(("num_queued".into(), self.num_queued().into()));
        metrics.counters.push(("num_queued_tokens".into(), self.num_queued_tokens()));
        metrics
    }

    /// Outputs that wait for room in the egress. When the consumer makes room, it wakes the scheduler.
    #[must_use]
    pub fn num_held_back(&self) -> u64 {
        self.shared.counters.num_held_back.load(Ordering::Relaxed)
    }

    /// Requests that were submitted and never admitted yet.
    #[must_use]
    pub fn num_queued(&self) -> u32 {
        self.shared.num_queued.load(Ordering::Relaxed)
    }

    /// The tokens of their prompts; forks have none of their own.
    #[must_use]
    pub fn num_queued_tokens(&self) -> u64 {
        self.shared.num_queued_tokens.load(Ordering::Relaxed)
    }

    /// Whether there is work, as far as this thread can see: an unread message, a running request that is not paused, or
    /// a step that was scheduled and not updated.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        let stats = self.stats();
        !self.shared.inbox.is_empty()
            || (stats.num_running > 0 && stats.is_paused == 0)
            || stats.last_updated_step < stats.num_steps
    }

    /// The scheduler's configuration.
    #[must_use]
    pub fn config(&self) -> &SchedulerConfig {
        &self.shared.config
    }

    /// Reserve places in the queue, for requests and for tokens; all or none.
    fn reserve(&self, requests: &[NewRequest]) -> Result<(), AddRequestError> {
        let (places, tokens) = (&self.shared.num_queued, &self.shared.num_queued_tokens);
        let limit = self.shared.config.max_num_queued_reqs;
        let wanted = u32::try_from(requests.len()).unwrap_or(u32::MAX);
        // Relaxed: the counts only limit memory; the inbox orders the message itself.
        places
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |queued| {
                queued.checked_add(wanted).filter(|&queued| queued <= limit)
            })
            .map_err(|queued| AddRequestError::QueueFull { queued, wanted, limit })?;
        let limit = self.shared.config.max_num_queued_tokens;
        let wanted_tokens: u64 = requests.iter().map(|request| u64::from(request.num_queued_tokens())).sum();
        tokens
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |queued| {
                let sum = queued + wanted_tokens;
                (limit == 0 || queued == 0 || sum <= limit).then_some(sum)
            })
            .map_err(|queued| {
                places.fetch_sub(wanted, Ordering::Relaxed);
                AddRequestError::QueueTokensFull { queued, wanted: wanted_tokens, limit }
            })?;
        Ok(())
    }
}
