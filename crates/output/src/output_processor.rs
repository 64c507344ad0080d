//! Turns the engine's records into what a front end sends; there is one per front end.
//!
//! ```text
//! EngineCoreOutput ──▶ IncrementalDetokenizer ──▶ StopChecker ──▶ RequestDelta (merged until taken)
//!                                                     └──▶ abort wanted
//! ```
//!
//! Requests are named by their keys. A request exists here from [`OutputProcessor::add_request`] until its last delta
//! is taken or it is discarded. Records of other requests (whose stop string was found, or whose reader is gone) are
//! dropped and counted. Each call of [`OutputProcessor::take`] returns everything that is new since the previous one.
//! So a slow consumer gets fewer and larger pieces, never a queue, and `max_tokens` limits their size. A request whose
//! consumer cannot take anything now is put on [hold]; only its own output waits then.
//!
//! [hold]: OutputProcessor::hold

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use scheduler::{
    AddRequestError, EngineCoreOutput, FinishReason, PooledVector, PredictedDrafts, PromptLogprobs,
    RequestError, RequestKey, TokenLogprobs,
};

use crate::delivery::{Delivery, EventBatch};
use crate::detokenizer::{DetokenizeOptions, IncrementalDetokenizer};
use crate::error::OutputError;
use crate::logprobs::{LogprobsTracker, PositionLogprobs};
use crate::outbox::Outbox;
use crate::stop_checker::{StopChecker, StopStrings};
use crate::tokenizer::Tokenizer;
use crate::turn::{CallFinder, TurnReading};

/// How a request's output is turned into text.
#[derive(Debug, Clone)]
pub struct OutputOptions {
    /// How special tokens appear in the text; `None`: token ids only, no text.
    pub detokenize: Option<DetokenizeOptions>,
    /// Strings that end the request if they appear in the text.
    pub stop: Option<Arc<StopStrings>>,
    /// Whether the text includes the stop string or stop token that ended the request.
    pub include_stop_str_in_output: bool,
    /// A stop string that ends within the text of the first `min_tokens` tokens does not count.
    pub min_tokens: u32,
    /// If set, the text is parsed like this, and the request ends after the first whole call, but not before
    /// `min_tokens`.
    pub ends_after_call: Option<Arc<TurnReading>>,
    /// How the caller takes the output.
    pub delivery: Delivery,
    /// How many tokens go out at a time; 0 and 1: each as it comes. The first token goes out alone, and the last ones go
    /// out with the end. Text that is not certain yet makes no event of its own, so an event may hold more.
    pub stream_interval: u32,
    /// Whether tokens come with log-probabilities; see [`OutputProcessor::add_logprobs`]. Not possible with
    /// [`Delivery::Events`], [`Delivery::Turn`] or [`Delivery::Response`], which have no place for them.
    pub logprobs: bool,
    /// Whether the prompt does; see [`OutputProcessor::add_prompt_logprobs`]. Not possible with these either.
    pub prompt_logprobs: bool,
}

impl Default for OutputOptions {
    fn default() -> Self {
        Self {
            detokenize: Some(DetokenizeOptions::default()),
            stop: None,
            include_stop_str_in_output: false,
            min_tokens: 0,
            ends_after_call: None,
            delivery: Delivery::Deltas,
            stream_interval: 1,
            logprobs: false,
            prompt_logprobs: false,
        }
    }
}

/// What stopped a request, in addition to its finish reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// A stop token.
    Token(i32),
    /// A stop string.
    Text(String),
    /// The output repeated itself.
    Repetition,
}

/// The stop reason of an output that repeated itself, where others have a stop string or token.
pub const REPETITION_DETECTED: &str = "repetition_detected";

/// Why a request failed outside the scheduler: it never had the request, or cannot end it any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestFailure {
    /// An engine in another process refused it.
    #[error(transparent)]
    Refused(AddRequestError),
    /// The engine is gone.
    #[error("{0}")]
    EngineDied(Arc<str>),
}

