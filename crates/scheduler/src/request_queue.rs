//! `RequestQueue`: who waits, in the order in which they are tried.
//!
//! One ordered set serves FCFS and PRIORITY and all who wait: those who never ran, preempted and swapped ones.
//! Under FCFS the key is the arrival, swapped ones first, so that one that lost its blocks comes back before
//! anything younger and several of them keep their order. Under PRIORITY the key is the priority, then when the
//! request came to its front end, then the order in which it was handed in. Under FAIR the [`FairQueue`] has them.

mod fair;
mod fair_clock;

use std::{
    collections::BTreeSet,
    ops::Bound::{Excluded, Unbounded},
};

use crate::{
    config::SchedulingPolicy,
    request::{Request, RequestStatus},
    request_queue::fair::FairQueue,
};

/// Class or priority, time of arrival (0 under FCFS) or the turn's tag, order of arrival, slot: unique, and total.
pub(crate) type QueueKey = (i64, u64, u64, u32);

#[derive(Debug, Default)]
pub(crate) struct RequestQueue {
    policy: SchedulingPolicy,
    order: BTreeSet<QueueKey>,
    /// In place of `order`, under FAIR.
    fair: Option<Box<FairQueue>>,
}

impl RequestQueue {
    pub(crate) fn new(policy: SchedulingPolicy) -> Self {
        let fair = (policy == SchedulingPolicy::Fair).then(Box::default);
        Self { policy, order: BTreeSet::new(), fair }
    }

    /// Where a request stands; running ones too (victims have large keys).
    pub(crate) fn key(&self, slot: u32, request: &Request) -> QueueKey {
        let cold = &request.cold;
        let (class, arrival_ns) = match self.policy {
            SchedulingPolicy::Fcfs => (-i64::from(request.status == RequestStatus::Swapped), 0),
            SchedulingPolicy::Priority => (i64::from(cold.priority), cold.arrival_ns),
            SchedulingPolicy::Fair => {
                let (tag, brought_by) = cold.standing.turn;
                return (0, tag, brought_by, slot);
            }
        };
        (class, arrival_ns, cold.arrival, slot)
    }

    /// A request has just come.
    pub(crate) fn arrive(&mut self, slot: u32, request: &mut Request) {
        if let Some(fair) = &mut self.fair {
            let max_output = request.max_total_tokens.saturating_sub(request.num_tokens);
            fair.arrive(&mut request.cold, max_output);
        }
        self.push(slot, request);
    }

    /// A request waits, from now on or again.
    pub(crate) fn push(&mut self, slot: u32, request: &Request) {
        if let Some(fair) = &mut self.fair {
            fair.push(slot, &request.cold);
            return;
        }
        let fresh = self.order.insert(self.key(slot, request));
        debug_assert!(fresh, "slot {slot} is already waiting");
    }

    /// Take a request out, whose status is still the one with which it was put in.
    pub(crate) fn remove(&mut self, slot: u32, request: &Request) -> bool {
        if let Some(fair) = &mut self.fair {
            return fair.remove(slot, &request.cold);
        }
        let key = self.key(slot, request);
        self.order.remove(&key)
    }

    /// Take out the request that [`after`](Self::after) has just returned: it is admitted.
    pub(crate) fn take(&mut self, slot: u32, request: &mut Request) -> bool {
        if let Some(fair) = &mut self.fair {
            return fair.take(slot, &mut request.cold);
        }
        self.remove(slot, request)
    }

    /// A request has left, with all its counters as they were.
    pub(crate) fn leave(&mut self, request: &Request) {
        if let Some(fair) = &mut self.fair {
            fair.leave(request);
        }
    }

    /// Whether the place of a request that waits depends on its status.
    pub(crate) fn looks_at_status(&self) -> bool {
        self.fair.is_none()
    }

    /// The first request behind `cursor`, or the first of all. Under FAIR `cursor` is what was returned last.
    pub(crate) fn after(&mut self, cursor: Option<QueueKey>) -> Option<QueueKey> {
        if let Some(fair) = &mut self.fair {
            let ((tag, brought_by), slot) = fair.next(cursor.is_none())?;
            return Some((0, tag, brought_by, slot));
        }
        match cursor {
            None => self.order.first().copied(),
            Some(key) => self.order.range((Excluded(key), Unbounded)).next().copied(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match &self.fair {
            Some(fair) => fair.len(),
            None => self.order.len(),
        }
    }

    /// Slots in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let fair = self.fair.iter().flat_map(|fair| fair.iter());
        self.order.iter().map(|key| key.3).chain(fair)
    }

    /// Check what holds between any two calls.
    ///
    /// # Panics
    /// With what is broken.
    pub(crate) fn check_invariants(&self) {
        if let Some(fair) = &self.fair {
            fair.check_invariants();
        }
    }
}
