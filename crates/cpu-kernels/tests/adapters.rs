//! Adapters inside the one call: each token gets its own adapter's products in any batch, and what does not fit.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/numbers.rs"]
mod numbers;
#[path = "common/plain_block.rs"]
mod plain_block;

use std::sync::Arc;

use cpu_kernels::{
    Activation, AdapterTokens, CacheLayout, Decoder, DecoderAdapter, DecoderError, DecoderNorm, DecoderOut,
    DenseMlp, Heads, LayerDelta, LinearError, Matrix, Mlp, NormKind, PackedLinear, RaggedBatch, Threads, Up,
    WeightKind,
};
use numbers::numbers;
use plain_block::plain_block;

const HEADS: Heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim: 16 };
const WIDTH: usize = 36;
const INNER: usize = 53;
const RANK: usize = 3;
const LAYOUT: CacheLayout = CacheLayout { num_blocks: 9, block_size: 4, num_kv_heads: 2, head_dim: 16 };
const NUM_TOKENS: usize = 5;

/// With `gains` its first outputs' weights are multiplied by them.
fn layer(seed: u64, outputs: usize, inputs: usize, gains: &[f32]) -> Arc<PackedLinear> {
    let mut packed = PackedLinear::new(outputs, inputs, WeightKind::F32).unwrap();
    let mut weight: Vec<f32> = numbers(seed, outputs * inputs).iter().map(|x| x * 0.3).collect();
    for (row, gain) in weight.chunks_mut(inputs).zip(gains) {
        for x in row {
            *x *= gain;
        }
    }
    packed.pack_rows(0, Matrix::new(&weight, outputs, inputs).unwrap(), &Threads::alone()).unwrap();
    Arc::new(packed)
}

fn decoder(is_gated: bool) -> Decoder {
    decoder_with(is_gated, &[])
}

fn decoder_with(is_gated: bool, gains: &[f32]) -> Decoder {
    let norm =
        |seed| DecoderNorm { kind: NormKind::Rms, weight: numbers(seed, WIDTH), bias: None, eps: 1e-5 };
    let block = |seed| {
        let mlp = DenseMlp {
            up: layer(seed + 4, if is_gated { 2 * INNER } else { INNER }, WIDTH, gains),
            is_gated,
            activation: Activation::Silu,
            down: layer(seed + 5, WIDTH, INNER, gains),
        };
        plain_block(
            [norm(seed), norm(seed + 3)],
            [layer(seed + 1, 128, WIDTH, gains), layer(seed + 2, WIDTH, 64, gains)],
            Mlp::Dense(mlp),
        )
    };
    Decoder::new(vec![block(10), block(20)], norm(30), HEADS).unwrap()
}

/// `[ups' ranks, inputs]` and `[outputs, RANK]` for stretches, which are first outputs and how many.
fn delta(seed: u64, inputs: usize, stretches: &[(usize, usize)]) -> Arc<LayerDelta> {
    delta_with(seed, inputs, stretches, &[])
}

/// With gains, from the layer's first output on, all outputs have some.
fn delta_with(seed: u64, inputs: usize, stretches: &[(usize, usize)], gains: &[f32]) -> Arc<LayerDelta> {
    let numbers = |seed, count| -> Vec<f32> { numbers(seed, count).iter().map(|x| x * 0.3).collect() };
    let down = numbers(seed, RANK * stretches.len() * inputs);
    let weights: Vec<_> =
        stretches.iter().zip(1..).map(|(&(_, outputs), part)| numbers(seed + part, outputs * RANK)).collect();
    let ups: Vec<_> = stretches
        .iter()
        .zip(&weights)
        .map(|(&(first, num_outputs), weight)| {
            let gains = gains.get(first..first + num_outputs);
            Up { first, num_outputs, weight, gains }
        })
        .collect();
    Arc::new(LayerDelta::new(&down, inputs, &ups, false).unwrap())
}

/// Of the keys and values alone in qkv, so that stretches begin within a row; of all of the other layers.
fn blocks(seed: u64) -> Vec<[Option<Arc<LayerDelta>>; 4]> {
    blocks_with(seed, &[])
}

fn blocks_with(seed: u64, gains: &[f32]) -> Vec<[Option<Arc<LayerDelta>>; 4]> {
    let delta = |seed, inputs, stretches: &[_]| delta_with(seed, inputs, stretches, gains);
    let block = |seed: u64| {
        [
            Some(delta(seed, WIDTH, &[(64, 32), (96, 32)])),
            Some(delta(seed + 10, 64, &[(0, WIDTH)])),
            Some(delta(seed + 20, WIDTH, &[(0, INNER), (INNER, INNER)])),
            Some(delta(seed + 30, INNER, &[(0, WIDTH)])),
        ]
    };
    vec![block(seed), block(seed + 100)]
}