/// What is new for one request since the last call.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestDelta {
    /// The request's key.
    pub key: RequestKey,
    /// Text that became certain.
    pub new_text: String,
    /// Tokens, whether or not their text is shown.
    pub new_token_ids: Vec<i32>,
    /// The log-probabilities of each of these positions; empty unless requested.
    pub new_logprobs: Vec<PositionLogprobs>,
    /// The log-probabilities of prompt positions, in order; the last ones come with the first token.
    pub new_prompt_logprobs: Vec<PromptLogprobs>,
    /// The vector of its prompt, if the request ends with one.
    pub pooled: Option<Box<[f32]>>,
    /// Number of tool calls in an answer that is [parsed](Delivery::Turn); set at its end.
    pub num_calls: u32,
    /// Set on the last delta.
    pub finish_reason: Option<FinishReason>,
    /// What stopped it; `None` for EOS and for other finish reasons.
    pub stop_reason: Option<StopReason>,
    /// Why it failed; [`RequestError::None`] unless the finish reason is `Error`.
    pub error: RequestError,
    /// Why it failed, if the cause is outside the scheduler; the finish reason is `Error` then.
    pub failure: Option<RequestFailure>,
    /// Number of prompt tokens that are computed, if that is new and was requested; else 0.
    pub num_computed_prompt_tokens: u32,
    /// Number of prompt tokens found in the prefix cache.
    pub num_cached_tokens: u32,
    /// Drafts from the caller's prediction that were accepted so far.
    pub num_accepted_prediction_tokens: u32,
    /// Drafts from the caller's prediction that were rejected so far.
    pub num_rejected_prediction_tokens: u32,
    /// When it was first scheduled (monotonic nanoseconds, 0 while unknown).
    pub first_scheduled_ns: u64,
    /// When its first token was made (monotonic nanoseconds, 0 while unknown).
    pub first_token_ns: u64,
    /// When its last record was made (monotonic nanoseconds, 0 while unknown).
    pub last_token_ns: u64,
}

/// What the caller must pass on to the engine after a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// A stop string, or the one call that was allowed, ended a request that the engine still runs.
    Stop(RequestKey),
    /// Why a request ended whose last record left that open.
    Settle {
        /// The request's key.
        key: RequestKey,
        /// `Stop`: at a stop string or at its one call; else the engine's own reason holds.
        reason: FinishReason,
    },
}

/// What [`OutputProcessor::take`] returns.
#[derive(Debug, Default, PartialEq)]
pub struct News {
    /// The deltas, in the order in which their requests got their first news.
    pub deltas: Vec<RequestDelta>,
    /// New text of requests that take it as events.
    pub events: EventBatch,
}

impl RequestDelta {
    fn empty(key: RequestKey) -> Self {
        Self {
            key,
            new_text: String::new(),
            new_token_ids: Vec::new(),
            new_logprobs: Vec::new(),
            new_prompt_logprobs: Vec::new(),
            pooled: None,
            num_calls: 0,
            finish_reason: None,
            stop_reason: None,
            error: RequestError::None,
            failure: None,
            num_computed_prompt_tokens: 0,
            num_cached_tokens: 0,
            num_accepted_prediction_tokens: 0,
            num_rejected_prediction_tokens: 0,
            first_scheduled_ns: 0,
            first_token_ns: 0,
            last_token_ns: 0,
        }
    }
}

#[derive(Debug)]
struct TrackedRequest {
    detokenizer: Option<IncrementalDetokenizer>,
    stop_checker: Option<StopChecker>,
    call_finder: Option<Box<CallFinder>>,
    include_stop_str_in_output: bool,
    min_tokens: u32,
    num_output_tokens: u32,
    logprobs: Option<Box<LogprobsTracker>>,
    wants_prompt_logprobs: bool,
    delta: RequestDelta,
    outbox: Outbox,
}

/// Turns records into deltas. Only its owner may call it.
#[derive(Debug, Default)]
pub struct OutputProcessor {
    tokenizer: Option<Arc<Tokenizer>>,
    /// Boxed, so that a growing table moves little: a front end may get thousands of samples at once.
    requests: HashMap<RequestKey, Box<TrackedRequest>>,
    /// Keys of requests with news to be taken, in the order in which they got it.
    changed: Vec<RequestKey>,
    /// Requests that ended at a stop string or their one call, until the engine's last record arrives: they may have
    /// reached their length limit meanwhile.
    stopped: HashSet<RequestKey>,
    num_dropped: u64,
    scratch: String,
}

