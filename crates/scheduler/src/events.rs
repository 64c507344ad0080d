//! `EventLog`: what happened to each request, as a list of (step, status, `num_computed_tokens`, `num_tokens`).
//!
//! Off by default, and then it costs one test per step. On, it holds the newest events up to a bound, until somebody
//! takes them.

use std::collections::VecDeque;

use crate::{clock::monotonic_ns, request::RequestStatus, scheduler::Scheduler};

/// Events that are kept for a reader who is late.
pub const MAX_EVENTS: usize = 1 << 16;

/// The state of a request after something happened to it: it was scheduled, or its status changed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RequestEvent {
    /// When (monotonic nanoseconds).
    pub timestamp_ns: u64,
    /// The last step that was scheduled; for a scheduled request the step that it is in.
    pub step: u64,
    /// Whose.
    pub request_id: String,
    /// Its status now.
    pub status: RequestStatus,
    /// Tokens that it runs in this step; 0 when the event is a change of status.
    pub num_scheduled_tokens: u32,
    /// Tokens with KV when the step is done.
    pub num_computed_tokens: u32,
    /// Prompt and known output.
    pub num_tokens: u32,
}

/// See the module docs.
#[derive(Debug, Default)]
pub(crate) struct EventLog {
    enabled: bool,
    events: VecDeque<RequestEvent>,
    num_dropped: u64,
}

impl Scheduler {
    /// Begin or end to record events. Ending drops what nobody has taken.
    pub fn set_trace(&mut self, enabled: bool) {
        self.events = EventLog { enabled, ..EventLog::default() };
    }

    /// The events since the last call, oldest first, and how many were dropped because nobody took them in time.
    pub fn take_events(&mut self) -> (Vec<RequestEvent>, u64) {
        (self.events.events.drain(..).collect(), std::mem::take(&mut self.events.num_dropped))
    }

    /// A request's status has changed.
    pub(crate) fn note(&mut self, slot: u32) {
        if self.events.enabled {
            self.record(slot, 0, monotonic_ns());
        }
    }

    /// A step was scheduled.
    pub(crate) fn record_step(&mut self, set: usize) {
        if !self.events.enabled {
            return;
        }
        let now = monotonic_ns();
        for index in 0..self.steps[set].entries.len() {
            let entry = self.steps[set].entries[index];
            self.record(entry.tenant.slot, entry.num_scheduled_tokens, now);
        }
    }

    fn record(&mut self, slot: u32, num_scheduled_tokens: u32, timestamp_ns: u64) {
        let request = &self.requests[slot as usize];
        let event = RequestEvent {
            timestamp_ns,
            step: self.last_step,
            request_id: request.cold.request_id.to_string(),
            status: request.status,
            num_scheduled_tokens,
            num_computed_tokens: request.num_computed_tokens,
            num_tokens: request.num_tokens,
        };
        let log = &mut self.events;
        if log.events.len() == MAX_EVENTS {
            log.events.pop_front();
            log.num_dropped += 1;
        }
        log.events.push_back(event);
    }
}
