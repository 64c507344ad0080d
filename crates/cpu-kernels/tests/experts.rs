//! The experts of a block against their parts called one by one, a token at a time, bit for bit, and what does not fit.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/numbers.rs"]
mod numbers;
#[path = "common/plain_block.rs"]
mod plain_block;

use std::sync::Arc;

use cpu_kernels::{
    Activation, Decoder, DecoderAdapter, DecoderBlock, DecoderError, DecoderNorm, DenseMlp, Element,
    Epilogue, ExpertMlp, Heads, Kernel, LayerDelta, Matrix, Mlp, Norm, NormKind, OutRows, PackedLinear,
    Quantized, Residual, Routing, ScaleForm, Scores, SharedMlp, Sum, Threads, TokenRows, Up, WeightKind,
    ZeroForm, apply_gates, bf16, linear, norm,
};
use numbers::{narrowed, numbers};
use plain_block::plain_block;

const HEADS: Heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim: 16 };
const WIDTH: usize = 72;
const INNER: usize = 40;
const NUM_EXPERTS: usize = 7;

fn layer(seed: u64, outputs: usize, inputs: usize, kind: WeightKind) -> Arc<PackedLinear> {
    let mut packed = PackedLinear::new(outputs, inputs, kind).unwrap();
    let weight = numbers(seed, outputs * inputs);
    packed.pack_rows(0, Matrix::new(&weight, outputs, inputs).unwrap(), &Threads::alone()).unwrap();
    Arc::new(packed)
}

fn expert(seed: u64, kind: WeightKind) -> DenseMlp {
    DenseMlp {
        up: layer(seed, 2 * INNER, WIDTH, kind),
        is_gated: true,
        activation: Activation::Silu,
        down: layer(seed + 1, WIDTH, INNER, kind),
    }
}

/// As gpt-oss has them: biases everywhere, in the router, too, and gates of its own.
fn biased_experts(kind: WeightKind) -> ExpertMlp {
    let biased = |seed, outputs: usize, inputs, kind| {
        let mut layer = Arc::into_inner(layer(seed, outputs, inputs, kind)).unwrap();
        layer.set_bias(Some(&numbers(seed + 200, outputs))).unwrap();
        Arc::new(layer)
    };
    let expert = |seed| DenseMlp {
        up: biased(seed, 2 * INNER, WIDTH, kind),
        is_gated: true,
        activation: Activation::ClampedSilu,
        down: biased(seed + 1, WIDTH, INNER, kind),
    };
    ExpertMlp {
        router: biased(50, NUM_EXPERTS, WIDTH, WeightKind::F32),
        experts: (0..NUM_EXPERTS as u64).map(|i| expert(60 + 2 * i)).collect(),
        routing: Routing::softmax(4, true),
        shared: None,
    }
}

fn experts(kind: WeightKind, num_chosen: usize, is_normed: bool) -> ExpertMlp {
    ExpertMlp {
        router: layer(50, NUM_EXPERTS, WIDTH, WeightKind::F32),
        experts: (0..NUM_EXPERTS as u64).map(|i| expert(60 + 2 * i, kind)).collect(),
        routing: Routing::softmax(num_chosen, is_normed),
        shared: None,
    }
}

/// As GLM-4.5 has it: sigmoids with a bias of the choice, a factor, and an MLP for all tokens; perhaps with a gate, as Qwen2 has.
fn shared_experts(kind: WeightKind, has_gate: bool) -> ExpertMlp {
    let (shared_inner, plain) = (56, experts(kind, 3, true));
    ExpertMlp {
        routing: Routing {
            scores: Scores::Sigmoid,
            bias: numbers(80, NUM_EXPERTS),
            scale: 2.5,
            is_wide: true,
            ..plain.routing
        },
        shared: Some(SharedMlp {
            mlp: DenseMlp {
                up: layer(81, 2 * shared_inner, WIDTH, kind),
                is_gated: true,
                activation: Activation::Silu,
                down: layer(82, WIDTH, shared_inner, kind),
            },
            gate: has_gate.then(|| layer(83, 1, WIDTH, WeightKind::F32)),
        }),
        ..plain
    }
}

