//! `Outgoing`: the scheduler's end of the egress, and the records that wait for room in it.

use std::collections::VecDeque;

use crate::{
    egress::{self, Consumer, Decodes, Producer},
    logprobs::{TokenLogprobs, prompt::PromptLogprobs},
    output::EngineCoreOutput,
    pooling::PooledVector,
};

/// See the module docs.
#[derive(Debug)]
pub(crate) struct Outgoing {
    egress: Producer,
    /// Records that did not fit into the egress; offered again with the next step.
    spill: VecDeque<EngineCoreOutput>,
    consumer: Option<Consumer>,
}

impl Outgoing {
    pub(crate) fn new(num_places: usize) -> Self {
        let (egress, consumer) = egress::channel(num_places);
        Self { egress, spill: VecDeque::new(), consumer: Some(consumer) }
    }

    pub(crate) fn take_consumer(&mut self) -> Option<Consumer> {
        self.consumer.take()
    }

    /// Put a record into the egress, or behind the records that already wait for room.
    pub(crate) fn offer(&mut self, record: EngineCoreOutput) {
        if !self.spill.is_empty() || !self.egress.has_room() {
            self.spill.push_back(record);
        } else {
            self.egress.push(record);
        }
    }

    /// The fast way for a step's plain tokens; `None` while records wait, because those must go first.
    pub(crate) fn decodes(&mut self, now: u64) -> Option<Decodes<'_>> {
        if self.spill.is_empty() { Some(self.egress.decodes(now)) } else { None }
    }

    pub(crate) fn push_logprobs(&mut self, logprobs: TokenLogprobs) {
        self.egress.push_logprobs(logprobs);
    }

    pub(crate) fn push_prompt_logprobs(&mut self, logprobs: PromptLogprobs) {
        self.egress.push_prompt_logprobs(logprobs);
    }

    pub(crate) fn push_pooled(&mut self, vector: PooledVector) {
        self.egress.push_pooled(vector);
    }

    /// Publish what is in the egress, and move as many waiting records into it as fit.
    pub(crate) fn publish(&mut self) {
        while let Some(&record) = self.spill.front() {
            if !self.egress.push(record) {
                break;
            }
            self.spill.pop_front();
        }
        self.egress.publish();
    }

    /// Number of records that wait for room.
    pub(crate) fn num_held_back(&self) -> usize {
        self.spill.len()
    }

    /// Whether the output side has something to take.
    pub(crate) fn has_published(&self) -> bool {
        self.egress.has_published()
    }
}
