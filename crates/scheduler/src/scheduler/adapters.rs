//! `AdapterLimit`: limits the number of different adapters among the running requests.
//!
//! A request whose adapter is running already is admitted like any other. A request that would add another adapter
//! waits while `max_loras` adapters are running, and delays no other request. Each request with an adapter that is
//! admitted from behind it overtakes it. After it was overtaken `max_times_passed` times, no request with an adapter is
//! admitted from behind it, so that running ones end and a place becomes free. Requests without an adapter need no
//! place and are never held up.

use std::collections::BTreeMap;

use super::Scheduler;

/// What one walk through the queue knows about adapters.
#[derive(Debug)]
pub(crate) struct AdapterLimit {
    max_loras: usize,
    /// Different adapters of the running requests; `None` until it is needed.
    running: Option<Vec<i64>>,
    /// Slots of requests that wait for a place.
    waiting: Vec<u32>,
    /// Whether one of them has been overtaken often enough.
    is_closed: bool,
}

impl AdapterLimit {
    /// Allocates nothing until a request with an adapter waits.
    pub(crate) fn new(max_loras: u32) -> Self {
        Self { max_loras: max_loras as usize, running: None, waiting: Vec::new(), is_closed: false }
    }
}

impl Scheduler {
    /// The adapters of running requests and those of waiting requests, each once, in ascending order. Includes requests
    /// in the inbox. O(requests).
    pub fn live_adapters(&mut self) -> (Vec<i64>, Vec<i64>) {
        self.drain_inbox();
        let waiting = self.leaving.iter().copied().chain(self.waiting.iter()).collect::<Vec<_>>();
        (self.running_adapters(), self.adapters_of(&waiting))
    }

    /// The number of running and of waiting requests for each adapter, in ascending order of the adapters. O(requests).
    pub fn adapter_counts(&mut self) -> BTreeMap<i64, (u32, u32)> {
        self.drain_inbox();
        let mut counts = BTreeMap::new();
        let waiting = self.leaving.iter().copied().chain(self.waiting.iter());
        let slots = self.running.iter().map(|&slot| (slot, true)).chain(waiting.map(|slot| (slot, false)));
        for (slot, is_running) in slots {
            let adapter = self.requests[slot as usize].cold.params.adapter;
            if adapter == 0 {
                continue;
            }
            let (running, waiting) = counts.entry(adapter).or_insert((0, 0));
            *(if is_running { running } else { waiting }) += 1;
        }
        counts
    }

    /// From now on, requests may name this adapter, and no adapter that was not added like this. 0 adds none, but
    /// begins the list.
    pub fn add_adapter(&mut self, adapter: i64) {
        self.known_adapters.get_or_insert_default().insert(adapter);
    }

    /// Remove an adapter, unless a live request needs it; returns whether it was removed. Later requests that name it,
    /// from front ends that do not know this yet, are refused.
    pub fn remove_adapter(&mut self, adapter: i64) -> bool {
        let (running, waiting) = self.live_adapters();
        let is_free = !running.contains(&adapter) && !waiting.contains(&adapter);
        if is_free {
            self.known_adapters.get_or_insert_default().remove(&adapter);
        }
        is_free
    }

    pub(crate) fn has_adapter(&self, adapter: i64) -> bool {
        adapter == 0 || self.known_adapters.as_ref().is_none_or(|known| known.contains(&adapter))
    }

    /// Whether a waiting request may be admitted as far as its adapter is concerned; if not, it waits for a place.
    pub(crate) fn may_bring_adapter(&self, slot: u32, limit: &mut AdapterLimit) -> bool {
        let request = &self.requests[slot as usize];
        let adapter = request.cold.params.adapter;
        if adapter == 0 || limit.max_loras == 0 {
            return true;
        }
        if limit.is_closed {
            return false;
        }
        let running = limit.running.get_or_insert_with(|| self.running_adapters());
        if running.contains(&adapter) || running.len() < limit.max_loras {
            return true;
        }
        limit.waiting.push(slot);
        limit.is_closed = request.cold.num_times_passed >= self.config.max_times_passed;
        false
    }

    /// Record that a request was admitted: its adapter is running, and it has overtaken those that wait for a place.
    pub(crate) fn note_adapter(&mut self, slot: u32, limit: &mut AdapterLimit) {
        let adapter = self.requests[slot as usize].cold.params.adapter;
        let Some(running) = limit.running.as_mut().filter(|_| adapter != 0) else { return };
        if !running.contains(&adapter) {
            running.push(adapter);
        }
        for &waiting in &limit.waiting {
            self.requests[waiting as usize].cold.num_times_passed += 1;
        }
    }

    /// Different adapters of the running requests.
    pub(crate) fn running_adapters(&self) -> Vec<i64> {
        self.adapters_of(&self.running)
    }

    fn adapters_of(&self, slots: &[u32]) -> Vec<i64> {
        let adapters = slots.iter().map(|&slot| self.requests[slot as usize].cold.params.adapter);
        let mut adapters: Vec<i64> = adapters.filter(|&adapter| adapter != 0).collect();
        adapters.sort_unstable();
        adapters.dedup();
        adapters
    }
}
