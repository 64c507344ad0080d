//! Norms by every kernel that this machine has, against sums in 64 bits.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use cpu_kernels::{
    Element, Kernel, LinearError, Norm, NormKind, OutRows, Sum, Threads, TokenRows, add_norm, bf16, norm,
};
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Case {
    num_rows: usize,
    row: usize,
    gap: usize,
    kind: NormKind,
    has_bias: bool,
    sum: u8,
    numbers: Vec<f32>,
}

fn cases() -> impl Strategy<Value = Case> {
    let kind = prop_oneof![Just(NormKind::Layer), Just(NormKind::Rms)];
    let numbers = prop::collection::vec(-4.0_f32..4.0, 97);
    (0_usize..6, 1_usize..100, 0_usize..4, kind, any::<bool>(), 0_u8..4, numbers).prop_map(
        |(num_rows, row, gap, kind, has_bias, sum, numbers)| Case {
            num_rows,
            row,
            gap,
            kind,
            has_bias,
            sum,
            numbers,
        },
    )
}

impl Case {
    fn numbers<E: Element>(&self, len: usize, first: usize) -> Vec<E> {
        (0..len).map(|i| E::narrow(self.numbers[(i + first) % 97])).collect()
    }
}

fn check<E: Element>(case: &Case, kernel: &Kernel, tolerance: f64) {
    const EPS: f32 = 1e-5;
    let (row, stride) = (case.row, case.row + case.gap);
    let x: Vec<E> = case.numbers(case.num_rows * stride, 0);
    let residual: Vec<E> = case.numbers(case.num_rows * stride, 41);
    let weight: Vec<f32> = case.numbers(row, 13);
    let bias: Vec<f32> = case.numbers(row, 29);
    let mut out: Vec<E> = case.numbers(case.num_rows * stride, 50);
    let mut sums = residual.clone();
    let given = TokenRows { data: &residual[..], stride };
    let sum = match case.sum {
        0 => Sum::None,
        1 => Sum::Add(given),
        2 => Sum::AddTo(given, OutRows { data: &mut sums, stride }),
        _ => Sum::Into(OutRows { data: &mut sums, stride }),
    };
    let what = Norm { kind: case.kind, weight: &weight, bias: case.has_bias.then_some(&bias), eps: EPS };
    let threads = Threads::new(1).unwrap();
    let to = OutRows { data: &mut out, stride };
    norm(&what, TokenRows { data: &x, stride }, case.num_rows, sum, kernel, &threads, to).unwrap();
    for i in 0..case.num_rows {
        let added: Vec<f64> = (0..row)
            .map(|j| {
                let x = x[i * stride + j].widen();
                let sum =
                    if case.sum == 0 { x } else { E::narrow(x + residual[i * stride + j].widen()).widen() };
                f64::from(sum)
            })
            .collect();
        let mean = if case.kind == NormKind::Layer { added.iter().sum::<f64>() / row as f64 } else { 0.0 };
        let square = added.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / row as f64;
        for j in 0..row {
            if case.sum >= 2 {
                assert_eq!(f64::from(sums[i * stride + j].widen()).to_bits(), added[j].to_bits());
            }
            let mut expected = (added[j] - mean) / (square + f64::from(EPS)).sqrt() * f64::from(weight[j]);
            if case.has_bias {
                expected += f64::from(bias[j]);
            }
            let found = f64::from(out[i * stride + j].widen());
            let allowed = tolerance * (1.0 + expected.abs());
            assert!((found - expected).abs() <= allowed, "{}: {found}, expected {expected}", kernel.name());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// A row of one number has no variance: what is left of it is 1/√ε of rounding, hence the range of the numbers.
    #[test]
    fn equals_sums_in_64_bits(case in cases()) {
        for kernel in Kernel::available() {
            check::<f32>(&case, kernel, 1e-4);
            check::<bf16>(&case, kernel, 5e-3);
        }
    }
}

#[test]
fn a_row_alone_has_the_same_bits_as_in_company() {
    let (num_rows, row) = (200, 771);
    let x: Vec<f32> = (0..num_rows * row).map(|i| ((i * 7919) % 1009) as f32 / 77.0 - 5.0).collect();
    let weight = vec![0.7; row];
    let (alone, both) = (Threads::new(1).unwrap(), Threads::new(3).unwrap());
    for kernel in Kernel::available() {
        for kind in [NormKind::Layer, NormKind::Rms] {
            let what = Norm { kind, weight: &weight, bias: None, eps: 1e-6 };
            let mut together = vec![0.0; num_rows * row];
            let rows = TokenRows { data: &x[..], stride: row };
            let to = OutRows { data: &mut together, stride: row };
            norm(&what, rows, num_rows, Sum::None, kernel, &both, to).unwrap();
            for (x, together) in x.chunks(row).zip(together.chunks(row)) {
                let mut out = vec![0.0; row];
                let to = OutRows { data: &mut out, stride: row };
                norm(&what, TokenRows { data: x, stride: row }, 1, Sum::None, kernel, &alone, to).unwrap();
                assert_eq!(out, together);
            }
        }
    }
}

/// To the bit, and nothing between the rows is touched.
fn check_added<E: Element>(kernel: &Kernel, kind: NormKind) {
    let (num_rows, row, stride) = (5, 37, 40);
    let some = |first: usize, len: usize| -> Vec<f32> {
        (0..len).map(|i| (((i + first) * 7919) % 1009) as f32 / 77.0 - 5.0).collect()
    };
    let x: Vec<E> = some(1, num_rows * stride).iter().map(|&x| E::narrow(x)).collect();
    let mut stream: Vec<E> = some(400, num_rows * stride).iter().map(|&x| E::narrow(x)).collect();
    let (weight, bias) = (some(9, row), some(17, row));
    let what = Norm { kind, weight: &weight, bias: Some(&bias), eps: 1e-5 };
    let threads = Threads::new(1).unwrap();
    let from = || TokenRows { data: &x[..], stride };
    let mut normed = vec![E::narrow(0.0); num_rows * stride];
    let to = OutRows { data: &mut normed, stride };
    norm(&what, from(), num_rows, Sum::None, kernel, &threads, to).unwrap();
    let expected: Vec<u32> = stream
        .iter()
        .zip(&normed)
        .enumerate()
        .map(|(i, (y, x))| if i % stride < row { E::narrow(y.widen() + x.widen()) } else { *y })
        .map(|sum| sum.widen().to_bits())
        .collect();
    let to = OutRows { data: &mut stream, stride };
    add_norm(&what, from(), num_rows, kernel, &threads, to).unwrap();
    let found: Vec<u32> = stream.iter().map(|x| x.widen().to_bits()).collect();
    assert_eq!(found, expected, "{}", kernel.name());
    let to = OutRows { data: &mut stream[1..], stride };
    let error = add_norm(&what, from(), num_rows + 1, kernel, &threads, to).unwrap_err();
    assert!(matches!(error, LinearError::Length { name: "x", .. }));
}

#[test]
fn a_normed_row_is_added_as_if_it_had_been_written_first() {
    for kernel in Kernel::available() {
        for kind in [NormKind::Layer, NormKind::Rms] {
            check_added::<f32>(kernel, kind);
            check_added::<bf16>(kernel, kind);
        }
    }
}

#[test]
fn bad_arrays_are_refused() {
    let threads = Threads::new(1).unwrap();
    let kernel = Kernel::best_for_products();
    let run = |weight: &[f32], bias: Option<&[f32]>, x: &[f32], stride, num_rows| {
        let what = Norm { kind: NormKind::Layer, weight, bias, eps: 1e-5 };
        let mut out = [0.0; 6];
        let to = OutRows { data: &mut out, stride: 3 };
        norm(&what, TokenRows { data: x, stride }, num_rows, Sum::None, kernel, &threads, to)
    };
    let length = |name, found, expected| LinearError::Length { name, found, expected };
    assert!(matches!(run(&[], None, &[], 3, 1).unwrap_err(), LinearError::Size { .. }));
    assert_eq!(run(&[1.0; 3], Some(&[1.0]), &[1.0; 3], 3, 1).unwrap_err(), length("bias", 1, 3));
    assert_eq!(run(&[1.0; 3], None, &[1.0; 5], 3, 2).unwrap_err(), length("x", 5, 6));
    assert_eq!(run(&[1.0; 3], None, &[1.0; 9], 3, 3).unwrap_err(), length("out", 6, 9));
    let close = LinearError::Stride { name: "x", stride: 2, row: 3 };
    assert_eq!(run(&[1.0; 3], None, &[1.0; 9], 2, 2).unwrap_err(), close);
    run(&[1.0; 3], None, &[1.0; 6], 3, 2).unwrap();
}
