//! What a plan must keep to, and what a worker learns from it.

use std::collections::HashSet;

use scheduler::{PauseState, RequestStatus, SchedulerOutput};

use super::World;

impl World {
    /// Nothing can run: nothing is in flight, and all wait for something from outside.
    pub(super) fn check_idle(&self) {
        if !self.flights.is_empty() || self.scheduler.pause_state() == PauseState::PausedAll {
            return;
        }
        let running = self.scheduler.running_request_ids();
        assert!(
            running.iter().all(|id| self.held.contains(id)),
            "running requests that are not held back always have something to run"
        );
        if !running.is_empty() {
            return;
        }
        assert!(
            self.scheduler.leaving_request_ids().is_empty(),
            "who leaves waits for steps in flight alone"
        );
        let ids = self.scheduler.waiting_request_ids();
        let waits_for_grammar = |id: &String| {
            let state = self.scheduler.request_state(id);
            state.is_some_and(|state| state.status == RequestStatus::WaitingForGrammar)
        };
        let may_rest = self.scheduler.is_at_rest(); // who waits, waits for the end of the pause
        assert!(
            ids.is_empty() || may_rest || ids.iter().any(waits_for_grammar),
            "an idle scheduler has no request to run"
        );
    }

    /// How often a request gave up its blocks.
    pub(super) fn num_gave_way(&self) -> u64 {
        let stats = self.scheduler.handle().stats();
        stats.num_preemptions + stats.num_swapped_out
    }

    /// The plan keeps to every limit. `num_gave_way_before`: preemptions and swap-outs before it was made.
    pub(super) fn check_plan(&mut self, output: &SchedulerOutput, num_gave_way_before: u64) {
        let view = self.scheduler.step_view(output).expect("in flight");
        let total: u32 = view.scheduled.iter().map(|row| row.num_scheduled_tokens).sum();
        assert_eq!(total, output.total_num_scheduled_tokens);
        let longest = view.scheduled.iter().map(|row| row.num_scheduled_tokens).max();
        assert_eq!(longest, Some(output.max_num_scheduled_tokens));
        assert!(total <= self.config.max_num_batched_tokens, "the token budget holds");
        assert!(view.scheduled.len() <= self.config.max_num_seqs as usize);
        let mut ids = HashSet::new();
        for row in &view.scheduled {
            assert!(row.num_scheduled_tokens >= 1 && ids.insert(row.request_id.clone()), "each request once");
            assert!(row.spec_token_ids.len() <= self.config.num_speculative_tokens as usize);
            assert!(row.num_computed_tokens + row.num_scheduled_tokens <= self.config.max_model_len);
            self.check_admission(&row.request_id);
            if self.seen.insert(row.request_id.clone()) && self.plain.contains(&row.request_id) {
                self.first_scheduled.push(row.request_id.parse().expect("a number"));
            }
        }
        if self.config.pipeline_stages > 1 {
            self.check_spread(&view);
        }
        let is_admission = |row: &scheduler::ScheduledRequest| row.is_new || row.is_resumed;
        assert!(
            self.num_gave_way() == num_gave_way_before
                || !view.scheduled.iter().any(is_admission)
                || view.scheduled.iter().all(is_admission),
            "no admission with a preemption, unless no request is left to be protected"
        );
    }

    /// In a pipeline a request waits for its token, and a step leaves rows for as many others as there are stages.
    fn check_spread(&self, view: &scheduler::StepView) {
        let stages = self.config.pipeline_stages as usize;
        let most = self.scheduler.num_unfinished_requests().div_ceil(stages).max(1);
        assert!(view.scheduled.len() <= most, "{} rows of a step of at most {most}", view.scheduled.len());
        for flight in &self.flights {
            let other = self.scheduler.step_view(&flight.output).expect("in flight");
            for row in other.scheduled.iter().filter(|row| row.sampled) {
                let state = self.scheduler.request_state(&row.request_id);
                let called_off = |number| flight.withheld.iter().any(|&(row, _)| row == number);
                if state.and_then(|state| state.row).is_some_and(called_off) {
                    continue; // Its token was called off: there is none to wait for.
                }
                let is_in_both = view.scheduled.iter().any(|own| own.request_id == row.request_id);
                assert!(!is_in_both, "request {} is in two steps", row.request_id);
            }
        }
    }

    /// Whose row is new shares it with no step in flight: what those still give is another request's.
    pub(super) fn check_rows(&self, output: &SchedulerOutput) {
        let arrays = |output| self.scheduler.buffers(output).expect("in flight");
        let new_rows = arrays(output).new_rows.to_vec(output.num_new_reqs as usize);
        for flight in &self.flights {
            let rows = arrays(&flight.output).idx_mapping.to_vec(flight.output.num_reqs as usize);
            for row in &new_rows {
                let step = flight.output.step;
                assert!(!rows.contains(row), "row {row} is reused while step {step} names it");
            }
        }
    }

    /// The worker that applied only differences knows exactly the scheduler's block tables.
    pub(super) fn check_mirror(&self) {
        for id in self.scheduler.running_request_ids() {
            let state = self.scheduler.request_state(&id).expect("running");
            let blocks: Vec<u32> = state.block_table.iter().map(|block| block.0).collect();
            assert_eq!(self.mirror.of_row(state.row.expect("running")), blocks, "request {id}");
        }
    }
}
