//! `Placement`: which of several engines gets a request.
//!
//! The engine with the least to do gets it: fewest requests, this client's and, by the last heartbeat, those of others. Of engines
//! that are nearly equal in that ([`slack`]), the one that knows the longest beginning of the prompt; of those that are equal
//! in that too, the one with the least to do, and then each in its turn.
//!
//! The slack is what keeps a shared prefix together: engines are hardly ever exactly equal, and a prefix that follows every
//! difference of one request is computed everywhere. It grows with the load, so that it stays a small part of it.
//!
//! Some requests have no choice: one that forks another goes where that one is, and one with the id of a live one goes
//! there too, to be refused as it would be by a single engine.

use std::{cmp::Reverse, collections::HashMap, sync::Arc};

use scheduler::{NewRequest, RequestKey};

use crate::router::prefix_table::PrefixTable;

/// Most names of beginnings that are remembered of one engine; some 2 MB.
pub const MAX_REMEMBERED: usize = 1 << 17;

/// How many requests more than the least loaded engine one may have and still be chosen for what it knows.
#[must_use]
pub fn slack(least: u32) -> u32 {
    2 + least / 8
}

/// See the module docs.
#[derive(Debug)]
pub struct Placement {
    engines: Vec<Known>,
    /// Requests that have no last output yet.
    live: HashMap<RequestKey, Live>,
    by_id: HashMap<Arc<str>, RequestKey>,
    /// Whose turn it is.
    next: usize,
}

/// What is known of one engine.
#[derive(Debug)]
struct Known {
    prefixes: PrefixTable,
    capacity: usize,
    /// Of `Placement::live`.
    num_live: u32,
}

#[derive(Debug)]
struct Live {
    rank: usize,
    request_id: Arc<str>,
}

impl Placement {
    /// For engines with so many KV blocks: as many beginnings are remembered, up to [`MAX_REMEMBERED`].
    #[must_use]
    pub fn new(num_blocks: impl IntoIterator<Item = u32>) -> Self {
        let engines = num_blocks.into_iter().map(|num_blocks| {
            let capacity = (num_blocks as usize).min(MAX_REMEMBERED);
            Known { prefixes: PrefixTable::new(capacity), capacity, num_live: 0 }
        });
        Self { engines: engines.collect(), live: HashMap::new(), by_id: HashMap::new(), next: 0 }
    }

    /// Choose an engine for requests that stay together and count them as its own, until `end` of each. `names` are those of
    /// the prompt's beginnings; `num_of_others` says how many requests of other clients an engine has, or `None` for
    /// one that takes none. `None` when there is no engine.
    pub fn place(
        &mut self,
        requests: &[NewRequest],
        names: &[u64],
        num_of_others: impl Fn(usize) -> Option<u32>,
    ) -> Option<usize> {
        let bound = self.bound(requests).filter(|&rank| num_of_others(rank).is_some());
        let rank = match bound {
            Some(rank) => rank,
            None => self.choose(names, num_of_others)?,
        };
        self.engines[rank].prefixes.remember(names);
        for request in requests {
            let request_id: Arc<str> = (*request.request_id).into();
            self.by_id.entry(request_id.clone()).or_insert(request.key);
            if self.live.insert(request.key, Live { rank, request_id }).is_none() {
                self.engines[rank].num_live += 1;
            }
        }
        Some(rank)
    }

    /// Where requests have to go.
    fn bound(&self, requests: &[NewRequest]) -> Option<usize> {
        requests.iter().find_map(|request| {
            let parent = request.fork_from.as_ref();
            let namesake = self.by_id.get(&*request.request_id);
            parent.and_then(|key| self.rank_of(*key)).or_else(|| namesake.and_then(|key| self.rank_of(*key)))
        })
    }

    fn choose(&mut self, names: &[u64], num_of_others: impl Fn(usize) -> Option<u32>) -> Option<usize> {
        let num_engines = self.engines.len();
        let load = |rank: usize| num_of_others(rank).map(|others| others.saturating_add(self.num_live(rank)));
        let least = (0..num_engines).filter_map(load).min()?;
        let most = least.saturating_add(slack(least));
        let in_turn = (self.next..num_engines).chain(0..self.next);
        let near =
            in_turn.filter_map(|rank| load(rank).filter(|&load| load <= most).map(|load| (rank, load)));
        // The first of the best.
        let (rank, _) =
            near.min_by_key(|&(rank, load)| (Reverse(self.engines[rank].prefixes.longest(names)), load))?;
        self.next = (rank + 1) % num_engines;
        Some(rank)
    }

    /// A request has got its last output, or was not sent after all.
    pub fn end(&mut self, key: RequestKey) {
        let Some(Live { rank, request_id }) = self.live.remove(&key) else { return };
        self.engines[rank].num_live -= 1;
        if self.by_id.get(&request_id) == Some(&key) {
            self.by_id.remove(&request_id);
        }
    }

    /// Another engine takes the place of one: nothing is known of its cache.
    pub fn forget_prefixes(&mut self, rank: usize) {
        let known = &mut self.engines[rank];
        known.prefixes = PrefixTable::new(known.capacity);
    }

    /// This client's requests there.
    #[must_use]
    pub fn num_live(&self, rank: usize) -> u32 {
        self.engines[rank].num_live
    }

    /// Where a request without a last output is.
    #[must_use]
    pub fn rank_of(&self, key: RequestKey) -> Option<usize> {
        self.live.get(&key).map(|live| live.rank)
    }

    /// The request with an id that has no last output yet.
    #[must_use]
    pub fn key_of_id(&self, request_id: &str) -> Option<RequestKey> {
        self.by_id.get(request_id).copied()
    }
}
