//! Blocks in one call against their parts called one by one, bit for bit, and what does not fit.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use cpu_kernels::{
    Activation, AttentionOptions, CacheLayout, Decoder, DecoderBlock, DecoderError, DecoderNorm, Element,
    Epilogue, Heads, Kernel, Matrix, Norm, NormKind, OutRows, PackedLinear, RaggedBatch, Residual, Sum,
    Threads, TokenRows, WeightKind, attend, bf16, linear, norm, write_kv,
};

const HEADS: Heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim: 16 };
const WIDTH: usize = 36;
const INNER: usize = 53;
const LAYOUT: CacheLayout = CacheLayout { num_blocks: 9, block_size: 4, num_kv_heads: 2, head_dim: 16 };
const CACHE: usize = 2 * 9 * 4 * 2 * 16;

/// Numbers between −1 and 1 that any seed gives again.
fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn layer(seed: u64, outputs: usize, inputs: usize, kind: WeightKind) -> Arc<PackedLinear> {
    let threads = Threads::new(1).unwrap();
    let mut packed = PackedLinear::new(outputs, inputs, kind).unwrap();
    let weight = numbers(seed, outputs * inputs);
    packed.pack_rows(0, Matrix::new(&weight, outputs, inputs).unwrap(), &threads).unwrap();
    packed.set_bias(Some(&numbers(seed + 77, outputs))).unwrap();
    Arc::new(packed)
}

fn some_norm(seed: u64, kind: NormKind) -> DecoderNorm {
    let bias = (kind == NormKind::Layer).then(|| numbers(seed + 1, WIDTH));
    DecoderNorm { kind, weight: numbers(seed, WIDTH), bias, eps: 1e-5 }
}

fn block(seed: u64, kind: WeightKind) -> DecoderBlock {
    DecoderBlock {
        attention_norm: some_norm(seed + 1, NormKind::Layer),
        qkv: layer(seed + 2, 128, WIDTH, kind),
        scale: 0.25,
        out: layer(seed + 3, WIDTH, 64, kind),
        mlp_norm: some_norm(seed + 4, NormKind::Rms),
        up: layer(seed + 5, INNER, WIDTH, kind),
        activation: Activation::GeluTanh,
        down: layer(seed + 6, WIDTH, INNER, kind),
    }
}

/// A prompt of 7 tokens, a decode of the 6th, a token of padding.
fn batch() -> RaggedBatch {
    let slots = [4, 5, 6, 7, 12, 13, 14, 21, -1];
    RaggedBatch::new(4, &[0, 7, 8], &[7, 6], &[1, 3, 4, 5], &slots).unwrap()
}

fn apply_norm<E: Element>(parts: &DecoderNorm, x: &[E], threads: &Threads) -> Vec<E> {
    let mut out = vec![E::narrow(0.0); x.len()];
    let parts = Norm { kind: parts.kind, weight: &parts.weight, bias: parts.bias.as_deref(), eps: parts.eps };
    let (from, to) = (TokenRows { data: x, stride: WIDTH }, OutRows { data: &mut out, stride: WIDTH });
    norm(&parts, from, x.len() / WIDTH, Sum::None, Kernel::best_for_products(), threads, to).unwrap();
    out
}

fn product<E: Element>(
    layer: &PackedLinear,
    x: &[E],
    activation: Activation,
    residual: Option<&[E]>,
    threads: &Threads,
) -> Vec<E> {
    let num_rows = x.len() / layer.in_features();
    let stride = layer.out_features();
    let mut out = vec![E::narrow(0.0); num_rows * stride];
    let residual = residual.map_or(Residual::None, |data| Residual::Rows(TokenRows { data, stride }));
    let rows = TokenRows { data: x, stride: layer.in_features() };
    let to = OutRows { data: &mut out, stride };
    linear(layer, rows, num_rows, &Epilogue { activation, residual }, threads, to).unwrap();
    out
}

fn one_by_one<E: Element>(
    blocks: &[DecoderBlock],
    last: &DecoderNorm,
    batch: &RaggedBatch,
    hidden: &[E],
    caches: &mut [Vec<E>],
    threads: &Threads,
) -> Vec<E> {
    let mut hidden = hidden.to_vec();
    for (block, cache) in blocks.iter().zip(caches) {
        let normed = apply_norm(&block.attention_norm, &hidden, threads);
        let qkv = product(&block.qkv, &normed, Activation::None, None, threads);
        let part = |first: usize| TokenRows { data: &qkv[first..], stride: 128 };
        write_kv(batch, part(64), part(96), cache, LAYOUT).unwrap();
        let mut attended = vec![E::narrow(0.0); batch.num_tokens() * 64];
        let options = AttentionOptions::causal(block.scale);
        let kernel = Kernel::best(16);
        attend(batch, part(0), 4, cache, LAYOUT, &options, kernel, threads, &mut attended).unwrap();
        hidden = product(&block.out, &attended, Activation::None, Some(&hidden), threads);
        let normed = apply_norm(&block.mlp_norm, &hidden, threads);
        let inner = product(&block.up, &normed, block.activation, None, threads);
        hidden = product(&block.down, &inner, Activation::None, Some(&hidden), threads);
    }
    apply_norm(last, &hidden, threads)
}

