//! Pauses: while new requests wait, only what was admitted before runs, and other samples of its request.

use std::collections::HashMap;

use scheduler::{NewRequest, PauseState};

use super::World;
use crate::common::{self, Random};

/// Its own random numbers: a run without pauses is the same as it was before there were any.
pub(super) struct Pauses {
    random: Random,
    /// Of each sample of a request, the others.
    others: HashMap<String, Vec<String>>,
}

impl Pauses {
    pub(super) fn new(seed: u64) -> Self {
        Self { random: Random(common::mix(seed ^ 0x9A05E)), others: HashMap::new() }
    }
}

impl World {
    /// Requests that are handed in together: samples of one, if all others fork the first.
    pub(super) fn note_samples(&mut self, requests: &[NewRequest]) {
        if !requests[1..].iter().all(|sample| sample.fork_from == Some(requests[0].key)) {
            return;
        }
        let ids: Vec<String> = requests.iter().map(|sample| sample.request_id.to_string()).collect();
        for id in &ids {
            let others = ids.iter().filter(|other| *other != id).cloned().collect();
            self.pauses.others.insert(id.clone(), others);
        }
    }

    /// Now and then a pause begins, changes or ends; all may be aborted with it.
    pub(super) fn pause(&mut self) {
        let is_paused = self.scheduler.pause_state() != PauseState::Unpaused;
        if !self.pauses.random.chance(if is_paused { 12 } else { 1 }) {
            self.check_rest();
            return;
        }
        let states = [PauseState::Unpaused, PauseState::PausedNew, PauseState::PausedAll];
        let state = states[self.pauses.random.between(0, 2) as usize];
        self.scheduler.set_pause_state(state);
        self.coverage.pauses += u64::from(state != PauseState::Unpaused);
        if state == PauseState::PausedNew && self.pauses.random.chance(10) {
            for expectation in self.live.values_mut() {
                expectation.aborted = true;
            }
            self.coverage.aborted_by_pauses += self.scheduler.abort_all() as u64;
            assert_eq!(self.scheduler.num_unfinished_requests(), 0);
        }
        self.check_rest();
    }

    /// What is at rest plans nothing.
    fn check_rest(&mut self) {
        if !self.scheduler.is_at_rest() {
            return;
        }
        assert_ne!(self.scheduler.pause_state(), PauseState::Unpaused);
        assert!(self.flights.is_empty());
        assert!(self.scheduler.schedule().expect("a free set").is_none(), "it is at rest");
        self.check_queue();
        self.drain();
        self.coverage.rests += 1;
    }

    /// A request has a row in a step: during a pause, one in flight.
    pub(super) fn check_admission(&mut self, request_id: &str) {
        match self.scheduler.pause_state() {
            PauseState::Unpaused => {}
            PauseState::PausedAll => panic!("request {request_id} runs while all is paused"),
            PauseState::PausedNew if self.seen.contains(request_id) => self.coverage.rows_of_pauses += 1,
            PauseState::PausedNew => {
                let others = self.pauses.others.get(request_id);
                let has_begun = others.is_some_and(|others| others.iter().any(|id| self.seen.contains(id)));
                assert!(has_begun, "request {request_id} is new");
                self.coverage.samples_of_pauses += 1;
            }
        }
    }
}
