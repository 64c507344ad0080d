//! `SuffixIndex`: where a request held the same tokens before, newest first, and what the longest matches say follows.

/// Longest suffix that is compared: more says no more about what follows.
pub const MAX_MATCH_TOKENS: u32 = 64;

/// Tokens that a place is found by.
pub(crate) const KEY_TOKENS: usize = 3;

/// Places that one search looks at.
const MAX_LINKS: usize = 32;

/// Matches that vote.
const MAX_VOTERS: usize = 8;

const SMALLEST_HEAD: usize = 1 << 8;
const LARGEST_HEAD: usize = 1 << 17;

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

/// A chain of places for each triple of tokens: 4 bytes per token, and a table of the newest.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// By the hash of a triple, one past its newest end's last token; 0: none.
    head: Vec<u32>,
    /// By end, the end before it with the same hash.
    previous: Vec<u32>,
    seed: u64,
}

impl Places {
    /// Without tokens, for about `num_tokens`.
    pub(crate) fn new(num_tokens: usize, seed: u64) -> Self {
        let num_heads = num_tokens.next_power_of_two().clamp(SMALLEST_HEAD, LARGEST_HEAD);
        Self { head: vec![0; num_heads], previous: vec![0], seed }
    }

    /// Take in what `tokens` holds beyond what it held before; the last triple stays out: nothing follows it.
    pub(crate) fn append(&mut self, tokens: &[i32]) {
        for end in self.previous.len()..tokens.len() {
            let mut link = 0;
            if end >= KEY_TOKENS {
                let bucket = self.bucket(&tokens[end - KEY_TOKENS..end]);
                link = std::mem::replace(&mut self.head[bucket], end as u32);
            }
            self.previous.push(link);
        }
    }

    /// Ends of triples that may be the last one of `tokens`, newest first: of all with the same hash.
    pub(crate) fn ends(&self, tokens: &[i32]) -> impl Iterator<Item = usize> {
        let key = tokens.len().checked_sub(KEY_TOKENS).map(|first| &tokens[first..]);
        let newest = key.map_or(0, |key| self.head[self.bucket(key)]);
        let not_none = |end: u32| (end != 0).then_some(end as usize);
        std::iter::successors(not_none(newest), move |&end| not_none(self.previous[end]))
    }

    fn bucket(&self, key: &[i32]) -> usize {
        let mixed = key.iter().fold(self.seed, |hash, &token_id| {
            (hash ^ u64::from(token_id as u32)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
        });
        mixed as usize & (self.head.len() - 1)
    }
}

/// The places of a request's own tokens.
#[derive(Clone, Debug)]
pub struct SuffixIndex {
    limits: SuffixLimits,
    places: Places,
}

/// A place where the newest tokens stood before.
#[derive(Clone, Copy)]
struct Match {
    end: usize,
    length: usize,
}

impl SuffixIndex {
    /// An index without tokens, for about `num_tokens`.
    #[must_use]
    pub fn new(limits: SuffixLimits, num_tokens: usize, seed: u64) -> Self {
        Self { limits, places: Places::new(num_tokens, seed) }
    }

    /// Take in what `tokens` holds beyond what it held before; the last triple stays out: it is what is looked for.
    pub fn append(&mut self, tokens: &[i32]) {
        self.places.append(tokens);
    }

    /// Append to `drafts` at most `limit` tokens that may follow.
    pub fn propose(&self, tokens: &[i32], limit: usize, drafts: &mut Vec<i32>) {
        if tokens.len() <= KEY_TOKENS {
            return;
        }
        let mut matches = [Match { end: 0, length: 0 }; MAX_VOTERS];
        let count = self.longest_matches(tokens, &mut matches);
        let Some(longest) = matches[..count].first() else { return };
        let paid = (self.limits.max_factor * longest.length as f64).min(limit as f64) as usize;
        self.vote(tokens, &mut matches[..count], paid, drafts);
    }

    /// The longest matches, longest first and the newest of equals; returns how many there are.
    fn longest_matches(&self, tokens: &[i32], matches: &mut [Match; MAX_VOTERS]) -> usize {
        let max_match = self.limits.max_match.min(MAX_MATCH_TOKENS) as usize;
        let mut count = 0;
        for end in self.places.ends(tokens).take(MAX_LINKS) {
            let pairs = tokens[..end].iter().rev().zip(tokens.iter().rev()).take(max_match);
            let length = pairs.take_while(|(before, now)| before == now).count();
            if length >= KEY_TOKENS.min(max_match) {
                let place = matches[..count].iter().position(|other| other.length < length).unwrap_or(count);
                if place < MAX_VOTERS {
                    let last = count.min(MAX_VOTERS - 1);
                    matches.copy_within(place..last, place + 1);
                    matches[place] = Match { end, length };
                    count = (count + 1).min(MAX_VOTERS);
                }
                if matches[count - 1].length == max_match && count == MAX_VOTERS {
                    break; // Nothing longer can come.
                }
            }
        }
        count
    }

    /// Token by token what most of the matches hold; those that hold another have no vote afterwards.
    fn vote(&self, tokens: &[i32], matches: &mut [Match], limit: usize, drafts: &mut Vec<i32>) {
        let (first, total) = (drafts.len(), matches.len());
        let mut num_left = total;
        while drafts.len() - first < limit {
            let depth = drafts.len() - first;
            // A match that reaches the newest token goes on with what was guessed itself: a loop stays a loop.
            let next = |voter: &Match| match tokens.get(voter.end + depth) {
                Some(&token_id) => token_id,
                None => drafts[first + voter.end + depth - tokens.len()],
            };
            let (mut best, mut best_votes) = (0, 0);
            for voter in &matches[..num_left] {
                let token_id = next(voter);
                let votes = matches[..num_left].iter().filter(|other| next(other) == token_id).count();
                if votes > best_votes {
                    (best, best_votes) = (token_id, votes);
                }
            }
            if (best_votes as f64) < self.limits.min_share * total as f64 {
                return;
            }
            let mut kept = 0;
            for index in 0..num_left {
                if next(&matches[index]) == best {
                    matches[kept] = matches[index];
                    kept += 1;
                }
            }
            num_left = kept;
            drafts.push(best);
        }
    }
}
