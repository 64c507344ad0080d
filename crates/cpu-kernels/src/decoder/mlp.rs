//! The MLP of a block: one that computes every token, or experts of which a router chooses a few for each.

use std::sync::Arc;

use super::DecoderError;
use crate::{finish::Activation, packed::PackedLinear};

/// What follows attention in a block.
#[derive(Debug)]
pub enum Mlp {
    /// Computes every token.
    Dense(DenseMlp),
    /// A router chooses some for each token.
    Experts(ExpertMlp),
}

/// An MLP, or one expert.
#[derive(Debug)]
pub struct DenseMlp {
    /// From the stream to the MLP's features; where it is gated, to the gates and then to those.
    pub up: Arc<PackedLinear>,
    /// Whether each feature is multiplied by its gate.
    pub is_gated: bool,
    /// Of the features, or of the gates.
    pub activation: Activation,
    /// From them to the stream.
    pub down: Arc<PackedLinear>,
}

/// Gated MLPs of one size, whose results are added, each times its weight for the token.
#[derive(Debug)]
pub struct ExpertMlp {
    /// From the stream to a logit per expert.
    pub router: Arc<PackedLinear>,
    /// The MLPs.
    pub experts: Vec<DenseMlp>,
    /// Experts that compute a token: those with the largest logits, the first of equals.
    pub num_chosen: usize,
    /// Whether the weights of a token's experts, a softmax over all logits, are divided by their sum.
    pub is_normed: bool,
}

impl DenseMlp {
    fn check(&self, block: usize, hidden_size: usize) -> Result<(), DecoderError> {
        let features = self.down.in_features();
        for (name, found, expected) in [
            ("the input of up", self.up.in_features(), hidden_size),
            ("up", self.up.out_features(), if self.is_gated { 2 * features } else { features }),
            ("down", self.down.out_features(), hidden_size),
        ] {
            if found != expected {
                return Err(DecoderError::Features { block, name, found, expected });
            }
        }
        Ok(())
    }
}

impl Mlp {
    /// Whether the parts fit each other and the stream.
    pub(super) fn check(&self, block: usize, hidden_size: usize) -> Result<(), DecoderError> {
        let mlp = match self {
            Self::Dense(mlp) => return mlp.check(block, hidden_size),
            Self::Experts(mlp) => mlp,
        };
        let Some(first) = mlp.experts.first() else { return Err(DecoderError::NoExperts { block }) };
        let (num_chosen, num_experts) = (mlp.num_chosen, mlp.experts.len());
        if !(1..=num_experts).contains(&num_chosen) {
            return Err(DecoderError::Chosen { block, num_chosen, num_experts });
        }
        for (name, found, expected) in [
            ("the input of the router", mlp.router.in_features(), hidden_size),
            ("the router", mlp.router.out_features(), num_experts),
        ] {
            if found != expected {
                return Err(DecoderError::Features { block, name, found, expected });
            }
        }
        for (expert, parts) in mlp.experts.iter().enumerate() {
            parts.check(block, hidden_size)?;
            let is_alike =
                parts.activation == first.activation && parts.down.in_features() == first.down.in_features();
            if !parts.is_gated || !is_alike {
                return Err(DecoderError::Unlike { block, expert });
            }
        }
        Ok(())
    }

    /// What a token needs room for between the products, besides what lies in an [`super::experts::ExpertRoom`].
    pub(super) fn inner_size(&self) -> usize {
        match self {
            Self::Dense(mlp) => mlp.up.out_features(),
            Self::Experts(mlp) => mlp.router.out_features(),
        }
    }

    /// The layer whose product comes first.
    pub(super) fn first_layer(&self) -> &PackedLinear {
        match self {
            Self::Dense(mlp) => &mlp.up,
            Self::Experts(mlp) => &mlp.router,
        }
    }
}
