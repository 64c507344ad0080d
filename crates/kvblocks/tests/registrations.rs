//! Registrations: whose they are, which of several blocks is found, what a reset keeps.

use kvblocks::{BlockHash, BlockId, BlockPool};

const HASH: BlockHash = BlockHash([7; 16]);

/// A pool of 8 whose blocks 1 to `held` are held.
fn pool(held: u32) -> BlockPool {
    let mut pool = BlockPool::new(8).expect("a valid size");
    assert!(pool.allocate(held, &mut Vec::new()));
    pool
}

#[test]
fn withdrawal_is_for_one_step_only() {
    let mut pool = pool(1);
    let block = BlockId(1);
    pool.register(block, HASH, 5);
    assert!(!pool.withdraw(block, 4) && !pool.withdraw(block, 6));
    assert_eq!(pool.lookup(&HASH), Some(block));
    pool.register(block, HASH, 6); // stands as step 5's
    assert_eq!(pool.registered_in(block), Some(5));
    assert!(!pool.withdraw(block, 6));
    assert!(pool.withdraw(block, 5));
    assert!(!pool.withdraw(block, 5), "there is nothing left to undo");
    assert_eq!((pool.lookup(&HASH), pool.shared().lookup_hint(&HASH)), (None, None));
    assert_eq!((pool.ref_count(block), pool.registered_in(block)), (1, None));
    pool.free(block);
    assert_eq!(pool.free_order()[0], block, "uncached: reused first");
    pool.check_invariants();
}

#[test]
fn a_withdrawn_free_block_is_reused_first() {
    let mut pool = pool(2);
    pool.register(BlockId(1), HASH, 0);
    pool.free(BlockId(1));
    assert_eq!(pool.free_order().last(), Some(&BlockId(1)));
    assert!(pool.withdraw(BlockId(1), 0));
    assert_eq!(pool.free_order()[0], BlockId(1));
    pool.check_invariants();
}

#[test]
fn the_earliest_registered_twin_is_found() {
    let mut pool = pool(4);
    for id in [3, 1, 4, 2] {
        pool.register(BlockId(id), HASH, u64::from(id));
        assert_eq!(pool.lookup(&HASH), Some(BlockId(3)));
        pool.check_invariants();
    }
    assert!(pool.withdraw(BlockId(1), 1), "in the middle");
    assert_eq!(pool.lookup(&HASH), Some(BlockId(3)));
    assert!(pool.withdraw(BlockId(3), 3), "the first");
    assert_eq!(pool.lookup(&HASH), Some(BlockId(4)));
    pool.check_invariants();
    pool.register(BlockId(3), HASH, 9);
    assert!(pool.withdraw(BlockId(4), 4));
    assert_eq!(pool.lookup(&HASH), Some(BlockId(2)));
    assert!(pool.withdraw(BlockId(3), 9), "the last");
    assert!(pool.withdraw(BlockId(2), 2), "the only one");
    assert_eq!(pool.lookup(&HASH), None);
    pool.check_invariants();
}

#[test]
fn a_hit_is_no_longer_evictable() {
    let mut pool = pool(1);
    pool.register(BlockId(1), HASH, 0);
    pool.free(BlockId(1));
    pool.touch(BlockId(1));
    assert!(pool.allocate(6, &mut Vec::new()));
    assert_eq!(pool.allocate_one(), None);
    assert_eq!(pool.lookup(&HASH), Some(BlockId(1)));
    assert_eq!(pool.counters().evictions(), 0);
    let state = pool.block_state(BlockId(1));
    assert_eq!((state.ref_count, state.hash, state.free_position), (1, Some(HASH), None));
}

#[test]
fn reset_waits_for_every_holder() {
    let mut pool = pool(2);
    pool.register(BlockId(1), HASH, 0);
    pool.free(BlockId(1));
    assert!(!pool.reset_prefix_cache());
    assert_eq!(pool.lookup(&HASH), Some(BlockId(1)), "nothing has changed");
    pool.free(BlockId(2));
    let order = pool.free_order();
    assert!(pool.reset_prefix_cache());
    assert_eq!(pool.lookup(&HASH), None);
    assert_eq!(pool.free_order(), order);
    assert_eq!(pool.counters().num_cached(), 0);
    pool.check_invariants();
}

#[test]
fn allocation_is_all_or_nothing() {
    let mut pool = pool(3);
    let mut blocks = vec![BlockId(99)];
    assert!(!pool.allocate(5, &mut blocks));
    assert_eq!((blocks.as_slice(), pool.num_free()), ([BlockId(99)].as_slice(), 4));
    assert!(pool.allocate(0, &mut blocks) && pool.allocate(4, &mut blocks));
    assert_eq!(blocks, [99, 4, 5, 6, 7].map(BlockId));
    assert!((pool.usage() - 1.0).abs() < f64::EPSILON);
}

/// The order in which references come back is the order in which they are freed, from whatever thread.
#[test]
fn returned_blocks_are_freed_in_order() {
    let mut pool = pool(4);
    pool.register(BlockId(1), HASH, 0);
    pool.touch(BlockId(1));
    let shared = pool.shared();
    for id in [4, 3, 2, 1] {
        shared.hand_back(BlockId(id));
    }
    assert_eq!(pool.drain_returned(), 4);
    assert_eq!(pool.ref_count(BlockId(1)), 1, "one of its two references came back");
    assert_eq!(pool.free_order(), [2, 3, 4, 5, 6, 7].map(BlockId));
    assert_eq!(pool.drain_returned(), 0);
    shared.hand_back(BlockId(1));
    assert_eq!(pool.drain_returned(), 1);
    assert_eq!(pool.free_order().last(), Some(&BlockId(1)));
    assert_eq!(pool.counters().returned(), 5);
    pool.check_invariants();
}

/// Looked at together or one by one, blocks are the same.
#[test]
fn the_states_of_all_blocks_are_those_of_each() {
    let mut pool = BlockPool::new(9).expect("enough blocks");
    let held: Vec<BlockId> = (0..5).filter_map(|_| pool.allocate_one()).collect();
    let other = BlockHash([8; 16]);
    pool.register(held[1], HASH, 3);
    pool.register(held[2], other, 4);
    pool.touch(held[3]);
    for block in [held[0], held[1]] {
        pool.free(block);
    }
    let states = pool.block_states();
    assert_eq!(states.iter().filter(|state| state.free_position.is_some()).count(), 5);
    assert_eq!(states, (0..9).map(|id| pool.block_state(BlockId(id))).collect::<Vec<_>>());
}

/// Approaching a block, registered or not, changes nothing.
#[test]
fn an_approach_leaves_everything_as_it_is() {
    let mut pool = pool(3);
    let (block, other) = (BlockId(1), BlockHash([8; 16]));
    pool.register(block, HASH, 5);
    let (states, order) = (pool.block_states(), pool.free_order());
    for id in 0..8 {
        pool.approach(BlockId(id), &HASH);
        pool.approach(BlockId(id), &other);
    }
    assert_eq!((pool.block_states(), pool.free_order()), (states, order));
    assert_eq!((pool.lookup(&HASH), pool.lookup(&other)), (Some(block), None));
    pool.check_invariants();
}

#[test]
#[should_panic(expected = "index out of bounds")]
fn a_block_of_another_pool_is_not_approached() {
    pool(1).approach(BlockId(8), &HASH);
}
