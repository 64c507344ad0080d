//! `NgramIndex`: where each n-gram of a request stood first.

/// The place of a gram is one past its last token; 0: nothing lies in the slot.
const EMPTY: u32 = 0;

/// Slots of a table before it grows for the first time.
const FIRST_SLOTS: usize = 64;

/// Grams of one length, open addressing over their ends. A slot holds nothing of the gram but where it ends: the tokens
/// are those of the request.
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

    /// The slot of the gram that ends at `end`: its own, or the empty one where it would go.
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

    /// Where the gram that ends at `end` ended first, if it did before.
    fn first_end(&self, tokens: &[i32], end: usize, hash: u64) -> Option<usize> {
        if self.slots.is_empty() {
            return None;
        }
        match self.slots[self.slot_of(tokens, end, hash)] {
            EMPTY => None,
            first => Some(first as usize),
        }
    }

    /// Note the gram that ends at `end`, unless it did before.
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

/// Grams of every length in `min..=max`.
#[derive(Clone, Debug)]
pub struct NgramIndex {
    min: usize,
    tables: Vec<Table>,
    /// Grams that end here or before are in the tables.
    num_indexed: usize,
    /// So that no client can send tokens whose grams all fall into one slot.
    seed: u64,
}

impl NgramIndex {
    /// An index without tokens. `min` is at least 1, `max` at least `min`.
    #[must_use]
    pub fn new(min: u32, max: u32, seed: u64) -> Self {
        let tables = (min..=max).map(|length| Table::new(length as usize)).collect();
        Self { min: min as usize, tables, num_indexed: 0, seed }
    }

    /// Take in what `tokens` holds beyond what it held before. The grams that end with the last token stay out: they are
    /// what is looked for.
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

    /// What follows the earliest occurrence of the longest suffix of `tokens` that occurred before; empty if none did.
    #[must_use]
    pub fn following<'a>(&self, tokens: &'a [i32]) -> &'a [i32] {
        let mut found = tokens.len();
        let mut hash = self.seed;
        for (back, &token_id) in tokens.iter().rev().take(self.longest()).enumerate() {
            hash = mix(hash, token_id);
            let Some(table) = (back + 1).checked_sub(self.min).map(|index| &self.tables[index]) else {
                continue;
            };
            // Where a suffix did not occur, no longer one did.
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

/// One token more, by a multiplication whose halves are folded: the low bits depend on all.
fn mix(hash: u64, token_id: i32) -> u64 {
    let product = u128::from(hash ^ u64::from(token_id as u32)) * 0x9e37_79b9_7f4a_7c15;
    (product as u64) ^ ((product >> 64) as u64)
}
