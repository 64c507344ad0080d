//! `FairClock`: who is due next among those that share something by weight, by start-time fair queueing.
//!
//! Each account (an API key, or a user of one) has a line of its own: what it asks for begins where what it asked for
//! before ends, or now, whichever is later. That beginning is the *tag*, in tokens over the account's weight, and
//! what has the smallest tag is served first. *Now* is the tag of what is being served: who comes after a pause
//! begins there, neither punished for what it had nor with credit for what it left to others.
//!
//! What a request will cost is a guess when it comes, and is put right when it leaves: that moves what its account asks
//! for later, and no tag that was given.

use std::collections::{BTreeSet, HashMap};

/// Virtual time of one token at weight 1.
pub(crate) const TOKEN: u64 = 1 << 16;

/// Accounts without a request that are remembered because they had more than their share, at most.
const MAX_REMEMBERED: usize = 4096;

/// Virtual time that `tokens` take an account of `weight`.
pub(crate) fn span(tokens: u32, weight: u32) -> u64 {
    u64::from(tokens) * TOKEN / u64::from(weight)
}

#[derive(Debug, Default)]
struct Account {
    /// Where its next request begins, unless now is later.
    finish: u64,
    /// The largest tag since one of its requests began to wait; 0 when none waits.
    newest: u64,
    weight: u32,
    num_live: u32,
    num_waiting: u32,
}

/// See the module docs. Every operation takes logarithmic time.
#[derive(Debug, Default)]
pub(crate) struct FairClock {
    now: u64,
    accounts: HashMap<u64, Account>,
    /// Finish and name of those without a request.
    idle: BTreeSet<(u64, u64)>,
    /// Of all accounts with a request.
    live_weight: u64,
    /// Whether no request of an account may have a smaller tag than one of the same account that waits.
    keeps_order: bool,
}

impl FairClock {
    /// A clock whose accounts' requests are served in the order in which they came.
    pub(crate) fn in_order() -> Self {
        Self { keeps_order: true, ..Self::default() }
    }

    /// A request comes that will cost about `tokens`. Returns its tag.
    pub(crate) fn arrive(&mut self, name: u64, weight: u32, tokens: u32) -> u64 {
        let account = self.accounts.entry(name).or_default();
        if account.num_live == 0 {
            self.idle.remove(&(account.finish, name));
        } else {
            self.live_weight -= u64::from(account.weight);
        }
        account.weight = weight;
        self.live_weight += u64::from(weight);
        let start = account.finish.max(self.now);
        account.finish = start.saturating_add(span(tokens, weight));
        account.num_live += 1;
        if self.keeps_order { start.max(account.newest) } else { start }
    }

    /// A request of the account begins to wait: it has just come, or lost its place.
    pub(crate) fn wait(&mut self, name: u64, tag: u64) {
        if let Some(account) = self.accounts.get_mut(&name) {
            account.num_waiting += 1;
            account.newest = account.newest.max(tag);
        }
    }

    /// It waits no more: it is served, or has left.
    pub(crate) fn stop_waiting(&mut self, name: u64) {
        if let Some(account) = self.accounts.get_mut(&name) {
            account.num_waiting -= 1;
            if account.num_waiting == 0 {
                account.newest = 0;
            }
        }
    }

    /// What has this tag is served for the first time. However many newcomers share a tag, time goes on: each costs a
    /// token at least, and nothing that waits is passed for ever.
    pub(crate) fn serve(&mut self, tag: u64) {
        let least = (TOKEN / self.live_weight.max(1)).max(1);
        self.now = tag.max(self.now.saturating_add(least));
        while let Some(&(finish, name)) = self.idle.first()
            && finish <= self.now
        {
            self.forget(finish, name);
        }
    }

