//! `Matches`: places where the newest tokens stood before, the longest first, and their vote on what follows.

/// Longest suffix that is compared: more says no more about what follows.
pub const MAX_MATCH_TOKENS: u32 = 64;

/// Tokens that a place is found by.
pub(crate) const KEY_TOKENS: usize = 3;

/// Places that one search looks at.
pub(crate) const MAX_LINKS: usize = 32;

/// How much a match may say.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SuffixLimits {
    /// Tokens that are compared, backwards from the newest.
    pub max_match: u32,
    /// Drafts at most per token of the match.
    pub max_factor: f64,
    /// Share of the matches that a path must keep.
    pub min_share: f64,
}

/// Matches that vote.
const MAX_VOTERS: usize = 8;

/// A place where the newest tokens stood before.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Match {
    /// One past its last token: what follows begins here.
    pub(crate) end: usize,
    /// Tokens that agree.
    pub(crate) length: usize,
}

/// The longest ones of those that were added, and of equals the ones that were added first.
#[derive(Debug)]
pub(crate) struct Matches {
    voters: [Match; MAX_VOTERS],
    count: usize,
    max_match: usize,
}

impl Matches {
    /// None yet. A match of `max_match` tokens is as long as any.
    pub(crate) fn new(max_match: usize) -> Self {
        Self { voters: [Match::default(); MAX_VOTERS], count: 0, max_match }
    }

    /// Take one in.
    pub(crate) fn add(&mut self, found: Match) {
        let voters = &mut self.voters;
        let place = voters[..self.count].iter().position(|other| other.length < found.length);
        let place = place.unwrap_or(self.count);
        if place < MAX_VOTERS {
            let last = self.count.min(MAX_VOTERS - 1);
            voters.copy_within(place..last, place + 1);
            voters[place] = found;
            self.count = (self.count + 1).min(MAX_VOTERS);
        }
    }

    /// Whether there is none yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether no further match can change anything.
    pub(crate) fn is_settled(&self) -> bool {
        self.count == MAX_VOTERS && self.voters[MAX_VOTERS - 1].length == self.max_match
    }

    /// Append to `drafts` at most `limit` tokens: each is what most of the matches hold, and those that hold another
    /// one have no vote afterwards. `token_at` says what stands at a place, given the tokens that were guessed so far;
    /// a match that has nothing more has no vote either. Returns the longest match that holds all of them.
    pub(crate) fn vote(
        mut self,
        limits: &SuffixLimits,
        limit: usize,
        drafts: &mut Vec<i32>,
        token_at: impl Fn(usize, &[i32]) -> Option<i32>,
    ) -> Option<Match> {
        if self.count == 0 {
            return None;
        }
        // A long match says more than many short ones: those of less than three quarters of its length have no vote.
        let longest = self.voters[0].length;
        self.count = self.voters[..self.count].iter().filter(|voter| 4 * voter.length >= 3 * longest).count();
        let (first, total) = (drafts.len(), self.count);
        let longest = self.voters[0].length as f64;
        let limit = (limits.max_factor * longest).min(limit as f64) as usize;
        while drafts.len() - first < limit {
            let depth = drafts.len() - first;
            let mut held = [None; MAX_VOTERS];
            for (token_id, voter) in held.iter_mut().zip(&self.voters[..self.count]) {
                *token_id = token_at(voter.end + depth, &drafts[first..]);
            }
            let held = &held[..self.count];
            let (mut best, mut best_votes) = (None, 0);
            for token_id in held.iter().filter(|token_id| token_id.is_some()) {
                let votes = held.iter().filter(|&other| other == token_id).count();
                if votes > best_votes {
                    (best, best_votes) = (*token_id, votes);
                }
                if votes == self.count {
                    break; // All agree, as they mostly do.
                }
            }
            let Some(token_id) = best else { break };
            if (best_votes as f64) < limits.min_share * total as f64 {
                break;
            }
            let mut kept = 0;
            for (index, other) in held.iter().enumerate() {
                if *other == best {
                    self.voters[kept] = self.voters[index];
                    kept += 1;
                }
            }
            self.count = kept;
            drafts.push(token_id);
        }
        (drafts.len() > first).then_some(self.voters[0])
    }
}

/// Tokens that the ends of both have in common, at most `most`.
pub(crate) fn common_suffix(before: &[i32], now: &[i32], most: usize) -> usize {
    let pairs = before.iter().rev().zip(now.iter().rev()).take(most);
    pairs.take_while(|(before, now)| before == now).count()
}
