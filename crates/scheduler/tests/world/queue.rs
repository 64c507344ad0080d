//! What bounds the queue: tokens that may wait, and for how long.

use std::{collections::HashSet, time::Duration};

use scheduler::{AddRequestError, NewRequest, RequestKey, SchedulerConfig, monotonic_ns};

use super::World;
use crate::common::Random;

/// Never over while a test runs: time is what a test says.
const TIMEOUT: Duration = Duration::from_secs(3600);

/// Its own random numbers: a run without limits is the same as it was before there were any.
pub(super) struct Queue {
    random: Random,
    /// Requests in the order in which they were handed in, each with a moment behind it and before the next.
    handed_in: Vec<(RequestKey, u64)>,
    /// Who waited too long for its first step.
    pub(super) overdue: HashSet<RequestKey>,
}

impl Queue {
    /// With limits for `config`.
    pub(super) fn new(seed: u64, config: &mut SchedulerConfig) -> Self {
        let mut random = Random(seed.wrapping_mul(0x0DD_BA11));
        if random.chance(30) {
            config.max_num_queued_tokens = random.between(8, 150).into();
        }
        if random.chance(50) {
            config.queue_timeout = TIMEOUT;
        }
        Self { random, handed_in: Vec::new(), overdue: HashSet::new() }
    }
}

/// Tokens that requests count for: what a fork shares is not counted again.
fn num_tokens(requests: &[NewRequest]) -> u64 {
    let prompts = requests.iter().filter(|request| request.fork_from.is_none());
    prompts.map(|request| request.prompt_token_ids.len() as u64).sum()
}

impl World {
    /// Hand requests in and hold the answer against what waits already.
    pub(super) fn add_to_queue(&mut self, requests: &[NewRequest]) -> Result<(), AddRequestError> {
        let handle = self.scheduler.handle();
        let before = (handle.num_queued(), handle.num_queued_tokens());
        let (count, tokens) = (requests.len() as u32, num_tokens(requests));
        let keys: Vec<_> = requests.iter().map(|request| request.key).collect();
        let limit = self.config.max_num_queued_tokens;
        let fits = limit == 0 || before.1 == 0 || before.1 + tokens <= limit;
        let result = handle.add_requests(requests.to_vec());
        let after = (handle.num_queued(), handle.num_queued_tokens());
        match &result {
            Ok(()) => {
                assert!(fits, "more tokens wait than may");
                assert_eq!(after, (before.0 + count, before.1 + tokens), "what was taken in is counted");
                self.ledger.add(requests);
                let now = monotonic_ns();
                while monotonic_ns() <= now {}
                self.queue.handed_in.extend(keys.into_iter().map(|key| (key, now)));
            }
            Err(error) => {
                assert_eq!(after, before, "what was refused is not counted");
                if let AddRequestError::QueueFull { .. } | AddRequestError::QueueTokensFull { .. } = error {
                    self.ledger.refuse(matches!(error, AddRequestError::QueueTokensFull { .. }));
                }
                if let AddRequestError::QueueTokensFull { queued, wanted, limit } = *error {
                    assert_eq!(
                        (queued, wanted, limit),
                        (before.1, tokens, self.config.max_num_queued_tokens)
                    );
                    assert!(!fits, "{wanted} tokens besides {queued} were refused, the limit is {limit}");
                    self.coverage.full_of_tokens += 1;
                }
            }
        }
        result
    }

    /// Sometimes, those that were handed in up to some moment have waited too long, if they wait for their first step.
    pub(super) fn let_time_pass(&mut self) {
        if self.config.queue_timeout.is_zero()
            || !self.queue.random.chance(2)
            || self.queue.handed_in.is_empty()
        {
            return;
        }
        // Mostly among the newest: the others have been served.
        let newest = self.queue.handed_in.len() as u32 - 1;
        let oldest = if self.queue.random.chance(80) { newest.saturating_sub(8) } else { 0 };
        let last = self.queue.random.between(oldest, newest) as usize;
        let (_, moment) = self.queue.handed_in[last];
        let mut due = Vec::new();
        // Those of one group have one moment.
        for (key, _) in self.queue.handed_in.iter().filter(|(_, handed_in)| *handed_in <= moment) {
            if let Some(expectation) = self.live.get(key)
                && !self.seen.contains(&expectation.request_id)
            {
                // Its last output may not have found room yet.
                let is_new = self.queue.overdue.insert(*key);
                let may_have_left = expectation.aborted || expectation.failed || !is_new;
                due.push((expectation.request_id.clone(), may_have_left));
            }
        }
        let num_ended = self.scheduler.end_overdue_by(moment + TIMEOUT.as_nanos() as u64);
        let num_uncertain = due.iter().filter(|(_, may_have_left)| *may_have_left).count();
        assert!(num_ended <= due.len() && num_ended + num_uncertain >= due.len(), "{num_ended} of {due:?}");
        for (request_id, _) in &due {
            assert!(self.scheduler.request_state(request_id).is_none(), "{request_id} has waited too long");
        }
        self.coverage.overdue += num_ended as u64;
        self.drain();
    }

    /// After everything was taken in: what is counted waits, and nothing else.
    pub(super) fn check_queue(&self) {
        let handle = self.scheduler.handle();
        let counted = (handle.num_queued(), handle.num_queued_tokens());
        assert_eq!(counted, self.scheduler.count_queue(), "who waits for its first step is counted once");
    }
}
