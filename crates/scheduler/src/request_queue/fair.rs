//! `FairQueue`: who waits under the policy FAIR, and in which order they are tried.
//!
//! Two levels, each a [`FairClock`]. Tenants (the keys of an API) share the engine by their weights; the users of a
//! tenant share what it gets. A request that comes brings its tenant a *turn*, whose place among all turns is the
//! tenant's tag; at a turn, the tenant's request with the smallest user's tag is tried. Both tags are fixed when a
//! request comes, and the turns belong to the tenant: however many users it invents, it has as many turns, at the
//! same places.
//!
//! A request that is admitted takes the turn at which it was tried, and comes back with it when it is preempted. One
//! that leaves without having been admitted gives the last of its tenant's turns back.

use std::{
    collections::{BTreeSet, HashMap, btree_set},
    ops::Bound::{Excluded, Unbounded},
};

use crate::{
    request::{
        Cold, Request,
        standing::{Standing, Turn},
    },
    request_queue::fair_clock::FairClock,
};

/// Output tokens that a request is charged before one has shown what is usual here.
pub(crate) const FIRST_GUESS: u32 = 128;

/// How many requests the mean of the output looks back on.
pub(crate) const MEAN_OF: u32 = 16;

/// The user's tag, the order of arrival, and the slot of a request that waits.
type Place = (u64, u64, u32);

/// What waits of one tenant.
#[derive(Debug)]
struct TenantQueue {
    users: FairClock,
    waiting: BTreeSet<Place>,
    /// As many as wait.
    turns: BTreeSet<Turn>,
    /// The last one that a walk has reached, and which walk that was.
    reached: Option<Place>,
    walk: u64,
}

/// See the module docs. Every operation takes logarithmic time.
#[derive(Debug)]
pub(crate) struct FairQueue {
    tenants: FairClock,
    queues: HashMap<u64, TenantQueue>,
    /// The turns of all tenants, each with its tenant.
    turns: BTreeSet<(Turn, u64)>,
    /// Counts the walks over the queue.
    walk: u64,
    /// The turn that the walk has reached.
    at: Option<(Turn, u64)>,
    /// Tokens that requests gave lately, times `MEAN_OF`.
    recent_output: u32,
}

impl Default for FairQueue {
    fn default() -> Self {
        Self {
            tenants: FairClock::default(),
            queues: HashMap::new(),
            turns: BTreeSet::new(),
            walk: 0,
            at: None,
            recent_output: FIRST_GUESS * MEAN_OF,
        }
    }
}

impl FairQueue {
    /// A request comes: say where it stands. `max_output` is what it may give.
    pub(crate) fn arrive(&mut self, cold: &mut Cold, max_output: u32) {
        // What forks another computes the last token of its prompt.
        let num_prompt = cold.num_queued_tokens.max(1);
        let guessed = num_prompt.saturating_add(max_output.min(self.recent_output / MEAN_OF));
        let payer = cold.payer;
        let queue = self.queues.entry(payer.tenant).or_insert_with(|| TenantQueue {
            users: FairClock::in_order(),
            waiting: BTreeSet::new(),
            turns: BTreeSet::new(),
            reached: None,
            walk: 0,
        });
        cold.standing = Standing {
            turn: (self.tenants.arrive(payer.tenant, payer.weight, guessed), cold.arrival),
            user_tag: queue.users.arrive(payer.user, 1, guessed),
            guessed,
        };
    }

    /// A request begins to wait, or does again.
    pub(crate) fn push(&mut self, slot: u32, cold: &Cold) {
        let (payer, standing) = (cold.payer, cold.standing);
        let Some(queue) = self.queues.get_mut(&payer.tenant) else { return };
        queue.waiting.insert((standing.user_tag, cold.arrival, slot));
        queue.users.wait(payer.user, standing.user_tag);
        queue.turns.insert(standing.turn);
        self.tenants.wait(payer.tenant, standing.turn.0);
        self.turns.insert((standing.turn, payer.tenant));
    }

    /// Take out a request that leaves while it waits. Its tenant keeps its first turns.
    pub(crate) fn remove(&mut self, slot: u32, cold: &Cold) -> bool {
        let last = self.queues.get(&cold.payer.tenant).and_then(|queue| queue.turns.last().copied());
        last.is_some_and(|turn| self.take_out(slot, cold, turn))
    }