    /// A request leaves that was said to cost `guessed` tokens and cost `charged`, at the weight that it came with.
    pub(crate) fn leave(&mut self, name: u64, weight: u32, guessed: u32, charged: u32) {
        let Some(account) = self.accounts.get_mut(&name) else { return };
        account.finish =
            account.finish.saturating_add(span(charged, weight)).saturating_sub(span(guessed, weight));
        account.num_live -= 1;
        if account.num_live > 0 {
            return;
        }
        self.live_weight -= u64::from(account.weight);
        let finish = account.finish;
        self.idle.insert((finish, name));
        if self.live_weight == 0 {
            // No request is left that could wait for another: all begin anew.
            let keeps_order = self.keeps_order;
            *self = Self { keeps_order, ..Self::default() };
        } else if finish <= self.now {
            self.forget(finish, name);
        } else if self.idle.len() > MAX_REMEMBERED
            && let Some(&(finish, name)) = self.idle.first()
        {
            self.forget(finish, name);
        }
    }

    fn forget(&mut self, finish: u64, name: u64) {
        self.idle.remove(&(finish, name));
        self.accounts.remove(&name);
    }

    /// Accounts with a request.
    pub(crate) fn num_live(&self) -> usize {
        self.accounts.len() - self.idle.len()
    }

    /// Check what holds between any two calls.
    ///
    /// # Panics
    /// With what is broken.
    pub(crate) fn check_invariants(&self) {
        assert!(self.idle.len() <= MAX_REMEMBERED, "what is remembered is bounded");
        let live = self.accounts.values().filter(|account| account.num_live > 0);
        assert_eq!(
            self.live_weight,
            live.map(|account| u64::from(account.weight)).sum::<u64>(),
            "weights are counted"
        );
        for (name, account) in &self.accounts {
            let is_idle = self.idle.contains(&(account.finish, *name));
            assert_eq!(is_idle, account.num_live == 0, "who has no request is idle");
            assert!(account.num_waiting <= account.num_live, "who waits is live");
            assert!(account.num_live > 0 || account.finish > self.now, "who has had its share is forgotten");
        }
        assert!(self.num_live() > 0 || self.accounts.is_empty(), "all begin anew when no request is left");
    }
}

#[cfg(test)]
mod tests {
    use super::{FairClock, MAX_REMEMBERED, TOKEN};

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut clock = FairClock::default();
        clock.arrive(0, 1, 1); // as long as it is there, nothing begins anew
        for name in 1..3 * MAX_REMEMBERED as u64 {
            clock.arrive(name, 1, 1_000_000);
            clock.leave(name, 1, 1_000_000, 1_000_000);
        }
        clock.check_invariants();
        assert_eq!(clock.accounts.len(), MAX_REMEMBERED + 1);
        clock.leave(0, 1, 1, 1);
        clock.check_invariants();
        assert!(clock.accounts.is_empty());
    }

    #[test]
    fn newcomers_do_not_pass_what_waits_for_ever() {
        let mut clock = FairClock::default();
        clock.arrive(0, 1, 50);
        let waiting = clock.arrive(0, 1, 50);
        assert_eq!(waiting, 50 * TOKEN);
        let mut num_passed = 0;
        for name in 1.. {
            let newcomer = clock.arrive(name, 1, 10);
            if newcomer >= waiting {
                break;
            }
            num_passed += 1;
            clock.serve(newcomer);
            clock.leave(name, 1, 10, 10);
        }
        assert!((50..=100).contains(&num_passed), "a token each, of two accounts: {num_passed}");
        clock.check_invariants();
    }

    #[test]
    fn who_was_away_has_neither_credit_nor_debt() {
        let mut clock = FairClock::default();
        clock.arrive(1, 1, 10);
        clock.arrive(2, 1, 10);
        clock.leave(2, 1, 10, 10);
        for _ in 0..20 {
            let tag = clock.arrive(1, 1, 10);
            clock.serve(tag);
        }
        assert_eq!(clock.arrive(2, 1, 10), clock.now, "it begins now");
        assert_eq!(clock.arrive(2, 1, 10), clock.now + 10 * TOKEN);
    }
}
