//! Adapters of a decoder: what each adds to the layers of the blocks, for its own tokens of a step.

use std::sync::Arc;

use super::{Decoder, DecoderError, Mlp};
use crate::{
    finish::Activation,
    lora::{LayerDelta, check_ascending},
};

/// The layers of a block that adapters add to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    Qkv,
    Out,
    Up,
    Down,
}

const NUM_PARTS: usize = 4;
const NAMES: [&str; NUM_PARTS] = ["qkv", "out", "up", "down"];

/// An adapter of a decoder, checked against it.
#[derive(Debug)]
pub struct DecoderAdapter {
    blocks: Vec<[Option<Arc<LayerDelta>>; NUM_PARTS]>,
}

impl DecoderAdapter {
    /// What is added to qkv, out, up and down of each block.
    ///
    /// # Errors
    ///
    /// Layers that do not fit the decoder's; an `up` whose outputs an activation follows at once.
    ///
    /// # Panics
    ///
    /// An adapter packed for other instructions than the decoder's layers.
    pub fn new(
        decoder: &Decoder,
        blocks: Vec<[Option<Arc<LayerDelta>>; NUM_PARTS]>,
    ) -> Result<Self, DecoderError> {
        if blocks.len() != decoder.blocks.len() {
            let (index, found) = (blocks.len().saturating_sub(1), decoder.blocks.len());
            return Err(DecoderError::Block { index, found });
        }
        for (block, (parts, deltas)) in decoder.blocks.iter().zip(&blocks).enumerate() {
            let [up, down] = match &parts.mlp {
                Mlp::Dense(mlp) => [Some(&mlp.up), Some(&mlp.down)],
                Mlp::Experts(mlp) => mlp
                    .shared
                    .as_ref()
                    .map_or([None; 2], |shared| [Some(&shared.mlp.up), Some(&shared.mlp.down)]),
            };
            let layers = [Some(&parts.qkv), Some(&parts.out), up, down];
            for ((layer, delta), name) in layers.into_iter().zip(deltas).zip(NAMES) {
                let Some(delta) = delta else { continue };
                let layer = layer.ok_or(DecoderError::AdaptedExperts { block, name })?;
                let (found, expected) = (delta.num_inputs(), layer.in_features());
                if found != expected {
                    return Err(DecoderError::Features { block, name, found, expected });
                }
                delta.expect_kernel(layer.kernel);
                let (found, expected) = (delta.num_outputs(), layer.out_features());
                if found > expected {
                    return Err(DecoderError::Features { block, name, found, expected });
                }
            }
            if let Mlp::Dense(mlp) = &parts.mlp
                && deltas[Part::Up as usize].is_some()
                && !mlp.is_gated
                && mlp.activation != Activation::None
            {
                return Err(DecoderError::Ungated { block });
            }
        }
        Ok(Self { blocks })
    }
}

/// Tokens of a step and their adapter.
#[derive(Debug)]
pub struct AdapterTokens<'a> {
    /// What is added.
    pub adapter: &'a DecoderAdapter,
    /// Which tokens, ascending.
    pub tokens: Vec<u32>,
}

/// Whether the adapters are this decoder's, and their tokens the step's, each once.
pub(super) fn check(
    adapters: &[AdapterTokens<'_>],
    num_blocks: usize,
    num_tokens: usize,
) -> Result<(), DecoderError> {
    let mut is_named = vec![false; if adapters.is_empty() { 0 } else { num_tokens }];
    for run in adapters {
        let found = run.adapter.blocks.len();
        if found != num_blocks {
            return Err(DecoderError::Block { index: num_blocks.saturating_sub(1), found });
        }
        check_ascending(&run.tokens)?;
        for &token in &run.tokens {
            let place = is_named.get_mut(token as usize).ok_or(DecoderError::Token { token, num_tokens })?;
            if std::mem::replace(place, true) {
                return Err(DecoderError::TwoAdapters { token });
            }
        }
    }
    Ok(())
}

/// What adapters add to a block's layer, each for its tokens; layers that none adds to have nothing.
pub(super) fn runs_of<'a>(
    adapters: &'a [AdapterTokens<'a>],
    block: usize,
    part: Part,
) -> Vec<(&'a LayerDelta, &'a [u32])> {
    let of_layer = adapters.iter().filter_map(|run| {
        let delta = run.adapter.blocks.get(block)?[part as usize].as_deref()?;
        (!run.tokens.is_empty()).then_some((delta, run.tokens.as_slice()))
    });
    of_layer.collect()
}
