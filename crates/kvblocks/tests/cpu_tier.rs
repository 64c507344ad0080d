//! The CPU tier against memory that is really copied: whatever is swapped out and comes back is what it was.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kvblocks::{BlockCopies, BlockId, BlockPool, CpuBlockId, CpuTier};

/// GPU and CPU memory, one word a block; what a worker does with a step's copies.
struct Memory {
    gpu: Vec<u64>,
    cpu: Vec<u64>,
}

impl Memory {
    fn copy(&mut self, copies: &BlockCopies) {
        for &(from, to) in &copies.blocks_to_swap_out {
            self.cpu[to.0 as usize] = self.gpu[from.index()];
        }
        for &(from, to) in &copies.blocks_to_swap_in {
            self.gpu[to.index()] = self.cpu[from.0 as usize];
        }
        for &(from, to) in &copies.blocks_to_copy {
            self.gpu[to.index()] = self.gpu[from.index()];
        }
    }
}

fn random(state: &mut u64, below: usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize % below
}

/// A request: its blocks (in one of the two tiers) and what each must hold.
#[derive(Default)]
struct Request {
    gpu: Vec<BlockId>,
    cpu: Vec<CpuBlockId>,
    values: Vec<u64>,
    /// Swapped in, forked or admitted in the step that is being planned.
    new: bool,
}

struct Harness {
    state: u64,
    pool: BlockPool,
    tier: CpuTier,
    memory: Memory,
    requests: Vec<Request>,
    /// Blocks that the forward pass of this step writes.
    writes: Vec<(BlockId, u64)>,
    next_value: u64,
    swapped_in: usize,
    discarded: usize,
    full: usize,
}

impl Harness {
    fn free(&mut self, blocks: &[BlockId]) {
        for &block in blocks.iter().rev() {
            self.pool.free(block);
        }
    }

    fn admit(&mut self) {
        let mut request = Request { new: true, ..Request::default() };
        let n = 1 + random(&mut self.state, 4);
        if !self.pool.allocate(n as u32, &mut request.gpu) {
            return;
        }
        for &block in &request.gpu {
            self.next_value += 1;
            request.values.push(self.next_value);
            self.writes.push((block, self.next_value));
        }
        self.requests.push(request);
    }

    fn swap_out(&mut self, at: usize) {
        let request = &mut self.requests[at];
        if request.new || request.gpu.is_empty() {
            return; // its KV is not there yet, or it is out already
        }
        let free = self.tier.num_free();
        if let Some(pairs) = self.tier.swap_out(&request.gpu) {
            assert_eq!(pairs.iter().map(|pair| pair.0).collect::<Vec<_>>(), request.gpu);
            request.cpu = pairs.iter().map(|pair| pair.1).collect();
            let blocks = std::mem::take(&mut request.gpu);
            self.free(&blocks);
        } else {
            assert!((free as usize) < request.gpu.len());
            assert_eq!(self.tier.num_free(), free, "a refusal changes nothing");
            self.full += 1;
        }
    }

    fn swap_in(&mut self, at: usize) {
        let request = &mut self.requests[at];
        if request.cpu.is_empty() || !self.pool.allocate(request.cpu.len() as u32, &mut request.gpu) {
            return;
        }
        let pairs = self.tier.swap_in(&request.cpu, &request.gpu);
        assert_eq!(pairs.len(), request.gpu.len());
        request.cpu.clear();
        request.new = true;
        self.swapped_in += 1;
    }

    /// A child with the same content in blocks of its own.
    fn fork(&mut self, at: usize) {
        let parent = &self.requests[at];
        let mut child = Request { values: parent.values.clone(), new: true, ..Request::default() };
        if parent.new || parent.gpu.is_empty() || !self.pool.allocate(parent.gpu.len() as u32, &mut child.gpu)
        {
            return;
        }
        for (&from, &to) in parent.gpu.iter().zip(&child.gpu) {
            self.tier.copy(from, to);
        }
        self.requests[at].new = true; // its blocks must be there until the step runs
        self.requests.push(child);
    }

    fn abort(&mut self, at: usize) {
        if self.requests[at].new && self.requests[at].gpu.iter().any(|b| self.copied_from(*b)) {
            return;
        }
        let request = self.requests.swap_remove(at);
        if !request.cpu.is_empty() {
            self.discarded += 1;
            self.tier.discard(&request.cpu);
        }
        for &block in &request.gpu {
            self.tier.cancel_copies_to(block);
            self.writes.retain(|write| write.0 != block);
        }
        self.free(&request.gpu);
    }

    fn copied_from(&self, block: BlockId) -> bool {
        self.tier.planned().blocks_to_copy.iter().any(|pair| pair.0 == block)
    }