fn block(mlp: Mlp) -> DecoderBlock {
    let norm =
        |seed| DecoderNorm { kind: NormKind::Rms, weight: numbers(seed, WIDTH), bias: None, eps: 1e-5 };
    let (qkv, out) = (layer(2, 128, WIDTH, WeightKind::F32), layer(3, WIDTH, 64, WeightKind::F32));
    plain_block([norm(1), norm(4)], [qkv, out], mlp)
}

fn product<E: Element>(layer: &PackedLinear, x: &[E]) -> Vec<E> {
    let mut out = vec![E::narrow(0.0); layer.out_features()];
    let (rows, stride) = (TokenRows { data: x, stride: x.len() }, out.len());
    let to = OutRows { data: &mut out, stride };
    let epilogue = Epilogue { activation: Activation::None, residual: Residual::None };
    linear(layer, rows, 1, &epilogue, &Threads::alone(), to).unwrap();
    out
}

/// The stream of one token after the block's MLP.
fn one_token<E: Element>(block: &DecoderBlock, adds: bool, stream: &[E]) -> Vec<E> {
    let Mlp::Experts(mlp) = &block.mlp else { panic!("the block has experts") };
    let (parts, kernel, threads) =
        (block.mlp_norm.as_ref().unwrap(), Kernel::best_for_products(), &Threads::alone());
    let parts = Norm { kind: parts.kind, weight: &parts.weight, bias: None, eps: parts.eps };
    let mut normed = vec![E::narrow(0.0); WIDTH];
    let (from, to) =
        (TokenRows { data: stream, stride: WIDTH }, OutRows { data: &mut normed, stride: WIDTH });
    norm(&parts, from, 1, Sum::None, kernel, threads, to).unwrap();

    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    let routing = &mlp.routing;
    let logits: Vec<f32> = if routing.is_wide {
        product(&mlp.router, &normed.iter().map(|x| x.widen()).collect::<Vec<f32>>())
    } else {
        product(&mlp.router, &normed).iter().map(|x| x.widen()).collect()
    };
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let all: f32 = logits.iter().map(|x| (x - largest).exp()).sum();
    let scores: Vec<f32> = match routing.scores {
        Scores::Softmax => logits.iter().map(|x| (x - largest).exp() / all).collect(),
        Scores::Sigmoid => logits.iter().map(|&x| sigmoid(x)).collect(),
    };
    let key = |i: usize| if routing.bias.is_empty() { logits[i] } else { scores[i] + routing.bias[i] };
    let mut chosen: Vec<usize> = (0..NUM_EXPERTS).collect();
    chosen.sort_by(|&a, &b| key(b).partial_cmp(&key(a)).unwrap());
    chosen.truncate(routing.num_chosen);
    let mut weights: Vec<f32> = chosen.iter().map(|&i| scores[i]).collect();
    if routing.is_normed {
        let sum: f32 = weights.iter().sum();
        for weight in &mut weights {
            *weight /= sum;
        }
    }
    let mut weighed: Vec<(usize, f32)> =
        chosen.into_iter().zip(weights.into_iter().map(|weight| weight * routing.scale)).collect();
    weighed.sort_by_key(|&(expert, _)| expert);

    let mut total = [0.0_f32; WIDTH];
    if let Some(SharedMlp { mlp, gate }) = &mlp.shared {
        let mut inner = product(&mlp.up, &normed);
        let row = inner.len();
        apply_gates(&mut inner, row, mlp.activation, kernel, threads);
        let weight = gate.as_ref().map_or(1.0, |gate| sigmoid(product(gate, &normed)[0].widen()));
        let out = product(&mlp.down, &inner[..row / 2]);
        total.iter_mut().zip(out).for_each(|(sum, x)| *sum = weight * x.widen());
    }
    for (expert, weight) in weighed {
        let expert = &mlp.experts[expert];
        let mut inner = product(&expert.up, &normed);
        apply_gates(&mut inner, 2 * INNER, expert.activation, kernel, threads);
        let out = product(&expert.down, &inner[..INNER]);
        total.iter_mut().zip(out).for_each(|(sum, x)| *sum += weight * x.widen());
    }
    stream.iter().zip(total).map(|(x, y)| E::narrow(if adds { x.widen() + y } else { y })).collect()
}

