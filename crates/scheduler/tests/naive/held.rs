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

    /// The newest step gives a request no token: its last one is computed once more, and its drafts are dropped. Only where that is known, and is none
    /// of the prompt; returns whether.
    pub fn withhold(&mut self, id: &str) -> bool {
        let Some(arrival) = self.arrival_of(id) else { return false };
        let request = &self.requests[&arrival];
        let is_decode = request.status == Status::Running && request.tokens.len() > request.new.prompt.len();
        let is_alone = self.rows_in_flight(arrival).count() == 1;
        let step = self.in_flight.last_mut().filter(|_| is_decode && is_alone);
        let row = step.and_then(|step| step.rows.iter_mut().find(|row| row.arrival == arrival));
        let Some(row) = row.filter(|row| row.sampled && !row.is_withheld) else { return false };
        row.is_withheld = true;
        let num_taken_back = 1 + row.num_drafts;
        row.num_tokens -= num_taken_back;
        self.request(arrival).num_computed_tokens -= num_taken_back;
        true
    }

    /// Tokens of a request are known before a step gives them: of one that no step has, or (`is_planned`) in the place of
    /// the token of the newest step, which has then computed a part of what there is to compute. Never the last token
    /// that the request may have, nor one that ends it; in the place of a token two at least; returns how many.
    pub fn force(&mut self, id: &str, tokens: &[i32], is_planned: bool) -> usize {
        let Some(arrival) = self.arrival_of(id) else { return 0 };
        let request = &self.requests[&arrival];
        let new = &request.new;
        let room = request.max_total_tokens(&self.config).saturating_sub(request.tokens.len() + 1);
        let ends = |token: &i32| new.eos_token_id == Some(*token) || new.stop_token_ids.contains(token);
        let taken: Vec<i32> = tokens.iter().copied().take(room).take_while(|token| !ends(token)).collect();
        let is_awaited = self.requests.values().any(|child| child.parent == Some(arrival));
        let is_alone = self.rows_in_flight(arrival).count() == usize::from(is_planned);
        let saves_steps = taken.len() > usize::from(is_planned);
        if request.status != Status::Running || is_awaited || !is_alone || !saves_steps {
            return 0;
        }
        if is_planned {
            let newest = self.in_flight.last_mut().expect("it is in one");
            let row = newest.rows.iter_mut().find(|row| row.arrival == arrival);
            let Some(row) = row.filter(|row| row.sampled && !row.is_withheld && row.num_drafts == 0) else {
                return 0;
            };
            row.is_withheld = true;
        }
        let request = self.request(arrival);
        request.tokens.extend(&taken);
        request.next_drafts.clear();
        taken.len()
    }
}
