//! `Deadlines`: who waits for its first step, and until when (`queue_timeout`).
//!
//! All have the same time, so their deadlines are in the order of their arrival, whatever the policy: those that are
//! due are at the front, and none behind them is looked at. One that was admitted or has left stays in the list until
//! it is at the front, or until most of the list is such entries.

use std::collections::VecDeque;

use super::Scheduler;
use crate::{
    clock::monotonic_ns,
    output::{FinishReason, RequestError},
    request::{RequestStatus, Tenant},
    sync::Ordering,
};

/// A shorter list is not tidied up.
const SHORT: usize = 64;

/// See the module docs. Empty without a `queue_timeout`.
#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    order: VecDeque<(u64, Tenant)>,
}

impl Deadlines {
    /// Oldest first, those too that wait no more.
    pub(crate) fn tenants(&self) -> impl Iterator<Item = Tenant> + '_ {
        self.order.iter().map(|(_, tenant)| *tenant)
    }
}

impl Scheduler {
    /// A request that was handed in at `since_ns` begins to wait.
    pub(crate) fn limit_wait(&mut self, slot: u32, since_ns: u64) {
        if self.config.queue_timeout.is_zero() {
            return;
        }
        let due_ns = since_ns + self.config.queue_timeout.as_nanos() as u64;
        let tenant = Tenant { slot, epoch: self.requests[slot as usize].epoch };
        self.deadlines.order.push_back((due_ns, tenant));
        self.tidy_deadlines();
    }

    /// Keep the list in proportion to the queue. A pass takes more than half of it away, so it is paid for by what
    /// has come.
    fn tidy_deadlines(&mut self) {
        if self.deadlines.order.len() > 2 * self.waiting.len() + SHORT {
            let mut order = std::mem::take(&mut self.deadlines.order);
            order.retain(|(_, tenant)| self.is_queued(*tenant));
            self.deadlines.order = order;
        }
    }

    /// Whether it waits for its first step.
    pub(crate) fn is_queued(&self, tenant: Tenant) -> bool {
        let request = &self.requests[tenant.slot as usize];
        request.epoch == tenant.epoch && !request.cold.admitted_before
    }

    /// End those that have waited too long by `now_ns`, or by the clock. The clock is read only when a request waits.
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
        // Relaxed: read by the thread that is here, in `wait_for_work`.
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

    /// Take in what arrived and end who has waited too long by `now_ns` (monotonic nanoseconds), as every `schedule`
    /// does by the clock. For tests that have their own time. Returns how many ended.
    pub fn end_overdue_by(&mut self, now_ns: u64) -> usize {
        self.drain_inbox();
        let num_ended = self.end_overdue(Some(now_ns));
        self.publish();
        num_ended
    }
}
