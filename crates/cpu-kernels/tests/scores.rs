//! Log-probabilities, ranks and the likeliest ids against a plain reference in 64 bits that sorts every row, for each compiled
//! form.

use cpu_kernels::{
    Threads,
    sampling::{Passes, Scores, score},
};
use proptest::prelude::*;

/// Ids of the token and of the largest logits, their log-probabilities or logits, and the token's rank; from the definition.
fn plain(row: &[f32], token_id: usize, k: usize, is_normalized: bool) -> (Vec<i32>, Vec<f64>, i32) {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).expect("numbers").then(a.cmp(&b)));
    let ids: Vec<usize> = std::iter::once(token_id).chain(order.into_iter().take(k)).collect();
    let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let total: f64 = row.iter().map(|x| (f64::from(*x) - max).exp()).sum();
    let subtracted = if is_normalized { max + total.ln() } else { 0.0 };
    let values = ids.iter().map(|&id| f64::from(row[id]) - subtracted).collect();
    let rank = 1 + row.iter().filter(|x| **x > row[token_id]).count() as i32;
    (ids.into_iter().map(|id| id as i32).collect(), values, rank)
}

fn scored(
    passes: &Passes,
    row: &[f32],
    token_id: usize,
    k: usize,
    is_normalized: bool,
) -> (Vec<i32>, Vec<f32>, i32) {
    let (mut ids, mut values) = (vec![-5; 1 + k], vec![0.5; 1 + k]);
    let (rank, log_total) = passes.score(row, token_id, is_normalized, &mut ids, &mut values);
    let value = |id: &i32| (f64::from(row[*id as usize]) - log_total) as f32;
    let equals = |(id, said): (&i32, &f32)| said.to_bits() == value(id).to_bits() || said.is_nan();
    assert!(ids.iter().zip(&values).all(equals), "any other id may be asked for with the total");
    (ids, values, rank)
}

fn check(row: &[f32], token_id: usize, k: usize) {
    for is_normalized in [true, false] {
        let (ids, values, rank) = plain(row, token_id, k, is_normalized);
        for passes in Passes::available() {
            let found = scored(passes, row, token_id, k, is_normalized);
            assert_eq!((&found.0, found.2), (&ids, rank), "{}", passes.name());
            for (got, expected) in found.1.iter().zip(&values) {
                let near = (f64::from(*got) - expected).abs() <= 2e-6 * expected.abs().max(1.0);
                let is_masked = expected.is_infinite() && *got == f32::NEG_INFINITY;
                assert!(near || is_masked, "{}: {got}, not {expected}", passes.name());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn any_row_equals_the_reference(
        // Few levels make many equals, at the cut too; many ids are masked in one row of three.
        row in (1usize..300, 1u32..2000, 0u32..3).prop_flat_map(|(len, levels, masks)| {
            let logit = (0..levels).prop_map(move |level| level as f32 * 0.37 - 4.0);
            let masked = prop::option::weighted(if masks == 0 { 0.5 } else { 0.99 }, logit);
            prop::collection::vec(masked.prop_map(|logit| logit.unwrap_or(f32::NEG_INFINITY)), len)
        }),
        token in any::<prop::sample::Index>(),
        count in any::<prop::sample::Index>(),
    ) {
        prop_assume!(row.iter().any(|x| x.is_finite()));
        check(&row, token.index(row.len()), count.index(row.len() + 1));
    }
}

#[test]
fn both_zeros_are_one_number_and_the_first_of_equals_comes_first() {
    let row: Vec<f32> = (0..200).map(|id| if id % 2 == 0 { -0.0 } else { 0.0 }).collect();
    for k in [1, 3, 65, 199, 200] {
        check(&row, 7, k);
    }
}

#[test]
fn a_long_row_is_close_to_the_reference() {
    let row: Vec<f32> = (0..151_936_u32).map(|id| (id.wrapping_mul(0x9E37_79B9) >> 8) as f32 / 2e6).collect();
    for (token, k) in [(0, 0), (151_935, 1), (70_000, 20), (5, 5_000)] {
        check(&row, token, k);
    }
}

#[test]
fn a_row_without_a_distribution_has_no_log_probabilities() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for row in [vec![nan; 70], vec![0.0, nan, 1.0], vec![-inf; 70], vec![0.0, inf, 1.0]] {
        for passes in Passes::available() {
            for k in [0, 1, row.len()] {
                let (ids, values, rank) = scored(passes, &row, 0, k, true);
                assert!(values.iter().all(|value| value.is_nan()), "{row:?}");
                assert!(ids.iter().all(|&id| (0..row.len() as i32).contains(&id)));
                assert!(rank >= 1);
                let (_, values, _) = scored(passes, &row, 1, k, false);
                assert_eq!(values[0].to_bits(), row[1].to_bits(), "a logit is given as it is");
            }
        }
    }
}

/// Rows of any order, on any number of threads.
#[test]
fn a_row_is_scored_as_if_it_were_alone() {
    let (vocab_size, num_rows, k) = (3001, 40, 7);
    let logits: Vec<f32> = (0..(num_rows * vocab_size) as u32)
        .map(|at| (at.wrapping_mul(0x9E37_79B9) >> 16) as f32 * 1e-4)
        .collect();
    let rows: Vec<usize> = (0..num_rows).rev().filter(|row| row % 5 != 1).collect();
    let token_ids: Vec<usize> = rows.iter().map(|row| row * 37 % vocab_size).collect();
    for num_threads in [1, 3] {
        let threads = Threads::new(num_threads).expect("threads");
        let (mut ids, mut values) = (vec![-1; rows.len() * (1 + k)], vec![0.0; rows.len() * (1 + k)]);
        let (mut ranks, mut log_totals) = (vec![0; rows.len()], vec![0.5; rows.len()]);
        let scores =
            Scores { ids: &mut ids, values: &mut values, ranks: &mut ranks, log_totals: &mut log_totals };
        score(&logits, vocab_size, &rows, &token_ids, true, &threads, scores);
        for (index, (&row, &token_id)) in rows.iter().zip(&token_ids).enumerate() {
            let alone = &logits[row * vocab_size..][..vocab_size];
            let (of_ids, of_values, rank) = scored(Passes::best(), alone, token_id, k, true);
            assert_eq!(ids[index * (1 + k)..][..=k], of_ids);
            assert_eq!(values[index * (1 + k)..][..=k], of_values);
            assert_eq!(ranks[index], rank);
            let own = f64::from(alone[token_id]) - log_totals[index];
            assert_eq!((own as f32).to_bits(), of_values[0].to_bits());
        }
    }
}
