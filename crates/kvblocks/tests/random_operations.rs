//! Random requests over a vocabulary of two tokens and pools of 4 to 64 blocks: the pool, and a naive one that does the
//! same, must agree on every answer, on the state of every block and on the free order; and a block that a look-up
//! finds must hold exactly the tokens that were asked for. `RUSTVLLM_TEST_SEEDS` and `RUSTVLLM_TEST_OPERATIONS` make a
//! longer or shorter run, `RUSTVLLM_TEST_FIRST_SEED` begins elsewhere.

mod naive;

use std::sync::Arc;

use kvblocks::{BlockHash, BlockId, BlockPool, ChainHasher, SharedBlocks};
use naive::NaivePool;

/// `SplitMix64`: enough randomness for choosing operations, and the same on every machine.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// A sequence and the blocks that hold it.
struct Request {
    tokens: Vec<i32>,
    salt: Vec<u8>,
    blocks: Vec<BlockId>,
    hashes: Vec<BlockHash>,
}

struct Harness {
    rng: Rng,
    block_size: usize,
    pool: BlockPool,
    shared: Arc<SharedBlocks>,
    naive: NaivePool,
    hasher: ChainHasher,
    requests: Vec<Request>,
    step: u64,
    /// Registrations of the current step.
    registered_now: Vec<BlockId>,
    /// What each registered block holds: the salt and all tokens up to its end.
    contents: Vec<Option<(Vec<u8>, Vec<i32>)>>,
    /// References handed back and not drained yet: blocks in the order in which they will come, and how often.
    returned: Vec<(BlockId, u32)>,
    hits: u64,
    withdrawals: u64,
    twins_seen: u64,
}

impl Harness {
    fn new(seed: u64) -> Self {
        let mut rng = Rng(seed);
        let num_blocks = 4 + rng.below(61) as u32;
        let pool = BlockPool::new(num_blocks).expect("a valid size");
        Self {
            block_size: 1 + rng.below(4) as usize,
            shared: pool.shared(),
            pool,
            naive: NaivePool::new(num_blocks),
            hasher: ChainHasher::new([seed as u8; 16]),
            requests: Vec::new(),
            step: 0,
            registered_now: Vec::new(),
            contents: vec![None; num_blocks as usize],
            returned: Vec::new(),
            hits: 0,
            withdrawals: 0,
            twins_seen: 0,
            rng,
        }
    }

    fn operation(&mut self) {
        match self.rng.below(16) {
            0..5 => self.admit(),
            5..9 => self.grow(),
            9..12 => self.finish(),
            12 => self.fork(),
            13 => self.end_step(),
            14 => self.drain(),
            _ => self.reset(),
        }
    }

    /// A new request: takes its cached prefix, allocates the rest, registers its full blocks.
    fn admit(&mut self) {
        let len = 1 + self.rng.below(6 * self.block_size as u64) as usize;
        let tokens: Vec<i32> = (0..len).map(|_| self.rng.below(2) as i32).collect();
        let salt = if self.rng.one_in(4) { b"other tenant".to_vec() } else { Vec::new() };
        let mut request = Request { tokens, salt, blocks: Vec::new(), hashes: Vec::new() };
        self.hash_full_blocks(&mut request);
        let reads_cache = !self.rng.one_in(8); // else every block is a twin
        let mut hits = Vec::new();
        for (n, hash) in request.hashes.iter().enumerate() {
            let found = self.pool.lookup(hash);
            assert_eq!(found.map(|block| block.0), self.naive.lookup(hash));
            assert_eq!(found, self.shared.lookup_hint(hash), "at rest the hint is exact");
            let Some(block) = found.filter(|_| reads_cache) else { break };
            let prefix = &request.tokens[..(n + 1) * self.block_size];
            let held = self.contents[block.index()].as_ref().expect("a block that is found has content");
            assert_eq!(
                (held.0.as_slice(), held.1.as_slice()),
                (request.salt.as_slice(), prefix),
                "a wrong hit"
            );
            hits.push(block);
        }
        for &hit in &hits {
            self.pool.touch(hit);
            self.naive.touch(hit.0);
            self.hits += 1;
        }
        let missing = request.tokens.len().div_ceil(self.block_size) - hits.len();
        request.blocks.clone_from(&hits);
        if self.allocate(missing as u32, &mut request.blocks) {
            self.register_full_blocks(&request, hits.len());
            self.requests.push(request);
        } else {
            for &hit in hits.iter().rev() {
                self.pool.free(hit);
                self.naive.free(hit.0);
            }
        }
    }