    fn run_step(&mut self, copies: &mut BlockCopies) {
        self.tier.take_copies(copies);
        assert!(self.tier.planned().is_empty());
        self.tier.check_invariants(&self.pool);
        self.memory.copy(copies);
        for (block, value) in self.writes.drain(..) {
            self.memory.gpu[block.index()] = value;
        }
        for request in &mut self.requests {
            request.new = false;
            let held: Vec<u64> = if request.cpu.is_empty() {
                request.gpu.iter().map(|block| self.memory.gpu[block.index()]).collect()
            } else {
                request.cpu.iter().map(|block| self.memory.cpu[block.0 as usize]).collect()
            };
            assert_eq!(held, request.values, "a request lost its KV");
        }
    }
}

#[test]
fn what_was_swapped_out_comes_back() {
    let (mut swapped_in, mut discarded, mut full) = (0, 0, 0);
    for seed in 0..20 {
        let (gpu_blocks, cpu_blocks) = (4 + seed as u32, seed as u32);
        let mut harness = Harness {
            state: seed,
            pool: BlockPool::new(gpu_blocks).expect("a valid size"),
            tier: CpuTier::new(cpu_blocks),
            memory: Memory { gpu: vec![0; gpu_blocks as usize], cpu: vec![0; cpu_blocks as usize] },
            requests: Vec::new(),
            writes: Vec::new(),
            next_value: 0,
            swapped_in: 0,
            discarded: 0,
            full: 0,
        };
        let mut copies = BlockCopies::default();
        for _ in 0..2_000 {
            let choice = random(&mut harness.state, 12);
            if harness.requests.is_empty() || choice < 2 {
                harness.admit();
            } else {
                let at = random(&mut harness.state, harness.requests.len());
                match choice {
                    2..5 => harness.swap_out(at),
                    5..8 => harness.swap_in(at),
                    8 => harness.fork(at),
                    9 => harness.abort(at),
                    _ => harness.run_step(&mut copies),
                }
            }
            harness.pool.check_invariants();
            harness.tier.check_invariants(&harness.pool);
        }
        harness.run_step(&mut copies);
        while !harness.requests.is_empty() {
            harness.abort(0);
        }
        assert_eq!(harness.pool.num_free(), gpu_blocks - 1);
        assert_eq!(harness.tier.num_free(), cpu_blocks);
        swapped_in += harness.swapped_in;
        discarded += harness.discarded;
        full += harness.full;
    }
    for (what, count) in [("swapped in", swapped_in), ("discarded", discarded), ("refused", full)] {
        assert!(count > 500, "hardly ever {what}: {count}");
    }
}

#[test]
fn a_cpu_block_that_a_step_reads_is_not_written_by_the_same_step() {
    let mut tier = CpuTier::new(1);
    let (_, cpu_block) = tier.swap_out(&[BlockId(1)]).expect("one is free")[0];
    let mut copies = BlockCopies::default();
    tier.take_copies(&mut copies);
    tier.swap_in(&[cpu_block], &[BlockId(2)]);
    assert_eq!((tier.swap_out(&[BlockId(3)]), tier.num_free()), (None, 0));
    tier.take_copies(&mut copies);
    assert_eq!(copies.blocks_to_swap_in, [(cpu_block, BlockId(2))]);
    assert_eq!(tier.swap_out(&[BlockId(3)]), Some(vec![(BlockId(3), cpu_block)]));
}

#[test]
fn discarding_before_the_step_runs_drops_the_copy() {
    let mut tier = CpuTier::new(2);
    let pairs = tier.swap_out(&[BlockId(1), BlockId(2)]).expect("two are free");
    tier.discard(&[pairs[0].1]);
    assert_eq!(tier.planned().blocks_to_swap_out, pairs[1..]);
    assert_eq!(tier.num_free(), 1);
}

#[test]
fn no_cpu_memory_means_always_full() {
    let mut tier = CpuTier::new(0);
    assert_eq!(tier.swap_out(&[BlockId(1)]), None);
    assert_eq!(tier.swap_out(&[]), Some(Vec::new()));
}

#[test]
fn misuse_is_refused() {
    fn refused(misuse: impl FnOnce(&mut CpuTier)) -> String {
        let mut tier = CpuTier::new(2);
        let payload = catch_unwind(AssertUnwindSafe(|| misuse(&mut tier))).expect_err("this must be refused");
        tier.check_invariants(&BlockPool::new(2).expect("a valid size"));
        *payload.downcast::<String>().expect("a formatted message")
    }
    let message = refused(|tier| tier.discard(&[CpuBlockId(1)]));
    assert_eq!(message, "discard of CPU block 1: it is Free, not held");
    let message = refused(|tier| tier.discard(&[CpuBlockId(2)]));
    assert_eq!(message, "discard of CPU block 2: the tier has 2 blocks");
    let message = refused(|tier| {
        tier.swap_in(&[CpuBlockId(0)], &[BlockId(1)]);
    });
    assert!(message.contains("not held"), "{message}");
    assert!(refused(|tier| tier.copy(BlockId(1), BlockId(1))).contains("copy of block 1 to block 1"));
}
