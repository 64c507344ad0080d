//! `ExtraKeys`: what the content of a block depends on in addition to its tokens: the `LoRA` adapter, the cache salt,
//! and the multimodal inputs that its placeholder tokens stand for.
//!
//! The thread that submits a request encodes them once, so that equal bytes mean equal keys: tag, length, value.

use std::{
    fmt,
    hash::{Hash, Hasher},
    sync::Arc,
};

/// Tokens of a prompt that stand for one multimodal input.
#[derive(Clone, Default)]
pub struct MultimodalSpan {
    /// Position of its first token.
    pub offset: u32,
    /// Number of tokens.
    pub length: u32,
    /// Names the input's content; at least 16 bytes, so that names do not collide.
    pub digest: Box<[u8]>,
    /// The input, in a form that the worker understands; the scheduler only carries it.
    pub content: Arc<[u8]>,
}

impl MultimodalSpan {
    /// Position behind its last token.
    pub(crate) fn end(&self) -> u64 {
        u64::from(self.offset) + u64::from(self.length)
    }

    /// What tells spans apart: the digest stands for the content.
    fn name(&self) -> (u32, u32, &[u8]) {
        (self.offset, self.length, &self.digest)
    }
}

impl PartialEq for MultimodalSpan {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for MultimodalSpan {}

impl Hash for MultimodalSpan {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

impl fmt::Debug for MultimodalSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultimodalSpan")
            .field("offset", &self.offset)
            .field("length", &self.length)
            .field("digest", &self.digest)
            .field("num_bytes", &self.content.len())
            .finish_non_exhaustive()
    }
}

/// See the module docs. `default()` has no keys.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct ExtraKeys {
    /// Keys of the first block; the hash chain passes them on to all others.
    first_block: Box<[u8]>,
    /// In the order of their positions.
    multimodal: Box<[MultimodalSpan]>,
}

const LORA: u8 = 1;
const SALT: u8 = 2;
const MULTIMODAL: u8 = 3;

impl ExtraKeys {
    /// Make the keys of one request. Spans may come in any order.
    #[must_use]
    pub fn new(lora: Option<&str>, cache_salt: Option<&str>, multimodal: Vec<MultimodalSpan>) -> Self {
        let mut first_block = Vec::new();
        for (tag, value) in [(LORA, lora), (SALT, cache_salt)] {
            if let Some(value) = value {
                encode(&mut first_block, tag, value.as_bytes());
            }
        }
        Self::from_encoded(first_block.into(), multimodal)
    }

    /// Rebuild them from [`Self::first_block`] and [`Self::multimodal`], in another process.
    #[must_use]
    pub fn from_encoded(first_block: Box<[u8]>, mut multimodal: Vec<MultimodalSpan>) -> Self {
        multimodal.retain(|span| span.length > 0);
        multimodal.sort_by_key(|span| span.offset);
        Self { first_block, multimodal: multimodal.into() }
    }

    /// Whether its blocks depend on nothing but the tokens.
    pub(crate) fn is_empty(&self) -> bool {
        self.first_block.is_empty() && self.multimodal.is_empty()
    }

    /// Adapter and salt, encoded.
    #[must_use]
    pub fn first_block(&self) -> &[u8] {
        &self.first_block
    }

    /// The multimodal inputs, in the order of their positions.
    #[must_use]
    pub fn multimodal(&self) -> &[MultimodalSpan] {
        &self.multimodal
    }

    /// Where a chunk of a prompt ends that begins at `start` and could go up to `end`, so that it cuts no input: before one
    /// that does not fit, and where it began if that is within this input.
    pub(crate) fn end_of_chunk(&self, start: u32, end: u32) -> u32 {
        let cut = self.multimodal.iter().find(|span| span.offset < end && u64::from(end) < span.end());
        cut.map_or(end, |span| span.offset.max(start))
    }

    /// The first input that cannot be computed in one step of at most `most` tokens, or that is not followed by another token
    /// of the prompt, which forks of a request compute apart; or that begins within another.
    pub(crate) fn uncomputable(&self, most: u32, num_prompt_tokens: usize) -> Option<&MultimodalSpan> {
        let mut free_from = 0;
        self.multimodal.iter().find(|span| {
            let overlaps = u64::from(span.offset) < free_from;
            free_from = span.end();
            overlaps || span.length > most || span.end() >= num_prompt_tokens as u64
        })
    }

    /// Write the keys of the block at positions `start .. start + block_size` to `encoded`, replacing its content.
    pub(crate) fn of_block(&self, start: u32, block_size: u32, encoded: &mut Vec<u8>) {
        encoded.clear();
        if start == 0 {
            encoded.extend_from_slice(&self.first_block);
        }
        for span in &self.multimodal {
            let (first, end) = (u64::from(span.offset), span.end());
            if first < u64::from(start) + u64::from(block_size) && u64::from(start) < end {
                // The block's offset within the input: the same input at another offset is other content.
                encode(encoded, MULTIMODAL, &span.digest);
                encoded.extend_from_slice(&(i64::from(start) - i64::from(span.offset)).to_le_bytes());
            }
        }
    }
}

fn encode(encoded: &mut Vec<u8>, tag: u8, value: &[u8]) {
    encoded.push(tag);
    encoded.extend_from_slice(&(value.len() as u64).to_le_bytes());
    encoded.extend_from_slice(value);
}