impl OutputProcessor {
    /// Without a tokenizer, deltas hold token ids only. The first call for a large vocabulary takes about 50 ms.
    #[must_use]
    pub fn new(tokenizer: Option<Arc<Tokenizer>>) -> Self {
        if let Some(tokenizer) = &tokenizer {
            // Build the table here, so that the first request does not wait for it.
            tokenizer.pieces();
        }
        Self { tokenizer, ..Self::default() }
    }

    /// Expect outputs for a key. The end of the prompt decides the spacing before the output's first token.
    ///
    /// # Errors
    /// The key is in use; a stop string is empty; or stop strings, or an end after a call, are wanted without text.
    pub fn add_request(
        &mut self,
        key: RequestKey,
        prompt_token_ids: &[u32],
        options: OutputOptions,
    ) -> Result<(), OutputError> {
        if self.requests.contains_key(&key) {
            return Err(OutputError::DuplicateKey { key: key.0 });
        }
        let detokenizer = self.tokenizer.as_ref().zip(options.detokenize).map(|(tokenizer, options)| {
            IncrementalDetokenizer::new(Arc::clone(tokenizer), prompt_token_ids, options)
        });
        if detokenizer.is_none() && (options.stop.is_some() || options.ends_after_call.is_some()) {
            return Err(OutputError::StopNeedsText);
        }
        let stop_checker =
            options.stop.map(|stop| StopChecker::new(stop, options.include_stop_str_in_output));
        let request = TrackedRequest {
            detokenizer,
            stop_checker,
            call_finder: options.ends_after_call.map(|reading| Box::new(CallFinder::new(&reading))),
            include_stop_str_in_output: options.include_stop_str_in_output,
            min_tokens: options.min_tokens,
            num_output_tokens: 0,
            logprobs: options.logprobs.then(Box::default),
            wants_prompt_logprobs: options.prompt_logprobs,
            delta: RequestDelta::empty(key),
            outbox: Outbox::new(options.delivery, options.stream_interval),
        };
        self.requests.insert(key, Box::new(request));
        Ok(())
    }

    /// Forget a request and drop its later records. Returns whether it was known.
    pub fn discard(&mut self, key: RequestKey) -> bool {
        // If it is in `changed`, `take` will skip it.
        self.requests.remove(&key).is_some()
    }

    /// Add the log-probabilities of a token whose record arrives later. Dropped unless the request asked for them.
    pub fn add_logprobs(&mut self, logprobs: TokenLogprobs) {
        let request = self.requests.get_mut(&logprobs.key);
        if let Some(tracker) = request.and_then(|request| request.logprobs.as_mut()) {
            tracker.push(logprobs);
        }
    }

    /// Add the log-probabilities of positions of a request's prompt. They go out with the first token, which arrives
    /// later. Dropped unless the request asked for them.
    pub fn add_prompt_logprobs(&mut self, logprobs: PromptLogprobs) {
        let request = self.requests.get_mut(&logprobs.key);
        if let Some(request) = request.filter(|request| request.wants_prompt_logprobs) {
            request.delta.new_prompt_logprobs.push(logprobs);
        }
    }

    /// Add the vector of a request, whose last record arrives later and goes out with it.
    pub fn add_pooled(&mut self, vector: PooledVector) {
        if let Some(request) = self.requests.get_mut(&vector.key) {
            request.delta.pooled = Some(vector.values);
        }
    }

    /// Process one record. The engine must get the result.
    pub fn process(&mut self, record: &EngineCoreOutput) -> Option<Verdict> {
        let was_stopped = record.finish_reason.is_some() && self.stopped.remove(&record.key);
        let settle = |found_stop| {
            let own = record.unsettled_reason()?;
            let reason = if found_stop { FinishReason::Stop } else { own };
            Some(Verdict::Settle { key: record.key, reason })
        };
        let request =
            self.requests.get_mut(&record.key).filter(|request| request.delta.finish_reason.is_none());
        let Some(request) = request else {
            self.num_dropped += 1;
            return settle(was_stopped);
        };
        if record.finish_reason == Some(FinishReason::Error) {
            request.outbox.end_piece(request.delta.new_text.len()); // text in front of an error goes out in front of it
        }
        let found_stop = request.process(record, self.tokenizer.as_deref(), &mut self.scratch);
        let delta = &request.delta;
        request.outbox.note(record.new_token_id >= 0, delta.finish_reason.is_some(), delta.new_text.len());
        if request.queue_up() {
            self.changed.push(record.key);
        }
        if !found_stop || record.finish_reason.is_some() {
            return settle(found_stop);
        }
        self.stopped.insert(record.key);
        Some(Verdict::Stop(record.key))
    }