fn check<E: Element>(kind: WeightKind) {
    let threads = Threads::new(2).unwrap();
    let batch = batch();
    let blocks = vec![block(10, kind), block(20, kind)];
    let last = some_norm(30, NormKind::Layer);
    let narrowed = |seed, len| numbers(seed, len).into_iter().map(E::narrow).collect::<Vec<E>>();
    let mut hidden = narrowed(40, batch.num_tokens() * WIDTH);
    let mut caches = [narrowed(41, CACHE), narrowed(42, CACHE)];
    let mut expected_caches = caches.clone();
    let expected = one_by_one(&blocks, &last, &batch, &hidden, &mut expected_caches, &threads);
    let decoder = Decoder::new(blocks, last, HEADS).unwrap();
    assert_eq!((decoder.num_blocks(), decoder.hidden_size(), decoder.heads()), (2, WIDTH, HEADS));
    let mut out = vec![E::narrow(f32::NAN); expected.len()];
    let [first, second] = &mut caches;
    decoder.run(&batch, &mut hidden, &mut [first, second], &[0, 1], LAYOUT, &threads, &mut out).unwrap();
    let bits = |numbers: &[E]| numbers.iter().map(|x| x.widen().to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&out), bits(&expected), "{kind:?}");
    for (found, expected) in caches.iter().zip(&expected_caches) {
        assert_eq!(bits(found), bits(expected), "{kind:?}");
    }
}

#[test]
fn one_call_gives_what_the_parts_give() {
    for kind in [WeightKind::F32, WeightKind::Bf16, WeightKind::Int8 { group_size: 16 }] {
        check::<f32>(kind);
        check::<bf16>(kind);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let threads = Threads::new(1).unwrap();
    let last = || some_norm(1, NormKind::Layer);
    let make = |change: fn(&mut DecoderBlock)| {
        let mut second = block(5, WeightKind::F32);
        change(&mut second);
        Decoder::new(vec![block(4, WeightKind::F32), second], last(), HEADS)
    };
    let wrong = |name, found, expected| DecoderError::Features { block: 1, name, found, expected };
    let cases: [(fn(&mut DecoderBlock), _); 5] = [
        (|block| block.attention_norm.weight.truncate(3), wrong("the norm before attention", 3, 36)),
        (|block| block.mlp_norm.weight.truncate(4), wrong("the norm before the MLP", 4, 36)),
        (|block| block.qkv = layer(1, 127, 36, WeightKind::F32), wrong("qkv", 127, 128)),
        (|block| block.out = layer(1, 36, 60, WeightKind::F32), wrong("the input of out", 60, 64)),
        (|block| block.down = layer(1, 35, 53, WeightKind::F32), wrong("down", 35, 36)),
    ];
    for (change, expected) in cases {
        assert_eq!(make(change).unwrap_err(), expected);
    }
    assert!(make(|block| block.up = layer(1, 10, 36, WeightKind::F32)).is_err(), "down has 53 inputs");

    let decoder = make(|_| ()).unwrap();
    let batch = batch();
    let mut cache = vec![0.0_f32; CACHE];
    let run = |hidden: usize, cache: &mut [f32], of_block: &[usize], layout, out: usize| {
        let (mut hidden, mut out) = (vec![0.0; hidden], vec![0.0; out]);
        decoder.run(&batch, &mut hidden, &mut [cache], of_block, layout, &threads, &mut out).map(|_| ())
    };
    let all = 9 * WIDTH;
    run(all, &mut cache, &[0, 0], LAYOUT, all).unwrap();
    let error = DecoderError::Caches { found: 1, expected: 2 };
    assert_eq!(run(all, &mut cache, &[0], LAYOUT, all).unwrap_err(), error);
    let error = DecoderError::CacheIndex { index: 1, found: 1 };
    assert_eq!(run(all, &mut cache, &[0, 1], LAYOUT, all).unwrap_err(), error);
    let other = CacheLayout { num_kv_heads: 1, head_dim: 32, ..LAYOUT };
    assert!(matches!(
        run(all, &mut cache, &[0, 0], other, all).unwrap_err(),
        DecoderError::Cache { found_dim: 32, .. }
    ));
    for (hidden, out) in [(all - 1, all), (all, all - 1)] {
        assert!(matches!(
            run(hidden, &mut cache, &[0, 0], LAYOUT, out).unwrap_err(),
            DecoderError::Linear(_)
        ));
    }
    assert!(matches!(
        run(all, &mut cache[1..], &[0, 0], LAYOUT, all).unwrap_err(),
        DecoderError::Attention(_)
    ));
}
