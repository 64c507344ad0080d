//! `PrefixTable`: the prompt prefixes that an engine has seen lately, as far as a client knows; and `PrefixHasher`,
//! which names them.
//!
//! The name of a prefix is one number: a hash over its tokens and everything else that its KV depends on, with a key of
//! this process (SipHash-1-3 of the standard library). If two prefixes get the same name, this costs a cache hit and
//! never gives a wrong answer, because the engine checks for itself.
//!
//! A table is two sets. Names that are used go into the young set. When that is full it becomes the old set, and the
//! previous old set is forgotten. So recently used names are known, memory is bounded, and no search is needed to
//! decide what to forget.

use std::{
    collections::HashSet,
    hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState},
    mem,
};

use scheduler::NewRequest;

/// Names the prefixes of prompts, block by block.
#[derive(Debug)]
pub struct PrefixHasher {
    key: RandomState,
    block_size: usize,
}

impl PrefixHasher {
    /// Make a hasher with a random key, for blocks of `block_size` tokens (at least 1).
    #[must_use]
    pub fn new(block_size: u32) -> Self {
        Self { key: RandomState::new(), block_size: block_size.max(1) as usize }
    }

    /// A name for each prefix that ends with a full block, the shortest first.
    #[must_use]
    pub fn names(&self, request: &NewRequest) -> Vec<u64> {
        let mut state = self.key.build_hasher();
        let extra_keys = &request.extra_keys;
        state.write_usize(extra_keys.first_block().len());
        state.write(extra_keys.first_block());
        let mut spans = extra_keys.multimodal().iter().peekable();
        let mut bytes = vec![0; self.block_size * size_of::<i32>()];
        let blocks = request.prompt_token_ids.chunks_exact(self.block_size);
        let named = blocks.zip(1..).map(|(block, number)| {
            while let Some(span) = spans.next_if(|span| (span.offset as usize) < number * self.block_size) {
                state.write_u32(span.offset);
                state.write_u32(span.length);
                state.write(&span.digest);
            }
            // One long write: the hasher takes eight bytes at a time.
            for (place, token_id) in bytes.chunks_exact_mut(size_of::<i32>()).zip(block) {
                place.copy_from_slice(&token_id.to_ne_bytes());
            }
            state.write(&bytes);
            // The hash of everything written so far; the state continues from here.
            state.finish()
        });
        named.collect()
    }
}

/// See the module docs.
#[derive(Debug)]
pub struct PrefixTable {
    young: HashSet<u64, BuildHasherDefault<IsHash>>,
    old: HashSet<u64, BuildHasherDefault<IsHash>>,
    /// Most names in each set.
    half: usize,
}

impl PrefixTable {
    /// Make a table that knows at most `capacity` names (at least 2).
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { young: HashSet::default(), old: HashSet::default(), half: (capacity / 2).max(1) }
    }

    /// How many of a prompt's prefixes are known, counted from the shortest.
    #[must_use]
    pub fn longest(&self, names: &[u64]) -> usize {
        names.iter().take_while(|name| self.young.contains(name) || self.old.contains(name)).count()
    }

    /// Remember these names. If there are too many, remember the shortest.
    pub fn remember(&mut self, names: &[u64]) {
        for name in names.iter().rev() {
            if self.young.contains(name) {
                continue;
            }
            if self.young.len() >= self.half {
                self.old = mem::take(&mut self.young);
            }
            self.young.insert(*name);
        }
    }

    /// Number of names that are known; names in both sets count twice.
    #[must_use]
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// Whether no names are known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A hasher for keys that are hashes already.
#[derive(Clone, Copy, Debug, Default)]
struct IsHash(u64);

impl Hasher for IsHash {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }

    /// Never called for a `u64`; correct but slow for other types.
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }
}
