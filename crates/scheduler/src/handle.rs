//! `EngineHandle`: the shared side of the scheduler. Any thread adds, aborts and reads counters, without a lock.

use std::{
    sync::{Arc, OnceLock},
    thread::{self, Thread, ThreadId},
    time::{Duration, Instant},
};

use kvblocks::{BlockHash, ChainHasher};
use thiserror::Error;

use crate::{
    config::SchedulerConfig,
    inbox::Inbox,
    kv_cache_manager::hash_blocks,
    output::RequestKey,
    request::NewRequest,
    stats::{Counters, SchedulerStats},
    step_buffers::MAX_STOP_TOKEN_IDS,
    sync::{AtomicU32, AtomicU64, Ordering, fence},
};

/// Output tokens that memory is reserved for when a request is handed in.
pub(crate) const RESERVED_OUTPUT_TOKENS: u32 = 4096;

/// Why a request was not taken in. Each carries the numbers.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum AddRequestError {
    /// Nothing to compute.
    #[error("the prompt has no tokens; at least 1 is needed")]
    EmptyPrompt,
    /// No room for even one output token.
    #[error(
        "maximum context length is {max_model_len} tokens, however your prompt contains {num_prompt_tokens} input tokens; at most {} fit",
        max_model_len.saturating_sub(1)
    )]
    PromptTooLong {
        /// Prompt.
        num_prompt_tokens: u32,
        /// Limit.
        max_model_len: u32,
    },
    /// More blocks than there are.
    #[error(
        "the request needs up to {needed_blocks} KV blocks of {block_size} tokens, but there are only {usable_blocks}; lower max_tokens or enlarge the KV cache"
    )]
    NeverFits {
        /// Blocks for prompt and `max_tokens`.
        needed_blocks: u32,
        /// Blocks in the pool.
        usable_blocks: u32,
        /// Tokens per block.
        block_size: u32,
    },
    /// A prompt that one step cannot hold while chunking is off.
    #[error(
        "the prompt has {num_prompt_tokens} tokens, but without chunked prefill at most max_num_batched_tokens = {max_num_batched_tokens} fit into a step; enable chunked prefill or raise the budget"
    )]
    PromptExceedsBudget {
        /// Prompt.
        num_prompt_tokens: u32,
        /// Budget of a step.
        max_num_batched_tokens: u32,
    },
    /// More stop ids than a row can mask.
    #[error("stop_token_ids has {got} entries, at most {MAX_STOP_TOKEN_IDS} are possible")]
    TooManyStopTokenIds {
        /// Given.
        got: usize,
    },
    /// A negative token id.
    #[error("token id {token_id} at position {position} of the prompt is negative")]
    NegativeTokenId {
        /// The id.
        token_id: i32,
        /// Where.
        position: usize,
    },
    /// The queue is full: a value, not a failure.
    #[error("the queue is full: {limit} requests are waiting; try again later")]
    QueueFull {
        /// `max_num_queued_reqs`.
        limit: u32,
    },
}

/// What travels through the inbox.
#[derive(Debug)]
pub(crate) enum Message {
    Add(Box<(NewRequest, Vec<BlockHash>)>),
    AbortId(Box<str>),
    AbortKey(RequestKey),
}

/// What owner and handles share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: SchedulerConfig,
    pub(crate) hasher: ChainHasher,
    pub(crate) inbox: Inbox<Message>,
    /// Requests that wait (in the inbox or the waiting queue) and were never admitted.
    pub(crate) num_queued: AtomicU32,
    pub(crate) counters: Counters,
    next_key: AtomicU64,
    /// `wake` calls seen by the waiting thread.
    wakes: AtomicU32,
    /// The thread that parks in `wait_for_work`.
    waiter: OnceLock<Thread>,
}

/// Cheap to clone; `Send + Sync`.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    pub(crate) shared: Arc<Shared>,
}

/// Another thread than the first that waited.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("only the scheduler's thread ({owner:?}) waits for work, not {caller:?}")]
pub struct NotTheWaiter {
    /// Who waits.
    pub owner: ThreadId,
    /// Who called.
    pub caller: ThreadId,
}

impl EngineHandle {
    pub(crate) fn new(config: SchedulerConfig, hasher: ChainHasher) -> Self {
        Self {
            shared: Arc::new(Shared {
                config,
                hasher,
                inbox: Inbox::new(),
                num_queued: AtomicU32::new(0),
                counters: Counters::default(),
                next_key: AtomicU64::new(1),
                wakes: AtomicU32::new(0),
                waiter: OnceLock::new(),
            }),
        }
    }

    /// A fresh name for a request.
    #[must_use]
    pub fn new_key(&self) -> RequestKey {
        // Relaxed: only uniqueness counts.
        RequestKey(self.shared.next_key.fetch_add(1, Ordering::Relaxed))
    }

