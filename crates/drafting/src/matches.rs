//! `Matches`: earlier places of the newest tokens, the longest matches first, and their vote on what follows.

/// Longest suffix that is compared; a longer one would say no more about what follows.
pub const MAX_MATCH_TOKENS: u32 = 64;

/// Tokens of the key by which places are found.
pub(crate) const KEY_TOKENS: usize = 3;

/// Most places that one search looks at.
pub(crate) const MAX_LINKS: usize = 32;

/// Limits of matches and drafts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SuffixLimits {
    /// Most tokens that are compared, backwards from the newest.
    pub max_match: u32,
    /// Most drafts per token of the match.
    pub max_factor: f64,
    /// The least share of the matches that a draft must keep.
    pub min_share: f64,
}

/// Most matches that vote.
const MAX_VOTERS: usize = 8;

/// An earlier place of the newest tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Match {
    /// One past the place's last token, where the continuation begins.
    pub(crate) end: usize,
    /// Number of equal tokens.
    pub(crate) length: usize,
}

/// The longest matches that were added; among equals, the earliest added.
#[derive(Debug)]
pub(crate) struct Matches {
    voters: [Match; MAX_VOTERS],
    count: usize,
    max_match: usize,
}

impl Matches {
    /// Make an empty set. A match of `max_match` tokens counts as the longest possible.
    pub(crate) fn new(max_match: usize) -> Self {
        Self { voters: [Match::default(); MAX_VOTERS], count: 0, max_match }
    }

    /// Add a match, if it is long enough.
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

    /// Whether no match was added yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether further matches cannot change anything.
    pub(crate) fn is_settled(&self) -> bool {
        self.count == MAX_VOTERS && self.voters[MAX_VOTERS - 1].length == self.max_match
    }

    /// Append at most `limit` tokens to `drafts`. Each is the token that most voting matches continue with; those that
    /// continue with another one lose their vote, as do those that end. `token_at` returns the token at a place, given
    /// the tokens guessed so far. Returns the longest match that continues with all of them.
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
        // A long match says more than many short ones: matches of less than three quarters of its length do not vote.
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

/// Length of the common suffix of both, at most `most`.
pub(crate) fn common_suffix(before: &[i32], now: &[i32], most: usize) -> usize {
    let pairs = before.iter().rev().zip(now.iter().rev()).take(most);
    pairs.take_while(|(before, now)| before == now).count()
}
