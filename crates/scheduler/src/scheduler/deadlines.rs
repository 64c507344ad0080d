//! `Deadlines`: which requests wait for their first step, and until when (`queue_timeout`).
//!
//! All requests have the same time limit, so their deadlines are in the order of arrival, whatever the policy. Those
//! that are due are at the front, and the rest need not be looked at. A request that was admitted or has left stays in
//! the list until it reaches the front, or until most of the list consists of such entries.

use std::collections::VecDeque;

use super::Scheduler;
use crate::{
    clock::monotonic_ns,
    output::{FinishReason, RequestError},
    request::{RequestStatus, Tenant},
    sync::Ordering,
};

/// A list shorter than this is not tidied up.
const SHORT: usize = 64;

/// See the module docs. Empty without a `queue_timeout`.
#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    order: VecDeque<(u64, Tenant)>,
}

impl Deadlines {
    /// All entries, oldest first, including those that no longer wait.
    pub(crate) fn tenants(&self) -> impl Iterator<Item = Tenant> + '_ {
        self.order.iter().map(|(_, tenant)| *tenant)
    }
}

impl Scheduler {
    /// Record that a request that was submitted at `since_ns` begins to wait.
    pub(crate) fn limit_wait(&mut self, slot: u32, since_ns: u64) {
        if self.config.queue_timeout.is_zero() {
            return;
        }
        let due_ns = since_ns + self.config.queue_timeout.as_nanos() as u64;
        let tenant = Tenant { slot, epoch: self.requests[slot as usize].epoch };
        self.deadlines.order.push_back((due_ns, tenant));
        self.tidy_deadlines();
    }

    /// Keep the list in proportion to the queue. A pass removes more than half of the list, so its cost is spread over
    /// as many arrivals.
    fn tidy_deadlines(&mut self) {
        if self.deadlines.order.len() > 2 * self.waiting.len() + SHORT {
            let mut order = std::mem::take(&mut self.deadlines.order);
            order.retain(|(_, tenant)| self.is_queued(*tenant));
            self.deadlines.order = order;
        }
    }

    /// Whether the request waits for its first step.
    pub(crate) fn is_queued(&self, tenant: Tenant) -> bool {
        let request = &self.requests[tenant.slot as usize];
        request.epoch == tenant.epoch && !request.cold.admitted_before
    }

    /// End the requests that have waited too long by `now_ns`, or by the clock if that is `None`. The clock is read
    /// only if a request waits.
    pub(crate) fn end_overdue(&mut self, now_ns: Option<u64>) -> usize {
        if self.config.queue_timeout.is_zero() {
            return 0;
        }
        let mut now_ns = now_ns;
        let mut left = Vec::new();
        while let Some(&(due_ns, tenant)) = self.deadlines.order.front() {
            if self.is_queued(tenant) {
                if due_ns > *now_ns.get_or_insert_with(monotonic_ns) {
                    break;
                }
                let (error, status) = (RequestError::QueueTimeout, RequestStatus::FinishedError);
                self.leave(tenant.slot, FinishReason::Error, error, status, &mut left);
            }
            self.deadlines.order.pop_front();
        }
        let next_ns = self.deadlines.order.front().map_or(0, |(due_ns, _)| *due_ns);
        // Relaxed: only this thread reads it, in `wait_for_work`.
        self.handle.shared.next_deadline_ns.store(next_ns, Ordering::Relaxed);
        let num_ended = left.len();
        if num_ended > 0 {
            self.stats.num_queue_timeouts += num_ended as u64;
            self.drop_finished();
            for slot in left {
                self.requests.free(slot);
            }
        }
        num_ended
    }

    /// Take arrivals in and end the requests that have waited too long by `now_ns` (monotonic nanoseconds). Every
    /// `schedule` does the same by the clock; this is for tests with a time of their own. Returns how many ended.
    pub fn end_overdue_by(&mut self, now_ns: u64) -> usize {
        self.drain_inbox();
        let num_ended = self.end_overdue(Some(now_ns));
        self.publish();
        num_ended
    }
}
