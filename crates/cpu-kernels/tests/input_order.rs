//! Layers whose groups have inputs that lie apart: the same as one whose activations were put in order before.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use cpu_kernels::{
    Element, Epilogue, Kernel, LinearError, Matrix, OutRows, PackedLinear, Threads, TokenRows, WeightKind,
    bf16, linear,
};
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Case {
    num_rows: usize,
    outputs: usize,
    gap: usize,
    /// Of inputs, 32 each.
    num_groups: usize,
    order: Vec<u32>,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    (1_usize..6, 0_usize..300, 1_usize..70, 0_usize..5, any::<u64>()).prop_flat_map(
        |(num_groups, num_rows, outputs, gap, seed)| {
            let order = Just((0..num_groups as u32 * 32).collect::<Vec<_>>()).prop_shuffle();
            order.prop_map(move |order| Case { num_rows, outputs, gap, num_groups, order, seed })
        },
    )
}

fn number(seed: u64, i: usize) -> f32 {
    let mixed = (seed ^ i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((mixed >> 40) as f32) / (1_u64 << 23) as f32 - 1.0
}

fn packed(case: &Case, kernel: &'static Kernel, kind: WeightKind, threads: &Threads) -> PackedLinear {
    let mut layer = PackedLinear::for_kernel(kernel, case.outputs, case.order.len(), kind).unwrap();
    let fill = |row: usize, numbers: &mut [i8], scales: &mut [f32]| {
        for (k, to) in numbers.iter_mut().enumerate() {
            *to = (number(case.seed, row * 1000 + k) * 16.0) as i8;
        }
        for (group, to) in scales.iter_mut().enumerate() {
            *to = number(!case.seed, row * 1000 + group);
        }
    };
    layer.pack_whole_rows(0, case.outputs, threads, fill).unwrap();
    layer
}

fn product<X: Element>(
    layer: &PackedLinear,
    x: &[X],
    (num_rows, stride): (usize, usize),
    threads: &Threads,
) -> Vec<f32> {
    let outputs = layer.out_features();
    let mut out = vec![f32::NAN; num_rows * outputs];
    let rows = OutRows { data: &mut out, stride: outputs };
    linear(layer, TokenRows { data: x, stride }, num_rows, &Epilogue::default(), threads, rows).unwrap();
    out
}

fn check<X: Element>(case: &Case, kernel: &'static Kernel, kind: WeightKind, threads: &Threads) {
    let (plain, mut ordered) = (packed(case, kernel, kind, threads), packed(case, kernel, kind, threads));
    ordered.set_input_order(case.order.clone()).unwrap();
    let inputs = case.order.len();
    let stride = inputs + case.gap;
    let x: Vec<X> = (0..case.num_rows * stride).map(|i| X::narrow(number(case.seed ^ 7, i))).collect();
    let sorted: Vec<X> = (0..case.num_rows)
        .flat_map(|row| case.order.iter().map(move |&input| (row, input as usize)))
        .map(|(row, input)| x[row * stride + input])
        .collect();
    let expected = product(&plain, &sorted, (case.num_rows, inputs), threads);
    let found = product(&ordered, &x, (case.num_rows, stride), threads);
    assert_eq!(bits(&found), bits(&expected), "{}", kernel.name());
    let (mut before, mut after) = (vec![0.0; inputs], vec![0.0; inputs]);
    for row in 0..case.outputs {
        plain.unpack_row(row, &mut before).unwrap();
        ordered.unpack_row(row, &mut after).unwrap();
        for (place, &input) in case.order.iter().enumerate() {
            assert_eq!(before[place].to_bits(), after[input as usize].to_bits());
        }
    }
    assert_eq!(ordered.num_bytes(), plain.num_bytes() + 4 * inputs);
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

proptest! {
    #[test]
    fn an_order_is_that_of_activations_put_in_it(case in cases()) {
        let threads = Threads::new(2).unwrap();
        for kernel in Kernel::available() {
            for kind in [WeightKind::Int8 { group_size: 32 }, WeightKind::W8A8 { group_size: 32 }] {
                assert_eq!(case.order.len() / 32, case.num_groups);
                check::<f32>(&case, kernel, kind, &threads);
                check::<bf16>(&case, kernel, kind, &threads);
            }
        }
    }
}

#[test]
fn what_is_no_order_is_refused() {
    let threads = Threads::new(1).unwrap();
    let mut layer = PackedLinear::new(1, 3, WeightKind::Int8 { group_size: 3 }).unwrap();
    let short = layer.set_input_order(vec![0, 1]);
    assert_eq!(short, Err(LinearError::Length { name: "the order of the inputs", found: 2, expected: 3 }));
    for (order, place, input) in
        [(vec![0, 1, 3], 2, 3), (vec![1, 1, 0], 1, 1), (vec![u32::MAX, 0, 1], 0, u32::MAX)]
    {
        assert_eq!(layer.set_input_order(order), Err(LinearError::Order { place, input, in_features: 3 }));
    }
    layer.set_input_order(vec![2, 0, 1]).unwrap();
    let row = [1.0_f32, 2.0, 3.0];
    assert_eq!(layer.pack_rows(0, Matrix::new(&row, 1, 3).unwrap(), &threads), Err(LinearError::Ordered));
    let mut plain = PackedLinear::new(1, 3, WeightKind::F32).unwrap();
    let refused = plain.set_input_order(vec![0, 1, 2]);
    assert_eq!(refused, Err(LinearError::NotWhole { kind: WeightKind::F32 }));
}
