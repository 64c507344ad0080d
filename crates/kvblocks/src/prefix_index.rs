//! The prefix index: content hash → block, written by the owner, read by any thread without a lock.
//!
//! ```text
//!  buckets        [ tag,9 | · | tag,4 | · | · | tag,7 | · | 0 passed ] …     a cache line each, tag = 32 bits of the hash
//!                      │
//!  records          [ 9 ] { version, slot, hash, twins ⇄ 12 ⇄ 30 }
//! ```
//!
//! * A slot is one atomic word, a tag and a block number. The tag's top bits choose the bucket that is the entry's home.
//!   An entry whose home is full goes into the next bucket with room, and each bucket counts the entries that passed it
//!   by. A look-up ends at the first bucket that none has passed: nearly always at home, in one cache line. At most four
//!   slots of seven are taken. The table never grows and allocates nothing after `new`.
//! * The full hash is in the block's record. Its `version` is even while the block is registered and odd otherwise,
//!   and rises with every change: it is the block's generation. A reader takes the version, the hash, and the version
//!   again; equal and even means that the block was registered under that hash at that moment. A reader may miss (a
//!   twin takes an entry over while it looks) but never hits wrongly.
//! * Blocks of the same content form a ring of twins through their records; the table holds the earliest registered
//!   of those that are left. However many there are, each operation stays O(1).
//! * Entries never move, so a record knows its entry's slot: taking a block out looks for nothing. There are no
//!   tombstones either: a table that has worked for a year is as fast as a new one.
//!
//! A step that fills many blocks registers hundreds of contents and evicts as many, and their lines are beyond the second
//! cache. No branch here depends on what cannot be foreseen (which entry of the bucket it is, where a run of entries ends),
//! so the processor goes on while lines are on their way.
//!
//! Only [`BlockPool`](crate::BlockPool), through `&mut self`, calls what writes: one writer, so plain stores suffice.
//! Progress: readers are wait-free (at most one round of the table); the writer waits for no reader.

use crate::block::{BlockHash, BlockId};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

const EMPTY: u64 = 0;

/// Entries of a bucket: a cache line less the count. The model checker's buckets hold one, so that its few blocks pass
/// buckets by.
const ENTRIES: usize = if cfg!(loom) { 1 } else { 7 };

/// Slot numbers of a bucket, a power of two.
const STRIDE: u32 = ENTRIES.next_power_of_two() as u32;

/// Blocks per bucket, at most: on average a bucket has room for three more, so few entries pass one by.
const BLOCKS_PER_BUCKET: usize = if cfg!(loom) { 1 } else { 4 };

/// One cache line of entries.
#[repr(align(64))]
struct Bucket {
    entries: [AtomicU64; ENTRIES],
    /// Entries that are further on because this bucket was full. A look-up goes on while it is not 0.
    num_passed: AtomicU32,
}

impl Bucket {
    fn new() -> Self {
        Self { entries: std::array::from_fn(|_| AtomicU64::new(EMPTY)), num_passed: AtomicU32::new(0) }
    }

    /// The entries that `is_wanted`, as bits. Without a branch: which entry it is cannot be foreseen.
    #[inline]
    fn entries_that(&self, is_wanted: impl Fn(u64) -> bool) -> u32 {
        let mut found = 0;
        for (at, slot) in self.entries.iter().enumerate() {
            // Relaxed, like all accesses of slots: an entry is only a place to look, its record is validated by itself.
            found |= u32::from(is_wanted(slot.load(Ordering::Relaxed))) << at;
        }
        found
    }

    /// Owner: adds to the count of those who passed.
    #[inline]
    fn pass(&self, change: i32) {
        // Relaxed: a reader that sees another count misses an entry that is being written.
        let count = self.num_passed.load(Ordering::Relaxed);
        self.num_passed.store(count.wrapping_add_signed(change), Ordering::Relaxed);
    }
}