    /// Hand a request in. The prompt's blocks are hashed here, on the caller's thread.
    ///
    /// # Errors
    /// Why it was not taken; nothing has changed then.
    pub fn add_request(&self, mut request: NewRequest) -> Result<(), AddRequestError> {
        let config = &self.shared.config;
        check_request(config, &request)?;
        self.reserve_place()?;
        // What the step path will append to is made large enough here: it allocates nothing later.
        let num_prompt = request.prompt_token_ids.len() as u32;
        // Up to a point: an answer that may be very long and seldom is grows as it comes.
        let room =
            request.params.max_tokens.min(config.max_model_len - num_prompt).min(RESERVED_OUTPUT_TOKENS);
        request.prompt_token_ids.reserve_exact(room as usize);
        let mut block_hashes = Vec::new();
        if config.enable_prefix_caching {
            let total_blocks = (num_prompt + room).div_ceil(config.block_size) as usize;
            block_hashes = hash_blocks(
                &self.shared.hasher,
                config.block_size,
                &request.prompt_token_ids,
                &request.extra_keys,
            );
            block_hashes.reserve_exact(total_blocks - block_hashes.len());
        }
        self.shared.inbox.push(Message::Add(Box::new((request, block_hashes))));
        self.wake();
        Ok(())
    }

    /// Abort by id; unknown and finished ids are ignored. Each aborted request emits one final output.
    pub fn abort_requests<'a>(&self, request_ids: impl IntoIterator<Item = &'a str>) {
        for request_id in request_ids {
            self.shared.inbox.push(Message::AbortId(request_id.into()));
        }
        self.wake();
    }

    /// Abort by key.
    pub fn abort_key(&self, key: RequestKey) {
        self.shared.inbox.push(Message::AbortKey(key));
        self.wake();
    }

    /// Wake the thread in `wait_for_work`, now or at its next call.
    pub fn wake(&self) {
        // Release: what happened before is seen by the Acquire in `wait_for_work`.
        self.shared.wakes.fetch_add(1, Ordering::Release);
        // SeqCst fence: pairs with the one in `wait_for_work`. Either the waiter registered before this
        // load and is unparked, or it sees the new count before it parks.
        fence(Ordering::SeqCst);
        if let Some(waiter) = self.shared.waiter.get() {
            waiter.unpark();
        }
    }

    /// Park until there is a message, `wake` was called, or `timeout` is over. `true` when woken.
    ///
    /// # Errors
    /// When another thread than the first that waited calls it.
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
            match deadline {
                None => thread::park(),
                Some(deadline) => match deadline.checked_duration_since(Instant::now()) {
                    Some(left) if !left.is_zero() => thread::park_timeout(left),
                    _ => return Ok(false),
                },
            }
        }
    }

    /// All counters.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        self.shared.counters.read()
    }

    /// Outputs that wait for room in the egress. Whoever makes room wakes the scheduler.
    #[must_use]
    pub fn num_held_back(&self) -> u64 {
        self.shared.counters.num_held_back.load(Ordering::Relaxed)
    }

    /// Requests that were handed in and never admitted yet.
    #[must_use]
    pub fn num_queued(&self) -> u32 {
        self.shared.num_queued.load(Ordering::Relaxed)
    }

    /// The scheduler's numbers.
    #[must_use]
    pub fn config(&self) -> &SchedulerConfig {
        &self.shared.config
    }

    fn reserve_place(&self) -> Result<(), AddRequestError> {
        let limit = self.shared.config.max_num_queued_reqs;
        // Relaxed: the count bounds memory; the message itself is ordered by the inbox.
        self.shared
            .num_queued
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |queued| {
                (queued < limit).then_some(queued + 1)
            })
            .map(|_| ())
            .map_err(|_| AddRequestError::QueueFull { limit })
    }
}

fn check_request(config: &SchedulerConfig, request: &NewRequest) -> Result<(), AddRequestError> {
    let prompt = &request.prompt_token_ids;
    if prompt.is_empty() {
        return Err(AddRequestError::EmptyPrompt);
    }
    // A request that only scores its prompt needs no room for an output token.
    let longest_prompt = config.max_model_len as usize - usize::from(request.params.max_tokens > 0);
    let num_prompt_tokens = prompt.len().min(u32::MAX as usize) as u32;
    if prompt.len() > longest_prompt {
        return Err(AddRequestError::PromptTooLong {
            num_prompt_tokens,
            max_model_len: config.max_model_len,
        });
    }
    if let Some(position) = prompt.iter().position(|&token_id| token_id < 0) {
        return Err(AddRequestError::NegativeTokenId { token_id: prompt[position], position });
    }
    if !config.enable_chunked_prefill && num_prompt_tokens > config.max_num_batched_tokens {
        let max_num_batched_tokens = config.max_num_batched_tokens;
        return Err(AddRequestError::PromptExceedsBudget { num_prompt_tokens, max_num_batched_tokens });
    }
    let longest = num_prompt_tokens.saturating_add(request.params.max_tokens).min(config.max_model_len);
    let (needed_blocks, usable_blocks) = (longest.div_ceil(config.block_size), config.num_blocks - 1);
    if needed_blocks > usable_blocks {
        return Err(AddRequestError::NeverFits {
            needed_blocks,
            usable_blocks,
            block_size: config.block_size,
        });
    }
    let stop_ids = request.params.stop_token_ids.len();
    if stop_ids > MAX_STOP_TOKEN_IDS {
        return Err(AddRequestError::TooManyStopTokenIds { got: stop_ids });
    }
    Ok(())
}
