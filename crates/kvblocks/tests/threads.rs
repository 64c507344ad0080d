//! Real threads: an owner at full speed, others that give back and look up at the same time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use kvblocks::{BlockHash, BlockId, BlockPool, ChainHasher};

/// Rounds of the owner: a few seconds in a debug build at most.
const ROUNDS: u64 = 20_000;

/// Other threads make `condition` come true; not within a minute means that something was lost.
fn wait_until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "a reference was lost");
        thread::yield_now();
    }
}

/// Blocks travel from the owner to three threads, which give every reference back: none is lost, none comes twice.
#[test]
fn every_reference_comes_back_once() {
    const THREADS: usize = 3;
    let mut pool = BlockPool::new(64).expect("a valid size");
    thread::scope(|scope| {
        let mut senders = Vec::new();
        for _ in 0..THREADS {
            let (sender, receiver) = mpsc::channel::<BlockId>();
            senders.push(sender);
            let shared = pool.shared();
            scope.spawn(move || receiver.iter().for_each(|block| shared.hand_back(block)));
        }
        for round in 0..ROUNDS {
            let mut block = None;
            wait_until(|| {
                block = pool.allocate_one();
                if block.is_none() {
                    pool.drain_returned();
                }
                block.is_some()
            });
            let block = block.expect("waited for");
            // The same block to all threads at once: they race to be the one that pushes it.
            for _ in 1..THREADS {
                pool.touch(block);
            }
            for sender in &senders {
                sender.send(block).expect("the thread lives");
            }
            if round % 512 == 0 {
                pool.check_invariants();
            }
        }
        drop(senders);
        wait_until(|| {
            pool.drain_returned();
            pool.num_free() == pool.num_blocks() - 1
        });
        assert_eq!(pool.drain_returned(), 0);
        assert_eq!(pool.counters().returned(), ROUNDS * THREADS as u64);
    });
    pool.check_invariants();
}

/// Ends the other threads when the owner is done, also by a failed assertion.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Readers look contents up while the owner recycles blocks as fast as it can. Content number `n` is only ever put into
/// blocks `b` with `b % 4 == n % 4`, so a hit on a block that holds something else is seen for what it is.
#[test]
fn a_hint_is_never_wrong() {
    const CONTENTS: u64 = 400;
    let mut pool = BlockPool::new(33).expect("a valid size");
    let hasher = ChainHasher::new([9; 16]);
    let hashes: Vec<BlockHash> = (0..CONTENTS).map(|n| hasher.hash_block(None, &[n as i32], b"")).collect();
    let done = AtomicBool::new(false);
    let hits = AtomicU64::new(0);
    thread::scope(|scope| {
        for reader in 0..2 {
            let (shared, hashes, done, hits) = (pool.shared(), &hashes, &done, &hits);
            scope.spawn(move || {
                let mut at = reader;
                while !done.load(Ordering::Relaxed) {
                    at = (at + 7) % hashes.len();
                    if let Some(block) = shared.lookup_hint(&hashes[at]) {
                        assert_eq!(block.index() % 4, at % 4, "a hit on other content");
                        hits.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let stop = SetOnDrop(&done);
        let mut content = 0;
        let mut held = Vec::new();
        let start = Instant::now();
        let mut round = 0;
        // On a busy machine the readers may start late: the owner goes on until they have met.
        while round < ROUNDS || hits.load(Ordering::Relaxed) < 100 {
            assert!(start.elapsed() < Duration::from_secs(60), "the readers hardly met the owner");
            round += 1;
            // Hold a few blocks at a time; register those for which a content of their kind comes up.
            while held.len() < 8 {
                held.push(pool.allocate_one().expect("at most 8 of 32 are held"));
            }
            for &block in &held {
                content = (content * 5 + 1 + round) % CONTENTS;
                let fitting = content - content % 4 + u64::from(block.0 % 4);
                pool.register(block, hashes[fitting as usize], round);
            }
            for block in held.drain(..).rev() {
                if round % 5 == 0 {
                    pool.withdraw(block, round);
                }
                pool.free(block);
            }
            if round % 512 == 0 {
                pool.check_invariants();
            }
        }
        drop(stop);
    });
    pool.check_invariants();
}
