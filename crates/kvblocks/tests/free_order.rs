//! The exact order in which blocks are reused: worked examples.

use kvblocks::{BlockHash, BlockId, BlockPool};

fn ids(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|block| block.0).collect()
}

fn pool(num_blocks: u32) -> BlockPool {
    BlockPool::new(num_blocks).expect("a valid size")
}

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 16])
}

/// Frees the blocks of a request: last block first.
fn free_request(pool: &mut BlockPool, blocks: &[BlockId]) {
    for &block in blocks.iter().rev() {
        pool.free(block);
    }
}

/// 11 blocks of 16 tokens; the second request shares the 48 tokens that fill the first one's first three blocks.
#[test]
fn golden_free_order() {
    let mut pool = pool(11);
    let mut request0 = Vec::new();
    assert!(pool.allocate(4, &mut request0)); // 55 tokens
    assert_eq!(ids(&request0), [1, 2, 3, 4]);
    for (n, &block) in request0[..3].iter().enumerate() {
        pool.register(block, hash(n as u8), 0);
    }
    let mut request1 = Vec::new(); // the same 48 tokens and 5 others
    for n in 0..3 {
        let hit = pool.lookup(&hash(n)).expect("registered above");
        pool.touch(hit);
        request1.push(hit);
    }
    assert!(pool.allocate(1, &mut request1));
    assert_eq!(ids(&request1), [1, 2, 3, 5]);
    pool.check_invariants();

    free_request(&mut pool, &request0);
    free_request(&mut pool, &request1);
    assert_eq!(ids(&pool.free_order()), [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]);
    pool.check_invariants();

    let mut request2 = Vec::new();
    assert!(pool.allocate(10, &mut request2)); // 160 new tokens
    assert_eq!(ids(&request2), [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]);
    assert_eq!(pool.counters().evictions(), 3);
    assert_eq!(pool.lookup(&hash(0)), None);
    pool.check_invariants();
}
