//! The MLP of a block: one that computes every token, or experts of which a router chooses a few for each.

use std::sync::Arc;

use super::{DecoderError, routing::Routing};
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
    /// What its logits mean.
    pub routing: Routing,
    /// The MLPs.
    pub experts: Vec<DenseMlp>,
    /// Computes every token besides, or none does.
    pub shared: Option<SharedMlp>,
}

/// A gated MLP next to the experts, of any size, that computes every token.
#[derive(Debug)]
pub struct SharedMlp {
    /// The MLP.
    pub mlp: DenseMlp,
    /// From the stream to a logit, whose sigmoid is the result's weight; None: it is 1.
    pub gate: Option<Arc<PackedLinear>>,
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
        let (routing, num_experts) = (&mlp.routing, mlp.experts.len());
        let Routing { num_chosen, num_groups, num_chosen_groups, .. } = *routing;
        if !(1..=num_experts).contains(&num_chosen) {
            return Err(DecoderError::Chosen { block, num_chosen, num_experts });
        }
        let has_groups = num_groups == 1
            || (num_groups > 0 && num_experts.is_multiple_of(num_groups) && num_experts / num_groups >= 2);
        let is_enough = (1..=num_groups).contains(&num_chosen_groups)
            && num_chosen <= num_experts.checked_div(num_groups).unwrap_or(0) * num_chosen_groups;
        if !has_groups || !is_enough {
            return Err(DecoderError::Groups {
                block,
                num_groups,
                num_chosen_groups,
                num_chosen,
                num_experts,
            });
        }
        let bias = if routing.bias.is_empty() { num_experts } else { routing.bias.len() };
        let of_gate = mlp.shared.as_ref().and_then(|shared| shared.gate.as_ref());
        for (name, found, expected) in [
            ("the input of the router", mlp.router.in_features(), hidden_size),
            ("the router", mlp.router.out_features(), num_experts),
            ("the bias of the router's choice", bias, num_experts),
            (
                "the input of the shared MLP's gate",
                of_gate.map_or(hidden_size, |gate| gate.in_features()),
                hidden_size,
            ),
            ("the shared MLP's gate", of_gate.map_or(1, |gate| gate.out_features()), 1),
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
        if let Some(shared) = &mlp.shared {
            shared.mlp.check(block, hidden_size)?;
            if !shared.mlp.is_gated {
                return Err(DecoderError::Shared { block });
            }
        }
        Ok(())
    }

    /// What a token needs room for between the products, besides what lies in an [`super::experts::ExpertRoom`].
    pub(super) fn inner_size(&self) -> usize {
        match self {
            Self::Dense(mlp) => mlp.up.out_features(),
            Self::Experts(mlp) => {
                let shared = mlp.shared.as_ref().map_or(0, |shared| shared.mlp.up.out_features());
                shared.max(mlp.router.out_features())
            }
        }
    }

    /// The layer whose product comes first.
    pub(super) fn first_layer(&self) -> &PackedLinear {
        match self {
            Self::Dense(mlp) => &mlp.up,
            Self::Experts(mlp) => mlp.shared.as_ref().map_or(&mlp.router, |shared| &shared.mlp.up),
        }
    }
}
