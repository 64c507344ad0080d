//! `Rows`: the persistent rows of the worker, and the news of those that were given up.

use std::{collections::VecDeque, vec::Drain};

use crate::request::{NO_ROW, Tenant};

/// See the module docs. A row is used again only after every step in flight that names it has been updated.
#[derive(Debug)]
pub(crate) struct Rows {
    free: Vec<u32>,
    /// Given up while steps that name them are in flight, with the newest such step.
    retiring: VecDeque<(u64, u32)>,
    /// Given up since the last step, with the ids of their requests for the debug view.
    finished: Vec<(u32, Box<str>)>,
    /// Given up since the last step that was dispatched, with whose they were.
    preempted: Vec<(u32, Tenant)>,
}

impl Rows {
    pub(crate) fn new(num_rows: u32) -> Self {
        Self {
            free: (0..num_rows).rev().collect(),
            retiring: VecDeque::with_capacity(num_rows as usize),
            finished: Vec::with_capacity(num_rows as usize),
            preempted: Vec::with_capacity(num_rows as usize),
        }
    }

    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    pub(crate) fn num_free(&self) -> usize {
        self.free.len()
    }

    /// A row for a request that is admitted.
    pub(crate) fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or(NO_ROW)
    }

    /// Give up a row; `newest_in_flight` is the newest step that may name it.
    pub(crate) fn give_up(&mut self, row: u32, newest_in_flight: Option<u64>) {
        match newest_in_flight {
            None => self.free.push(row),
            Some(step) => self.retiring.push_back((step, row)),
        }
    }

    /// Free the rows that only steps up to `updated` have named.
    pub(crate) fn settle(&mut self, updated: u64) {
        while self.retiring.front().is_some_and(|&(step, _)| step <= updated) {
            if let Some((_, row)) = self.retiring.pop_front() {
                self.free.push(row);
            }
        }
    }

    /// Tell the worker with the next step that the row's request has finished.
    pub(crate) fn note_finished(&mut self, row: u32, request_id: Box<str>) {
        self.finished.push((row, request_id));
    }

    /// Tell the worker with the next step that the row's request has lost it.
    pub(crate) fn note_preempted(&mut self, row: u32, tenant: Tenant) {
        self.preempted.push((row, tenant));
    }

    /// Preemptions that no step has brought to the worker yet.
    pub(crate) fn num_preempted(&self) -> usize {
        self.preempted.len()
    }

    pub(crate) fn take_finished(&mut self) -> Drain<'_, (u32, Box<str>)> {
        self.finished.drain(..)
    }

    pub(crate) fn take_preempted(&mut self) -> Drain<'_, (u32, Tenant)> {
        self.preempted.drain(..)
    }

    /// Rows that no live request has.
    pub(crate) fn unused(&self) -> impl Iterator<Item = u32> + '_ {
        self.free.iter().copied().chain(self.retiring.iter().map(|(_, row)| *row))
    }

    /// Rows that wait for a step, with that step.
    pub(crate) fn retiring(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.retiring.iter().copied()
    }
}
