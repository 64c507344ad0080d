//! Every interleaving and every permitted reordering of the small cases, by model checking:
//! `RUSTFLAGS="--cfg loom" cargo test --release -p kvblocks --test loom`.
#![cfg(loom)]

use kvblocks::{BlockHash, BlockId, BlockPool};
use loom::thread;

const A: BlockHash = BlockHash([1; 16]);
const B: BlockHash = BlockHash([2; 16]);

/// Explores all executions with at most `preemptions` forced switches of thread (`None`: all there are).
fn model(preemptions: Option<usize>, check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(check);
}

fn pool_with(num_blocks: u32, held: u32) -> BlockPool {
    let mut pool = BlockPool::new(num_blocks).expect("a valid size");
    assert!(pool.allocate(held, &mut Vec::new()));
    pool
}

/// Two threads give different blocks back while the owner drains: none lost, none doubled.
#[test]
fn two_blocks_come_back_while_the_owner_drains() {
    model(None, || {
        let mut pool = pool_with(3, 2);
        let threads = [1, 2].map(|id| {
            let shared = pool.shared();
            thread::spawn(move || shared.hand_back(BlockId(id)))
        });
        let early = pool.drain_returned();
        for thread in threads {
            thread.join().expect("no panic");
        }
        assert_eq!(early + pool.drain_returned(), 2);
        assert_eq!(pool.drain_returned(), 0);
        pool.check_invariants();
        assert_eq!(pool.num_free(), 2);
    });
}

/// Two threads give references to the same block back while the owner drains.
#[test]
fn two_references_to_one_block_come_back_while_the_owner_drains() {
    model(None, || {
        let mut pool = pool_with(2, 1);
        pool.touch(BlockId(1));
        let threads = [(), ()].map(|()| {
            let shared = pool.shared();
            thread::spawn(move || shared.hand_back(BlockId(1)))
        });
        let early = pool.drain_returned();
        for thread in threads {
            thread.join().expect("no panic");
        }
        assert_eq!(early + pool.drain_returned(), 2);
        pool.check_invariants();
        assert_eq!(pool.num_free(), 1);
    });
}

/// A block comes back a second time while the owner reads the chain in which it came back first: the entries behind it
/// must not be lost.
#[test]
fn a_block_comes_back_again_while_its_chain_is_read() {
    model(None, || {
        let mut pool = pool_with(4, 3);
        pool.touch(BlockId(1));
        let shared = pool.shared();
        for id in 1..=3 {
            shared.hand_back(BlockId(id));
        }
        let again = thread::spawn(move || shared.hand_back(BlockId(1)));
        let early = pool.drain_returned();
        assert!(early == 3 || early == 4, "{early}");
        again.join().expect("no panic");
        assert_eq!(early + pool.drain_returned(), 4);
        assert_eq!(pool.num_free(), 3);
        pool.check_invariants();
    });
}

/// The owner gives a drained block out again, and it comes back again, while another thread is in the middle of a push
/// on top of it: the recycled entry (ABA) must not lose anything.
#[test]
fn a_block_is_recycled_during_a_push() {
    model(None, || {
        let mut pool = pool_with(4, 3);
        let pusher = {
            let shared = pool.shared();
            thread::spawn(move || shared.hand_back(BlockId(2)))
        };
        let shared = pool.shared();
        shared.hand_back(BlockId(1));
        let mut drained = pool.drain_returned();
        if pool.ref_count(BlockId(1)) == 0 {
            pool.touch(BlockId(1));
            shared.hand_back(BlockId(3));
            shared.hand_back(BlockId(1));
        }
        pusher.join().expect("no panic");
        drained += pool.drain_returned();
        assert_eq!(drained, 4);
        assert_eq!(pool.num_free(), 3);
        pool.check_invariants();
    });
}

/// The block's earlier use by the thread that gives it back happens before the owner has it again.
#[test]
fn handing_back_publishes_what_was_done_with_the_block() {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU32, Ordering};
    model(None, || {
        let mut pool = pool_with(2, 1);
        pool.touch(BlockId(1));
        let content = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let threads = [0, 1].map(|user| {
            let (shared, content) = (pool.shared(), Arc::clone(&content));
            thread::spawn(move || {
                content[user].store(1, Ordering::Relaxed);
                shared.hand_back(BlockId(1));
            })
        });
        let drained = pool.drain_returned();
        let seen: u32 = content.iter().map(|cell| cell.load(Ordering::Relaxed)).sum();
        assert!(seen >= drained, "the owner has a block back that is still in use");
        for thread in threads {
            thread.join().expect("no panic");
        }
        pool.drain_returned();
        assert_eq!(pool.num_free(), 1);
    });
}

