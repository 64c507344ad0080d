//! Drawing against a plain reference in 64 bits that sorts every row, for each compiled form.

use cpu_kernels::{
    Threads,
    sampling::{Passes, RowOptions, draw},
};
use proptest::prelude::*;

const PLAIN: RowOptions =
    RowOptions { temperature: 1.0, top_n_sigma: 0.0, min_p: 0.0, top_k: 0, top_p: 1.0, uniform: 0.0 };

/// The least logit within `n` standard deviations of the largest, from the definition.
fn sigma_floor(row: &[f32], n: f32) -> f64 {
    let finite: Vec<f64> = row.iter().copied().filter(|x| x.is_finite()).map(f64::from).collect();
    let count = finite.len() as f64;
    let mean = finite.iter().sum::<f64>() / count;
    let variance = finite.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
    let max = finite.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max - f64::from(n) * variance.sqrt()
}

/// Weights of what is kept, relative to the largest.
fn kept_weights(row: &[f32], options: RowOptions) -> Vec<f64> {
    let tempered: Vec<f32> = row.iter().map(|x| x / options.temperature).collect();
    let max = tempered.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut floor = if options.min_p > 0.0 { max + options.min_p.ln() } else { f32::NEG_INFINITY };
    if options.top_n_sigma > 0.0 {
        floor = floor.max(sigma_floor(&tempered, options.top_n_sigma) as f32);
    }
    let mut sorted: Vec<f32> = tempered.iter().copied().filter(|x| *x >= floor).collect();
    sorted.sort_by(|a, b| b.total_cmp(a));
    if options.top_k > 0 {
        sorted.truncate(options.top_k as usize);
    }
    let weight = |x: f32| (f64::from(x) - f64::from(max)).exp();
    let total: f64 = sorted.iter().map(|x| weight(*x)).sum();
    let mut cut = *sorted.last().expect("the largest");
    let mut mass = 0.0;
    for &x in &sorted {
        mass += weight(x);
        if options.top_p < 1.0 && mass >= f64::from(options.top_p) * total {
            cut = x;
            break;
        }
    }
    tempered.iter().map(|&x| if x >= cut { weight(x) } else { 0.0 }).collect()
}

fn normal(seed: u64, index: usize) -> f32 {
    // Twelve uniforms of SplitMix64 make a number that is as good as normal here.
    let mut sum = -6.0;
    for part in 0..12u64 {
        let mut z = (seed ^ (index as u64) << 8 ^ part).wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        sum += ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64;
    }
    sum as f32
}

/// What the sums of 32 bits round, as a share of the whole.
const CLOSE: f64 = 1e-5;

