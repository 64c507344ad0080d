//! Blocks in one call against their parts called one by one, bit for bit, and what does not fit.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/blocks.rs"]
mod blocks;
#[path = "common/numbers.rs"]
mod numbers;
#[path = "common/plain_block.rs"]
mod plain_block;

use blocks::{
    CACHE, HEADS, INNER, LAYOUT, WIDTH, block, dense, layer, only_post_normed_block, parallel_block,
    post_normed_block, rotary_block, some_norm,
};
use cpu_kernels::{
    Activation, AttentionOptions, CacheElement, CacheLayout, Decoder, DecoderBlock, DecoderError,
    DecoderNorm, DecoderOut, Element, Epilogue, Heads, Int8Head, Kernel, Logits, Mlp, Norm, NormKind,
    OutRows, PackedLinear, RaggedBatch, Residual, Rotary, RotaryError, Sum, Threads, TokenRows, WeightKind,
    apply_gates, attend, bf16, linear, norm, prepare_heads, reference::PlainHead, write_kv,
};
use numbers::{narrowed, numbers};

const AS_MANY_KEYS: Heads = Heads { num_kv_heads: 4, ..HEADS };

fn layout_of(heads: Heads) -> CacheLayout {
    CacheLayout { num_kv_heads: heads.num_kv_heads, ..LAYOUT }
}

/// Angles of some tokens, for the first features of a head.
struct Angles {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

const TURNED: usize = 10;

impl Angles {
    fn new(num_tokens: usize) -> Self {
        Self::seeded(90, num_tokens)
    }

    fn seeded(seed: u64, num_tokens: usize) -> Self {
        let angles = numbers(seed, num_tokens * TURNED);
        Self { cos: angles.iter().map(|x| x.cos()).collect(), sin: angles.iter().map(|x| x.sin()).collect() }
    }

