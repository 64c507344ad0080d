//! The prefix index: content hash → block, written by the owner, read by any thread without a lock.
//!
//! ```text
//!  slots    [ · | tag,9 | tag,4 | · | tag,7 | … ]     open addressing, ≥ 2 slots a block, tag = 32 bits of the hash
//!                    │
//!  records        [ 9 ] { version, hash, twins ⇄ 12 ⇄ 30 }
//! ```
//!
//! * A slot is one atomic word, a tag and a block number; the tag's top bits are the slot's home, so moving an entry
//!   needs nothing but the entry. The table is at most half full and never grows: it allocates nothing after `new`.
//! * The full hash is in the block's record. Its `version` is even while the block is registered and odd otherwise,
//!   and rises with every change: it is the block's generation. A reader takes the version, the hash, and the version
//!   again; equal and even means that the block was registered under that hash at that moment. A reader may miss (an
//!   entry moves while it looks) but never hits wrongly.
//! * Blocks of the same content form a ring of twins through their records; the table holds the earliest registered
//!   of those that are left. However many there are, each operation stays O(1).
//! * The owner deletes by backward shift: there are no tombstones, so a table that has worked for a year is as fast
//!   as a new one.
//!
//! Only [`BlockPool`](crate::BlockPool), through `&mut self`, calls what writes: one writer, so plain stores suffice.
//! Progress: readers are wait-free (at most one round of the table); the writer waits for no reader.

use crate::block::{BlockHash, BlockId};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

const EMPTY: u64 = 0;

/// What readers validate against, in half a cache line.
#[repr(align(32))]
struct Record {
    version: AtomicU64,
    hash_low: AtomicU64,
    hash_high: AtomicU64,
    /// The twin registered before this one, in a ring. Used by the owner only.
    previous: AtomicU32,
    /// The twin registered after this one, in a ring. Used by the owner only.
    next: AtomicU32,
}

pub(crate) struct PrefixIndex {
    slots: Box<[AtomicU64]>,
    records: Box<[Record]>,
    /// `32 - log2(slots.len())`: turns a tag into its home.
    shift: u32,
}

