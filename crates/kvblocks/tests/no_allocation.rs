//! After construction, no operation of the pool takes memory from the allocator.

use kvblocks::{BlockHash, BlockPool};

#[test]
fn operations_allocate_nothing() {
    let mut pool = BlockPool::new(64).expect("a valid size");
    let shared = pool.shared();
    let mut table = Vec::with_capacity(63);
    let mut evicted = 0;
    let info = allocation_counter::measure(|| {
        for step in 0..1_000_u64 {
            assert!(pool.allocate(1 + (step % 40) as u32, &mut table));
            for (n, &block) in table.iter().enumerate() {
                // Every third block is a twin of another.
                let content = step * 64 + (n as u64 / 3) * 2;
                pool.register(block, BlockHash((u128::from(content) | 1 << 100).to_le_bytes()), step);
            }
            let hit = pool.lookup(&pool.block_hash(table[0]).expect("registered")).expect("registered");
            assert_eq!(shared.lookup_hint(&pool.block_hash(hit).expect("registered")), Some(hit));
            pool.touch(hit);
            shared.hand_back(hit);
            for (n, &block) in table.iter().enumerate().rev() {
                if step % 7 == 0 {
                    pool.withdraw(block, step);
                }
                if n % 2 == 0 {
                    pool.free(block);
                } else {
                    shared.hand_back(block);
                }
            }
            pool.drain_returned();
            table.clear();
            if step % 100 == 0 {
                evicted = pool.counters().evictions();
                assert!(pool.reset_prefix_cache());
            }
        }
    });
    assert!(evicted > 1_000, "the pool hardly turned over: {evicted}");
    assert_eq!((info.count_total, info.bytes_total), (0, 0));
    // The counter does count: the same test sees an allocation when there is one.
    assert_eq!(allocation_counter::measure(|| drop(Box::new(evicted))).count_total, 1);
    pool.check_invariants();
}