    /// Keep a request's news, merged, until [`Self::release`], because its reader is busy.
    pub fn hold(&mut self, key: RequestKey) {
        if let Some(request) = self.requests.get_mut(&key) {
            request.outbox.is_held = true;
        }
    }

    /// End [`Self::hold`]. Returns whether there is news to be taken.
    pub fn release(&mut self, key: RequestKey) -> bool {
        let Some(request) = self.requests.get_mut(&key) else { return false };
        request.outbox.is_held = false;
        if request.queue_up() {
            self.changed.push(key);
        }
        request.outbox.is_queued
    }

    /// Let tokens go out that wait for others of their [interval](OutputOptions::stream_interval), because no others may
    /// follow.
    pub fn flush(&mut self) {
        for (&key, request) in &mut self.requests {
            request.outbox.flush(request.delta.new_text.len());
            if request.queue_up() {
                self.changed.push(key);
            }
        }
    }

    /// End a request that will get no more records. Text that was held back is shown.
    pub fn fail(&mut self, key: RequestKey, failure: RequestFailure) {
        let timestamp_ns = self.requests.get(&key).map_or(0, |request| request.delta.last_token_ns);
        self.process(&EngineCoreOutput {
            key,
            new_token_id: -1,
            finish_reason: Some(FinishReason::Error),
            stop_reason: -1,
            num_cached_tokens: 0,
            first_scheduled_ns: 0,
            timestamp_ns,
            error: RequestError::None,
            predicted: PredictedDrafts::NONE,
        });
        // A request that has already ended at a stop string keeps that end.
        if let Some(request) = self.requests.get_mut(&key)
            && request.delta.finish_reason == Some(FinishReason::Error)
            && request.delta.error == RequestError::None
        {
            request.delta.failure.get_or_insert(failure);
        }
    }

    /// Take the news of all requests that have some and are not on hold, in the order in which they got it. Requests
    /// that have ended with it are forgotten.
    pub fn take(&mut self) -> News {
        let mut news = News::default();
        for key in self.changed.drain(..) {
            let Some(request) = self.requests.get_mut(&key).filter(|request| request.outbox.is_queued) else {
                continue;
            };
            let outbox = &mut request.outbox;
            outbox.is_queued = false;
            if outbox.is_held {
                continue; // its release puts it back
            }
            let is_finished = request.delta.finish_reason.is_some();
            let pieces = outbox.take();
            let text = &mut request.delta.new_text;
            match &mut outbox.delivery {
                Delivery::Deltas | Delivery::AtTheEnd => {}
                Delivery::Events(template) => {
                    if pieces.end() > 0 {
                        news.events.push(key, template, pieces.of(text));
                        text.drain(..pieces.end());
                    }
                    if !is_finished {
                        continue;
                    }
                }
                Delivery::Turn(turn) => {
                    let rest = is_finished.then(|| &text[pieces.end()..]);
                    news.events.push_turn(key, turn, pieces.of(text), rest);
                    request.delta.num_calls = turn.num_calls();
                    if !is_finished {
                        text.drain(..pieces.end());
                        continue;
                    }
                    text.clear();
                }
                Delivery::Response(response) => {
                    let rest = is_finished.then(|| &text[pieces.end()..]);
                    news.events.push_response(key, response, pieces.of(text), rest);
                    if !is_finished {
                        text.drain(..pieces.end());
                        continue;
                    }
                    text.clear();
                }
            }
            news.deltas.push(request.take_delta());
            if is_finished {
                self.requests.remove(&key);
            }
        }
        news
    }

    /// Number of requests that will still give deltas.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there are no such requests.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Number of records that were dropped because their requests had been discarded.
    #[must_use]
    pub fn num_dropped(&self) -> u64 {
        self.num_dropped
    }
}

impl TrackedRequest {
    /// Whether the request must be appended to `changed`: it has news, its caller waits for that, and it is not in the
    /// queue yet.
    fn queue_up(&mut self) -> bool {
        self.outbox.queue_up(self.delta.finish_reason.is_some())
    }