fn four_bits(rounds_activations: bool) -> WeightKind {
    let (scales, zeros) = (ScaleForm::F16, ZeroForm::Middle);
    WeightKind::Quantized(Quantized { bits: 4, group_size: 32, scales, zeros, rounds_activations })
}

fn check<E: Element>(kind: WeightKind, num_chosen: usize, is_normed: bool, num_threads: usize) {
    check_mlp::<E>(&|| experts(kind, num_chosen, is_normed), num_threads, &format!("{kind:?}, {num_chosen}"));
}

fn check_mlp<E: Element>(make: &dyn Fn() -> ExpertMlp, num_threads: usize, what: &str) {
    let threads = Threads::new(num_threads).unwrap();
    let found = Decoder::new(vec![block(Mlp::Experts(make()))], None, HEADS).unwrap();
    let parts = block(Mlp::Experts(make()));
    // The last is more rows of experts than are computed at once.
    for num_tokens in [1, 2, 9, 30, 1100] {
        for adds in [true, false] {
            let mut hidden: Vec<E> = narrowed(40 + num_tokens as u64, num_tokens * WIDTH);
            let expected: Vec<u32> = hidden
                .chunks(WIDTH)
                .flat_map(|stream| one_token(&parts, adds, stream))
                .map(|x| x.widen().to_bits())
                .collect();
            found.multiply(0, adds, num_tokens, &mut hidden, &threads).unwrap();
            let bits: Vec<u32> = hidden.iter().map(|x| x.widen().to_bits()).collect();
            assert!(bits == expected, "{what} of {NUM_EXPERTS}, {num_tokens} tokens");
        }
    }
}

#[test]
fn the_experts_give_what_their_parts_give_for_each_token_alone() {
    for kind in [
        WeightKind::F32,
        WeightKind::Bf16,
        WeightKind::F16,
        WeightKind::Int8 { group_size: 16 },
        WeightKind::W8A8 { group_size: 32 },
        four_bits(true),
        four_bits(false),
    ] {
        check::<f32>(kind, 3, true, 2);
        check::<bf16>(kind, 3, true, 2);
    }
    check::<f32>(WeightKind::W8A8 { group_size: 32 }, 1, false, 3);
    check::<bf16>(WeightKind::F32, NUM_EXPERTS, false, 1);
}

#[test]
fn experts_and_a_router_with_biases_do_so_too() {
    for kind in [WeightKind::F32, WeightKind::Bf16, WeightKind::W8A8 { group_size: 32 }, four_bits(true)] {
        check_mlp::<f32>(&|| biased_experts(kind), 2, &format!("{kind:?} with biases"));
        check_mlp::<bf16>(&|| biased_experts(kind), 1, &format!("{kind:?} with biases"));
    }
    let (with, without) = (biased_experts(WeightKind::F32), experts(WeightKind::F32, 4, true));
    let stream = numbers(3, WIDTH);
    let of = |mlp| one_token(&block(Mlp::Experts(mlp)), false, &stream);
    assert_ne!(of(with), of(without));
}

