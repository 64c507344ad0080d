//! `SuffixIndex`: earlier places of a request's newest tokens, newest first, and what the longest matches continue
//! with.
//!
//! Places are looked up by eight tokens first, so that a long match is found behind any number of short ones; if there
//! are none, by three tokens, and then by two.

use crate::matches::{KEY_TOKENS, MAX_LINKS, MAX_MATCH_TOKENS, Match, Matches, SuffixLimits, common_suffix};

/// Lengths of the keys that are tried before and after `KEY_TOKENS`.
const LONG_KEY_TOKENS: usize = 8;
const SHORT_KEY_TOKENS: usize = 2;

/// Most places that are looked at for a long or a short key.
const FEW_LINKS: usize = 8;

const SMALLEST_HEAD: usize = 1 << 8;
const LARGEST_HEAD: usize = 1 << 17;

/// A chain of places for each key: 4 bytes per token, and a table of the newest places.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// Tokens per key.
    key_tokens: usize,
    /// For each hash, one past the last token of the newest such key; 0: none.
    head: Vec<u32>,
    /// For each end, the previous end with the same hash.
    previous: Vec<u32>,
    seed: u64,
}

impl Places {
    /// Make an empty index for about `num_tokens` tokens.
    pub(crate) fn new(key_tokens: usize, num_tokens: usize, seed: u64) -> Self {
        let num_heads = num_tokens.next_power_of_two().clamp(SMALLEST_HEAD, LARGEST_HEAD);
        Self { key_tokens, head: vec![0; num_heads], previous: vec![0], seed }
    }

    /// Leave out everything before `end`: the same tokens are indexed elsewhere.
    fn skip_to(&mut self, end: usize) {
        if end > self.previous.len() {
            self.previous.resize(end, 0);
        }
    }

    /// Add the tokens that are new since the last call. The last key is left out, because nothing follows it yet.
    pub(crate) fn append(&mut self, tokens: &[i32]) {
        for end in self.previous.len()..tokens.len() {
            let mut link = 0;
            if end >= self.key_tokens {
                let bucket = self.bucket(&tokens[end - self.key_tokens..end]);
                link = std::mem::replace(&mut self.head[bucket], end as u32);
            }
            self.previous.push(link);
        }
    }

    /// The ends of keys that may equal the last one of `tokens`, newest first: all with the same hash.
    pub(crate) fn ends(&self, tokens: &[i32]) -> impl Iterator<Item = usize> {
        let key = tokens.len().checked_sub(self.key_tokens).map(|first| &tokens[first..]);
        let newest = key.map_or(0, |key| self.head[self.bucket(key)]);
        let not_none = |end: u32| (end != 0).then_some(end as usize);
        std::iter::successors(not_none(newest), move |&end| not_none(self.previous[end]))
    }

    fn bucket(&self, key: &[i32]) -> usize {
        hash_key(self.seed, key) as usize & (self.head.len() - 1)
    }
}

/// Hash a few tokens; the low bits can choose a bucket.
pub(crate) fn hash_key(seed: u64, key: &[i32]) -> u64 {
    key.iter().fold(seed, |hash, &token_id| {
        (hash ^ u64::from(token_id as u32)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    })
}

/// How long the match was by which a place was found. A longer match says more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum MatchedBy {
    /// Two.
    Few,
    /// Three to seven.
    #[default]
    Some,
    /// Eight or more.
    Many,
}

/// Number of the followed tokens that are indexed when a path is left; matches in the rest are not found.
const LEFT_TOKENS: usize = 2 * MAX_MATCH_TOKENS as usize;

/// A place in the request's tokens that the newest tokens have followed.
#[derive(Clone, Copy, Debug)]
struct Path {
    /// The place of the next token.
    place: usize,
    /// Number of tokens at that time.
    num_tokens: usize,
    /// Number of tokens when the path was found.
    from: usize,
}

/// The index of a request's own tokens.
///
/// While the new tokens follow a path that is as long as any match, no search is needed. The tokens are not even
/// indexed, because the same ones are indexed where the path lies.
#[derive(Clone, Debug)]
pub struct SuffixIndex {
    limits: SuffixLimits,
    path: Option<Path>,
    long: Places,
    places: Places,
    short: Places,
}

impl SuffixIndex {
    /// Make an empty index for about `num_tokens` tokens.
    #[must_use]
    pub fn new(limits: SuffixLimits, num_tokens: usize, seed: u64) -> Self {
        let of = |key_tokens| Places::new(key_tokens, num_tokens, seed);
        Self {
            limits,
            path: None,
            long: of(LONG_KEY_TOKENS),
            places: of(KEY_TOKENS),
            short: of(SHORT_KEY_TOKENS),
        }
    }

