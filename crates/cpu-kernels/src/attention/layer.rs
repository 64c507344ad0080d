//! What attention computes: the arrays of a layer, and a part of them.

#![allow(clippy::inline_always, reason = "see `simd`")]

use std::ops::Range;

use crate::{
    attention::{cached::Cached, options::AttentionOptions},
    number::Number,
};

/// What all tiles of a layer share: queries and outputs of `E`, a cache of `C`. Pointers, because outputs of different tiles
/// interleave in one array.
pub(crate) struct Layer<'a, E, C> {
    /// `[num_tokens, num_heads, head_dim]`, tokens `query_stride` elements apart.
    pub(crate) query: *const E,
    pub(crate) query_stride: usize,
    /// `[num_slots, num_kv_heads, head_dim]` each, with the scale of a head that has one behind its features.
    pub(crate) keys: *const C,
    pub(crate) values: *const C,
    /// `[num_tokens, num_heads, head_dim]`, contiguous.
    pub(crate) out: *mut E,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) block_size: usize,
    pub(crate) options: &'a AttentionOptions<'a>,
}

// SAFETY: everything but `out` is only read; of `out` each tile writes the rows of its own tokens and heads, which no
// other tile has.
unsafe impl<E: Number, C: Cached> Sync for Layer<'_, E, C> {}

/// Which part of a layer.
pub(crate) struct Tile<'a> {
    /// Blocks of the request, as many as its context needs.
    pub(crate) blocks: &'a [u32],
    /// Tokens in the flattened batch.
    pub(crate) tokens: Range<usize>,
    /// Position of the first of them in its request.
    pub(crate) position: usize,
    /// Where what each token sees ends, in its request; it does not decrease. Empty: behind the token itself.
    pub(crate) visible: &'a [u32],
    pub(crate) kv_heads: Range<usize>,
    /// What the thread probably computes next, whose first keys are asked for meanwhile.
    pub(crate) next: Option<&'a Tile<'a>>,
}

impl Tile<'_> {
    /// Where what a token of the tile sees ends.
    #[inline(always)]
    pub(crate) fn visible_end(&self, token: usize) -> usize {
        if self.visible.is_empty() { self.position + token + 1 } else { self.visible[token] as usize }
    }

    /// Where what any of the tile's tokens sees ends.
    #[inline(always)]
    pub(crate) fn context_end(&self) -> usize {
        self.visible_end(self.tokens.len() - 1)
    }
}
