//! From the engine's records to what a front end sends: one per front end.
//!
//! ```text
//! EngineCoreOutput ──▶ IncrementalDetokenizer ──▶ StopChecker ──▶ RequestDelta (merged until taken)
//!                                                     └──▶ abort wanted
//! ```
//!
//! Requests are named by their key. A request lives here from [`OutputProcessor::add_request`] until its last delta is taken
//! or it is discarded; records for other keys (a request whose stop string was found, whose reader has gone) are dropped
//! and counted. What is taken holds everything since the last [`OutputProcessor::take`], so a slow consumer gets fewer and
//! larger pieces, never a queue; `max_tokens` bounds their size. One that takes nothing now is put on [hold], and only its
//! own news waits.
//!
//! [hold]: OutputProcessor::hold

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use scheduler::{
    AddRequestError, EngineCoreOutput, FinishReason, PredictedDrafts, PromptLogprobs, RequestError,
    RequestKey, TokenLogprobs,
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
    /// How special tokens are shown; `None`: token ids only, no text.
    pub detokenize: Option<DetokenizeOptions>,
    /// Strings that end the request when they appear in the text.
    pub stop: Option<Arc<StopStrings>>,
    /// Show the stop string or stop token that ended the request.
    pub include_stop_str_in_output: bool,
    /// Stop strings do not count in the text of the first `min_tokens` tokens.
    pub min_tokens: u32,
    /// It ends behind the first whole call in its text, which is read like this. No earlier than its `min_tokens`.
    pub ends_after_call: Option<Arc<TurnReading>>,
    /// How its news is taken.
    pub delivery: Delivery,
    /// Its tokens go out so many at a time, or as they come (0 and 1). The first goes out alone, and the last with the
    /// end. Text that is not certain yet makes no event of its own, so a piece of events may hold more.
    pub stream_interval: u32,
    /// Its tokens come with log-probabilities; see [`OutputProcessor::add_logprobs`]. Not with [`Delivery::Events`] or
    /// [`Delivery::Turn`], which have no place for them.
    pub logprobs: bool,
    /// So has its prompt; see [`OutputProcessor::add_prompt_logprobs`]. Not with these either.
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

/// What stopped a request, beyond its finish reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// A stop token.
    Token(i32),
    /// A stop string.
    Text(String),
}

/// Why a request failed that the scheduler has never had, or will never end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestFailure {
    /// An engine in another process did not take it.
    #[error(transparent)]
    Refused(AddRequestError),
    /// The engine has gone.
    #[error("{0}")]
    EngineDied(Arc<str>),
}

/// What is new for one request since the last call.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestDelta {
    /// Whose it is.
    pub key: RequestKey,
    /// Text that became certain.
    pub new_text: String,
    /// Tokens, whether or not their text is shown.
    pub new_token_ids: Vec<i32>,
    /// For each of these what the model thought of its place; empty unless asked for.
    pub new_logprobs: Vec<PositionLogprobs>,
    /// What the model thought of places of the prompt, in their order; the last is there with the first token.
    pub new_prompt_logprobs: Vec<PromptLogprobs>,
    /// Calls of an answer that is [read](Delivery::Turn), with its end.
    pub num_calls: u32,
    /// Set on the last delta.
    pub finish_reason: Option<FinishReason>,
    /// What stopped it; `None` for EOS.
    pub stop_reason: Option<StopReason>,
    /// Why it failed; [`RequestError::None`] unless the finish reason is `Error`.
    pub error: RequestError,
    /// Why it failed when that was not the scheduler's doing; the finish reason is `Error` then.
    pub failure: Option<RequestFailure>,
    /// Prompt tokens that are computed, where that is news and was asked for; else 0.
    pub num_computed_prompt_tokens: u32,
    /// Prompt tokens found in the prefix cache.
    pub num_cached_tokens: u32,
    /// Drafts out of the request's own prediction that were kept, so far.
    pub num_accepted_prediction_tokens: u32,
    /// Those that were run in vain, so far.
    pub num_rejected_prediction_tokens: u32,
    /// When it was first scheduled (monotonic nanoseconds, 0 while unknown).
    pub first_scheduled_ns: u64,
    /// When its first token was made (monotonic nanoseconds, 0 while unknown).
    pub first_token_ns: u64,
    /// When its last record was made (monotonic nanoseconds, 0 while unknown).
    pub last_token_ns: u64,
}

/// What the caller passes on to the engine after a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// A stop string, or its one call, ended a request that the engine still runs.
    Stop(RequestKey),
    /// Why a request ended whose last record is not settled.
    Settle {
        /// Whose end it is.
        key: RequestKey,
        /// By a stop string or its one call; else by its length.
        found_stop: bool,
    },
}

