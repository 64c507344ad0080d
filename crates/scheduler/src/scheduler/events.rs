//! `EventLog`: what happened to each request, as a list of (step, status, `num_computed_tokens`, `num_tokens`).
//!
//! It is off by default, and then costs one test per step. When it is on, it keeps the newest events, up to a limit,
//! until a reader takes them. A reader may ask for an event per token too; every row then takes the slow path of the
//! update.

use std::collections::VecDeque;

use kvblocks::BlockId;

use super::Scheduler;
use crate::{
    clock::monotonic_ns,
    request::RequestStatus,
    step::{Entry, UNCHANGED},
};

/// Most events that are kept for a slow reader.
pub const MAX_EVENTS: usize = 1 << 16;

/// What happened to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestEventKind {
    /// Its status changed.
    Status,
    /// It is in a step.
    Scheduled,
    /// A step gave it a token.
    Token,
    /// A step has verified its drafts; the resulting tokens follow.
    Drafts,
}

impl RequestEventKind {
    /// Its name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Status => "status",
            Self::Scheduled => "scheduled",
            Self::Token => "token",
            Self::Drafts => "drafts",
        }
    }
}

/// The state of a request after something happened to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RequestEvent {
    /// The kind of the event.
    pub kind: RequestEventKind,
    /// When it happened (monotonic nanoseconds).
    pub timestamp_ns: u64,
    /// The last step that was scheduled; for a scheduled request, the step with it; for a token, the step that gave it.
    pub step: u64,
    /// The request.
    pub request_id: String,
    /// Its status now.
    pub status: RequestStatus,
    /// Tokens that it runs in this step; 0 unless it was scheduled.
    pub num_scheduled_tokens: u32,
    /// Number of drafts among these; for verified drafts, their number.
    pub num_draft_tokens: u32,
    /// Number of verified drafts that were kept.
    pub num_accepted_tokens: u32,
    /// Tokens with KV after the step.
    pub num_computed_tokens: u32,
    /// Prompt and known output.
    pub num_tokens: u32,
    /// Leading tokens whose KV was found when it was admitted for the first time.
    pub num_cached_tokens: u32,
    /// Blocks that it holds; `new_block_ids` are the last of them. Only when it was scheduled.
    pub num_blocks: u32,
    /// Blocks that are new in its table in this step; all blocks if the request is new or has come back.
    pub new_block_ids: Vec<BlockId>,
    /// The token that it got.
    pub token_id: Option<i32>,
}

/// See the module docs.
#[derive(Debug, Default)]
pub(crate) struct EventLog {
    enabled: bool,
    /// Whether to record tokens too.
    pub(crate) with_tokens: bool,
    /// The step whose tokens are being applied.
    pub(crate) updated_step: u64,
    events: VecDeque<RequestEvent>,
    num_dropped: u64,
}

impl Scheduler {
    /// Start or stop recording events. Stopping drops the events that were not taken.
    pub fn set_trace(&mut self, enabled: bool) {
        self.events = EventLog { enabled, ..EventLog::default() };
    }

    /// Start recording events, including one for each token.
    pub fn set_trace_with_tokens(&mut self) {
        self.events = EventLog { enabled: true, with_tokens: true, ..EventLog::default() };
    }

    /// The events since the last call, oldest first, and how many were dropped because they were not taken in time.
    pub fn take_events(&mut self) -> (Vec<RequestEvent>, u64) {
        (self.events.events.drain(..).collect(), std::mem::take(&mut self.events.num_dropped))
    }

    /// A request's status has changed.
    pub(crate) fn note(&mut self, slot: u32) {
        if self.events.enabled {
            let event = self.event(RequestEventKind::Status, slot, monotonic_ns());
            self.record(event);
        }
    }

    /// A step was scheduled.
    pub(crate) fn record_step(&mut self, set: usize) {
        if !self.events.enabled {
            return;
        }
        let now = monotonic_ns();
        for index in 0..self.steps[set].entries.len() {
            let Entry { tenant, num_scheduled_tokens, num_draft_tokens, block_table_start, .. } =
                self.steps[set].entries[index];
            let mut event = self.event(RequestEventKind::Scheduled, tenant.slot, now);
            let table = &self.requests[tenant.slot as usize].block_table;
            event.num_scheduled_tokens = num_scheduled_tokens;
            event.num_draft_tokens = num_draft_tokens.into();
            event.num_blocks = table.len() as u32;
            if block_table_start != UNCHANGED {
                event.new_block_ids.extend_from_slice(&table[block_table_start as usize..]);
            }
            self.record(event);
        }
    }

    /// A request was given a token.
    pub(crate) fn record_token(&mut self, slot: u32, token_id: i32, now: u64) {
        if self.events.with_tokens {
            let event = self.event(RequestEventKind::Token, slot, now);
            self.record(RequestEvent { step: self.events.updated_step, token_id: Some(token_id), ..event });
        }
    }

    /// A step has verified a request's drafts.
    pub(crate) fn record_drafts(
        &mut self,
        slot: u32,
        num_draft_tokens: u32,
        num_accepted_tokens: u32,
        now: u64,
    ) {
        if self.events.with_tokens {
            let event = self.event(RequestEventKind::Drafts, slot, now);
            let step = self.events.updated_step;
            self.record(RequestEvent { step, num_draft_tokens, num_accepted_tokens, ..event });
        }
    }

    fn event(&self, kind: RequestEventKind, slot: u32, timestamp_ns: u64) -> RequestEvent {
        let request = &self.requests[slot as usize];
        RequestEvent {
            kind,
            timestamp_ns,
            step: self.steps.last(),
            request_id: request.cold.request_id.to_string(),
            status: request.status,
            num_scheduled_tokens: 0,
            num_draft_tokens: 0,
            num_accepted_tokens: 0,
            num_computed_tokens: request.num_computed_tokens,
            num_tokens: request.num_tokens,
            num_cached_tokens: request.num_cached_tokens,
            num_blocks: 0,
            new_block_ids: Vec::new(),
            token_id: None,
        }
    }

    fn record(&mut self, event: RequestEvent) {
        let log = &mut self.events;
        if log.events.len() == MAX_EVENTS {
            log.events.pop_front();
            log.num_dropped += 1;
        }
        log.events.push_back(event);
    }
}
