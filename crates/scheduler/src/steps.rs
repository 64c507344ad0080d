//! `Steps`: the buffer sets, and which of them are in flight.

use std::{
    collections::VecDeque,
    ops::{Index, IndexMut},
};

use crate::{
    config::SchedulerConfig,
    error::SchedulerError,
    output::SchedulerOutput,
    request::{Tenant, forced::ForcedTokens},
    step::Step,
    step_buffers::StepBuffers,
};

/// See the module docs. Indexed by set.
#[derive(Debug)]
pub(crate) struct Steps {
    sets: Vec<Step>,
    /// Sets of the steps that were not updated yet, oldest first.
    in_flight: VecDeque<usize>,
    last_step: u64,
    max_in_flight: u32,
}

impl Index<usize> for Steps {
    type Output = Step;

    #[inline]
    fn index(&self, set: usize) -> &Step {
        &self.sets[set]
    }
}

impl IndexMut<usize> for Steps {
    #[inline]
    fn index_mut(&mut self, set: usize) -> &mut Step {
        &mut self.sets[set]
    }
}

impl Steps {
    pub(crate) fn new(buffers: Vec<StepBuffers>, config: &SchedulerConfig) -> Self {
        Self {
            in_flight: VecDeque::with_capacity(buffers.len()),
            sets: buffers.into_iter().map(|buffers| Step::new(buffers, config)).collect(),
            last_step: 0,
            max_in_flight: config.max_steps_in_flight,
        }
    }

    /// The set for the next step. Sets rotate, so that the arrays of the last step stay readable.
    pub(crate) fn free_set(&self) -> Result<usize, SchedulerError> {
        match self.oldest() {
            Some(oldest) if self.in_flight.len() >= self.max_in_flight as usize => {
                Err(SchedulerError::StepInFlight {
                    oldest_step: self.sets[oldest].output.step,
                    limit: self.max_in_flight,
                })
            }
            _ => Ok(self.last_step as usize % self.sets.len()),
        }
    }

    /// Begin the plan of the next step in `set`.
    pub(crate) fn begin(&mut self, set: usize) {
        self.sets[set].begin(self.last_step + 1, set as u32);
    }

    /// Record that the plan in `set` is complete: its step is in flight.
    pub(crate) fn dispatch(&mut self, set: usize) {
        self.last_step = self.sets[set].output.step;
        self.in_flight.push_back(set);
    }

    /// Record that the oldest step in flight has ended. Returns its number.
    pub(crate) fn close(&mut self, set: usize) -> u64 {
        self.in_flight.pop_front();
        self.sets[set].output.step
    }

    /// Number of the step that was dispatched last.
    pub(crate) fn last(&self) -> u64 {
        self.last_step
    }

    /// Number of the step that was dispatched last; `None` if no step is in flight.
    pub(crate) fn newest_in_flight(&self) -> Option<u64> {
        (!self.in_flight.is_empty()).then_some(self.last_step)
    }

    /// Set of the oldest step in flight.
    pub(crate) fn oldest(&self) -> Option<usize> {
        self.in_flight.front().copied()
    }

    /// Set of the newest step in flight.
    pub(crate) fn newest(&self) -> Option<usize> {
        self.in_flight.back().copied()
    }

    /// Sets of the steps in flight, oldest first.
    pub(crate) fn in_flight(&self) -> impl Iterator<Item = usize> + '_ {
        self.in_flight.iter().copied()
    }

    /// The step of `output`, if it is in flight and was not written again.
    pub(crate) fn of(&self, output: &SchedulerOutput) -> Option<&Step> {
        let set = output.buffer_index as usize;
        self.sets.get(set).filter(|step| step.output == *output && self.in_flight.contains(&set))
    }

    /// See [`of`](Self::of).
    pub(crate) fn of_mut(&mut self, output: &SchedulerOutput) -> Option<&mut Step> {
        let set = output.buffer_index as usize;
        let is_in_flight = self.in_flight.contains(&set);
        self.sets.get_mut(set).filter(|step| is_in_flight && step.output == *output)
    }

    /// Take the forced tokens of a request that steps in flight would have emitted, oldest first.
    pub(crate) fn take_forced(&mut self, tenant: Tenant) -> Vec<ForcedTokens> {
        let mut found = Vec::new();
        for &set in &self.in_flight {
            let own = self.sets[set].entries.iter_mut().filter(|entry| entry.tenant == tenant);
            found.extend(own.map(|entry| std::mem::take(&mut entry.forced)));
        }
        found
    }

    /// The set of `output`, which must be the oldest step in flight.
    pub(crate) fn expect_oldest(&self, output: &SchedulerOutput) -> Result<usize, SchedulerError> {
        match self.oldest() {
            Some(set) if self.sets[set].output == *output => Ok(set),
            Some(set) if self.sets[set].output.step == output.step => {
                Err(SchedulerError::OutdatedOutput { step: output.step })
            }
            oldest => Err(SchedulerError::WrongStep {
                step: output.step,
                oldest_step: oldest.map(|set| self.sets[set].output.step),
            }),
        }
    }
}
