//! The blocks as plainly as they can be written: a list of free ones, and what each one holds, spelled out.
//!
//! There are no hashes: a block is found by comparing all tokens up to its end, the extra keys, and the inputs that begin
//! before its end.

use super::inputs::{Input, inputs_before};

/// What a findable block holds.
#[derive(Clone, Debug)]
pub struct Content {
    pub extra_keys: Vec<u8>,
    pub inputs: Vec<Input>,
    /// Every token from the start of the sequence to the end of the block.
    pub prefix: Vec<i32>,
    /// The step that the registration belongs to.
    pub step: u64,
    /// Of several blocks with the same content the one registered first is found.
    pub number: u64,
}

#[derive(Clone, Debug)]
pub struct NaivePool {
    pub ref_counts: Vec<usize>,
    /// The free order, first to be allocated in front.
    pub free: Vec<u32>,
    pub contents: Vec<Option<Content>>,
    num_registrations: u64,
}

impl NaivePool {
    pub fn new(num_blocks: usize) -> Self {
        Self {
            ref_counts: vec![0; num_blocks],
            free: (1..num_blocks as u32).collect(),
            contents: vec![None; num_blocks],
            num_registrations: 0,
        }
    }

    pub fn allocate(&mut self, n: usize) -> Vec<u32> {
        let taken: Vec<u32> = self.free.drain(..n).collect();
        for &block in &taken {
            self.ref_counts[block as usize] = 1;
            self.contents[block as usize] = None;
        }
        taken
    }

    pub fn is_free(&self, block: u32) -> bool {
        self.ref_counts[block as usize] == 0
    }

    pub fn touch(&mut self, block: u32) {
        self.free.retain(|&free| free != block);
        self.ref_counts[block as usize] += 1;
    }

    pub fn free(&mut self, block: u32) {
        self.ref_counts[block as usize] -= 1;
        if self.ref_counts[block as usize] > 0 {
            return;
        }
        if self.contents[block as usize].is_some() {
            self.free.push(block);
        } else {
            self.free.insert(0, block);
        }
    }

    pub fn find(&self, extra_keys: &[u8], inputs: &[Input], prefix: &[i32]) -> Option<u32> {
        let inputs = inputs_before(inputs, prefix.len());
        let holds = |content: &Content| {
            content.extra_keys == extra_keys && content.inputs == inputs && content.prefix == prefix
        };
        let found = self.contents.iter().enumerate().filter_map(|(block, content)| {
            content.as_ref().filter(|content| holds(content)).map(|content| (content.number, block as u32))
        });
        found.min().map(|(_, block)| block)
    }

    /// Blocks of the longest findable beginning of `tokens`; the last token is never part of it.
    pub fn longest_prefix(
        &self,
        extra_keys: &[u8],
        inputs: &[Input],
        tokens: &[i32],
        block_size: usize,
    ) -> Vec<u32> {
        (1..=(tokens.len().max(1) - 1) / block_size)
            .map_while(|blocks| self.find(extra_keys, inputs, &tokens[..blocks * block_size]))
            .collect()
    }

    pub fn register(&mut self, block: u32, extra_keys: &[u8], inputs: &[Input], prefix: &[i32], step: u64) {
        assert!(!self.is_free(block), "a free block cannot be registered");
        let inputs = inputs_before(inputs, prefix.len());
        if let Some(content) = &self.contents[block as usize] {
            assert!(
                content.prefix == prefix && content.extra_keys == extra_keys && content.inputs == inputs,
                "registered as something else"
            );
            return;
        }
        let number = self.num_registrations;
        self.num_registrations += 1;
        let (extra_keys, prefix) = (extra_keys.to_vec(), prefix.to_vec());
        self.contents[block as usize] = Some(Content { extra_keys, inputs, prefix, step, number });
    }

    /// Undo a registration; a free block moves to where uncached ones are.
    pub fn forget(&mut self, block: u32) {
        if self.contents[block as usize].take().is_some() && self.is_free(block) {
            self.free.retain(|&free| free != block);
            self.free.insert(0, block);
        }
    }

    pub fn forget_if_made_in(&mut self, block: u32, step: u64) -> bool {
        let made_in = self.contents[block as usize].as_ref().map(|content| content.step);
        if made_in == Some(step) {
            self.forget(block);
        }
        made_in == Some(step)
    }

    pub fn reset_prefix_cache(&mut self) -> bool {
        let idle = self.free.len() + 1 == self.contents.len();
        if idle {
            self.contents.fill(None);
        }
        idle
    }
}
