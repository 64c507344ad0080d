//! Adapters: low-rank products that are added to the outputs of a block's layers, each for its own tokens.
//!
//! Tokens that lie side by side are computed where they are, by all threads. The tokens of several adapters, or some here
//! and there, are few: each adapter's are gathered and computed by one thread, and then added.

use std::sync::{Arc, Mutex, PoisonError};

use super::{Decoder, DecoderError};
use crate::{
    attention::TokenRows,
    element::Element,
    finish::Activation,
    linear::{Epilogue, OutRows, Residual, linear},
    packed::{LinearError, PackedLinear},
    threads::Threads,
};

/// Tokens side by side from which on all threads compute one adapter's, when there are several adapters.
const MANY_ROWS: usize = 16;
/// Multiplications below which no helper is woken.
const MIN_SHARED_WORK: usize = 1 << 16;

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

/// What an adapter adds to a layer: `up · (down · x)`, for some stretches of its outputs.
#[derive(Debug)]
pub struct LayerDelta {
    /// `[ranks, inputs]`, the ranks of all stretches one after the other.
    pub down: Arc<PackedLinear>,
    /// Of each stretch its first output, and `[outputs, rank]`.
    pub ups: Vec<(usize, Arc<PackedLinear>)>,
}

/// An adapter of a decoder, checked against it.
#[derive(Debug)]
pub struct DecoderAdapter {
    blocks: Vec<[Option<LayerDelta>; NUM_PARTS]>,
}

