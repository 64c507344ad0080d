//! Whose turn it is under FAIR: two levels of start-time fair queueing, from lists that are sorted when they are
//! looked at.
//!
//! Nothing is forgotten here as long as a request is left: what the real one drops, it must be able to do without.

use std::collections::{HashMap, HashSet};

use scheduler::Payer;

use super::{Live, NaiveScheduler};

/// Virtual time of a token at weight 1.
const TOKEN: u64 = 65_536;

/// One that shares with others.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    weight: u64,
    /// What it was charged, beginning when it began.
    finish: u64,
    /// The largest tag since one of its requests began to wait.
    newest: u64,
}

/// One level of sharing.
#[derive(Clone, Debug, Default)]
struct Level {
    now: u64,
    accounts: HashMap<u64, Account>,
}

impl Level {
    fn arrive(&mut self, name: u64, weight: u64, tokens: u64) -> u64 {
        let now = self.now;
        let account = self.accounts.entry(name).or_default();
        account.weight = weight;
        let start = now.max(account.finish);
        account.finish = start + tokens * TOKEN / weight;
        start
    }

    fn serve(&mut self, tag: u64, live: &HashSet<u64>) {
        let weight: u64 = live.iter().map(|name| self.accounts[name].weight).sum();
        self.now = tag.max(self.now + (TOKEN / weight).max(1));
    }

    fn charge(&mut self, name: u64, weight: u64, guessed: u64, charged: u64) {
        let account = self.accounts.get_mut(&name).expect("it has a request");
        account.finish += charged * TOKEN / weight;
        account.finish = account.finish.saturating_sub(guessed * TOKEN / weight);
    }
}

/// The tenants' level, that of each tenant's users, and the turns of those that wait.
#[derive(Clone, Debug, Default)]
pub(super) struct Fairness {
    tenants: Level,
    users: HashMap<u64, Level>,
    /// Tenant, tag, and the arrival that brought it.
    turns: Vec<(u64, u64, u64)>,
    /// Output of all that were admitted and have left.
    outputs: Vec<u64>,
}

/// Where a request stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Tag and arrival of the turn that it brought or took.
    pub turn: (u64, u64),
    pub user_tag: u64,
    guessed: u64,
}

impl NaiveScheduler {
    fn payer(&self, arrival: u64) -> Payer {
        self.requests[&arrival].new.payer
    }

    /// A request that is in no list yet.
    pub(super) fn stand(&mut self, request: &Live) -> Standing {
        let payer = request.new.payer;
        let outputs = &self.fairness.outputs;
        let mean = outputs.iter().fold(128 * 16, |sum, output| sum - sum / 16 + output) / 16;
        let most = (request.max_total_tokens(&self.config) - request.new.prompt.len()) as u64;
        let prompt = if request.new.fork_from.is_some() { 1 } else { request.new.prompt.len() as u64 };
        let guessed = prompt + most.min(mean);
        let users = self.fairness.users.entry(payer.tenant).or_default();
        let start = users.arrive(payer.user, 1, guessed);
        // The requests of one user keep their order.
        let user_tag = start.max(users.accounts[&payer.user].newest);
        let tag = self.fairness.tenants.arrive(payer.tenant, payer.weight.into(), guessed);
        Standing { turn: (tag, request.arrival), user_tag, guessed }
    }

    /// A request begins to wait, for the first time or again.
    pub(super) fn bring_turn(&mut self, arrival: u64) {
        let (payer, standing) = (self.payer(arrival), self.requests[&arrival].standing);
        let (tag, brought_by) = standing.turn;
        self.fairness.turns.push((payer.tenant, tag, brought_by));
        let users = self.fairness.users.get_mut(&payer.tenant).expect("it has a request");
        let account = users.accounts.get_mut(&payer.user).expect("it has a request");
        account.newest = account.newest.max(standing.user_tag);
    }

    /// It does not wait any more; `turn` is the one that goes with it.
    fn spend_turn(&mut self, arrival: u64, turn: (u64, u64)) {
        let payer = self.payer(arrival);
        self.fairness.turns.retain(|&(tenant, tag, by)| (tenant, (tag, by)) != (payer.tenant, turn));
        let is_other = |request: &&Live| {
            let other = request.new.payer;
            request.arrival != arrival && (other.tenant, other.user) == (payer.tenant, payer.user)
        };
        if !self.requests.values().filter(is_other).any(Live::waits) {
            let users = self.fairness.users.get_mut(&payer.tenant).expect("it has a request");
            users.accounts.get_mut(&payer.user).expect("it has a request").newest = 0;
        }
    }

    /// A waiting request is admitted at this turn; called while it still waits.
    pub(super) fn take_turn(&mut self, arrival: u64, turn: (u64, u64)) {
        self.spend_turn(arrival, turn);
        self.request(arrival).standing.turn = turn;
        if self.requests[&arrival].was_admitted {
            return;
        }
        let (payer, user_tag) = (self.payer(arrival), self.requests[&arrival].standing.user_tag);
        let live_tenants = self.requests.values().map(|request| request.new.payer.tenant).collect();
        self.fairness.tenants.serve(turn.0, &live_tenants);
        let of_tenant = self.requests.values().filter(|request| request.new.payer.tenant == payer.tenant);
        let live_users = of_tenant.map(|request| request.new.payer.user).collect();
        self.fairness.users.get_mut(&payer.tenant).expect("it has a request").serve(user_tag, &live_users);
    }

    /// A request is about to leave.
    pub(super) fn settle(&mut self, arrival: u64, waits: bool) {
        let payer = self.payer(arrival);
        if waits {
            let of_tenant = self.fairness.turns.iter().filter(|turn| turn.0 == payer.tenant);
            let last = of_tenant.map(|&(_, tag, by)| (tag, by)).max().expect("a turn for each that waits");
            self.spend_turn(arrival, last);
        }
        let request = &self.requests[&arrival];
        let guessed = request.standing.guessed;
        let mut charged = 0;
        if request.was_admitted {
            charged = (request.tokens.len() - request.num_skipped) as u64;
            self.fairness.outputs.push((request.tokens.len() - request.new.prompt.len()) as u64);
        }
        self.fairness.tenants.charge(payer.tenant, payer.weight.into(), guessed, charged);
        let users = self.fairness.users.get_mut(&payer.tenant).expect("it has a request");
        users.charge(payer.user, 1, guessed, charged);
        let others = || self.requests.values().filter(|request| request.arrival != arrival);
        if !others().any(|request| request.new.payer.tenant == payer.tenant) {
            self.fairness.users.remove(&payer.tenant);
        }
        if others().count() == 0 {
            self.fairness.tenants = Level::default();
        }
    }

    /// Who waits, with the turn at which each is tried, in that order.
    pub(super) fn turns_of_waiting(&self, waiting: &[u64]) -> Vec<((u64, u64), u64)> {
        let mut order = Vec::new();
        for tenant in waiting.iter().map(|&arrival| self.payer(arrival).tenant).collect::<HashSet<_>>() {
            let of_tenant = |arrival: &u64| self.payer(*arrival).tenant == tenant;
            let mut requests: Vec<u64> = waiting.iter().copied().filter(of_tenant).collect();
            requests.sort_by_key(|arrival| (self.requests[arrival].standing.user_tag, *arrival));
            let turns = self.fairness.turns.iter().filter(|turn| turn.0 == tenant);
            let mut turns: Vec<(u64, u64)> = turns.map(|&(_, tag, by)| (tag, by)).collect();
            turns.sort_unstable();
            order.extend(turns.into_iter().zip(requests));
        }
        order.sort_unstable();
        order
    }
}
