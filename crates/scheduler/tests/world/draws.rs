//! Prompts, and what requests and worlds have that no draw of the operations decides: these stay the ones of their seeds.

use std::sync::Arc;

use scheduler::{
    DrafterConfig, DraftingMethod, Payer, RepetitionDetection, RequestKey, SchedulerOutput, SuffixLimits,
};

use super::World;
use crate::common;

/// One whose drafts depend on the tokens alone: a run can be repeated.
pub(super) fn drafter_of(counts_votes: bool) -> DrafterConfig {
    let method = if counts_votes {
        DraftingMethod::Suffix(SuffixLimits { max_match: 8, max_factor: 2.0, min_share: 0.3 })
    } else {
        DraftingMethod::Ngram { min: 1, max: 2 }
    };
    DrafterConfig { method, caps: Vec::new(), num_archived_requests: 100, adaptive: false }
}

/// Few tenants with few users: they meet.
pub(super) fn payer_of(number: u32) -> Payer {
    let draw = common::mix(u64::from(number));
    let tenant = draw % 3;
    Payer { tenant, user: draw >> 8 & 3, weight: [1, 3, 1000][tenant as usize] }
}

/// What some of the callers expect: as right as chance makes it, with two tokens.
pub(super) fn predicted(number: u32) -> Option<Arc<[i32]>> {
    let draw = common::mix(u64::from(number) + 1);
    let num_tokens = draw >> 32 & 31;
    draw.is_multiple_of(3).then(|| (0..num_tokens).map(|bit| (draw >> bit & 1) as i32).collect())
}

/// Some of them end when they repeat themselves, and some of these not before a number of tokens.
pub(super) fn repetition_of(number: u32) -> (Option<RepetitionDetection>, u32) {
    let draw = common::mix(u64::from(number) + 2);
    let part = |shift: u32, count: u64| (draw >> shift) as u32 % count as u32;
    let (min_size, count) = (1 + part(8, 3), 2 + part(16, 4));
    let wanted = RepetitionDetection::new(min_size, min_size + part(24, 4), count).expect("in range");
    (draw.is_multiple_of(6).then_some(wanted), [0, 0, 5][part(32, 3) as usize])
}

impl World {
    pub(super) fn random_prompt(&mut self) -> Vec<i32> {
        let random = &mut self.random;
        let length = random.between(1, self.config.max_model_len + 2);
        // Few families of prompts, so that prefixes are shared often.
        let family = random.between(0, 2);
        (0..length)
            .map(|i| if random.chance(3) { 1 } else { (common::mix(u64::from(family << 8 | i)) & 1) as i32 })
            .collect()
    }

    /// Now and then one is held back, and those that are go on.
    pub(super) fn hold(&mut self) {
        if self.patience.chance(4) {
            self.release();
        }
        let running = self.scheduler.running_request_ids();
        if running.is_empty() || !self.patience.chance(4) {
            return;
        }
        let id = running[self.patience.between(0, running.len() as u32 - 1) as usize].clone();
        self.force(&id, None);
        // What left meanwhile has no key, and none is wanted for it.
        if let Some(key) = self.key_of(&id) {
            self.scheduler.hold_back(key, true);
            self.held.insert(id);
            self.coverage.held += 1;
        }
    }

    pub(super) fn release(&mut self) {
        for id in std::mem::take(&mut self.held) {
            if let Some(key) = self.key_of(&id) {
                self.scheduler.hold_back(key, false);
            }
        }
    }

    /// Some tokens of the step that was just planned are called off, some because others that follow are known; in which
    /// rows, and whether what the token was to be made of is computed once more.
    pub(super) fn withhold(&mut self, output: &SchedulerOutput) -> Vec<(u32, bool)> {
        let view = self.scheduler.step_view(output).expect("in flight");
        let mut withheld = Vec::new();
        for row in view.scheduled {
            let Some(key) = self.key_of(&row.request_id).filter(|_| self.patience.chance(10)) else {
                continue;
            };
            let is_taken_back = self.patience.chance(50);
            let is_called_off = if is_taken_back {
                self.scheduler.withhold_sample(output, key)
            } else {
                self.force(&row.request_id, Some(output)) > 0
            };
            if is_called_off {
                let state = self.scheduler.request_state(&row.request_id).expect("it runs");
                withheld.push((state.row.expect("it runs"), is_taken_back));
            }
            self.coverage.withheld += u64::from(is_called_off && is_taken_back);
        }
        self.scheduler.check_invariants();
        withheld
    }

    /// Tokens of a request are known before a step gives them; how many.
    fn force(&mut self, request_id: &str, planned: Option<&SchedulerOutput>) -> usize {
        let state = self.scheduler.request_state(request_id);
        let (Some(key), Some(state)) = (self.key_of(request_id), state) else { return 0 };
        let count = self.patience.between(1, 6) as usize;
        let num_known = state.token_ids.len() - state.num_prompt_tokens as usize;
        let tokens = &self.live[&key].tokens;
        let tokens: Vec<i32> = tokens.iter().skip(num_known).take(count).copied().collect();
        let num_forced = self.scheduler.force_tokens(planned, key, &tokens);
        let coverage = &mut self.coverage;
        let met = if planned.is_some() { &mut coverage.forced_in_steps } else { &mut coverage.forced };
        *met += num_forced as u64;
        num_forced
    }

    fn key_of(&self, request_id: &str) -> Option<RequestKey> {
        let mut live = self.live.iter();
        live.find(|(_, expectation)| expectation.request_id == request_id).map(|(&key, _)| key)
    }
}
