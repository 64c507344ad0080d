//! What a layer's attention computes besides products, softmax and sums.

use std::num::NonZeroU32;

/// What attention computes besides products, softmax and sums.
#[derive(Debug, Clone, Copy)]
pub struct AttentionOptions<'a> {
    /// Factor on the products of queries and keys.
    pub scale: f32,
    /// A query sees this many tokens, itself included; None: all before it.
    pub sliding_window: Option<NonZeroU32>,
    /// Scores become `cap · tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// `slope · (key's position − query's position)` is added to each score; one slope per query head, or none at all.
    pub alibi_slopes: &'a [f32],
    /// A score besides those of the keys, whose value is 0: it takes a share of the softmax. One per query head, or none at
    /// all.
    pub sinks: &'a [f32],
}

impl AttentionOptions<'_> {
    /// Plain causal attention.
    #[must_use]
    pub fn causal(scale: f32) -> Self {
        Self { scale, sliding_window: None, soft_cap: None, alibi_slopes: &[], sinks: &[] }
    }
}