    /// A running request gets tokens.
    fn grow(&mut self) {
        if self.requests.is_empty() {
            return;
        }
        let at = self.rng.below(self.requests.len() as u64) as usize;
        let mut request = self.requests.swap_remove(at);
        let full = request.tokens.len() / self.block_size;
        for _ in 0..=self.rng.below(self.block_size as u64) {
            request.tokens.push(self.rng.below(2) as i32);
        }
        let missing = request.tokens.len().div_ceil(self.block_size) - request.blocks.len();
        if self.allocate(missing as u32, &mut request.blocks) {
            self.hash_full_blocks(&mut request);
            self.register_full_blocks(&request, full);
            self.requests.push(request);
        } else {
            self.free(&request.blocks);
        }
    }

    fn finish(&mut self) {
        if self.requests.is_empty() {
            return;
        }
        let at = self.rng.below(self.requests.len() as u64) as usize;
        let request = self.requests.swap_remove(at);
        if !self.rng.one_in(3) {
            self.free(&request.blocks);
            return;
        }
        for &block in request.blocks.iter().rev() {
            self.shared.hand_back(block);
            match self.returned.iter_mut().find(|entry| entry.0 == block) {
                Some(entry) => entry.1 += 1,
                None => self.returned.push((block, 1)),
            }
        }
    }

    /// A second request that shares the full blocks of a first and copies the last one.
    fn fork(&mut self) {
        if self.requests.is_empty() {
            return;
        }
        let at = self.rng.below(self.requests.len() as u64) as usize;
        let parent = &self.requests[at];
        let full = parent.tokens.len() / self.block_size;
        let partial = parent.blocks.len() - full;
        let mut child = Request {
            tokens: parent.tokens.clone(),
            salt: parent.salt.clone(),
            blocks: parent.blocks[..full].to_vec(),
            hashes: parent.hashes.clone(),
        };
        if self.naive.free.len() < partial {
            return;
        }
        for &block in &child.blocks {
            self.pool.touch(block);
            self.naive.touch(block.0);
        }
        assert!(self.allocate(partial as u32, &mut child.blocks));
        self.requests.push(child);
    }

    /// The step succeeds, or some of its registrations are undone.
    fn end_step(&mut self) {
        let fails = self.rng.one_in(3);
        let blocks = std::mem::take(&mut self.registered_now);
        for block in blocks {
            if fails && self.rng.below(4) > 0 {
                let undone = self.pool.withdraw(block, self.step);
                assert_eq!(undone, self.naive.withdraw(block.0, self.step));
                if undone {
                    self.withdrawals += 1;
                    self.contents[block.index()] = None;
                }
            }
            assert!(!self.pool.withdraw(block, self.step + 1), "nothing belongs to a step to come");
        }
        self.step += 1;
    }

    fn drain(&mut self) {
        let expected: u32 = self.returned.iter().map(|entry| entry.1).sum();
        assert_eq!(self.pool.drain_returned(), expected);
        for (block, references) in std::mem::take(&mut self.returned) {
            for _ in 0..references {
                self.naive.free(block.0);
            }
        }
    }

    fn reset(&mut self) {
        if self.rng.one_in(4) {
            for request in std::mem::take(&mut self.requests) {
                self.free(&request.blocks);
            }
            self.drain();
        }
        let done = self.pool.reset_prefix_cache();
        assert_eq!(done, self.naive.reset_prefix_cache());
        if done {
            self.contents.fill(None);
        }
    }

    fn allocate(&mut self, n: u32, blocks: &mut Vec<BlockId>) -> bool {
        let held = blocks.len();
        let done = self.pool.allocate(n, blocks);
        let expected = self.naive.allocate(n);
        assert_eq!(done, expected.is_some(), "allocate {n}");
        let got: Vec<u32> = blocks[held..].iter().map(|block| block.0).collect();
        assert_eq!(got, expected.unwrap_or_default(), "allocate {n}");
        for block in &blocks[held..] {
            self.contents[block.index()] = None;
        }
        done
    }

    fn free(&mut self, blocks: &[BlockId]) {
        for &block in blocks.iter().rev() {
            self.pool.free(block);
            self.naive.free(block.0);
        }
    }

