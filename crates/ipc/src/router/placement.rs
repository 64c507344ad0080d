//! `Placement`: chooses the engine for a request.
//!
//! The least loaded engine gets it: the one with the fewest requests, counting this client's and, as of the last
//! heartbeat, other clients'. Among engines with nearly the same load (see [`slack`]), the one that knows the longest
//! prefix of the prompt gets it; among those that know equally much, the least loaded, and then each in turn.
//!
//! The slack keeps requests with a shared prefix together. Loads are hardly ever exactly equal, and if every difference
//! of one request counted, each engine would compute the prefix. The slack grows with the load, so that it remains a
//! small part of it.
//!
//! Some requests have no choice. A fork goes to the engine of the request that it forks. A request with the id of a
//! live one goes to that one's engine, to be refused there, as a single engine would do.

use std::{cmp::Reverse, collections::HashMap, sync::Arc};

use scheduler::{NewRequest, RequestKey};

use crate::router::prefix_table::PrefixTable;

/// Most prefixes that are remembered per engine; about 2 MB.
pub const MAX_REMEMBERED: usize = 1 << 17;

/// How many requests more than the least loaded engine an engine may have and still be chosen for its prefixes.
#[must_use]
pub fn slack(least: u32) -> u32 {
    2 + least / 8
}

/// See the module docs.
#[derive(Debug)]
pub struct Placement {
    engines: Vec<Known>,
    /// The requests without a last output.
    live: HashMap<RequestKey, Live>,
    by_id: HashMap<Arc<str>, RequestKey>,
    /// The engine whose turn it is.
    next: usize,
}

/// What is known about one engine.
#[derive(Debug)]
struct Known {
    prefixes: PrefixTable,
    capacity: usize,
    /// Number of its requests in `Placement::live`.
    num_live: u32,
}

#[derive(Debug)]
struct Live {
    rank: usize,
    request_id: Arc<str>,
}

impl Placement {
    /// Make a placement for engines with these numbers of KV blocks. As many prefixes are remembered, up to
    /// [`MAX_REMEMBERED`].
    #[must_use]
    pub fn new(num_blocks: impl IntoIterator<Item = u32>) -> Self {
        let engines = num_blocks.into_iter().map(|num_blocks| {
            let capacity = (num_blocks as usize).min(MAX_REMEMBERED);
            Known { prefixes: PrefixTable::new(capacity), capacity, num_live: 0 }
        });
        Self { engines: engines.collect(), live: HashMap::new(), by_id: HashMap::new(), next: 0 }
    }

    /// Choose an engine for requests that must stay together, and count them as its own until `end` is called for each.
    /// `names` are those of the prompt's prefixes. `num_of_others` returns how many requests of other clients an engine
    /// has, or `None` if the engine accepts none. Returns `None` if there is no engine.
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

    /// The engine that these requests must go to, if there is one.
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
        // The first of the best engines.
        let (rank, _) =
            near.min_by_key(|&(rank, load)| (Reverse(self.engines[rank].prefixes.longest(names)), load))?;
        self.next = (rank + 1) % num_engines;
        Some(rank)
    }

    /// Record that a request has its last output, or was not sent after all.
    pub fn end(&mut self, key: RequestKey) {
        let Some(Live { rank, request_id }) = self.live.remove(&key) else { return };
        self.engines[rank].num_live -= 1;
        if self.by_id.get(&request_id) == Some(&key) {
            self.by_id.remove(&request_id);
        }
    }

    /// Forget the prefixes of a rank, because another engine with an empty cache takes its place.
    pub fn forget_prefixes(&mut self, rank: usize) {
        let known = &mut self.engines[rank];
        known.prefixes = PrefixTable::new(known.capacity);
    }

    /// Number of this client's requests on an engine.
    #[must_use]
    pub fn num_live(&self, rank: usize) -> u32 {
        self.engines[rank].num_live
    }

    /// The rank of the engine that has a request without a last output.
    #[must_use]
    pub fn rank_of(&self, key: RequestKey) -> Option<usize> {
        self.live.get(&key).map(|live| live.rank)
    }

    /// The key of the request with this id, if it has no last output yet.
    #[must_use]
    pub fn key_of_id(&self, request_id: &str) -> Option<RequestKey> {
        self.by_id.get(request_id).copied()
    }
}