    pub(crate) fn limits(&self) -> SuffixLimits {
        self.limits
    }

    /// Add the tokens that are new since the last call. The last key is left out, because it is what is looked up.
    #[inline]
    pub fn append(&mut self, tokens: &[i32]) {
        if self.follow(tokens) {
            return;
        }
        self.long.append(tokens);
        self.places.append(tokens);
        self.short.append(tokens);
    }

    /// Append at most `limit` tokens that may follow to `drafts`. Returns how long the match was.
    #[inline]
    pub fn propose(&mut self, tokens: &[i32], limit: usize, drafts: &mut Vec<i32>) -> MatchedBy {
        let Some(Path { place, .. }) = self.path else { return self.search(tokens, limit, drafts) };
        let max_match = self.limits.max_match.min(MAX_MATCH_TOKENS);
        let limit = (self.limits.max_factor * f64::from(max_match)).min(limit as f64) as usize;
        go_on(tokens, place, limit, drafts);
        MatchedBy::Many
    }

    /// Do so without a path, and take one if the match is as long as any.
    fn search(&mut self, tokens: &[i32], limit: usize, drafts: &mut Vec<i32>) -> MatchedBy {
        let max_match = self.limits.max_match.min(MAX_MATCH_TOKENS) as usize;
        let mut matches = Matches::new(max_match);
        let mut matched_by = MatchedBy::Few;
        for (places, num_links, key) in [
            (&self.long, FEW_LINKS, MatchedBy::Many),
            (&self.places, MAX_LINKS, MatchedBy::Some),
            (&self.short, FEW_LINKS, MatchedBy::Few),
        ] {
            for end in places.ends(tokens).take(num_links) {
                let length = common_suffix(&tokens[..end], tokens, max_match);
                if length >= places.key_tokens.min(max_match) {
                    matches.add(Match { end, length });
                }
                if matches.is_settled() {
                    break;
                }
            }
            if !matches.is_empty() {
                matched_by = key;
                break;
            }
        }
        // A match that reaches the newest token continues with the guesses themselves, so that a loop stays a loop.
        let found = matches.vote(&self.limits, limit, drafts, |place, guessed| match tokens.get(place) {
            Some(&token_id) => Some(token_id),
            None => guessed.get(place - tokens.len()).copied(),
        });
        if let Some(found) = found.filter(|found| found.length == max_match && matched_by == MatchedBy::Many)
        {
            self.path = Some(Path { place: found.end, num_tokens: tokens.len(), from: tokens.len() });
        }
        matched_by
    }

    /// Follow the path, if there is one and all new tokens equal its tokens.
    #[inline]
    fn follow(&mut self, tokens: &[i32]) -> bool {
        let Some(path) = &mut self.path else { return false };
        let came = &tokens[path.num_tokens..];
        let next = path.place + came.len();
        if tokens[path.place..next] == *came {
            (path.place, path.num_tokens) = (next, tokens.len());
            return true;
        }
        self.leave_path();
        false
    }

    /// Leave the path, whose last tokens are indexed from now on.
    fn leave_path(&mut self) {
        let Some(path) = self.path.take() else { return };
        let skipped = path.num_tokens.saturating_sub(LEFT_TOKENS);
        if skipped > path.from {
            for places in [&mut self.long, &mut self.places, &mut self.short] {
                places.skip_to(skipped);
            }
        }
    }

    /// Whether the tokens from `first` to `end` are known to have occurred before, not earlier than `earliest`.
    pub(crate) fn repeats(&self, first: usize, end: usize, earliest: usize) -> bool {
        self.path.is_some_and(|path| {
            let distance = path.num_tokens - path.place;
            first >= path.from && end <= path.num_tokens && first - distance >= earliest
        })
    }
}

/// Append `limit` tokens from `place` on; after the newest token, continue with the appended ones.
#[inline]
fn go_on(tokens: &[i32], place: usize, limit: usize, drafts: &mut Vec<i32>) {
    let first = drafts.len();
    let known = &tokens[place..tokens.len().min(place + limit)];
    drafts.extend_from_slice(known);
    if let &[only] = known {
        // One token over and over.
        let run = [only; MAX_MATCH_TOKENS as usize];
        while drafts.len() < first + limit {
            drafts.extend_from_slice(&run[..run.len().min(first + limit - drafts.len())]);
        }
    } else if known.len() < limit {
        drafts.resize(first + limit, 0);
        let appended = &mut drafts[first..];
        let mut period = known.len().max(1);
        while period < limit {
            let (done, rest) = appended.split_at_mut(period);
            let count = done.len().min(rest.len());
            rest[..count].copy_from_slice(&done[..count]);
            period += count;
        }
    }
}
