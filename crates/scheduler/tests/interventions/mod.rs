//! What comes from outside between steps, on both schedulers: time, who is held back, tokens that are known, pauses.
//!
//! Each has its own random numbers, so that what else happens does not depend on it.

use scheduler::{PauseState, SchedulerOutput};

use crate::{World, naive::NaiveStep};

impl World {
    /// Who was handed in up to some moment and waits for its first step has waited too long.
    pub(super) fn let_time_pass(&mut self) {
        if self.config.queue_timeout.is_zero() || !self.time.chance(2) || self.handed_in.is_empty() {
            return;
        }
        let newest = self.handed_in.len() as u32 - 1;
        let last = self.time.between(newest.saturating_sub(8), newest) as usize;
        let (due, moment) = (&self.handed_in[..=last], self.handed_in[last].1);
        let num_ended = self.real.end_overdue_by(moment + self.config.queue_timeout.as_nanos() as u64);
        let expected = self.naive.end_overdue(|id| due.iter().any(|(other, _)| other == id));
        assert_eq!(num_ended, expected, "who waited too long");
        self.coverage.count("waited too long", num_ended);
        self.check_state();
    }

    /// Hold one back, or let one go on.
    pub(super) fn hold(&mut self) {
        if self.ids.is_empty() || !self.patience.chance(4) {
            return;
        }
        let id = self.ids[self.patience.next() as usize % self.ids.len()].clone();
        self.force(&id, None);
        let is_held = self.patience.chance(50);
        self.real.hold_back(self.keys[&id], is_held);
        self.naive.hold(&id, is_held);
        self.coverage.count("held back", usize::from(self.naive.by_id(&id).is_some_and(|one| one.is_held)));
    }

    /// Call off some tokens of the step that was planned last.
    pub(super) fn withhold(&mut self, output: &SchedulerOutput, step: &NaiveStep) {
        for id in &step.sampled {
            match self.patience.between(0, 19) {
                0 => self.force(id, Some(output)),
                1 => {
                    let is_withheld = self.real.withhold_sample(output, self.keys[id]);
                    assert_eq!(is_withheld, self.naive.withhold(id), "request {id}: withheld");
                    self.coverage.count("withheld", usize::from(is_withheld));
                }
                _ => {}
            }
        }
        self.check_state();
    }

    /// Some tokens are known that no step gives.
    pub(super) fn force(&mut self, id: &str, planned: Option<&SchedulerOutput>) {
        let bits = self.patience.next();
        let tokens: Vec<i32> = (0..bits >> 8 & 7).map(|bit| (bits >> bit & 1) as i32).collect();
        let num_forced = self.real.force_tokens(planned, self.keys[id], &tokens);
        assert_eq!(num_forced, self.naive.force(id, &tokens, planned.is_some()), "request {id}: forced");
        self.coverage.count(if planned.is_some() { "forced in a step" } else { "forced" }, num_forced);
    }

    /// Begin a pause, change it or end it; a pause lasts for some operations.
    pub(super) fn pause(&mut self) {
        let is_paused = self.real.pause_state() != PauseState::Unpaused;
        if !self.pauses.chance(if is_paused { 15 } else { 1 }) {
            return;
        }
        let states = [PauseState::Unpaused, PauseState::PausedNew, PauseState::PausedAll];
        let state = states[self.pauses.between(0, 2) as usize];
        self.set_pause_state(state);
        if state == PauseState::PausedNew && self.pauses.chance(20) {
            let num_aborted = self.real.abort_all();
            assert_eq!(num_aborted, self.naive.abort_all(), "abort_all");
            self.coverage.count("aborted by pauses", num_aborted);
        }
        self.coverage.count("pauses", usize::from(state != PauseState::Unpaused));
        self.check_state();
    }

    pub(super) fn set_pause_state(&mut self, state: PauseState) {
        self.real.set_pause_state(state);
        self.naive.pause_state = state;
    }
}
