//! Requests that are held back, and tokens that a planned step leaves out.

use super::{NaiveScheduler, Status};

impl NaiveScheduler {
    /// Who runs has no turns until it is released, or preempted.
    pub fn hold(&mut self, id: &str, is_held: bool) {
        if let Some(arrival) = self.arrival_of(id) {
            let request = self.request(arrival);
            request.is_held = is_held && request.status == Status::Running;
        }
    }

    /// The newest step gives a request no token: its last one is computed once more. Only where that is known, and is none
    /// of the prompt; returns whether.
    pub fn withhold(&mut self, id: &str) -> bool {
        let Some(arrival) = self.arrival_of(id) else { return false };
        let request = &self.requests[&arrival];
        let is_decode = request.status == Status::Running && request.tokens.len() > request.new.prompt.len();
        let is_alone = self.rows_in_flight(arrival).count() == 1;
        let step = self.in_flight.last_mut().filter(|_| is_decode && is_alone);
        let row = step.and_then(|step| step.rows.iter_mut().find(|row| row.arrival == arrival));
        let Some(row) = row.filter(|row| row.sampled && !row.is_withheld && row.num_drafts == 0) else {
            return false;
        };
        row.is_withheld = true;
        row.num_tokens -= 1;
        self.request(arrival).num_computed_tokens -= 1;
        true
    }
}
