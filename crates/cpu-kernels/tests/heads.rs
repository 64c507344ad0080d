//! Heads normed and turned, and gates, by every kernel that this machine has, against the same in 64 bits.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/numbers.rs"]
mod numbers;

use cpu_kernels::{
    Activation, Element, Heads, Kernel, Norm, NormKind, Rotary, Threads, apply_gates, bf16, prepare_heads,
};
use numbers::{narrowed, numbers};
use proptest::prelude::*;

fn assert_near<E: Element>(found: &[E], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let found = f64::from(found.widen());
        assert!(
            (found - expected).abs() <= tolerance * (1.0 + expected.abs()),
            "{what} {i}: {found}, {expected}"
        );
    }
}

/// A head's mean square is 1, then each feature has its factor.
fn normed(head: &[f64], weight: &[f32], round: impl Fn(f64) -> f64) -> Vec<f64> {
    let mean = head.iter().map(|x| x * x).sum::<f64>() / head.len() as f64;
    head.iter().zip(weight).map(|(x, &w)| round(x / (mean + 1e-6).sqrt() * f64::from(w))).collect()
}

fn turned(head: &mut [f64], cos: &[f32], sin: &[f32]) {
    let (half, before) = (cos.len() / 2, head.to_vec());
    for i in 0..cos.len() {
        let other = if i < half { before[i + half] } else { before[i - half] };
        head[i] = before[i] * f64::from(cos[i]) + other * f64::from(sin[i]);
    }
}