/// The normed stream of five requests of one token.
fn run(decoder: &Decoder, adapters: &[AdapterTokens<'_>]) -> Result<Vec<Vec<f32>>, DecoderError> {
    let slots: Vec<i32> = (1..=NUM_TOKENS as i32).map(|block| 4 * block).collect();
    let starts: Vec<i32> = (0..=NUM_TOKENS as i32).collect();
    let tables: Vec<i32> = (1..=NUM_TOKENS as i32).collect();
    let batch = RaggedBatch::new(4, &starts, &[1; NUM_TOKENS], &tables, &slots).unwrap();
    let (mut hidden, mut out) = (numbers(1, NUM_TOKENS * WIDTH), vec![0.0; NUM_TOKENS * WIDTH]);
    let (mut first, mut second) = (vec![0.0; 2 * 9 * 4 * 2 * 16], vec![0.0; 2 * 9 * 4 * 2 * 16]);
    let caches = &mut [&mut first[..], &mut second[..]];
    let threads = Threads::new(2).unwrap();
    let end = DecoderOut::Stream(&mut out);
    decoder.run_adapted(&batch, &mut hidden, caches, &[0, 1], LAYOUT, &[], adapters, &threads, end)?;
    Ok(out.chunks_exact(WIDTH).map(<[f32]>::to_vec).collect())
}

fn tokens<'a>(adapter: &'a DecoderAdapter, tokens: &[u32]) -> AdapterTokens<'a> {
    AdapterTokens { adapter, tokens: tokens.to_vec() }
}

#[test]
fn a_token_has_the_same_bits_alone_side_by_side_and_among_others() {
    let decoder = decoder(true);
    let (one, two) = (
        DecoderAdapter::new(&decoder, blocks(1000)).unwrap(),
        DecoderAdapter::new(&decoder, blocks(2000)).unwrap(),
    );
    let base = run(&decoder, &[]).unwrap();
    let all = [0, 1, 2, 3, 4];
    let (all_one, all_two) =
        (run(&decoder, &[tokens(&one, &all)]).unwrap(), run(&decoder, &[tokens(&two, &all)]).unwrap());
    let mixed = run(&decoder, &[tokens(&one, &[0, 3]), tokens(&two, &[2, 4])]).unwrap();
    for token in 0..NUM_TOKENS {
        assert!(base[token] != all_one[token] && all_one[token] != all_two[token], "too little is added");
    }
    assert_eq!(mixed, [&all_one[0], &base[1], &all_two[2], &all_one[3], &all_two[4]].map(Clone::clone));
}

#[test]
fn gains_multiply_the_layers_own_product_and_nothing_else() {
    // Powers of two, whose products are exact: the same bits come from weights that were multiplied before. The queries have
    // no stretch, and so no gain.
    let mut gains: Vec<f32> = (0..128).map(|output| [0.5, 2.0, 1.0, 4.0][output % 4]).collect();
    gains[..64].fill(1.0);
    let (plain, multiplied) = (decoder(true), decoder_with(true, &gains));
    let with_gains = DecoderAdapter::new(&plain, blocks_with(1000, &gains)).unwrap();
    let without = DecoderAdapter::new(&plain, blocks(1000)).unwrap();
    let of_multiplied = DecoderAdapter::new(&multiplied, blocks(1000)).unwrap();
    let base = run(&plain, &[]).unwrap();
    let expected = run(&multiplied, &[tokens(&of_multiplied, &[0, 1, 2, 3, 4])]).unwrap();
    let plainly = run(&plain, &[tokens(&without, &[0, 1, 2, 3, 4])]).unwrap();
    let mixed = run(&plain, &[tokens(&with_gains, &[0, 3]), tokens(&without, &[2])]).unwrap();
    assert!((0..NUM_TOKENS).all(|token| plainly[token] != expected[token]), "the gains change too little");
    assert_eq!(mixed, [&expected[0], &base[1], &plainly[2], &expected[3], &base[4]].map(Clone::clone));
}

#[test]
fn what_does_not_fit_is_said() {
    let gated = decoder(true);
    let adapter = DecoderAdapter::new(&gated, blocks(1000)).unwrap();
    let error = run(&gated, &[tokens(&adapter, &[5])]).unwrap_err();
    assert_eq!(error, DecoderError::Token { token: 5, num_tokens: 5 });
    let mut few = blocks(1000);
    few.pop();
    assert!(matches!(DecoderAdapter::new(&gated, few).unwrap_err(), DecoderError::Block { .. }));
    let mut late = blocks(1000);
    late[1][0] = Some(delta(7, WIDTH, &[(64, 32), (97, 32)]));
    assert!(matches!(
        DecoderAdapter::new(&gated, late).unwrap_err(),
        DecoderError::Features { block: 1, name: "qkv", found: 129, expected: 128 }
    ));
    let error = run(&gated, &[tokens(&adapter, &[1, 3]), tokens(&adapter, &[0, 3])]).unwrap_err();
    assert_eq!(error, DecoderError::TwoAdapters { token: 3 });
    let error = run(&gated, &[tokens(&adapter, &[2, 2])]).unwrap_err();
    assert_eq!(error, DecoderError::Linear(LinearError::Unsorted { row: 2, before: 2 }));
    let mut only_up = blocks(1000);
    for block in &mut only_up {
        block[2] = Some(delta(7, WIDTH, &[(0, INNER)]));
    }
    let error = DecoderAdapter::new(&decoder(false), only_up).unwrap_err();
    assert_eq!(error, DecoderError::Ungated { block: 0 });
}