/// What [`OutputProcessor::take`] gives.
#[derive(Debug, Default, PartialEq)]
pub struct News {
    /// In the order of their requests' first news.
    pub deltas: Vec<RequestDelta>,
    /// New text of those who take it as events.
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

/// Turns records into deltas. Not shared: one owner calls it.
#[derive(Debug, Default)]
pub struct OutputProcessor {
    tokenizer: Option<Arc<Tokenizer>>,
    /// Boxed, so that a table that grows moves little: a front end may get thousands of samples at once.
    requests: HashMap<RequestKey, Box<TrackedRequest>>,
    /// Keys whose news can be taken, in the order in which they got them.
    changed: Vec<RequestKey>,
    /// Requests that a stop string or their one call ended, until the engine's last record: it may have come to its length meanwhile.
    stopped: HashSet<RequestKey>,
    num_dropped: u64,
    scratch: String,
}

impl OutputProcessor {
    /// Without a tokenizer, deltas carry token ids only. Takes some 50 ms for a large vocabulary, the first time.
    #[must_use]
    pub fn new(tokenizer: Option<Arc<Tokenizer>>) -> Self {
        if let Some(tokenizer) = &tokenizer {
            // Here rather than in the first request's latency.
            tokenizer.pieces();
        }
        Self { tokenizer, ..Self::default() }
    }

    /// Expects outputs for a key. The end of the prompt decides the spacing of the output's first token.
    ///
    /// # Errors
    /// The key is in use; a stop string is empty; stop strings or an end behind a call without text.
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

    /// Forgets a request; its later records are dropped. Returns whether it was known.
    pub fn discard(&mut self, key: RequestKey) -> bool {
        // Its place in `changed`, if any, is passed over when news is taken.
        self.requests.remove(&key).is_some()
    }

    /// Log-probabilities of a token whose record comes later. Dropped unless the request asked for them.
    pub fn add_logprobs(&mut self, logprobs: TokenLogprobs) {
        let request = self.requests.get_mut(&logprobs.key);
        if let Some(tracker) = request.and_then(|request| request.logprobs.as_mut()) {
            tracker.push(logprobs);
        }
    }

    /// Log-probabilities of places of a request's prompt. The request's first token comes later, and they go out with it.
    /// Dropped unless the request asked for them.
    pub fn add_prompt_logprobs(&mut self, logprobs: PromptLogprobs) {
        let request = self.requests.get_mut(&logprobs.key);
        if let Some(request) = request.filter(|request| request.wants_prompt_logprobs) {
            request.delta.new_prompt_logprobs.push(logprobs);
        }
    }

    /// Takes one record. The result is for the engine.
    pub fn process(&mut self, record: &EngineCoreOutput) -> Option<Verdict> {
        let was_stopped = record.finish_reason.is_some() && self.stopped.remove(&record.key);
        let settle =
            |found_stop| record.is_unsettled().then_some(Verdict::Settle { key: record.key, found_stop });
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

    /// Keeps a request's news, merged, until [`Self::release`]: its reader is busy.
    pub fn hold(&mut self, key: RequestKey) {
        if let Some(request) = self.requests.get_mut(&key) {
            request.outbox.is_held = true;
        }
    }

    /// Ends [`Self::hold`]. Returns whether there is news to be taken.
    pub fn release(&mut self, key: RequestKey) -> bool {
        let Some(request) = self.requests.get_mut(&key) else { return false };
        request.outbox.is_held = false;
        if request.queue_up() {
            self.changed.push(key);
        }
        request.outbox.is_queued
    }

    /// Lets tokens go out that wait for others of their [interval](OutputOptions::stream_interval): none may follow.
    pub fn flush(&mut self) {
        for (&key, request) in &mut self.requests {
            request.outbox.flush(request.delta.new_text.len());
            if request.queue_up() {
                self.changed.push(key);
            }
        }
    }

    /// Ends a request that will get no more records. What was held back of its text is shown.
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
        // A request that ended before, by a stop string, keeps that end.
        if let Some(request) = self.requests.get_mut(&key)
            && request.delta.finish_reason == Some(FinishReason::Error)
            && request.delta.error == RequestError::None
        {
            request.delta.failure.get_or_insert(failure);
        }
    }

    /// Moves out the news of every request that has some and is not on hold, in the order in which they got it. A
    /// request whose end this is, is forgotten.
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
            }
            news.deltas.push(request.take_delta());
            if is_finished {
                self.requests.remove(&key);
            }
        }
        news
    }

    /// Requests that are expected to give more deltas.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether no request is expected to give more deltas.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Records dropped so far because their requests had been discarded.
    #[must_use]
    pub fn num_dropped(&self) -> u64 {
        self.num_dropped
    }
}

impl TrackedRequest {
    /// Whether it is to be put into the queue of those whose news can be taken: there is news, its caller waits for it, and
    /// it is not in the queue yet.
    fn queue_up(&mut self) -> bool {
        self.outbox.queue_up(self.delta.finish_reason.is_some())
    }

    /// Whether the record's text has come to a stop string, or to the end of the one call that it may have.
    fn process(
        &mut self,
        record: &EngineCoreOutput,
        tokenizer: Option<&Tokenizer>,
        scratch: &mut String,
    ) -> bool {
        let delta = &mut self.delta;
        // The first record has them.
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
        // An end for another reason, an error say, stays what it is.
        let may_end = record.finish_reason.is_none_or(|reason| reason == FinishReason::Length);
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
        if record.finish_reason.is_some() && record.stop_reason >= 0 {
            delta.stop_reason = Some(StopReason::Token(record.stop_reason));
        }
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