#[test]
fn experts_with_an_mlp_for_all_tokens_do_so_too() {
    for kind in [WeightKind::F32, WeightKind::Bf16, WeightKind::W8A8 { group_size: 32 }, four_bits(true)] {
        for has_gate in [false, true] {
            let what = format!("{kind:?} with a shared MLP, a gate: {has_gate}");
            check_mlp::<f32>(&|| shared_experts(kind, has_gate), 2, &what);
            check_mlp::<bf16>(&|| shared_experts(kind, has_gate), 3, &what);
        }
    }
    let stream = numbers(3, WIDTH);
    let of = |change: fn(&mut ExpertMlp)| {
        let mut mlp = shared_experts(WeightKind::F32, true);
        change(&mut mlp);
        one_token::<f32>(&block(Mlp::Experts(mlp)), false, &stream)
    };
    let whole = of(|_| ());
    for without in [
        of(|mlp| mlp.shared = None),
        of(|mlp| mlp.shared.as_mut().unwrap().gate = None),
        of(|mlp| mlp.routing.bias.clear()),
        of(|mlp| mlp.routing.scale = 1.0),
        of(|mlp| mlp.routing.scores = Scores::Softmax),
    ] {
        assert_ne!(without, whole);
    }
}

#[test]
fn experts_whose_weights_are_of_several_kinds_are_computed_one_by_one() {
    let mixed = || {
        let mut mlp = experts(WeightKind::W8A8 { group_size: 32 }, 4, true);
        mlp.experts[2] = expert(90, WeightKind::Bf16);
        mlp.experts[5] = expert(92, WeightKind::F32);
        block(Mlp::Experts(mlp))
    };
    let decoder = Decoder::new(vec![mixed()], None, HEADS).unwrap();
    for num_tokens in [1, 12] {
        let mut hidden: Vec<f32> = numbers(7, num_tokens * WIDTH);
        let expected: Vec<f32> =
            hidden.chunks(WIDTH).flat_map(|stream| one_token(&mixed(), true, stream)).collect();
        decoder.multiply(0, true, num_tokens, &mut hidden, &Threads::new(2).unwrap()).unwrap();
        assert_eq!(hidden, expected);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let make = |change: fn(&mut ExpertMlp)| {
        let mut mlp = experts(WeightKind::F32, 2, true);
        change(&mut mlp);
        Decoder::new(vec![block(Mlp::Experts(mlp))], None, HEADS)
    };
    let wrong = |name, found, expected| DecoderError::Features { block: 0, name, found, expected };
    let f32s = WeightKind::F32;
    let cases: [(fn(&mut ExpertMlp), _); 9] = [
        (|mlp| mlp.experts.clear(), DecoderError::NoExperts { block: 0 }),
        (|mlp| mlp.routing.num_chosen = 0, DecoderError::Chosen { block: 0, num_chosen: 0, num_experts: 7 }),
        (|mlp| mlp.routing.num_chosen = 8, DecoderError::Chosen { block: 0, num_chosen: 8, num_experts: 7 }),
        (|mlp| mlp.router = layer(1, 6, WIDTH, WeightKind::F32), wrong("the router", 6, 7)),
        (|mlp| mlp.router = layer(1, 7, 70, WeightKind::F32), wrong("the input of the router", 70, 72)),
        (|mlp| mlp.experts[3].up = layer(1, 60, WIDTH, WeightKind::F32), wrong("up", 60, 80)),
        (|mlp| mlp.experts[3].down = layer(1, 70, INNER, WeightKind::F32), wrong("down", 70, 72)),
        (|mlp| mlp.experts[3].activation = Activation::Relu, DecoderError::Unlike { block: 0, expert: 3 }),
        (
            |mlp| {
                mlp.experts[6].up = layer(1, 20, WIDTH, WeightKind::F32);
                mlp.experts[6].down = layer(1, WIDTH, 10, WeightKind::F32);
            },
            DecoderError::Unlike { block: 0, expert: 6 },
        ),
    ];
    for (change, expected) in cases {
        assert_eq!(make(change).unwrap_err(), expected);
    }
    let groups = |num_groups, num_chosen_groups| DecoderError::Groups {
        block: 0,
        num_groups,
        num_chosen_groups,
        num_chosen: 2,
        num_experts: 7,
    };
    let of_routing = |routing: Routing| {
        let mut mlp = shared_experts(f32s, true);
        mlp.routing = Routing { num_chosen: 2, ..routing };
        Decoder::new(vec![block(Mlp::Experts(mlp))], None, HEADS).unwrap_err()
    };
    // None, more than there are, sizes that differ, and groups of one expert.
    for (num_groups, num_chosen_groups) in [(0, 0), (1, 0), (1, 2), (2, 1), (7, 2), (usize::MAX, 1)] {
        let routing = Routing { num_groups, num_chosen_groups, ..Routing::softmax(2, true) };
        assert_eq!(of_routing(routing), groups(num_groups, num_chosen_groups));
    }
    let routing = Routing { bias: vec![0.0; 6], ..Routing::softmax(2, true) };
    assert_eq!(of_routing(routing), wrong("the bias of the router's choice", 6, 7));
    let of_shared = |change: fn(&mut SharedMlp)| {
        let mut mlp = shared_experts(f32s, true);
        mlp.shared.as_mut().map(change).unwrap();
        Decoder::new(vec![block(Mlp::Experts(mlp))], None, HEADS).unwrap_err()
    };
    let wrong_gate = of_shared(|shared| shared.gate = Some(layer(1, 2, WIDTH, WeightKind::F32)));
    assert_eq!(wrong_gate, wrong("the shared MLP's gate", 2, 1));
    let wrong_gate = of_shared(|shared| shared.gate = Some(layer(1, 1, 70, WeightKind::F32)));
    assert_eq!(wrong_gate, wrong("the input of the shared MLP's gate", 70, 72));
    let wrong_up = of_shared(|shared| shared.mlp.up = layer(1, 60, WIDTH, WeightKind::F32));
    assert_eq!(wrong_up, wrong("up", 60, 112));
    let ungated = of_shared(|shared| {
        (shared.mlp.is_gated, shared.mlp.up) = (false, layer(1, 56, WIDTH, WeightKind::F32));
    });
    assert_eq!(ungated, DecoderError::Shared { block: 0 });
    let next_to_attention = DecoderBlock { is_parallel: true, ..block(Mlp::Experts(experts(f32s, 2, true))) };
    assert_eq!(
        Decoder::new(vec![next_to_attention], None, HEADS).unwrap_err(),
        DecoderError::ExpertPlan { block: 0 }
    );

    let decoder = make(|_| ()).unwrap();
    let weight = numbers(1, 2 * WIDTH);
    let ups = [Up { first: 0, num_outputs: WIDTH, weight: &weight, gains: None }];
    let delta = Arc::new(LayerDelta::new(&numbers(2, 2 * INNER), INNER, &ups, false).unwrap());
    let error = DecoderAdapter::new(&decoder, vec![[None, None, None, Some(delta)]]).unwrap_err();
    assert_eq!(error, DecoderError::AdaptedExperts { block: 0, name: "down" });
    DecoderAdapter::new(&decoder, vec![[None, None, None, None]]).unwrap();
    // Those of the MLP that computes every token can be changed.
    let decoder = Decoder::new(vec![block(Mlp::Experts(shared_experts(f32s, true)))], None, HEADS).unwrap();
    let delta = |inputs| {
        let ups = [Up { first: 0, num_outputs: WIDTH, weight: &weight, gains: None }];
        Some(Arc::new(LayerDelta::new(&numbers(2, 2 * inputs), inputs, &ups, false).unwrap()))
    };
    DecoderAdapter::new(&decoder, vec![[None, None, delta(WIDTH), delta(56)]]).unwrap();
    let error = DecoderAdapter::new(&decoder, vec![[None, None, None, delta(INNER)]]).unwrap_err();
    assert_eq!(error, wrong("down", INNER, 56));
}
