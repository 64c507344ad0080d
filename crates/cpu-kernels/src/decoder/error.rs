//! What is wrong with a decoder or with what it is given.

use thiserror::Error;

use crate::{attention::AttentionError, packed::LinearError, rotary::RotaryError};

/// What is wrong with a decoder or with what it is given.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DecoderError {
    /// A part whose size is not that of its neighbours.
    #[error("block {block}: {name} has {found} features, but {expected} are needed")]
    Features {
        /// Which block; one more than there are: the norm at the end.
        block: usize,
        /// The part.
        name: &'static str,
        /// Its size.
        found: usize,
        /// What it should be.
        expected: usize,
    },
    /// Room for the stream, which nothing norms.
    #[error("the stream has {expected} numbers, but there is room for {found}")]
    Out {
        /// Numbers.
        found: usize,
        /// Numbers.
        expected: usize,
    },
    /// Logits of a decoder that has no head, or a head without a norm before it.
    #[error("{0}")]
    Head(&'static str),
    /// A head of another width.
    #[error("the head takes {found} features, but the stream has {expected}")]
    HeadFeatures {
        /// What it takes.
        found: usize,
        /// Features of the stream.
        expected: usize,
    },
    /// Arrays of logits and ids that do not fit each other.
    #[error("{name} has {found} numbers, but {expected} are needed")]
    Logits {
        /// Which array.
        name: &'static str,
        /// Numbers.
        found: usize,
        /// Numbers.
        expected: usize,
    },
    /// Logits of a token that the step does not have.
    #[error("the logits of token {place} are asked for, but the step has {num_tokens}")]
    Place {
        /// Which.
        place: i32,
        /// How many there are.
        num_tokens: usize,
    },
    /// A block whose heads are turned, and nothing to turn them by.
    #[error("heads are turned by cosines and sines number {index}, but {found} are given")]
    NoRotary {
        /// Which.
        index: usize,
        /// How many are given.
        found: usize,
    },
    /// Queries, keys and values head by head, and not as many of each.
    #[error(
        "block {block}: qkv is ordered by head, but there are {num_heads} heads of queries and {num_kv_heads} of keys"
    )]
    ByHead {
        /// Which block.
        block: usize,
        /// Of queries.
        num_heads: usize,
        /// Of keys and of values.
        num_kv_heads: usize,
    },
    /// Attention or an MLP that reads the stream as it is, and adds to it what no norm has seen.
    #[error("block {block} has no norm before attention or before the MLP, and none after them")]
    NoNorm {
        /// Which block.
        block: usize,
    },
    /// An MLP next to attention, and norms after both.
    #[error("block {block} has an MLP next to attention and norms after them: it may have one of the two")]
    Parallel {
        /// Which block.
        block: usize,
    },
    /// Experts next to attention, or norms around them.
    #[error("block {block} has experts next to attention or norms after its parts, which is not supported")]
    ExpertPlan {
        /// Which block.
        block: usize,
    },
    /// A router that has nothing to choose from.
    #[error("block {block} has a router, but no experts")]
    NoExperts {
        /// Which block.
        block: usize,
    },
    /// Experts of a token that there are not.
    #[error(
        "block {block}: {num_chosen} experts compute a token, but it must be 1 to {num_experts}, as many as there are"
    )]
    Chosen {
        /// Which block.
        block: usize,
        /// How many are chosen.
        num_chosen: usize,
        /// How many there are.
        num_experts: usize,
    },
    /// Groups of experts that do not divide them, or have too few for a token.
    #[error(
        "block {block}: {num_chosen} of {num_experts} experts cannot be chosen from {num_chosen_groups} of {num_groups} \
         groups: groups must be of one size, of 2 or more, and those that are chosen must have as many experts"
    )]
    Groups {
        /// Which block.
        block: usize,
        /// Groups.
        num_groups: usize,
        /// Groups whose experts may be chosen.
        num_chosen_groups: usize,
        /// Experts of a token.
        num_chosen: usize,
        /// How many there are.
        num_experts: usize,
    },
    /// A shared MLP without gates.
    #[error("block {block}: the MLP next to the experts must be gated")]
    Shared {
        /// Which block.
        block: usize,
    },
    /// An expert that is not gated as the first one is, or of another size.
    #[error(
        "block {block}: expert {expert} must have gates, and the activation and the size of the first expert"
    )]
    Unlike {
        /// Which block.
        block: usize,
        /// Which expert.
        expert: usize,
    },
    /// Adapters of experts, which do not compute all tokens.
    #[error(
        "block {block}: an adapter adds to {name}, but the block has experts, which adapters cannot change"
    )]
    AdaptedExperts {
        /// Which block.
        block: usize,
        /// The layer.
        name: &'static str,
    },
    /// Half of a block whose halves cannot be added by others.
    #[error("block {block} does not run in halves: more than sums with the stream lies between its parts")]
    Halves {
        /// Which block.
        block: usize,
    },
    /// Not a cache for each block.
    #[error("caches of {found} blocks are given, but there are {expected} blocks")]
    Caches {
        /// How many.
        found: usize,
        /// Blocks.
        expected: usize,
    },
    /// A block that there is not.
    #[error("block {index} is asked for, but there are {found} blocks")]
    Block {
        /// Which.
        index: usize,
        /// How many there are.
        found: usize,
    },
    /// A block whose cache there is not.
    #[error("a block has cache {index}, but there are {found}")]
    CacheIndex {
        /// Which.
        index: usize,
        /// How many there are.
        found: usize,
    },
    /// Caches of other heads.
    #[error(
        "the caches have {found_heads} heads of {found_dim} features, but the decoder has {num_kv_heads} of {head_dim}"
    )]
    Cache {
        /// Heads of a cache.
        found_heads: usize,
        /// Features of each.
        found_dim: usize,
        /// Heads of keys and values.
        num_kv_heads: usize,
        /// Features of each.
        head_dim: usize,
    },
    /// An adapter of a layer whose outputs an activation follows before anything can be added to them.
    #[error("block {block}: an adapter adds to up, whose outputs go into an activation in the same pass")]
    Ungated {
        /// Which block.
        block: usize,
    },
    /// A token that the step does not have.
    #[error("an adapter is for token {token}, but the step has {num_tokens}")]
    Token {
        /// Which.
        token: u32,
        /// How many there are.
        num_tokens: usize,
    },
    /// A token that two adapters are for.
    #[error("two adapters are for token {token}")]
    TwoAdapters {
        /// Which.
        token: u32,
    },
    /// No memory for what lies between the parts.
    #[error(
        "{num_bytes} bytes for the activations of {num_tokens} tokens cannot be had; fewer tokens in a step take fewer"
    )]
    Memory {
        /// What they need.
        num_bytes: usize,
        /// Tokens of the step.
        num_tokens: usize,
    },
    /// Of what heads are turned by.
    #[error(transparent)]
    Rotary(#[from] RotaryError),
    /// Of a product or a norm.
    #[error(transparent)]
    Linear(#[from] LinearError),
    /// Of attention.
    #[error(transparent)]
    Attention(#[from] AttentionError),
}