/// The tag of a hash. The hash is keyed and even already; the multiplication spreads hand-made ones in tests too.
#[cfg(not(loom))]
#[inline]
fn tag_of(low: u64, high: u64) -> u32 {
    ((low ^ high.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
}

/// For the model checker all contents share one tag, and the last slot as their home: every look-up reaches the
/// validation, every removal shifts, every run wraps round.
#[cfg(loom)]
fn tag_of(_low: u64, _high: u64) -> u32 {
    u32::MAX
}

/// Whether a record of this version stands for a registered block.
#[inline]
fn is_registered(version: u64) -> bool {
    version & 1 == 0
}

#[inline]
fn entry(tag: u32, block: BlockId) -> u64 {
    (u64::from(tag) << 32) | u64::from(block.0)
}

#[inline]
fn entry_tag(entry: u64) -> u32 {
    (entry >> 32) as u32
}

#[inline]
fn entry_block(entry: u64) -> BlockId {
    BlockId(entry as u32)
}

impl PrefixIndex {
    /// An empty index for at most `2^30` blocks.
    pub(crate) fn new(num_blocks: u32) -> Self {
        let num_slots = (num_blocks as usize * 2).next_power_of_two().max(4);
        let record = |_| Record {
            version: AtomicU64::new(1),
            hash_low: AtomicU64::new(0),
            hash_high: AtomicU64::new(0),
            previous: AtomicU32::new(0),
            next: AtomicU32::new(0),
        };
        Self {
            slots: (0..num_slots).map(|_| AtomicU64::new(EMPTY)).collect(),
            records: (0..num_blocks).map(record).collect(),
            shift: 32 - num_slots.trailing_zeros(),
        }
    }

    #[inline]
    fn home(&self, tag: u32) -> usize {
        (tag >> self.shift) as usize
    }

    #[inline]
    fn after(&self, slot: usize) -> usize {
        (slot + 1) & (self.slots.len() - 1)
    }

    /// Any thread: a block that was registered under `hash` at some moment of this call.
    pub(crate) fn lookup_hint(&self, hash: BlockHash) -> Option<BlockId> {
        let (low, high) = hash.words();
        let tag = tag_of(low, high);
        let mut slot = self.home(tag);
        // The owner may be moving entries, so an empty slot may never come by: one round is the bound.
        for _ in 0..self.slots.len() {
            // Relaxed, like all accesses of slots: an entry is only a place to look, its record is validated by itself.
            let found = self.slots[slot].load(Ordering::Relaxed);
            if found == EMPTY {
                return None;
            }
            if entry_tag(found) == tag && self.was_registered(entry_block(found), low, high) {
                return Some(entry_block(found));
            }
            slot = self.after(slot);
        }
        None
    }

    /// Any thread: whether the block was registered under this hash between the two loads of its version.
    fn was_registered(&self, block: BlockId, low: u64, high: u64) -> bool {
        let record = &self.records[block.index()];
        // Acquire: partner of the Release that makes the version even in `insert`; the hash read below is at least as new.
        let before = record.version.load(Ordering::Acquire);
        if !is_registered(before) {
            return false;
        }
        // Acquire: partners of the Release stores of the hash in `insert`; if either load sees a newer hash, the load
        // of the version below sees the odd version that was stored before it.
        let same = record.hash_low.load(Ordering::Acquire) == low
            && record.hash_high.load(Ordering::Acquire) == high;
        same && record.version.load(Ordering::Relaxed) == before
    }

    /// Owner: the slot and block that stand for this content.
    #[inline]
    fn find(&self, low: u64, high: u64) -> Result<(usize, BlockId), usize> {
        let tag = tag_of(low, high);
        let mut slot = self.home(tag);
        loop {
            let found = self.slots[slot].load(Ordering::Relaxed);
            if found == EMPTY {
                return Err(slot);
            }
            let block = entry_block(found);
            if entry_tag(found) == tag && self.has_hash(block, low, high) {
                return Ok((slot, block));
            }
            slot = self.after(slot);
        }
    }

    #[inline]
    fn has_hash(&self, block: BlockId, low: u64, high: u64) -> bool {
        let record = &self.records[block.index()];
        record.hash_low.load(Ordering::Relaxed) == low && record.hash_high.load(Ordering::Relaxed) == high
    }

    /// Owner: the earliest registered block of this content.
    #[inline]
    pub(crate) fn lookup(&self, hash: BlockHash) -> Option<BlockId> {
        let (low, high) = hash.words();
        self.find(low, high).ok().map(|(_, block)| block)
    }

    /// Owner: the hash under which a registered block stands.
    #[inline]
    pub(crate) fn hash_of(&self, block: BlockId) -> Option<BlockHash> {
        let record = &self.records[block.index()];
        is_registered(record.version.load(Ordering::Relaxed)).then(|| {
            BlockHash::from_words(
                record.hash_low.load(Ordering::Relaxed),
                record.hash_high.load(Ordering::Relaxed),
            )
        })
    }

    /// Owner: registers a block that is not registered.
    pub(crate) fn insert(&self, block: BlockId, hash: BlockHash) {
        let (low, high) = hash.words();
        let place = self.find(low, high);
        let record = &self.records[block.index()];
        let version = record.version.load(Ordering::Relaxed);
        assert!(!is_registered(version), "{block} is in the prefix index already");
        // Release: partners of the loads in `was_registered`; who sees this hash sees the odd version before it.
        record.hash_low.store(low, Ordering::Release);
        record.hash_high.store(high, Ordering::Release);
        // Release: partner of the first load in `was_registered`; who sees the even version sees this hash.
        record.version.store(version + 1, Ordering::Release);
        match place {
            Ok((_, first)) => self.link_before(first, block),
            Err(slot) => {
                record.previous.store(block.0, Ordering::Relaxed);
                record.next.store(block.0, Ordering::Relaxed);
                self.slots[slot].store(entry(tag_of(low, high), block), Ordering::Relaxed);
            }
        }
    }

    /// Owner: takes a registered block out.
    pub(crate) fn remove(&self, block: BlockId) {
        let record = &self.records[block.index()];
        let version = record.version.load(Ordering::Relaxed);
        assert!(is_registered(version), "{block} is not in the prefix index");
        // Relaxed: a reader that still sees the even version answers as of a moment ago. The stores of the next
        // registration carry this one with them (see `insert`).
        record.version.store(version + 1, Ordering::Relaxed);
        let low = record.hash_low.load(Ordering::Relaxed);
        let high = record.hash_high.load(Ordering::Relaxed);
        let Ok((slot, first)) = self.find(low, high) else {
            panic!("{block} is registered, but the prefix index does not hold its content");
        };
        let next = BlockId(record.next.load(Ordering::Relaxed));
        if next == block {
            self.delete_slot(slot);
            return;
        }
        let previous = record.previous.load(Ordering::Relaxed);
        self.records[previous as usize].next.store(next.0, Ordering::Relaxed);
        self.records[next.index()].previous.store(previous, Ordering::Relaxed);
        if first == block {
            self.slots[slot].store(entry(tag_of(low, high), next), Ordering::Relaxed);
        }
    }

    /// Owner: puts `block` into the ring as the last registered twin of `first`.
    fn link_before(&self, first: BlockId, block: BlockId) {
        let record = &self.records[block.index()];
        let last = self.records[first.index()].previous.load(Ordering::Relaxed);
        self.records[first.index()].previous.store(block.0, Ordering::Relaxed);
        record.previous.store(last, Ordering::Relaxed);
        record.next.store(first.0, Ordering::Relaxed);
        self.records[last as usize].next.store(block.0, Ordering::Relaxed);
    }

    /// Owner: empties a slot and moves later entries of the run back, so that no entry is behind a gap.
    fn delete_slot(&self, slot: usize) {
        let mask = self.slots.len() - 1;
        let mut gap = slot;
        let mut at = self.after(slot);
        loop {
            let moving = self.slots[at].load(Ordering::Relaxed);
            if moving == EMPTY {
                break;
            }
            let home = self.home(entry_tag(moving));
            // It may move back only as far as its home.
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                // The entry is in both places until its old slot is overwritten: a reader that has passed the gap finds
                // it further on, or misses.
                self.slots[gap].store(moving, Ordering::Relaxed);
                gap = at;
            }
            at = self.after(at);
        }
        self.slots[gap].store(EMPTY, Ordering::Relaxed);
    }

    /// Owner: takes every block out. O(blocks).
    pub(crate) fn clear(&self) {
        for record in &self.records {
            let version = record.version.load(Ordering::Relaxed);
            if is_registered(version) {
                // Relaxed, as in `remove`.
                record.version.store(version + 1, Ordering::Relaxed);
            }
        }
        for slot in &self.slots {
            slot.store(EMPTY, Ordering::Relaxed);
        }
    }

    /// Owner: panics unless the table, the rings and the records agree. `registered` says what the pool believes.
    pub(crate) fn check_invariants(&self, registered: impl Fn(BlockId) -> bool) {
        let mut seen = vec![false; self.records.len()];
        for (at, slot) in self.slots.iter().enumerate() {
            let found = slot.load(Ordering::Relaxed);
            if found == EMPTY {
                continue;
            }
            let first = entry_block(found);
            assert!(!first.is_null() && first.index() < self.records.len(), "slot {at} names {first}");
            let Some(hash) = self.hash_of(first) else {
                panic!("slot {at} names {first}, which has no hash")
            };
            let (low, high) = hash.words();
            assert_eq!(entry_tag(found), tag_of(low, high), "slot {at} has a tag that is not {first}'s");
            assert_eq!(
                self.find(low, high),
                Ok((at, first)),
                "slot {at} of {first} is not where a look-up ends"
            );
            let mut twin = first;
            loop {
                assert!(!seen[twin.index()], "{twin} is in the prefix index twice");
                seen[twin.index()] = true;
                assert_eq!(self.hash_of(twin), Some(hash), "{twin} is a twin of {first} with another hash");
                let next = BlockId(self.records[twin.index()].next.load(Ordering::Relaxed));
                let back = self.records[next.index()].previous.load(Ordering::Relaxed);
                assert_eq!(back, twin.0, "the ring of twins of {first} is broken between {twin} and {next}");
                twin = next;
                if twin == first {
                    break;
                }
            }
        }
        for (id, seen) in seen.into_iter().enumerate() {
            let block = BlockId(id as u32);
            assert_eq!(
                self.hash_of(block).is_some(),
                seen,
                "{block} has a hash or is in the index, but not both"
            );
            assert_eq!(
                registered(block),
                seen,
                "the pool and the index disagree whether {block} is registered"
            );
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// A hash whose tag is what the test wants: the multiplier is odd and so has an inverse modulo 2^64.
    fn hash_with_tag(tag: u32, n: u64) -> BlockHash {
        let mut inverse = 1_u64;
        for _ in 0..6 {
            inverse =
                inverse.wrapping_mul(2_u64.wrapping_sub(0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(inverse)));
        }
        let mixed = (u64::from(tag) << 32).wrapping_mul(inverse);
        BlockHash::from_words(mixed ^ n.rotate_left(32), n)
    }

    /// Contents that crowd into a few homes, at the end of the table too, some with equal tags: after every insertion
    /// and removal the index answers like a map.
    #[test]
    fn crowded_index_equals_map() {
        for num_blocks in [3_u32, 5, 16, 33] {
            let index = PrefixIndex::new(num_blocks);
            let num_slots = index.slots.len() as u64;
            let tags = [0, 1, num_slots - 2, num_slots - 1].map(|home| (home << index.shift) as u32);
            let contents: Vec<BlockHash> = (0..num_blocks)
                .map(|n| hash_with_tag(tags[n as usize % 4] + n % 3, u64::from(n / 12)))
                .collect();
            for (n, content) in contents.iter().enumerate() {
                let (low, high) = content.words();
                assert_eq!(
                    tag_of(low, high),
                    tags[n % 4] + n as u32 % 3,
                    "the test makes the tags it means to"
                );
            }
            let mut map: HashMap<BlockHash, Vec<BlockId>> = HashMap::new();
            let mut registered = vec![None; num_blocks as usize];
            let mut state = u64::from(num_blocks);
            for _ in 0..4_000 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let block = BlockId(1 + (state >> 33) as u32 % (num_blocks - 1));
                if let Some(hash) = registered[block.index()].take() {
                    index.remove(block);
                    map.entry(hash).or_default().retain(|&other| other != block);
                } else {
                    let hash = contents[(state >> 20) as usize % contents.len()];
                    index.insert(block, hash);
                    map.entry(hash).or_default().push(block);
                    registered[block.index()] = Some(hash);
                }
                index.check_invariants(|block| registered[block.index()].is_some());
                for &hash in &contents {
                    let expected = map.get(&hash).and_then(|blocks| blocks.first().copied());
                    assert_eq!(index.lookup(hash), expected);
                    assert_eq!(index.lookup_hint(hash), expected, "at rest the hint is exact");
                }
            }
            index.clear();
            index.check_invariants(|_| false);
        }
    }

    #[test]
    fn a_record_is_half_a_cache_line() {
        assert_eq!(size_of::<Record>(), 32);
    }
}
