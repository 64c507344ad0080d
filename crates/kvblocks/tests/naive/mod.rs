//! The pool as plainly as it can be written: a deque and a map. Slow, and easy to believe.

use std::collections::{HashMap, VecDeque};

use kvblocks::BlockHash;

#[derive(Debug)]
pub(crate) struct NaivePool {
    pub(crate) ref_counts: Vec<u32>,
    /// The free order, first to be allocated in front.
    pub(crate) free: VecDeque<u32>,
    /// Hash and step of each registered block.
    pub(crate) registered: Vec<Option<(BlockHash, u64)>>,
    /// Blocks of each content, in the order of registration.
    pub(crate) index: HashMap<BlockHash, Vec<u32>>,
    pub(crate) evictions: u64,
}

impl NaivePool {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self {
            ref_counts: vec![0; num_blocks as usize],
            free: (1..num_blocks).collect(),
            registered: vec![None; num_blocks as usize],
            index: HashMap::new(),
            evictions: 0,
        }
    }

    pub(crate) fn allocate(&mut self, n: u32) -> Option<Vec<u32>> {
        if n as usize > self.free.len() {
            return None;
        }
        let blocks: Vec<u32> = self.free.drain(..n as usize).collect();
        for &block in &blocks {
            self.ref_counts[block as usize] = 1;
            if self.registered[block as usize].is_some() {
                self.evictions += 1;
                self.unregister(block);
            }
        }
        Some(blocks)
    }

    pub(crate) fn touch(&mut self, block: u32) {
        if self.ref_counts[block as usize] == 0 {
            self.free.retain(|&free| free != block);
        }
        self.ref_counts[block as usize] += 1;
    }

    pub(crate) fn free(&mut self, block: u32) {
        self.ref_counts[block as usize] -= 1;
        if self.ref_counts[block as usize] == 0 {
            if self.registered[block as usize].is_some() {
                self.free.push_back(block);
            } else {
                self.free.push_front(block);
            }
        }
    }

    pub(crate) fn lookup(&self, hash: &BlockHash) -> Option<u32> {
        self.index.get(hash).map(|blocks| blocks[0])
    }

    pub(crate) fn register(&mut self, block: u32, hash: BlockHash, step: u64) {
        if self.registered[block as usize].is_none() {
            self.registered[block as usize] = Some((hash, step));
            self.index.entry(hash).or_default().push(block);
        }
    }

    pub(crate) fn withdraw(&mut self, block: u32, step: u64) -> bool {
        if !matches!(self.registered[block as usize], Some((_, made_in)) if made_in == step) {
            return false;
        }
        self.unregister(block);
        if self.ref_counts[block as usize] == 0 {
            self.free.retain(|&free| free != block);
            self.free.push_front(block);
        }
        true
    }

    pub(crate) fn reset_prefix_cache(&mut self) -> bool {
        if self.free.len() + 1 < self.ref_counts.len() {
            return false;
        }
        self.registered.fill(None);
        self.index.clear();
        true
    }

    fn unregister(&mut self, block: u32) {
        let (hash, _) = self.registered[block as usize].take().expect("a registered block");
        let blocks = self.index.get_mut(&hash).expect("its content is in the index");
        blocks.retain(|&other| other != block);
        if blocks.is_empty() {
            self.index.remove(&hash);
        }
    }
}
