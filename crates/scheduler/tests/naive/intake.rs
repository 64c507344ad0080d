//! The intake: what is handed in, taken in order, and who is aborted.

use super::{Leave, Live, Message, NaiveRequest, NaiveScheduler, Status, fair::Standing};

impl NaiveScheduler {
    pub(super) fn drain_inbox(&mut self) {
        for message in std::mem::take(&mut self.inbox) {
            match message {
                Message::Add(new) => self.take_in(new),
                Message::Abort(id) => {
                    if let Some(arrival) = self.arrival_of(&id) {
                        self.abort_now(arrival);
                    }
                }
                Message::GrammarIsReady(id) => {
                    if let Some(arrival) = self.arrival_of(&id)
                        && self.requests[&arrival].status == Status::WaitingForGrammar
                    {
                        self.request(arrival).status = Status::Waiting;
                    }
                }
            }
        }
    }

    /// Abort all, those that were just handed in included, in the order of their arrival; how many there were.
    pub fn abort_all(&mut self) -> usize {
        self.drain_inbox();
        let mut arrivals: Vec<u64> = self.requests.keys().copied().collect();
        arrivals.sort_unstable();
        for &arrival in &arrivals {
            self.abort_now(arrival);
        }
        arrivals.len()
    }

    fn abort_now(&mut self, arrival: u64) {
        if self.requests[&arrival].status == Status::Running {
            self.register_late(arrival);
        }
        self.leave(arrival, Leave::Aborted);
    }

    fn take_in(&mut self, new: NaiveRequest) {
        assert!(self.arrival_of(&new.id).is_none(), "ids of live requests differ");
        let arrival = self.num_arrivals;
        self.num_arrivals += 1;
        let mut request = Live {
            arrival,
            status: if new.needs_grammar { Status::WaitingForGrammar } else { Status::Waiting },
            tokens: new.prompt.clone(),
            num_computed_tokens: 0,
            blocks: Vec::new(),
            num_offered_blocks: 0,
            num_cached_tokens: 0,
            num_preemptions: 0,
            cpu_blocks: Vec::new(),
            swap_out_pending: false,
            swapped_out_in: 0,
            admitted_in: 0,
            resumed_in: None,
            life: 0,
            next_drafts: Vec::new(),
            times_passed: 0,
            parent: None,
            was_admitted: false,
            num_skipped: 0,
            is_held: false,
            standing: Standing::default(),
            new,
        };
        let parent = request.new.fork_from.as_ref().and_then(|id| self.arrival_of(id));
        if self.is_fair() {
            request.standing = self.stand(&request);
        }
        self.requests.insert(arrival, request);
        if self.is_fair() {
            self.bring_turn(arrival);
        }
        if let Some(parent) = parent {
            self.link(arrival, parent);
        }
    }
}
