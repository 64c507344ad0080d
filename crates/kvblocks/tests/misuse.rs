//! What a caller may not do is refused with a message, and leaves the pool whole.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kvblocks::{BlockHash, BlockId, BlockPool, MAX_BLOCKS, PoolError};

fn pool() -> BlockPool {
    BlockPool::new(4).expect("a valid size")
}

/// The message of the panic that `misuse` must cause; the pool's invariants hold afterwards.
fn refused(pool: &mut BlockPool, misuse: impl FnOnce(&mut BlockPool)) -> String {
    let payload = catch_unwind(AssertUnwindSafe(|| misuse(pool))).expect_err("this must be refused");
    pool.check_invariants();
    *payload.downcast::<String>().expect("a formatted message")
}

#[test]
fn sizes() {
    for num_blocks in [0, 1] {
        assert_eq!(BlockPool::new(num_blocks).err(), Some(PoolError::TooFewBlocks { num_blocks }));
    }
    let too_many = BlockPool::new(MAX_BLOCKS + 1).expect_err("above the limit");
    assert!(too_many.to_string().contains("1073741825"), "{too_many}");
    let mut smallest = BlockPool::new(2).expect("one usable block");
    assert_eq!(smallest.allocate_one(), Some(BlockId(1)));
    assert_eq!(smallest.allocate_one(), None);
    smallest.check_invariants();
}

#[test]
fn double_free() {
    let mut pool = pool();
    let block = pool.allocate_one().expect("free");
    pool.free(block);
    let message = refused(&mut pool, |pool| pool.free(block));
    assert_eq!(message, "free of block 1: no request holds it: a double free");
    assert_eq!(pool.free_order(), [1, 2, 3].map(BlockId));
}

#[test]
fn double_free_of_a_cached_block() {
    let mut pool = pool();
    let block = pool.allocate_one().expect("free");
    pool.register(block, BlockHash([1; 16]), 0);
    pool.free(block);
    assert!(refused(&mut pool, |pool| pool.free(block)).contains("double free"));
    assert_eq!(pool.free_order(), [2, 3, 1].map(BlockId));
}

#[test]
fn null_block() {
    let mut pool = pool();
    let hash = BlockHash([1; 16]);
    assert!(refused(&mut pool, |pool| pool.free(BlockId::NULL)).contains("null block"));
    assert!(refused(&mut pool, |pool| pool.touch(BlockId::NULL)).contains("null block"));
    assert!(refused(&mut pool, |pool| pool.register(BlockId::NULL, hash, 0)).contains("null block"));
    assert!(refused(&mut pool, |pool| assert!(!pool.withdraw(BlockId::NULL, 0))).contains("null block"));
    assert!(refused(&mut pool, |pool| pool.shared().hand_back(BlockId::NULL)).contains("not a usable block"));
    assert_eq!(pool.ref_count(BlockId::NULL), 0);
    assert_eq!(pool.num_free(), 3);
}

#[test]
fn foreign_block() {
    let mut pool = pool();
    assert!(
        refused(&mut pool, |pool| pool.free(BlockId(4))).contains("free of block 4: it is not of this pool")
    );
    assert!(refused(&mut pool, |pool| pool.touch(BlockId(u32::MAX))).contains("not of this pool"));
    assert!(refused(&mut pool, |pool| pool.shared().hand_back(BlockId(4))).contains("not a usable block"));
}

#[test]
fn registering_what_cannot_be_found_rightly() {
    let mut pool = pool();
    let block = pool.allocate_one().expect("free");
    assert!(
        refused(&mut pool, |pool| pool.register(BlockId(2), BlockHash([1; 16]), 0))
            .contains("no request holds it")
    );
    pool.register(block, BlockHash([1; 16]), 0);
    assert!(refused(&mut pool, |pool| pool.register(block, BlockHash([2; 16]), 0)).contains("another hash"));
    assert_eq!(pool.block_hash(block), Some(BlockHash([1; 16])));
}

#[test]
fn handed_back_too_often() {
    let mut pool = pool();
    let block = pool.allocate_one().expect("free");
    pool.shared().hand_back(block);
    pool.shared().hand_back(block);
    let message = refused(&mut pool, |pool| assert_eq!(pool.drain_returned(), 1));
    assert!(message.contains("double free"), "{message}");
    assert_eq!(pool.num_free(), 3);
}
