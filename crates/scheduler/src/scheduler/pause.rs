//! `PauseState`: whether steps are planned at all, and for whom.
//!
//! A paused scheduler still takes requests in, and ends those that are aborted or have waited too long. Requests in
//! flight are those that were admitted before, also if they were preempted since, and with one sample all samples of a
//! request.

use super::Scheduler;
use crate::request::Request;

/// What a pause stops.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PauseState {
    /// Nothing: there is no pause.
    #[default]
    Unpaused,
    /// Requests that are not in flight wait; those in flight run to their ends.
    PausedNew,
    /// No request runs; those in flight keep their blocks.
    PausedAll,
}

impl Scheduler {
    /// What is paused now.
    #[must_use]
    pub fn pause_state(&self) -> PauseState {
        self.pause_state
    }

    /// Pause, or end the pause, from the next `schedule` on. Steps in flight are still to be updated.
    pub fn set_pause_state(&mut self, pause_state: PauseState) {
        self.pause_state = pause_state;
        self.stats.is_paused = u64::from(pause_state != PauseState::Unpaused);
        self.publish();
    }

    /// Whether the scheduler is paused and no step runs, or will run before the pause ends. O(waiting requests).
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        let runs_on = match self.pause_state {
            PauseState::Unpaused => true,
            PauseState::PausedAll => false,
            PauseState::PausedNew => {
                !self.running.is_empty()
                    || !self.leaving.is_empty()
                    || self.waiting.iter().any(|slot| is_in_flight(&self.requests[slot as usize]))
            }
        };
        !runs_on && self.steps.oldest().is_none()
    }

    /// Abort every request, those in the inbox included. Returns how many there were.
    pub fn abort_all(&mut self) -> usize {
        self.drain_inbox();
        let mut aborted = Vec::new();
        let mut keys = self.requests.keys();
        keys.sort_unstable(); // so that a run can be repeated, down to the order of free blocks
        for key in keys {
            // The beams of a search leave together.
            if let Some(slot) = self.requests.slot_of_key(key) {
                self.abort(slot, &mut aborted);
            }
        }
        let num_aborted = aborted.len();
        self.drop_finished();
        for slot in aborted {
            self.requests.free(slot);
        }
        self.publish();
        num_aborted
    }

    /// Whether the pause keeps a waiting request from being admitted.
    pub(crate) fn is_kept_waiting(&self, slot: u32) -> bool {
        self.pause_state != PauseState::Unpaused && !is_in_flight(&self.requests[slot as usize])
    }
}

fn is_in_flight(request: &Request) -> bool {
    request.cold.admitted_before || request.cold.group.as_ref().is_some_and(|group| group.has_begun())
}
