//! The running requests of a step: each, in admission order, runs its missing tokens.

use super::Scheduler;
use crate::{
    request::{Request, RequestStatus},
    step::Row,
};

/// The result of a request's turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Turn {
    /// It is in the step, or has nothing to run.
    Served,
    /// It was the victim itself and gave up its blocks; requests after it may run with them.
    GaveUp,
    /// It waits for blocks that will be swapped out.
    Waits,
}

impl Scheduler {
    /// Schedule running requests in admission order, while `budget` lasts and there are fewer than `max_rows`, up to
    /// one that waits for blocks.
    pub(crate) fn schedule_running(&mut self, set: usize, budget: &mut u32, max_rows: usize) {
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            let Some(rows_left) =
                max_rows.checked_sub(self.steps[set].entries.len()).filter(|&left| left > 0)
            else {
                return;
            };
            let running = &self.running[index..];
            let most = rows_left.min(*budget as usize);
            let done = self.steps[set].push_decodes(running, &mut self.requests, &mut self.kv, most);
            index += done;
            *budget -= done as u32;
            if index == self.running.len() || *budget == 0 || done == rows_left {
                break;
            }
            match self.schedule_one(set, &mut index, budget) {
                Turn::Served => index += 1,
                Turn::GaveUp => {} // The next one has its place.
                Turn::Waits => return,
            }
        }
    }

    /// Schedule a running request that is not a plain decode: it has several tokens to compute, or none, or another
    /// must give up blocks for it. `index` is its place in the running list, and is kept correct if others before it
    /// leave.
    fn schedule_one(&mut self, set: usize, index: &mut usize, budget: &mut u32) -> Turn {
        let slot = self.running[*index];
        let request = &self.requests[slot as usize];
        if self.config.is_pipeline() && request.num_output_placeholders() > 0 {
            return Turn::Served; // it waits for its token, so that others have a step of their own
        }
        let num_tokens =
            self.clip(request, request.num_computed_tokens, request.num_wanted_tokens(), *budget);
        if num_tokens == 0 {
            return Turn::Served;
        }
        if !self.can_tell_worker(set, slot) {
            return Turn::Served;
        }
        let step = self.steps[set].output.step;
        let num_owned = self.requests[slot as usize].block_table.len() as u32;
        let mut replay = false;
        let turn = loop {
            let end = self.requests[slot as usize].num_computed_tokens + num_tokens;
            if self.own_next_block(slot, end)
                && self.kv.allocate_slots(&mut self.requests[slot as usize], &[], end, None, step)
            {
                break Turn::Served;
            }
            if !self.leaving.is_empty() {
                break Turn::Waits;
            }
            let victim = self.running[self.choose_victim(step)];
            let beams = self.running_beams(victim);
            let victims = beams.as_deref().unwrap_or(std::slice::from_ref(&victim));
            for &victim in victims {
                if self.running.iter().position(|&other| other == victim).is_some_and(|at| {
                    self.running.remove(at);
                    at < *index
                }) {
                    *index -= 1;
                }
                if let Some(returned) = self.unschedule(set, victim) {
                    *budget += returned;
                    replay = true;
                }
            }
            match &beams {
                Some(beams) => self.preempt_search(beams),
                None => self.preempt(victim, step),
            }
            if victims.contains(&slot) {
                break Turn::GaveUp;
            }
        };
        if replay {
            self.steps[set].replay(&self.requests);
        }
        if turn == Turn::Served {
            let (unknown_from, is_new) = self.take_news(slot);
            let request = &mut self.requests[slot as usize];
            let grown_from = (request.block_table.len() as u32 > num_owned).then_some(num_owned);
            let block_table_start = unknown_from.into_iter().chain(grown_from).min();
            self.steps[set].push(slot, request, Row { num_tokens, block_table_start, is_new });
            *budget -= num_tokens;
        }
        turn
    }

    /// How many of `wanted` tokens one request may run from `start` on. The long-prefill threshold applies only if there are
    /// other requests and prompts may be split. If multimodal inputs are not to be split, 0 means that one needs more of a
    /// step than is left.
    pub(crate) fn clip(&self, request: &Request, start: u32, wanted: u32, budget: u32) -> u32 {
        let threshold = self.config.long_prefill_token_threshold;
        let may_cut = self.config.enable_chunked_prefill && self.num_unfinished_requests() > 1;
        let wanted = if threshold > 0 && may_cut { wanted.min(threshold) } else { wanted };
        let num_tokens = wanted.min(budget);
        if !self.config.disable_chunked_mm_input {
            return num_tokens;
        }
        request.cold.extra_keys.end_of_chunk(start, start + num_tokens) - start
    }
}

impl Request {
    /// Number of tokens that the request could run now, without drafts.
    pub(crate) fn num_wanted_tokens(&self) -> u32 {
        debug_assert!(
            !self.status.is_finished() && self.status != RequestStatus::Preempted,
            "it has a row to run"
        );
        if self.is_full() || self.is_held {
            return 0;
        }
        let wanted = self.num_expected_tokens - self.num_computed_tokens;
        if self.cold.num_fork_children == 0 {
            return wanted;
        }
        // Its children share everything before the last token of the prompt, and compute that one in the same step.
        let shared = self.cold.num_prompt_tokens - 1;
        if self.num_computed_tokens < shared { wanted.min(shared - self.num_computed_tokens) } else { wanted }
    }
}