/// What readers validate against, in half a cache line.
#[repr(align(32))]
struct Record {
    /// A reader is fooled by none of the 2^31 generations before the count begins again: it would have to sleep through
    /// all of them between two loads, and find both halves of the hash it asks for in other contents.
    version: AtomicU32,
    /// Where the entry is, of the first of its twins. Used by the owner only.
    slot: AtomicU32,
    hash_low: AtomicU64,
    hash_high: AtomicU64,
    /// The twin registered before this one, in a ring. Used by the owner only.
    previous: AtomicU32,
    /// The twin registered after this one, in a ring. Used by the owner only.
    next: AtomicU32,
}

pub(crate) struct PrefixIndex {
    buckets: Box<[Bucket]>,
    records: Box<[Record]>,
    /// `32 - log2(buckets.len())`: turns a tag into its home.
    shift: u32,
}

/// The tag of a hash, odd so that it is not that of an empty slot. The hash is keyed and even already; the
/// multiplication spreads hand-made ones in tests too.
#[cfg(not(loom))]
#[inline]
fn tag_of(low: u64, high: u64) -> u32 {
    ((low ^ high.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32 | 1
}

/// For the model checker all contents share one tag, and the last bucket as their home: every look-up reaches the
/// validation, the second content passes a bucket by, every walk wraps round.
#[cfg(loom)]
fn tag_of(_low: u64, _high: u64) -> u32 {
    u32::MAX
}

/// Owner: the tag of the content that a block holds, or held last.
#[inline]
fn tag_of_record(record: &Record) -> u32 {
    tag_of(record.hash_low.load(Ordering::Relaxed), record.hash_high.load(Ordering::Relaxed))
}

/// Whether a record of this version stands for a registered block.
#[inline]
fn is_registered(version: u32) -> bool {
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
        let num_buckets = (num_blocks as usize).div_ceil(BLOCKS_PER_BUCKET).next_power_of_two().max(2);
        let record = |_| Record {
            version: AtomicU32::new(1),
            slot: AtomicU32::new(0),
            hash_low: AtomicU64::new(0),
            hash_high: AtomicU64::new(0),
            previous: AtomicU32::new(0),
            next: AtomicU32::new(0),
        };
        Self {
            buckets: (0..num_buckets).map(|_| Bucket::new()).collect(),
            records: (0..num_blocks).map(record).collect(),
            shift: 32 - num_buckets.trailing_zeros(),
        }
    }

    /// The bucket of a tag.
    #[inline]
    fn home(&self, tag: u32) -> usize {
        (tag >> self.shift) as usize
    }

    #[inline]
    fn after(&self, bucket: usize) -> usize {
        (bucket + 1) & (self.buckets.len() - 1)
    }

    #[inline]
    fn slot(&self, slot: u32) -> &AtomicU64 {
        &self.buckets[(slot / STRIDE) as usize].entries[(slot % STRIDE) as usize]
    }

    /// The first block with this tag, from its home on, that `is_it`.
    #[inline]
    fn search(&self, tag: u32, is_it: impl Fn(BlockId) -> bool) -> Option<BlockId> {
        let mut at = self.home(tag);
        // The owner may be writing while another thread looks, which must end all the same: one round is the bound.
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            let mut same_tag = bucket.entries_that(|found| entry_tag(found) == tag);
            while same_tag != 0 {
                // Loaded again: the owner may have emptied it.
                let found = bucket.entries[same_tag.trailing_zeros() as usize].load(Ordering::Relaxed);
                if entry_tag(found) == tag && is_it(entry_block(found)) {
                    return Some(entry_block(found));
                }
                same_tag &= same_tag - 1;
            }
            if bucket.num_passed.load(Ordering::Relaxed) == 0 {
                return None;
            }
            at = self.after(at);
        }
        None
    }

    /// Any thread: a block that was registered under `hash` at some moment of this call.
    pub(crate) fn lookup_hint(&self, hash: BlockHash) -> Option<BlockId> {
        let (low, high) = hash.words();
        self.search(tag_of(low, high), |block| self.was_registered(block, low, high))
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

    #[inline]
    fn has_hash(&self, block: BlockId, low: u64, high: u64) -> bool {
        let record = &self.records[block.index()];
        record.hash_low.load(Ordering::Relaxed) == low && record.hash_high.load(Ordering::Relaxed) == high
    }

    /// Owner: the earliest registered block of this content.
    #[inline]
    pub(crate) fn lookup(&self, hash: BlockHash) -> Option<BlockId> {
        let (low, high) = hash.words();
        self.search(tag_of(low, high), |block| self.has_hash(block, low, high))
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

    /// Owner: brings what `insert` of this block will touch nearer to the processor; the number has no meaning.
    #[inline]
    pub(crate) fn approach(&self, block: BlockId, hash: BlockHash) -> u32 {
        let (low, high) = hash.words();
        let home = &self.buckets[self.home(tag_of(low, high))];
        home.num_passed.load(Ordering::Relaxed) ^ self.records[block.index()].version.load(Ordering::Relaxed)
    }

    /// Owner: registers a block that is not registered.
    pub(crate) fn insert(&self, block: BlockId, hash: BlockHash) {
        let (low, high) = hash.words();
        let first = self.lookup(hash);
        let record = &self.records[block.index()];
        let version = record.version.load(Ordering::Relaxed);
        assert!(!is_registered(version), "{block} is in the prefix index already");
        // Release: partners of the loads in `was_registered`; who sees this hash sees the odd version before it.
        record.hash_low.store(low, Ordering::Release);
        record.hash_high.store(high, Ordering::Release);
        // Release: partner of the first load in `was_registered`; who sees the even version sees this hash.
        record.version.store(version.wrapping_add(1), Ordering::Release);
        if let Some(first) = first {
            self.link_before(first, block);
            return;
        }
        record.previous.store(block.0, Ordering::Relaxed);
        record.next.store(block.0, Ordering::Relaxed);
        let tag = tag_of(low, high);
        let slot = self.take_slot(tag);
        record.slot.store(slot, Ordering::Relaxed);
        self.slot(slot).store(entry(tag, block), Ordering::Relaxed);
    }

    /// Owner: an empty slot at the tag's home or behind it; the buckets between count one more that passed.
    #[inline]
    fn take_slot(&self, tag: u32) -> u32 {
        let mut at = self.home(tag);
        // There is one: the buckets have room for more entries than there are blocks.
        loop {
            let empty = self.buckets[at].entries_that(|found| found == EMPTY);
            if empty != 0 {
                return at as u32 * STRIDE + empty.trailing_zeros();
            }
            self.buckets[at].pass(1);
            at = self.after(at);
        }
    }

    /// Owner: takes a registered block out.
    pub(crate) fn remove(&self, block: BlockId) {
        let record = &self.records[block.index()];
        let version = record.version.load(Ordering::Relaxed);
        assert!(is_registered(version), "{block} is not in the prefix index");
        // Relaxed: a reader that still sees the even version answers as of a moment ago. The stores of the next
        // registration carry this one with them (see `insert`).
        record.version.store(version.wrapping_add(1), Ordering::Relaxed);
        let next = BlockId(record.next.load(Ordering::Relaxed));
        if next == block {
            self.give_slot(record);
            return;
        }
        let previous = record.previous.load(Ordering::Relaxed);
        self.records[previous as usize].next.store(next.0, Ordering::Relaxed);
        self.records[next.index()].previous.store(previous, Ordering::Relaxed);
        // Only the first of the twins has an entry; a later one's slot is that of an earlier registration.
        let slot = record.slot.load(Ordering::Relaxed);
        let tag = tag_of_record(record);
        if self.slot(slot).load(Ordering::Relaxed) == entry(tag, block) {
            self.records[next.index()].slot.store(slot, Ordering::Relaxed);
            self.slot(slot).store(entry(tag, next), Ordering::Relaxed);
        }
    }

    /// Owner: empties the slot of a block without twins; the buckets from its home to it count one less.
    #[inline]
    fn give_slot(&self, record: &Record) {
        let slot = record.slot.load(Ordering::Relaxed);
        self.slot(slot).store(EMPTY, Ordering::Relaxed);
        let mut at = self.home(tag_of_record(record));
        while at != (slot / STRIDE) as usize {
            self.buckets[at].pass(-1);
            at = self.after(at);
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

    /// Owner: takes every block out. O(blocks).
    pub(crate) fn clear(&self) {
        for record in &self.records {
            let version = record.version.load(Ordering::Relaxed);
            if is_registered(version) {
                // Relaxed, as in `remove`.
                record.version.store(version.wrapping_add(1), Ordering::Relaxed);
            }
        }
        for bucket in &self.buckets {
            for slot in &bucket.entries {
                slot.store(EMPTY, Ordering::Relaxed);
            }
            bucket.num_passed.store(0, Ordering::Relaxed);
        }
    }

    /// Owner: panics unless the table, the rings and the records agree. `registered` says what the pool believes.
    pub(crate) fn check_invariants(&self, registered: impl Fn(BlockId) -> bool) {
        let mut seen = vec![false; self.records.len()];
        let mut num_passed = vec![0; self.buckets.len()];
        for slot in (0..self.buckets.len() as u32 * STRIDE).filter(|slot| slot % STRIDE < ENTRIES as u32) {
            let found = self.slot(slot).load(Ordering::Relaxed);
            if found == EMPTY {
                continue;
            }
            let first = entry_block(found);
            assert!(!first.is_null() && first.index() < self.records.len(), "slot {slot} names {first}");
            let Some(hash) = self.hash_of(first) else {
                panic!("slot {slot} names {first}, which has no hash")
            };
            let record = &self.records[first.index()];
            let tag = tag_of_record(record);
            assert_eq!(entry_tag(found), tag, "slot {slot} has a tag that is not {first}'s");
            assert_eq!(record.slot.load(Ordering::Relaxed), slot, "{first} names a slot that is not its own");
            assert_eq!(self.lookup(hash), Some(first), "slot {slot} of {first} is not where a look-up ends");
            let mut at = self.home(tag);
            while at != (slot / STRIDE) as usize {
                num_passed[at] += 1;
                at = self.after(at);
            }
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
        for (at, (bucket, passed)) in self.buckets.iter().zip(num_passed).enumerate() {
            assert_eq!(
                bucket.num_passed.load(Ordering::Relaxed),
                passed,
                "bucket {at} miscounts who passed it"
            );
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
        let mut has_passed = false;
        for num_blocks in [3_u32, 5, 16, 33, 80] {
            let index = PrefixIndex::new(num_blocks);
            let num_buckets = index.buckets.len() as u64;
            let tags = [0, 1, num_buckets - 2, num_buckets - 1].map(|home| (home << index.shift) as u32 | 1);
            let contents: Vec<BlockHash> = (0..num_blocks)
                .map(|n| hash_with_tag(tags[n as usize % 4] + n % 3 * 2, u64::from(n / 12)))
                .collect();
            for (n, content) in contents.iter().enumerate() {
                let (low, high) = content.words();
                assert_eq!(
                    tag_of(low, high),
                    tags[n % 4] + n as u32 % 3 * 2,
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
                has_passed |=
                    index.buckets.iter().any(|bucket| bucket.num_passed.load(Ordering::Relaxed) > 1);
                for &hash in &contents {
                    let expected = map.get(&hash).and_then(|blocks| blocks.first().copied());
                    assert_eq!(index.lookup(hash), expected);
                    assert_eq!(index.lookup_hint(hash), expected, "at rest the hint is exact");
                }
            }
            index.clear();
            index.check_invariants(|_| false);
        }
        assert!(has_passed, "no bucket was passed by twice");
    }

    #[test]
    fn a_record_is_half_a_cache_line_and_a_bucket_a_whole_one() {
        assert_eq!((size_of::<Record>(), size_of::<Bucket>()), (32, 64));
    }
}