fn check_heads<E: Element>(
    num_tokens: usize,
    heads: Heads,
    width: usize,
    (is_normed, is_turned): (bool, bool),
    seed: u64,
    tolerance: f64,
) {
    let threads = Threads::new(2).unwrap();
    let dim = heads.head_dim;
    let row = (heads.num_heads + 2 * heads.num_kv_heads) * dim;
    let given: Vec<E> = narrowed(seed, num_tokens * row);
    let weights = [numbers(seed + 1, dim), numbers(seed + 2, dim)];
    let norms = weights.each_ref().map(|weight| Norm { kind: NormKind::Rms, weight, bias: None, eps: 1e-6 });
    let (cos, sin) = (numbers(seed + 3, num_tokens * width), numbers(seed + 4, num_tokens * width));
    let rotary = Rotary { cos: &cos, sin: &sin, width };
    let round = |x: f64| f64::from(E::narrow(x as f32).widen());
    let mut expected: Vec<f64> = given.iter().map(|x| f64::from(x.widen())).collect();
    for (token, row) in expected.chunks_mut(row).enumerate() {
        for (index, head) in row.chunks_mut(dim).enumerate().take(heads.num_heads + heads.num_kv_heads) {
            if is_normed {
                let weight = &weights[usize::from(index >= heads.num_heads)];
                head.copy_from_slice(&normed(head, weight, round));
            }
            if is_turned {
                let place = token * width..(token + 1) * width;
                turned(head, &cos[place.clone()], &sin[place]);
            }
        }
    }
    for kernel in Kernel::available() {
        let mut found = given.clone();
        let (norms, rotary) = (is_normed.then_some(&norms), is_turned.then_some(&rotary));
        prepare_heads(&mut found, num_tokens, heads, norms, rotary, kernel, &threads).unwrap();
        assert_near(&found, &expected, tolerance, kernel.name());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn heads_are_normed_and_turned(
        num_tokens in 0_usize..40, num_kv_heads in 1_usize..4, group in 1_usize..4, half in 1_usize..40,
        rest in 0_usize..20, what in any::<(bool, bool)>(), seed in any::<u32>(),
    ) {
        let heads = Heads { num_heads: num_kv_heads * group, num_kv_heads, head_dim: 2 * half + rest };
        check_heads::<f32>(num_tokens, heads, 2 * half, what, u64::from(seed), 1e-5);
        check_heads::<bf16>(num_tokens, heads, 2 * half, what, u64::from(seed), 2e-2);
    }

    #[test]
    fn gates_multiply_features(num_rows in 0_usize..20, size in 1_usize..2000, seed in any::<u32>()) {
        let threads = Threads::new(2).unwrap();
        let given: Vec<f32> = narrowed(u64::from(seed), num_rows * 2 * size);
        for kernel in Kernel::available() {
            let mut found = given.clone();
            apply_gates(&mut found, 2 * size, Activation::Silu, kernel, &threads);
            for (row, given) in found.chunks(2 * size).zip(given.chunks(2 * size)) {
                let (gates, features) = given.split_at(size);
                let expected: Vec<f64> = gates
                    .iter()
                    .zip(features)
                    .map(|(&gate, &feature)| f64::from(gate) / (1.0 + f64::from(-gate).exp()) * f64::from(feature))
                    .collect();
                assert_near(&row[..size], &expected, 1e-5, kernel.name());
                prop_assert_eq!(&row[size..], features, "features are only read");
            }
        }
    }
}

/// gpt-oss cuts gates at 7, features at 7 and −7, and adds 1 to these; NaN stays NaN.
#[test]
fn clamped_gates_multiply_clamped_features_and_one() {
    let (num_rows, size, threads) = (5, 37, Threads::new(2).unwrap());
    let mut given: Vec<f32> = numbers(8, num_rows * 2 * size).iter().map(|x| 12.0 * x).collect();
    // Gates of one row, features of another, where minus infinity is just a small number.
    for (i, x) in [f32::NAN, 7.0, -7.0, f32::INFINITY, -90.0, f32::NEG_INFINITY].into_iter().enumerate() {
        given[2 * size + i] = x.max(-90.0);
        given[5 * size + i] = x;
    }
    given[2 * size] = f32::NAN;
    for kernel in Kernel::available() {
        let mut found = given.clone();
        apply_gates(&mut found, 2 * size, Activation::ClampedSilu, kernel, &threads);
        for (row, given) in found.chunks(2 * size).zip(given.chunks(2 * size)) {
            for ((&found, &gate), &feature) in row.iter().zip(&given[..size]).zip(&given[size..]) {
                let cut = |x: f32| if x > 7.0 { 7.0 } else { x };
                let (gate, feature) = (f64::from(cut(gate)), f64::from(-cut(-cut(feature))));
                let expected = gate / (1.0 + (-1.702 * gate).exp()) * (feature + 1.0);
                let is_near = (f64::from(found) - expected).abs() < 1e-5;
                let is_right = is_near || (found.is_nan() && expected.is_nan());
                assert!(is_right, "{}: {gate} and {feature} give {found}", kernel.name());
            }
        }
    }
}

/// Norms of all heads of queries together, and of all of keys.
#[test]
fn heads_are_normed_together() {
    let threads = Threads::new(2).unwrap();
    let heads = Heads { num_heads: 6, num_kv_heads: 3, head_dim: 10 };
    let (num_tokens, row) = (7, 12 * 10);
    let given: Vec<f32> = narrowed(3, num_tokens * row);
    let weights = [numbers(4, 60), numbers(5, 30)];
    let norms = weights.each_ref().map(|weight| Norm { kind: NormKind::Rms, weight, bias: None, eps: 1e-6 });
    for kernel in Kernel::available() {
        let mut found = given.clone();
        prepare_heads(&mut found, num_tokens, heads, Some(&norms), None, kernel, &threads).unwrap();
        for (found, given) in found.chunks(row).zip(given.chunks(row)) {
            let given: Vec<f64> = given.iter().map(|&x| f64::from(x)).collect();
            let mut expected = normed(&given[..60], &weights[0], |x| x);
            expected.extend(normed(&given[60..90], &weights[1], |x| x));
            expected.extend(&given[90..]);
            assert_near(found, &expected, 1e-5, kernel.name());
        }
    }
}

/// A row has the same bits alone and among others that are shared out.
#[test]
fn a_row_alone_has_the_same_bits_as_in_company() {
    let threads = Threads::new(3).unwrap();
    let heads = Heads { num_heads: 6, num_kv_heads: 2, head_dim: 64 };
    let (num_tokens, row) = (100, 10 * 64);
    let given: Vec<f32> = narrowed(3, num_tokens * row);
    let weight = numbers(4, 64);
    let norm = Norm { kind: NormKind::Rms, weight: &weight, bias: None, eps: 1e-6 };
    let (cos, sin) = (numbers(5, num_tokens * 64), numbers(6, num_tokens * 64));
    let kernel = Kernel::best_for_products();
    let mut together = given.clone();
    let rotary = Rotary { cos: &cos, sin: &sin, width: 64 };
    prepare_heads(&mut together, num_tokens, heads, Some(&[norm, norm]), Some(&rotary), kernel, &threads)
        .unwrap();
    let mut gated = together.clone();
    apply_gates(&mut gated, row, Activation::GeluTanh, kernel, &threads);
    for token in 0..num_tokens {
        let mut alone = given[token * row..(token + 1) * row].to_vec();
        let place = token * 64..(token + 1) * 64;
        let rotary = Rotary { cos: &cos[place.clone()], sin: &sin[place], width: 64 };
        prepare_heads(&mut alone, 1, heads, Some(&[norm, norm]), Some(&rotary), kernel, &threads).unwrap();
        assert_eq!(alone, together[token * row..(token + 1) * row]);
        apply_gates(&mut alone, row, Activation::GeluTanh, kernel, &threads);
        assert_eq!(alone, gated[token * row..(token + 1) * row]);
    }
}
