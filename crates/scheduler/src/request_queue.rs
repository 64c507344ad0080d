//! `RequestQueue`: who waits, in the order in which they are tried.
//!
//! One ordered set serves both policies and all who wait: those who never ran, preempted and swapped ones.
//! Under FCFS the key is the arrival, swapped ones first, so that whoever lost its blocks comes back before
//! anything younger and several of them keep their order. Under PRIORITY the key is the priority, then when the
//! request came to its front end, then the order in which it was handed in.

use std::{
    collections::BTreeSet,
    ops::Bound::{Excluded, Unbounded},
};

use crate::{
    config::SchedulingPolicy,
    request::{Request, RequestStatus},
};

/// Class or priority, time of arrival (0 under FCFS), order of arrival, slot: unique, and total.
pub(crate) type QueueKey = (i64, u64, u64, u32);

#[derive(Debug, Default)]
pub(crate) struct RequestQueue {
    policy: SchedulingPolicy,
    order: BTreeSet<QueueKey>,
}

impl RequestQueue {
    pub(crate) fn new(policy: SchedulingPolicy) -> Self {
        Self { policy, order: BTreeSet::new() }
    }

    /// Where a request stands; running ones too (victims have large keys).
    pub(crate) fn key(&self, slot: u32, request: &Request) -> QueueKey {
        let cold = &request.cold;
        let (class, arrival_ns) = match self.policy {
            SchedulingPolicy::Fcfs => (-i64::from(request.status == RequestStatus::Swapped), 0),
            SchedulingPolicy::Priority => (i64::from(cold.priority), cold.arrival_ns),
        };
        (class, arrival_ns, cold.arrival, slot)
    }

    pub(crate) fn push(&mut self, slot: u32, request: &Request) {
        let fresh = self.order.insert(self.key(slot, request));
        debug_assert!(fresh, "slot {slot} is already waiting");
    }

    /// Take a request out, whose status is still the one with which it was put in.
    pub(crate) fn remove(&mut self, slot: u32, request: &Request) -> bool {
        let key = self.key(slot, request);
        self.order.remove(&key)
    }

    /// The first request behind `cursor`, or the first of all.
    pub(crate) fn after(&self, cursor: Option<QueueKey>) -> Option<QueueKey> {
        match cursor {
            None => self.order.first().copied(),
            Some(key) => self.order.range((Excluded(key), Unbounded)).next().copied(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    /// Slots in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.order.iter().map(|key| key.3)
    }
}
