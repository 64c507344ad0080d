//! `Archive`: what other requests were answered, so that an answer that many clients ask for can be drafted for each of
//! them.
//!
//! It is a ring of pages of 64 tokens. A page holds a piece of one answer, preceded by the tokens before the piece, so
//! that the piece can be found from its first token on. When the ring is full, the oldest page is overwritten; links
//! into it are recognised as dead by their age. Each page carries the seed of its request. Pages of another cache salt
//! or adapter are never compared, so they can neither become drafts nor be noticed by the time that a step takes.

use crate::{
    matches::{KEY_TOKENS, MAX_LINKS, MAX_MATCH_TOKENS, Match, Matches, SuffixLimits, common_suffix},
    suffix::hash_key,
};

/// Tokens of a page.
const PAGE: usize = 64;

/// Tokens at the beginning of a page that repeat the end of the page before it, or of the prompt.
const CONTEXT: usize = 16;

/// New tokens in each page.
pub(crate) const PIECE: usize = PAGE - CONTEXT;

/// Most pages: 4 Mi tokens, about 64 MiB including the index.
const MAX_PAGES: usize = 1 << 16;

/// The hash of a triple of tokens, and below it the number of the newest place where such a triple ends; 0: none. For a
/// text that never occurred, the hash differs and no place has to be looked at. It is a plain number, so that a table
/// of them is zeroed memory from the system, which is only touched where it is written.
#[derive(Clone, Copy)]
struct Head(u64);

impl Head {
    fn new(hash: u32, number: u32) -> Self {
        Self(u64::from(hash) << 32 | u64::from(number))
    }

    /// The number, if the hash is this one; else 0.
    fn number_of(self, hash: u32) -> u32 {
        if (self.0 >> 32) as u32 == hash { self.0 as u32 } else { 0 }
    }
}

/// Pieces of answers, indexed by triples of tokens. Its memory grows with its content.
#[derive(Debug)]
pub struct Archive {
    max_pages: usize,
    /// The seed of each page in the ring.
    seeds: Vec<u64>,
    /// The token at each place in the ring.
    tokens: Vec<i32>,
    /// For each place, the number of the previous place with the same hash; 0: none.
    previous: Vec<u32>,
    /// The `Head` of each bucket, by the low bits of a triple's hash. A newer triple replaces an older one.
    heads: Vec<u64>,
    /// Number of pages that were ever added. The number of a place is that of its page times 64, plus its position in
    /// the page.
    num_added: usize,
}

impl Archive {
    /// Make an archive of at most `num_tokens` tokens, including contexts, and never more than 4 Mi.
    #[must_use]
    pub fn new(num_tokens: usize) -> Self {
        let max_pages = (num_tokens / PAGE).clamp(1, MAX_PAGES);
        Self {
            max_pages,
            seeds: Vec::new(),
            tokens: Vec::new(),
            previous: Vec::new(),
            heads: Vec::new(),
            num_added: 0,
        }
    }

    /// Add `tokens[first..]`, at most 48 tokens. Those before `first` are their context.
    pub fn add(&mut self, seed: u64, tokens: &[i32], first: usize) {
        let piece = &tokens[first.saturating_sub(CONTEXT)..tokens.len().min(first + PIECE)];
        if piece.len() <= KEY_TOKENS {
            return;
        }
        let page = self.take_page(seed);
        let start = page % self.max_pages * PAGE;
        self.tokens[start..start + piece.len()].copy_from_slice(piece);
        // No token has a negative id, so a page that is not full ends there.
        self.tokens[start + piece.len()..start + PAGE].fill(-1);
        for end in KEY_TOKENS..piece.len() {
            let (bucket, hash) = self.bucket(seed, &piece[end - KEY_TOKENS..end]);
            let before = Head(self.heads[bucket]);
            self.heads[bucket] = Head::new(hash, (page * PAGE + end) as u32).0;
            self.previous[start + end] = before.number_of(hash);
        }
    }

    /// Append to `drafts` at most `limit` tokens that may follow `tokens`.
    pub fn propose(
        &self,
        seed: u64,
        limits: &SuffixLimits,
        tokens: &[i32],
        limit: usize,
        drafts: &mut Vec<i32>,
    ) {
        if self.num_added == 0 || tokens.len() < KEY_TOKENS {
            return;
        }
        let max_match = limits.max_match.min(MAX_MATCH_TOKENS) as usize;
        let mut matches = Matches::new(max_match);
        let (bucket, hash) = self.bucket(seed, &tokens[tokens.len() - KEY_TOKENS..]);
        let mut number = Head(self.heads[bucket]).number_of(hash) as usize;
        for _ in 0..MAX_LINKS {
            let page = number / PAGE;
            if number == 0 || page + self.max_pages < self.num_added {
                break; // Overwritten, and so is all before it: what stands there now would be compared in vain.
            }
            let (start, end) = (page % self.max_pages * PAGE, number % (self.max_pages * PAGE));
            if self.seeds[page % self.max_pages] == seed {
                let length = common_suffix(&self.tokens[start..end], tokens, max_match);
                if length >= KEY_TOKENS.min(max_match) {
                    matches.add(Match { end, length });
                }
                if matches.is_settled() {
                    break;
                }
            }
            number = self.previous[end] as usize;
        }
        // A page ends where the next page of the ring begins.
        matches.vote(limits, limit, drafts, |place, guessed| {
            let is_within = (place - guessed.len()) / PAGE == place / PAGE;
            is_within.then(|| self.tokens[place]).filter(|&token_id| token_id >= 0)
        });
    }

    /// The number of the page to write next.
    fn take_page(&mut self, seed: u64) -> usize {
        if (self.num_added + 2) * PAGE > u32::MAX as usize {
            // Numbers start again once in four billion tokens; everything is forgotten then.
            *self = Self::new(self.max_pages * PAGE);
        }
        if self.heads.is_empty() {
            // Zeroed memory takes room only when it is first written, so nothing is copied while the ring fills up.
            self.heads = vec![0; (self.max_pages * PAGE).next_power_of_two()];
            self.seeds = vec![0; self.max_pages];
            self.tokens = vec![0; self.max_pages * PAGE];
            self.previous = vec![0; self.max_pages * PAGE];
            // No place may have number 0, which means that there is none.
            self.num_added = self.max_pages;
        }
        let page = self.num_added;
        self.num_added += 1;
        self.seeds[page % self.max_pages] = seed;
        page
    }

    fn bucket(&self, seed: u64, key: &[i32]) -> (usize, u32) {
        let hash = hash_key(seed, key);
        (hash as usize & (self.heads.len() - 1), (hash >> 32) as u32)
    }
}