    /// Process a record; returns whether its text has reached a stop string or the end of the one call that is allowed.
    fn process(
        &mut self,
        record: &EngineCoreOutput,
        tokenizer: Option<&Tokenizer>,
        scratch: &mut String,
    ) -> bool {
        let delta = &mut self.delta;
        // The first record holds them.
        delta.num_cached_tokens = delta.num_cached_tokens.max(record.num_cached_tokens);
        delta.first_scheduled_ns = delta.first_scheduled_ns.max(record.first_scheduled_ns);
        delta.last_token_ns = record.timestamp_ns;
        delta.num_accepted_prediction_tokens += u32::from(record.predicted.num_accepted);
        delta.num_rejected_prediction_tokens += u32::from(record.predicted.num_rejected);
        if let Some(num_computed) = record.prompt_progress() {
            delta.num_computed_prompt_tokens = num_computed;
            return false;
        }

        scratch.clear();
        // EOS and stop tokens belong to the tokens, not to the text.
        let is_stop_token = record.finish_reason == Some(FinishReason::Stop);
        if let Ok(token_id) = u32::try_from(record.new_token_id) {
            self.num_output_tokens += 1;
            if delta.first_token_ns == 0 {
                delta.first_token_ns = record.timestamp_ns;
            }
            delta.new_token_ids.push(record.new_token_id);
            if let Some(logprobs) = &mut self.logprobs {
                let tokenizer = tokenizer.filter(|_| self.detokenizer.is_some());
                delta.new_logprobs.push(logprobs.take(record.new_token_id, tokenizer));
            }
            if (!is_stop_token || self.include_stop_str_in_output)
                && let Some(detokenizer) = &mut self.detokenizer
            {
                detokenizer.push(token_id, scratch);
            }
        }
        if record.finish_reason.is_some()
            && let Some(detokenizer) = &mut self.detokenizer
        {
            detokenizer.finish(scratch);
        }
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.advance(scratch);
        }
        let mut found = None;
        let is_armed = self.min_tokens == 0 || self.num_output_tokens > self.min_tokens;
        let num_bytes_before = delta.new_text.len();
        match &mut self.stop_checker {
            Some(stop_checker) => {
                found = stop_checker.push(scratch, is_armed, &mut delta.new_text);
                if found.is_none() && record.finish_reason.is_some() {
                    stop_checker.finish(&mut delta.new_text);
                }
            }
            None => delta.new_text.push_str(scratch),
        }
        let has_called =
            self.call_finder.as_mut().is_some_and(|finder| finder.read(&delta.new_text[num_bytes_before..]));
        // An end for another reason, such as an error, stays what it is.
        let may_end = record.finish_reason.is_none_or(FinishReason::may_be_a_stop);
        if found.is_none() && has_called && is_armed && may_end {
            delta.finish_reason = Some(FinishReason::Stop);
            return true;
        }
        if let Some(index) = found {
            delta.finish_reason = Some(FinishReason::Stop);
            let stop = self.stop_checker.as_ref().and_then(|stop_checker| stop_checker.stop().text(index));
            delta.stop_reason = stop.map(|text| StopReason::Text(text.to_owned()));
            return true;
        }
        delta.finish_reason = record.finish_reason;
        delta.error = record.error;
        delta.stop_reason = match record.finish_reason {
            Some(FinishReason::Repetition) => Some(StopReason::Repetition),
            Some(_) if record.stop_reason >= 0 => Some(StopReason::Token(record.stop_reason)),
            _ => None,
        };
        false
    }

    fn take_delta(&mut self) -> RequestDelta {
        let next = RequestDelta {
            num_cached_tokens: self.delta.num_cached_tokens,
            num_accepted_prediction_tokens: self.delta.num_accepted_prediction_tokens,
            num_rejected_prediction_tokens: self.delta.num_rejected_prediction_tokens,
            first_scheduled_ns: self.delta.first_scheduled_ns,
            first_token_ns: self.delta.first_token_ns,
            last_token_ns: self.delta.last_token_ns,
            ..RequestDelta::empty(self.delta.key)
        };
        std::mem::replace(&mut self.delta, next)
    }
}