    fn hash_full_blocks(&self, request: &mut Request) {
        let full = request.tokens.chunks_exact(self.block_size);
        for tokens in full.skip(request.hashes.len()) {
            let salt: &[u8] = if request.hashes.is_empty() { &request.salt } else { b"" };
            request.hashes.push(self.hasher.hash_block(request.hashes.last(), tokens, salt));
        }
    }

    fn register_full_blocks(&mut self, request: &Request, from: usize) {
        for (n, &hash) in request.hashes.iter().enumerate().skip(from) {
            let block = request.blocks[n];
            if self.pool.lookup(&hash).is_some_and(|other| other != block) {
                self.twins_seen += 1;
            }
            if self.pool.block_hash(block).is_none() {
                self.registered_now.push(block);
            }
            self.pool.register(block, hash, self.step);
            self.naive.register(block.0, hash, self.step);
            let prefix = request.tokens[..(n + 1) * self.block_size].to_vec();
            self.contents[block.index()] = Some((request.salt.clone(), prefix));
        }
    }

    /// Everything that can be seen of the pool equals the naive one, and follows from the requests.
    fn check(&self) {
        self.pool.check_invariants();
        let order: Vec<u32> = self.pool.free_order().iter().map(|block| block.0).collect();
        assert_eq!(self.naive.free, order, "free order");
        assert_eq!(self.pool.num_free() as usize, order.len());
        for id in 0..self.pool.num_blocks() {
            let block = BlockId(id);
            let state =
                (self.pool.ref_count(block), self.pool.block_hash(block), self.pool.registered_in(block));
            let naive = self.naive.registered[block.index()];
            let expected = (self.naive.ref_counts[block.index()], naive.map(|r| r.0), naive.map(|r| r.1));
            assert_eq!(state, expected, "{block}");
            let in_tables: usize =
                self.requests.iter().map(|r| r.blocks.iter().filter(|&&held| held == block).count()).sum();
            let in_return: u32 =
                self.returned.iter().filter(|entry| entry.0 == block).map(|entry| entry.1).sum();
            assert_eq!(state.0, in_tables as u32 + in_return, "{block}: references and holders");
        }
        let counters = self.pool.counters();
        assert_eq!(counters.evictions(), self.naive.evictions);
        assert_eq!(counters.withdrawals(), self.withdrawals);
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

#[test]
fn pool_equals_naive_pool() {
    let (mut hits, mut evictions, mut withdrawals, mut twins, mut returned) = (0, 0, 0, 0, 0);
    let (first, seeds) = (setting("RUSTVLLM_TEST_FIRST_SEED", 0), setting("RUSTVLLM_TEST_SEEDS", 60));
    let operations = setting("RUSTVLLM_TEST_OPERATIONS", 2_500);
    for seed in first..first + seeds {
        let mut harness = Harness::new(seed);
        for operation in 0..operations {
            // On failure libtest shows the last line: the seed and the operation reproduce it.
            if operation % 500 == 0 {
                println!("seed {seed}, from operation {operation}");
            }
            harness.operation();
            harness.check();
        }
        hits += harness.hits;
        evictions += harness.naive.evictions;
        withdrawals += harness.withdrawals;
        twins += harness.twins_seen;
        returned += harness.pool.counters().returned();

        // After all have finished the pool is whole, and a reset leaves nothing behind.
        for request in std::mem::take(&mut harness.requests) {
            harness.free(&request.blocks);
        }
        harness.drain();
        assert_eq!(harness.pool.num_free(), harness.pool.num_blocks() - 1);
        assert!(harness.pool.usage().abs() < f64::EPSILON);
        assert!(harness.pool.reset_prefix_cache() && harness.naive.reset_prefix_cache());
        assert_eq!(harness.pool.counters().num_cached(), 0);
        harness.check();
    }
    println!(
        "{hits} hits, {evictions} evictions, {withdrawals} withdrawals, {twins} twins, {returned} returned"
    );
    for (what, count) in [
        ("hits", hits),
        ("evictions", evictions),
        ("withdrawals", withdrawals),
        ("twins", twins),
        ("returned", returned),
    ] {
        let least = seeds * operations / 150;
        assert!(count > least, "the operations hardly ever made {what}: {count}");
    }
}
