//! The blocks of a paged KV cache: who holds them, in which order they are used again, and what can be found in them.
//!
//! The KV cache is memory for a fixed number of *blocks*, each for the keys and values of `block_size` tokens. This
//! crate knows blocks only by number. It has no lock, no `unsafe`, and takes no memory after construction.
//!
//! # The life of a block
//!
//! ```text
//!                 allocate                      register(hash, step)
//!   ┌────────┐ ─────────────────▶ ┌────────┐ ──────────────────────▶ ┌────────────┐ ◀─┐ touch, free
//!   │  FREE  │                    │  HELD  │                         │   SHARED   │   │ (2, 3, … references)
//!   │ ref 0  │ ◀───────────────── │ ref ≥1 │ ◀────────────────────── │ ref ≥1     │ ──┘
//!   │ no hash│   last free:       │ no hash│   withdraw(step)        │ hash       │
//!   └────────┘   to the front     └────────┘                         └────────────┘
//!       ▲                              ▲                               │        ▲
//!       │ withdraw(step): to the front │ allocate: evicted,   last free│        │ touch (a hit)
//!       │ reset: where it is           │ the hash is dropped  to the   │        │
//!       │                              │                      end      ▼        │
//!       │                              │                         ┌────────────────┐
//!       │                              └──────────────────────── │     CACHED     │
//!       └─────────────────────────────────────────────────────── │  ref 0, hash   │
//!                                                                └────────────────┘
//! ```
//!
//! * The **free order** is FREE and CACHED blocks in one list: `allocate` takes its head. A block without a hash goes to
//!   the front (last in, first out: its memory is warm), one with a hash to the end (least recently used first out). So
//!   all FREE blocks come before all CACHED ones. A request frees its blocks last block first, so that the tail of a
//!   chain is evicted before its head.
//! * The **null block**, number 0, is none of these: it pads block tables and is never held, freed or cached.
//! * The **same content may be in several blocks** (twins): block tables only grow, so a block that turns out to equal
//!   another stays. A look-up gives the twin that was registered first.
//! * **A registration belongs to a step.** A block can be found from the moment it is scheduled, before it is computed, so
//!   that equal prompts of one step share. If its request leaves the step, or the step fails, its registrations are
//!   withdrawn; who shared such a block meanwhile is in the same step, or a later one, and must leave too.
//!
//! # Modules
//!
//! | type | what it is |
//! |---|---|
//! | [`BlockPool`] | the owner: reference counts, free order, registrations |
//! | [`SharedBlocks`] | what other threads may do: hand blocks back, look prefixes up, read counters |
//! | [`ChainHasher`] | the keyed 128-bit hash that names a block's content |
//! | [`CpuTier`], [`BlockCopies`] | blocks in CPU memory for swapped requests; the copies of a step |
//! | [`PoolCounters`] | statistics |
//!
//! # Invariants
//!
//! [`BlockPool::check_invariants`] checks all of these:
//!
//! 1. Every block is exactly one of: null, in the free order once, held (`ref_count ≥ 1`). Free and held blocks together
//!    are `num_blocks − 1`.
//! 2. The free order is linked consistently both ways; it has `num_free` entries; uncached blocks come first.
//! 3. A block has a hash exactly if the index finds it: as the block that stands for its content, or in that block's ring
//!    of twins. The null block never.
//! 4. Every look-up of the owner ends at the entry it should: each bucket of the index counts the entries that passed it by.
//! 5. The counters equal what they count.
//!
//! What breaks them — a double free, a touch of the null block, a registration of a free block — panics with the block
//! and the reason before the block has changed: the lists are never corrupt, in release builds as in debug builds.
//!
//! # Complexity
//!
//! Everything is O(1) per block, with small constants: `allocate` and `free` touch a block's 16-byte record and its two
//! neighbours' in the free order; a look-up touches one bucket of the index, a cache line, and one 32-byte record; a
//! registration the same and the step; an eviction the same, without looking for the entry. `reset_prefix_cache` is
//! O(blocks), as are `free_order`, `block_state` and `check_invariants`, which are for tests and people. Memory:
//! 16 + 8 + 32 + 8 bytes a block, and 16 to 32 for the index, in which at most four slots of seven are taken.
//!
//! # Threads
//!
//! | operation | who | progress |
//! |---|---|---|
//! | every method of [`BlockPool`] | the owner: one thread, by type (`Send`, not `Sync`) | does not wait |
//! | [`SharedBlocks::hand_back`] | any thread | lock-free |
//! | [`BlockPool::drain_returned`] | the owner | wait-free, O(references that came back) |
//! | [`SharedBlocks::lookup_hint`] | any thread | wait-free, at most one round of the index |
//! | [`PoolCounters`] | read by any thread, written by the owner | wait-free |
//! | [`ChainHasher`] | any thread | no shared state |
//! | [`CpuTier`] | the owner | does not wait |
//!
//! A hint may miss and may be out of date when it is looked at, but never names a block that did not hold that content
//! during the call. A reference that is handed back while another thread is in the middle of handing back the same block
//! arrives with that one; neither thread waits. Both structures are model-checked with loom (`tests/loom.rs`), run on real
//! threads (`tests/threads.rs`), and the pool is compared with a naive one (`tests/random_operations.rs`).
#![forbid(unsafe_code)]

mod block;
mod copies;
mod counters;
mod cpu_tier;
mod error;
mod hash;
mod hash_pair;
mod pool;
mod prefix_index;
mod return_stack;
mod shared;
mod sync;

pub use block::{BlockHash, BlockId, BlockState, BlockUse, CpuBlockId, MAX_BLOCKS};
pub use copies::BlockCopies;
pub use counters::PoolCounters;
pub use cpu_tier::CpuTier;
pub use error::PoolError;
pub use hash::{ChainHasher, HashAlgorithm};
pub use pool::BlockPool;
pub use shared::SharedBlocks;
