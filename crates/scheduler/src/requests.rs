//! `Requests`: all live requests, found by slot, id or key.

pub(crate) mod rows;

use std::{
    collections::HashMap,
    ops::{Index, IndexMut},
};

use crate::{output::RequestKey, request::Request};

/// See the module docs. Indexed by slot; a slot is used again after its request has left.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    slots: Vec<Request>,
    free_slots: Vec<u32>,
    by_id: HashMap<Box<str>, u32>,
    by_key: HashMap<RequestKey, u32>,
    num_arrivals: u64,
    /// Live ones whose output obeys a grammar.
    num_with_grammar: u32,
}

impl Index<usize> for Requests {
    type Output = Request;

    #[inline]
    fn index(&self, slot: usize) -> &Request {
        &self.slots[slot]
    }
}

impl IndexMut<usize> for Requests {
    #[inline]
    fn index_mut(&mut self, slot: usize) -> &mut Request {
        &mut self.slots[slot]
    }
}

impl Requests {
    /// Slot of the live request with this key.
    pub(crate) fn slot_of_key(&self, key: RequestKey) -> Option<u32> {
        self.by_key.get(&key).copied()
    }

    /// Slot of the live request with this id.
    pub(crate) fn slot_of_id(&self, request_id: &str) -> Option<u32> {
        self.by_id.get(request_id).copied()
    }

    /// Keys of all live requests, in no order.
    pub(crate) fn keys(&self) -> Vec<RequestKey> {
        self.by_key.keys().copied().collect()
    }

    /// A slot for a new request, the epoch of its tenancy, and its place in the order of arrival.
    pub(crate) fn reserve(&mut self) -> (u32, u32, u64) {
        let slot = self.free_slots.pop().unwrap_or(self.slots.len() as u32);
        let epoch = self.slots.get(slot as usize).map_or(0, |previous| previous.epoch);
        let arrival = self.num_arrivals;
        self.num_arrivals += 1;
        (slot, epoch, arrival)
    }

    /// The requests in two slots; `None` if that is the same slot twice.
    pub(crate) fn two(&mut self, one: u32, other: u32) -> Option<[&mut Request; 2]> {
        self.slots.get_disjoint_mut([one as usize, other as usize]).ok()
    }

    /// Put a request into the slot that was reserved for it.
    pub(crate) fn insert(&mut self, slot: u32, request: Request) {
        self.by_id.insert(request.cold.request_id.clone(), slot);
        self.by_key.insert(request.key, slot);
        self.num_with_grammar += u32::from(request.cold.uses_grammar);
        match self.slots.get_mut(slot as usize) {
            Some(place) => *place = request,
            None => self.slots.push(request),
        }
    }

    /// A request leaves: its id and key lead nowhere any more, and its slot begins another tenancy.
    pub(crate) fn retire(&mut self, slot: u32) {
        let request = &mut self.slots[slot as usize];
        request.epoch = request.epoch.wrapping_add(1);
        self.num_with_grammar -= u32::from(request.cold.uses_grammar);
        self.by_key.remove(&request.key);
        self.by_id.remove(&request.cold.request_id);
    }

    /// Let the slot of a request that has left be used again.
    pub(crate) fn free(&mut self, slot: u32) {
        self.free_slots.push(slot);
    }

    /// Whether a live request obeys a grammar.
    pub(crate) fn any_with_grammar(&self) -> bool {
        self.num_with_grammar > 0
    }

    /// Slots, used or free.
    pub(crate) fn num_slots(&self) -> usize {
        self.slots.len()
    }

    /// Slots that the next requests take.
    pub(crate) fn free_slots(&self) -> &[u32] {
        &self.free_slots
    }

    /// How many ids and how many keys lead to a request.
    pub(crate) fn num_names(&self) -> (usize, usize) {
        (self.by_id.len(), self.by_key.len())
    }
}