    /// Take out the request that the walk has reached, which is admitted: it has that turn from now on.
    pub(crate) fn take(&mut self, slot: u32, cold: &mut Cold) -> bool {
        let Some((turn, _)) = self.at else { return false };
        if !self.take_out(slot, cold, turn) {
            return false;
        }
        cold.standing.turn = turn;
        if !cold.admitted_before {
            self.tenants.serve(turn.0);
            if let Some(queue) = self.queues.get_mut(&cold.payer.tenant) {
                queue.users.serve(cold.standing.user_tag);
            }
        }
        true
    }

    fn take_out(&mut self, slot: u32, cold: &Cold, turn: Turn) -> bool {
        let payer = cold.payer;
        let Some(queue) = self.queues.get_mut(&payer.tenant) else { return false };
        if !queue.waiting.remove(&(cold.standing.user_tag, cold.arrival, slot)) {
            return false;
        }
        queue.users.stop_waiting(payer.user);
        queue.turns.remove(&turn);
        self.tenants.stop_waiting(payer.tenant);
        self.turns.remove(&(turn, payer.tenant))
    }

    /// A request has left, waiting or not: charge what it cost.
    pub(crate) fn leave(&mut self, request: &Request) {
        let cold = &*request.cold;
        let (payer, guessed) = (cold.payer, cold.standing.guessed);
        let mut charged = 0;
        if cold.admitted_before {
            let output = request.num_tokens - cold.num_prompt_tokens;
            charged = cold.num_prompt_tokens - cold.num_prompt_tokens_skipped + output;
            self.recent_output = self.recent_output - self.recent_output / MEAN_OF + output;
        }
        self.tenants.leave(payer.tenant, payer.weight, guessed, charged);
        if let Some(queue) = self.queues.get_mut(&payer.tenant) {
            queue.users.leave(payer.user, 1, guessed, charged);
            if queue.users.num_live() == 0 {
                self.queues.remove(&payer.tenant);
            }
        }
    }

    /// The next turn of the walk, or, at its beginning, the first, and the slot of the request that is tried then.
    pub(crate) fn next(&mut self, begins: bool) -> Option<(Turn, u32)> {
        if begins {
            self.walk += 1;
            self.at = None;
        }
        self.at = match self.at {
            None => self.turns.first().copied(),
            Some(at) => self.turns.range((Excluded(at), Unbounded)).next().copied(),
        };
        let (turn, tenant) = self.at?;
        let queue = self.queues.get_mut(&tenant)?;
        let reached = queue.reached.filter(|_| queue.walk == self.walk);
        queue.walk = self.walk;
        queue.reached = match reached {
            None => queue.waiting.first().copied(),
            Some(place) => queue.waiting.range((Excluded(place), Unbounded)).next().copied(),
        };
        queue.reached.map(|(_, _, slot)| (turn, slot))
    }

    pub(crate) fn len(&self) -> usize {
        self.turns.len()
    }

    /// Slots in the order in which they are tried.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let mut places: HashMap<u64, btree_set::Iter<'_, Place>> = HashMap::new();
        self.turns.iter().filter_map(move |(_, tenant)| {
            let waiting = &self.queues.get(tenant)?.waiting;
            places.entry(*tenant).or_insert_with(|| waiting.iter()).next().map(|place| place.2)
        })
    }

    /// Check what holds between any two calls.
    ///
    /// # Panics
    /// With what is broken.
    pub(crate) fn check_invariants(&self) {
        self.tenants.check_invariants();
        assert_eq!(self.tenants.num_live(), self.queues.len(), "who has a request has a queue");
        let mut num_turns = 0;
        for (tenant, queue) in &self.queues {
            queue.users.check_invariants();
            assert!(queue.users.num_live() > 0, "a tenant without a request is forgotten");
            assert_eq!(queue.turns.len(), queue.waiting.len(), "a turn for each that waits");
            assert!(queue.turns.iter().all(|turn| self.turns.contains(&(*turn, *tenant))), "turns are known");
            num_turns += queue.turns.len();
        }
        assert_eq!(num_turns, self.turns.len(), "each turn has its tenant");
    }
}