/// The owner moves a content from one block to the other, and puts another content into the first: a reader may miss,
/// and when it hits, the block has held that content.
#[test]
fn no_wrong_hit_on_a_recycled_block() {
    model(None, || {
        let mut pool = pool_with(3, 2);
        pool.register(BlockId(1), A, 0);
        let reader = {
            let shared = pool.shared();
            thread::spawn(move || (shared.lookup_hint(&A), shared.lookup_hint(&B)))
        };
        assert!(pool.withdraw(BlockId(1), 0));
        pool.register(BlockId(1), B, 1);
        let (a, b) = reader.join().expect("no panic");
        assert!(a.is_none() || a == Some(BlockId(1)));
        assert!(b.is_none() || b == Some(BlockId(1)));
        // Content B is registered for good before A could be seen again: after B was found, A is gone.
        assert_eq!(pool.shared().lookup_hint(&A), None);
        assert_eq!(pool.shared().lookup_hint(&B), Some(BlockId(1)));
        pool.check_invariants();
    });
}

/// Once a reader has found the new content of a recycled block, it no longer finds the old one in it.
#[test]
fn hits_of_one_reader_do_not_go_back_in_time() {
    model(None, || {
        let mut pool = pool_with(2, 1);
        pool.register(BlockId(1), A, 0);
        let reader = {
            let shared = pool.shared();
            thread::spawn(move || {
                let new = shared.lookup_hint(&B);
                let old = shared.lookup_hint(&A);
                assert!(new.is_none() || old.is_none(), "{new:?} then {old:?}: one block, two contents");
            })
        };
        assert!(pool.withdraw(BlockId(1), 0));
        pool.register(BlockId(1), B, 1);
        reader.join().expect("no panic");
    });
}

/// The half-written hash: two contents that share a half, so that a mixture of the old and the new is a third one.
#[test]
fn a_mixture_of_two_hashes_is_never_found() {
    const fn halves(low: u8, high: u8) -> BlockHash {
        BlockHash([low, low, low, low, low, low, low, low, high, high, high, high, high, high, high, high])
    }
    model(None, || {
        let mut pool = pool_with(2, 1);
        pool.register(BlockId(1), halves(1, 1), 0);
        let mixed = [halves(1, 2), halves(2, 1)];
        let reader = {
            let shared = pool.shared();
            thread::spawn(move || mixed.map(|hash| shared.lookup_hint(&hash)))
        };
        assert!(pool.withdraw(BlockId(1), 0));
        pool.register(BlockId(1), halves(2, 2), 1);
        assert_eq!(reader.join().expect("no panic"), [None, None]);
    });
}

/// The owner takes an entry out that another content passed by, while a reader looks for both: entries do not move, so
/// the one that stays is never missed.
#[test]
fn an_entry_stays_where_it_is_when_another_goes() {
    let (first, second) = (A, B); // under loom all contents have the same home, of one slot
    model(None, move || {
        let mut pool = pool_with(3, 2);
        pool.register(BlockId(1), first, 0);
        pool.register(BlockId(2), second, 1);
        let reader = {
            let shared = pool.shared();
            thread::spawn(move || {
                assert_eq!(shared.lookup_hint(&second), Some(BlockId(2)));
                assert!(matches!(shared.lookup_hint(&first), None | Some(BlockId(1))));
            })
        };
        assert!(pool.withdraw(BlockId(1), 0));
        assert_eq!(pool.lookup(&second), Some(BlockId(2)), "the owner never misses");
        reader.join().expect("no panic");
        assert_eq!(pool.shared().lookup_hint(&second), Some(BlockId(2)));
        pool.check_invariants();
    });
}

/// The owner replaces the block that stands for a content by its twin while a reader looks it up.
#[test]
fn a_twin_takes_over() {
    model(None, || {
        let mut pool = pool_with(3, 2);
        pool.register(BlockId(1), A, 0);
        let reader = {
            let shared = pool.shared();
            thread::spawn(move || shared.lookup_hint(&A))
        };
        pool.register(BlockId(2), A, 1);
        assert!(pool.withdraw(BlockId(1), 0));
        assert!(matches!(reader.join().expect("no panic"), None | Some(BlockId(1 | 2))));
        assert_eq!(pool.shared().lookup_hint(&A), Some(BlockId(2)));
        pool.check_invariants();
    });
}
