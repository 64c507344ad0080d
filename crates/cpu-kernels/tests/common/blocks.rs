//! Blocks of a decoder with random weights.

use std::{num::NonZeroU32, sync::Arc};

use cpu_kernels::{
    Activation, CacheLayout, DecoderBlock, DecoderNorm, DenseMlp, Heads, Matrix, Mlp, NormKind, PackedLinear,
    Threads, WeightKind,
};

use crate::{numbers::numbers, plain_block::plain_block};

pub(crate) const HEADS: Heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim: 16 };
pub(crate) const WIDTH: usize = 36;
pub(crate) const INNER: usize = 53;
pub(crate) const LAYOUT: CacheLayout =
    CacheLayout { num_blocks: 9, block_size: 4, num_kv_heads: 2, head_dim: 16 };
pub(crate) const CACHE: usize = 2 * 9 * 4 * 2 * 16;

pub(crate) fn layer(seed: u64, outputs: usize, inputs: usize, kind: WeightKind) -> Arc<PackedLinear> {
    let threads = Threads::new(1).unwrap();
    let mut packed = PackedLinear::new(outputs, inputs, kind).unwrap();
    let weight = numbers(seed, outputs * inputs);
    packed.pack_rows(0, Matrix::new(&weight, outputs, inputs).unwrap(), &threads).unwrap();
    packed.set_bias(Some(&numbers(seed + 77, outputs))).unwrap();
    Arc::new(packed)
}

pub(crate) fn some_norm(seed: u64, kind: NormKind) -> DecoderNorm {
    let bias = (kind == NormKind::Layer).then(|| numbers(seed + 1, WIDTH));
    DecoderNorm { kind, weight: numbers(seed, WIDTH), bias, eps: 1e-5 }
}

pub(crate) fn mlp(seed: u64, kind: WeightKind, is_gated: bool, activation: Activation) -> Mlp {
    let up = layer(seed + 5, if is_gated { 2 * INNER } else { INNER }, WIDTH, kind);
    Mlp::Dense(DenseMlp { up, is_gated, activation, down: layer(seed + 6, WIDTH, INNER, kind) })
}

pub(crate) fn dense(mlp: &mut Mlp) -> &mut DenseMlp {
    match mlp {
        Mlp::Dense(mlp) => mlp,
        Mlp::Experts(_) => panic!("no block here has experts"),
    }
}

pub(crate) fn block(seed: u64, kind: WeightKind) -> DecoderBlock {
    plain_block(
        [some_norm(seed + 1, NormKind::Layer), some_norm(seed + 4, NormKind::Rms)],
        [layer(seed + 2, 128, WIDTH, kind), layer(seed + 3, WIDTH, 64, kind)],
        mlp(seed, kind, false, Activation::GeluTanh),
    )
}

/// With all that the other block does without.
pub(crate) fn rotary_block(seed: u64, kind: WeightKind) -> DecoderBlock {
    let head_norm = |seed| {
        let weight = numbers(seed, HEADS.head_dim);
        DecoderNorm { kind: NormKind::Rms, weight, bias: None, eps: 1e-5 }
    };
    DecoderBlock {
        head_norms: Some([head_norm(seed + 7), head_norm(seed + 8)]),
        rotary: Some(0),
        sliding_window: NonZeroU32::new(3),
        soft_cap: Some(2.0),
        sinks: numbers(seed + 12, HEADS.num_heads),
        mlp: mlp(seed, kind, true, Activation::Silu),
        ..block(seed, kind)
    }
}

/// As the block above, with norms after its parts and angles of its own.
pub(crate) fn post_normed_block(seed: u64, kind: WeightKind) -> DecoderBlock {
    DecoderBlock {
        rotary: Some(1),
        mlp: mlp(seed, kind, true, Activation::GeluTanh),
        post_norms: Some([seed + 9, seed + 11].map(|seed| some_norm(seed, NormKind::Rms))),
        ..rotary_block(seed, kind)
    }
}

/// As the block above, without norms before its parts, and with norms of all heads together.
pub(crate) fn only_post_normed_block(seed: u64, kind: WeightKind) -> DecoderBlock {
    let wide_norm = |seed, heads| {
        let weight = numbers(seed, heads * HEADS.head_dim);
        DecoderNorm { kind: NormKind::Rms, weight, bias: None, eps: 1e-5 }
    };
    DecoderBlock {
        attention_norm: None,
        mlp_norm: None,
        head_norms: Some([wide_norm(seed + 7, HEADS.num_heads), wide_norm(seed + 8, HEADS.num_kv_heads)]),
        ..post_normed_block(seed, kind)
    }
}

/// Attention and MLP side by side, and a projection that gives one head after the other.
pub(crate) fn parallel_block(seed: u64, kind: WeightKind) -> DecoderBlock {
    DecoderBlock {
        qkv: layer(seed + 2, 192, WIDTH, kind),
        is_by_head: true,
        rotary: Some(1),
        mlp_norm: Some(some_norm(seed + 4, NormKind::Layer)),
        is_parallel: true,
        mlp: mlp(seed, kind, false, Activation::GeluErf),
        ..block(seed, kind)
    }
}