/// The id drawn is one at which the running sum reaches the target, give or take what 32 bits round. For the same reason
/// an id that just misses `top_p` may be kept.
fn check(row: &[f32], options: RowOptions) {
    let weights = kept_weights(row, options);
    let top_p = (f64::from(options.top_p) + CLOSE).min(1.0) as f32;
    let at_most = kept_weights(row, RowOptions { top_p, ..options });
    let total: f64 = weights.iter().sum();
    for passes in Passes::available() {
        let id = passes.draw(row, options).expect("a finite row");
        assert!(at_most[id] > 0.0, "{} draws {id}, which was cut off, {options:?}", passes.name());
        let before: f64 = weights[..id].iter().sum::<f64>() / total;
        let after = before + weights[id] / total;
        assert!(
            before - CLOSE <= options.uniform && options.uniform <= after + CLOSE,
            "{}: {id} is from {before} to {after}, {options:?}",
            passes.name()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_row_equals_the_reference(
        len in prop_oneof![1usize..200, Just(64), Just(4096), Just(5000)],
        seed in any::<u64>(),
        spread in prop_oneof![Just(0.01f32), Just(1.0), Just(5.0), Just(30.0)],
        masked in prop_oneof![Just(0u64), Just(2), Just(1000)],
        temperature in prop_oneof![Just(1.0f32), 0.01f32..2.0],
        top_k in prop_oneof![Just(0i64), Just(-1), 1i64..50, Just(700), Just(4999), Just(1 << 40)],
        top_p in prop_oneof![Just(1.0f32), 0.001f32..1.0, Just(0.999_999)],
        min_p in prop_oneof![Just(0.0f32), 0.0f32..=1.0],
        top_n_sigma in prop_oneof![Just(0.0f32), Just(-1.0), 0.01f32..5.0],
        uniforms in proptest::array::uniform3(0.0f64..1.0),
    ) {
        let mut row: Vec<f32> = (0..len).map(|index| spread * normal(seed, index)).collect();
        for (index, x) in row.iter_mut().enumerate().skip(1) {
            if masked > 0 && (seed ^ index as u64).is_multiple_of(masked) {
                *x = f32::NEG_INFINITY;
            }
        }
        for uniform in uniforms.into_iter().chain([0.0, 1.0 - f64::EPSILON]) {
            check(&row, RowOptions { temperature, top_n_sigma, min_p, top_k, top_p, uniform });
        }
    }

    #[test]
    fn equals_are_kept_together(len in 1usize..300, levels in 1u64..4, top_k in 1i64..300, top_p in 0.01f32..=1.0, uniform in 0.0f64..1.0) {
        let row: Vec<f32> = (0..len as u64).map(|index| (index.wrapping_mul(0x9E37_79B9) % levels) as f32).collect();
        check(&row, RowOptions { top_k, top_p, uniform, ..PLAIN });
    }
}

/// Ids that some uniform number gives.
fn drawn(row: &[f32], options: RowOptions) -> Vec<usize> {
    let uniforms = (0..1000).map(|part| f64::from(part) / 1000.0);
    let mut ids: Vec<usize> = uniforms
        .map(|uniform| Passes::best().draw(row, RowOptions { uniform, ..options }).expect("finite"))
        .collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

#[test]
fn top_n_sigma_keeps_what_is_within_its_distance_of_the_largest() {
    // Mean 1, standard deviation √2 of those that are not masked.
    let row = [3.0, f32::NEG_INFINITY, 2.0, 1.0, 0.0, -1.0];
    let sigma = |top_n_sigma| RowOptions { top_n_sigma, ..PLAIN };
    assert_eq!(drawn(&row, sigma(0.7)), [0]);
    assert_eq!(drawn(&row, sigma(0.71)), [0, 2]);
    assert_eq!(drawn(&row, sigma(1.42)), [0, 2, 3]);
    for all in [0.0, -1.0, 3.0, 1e30, f32::INFINITY] {
        assert_eq!(drawn(&row, sigma(all)), [0, 2, 3, 4, 5], "{all}");
    }
    for temperature in [0.3, 2.0] {
        assert_eq!(drawn(&row, RowOptions { temperature, ..sigma(0.71) }), [0, 2], "it is relative");
    }
    assert_eq!(drawn(&row, RowOptions { min_p: 0.5, ..sigma(1.42) }), [0], "min_p drops more");
    assert_eq!(drawn(&row, RowOptions { min_p: 0.1, ..sigma(0.71) }), [0, 2], "min_p drops less");
    for few in [0.5, 1e30, f32::INFINITY] {
        assert_eq!(drawn(&[2.0; 3], sigma(few)), [0, 1, 2], "equals are kept: their deviation is 0");
    }
}

#[test]
fn a_row_without_a_distribution_gives_nothing() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let mut long = vec![0.0; 200];
    long[199] = nan;
    for row in [vec![nan], vec![0.0, nan], vec![nan, 0.0], vec![-inf; 70], vec![0.0, inf], long] {
        for options in [
            PLAIN,
            RowOptions { top_k: 1, ..PLAIN },
            RowOptions { top_p: 0.5, ..PLAIN },
            RowOptions { top_n_sigma: 1.0, ..PLAIN },
        ] {
            for passes in Passes::available() {
                assert_eq!(passes.draw(&row, options), None, "{row:?}");
            }
        }
    }
}

/// Rows of any order, on any number of threads.
#[test]
fn a_row_is_drawn_as_if_it_were_alone() {
    let (vocab_size, num_rows) = (3001, 40);
    let logits: Vec<f32> = (0..num_rows * vocab_size).map(|index| 2.0 * normal(5, index)).collect();
    let options: Vec<RowOptions> = (0..num_rows)
        .map(|row| RowOptions {
            top_p: if row % 3 == 0 { 0.9 } else { 1.0 },
            top_k: if row % 4 == 0 { 50 } else { 0 },
            uniform: row as f64 / num_rows as f64,
            ..PLAIN
        })
        .collect();
    let alone: Vec<i64> = logits
        .chunks(vocab_size)
        .zip(&options)
        .map(|(row, options)| Passes::best().draw(row, *options).expect("finite") as i64)
        .collect();
    let rows: Vec<usize> = (0..num_rows).rev().filter(|row| row % 5 != 1).collect();
    let chosen: Vec<RowOptions> = rows.iter().map(|&row| options[row]).collect();
    for num_threads in [1, 3] {
        let threads = Threads::new(num_threads).expect("threads");
        let mut out = vec![-7; rows.len()];
        draw(&logits, vocab_size, &rows, &chosen, &threads, &mut out);
        assert_eq!(out, rows.iter().map(|&row| alone[row]).collect::<Vec<_>>());
    }
}
