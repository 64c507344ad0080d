//! `NgramIndex`: where each n-gram of a request occurred first.

/// An empty slot. The place of a gram is one past its last token, so it is never 0.
const EMPTY: u32 = 0;

/// Slots of a table before it grows for the first time.
const FIRST_SLOTS: usize = 64;

/// The grams of one length: a hash table with open addressing. A slot holds only where the gram ends; the request has
/// the tokens.
#[derive(Clone, Debug)]
struct Table {
    length: usize,
    slots: Vec<u32>,
    num_grams: usize,
}

impl Table {
    fn new(length: usize) -> Self {
        Self { length, slots: Vec::new(), num_grams: 0 }
    }

    fn gram<'a>(&self, tokens: &'a [i32], end: usize) -> &'a [i32] {
        &tokens[end - self.length..end]
    }

    /// The slot of the gram that ends at `end`: its own, or the empty one where it would be inserted.
    fn slot_of(&self, tokens: &[i32], end: usize, hash: u64) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = hash as usize & mask;
        loop {
            let first = self.slots[slot];
            if first == EMPTY || self.gram(tokens, first as usize) == self.gram(tokens, end) {
                return slot;
            }
            slot = (slot + 1) & mask;
        }
    }

    /// The end of the first occurrence of the gram that ends at `end`, if there is an earlier one.
    fn first_end(&self, tokens: &[i32], end: usize, hash: u64) -> Option<usize> {
        if self.slots.is_empty() {
            return None;
        }
        match self.slots[self.slot_of(tokens, end, hash)] {
            EMPTY => None,
            first => Some(first as usize),
        }
    }

    /// Insert the gram that ends at `end`, unless it occurred before.
    fn insert(&mut self, tokens: &[i32], end: usize, hash: u64, seed: u64) {
        if self.slots.len() <= 2 * self.num_grams {
            self.grow(tokens, seed);
        }
        let slot = self.slot_of(tokens, end, hash);
        if self.slots[slot] == EMPTY {
            self.slots[slot] = end as u32;
            self.num_grams += 1;
        }
    }

    fn grow(&mut self, tokens: &[i32], seed: u64) {
        let num_slots = (2 * self.slots.len()).max(FIRST_SLOTS);
        let grown = vec![EMPTY; num_slots];
        for end in std::mem::replace(&mut self.slots, grown) {
            if end != EMPTY {
                let hash = hash_backwards(self.gram(tokens, end as usize), seed);
                let slot = self.slot_of(tokens, end as usize, hash);
                self.slots[slot] = end;
            }
        }
    }
}

/// The n-grams of every length in `min..=max`.
#[derive(Clone, Debug)]
pub struct NgramIndex {
    min: usize,
    tables: Vec<Table>,
    /// Grams that end here or before are in the tables.
    num_indexed: usize,
    /// Random, so that no client can send tokens whose grams all collide.
    seed: u64,
}

impl NgramIndex {
    /// Make an empty index. `min` is at least 1, `max` at least `min`.
    #[must_use]
    pub fn new(min: u32, max: u32, seed: u64) -> Self {
        let tables = (min..=max).map(|length| Table::new(length as usize)).collect();
        Self { min: min as usize, tables, num_indexed: 0, seed }
    }

    /// Add the tokens that are new since the last call. The grams that end with the last token are left out, because
    /// they are what is looked up.
    pub fn append(&mut self, tokens: &[i32]) {
        while self.num_indexed + 1 < tokens.len() {
            self.num_indexed += 1;
            let end = self.num_indexed;
            let mut hash = self.seed;
            for (back, &token_id) in tokens[..end].iter().rev().take(self.longest()).enumerate() {
                hash = mix(hash, token_id);
                if back + 1 >= self.min {
                    self.tables[back + 1 - self.min].insert(tokens, end, hash, self.seed);
                }
            }
        }
    }

    /// The tokens after the earliest occurrence of the longest suffix of `tokens` that occurred before; empty if none
    /// did.
    #[must_use]
    pub fn following<'a>(&self, tokens: &'a [i32]) -> &'a [i32] {
        let mut found = tokens.len();
        let mut hash = self.seed;
        for (back, &token_id) in tokens.iter().rev().take(self.longest()).enumerate() {
            hash = mix(hash, token_id);
            let Some(table) = (back + 1).checked_sub(self.min).map(|index| &self.tables[index]) else {
                continue;
            };
            // If a suffix did not occur before, neither did a longer one.
            let Some(end) = table.first_end(tokens, tokens.len(), hash) else { break };
            found = end;
        }
        &tokens[found..]
    }

    fn longest(&self) -> usize {
        self.min + self.tables.len() - 1
    }
}

fn hash_backwards(gram: &[i32], seed: u64) -> u64 {
    gram.iter().rev().fold(seed, |hash, &token_id| mix(hash, token_id))
}

/// Mix one token into a hash: a multiplication whose halves are folded, so that the low bits depend on all bits.
fn mix(hash: u64, token_id: i32) -> u64 {
    let product = u128::from(hash ^ u64::from(token_id as u32)) * 0x9e37_79b9_7f4a_7c15;
    (product as u64) ^ ((product >> 64) as u64)
}
