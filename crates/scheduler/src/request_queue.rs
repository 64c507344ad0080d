//! `RequestQueue`: who waits, in the order in which they are tried.
//!
//! One ordered set serves both policies. Under FCFS the key is the arrival, so a preempted request,
//! older than anything that still waits, comes back to the front by itself, and several preempted ones
//! keep their order. Under PRIORITY the key is `(priority, arrival)`.

use std::collections::BTreeSet;

use crate::config::SchedulingPolicy;

/// Ordered by `(priority, arrival, slot)`.
#[derive(Debug, Default)]
pub(crate) struct RequestQueue {
    policy: SchedulingPolicy,
    order: BTreeSet<(i32, u64, u32)>,
}

impl RequestQueue {
    pub(crate) fn new(policy: SchedulingPolicy) -> Self {
        Self { policy, order: BTreeSet::new() }
    }

    /// Where a request with these numbers stands; the same for running ones (victims are the largest).
    pub(crate) fn key(&self, priority: i32, arrival: u64, slot: u32) -> (i32, u64, u32) {
        match self.policy {
            SchedulingPolicy::Fcfs => (0, arrival, slot),
            SchedulingPolicy::Priority => (priority, arrival, slot),
        }
    }

    pub(crate) fn push(&mut self, priority: i32, arrival: u64, slot: u32) {
        let key = self.key(priority, arrival, slot);
        let fresh = self.order.insert(key);
        debug_assert!(fresh, "slot {slot} is already waiting");
    }

    /// Slot of the first request.
    pub(crate) fn peek(&self) -> Option<u32> {
        self.order.first().map(|key| key.2)
    }

    pub(crate) fn pop(&mut self) -> Option<u32> {
        self.order.pop_first().map(|key| key.2)
    }

    pub(crate) fn remove(&mut self, priority: i32, arrival: u64, slot: u32) -> bool {
        let key = self.key(priority, arrival, slot);
        self.order.remove(&key)
    }

    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    /// Slots in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.order.iter().map(|key| key.2)
    }
}
