//! One client of an engine, as the output side sees it: its requests, and the bytes on their way to it.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet},
};

use scheduler::{
    EngineCoreOutput, EngineHandle, FinishReason, PooledVector, PromptLogprobs, RequestKey, TokenLogprobs,
};

use crate::{
    codec,
    frame::{begin_frame, end_frame},
    message::{EngineMessage, kind},
    outbox::Outbox,
    server::control::StepError,
};

/// Most ended requests of one client for which the engine waits to learn why they ended.
const MAX_UNSETTLED: usize = 1 << 16;

/// A client that was welcomed.
#[derive(Default)]
pub(crate) struct ServedClient {
    pub(crate) index: u32,
    pub(crate) outbox: Outbox,
    /// Requests that the engine has accepted and not finished.
    live: RefCell<HashSet<RequestKey>>,
    /// Ended requests for which the client has yet to report why they ended, with the engine's own reasons.
    unsettled: RefCell<HashMap<RequestKey, FinishReason>>,
    /// Start and time of the frame of outputs that is being written.
    open_frame: Cell<Option<(usize, u64)>>,
    /// Number of the last failed step that was reported to the client.
    last_step_error: Cell<u64>,
    /// Queries of the client that the engine has not answered.
    pub(crate) num_open_queries: Cell<u32>,
}

impl ServedClient {
    pub(crate) fn new(index: u32) -> Self {
        Self { index, ..Self::default() }
    }

    /// Note a request that the engine accepts; `false` if its key is in use.
    pub(crate) fn begin(&self, key: RequestKey) -> bool {
        self.live.borrow_mut().insert(key)
    }

    /// Forget a request that the engine did not accept.
    pub(crate) fn forget(&self, key: RequestKey) {
        self.live.borrow_mut().remove(&key);
    }

    /// Number of requests that the engine has accepted and not finished.
    pub(crate) fn num_live(&self) -> usize {
        self.live.borrow().len()
    }

    /// Take all unfinished requests, because the client is gone.
    pub(crate) fn take_live(&self) -> HashSet<RequestKey> {
        self.live.take()
    }

    /// Expect the client to report why a request ended that ended for `reason` unless the client knows better. If it
    /// owes too many such reports, do not wait for this one.
    pub(crate) fn await_settlement(&self, key: RequestKey, reason: FinishReason, handle: &EngineHandle) {
        let mut unsettled = self.unsettled.borrow_mut();
        if unsettled.len() < MAX_UNSETTLED {
            unsettled.insert(key, reason);
        } else {
            handle.settle_end(reason);
        }
    }

    /// Note that the client has reported on a request. Returns the engine's own reason; `None` if no report was expected.
    pub(crate) fn settle(&self, key: RequestKey) -> Option<FinishReason> {
        self.unsettled.borrow_mut().remove(&key)
    }

    /// Take the engine's own reasons for all ends that the client has not reported on, because it is gone.
    pub(crate) fn take_unsettled(&self) -> impl Iterator<Item = FinishReason> {
        self.unsettled.take().into_values()
    }

    /// Report why a step failed, once, before the outputs of that step.
    pub(crate) fn explain(&self, step_error: &StepError) {
        if self.last_step_error.replace(step_error.number) == step_error.number {
            return;
        }
        let mut buffer = self.outbox.buffer();
        if let Some((start, _)) = self.open_frame.take() {
            end_frame(&mut buffer, start);
        }
        EngineMessage::StepFailed(step_error.message.clone()).encode(&mut buffer);
    }

    /// Append an output. Returns `true` if it is the first since `end_frame`.
    pub(crate) fn push(&self, output: &EngineCoreOutput) -> bool {
        let mut buffer = self.outbox.buffer();
        let open_frame = self.open_frame.get();
        let is_continued = open_frame.is_some_and(|(start, time)| {
            time == output.timestamp_ns && buffer.len() - start < codec::outputs::FULL_BYTES
        });
        if !is_continued {
            if let Some((start, _)) = open_frame {
                end_frame(&mut buffer, start);
            }
            let start = begin_frame(&mut buffer, kind::OUTPUTS);
            buffer.extend_from_slice(&output.timestamp_ns.to_le_bytes());
            self.open_frame.set(Some((start, output.timestamp_ns)));
        }
        codec::outputs::encode_record(output, &mut buffer);
        if output.finish_reason.is_some() {
            self.live.borrow_mut().remove(&output.key);
        }
        open_frame.is_none()
    }

    /// Append log-probabilities; push their tokens afterwards.
    pub(crate) fn push_logprobs(&self, all: &[TokenLogprobs]) {
        let mut buffer = self.outbox.buffer();
        let mut rest = all.iter().peekable();
        while rest.peek().is_some() {
            let start = begin_frame(&mut buffer, kind::LOGPROBS);
            while buffer.len() - start < codec::outputs::FULL_BYTES
                && let Some(logprobs) = rest.next()
            {
                codec::logprobs::encode_record(logprobs, &mut buffer);
            }
            end_frame(&mut buffer, start);
        }
    }

    /// Append log-probabilities of a prompt; push the request's first token afterwards.
    pub(crate) fn push_prompt_logprobs(&self, all: &PromptLogprobs) {
        let mut buffer = self.outbox.buffer();
        let mut next = 0;
        while next < all.ranks.len() {
            let start = begin_frame(&mut buffer, kind::PROMPT_LOGPROBS);
            let rows = codec::prompt_logprobs::rows_that_fit(all, next, buffer.len() - start);
            next = rows.end;
            codec::prompt_logprobs::encode_record(all, rows, &mut buffer);
            end_frame(&mut buffer, start);
        }
    }

    /// Append the vector of a request; push its last output afterwards.
    pub(crate) fn push_pooled(&self, vector: &PooledVector) {
        let mut buffer = self.outbox.buffer();
        let start = begin_frame(&mut buffer, kind::POOLED);
        codec::pooled::encode_record(vector, &mut buffer);
        end_frame(&mut buffer, start);
    }

    /// Complete the frame that `push` has begun and send it.
    pub(crate) fn end_frame(&self) {
        if let Some((start, _)) = self.open_frame.take() {
            end_frame(&mut self.outbox.buffer(), start);
        }
        self.outbox.flush();
    }

    pub(crate) fn send(&self, message: &EngineMessage) {
        self.outbox.fill(|buffer| message.encode(buffer));
    }
}