    fn rotary(&self) -> Rotary<'_> {
        Rotary { cos: &self.cos, sin: &self.sin, width: TURNED }
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
    let width = parts.weight.len();
    let (from, to) = (TokenRows { data: x, stride: width }, OutRows { data: &mut out, stride: width });
    norm(&parts, from, x.len() / width, Sum::None, Kernel::best_for_products(), threads, to).unwrap();
    out
}

fn maybe_normed<E: Element>(parts: Option<&DecoderNorm>, x: &[E], threads: &Threads) -> Vec<E> {
    parts.map_or_else(|| x.to_vec(), |parts| apply_norm(parts, x, threads))
}

/// The stream with the normed result of a part.
fn added<E: Element>(parts: &DecoderNorm, x: &[E], stream: &[E]) -> Vec<E> {
    let normed = apply_norm(parts, x, &Threads::alone());
    normed.iter().zip(stream).map(|(x, y)| E::narrow(y.widen() + x.widen())).collect()
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

/// What a token's heads are turned by, of two kinds.
fn two_angles(num_tokens: usize) -> [Angles; 2] {
    [Angles::new(num_tokens), Angles::seeded(91, num_tokens)]
}

fn one_by_one<E: Element, C: CacheElement<E>>(
    blocks: &[DecoderBlock],
    last: &DecoderNorm,
    heads: Heads,
    batch: &RaggedBatch,
    hidden: &[E],
    caches: &mut [Vec<C>],
    threads: &Threads,
) -> Vec<E> {
    let mut hidden = hidden.to_vec();
    let angles = two_angles(batch.num_tokens());
    let kernel = Kernel::best_for_products();
    let (queries, keys) = (heads.num_heads * 16, heads.num_kv_heads * 16);
    let stride = queries + 2 * keys;
    for (block, cache) in blocks.iter().zip(caches) {
        let normed = maybe_normed(block.attention_norm.as_ref(), &hidden, threads);
        let mut qkv = product(&block.qkv, &normed, Activation::None, None, threads);
        if block.is_by_head {
            let given = qkv.clone();
            for (i, x) in qkv.iter_mut().enumerate() {
                let (token, part, head, feature) =
                    (i / stride, i % stride / queries, i % queries / 16, i % 16);
                *x = given[token * stride + (3 * head + part) * 16 + feature];
            }
        }
        let mut of_heads = block.head_norms.as_ref();
        if let Some([of_queries, of_keys]) = of_heads.filter(|[norm, _]| norm.weight.len() > heads.head_dim) {
            for row in qkv.chunks_mut(stride) {
                let (query, rest) = row.split_at_mut(queries);
                query.copy_from_slice(&apply_norm(of_queries, query, threads));
                let normed = apply_norm(of_keys, &rest[..keys], threads);
                rest[..keys].copy_from_slice(&normed);
            }
            of_heads = None;
        }
        let norms = of_heads.map(|norms| {
            norms.each_ref().map(|norm| Norm {
                kind: norm.kind,
                weight: &norm.weight,
                bias: None,
                eps: norm.eps,
            })
        });
        let rotary = block.rotary.map(|index| angles[index].rotary());
        let num_tokens = batch.num_tokens();
        prepare_heads(&mut qkv, num_tokens, heads, norms.as_ref(), rotary.as_ref(), kernel, threads).unwrap();
        let part = |first: usize| TokenRows { data: &qkv[first..], stride };
        write_kv(batch, part(queries), part(queries + keys), cache, layout_of(heads), kernel).unwrap();
        let mut attended = vec![E::narrow(0.0); batch.num_tokens() * 64];
        let options = AttentionOptions {
            sliding_window: block.sliding_window,
            soft_cap: block.soft_cap,
            sinks: &block.sinks,
            ..AttentionOptions::causal(block.scale)
        };
        let by = Kernel::best(16);
        attend(batch, part(0), 4, cache, layout_of(heads), &options, by, threads, &mut attended).unwrap();
        let before = hidden;
        hidden = match &block.post_norms {
            None => product(&block.out, &attended, Activation::None, Some(&before), threads),
            Some([of_attention, _]) => {
                let out = product(&block.out, &attended, Activation::None, None, threads);
                added(of_attention, &out, &before)
            }
        };
        let read = if block.is_parallel { &before } else { &hidden };
        let normed = maybe_normed(block.mlp_norm.as_ref(), read, threads);
        let Mlp::Dense(mlp) = &block.mlp else { panic!("no block here has experts") };
        let inner = if mlp.is_gated {
            let mut both = product(&mlp.up, &normed, Activation::None, None, threads);
            apply_gates(&mut both, 2 * INNER, mlp.activation, kernel, threads);
            both.chunks(2 * INNER).flat_map(|row| row[..INNER].to_vec()).collect()
        } else {
            product(&mlp.up, &normed, mlp.activation, None, threads)
        };
        hidden = match &block.post_norms {
            None => product(&mlp.down, &inner, Activation::None, Some(&hidden), threads),
            Some([_, of_mlp]) => {
                let out = product(&mlp.down, &inner, Activation::None, None, threads);
                added(of_mlp, &out, &hidden)
            }
        };
    }
    apply_norm(last, &hidden, threads)
}

fn check<E: Element, C: PlainHead + CacheElement<E>>(kind: WeightKind) {
    let in_turn = DecoderBlock { is_parallel: false, ..parallel_block(60, kind) };
    for (what, heads, blocks) in [
        ("one after the other", HEADS, [block(10, kind), rotary_block(20, kind), block(50, kind)]),
        ("side by side", AS_MANY_KEYS, [parallel_block(10, kind), in_turn, parallel_block(50, kind)]),
        (
            "normed after",
            HEADS,
            [post_normed_block(10, kind), rotary_block(20, kind), post_normed_block(50, kind)],
        ),
        (
            "normed only after",
            HEADS,
            [only_post_normed_block(10, kind), rotary_block(20, kind), only_post_normed_block(50, kind)],
        ),
    ] {
        check_blocks::<E, C>(blocks.into(), heads, &format!("{kind:?}, {what}"));
    }
}

/// Three blocks, to the bit, with what they leave in the caches.
fn check_blocks<E: Element, C: PlainHead + CacheElement<E>>(
    blocks: Vec<DecoderBlock>,
    heads: Heads,
    what: &str,
) {
    let threads = Threads::new(2).unwrap();
    let batch = batch();
    let last = some_norm(30, NormKind::Layer);
    let mut hidden: Vec<E> = narrowed(40, batch.num_tokens() * WIDTH);
    let size = CACHE / 2 * heads.num_kv_heads;
    let mut caches: [Vec<C>; 3] =
        [41, 42, 43].map(|seed| numbers(seed, size).chunks(16).flat_map(C::kept).collect());
    let mut expected_caches = caches.clone();
    let expected = one_by_one(&blocks, &last, heads, &batch, &hidden, &mut expected_caches, &threads);
    let decoder = Decoder::new(blocks, last, heads).unwrap();
    assert_eq!((decoder.num_blocks(), decoder.hidden_size(), decoder.heads()), (3, WIDTH, heads));
    let mut out = vec![E::narrow(f32::NAN); expected.len()];
    let [first, second, third] = &mut caches;
    let caches_of = &mut [&mut first[..], second, third];
    let angles = two_angles(batch.num_tokens());
    let rotary = angles.each_ref().map(Angles::rotary);
    let layout = layout_of(heads);
    decoder.run(&batch, &mut hidden, caches_of, &[0, 1, 2], layout, &rotary, &threads, &mut out).unwrap();
    assert_eq!(bits(&out), bits(&expected), "{what}");
    let features = |cache: &Vec<C>| -> Vec<u64> {
        cache.chunks(16 + C::SCALE_LEN).flat_map(C::features).map(f64::to_bits).collect()
    };
    for (found, expected) in caches.iter().zip(&expected_caches) {
        assert_eq!(features(found), features(expected), "{what}");
    }
}

fn bits<E: Element>(numbers: &[E]) -> Vec<u32> {
    numbers.iter().map(|x| x.widen().to_bits()).collect()
}

#[test]
fn one_call_gives_what_the_parts_give() {
    for kind in [
        WeightKind::F32,
        WeightKind::Bf16,
        WeightKind::Int8 { group_size: 16 },
        WeightKind::W8A8 { group_size: 16 },
    ] {
        check::<f32, f32>(kind);
        check::<bf16, bf16>(kind);
        check::<f32, bf16>(kind);
        check::<f32, Int8Head>(kind);
        check::<bf16, Int8Head>(kind);
    }
}

/// Logits of these tokens (None: of all), the rows that the blocks leave in the stream, and what they leave in the caches.
fn logits_of<E: Element>(
    decoder: &Decoder,
    heads: Heads,
    places: Option<&[i32]>,
    threads: &Threads,
) -> (Vec<u32>, Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let batch = batch();
    let mut hidden: Vec<E> = narrowed(40, batch.num_tokens() * WIDTH);
    let size = CACHE / 2 * heads.num_kv_heads;
    let mut caches: Vec<Vec<E>> = (0..decoder.num_blocks() as u64).map(|i| narrowed(41 + i, size)).collect();
    let mut of_blocks: Vec<_> = caches.iter_mut().map(Vec::as_mut_slice).collect();
    let own: Vec<_> = (0..of_blocks.len()).collect();
    let angles = two_angles(batch.num_tokens());
    let rotary = angles.each_ref().map(Angles::rotary);
    let num_rows = places.map_or(batch.num_tokens(), <[i32]>::len);
    let mut logits = vec![E::narrow(f32::NAN); num_rows * decoder.vocab_size().unwrap()];
    let out = DecoderOut::Logits(Logits { places, logits: &mut logits, ids: None });
    let layout = layout_of(heads);
    decoder
        .run_adapted(&batch, &mut hidden, &mut of_blocks, &own, layout, &rotary, &[], threads, out)
        .unwrap();
    let stream = hidden.chunks(WIDTH).map(bits).collect();
    (bits(&logits), stream, caches.iter().map(|cache| bits(cache)).collect())
}

/// Tokens without logits go no further in the last block than to their keys and values, which changes no other token's bits.
fn check_kept<E: Element>(kind: WeightKind) {
    let threads = Threads::new(2).unwrap();
    for (heads, blocks) in [
        (HEADS, vec![block(10, kind), rotary_block(20, kind)]),
        (HEADS, vec![rotary_block(20, kind)]),
        (AS_MANY_KEYS, vec![parallel_block(10, kind), parallel_block(50, kind)]),
        (HEADS, vec![rotary_block(20, kind), post_normed_block(50, kind)]),
    ] {
        let decoder = Decoder::new(blocks, some_norm(30, NormKind::Rms), heads).unwrap();
        let decoder = decoder.with_head(layer(70, 45, WIDTH, kind)).unwrap();
        let (all, stream, caches) = logits_of::<E>(&decoder, heads, None, &threads);
        for places in [&[6, 7][..], &[7], &[], &[0, 3, 8], &[0, 1, 2, 3, 4, 5, 6, 7, 8], &[7, 6], &[6, 6]] {
            let (found, rows, left) = logits_of::<E>(&decoder, heads, Some(places), &threads);
            let expected: Vec<u32> =
                places.iter().flat_map(|&place| &all[place as usize * 45..][..45]).copied().collect();
            assert_eq!(found, expected, "{kind:?}, logits of {places:?}");
            assert_eq!(left, caches, "{kind:?}, caches after logits of {places:?}");
            // Ascending ones were computed alone: their rows are the first.
            let is_kept = places.is_sorted_by(|a, b| a < b);
            for (row, &place) in places.iter().enumerate() {
                let row = if is_kept { row } else { place as usize };
                assert_eq!(rows[row], stream[place as usize], "{kind:?}, the stream after {places:?}");
            }
        }
    }
}

#[test]
fn logits_of_some_tokens_are_those_of_all() {
    for kind in [WeightKind::F32, WeightKind::Bf16, WeightKind::W8A8 { group_size: 16 }] {
        check_kept::<f32>(kind);
        check_kept::<bf16>(kind);
    }
}

/// The stream after all blocks, each in its two halves; where they do not add, the caller does.
fn by_halves(
    decoder: &Decoder,
    adds: bool,
    batch: &RaggedBatch,
    hidden: &[f32],
    threads: &Threads,
) -> Vec<f32> {
    let mut stream = hidden.to_vec();
    let mut caches = vec![narrowed::<f32>(41, CACHE); decoder.num_blocks()];
    let angles = Angles::new(batch.num_tokens());
    let add = |stream: &mut [f32], before: &[f32]| {
        if !adds {
            stream.iter_mut().zip(before).for_each(|(new, old)| *new += old);
        }
    };
    for (block, cache) in caches.iter_mut().enumerate() {
        let before = stream.clone();
        let rotary = &[angles.rotary()];
        decoder.attend(block, adds, batch, &mut stream, cache, LAYOUT, rotary, threads).unwrap();
        add(&mut stream, &before);
        let before = stream.clone();
        decoder.multiply(block, adds, batch.num_tokens(), &mut stream, threads).unwrap();
        add(&mut stream, &before);
    }
    stream
}

#[test]
fn halves_of_blocks_give_what_one_call_gives() {
    let threads = Threads::new(2).unwrap();
    let batch = batch();
    let blocks = vec![block(10, WeightKind::F32), rotary_block(20, WeightKind::F32)];
    let last = some_norm(30, NormKind::Layer);
    let decoder = Decoder::new(blocks, last.clone(), HEADS).unwrap();
    let hidden: Vec<f32> = narrowed(40, batch.num_tokens() * WIDTH);
    let stream = by_halves(&decoder, true, &batch, &hidden, &threads);
    let (mut whole, mut out) = (hidden.clone(), vec![0.0; hidden.len()]);
    let (mut first, mut second) = (narrowed::<f32>(41, CACHE), narrowed::<f32>(41, CACHE));
    let caches = &mut [&mut first[..], &mut second];
    let angles = Angles::new(batch.num_tokens());
    let rotary = &[angles.rotary()];
    decoder.run(&batch, &mut whole, caches, &[0, 1], LAYOUT, rotary, &threads, &mut out).unwrap();
    assert_eq!(stream, whole, "the stream after the last block");
    assert_eq!(apply_norm(&last, &stream, &threads), out);
    assert_ne!(stream, hidden);
    for (found, expected) in by_halves(&decoder, false, &batch, &hidden, &threads).iter().zip(&stream) {
        assert!((found - expected).abs() <= 1e-4 * expected.abs().max(1.0), "{found} is not {expected}");
    }

    let mut stream = hidden.clone();
    let error = DecoderError::Block { index: 2, found: 2 };
    assert_eq!(decoder.multiply(2, true, batch.num_tokens(), &mut stream, &threads).unwrap_err(), error);
    let error = decoder.attend(1, true, &batch, &mut stream, &mut first, LAYOUT, &[], &threads).unwrap_err();
    assert_eq!(error, DecoderError::NoRotary { index: 0, found: 0 });
    let side_by_side = DecoderBlock { is_parallel: true, ..block(10, WeightKind::F32) };
    for block in [side_by_side, post_normed_block(10, WeightKind::F32)] {
        let whole = Decoder::new(vec![block], last.clone(), HEADS).unwrap();
        let error = DecoderError::Halves { block: 0 };
        let cut = whole.attend(0, true, &batch, &mut stream, &mut first, LAYOUT, &[], &threads);
        assert_eq!(cut.unwrap_err(), error);
        assert_eq!(whole.multiply(0, true, batch.num_tokens(), &mut stream, &threads).unwrap_err(), error);
    }
    let short = &mut stream[1..];
    assert!(matches!(
        decoder.multiply(0, true, batch.num_tokens(), short, &threads).unwrap_err(),
        DecoderError::Linear(_)
    ));
}

#[test]
fn blocks_without_a_last_norm_give_the_stream_that_the_next_ones_take() {
    let threads = Threads::new(2).unwrap();
    let batch = batch();
    let last = some_norm(30, NormKind::Layer);
    let both = vec![block(10, WeightKind::F32), post_normed_block(20, WeightKind::F32)];
    let whole = Decoder::new(both, last.clone(), HEADS).unwrap();
    let first = Decoder::new(vec![block(10, WeightKind::F32)], None, HEADS).unwrap();
    let second = Decoder::new(vec![post_normed_block(20, WeightKind::F32)], last, HEADS).unwrap();
    let angles = Angles::new(batch.num_tokens());
    let rotary = &[angles.rotary(), angles.rotary()];
    let hidden: Vec<f32> = narrowed(40, batch.num_tokens() * WIDTH);
    let run = |decoder: &Decoder, num_blocks: usize, stream: &[f32]| {
        let (mut stream, mut out) = (stream.to_vec(), vec![0.0; stream.len()]);
        let mut caches: Vec<_> = (0..num_blocks).map(|_| narrowed::<f32>(41, CACHE)).collect();
        let mut caches: Vec<_> = caches.iter_mut().map(Vec::as_mut_slice).collect();
        let own: Vec<_> = (0..num_blocks).collect();
        decoder.run(&batch, &mut stream, &mut caches, &own, LAYOUT, rotary, &threads, &mut out).unwrap();
        (stream, out)
    };
    let (stream, handed_on) = run(&first, 1, &hidden);
    assert_eq!(stream, handed_on);
    assert_ne!(handed_on, hidden);
    assert_eq!(run(&second, 1, &handed_on).1, run(&whole, 2, &hidden).1);

    let (mut stream, mut cache) = (hidden.clone(), narrowed::<f32>(41, CACHE));
    let caches = &mut [&mut cache[..]];
    let short = &mut vec![0.0; hidden.len() - 1];
    let error = first.run(&batch, &mut stream, caches, &[0], LAYOUT, rotary, &threads, short).unwrap_err();
    assert_eq!(error, DecoderError::Out { found: hidden.len() - 1, expected: hidden.len() });
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
    let cases: [(fn(&mut DecoderBlock), _); 10] = [
        (
            |block| block.attention_norm.as_mut().unwrap().weight.truncate(3),
            wrong("the norm before attention", 3, 36),
        ),
        (
            |block| block.mlp_norm.as_mut().unwrap().weight.truncate(4),
            wrong("the norm before the MLP", 4, 36),
        ),
        (|block| block.qkv = layer(1, 127, 36, WeightKind::F32), wrong("qkv", 127, 128)),
        (|block| block.out = layer(1, 36, 60, WeightKind::F32), wrong("the input of out", 60, 64)),
        (|block| dense(&mut block.mlp).down = layer(1, 35, 53, WeightKind::F32), wrong("down", 35, 36)),
        (|block| dense(&mut block.mlp).up = layer(1, 106, 36, WeightKind::F32), wrong("up", 106, 53)),
        (|block| block.sinks = vec![0.0; 2], wrong("the sinks", 2, 4)),
        (|block| dense(&mut block.mlp).is_gated = true, wrong("up", 53, 106)),
        (
            |block| {
                let mut norms = rotary_block(1, WeightKind::F32).head_norms.unwrap();
                norms[1].weight.truncate(9);
                block.head_norms = Some(norms);
            },
            wrong("the norm of a key's head", 9, 16),
        ),
        (
            |block| {
                let mut norms = post_normed_block(1, WeightKind::F32).post_norms.unwrap();
                norms[1].weight.push(0.0);
                block.post_norms = Some(norms);
            },
            wrong("the norm after the MLP", 37, 36),
        ),
    ];
    for (change, expected) in cases {
        assert_eq!(make(change).unwrap_err(), expected);
    }
    assert_eq!(
        make(|block| {
            *block = DecoderBlock { is_parallel: true, ..post_normed_block(5, WeightKind::F32) };
        })
        .unwrap_err(),
        DecoderError::Parallel { block: 1 }
    );
    let without: [fn(&mut DecoderBlock); 2] =
        [|block| block.attention_norm = None, |block| block.mlp_norm = None];
    for change in without {
        assert_eq!(make(change).unwrap_err(), DecoderError::NoNorm { block: 1 });
    }
    let error = DecoderError::ByHead { block: 1, num_heads: 4, num_kv_heads: 2 };
    assert_eq!(make(|block| block.is_by_head = true).unwrap_err(), error);
    assert!(
        make(|block| dense(&mut block.mlp).up = layer(1, 10, 36, WeightKind::F32)).is_err(),
        "down has 53 inputs"
    );

    let decoder = make(|_| ()).unwrap();
    let batch = batch();
    let mut cache = vec![0.0_f32; CACHE];
    let run = |hidden: usize, cache: &mut [f32], of_block: &[usize], layout, out: usize| {
        let (mut hidden, mut out) = (vec![0.0; hidden], vec![0.0; out]);
        decoder.run(&batch, &mut hidden, &mut [cache], of_block, layout, &[], &threads, &mut out).map(|_| ())
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

#[test]
fn what_heads_are_turned_by_must_fit() {
    let threads = Threads::new(1).unwrap();
    let last = some_norm(1, NormKind::Layer);
    let decoder = Decoder::new(vec![rotary_block(4, WeightKind::F32)], last, HEADS).unwrap();
    let batch = batch();
    let angles = Angles::new(9);
    let run = |rotary: &[Rotary<'_>]| {
        let (mut hidden, mut out, mut cache) = (vec![0.0; 9 * WIDTH], vec![0.0; 9 * WIDTH], vec![0.0; CACHE]);
        decoder
            .run(&batch, &mut hidden, &mut [&mut cache], &[0], LAYOUT, rotary, &threads, &mut out)
            .map(|_| ())
    };
    run(&[angles.rotary()]).unwrap();
    assert_eq!(run(&[]).unwrap_err(), DecoderError::NoRotary { index: 0, found: 0 });
    for width in [0, 5, 18] {
        let error = DecoderError::Rotary(RotaryError::Width { width, head_dim: 16 });
        assert_eq!(run(&[Rotary { width, ..angles.rotary() }]).unwrap_err(), error);
    }
    let short = Rotary { sin: &angles.sin[1..], ..angles.rotary() };
    let error = RotaryError::Length { name: "sin", found: 89, expected: 90 };
    assert_eq!(run(&[short]).unwrap_err(), DecoderError::Rotary(error));
}