impl DecoderAdapter {
    /// What is added to qkv, out, up and down of each block.
    ///
    /// # Errors
    ///
    /// Layers that do not fit the decoder's; an `up` whose outputs an activation follows at once.
    pub fn new(
        decoder: &Decoder,
        blocks: Vec<[Option<LayerDelta>; NUM_PARTS]>,
    ) -> Result<Self, DecoderError> {
        if blocks.len() != decoder.blocks.len() {
            let (index, found) = (blocks.len().saturating_sub(1), decoder.blocks.len());
            return Err(DecoderError::Block { index, found });
        }
        for (block, (parts, deltas)) in decoder.blocks.iter().zip(&blocks).enumerate() {
            let layers = [&parts.qkv, &parts.out, &parts.up, &parts.down];
            for ((layer, delta), name) in layers.into_iter().zip(deltas).zip(NAMES) {
                let Some(delta) = delta else { continue };
                let ranks = delta.ups.iter().map(|(_, up)| up.in_features()).sum::<usize>();
                let outputs = layer.out_features();
                let end = delta.ups.iter().map(|(first, up)| first.saturating_add(up.out_features())).max();
                for (found, expected) in
                    [(delta.down.in_features(), layer.in_features()), (ranks, delta.down.out_features())]
                {
                    if found != expected {
                        return Err(DecoderError::Features { block, name, found, expected });
                    }
                }
                if let Some(found) = end.filter(|&end| end > outputs) {
                    return Err(DecoderError::Features { block, name, found, expected: outputs });
                }
            }
            if deltas[Part::Up as usize].is_some() && !parts.is_gated && parts.activation != Activation::None
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

impl AdapterTokens<'_> {
    /// Whether the adapter is this decoder's and the tokens are the step's.
    pub(super) fn check(&self, num_blocks: usize, num_tokens: usize) -> Result<(), DecoderError> {
        let found = self.adapter.blocks.len();
        if found != num_blocks {
            return Err(DecoderError::Block { index: num_blocks.saturating_sub(1), found });
        }
        match self.tokens.iter().find(|&&token| token as usize >= num_tokens) {
            Some(&token) => Err(DecoderError::Token { token, num_tokens }),
            None => Ok(()),
        }
    }
}

/// Adapters add to the outputs of a block's layer.
///
/// # Arguments
///
/// * `x`: the layer's inputs of all tokens.
/// * `out`: its outputs.
pub(super) fn add_adapters<E: Element>(
    adapters: &[AdapterTokens<'_>],
    block: usize,
    part: Part,
    x: TokenRows<'_, E>,
    threads: &Threads,
    out: &mut OutRows<'_, E>,
) -> Result<(), LinearError> {
    let of_layer = adapters.iter().filter_map(|run| {
        let delta = run.adapter.blocks.get(block)?[part as usize].as_ref()?;
        (!run.tokens.is_empty()).then_some((delta, run.tokens.as_slice()))
    });
    let (together, apart): (Vec<_>, Vec<_>) = of_layer
        .partition(|(_, tokens)| is_stretch(tokens) && (adapters.len() == 1 || tokens.len() >= MANY_ROWS));
    for (delta, tokens) in together {
        add_to_stretch(delta, tokens, TokenRows { ..x }, threads, out)?;
    }
    let work = apart.iter().map(|(delta, tokens)| tokens.len() * size_of_delta(delta)).sum::<usize>();
    let sums: Vec<_> = apart.iter().map(|_| Mutex::new(Ok(Vec::new()))).collect();
    threads.for_each(apart.len(), work >= MIN_SHARED_WORK, |run| {
        let (delta, tokens) = apart[run];
        *sums[run].lock().unwrap_or_else(PoisonError::into_inner) = product(delta, tokens, TokenRows { ..x });
    });
    for ((delta, tokens), sums) in apart.into_iter().zip(sums) {
        let sums = sums.into_inner().unwrap_or_else(PoisonError::into_inner)?;
        let width = sums.len() / tokens.len();
        for (&token, mut sums) in tokens.iter().zip(sums.chunks_exact(width.max(1))) {
            for (first, up) in &delta.ups {
                let (own, rest) = sums.split_at(up.out_features());
                let to = &mut out.data[token as usize * out.stride + first..][..own.len()];
                to.iter_mut().zip(own).for_each(|(to, sum)| *to = E::narrow(to.widen() + sum));
                sums = rest;
            }
        }
    }
    Ok(())
}

fn is_stretch(tokens: &[u32]) -> bool {
    tokens.windows(2).all(|pair| pair[1] == pair[0] + 1)
}

fn size_of_delta(delta: &LayerDelta) -> usize {
    let size = |layer: &PackedLinear| layer.out_features() * layer.in_features();
    size(&delta.down) + delta.ups.iter().map(|(_, up)| size(up)).sum::<usize>()
}

/// The products of tokens side by side, added where the layer's outputs are.
fn add_to_stretch<E: Element>(
    delta: &LayerDelta,
    tokens: &[u32],
    x: TokenRows<'_, E>,
    threads: &Threads,
    out: &mut OutRows<'_, E>,
) -> Result<(), LinearError> {
    let (first, num_rows) = (tokens[0] as usize, tokens.len());
    let ranks = delta.down.out_features();
    let mut inner = vec![0.0f32; num_rows * ranks];
    let x = TokenRows { data: &x.data[first * x.stride..], stride: x.stride };
    let to = OutRows { data: &mut inner[..], stride: ranks };
    linear(&delta.down, x, num_rows, &Epilogue::default(), threads, to)?;
    let epilogue = Epilogue { activation: Activation::None, residual: Residual::Out };
    let mut column = 0;
    for (output, up) in &delta.ups {
        let from = TokenRows { data: &inner[column..], stride: ranks };
        let to = OutRows { data: &mut out.data[first * out.stride + output..], stride: out.stride };
        linear(up, from, num_rows, &epilogue, threads, to)?;
        column += up.in_features();
    }
    Ok(())
}

/// The products of some tokens, `[tokens, outputs of all stretches]`, by this thread alone.
fn product<E: Element>(
    delta: &LayerDelta,
    tokens: &[u32],
    x: TokenRows<'_, E>,
) -> Result<Vec<f32>, LinearError> {
    let num_rows = tokens.len();
    let (inputs, ranks) = (delta.down.in_features(), delta.down.out_features());
    let width = delta.ups.iter().map(|(_, up)| up.out_features()).sum::<usize>();
    let alone = Threads::alone();
    let gathered: Vec<E> = tokens
        .iter()
        .flat_map(|&token| x.data[token as usize * x.stride..][..inputs].iter().copied())
        .collect();
    let (mut inner, mut sums) = (vec![0.0f32; num_rows * ranks], vec![0.0f32; num_rows * width]);
    let x = TokenRows { data: &gathered[..], stride: inputs };
    let to = OutRows { data: &mut inner[..], stride: ranks };
    linear(&delta.down, x, num_rows, &Epilogue::default(), &alone, to)?;
    let (mut column, mut output) = (0, 0);
    for (_, up) in &delta.ups {
        let from = TokenRows { data: &inner[column..], stride: ranks };
        let to = OutRows { data: &mut sums[output..], stride: width };
        linear(up, from, num_rows, &Epilogue::default(), &alone, to)?;
        column += up.in_features();
        output += up.out_features();
    }
    Ok(sums)
}
