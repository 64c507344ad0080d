//! Names: a block's number, the hash of its content, and a snapshot of its state for tests and tracing.

use std::fmt;

/// The most blocks a pool can have: its index has two slots or more for each, and 32 bits to address them.
pub const MAX_BLOCKS: u32 = 1 << 30;

/// A block of the KV cache: the index that block tables and slot mappings carry.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct BlockId(pub u32);

impl BlockId {
    /// Block 0. It pads block tables, is never allocated, freed or cached.
    pub const NULL: BlockId = BlockId(0);

    /// The id as an array index.
    #[inline]
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Whether this is the null block.
    #[inline]
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}", self.0)
    }
}

/// A block in CPU memory, numbered from 0. A type of its own, so that it cannot be mistaken for a GPU block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct CpuBlockId(pub u32);

impl fmt::Display for CpuBlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CPU block {}", self.0)
    }
}

/// Names the content of a full block: a keyed 128-bit hash of every token up to its end and of the extra keys. Made by
/// [`ChainHasher`](crate::ChainHasher).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockHash(pub [u8; 16]);

impl BlockHash {
    /// The hash as two words, low half first.
    #[inline]
    pub(crate) fn words(self) -> (u64, u64) {
        let word = u128::from_le_bytes(self.0);
        (word as u64, (word >> 64) as u64)
    }

    /// The inverse of [`words`](Self::words).
    #[inline]
    pub(crate) fn from_words(low: u64, high: u64) -> Self {
        BlockHash(((u128::from(high) << 64) | u128::from(low)).to_le_bytes())
    }
}

/// The complete state of one block at one moment, for tests, tracing and people.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockState {
    /// The block itself.
    pub block: BlockId,
    /// How many holders it has: 0 for a free block and for the null block.
    pub ref_count: u32,
    /// The content under which it is registered, if it can be found.
    pub hash: Option<BlockHash>,
    /// The step that its registration belongs to.
    pub registered_in: Option<u64>,
    /// How many blocks will be allocated before this one; `None` while it is held.
    pub free_position: Option<u32>,
    /// Whether it is the null block.
    pub is_null: bool,
}

/// What a block is used for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum BlockUse {
    /// No request holds it, and its content cannot be found.
    Free = 0,
    /// One request holds it.
    Used = 1,
    /// No request holds it, and its content can be found.
    Cached = 2,
    /// Several requests hold it.
    Shared = 3,
    /// The null block, which no request ever holds.
    Null = 4,
}
