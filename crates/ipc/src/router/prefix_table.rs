//! `PrefixTable`: which beginnings of prompts an engine has seen lately, as far as a client can tell; and
//! `PrefixHasher`, which names them.
//!
//! The name of a beginning is one number: a hash over its tokens and whatever else its KV depends on, under a key of this
//! process (SipHash-1-3, the standard library's). Two beginnings of one name cost a cache hit, never a wrong answer: the
//! engine looks for itself.
//!
//! A table is two sets. What is used goes into the young one; when that is full it becomes the old one, whose content is
//! forgotten. So what was used lately is known, for a bounded memory, and nothing is ever searched for what to forget.

use std::{
    collections::HashSet,
    hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState},
    mem,
};

use scheduler::NewRequest;

/// Names the beginnings of prompts, block by block.
#[derive(Debug)]
pub struct PrefixHasher {
    key: RandomState,
    block_size: usize,
}

impl PrefixHasher {
    /// With a fresh key, for blocks of so many tokens (at least 1).
    #[must_use]
    pub fn new(block_size: u32) -> Self {
        Self { key: RandomState::new(), block_size: block_size.max(1) as usize }
    }

    /// A name for each beginning that ends with a full block, the shortest first.
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
            // Of all that was written so far; the state goes on.
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
    /// Most names in either.
    half: usize,
}

impl PrefixTable {
    /// One that knows at most `capacity` names (at least 2).
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { young: HashSet::default(), old: HashSet::default(), half: (capacity / 2).max(1) }
    }

    /// How many of a prompt's beginnings are known, from the shortest on.
    #[must_use]
    pub fn longest(&self, names: &[u64]) -> usize {
        names.iter().take_while(|name| self.young.contains(name) || self.old.contains(name)).count()
    }

    /// Know these from now on. Of more than there is room for, the shortest.
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

    /// Names that are known now, those that are in both sets twice.
    #[must_use]
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// Whether nothing is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What it is given is a hash already.
#[derive(Clone, Copy, Debug, Default)]
struct IsHash(u64);

impl Hasher for IsHash {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }

    /// Never called for a `u64`; right for anything else, if slow.
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }
}
