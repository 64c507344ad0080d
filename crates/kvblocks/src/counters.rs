//! Statistics of a pool: its owner writes them, any thread may read them at any time.

use crate::sync::{Gauge, Ordering};

/// Numbers for metrics. While the owner works, each may be a moment old, and two that are read together may be from
/// different moments. All accesses are `Relaxed`: the numbers order nothing.
#[derive(Debug, Default)]
pub struct PoolCounters {
    num_blocks: Gauge,
    num_free: Gauge,
    num_cached: Gauge,
    evictions: Gauge,
    registrations: Gauge,
    withdrawals: Gauge,
    returned: Gauge,
    prefix_queries: Gauge,
    prefix_hits: Gauge,
}

impl PoolCounters {
    pub(crate) fn new(num_blocks: u32) -> Self {
        let counters = Self::default();
        counters.num_blocks.store(u64::from(num_blocks), Ordering::Relaxed);
        counters
    }

    /// Blocks of the pool, including the null block.
    pub fn num_blocks(&self) -> u64 {
        self.num_blocks.load(Ordering::Relaxed)
    }

    /// Blocks that can be allocated now.
    pub fn num_free(&self) -> u64 {
        self.num_free.load(Ordering::Relaxed)
    }

    /// Blocks, held or free, that a look-up can find.
    pub fn num_cached(&self) -> u64 {
        self.num_cached.load(Ordering::Relaxed)
    }

    /// Cached blocks that were allocated for something else, in all.
    pub fn evictions(&self) -> u64 {
        self.evictions.load(Ordering::Relaxed)
    }

    /// Registrations made, in all.
    pub fn registrations(&self) -> u64 {
        self.registrations.load(Ordering::Relaxed)
    }

    /// Registrations that were withdrawn because their step failed or their request left it, in all.
    pub fn withdrawals(&self) -> u64 {
        self.withdrawals.load(Ordering::Relaxed)
    }

    /// References that other threads handed back and the owner freed, in all.
    pub fn returned(&self) -> u64 {
        self.returned.load(Ordering::Relaxed)
    }

    /// Full blocks that admissions asked the prefix cache for, in all.
    pub fn prefix_queries(&self) -> u64 {
        self.prefix_queries.load(Ordering::Relaxed)
    }

    /// Full blocks that admissions took from the prefix cache, in all.
    pub fn prefix_hits(&self) -> u64 {
        self.prefix_hits.load(Ordering::Relaxed)
    }

    /// Share of the usable blocks that are held, 0.0 to 1.0.
    pub fn usage(&self) -> f64 {
        // A pool has at least one usable block.
        1.0 - self.num_free() as f64 / (self.num_blocks() - 1) as f64
    }

    #[inline]
    pub(crate) fn set_num_free(&self, num_free: u32) {
        self.num_free.store(u64::from(num_free), Ordering::Relaxed);
    }

    pub(crate) fn evicted(&self) {
        add(&self.evictions, 1);
        self.uncached(1);
    }

    pub(crate) fn registered(&self) {
        add(&self.registrations, 1);
        add(&self.num_cached, 1);
    }

    pub(crate) fn withdrawn(&self) {
        add(&self.withdrawals, 1);
        self.uncached(1);
    }

    pub(crate) fn uncached(&self, blocks: u64) {
        self.num_cached.store(self.num_cached().wrapping_sub(blocks), Ordering::Relaxed);
    }

    pub(crate) fn add_returned(&self, references: u32) {
        add(&self.returned, u64::from(references));
    }

    pub(crate) fn add_prefix_query(&self, queried: u64, hits: u64) {
        add(&self.prefix_queries, queried);
        add(&self.prefix_hits, hits);
    }
}

/// Only the owner writes, so a load and a store do the work of an atomic addition at a lower cost.
fn add(gauge: &Gauge, n: u64) {
    gauge.store(gauge.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}
