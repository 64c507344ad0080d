//! Products with packed weights by every kernel that this machine has, against sums in 64 bits, and what must not change a
//! bit of them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/numbers.rs"]
mod numbers;

use cpu_kernels::{
    Activation, Element, Epilogue, Kernel, LinearError, Matrix, OutRows, PackedLinear, Residual, Threads,
    TokenRows, WeightKind, bf16, f16, linear,
};
use numbers::{narrowed, numbers};
use proptest::prelude::*;

fn kinds(group_size: usize) -> [WeightKind; 5] {
    let per_output = WeightKind::Int8 { group_size: 1 << 20 };
    [WeightKind::F32, WeightKind::Bf16, WeightKind::F16, per_output, WeightKind::Int8 { group_size }]
}

#[derive(Debug, Clone)]
struct Case {
    num_rows: usize,
    outputs: usize,
    inputs: usize,
    /// Elements between rows of activations and of outputs.
    gap: usize,
    group_size: usize,
    has_bias: bool,
    residual: u8,
    activation: Activation,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (0_usize..50, 1_usize..90, 1_usize..300, 0_usize..5, 1_usize..200);
    let activation = (0..Activation::NAMES.len()).prop_map(|i| Activation::NAMES[i].1);
    (sizes, any::<bool>(), 0_u8..3, activation, any::<u64>()).prop_map(
        |((num_rows, outputs, inputs, gap, group_size), has_bias, residual, activation, seed)| Case {
            num_rows,
            outputs,
            inputs,
            gap,
            group_size,
            has_bias,
            residual,
            activation,
            seed,
        },
    )
}

/// A layer of such a shape, its weights as they are kept, and its bias.
struct Layer {
    packed: PackedLinear,
    weights: Vec<f32>,
    bias: Vec<f32>,
}

/// What computes: each kernel, and the matrix unit where there is one.
#[derive(Clone, Copy)]
struct Form {
    kernel: &'static Kernel,
    has_matrix_unit: bool,
}

impl Form {
    fn all() -> Vec<Self> {
        let kernels = Kernel::available().iter();
        let plain = kernels.clone().map(|kernel| Self { kernel, has_matrix_unit: false });
        let with_unit = kernels.filter(|kernel| kernel.has_matrix_unit());
        plain.chain(with_unit.map(|kernel| Self { kernel, has_matrix_unit: true })).collect()
    }

    fn name(self) -> String {
        format!("{}{}", self.kernel.name(), if self.has_matrix_unit { " with the matrix unit" } else { "" })
    }
}

fn layer(
    form: Form,
    kind: WeightKind,
    (outputs, inputs): (usize, usize),
    has_bias: bool,
    seed: u64,
) -> Layer {
    let threads = Threads::new(1).unwrap();
    let mut packed = PackedLinear::for_kernel(form.kernel, outputs, inputs, kind).unwrap();
    packed.set_matrix_rows(form.has_matrix_unit.then_some(1)).unwrap();
    let given = numbers(seed, outputs * inputs);
    packed.pack_rows(0, Matrix::new(&given, outputs, inputs).unwrap(), &threads).unwrap();
    let bias = if has_bias { numbers(seed ^ 1, outputs) } else { vec![0.0; outputs] };
    packed.set_bias(has_bias.then_some(&bias)).unwrap();
    let mut weights = vec![0.0; outputs * inputs];
    for (row, to) in weights.chunks_mut(inputs).enumerate() {
        packed.unpack_row(row, to).unwrap();
    }
    Layer { packed, weights, bias }
}

fn activated(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::None => x,
        Activation::Relu => x.max(0.0),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluErf => x * normal(x),
        Activation::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + u.tanh())
        }
        Activation::ClampedSilu => x.min(7.0) / (1.0 + (-1.702 * x.min(7.0)).exp()),
    }
}

/// Φ(x) by its density, summed by Simpson's rule.
fn normal(x: f64) -> f64 {
    const STEPS: usize = 512;
    let density = |t: f64| (-0.5 * t * t).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let width = x.clamp(-12.0, 12.0) / STEPS as f64;
    let sum: f64 = (0..STEPS)
        .map(|i| {
            let t = i as f64 * width;
            width / 6.0 * (density(t) + 4.0 * density(t + width / 2.0) + density(t + width))
        })
        .sum();
    0.5 + sum
}

fn check<X: Element, O: Element>(case: &Case, form: Form, kind: WeightKind, tolerance: f64) {
    let (m, n, k) = (case.num_rows, case.outputs, case.inputs);
    let layer = layer(form, kind, (n, k), case.has_bias, case.seed);
    let (x_stride, out_stride) = (k + case.gap, n + case.gap);
    let x: Vec<X> = narrowed(case.seed ^ 2, m * x_stride);
    let before: Vec<O> = narrowed(case.seed ^ 3, m * out_stride);
    let others: Vec<O> = narrowed(case.seed ^ 4, m * out_stride);
    let (residual, added) = match case.residual {
        0 => (Residual::None, None),
        1 => (Residual::Out, Some(&before)),
        _ => (Residual::Rows(TokenRows { data: &others, stride: out_stride }), Some(&others)),
    };
    let mut out = before.clone();
    let epilogue = Epilogue { activation: case.activation, residual };
    let rows = TokenRows { data: &x, stride: x_stride };
    let threads = Threads::new(2).unwrap();
    let to = OutRows { data: &mut out, stride: out_stride };
    linear(&layer.packed, rows, m, &epilogue, &threads, to).unwrap();
    for i in 0..m {
        for j in 0..n {
            let products =
                (0..k).map(|l| f64::from(x[i * x_stride + l].widen()) * f64::from(layer.weights[j * k + l]));
            let mut expected = activated(case.activation, products.sum::<f64>() + f64::from(layer.bias[j]));
            if let Some(added) = added {
                expected += f64::from(added[i * out_stride + j].widen());
            }
            let found = f64::from(out[i * out_stride + j].widen());
            let allowed = tolerance * (1.0 + expected.abs());
            assert!(
                (found - expected).abs() <= allowed,
                "{} {kind:?}: out[{i}, {j}] is {found}, expected {expected}",
                form.name()
            );
        }
        for j in n..out_stride.min(out_stride * m - i * out_stride) {
            let at = i * out_stride + j;
            assert_eq!(out[at].widen().to_bits(), before[at].widen().to_bits(), "the gap was written");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Sums of 300 products of numbers up to 1, in 32 bits.
    #[test]
    fn equals_sums_in_64_bits(case in cases()) {
        for form in Form::all() {
            for kind in kinds(case.group_size) {
                check::<f32, f32>(&case, form, kind, 2e-5);
            }
        }
    }

    /// What `bf16` loses in the output is 2⁻⁹ of it.
    #[test]
    fn equals_sums_in_64_bits_with_bf16(case in cases()) {
        for form in Form::all() {
            for kind in kinds(case.group_size) {
                check::<bf16, bf16>(&case, form, kind, 5e-3);
                check::<bf16, f32>(&case, form, kind, 2e-5);
                check::<f32, bf16>(&case, form, kind, 5e-3);
            }
        }
    }

    /// Rows given in any pieces, as they lie or transposed, are the same weight.
    #[test]
    fn packing_in_pieces_is_packing_at_once(
        outputs in 1_usize..100, inputs in 1_usize..70, cut in any::<prop::sample::Index>(), seed in any::<u64>(),
    ) {
        let threads = Threads::new(2).unwrap();
        let given = numbers(seed, outputs * inputs);
        let transposed: Vec<f32> = (0..outputs * inputs).map(|i| given[i % outputs * inputs + i / outputs]).collect();
        let cut = cut.index(outputs + 1);
        for kernel in Kernel::available() {
            for kind in kinds(16) {
                let form = Form { kernel, has_matrix_unit: false };
                let whole = layer(form, kind, (outputs, inputs), false, seed);
                let mut parts = PackedLinear::for_kernel(kernel, outputs, inputs, kind).unwrap();
                // SAFETY: rows from `cut` on, columns `outputs` apart, all within `transposed`.
                let rest = unsafe {
                    Matrix::from_raw(transposed.as_ptr().wrapping_add(cut), outputs - cut, inputs, 1, outputs as isize)
                };
                parts.pack_rows(cut, rest, &threads).unwrap();
                parts.pack_rows(0, Matrix::new(&given[..cut * inputs], cut, inputs).unwrap(), &threads).unwrap();
                let mut row = vec![0.0; inputs];
                for i in 0..outputs {
                    parts.unpack_row(i, &mut row).unwrap();
                    prop_assert_eq!(&row[..], &whole.weights[i * inputs..][..inputs]);
                }
            }
        }
    }
}

fn bits(out: &[f32]) -> Vec<u32> {
    out.iter().map(|x| x.to_bits()).collect()
}

fn product<X: Element>(packed: &PackedLinear, x: &[X], threads: &Threads) -> Vec<f32> {
    let (inputs, outputs) = (packed.in_features(), packed.out_features());
    let num_rows = x.len() / inputs;
    let mut out = vec![0.0; num_rows * outputs];
    let epilogue = Epilogue { activation: Activation::GeluErf, residual: Residual::None };
    let to = OutRows { data: &mut out, stride: outputs };
    linear(packed, TokenRows { data: x, stride: inputs }, num_rows, &epilogue, threads, to).unwrap();
    out
}

/// What batch invariance rests on: a row's bits, for every number of rows in one reading of the weights and for more than
/// one reading, on any number of threads.
#[test]
fn a_row_alone_has_the_same_bits_as_in_company() {
    rows_keep_their_bits::<f32>();
}

#[test]
fn a_row_of_16_bits_alone_has_the_same_bits_as_in_company() {
    rows_keep_their_bits::<bf16>();
}

/// Few rows are summed at two places of a panel at once, with no chunk over, with one, and with part of one.
#[test]
fn a_row_alone_has_the_same_bits_as_in_company_however_its_inputs_are_shared() {
    let threads = Threads::new(1).unwrap();
    for inputs in [256, 384, 20 * 128, 35 * 128 + 7] {
        let (outputs, most) = (33, 30);
        let x = numbers(17, most * inputs);
        for form in Form::all() {
            for kind in kinds(48) {
                let layer = layer(form, kind, (outputs, inputs), false, 19);
                let together = bits(&product(&layer.packed, &x, &threads));
                for num_rows in 1..=14 {
                    let found = bits(&product(&layer.packed, &x[..num_rows * inputs], &threads));
                    let expected = &together[..num_rows * outputs];
                    assert!(found == expected, "{} {kind:?}: {num_rows} of {inputs}", form.name());
                }
            }
        }
    }
}

fn rows_keep_their_bits<X: Element>() {
    const MOST: usize = 601;
    let (outputs, inputs) = (70, 300);
    let all_threads: Vec<Threads> = (1..=3).map(|n| Threads::new(n).unwrap()).collect();
    let x: Vec<X> = narrowed(7, MOST * inputs);
    for form in Form::all() {
        for kind in kinds(48) {
            let layer = layer(form, kind, (outputs, inputs), true, 3);
            let alone: Vec<u32> = x
                .chunks(inputs)
                .flat_map(|row| bits(&product(&layer.packed, row, &all_threads[0])))
                .collect();
            for num_rows in (1..=80).chain([255, 256, 257, MOST]) {
                let threads = &all_threads[num_rows % 3];
                let found = bits(&product(&layer.packed, &x[..num_rows * inputs], threads));
                assert!(found == alone[..num_rows * outputs], "{} {kind:?}: {num_rows} rows", form.name());
            }
        }
    }
}

/// A checkpoint's numbers of 16 bits may be kept as they are or widened.
#[test]
fn weights_of_16_bits_give_the_bits_of_the_same_numbers_in_32() {
    let threads = Threads::new(2).unwrap();
    for kernel in Kernel::available() {
        let form = Form { kernel, has_matrix_unit: false };
        let sizes = [WeightKind::Bf16, WeightKind::F16].map(|kind| [(kind, 70, 300), (kind, 33, 127)]);
        for (kind, outputs, inputs) in sizes.into_iter().flatten() {
            let narrow = layer(form, kind, (outputs, inputs), true, 11);
            let mut wide = PackedLinear::for_kernel(kernel, outputs, inputs, WeightKind::F32).unwrap();
            wide.pack_rows(0, Matrix::new(&narrow.weights, outputs, inputs).unwrap(), &threads).unwrap();
            wide.set_bias(Some(&narrow.bias)).unwrap();
            let x = numbers(12, 61 * inputs);
            for num_rows in [1, 2, 3, 14, 15, 28, 29, 42, 61] {
                let x = &x[..num_rows * inputs];
                let found = bits(&product(&narrow.packed, x, &threads));
                assert!(found == bits(&product(&wide, x, &threads)), "{}: {num_rows} rows", form.name());
            }
        }
    }
}

/// Every number of 16 bits stays what it is, given as bytes of any number of rows, or as numbers.
#[test]
fn weights_of_16_bits_are_packed_as_they_are() {
    let threads = Threads::new(2).unwrap();
    for kernel in Kernel::available() {
        for (outputs, inputs) in [(96, 1024), (70, 300), (33, 127), (1, 1)] {
            let bits: Vec<u16> = (0..outputs * inputs).map(|i| (i * 40_503 % 65_536) as u16).collect();
            for kind in [WeightKind::Bf16, WeightKind::F16] {
                let is_half = kind == WeightKind::F16;
                let expected: Vec<u32> = bits
                    .iter()
                    .map(|&bits| {
                        if is_half {
                            f16::from_bits(bits).to_f32()
                        } else {
                            f32::from_bits(u32::from(bits) << 16)
                        }
                    })
                    .map(f32::to_bits)
                    .collect();
                let fill_from = |first: usize| {
                    let bits = &bits;
                    move |row: usize, to: &mut [u8]| {
                        for (to, bits) in to.chunks_exact_mut(2).zip(&bits[(first + row) * inputs..]) {
                            to.copy_from_slice(&bits.to_le_bytes());
                        }
                    }
                };
                for cut in [0, outputs / 3, outputs] {
                    let mut packed = PackedLinear::for_kernel(kernel, outputs, inputs, kind).unwrap();
                    packed.pack_narrow_rows(cut, outputs - cut, &threads, fill_from(cut)).unwrap();
                    packed.pack_narrow_rows(0, cut, &threads, fill_from(0)).unwrap();
                    assert!(all_bits(&packed) == expected, "{} {kind:?}, cut at {cut}", kernel.name());
                }
                let mut packed = PackedLinear::for_kernel(kernel, outputs, inputs, kind).unwrap();
                if is_half {
                    let numbers: Vec<f16> = bits.iter().map(|&bits| f16::from_bits(bits)).collect();
                    packed.pack_rows(0, Matrix::new(&numbers, outputs, inputs).unwrap(), &threads).unwrap();
                } else {
                    let numbers: Vec<bf16> = bits.iter().map(|&bits| bf16::from_bits(bits)).collect();
                    packed.pack_rows(0, Matrix::new(&numbers, outputs, inputs).unwrap(), &threads).unwrap();
                }
                assert!(all_bits(&packed) == expected, "{} {kind:?} as numbers", kernel.name());
            }
        }
    }
    let mut wide = PackedLinear::new(3, 4, WeightKind::F32).unwrap();
    let error = wide.pack_narrow_rows(0, 3, &threads, |_, _| {}).unwrap_err();
    assert_eq!(error.to_string(), "weights are packed as F32, which are not numbers of 16 bits");
}

fn all_bits(packed: &PackedLinear) -> Vec<u32> {
    let mut row = vec![0.0; packed.in_features()];
    (0..packed.out_features())
        .flat_map(|index| {
            packed.unpack_row(index, &mut row).unwrap();
            bits(&row)
        })
        .collect()
}

#[test]
fn what_is_no_number_stays_in_its_row() {
    not_numbers_stay_in_their_row::<f32>();
    not_numbers_stay_in_their_row::<bf16>();
}

fn not_numbers_stay_in_their_row<X: Element>() {
    let threads = Threads::new(1).unwrap();
    let (outputs, inputs, num_rows) = (37, 150, 20);
    for form in Form::all() {
        for kind in kinds(32) {
            let layer = layer(form, kind, (outputs, inputs), false, 5);
            let good: Vec<X> = narrowed(9, num_rows * inputs);
            let clean = product(&layer.packed, &good, &threads);
            for bad in [f32::NAN, f32::INFINITY] {
                let mut x = good.clone();
                x[11 * inputs + 149] = X::narrow(bad);
                let out = product(&layer.packed, &x, &threads);
                for (i, row) in out.chunks(outputs).enumerate() {
                    if i == 11 {
                        assert!(row.iter().any(|y| !y.is_finite()), "{} {kind:?}", form.name());
                        assert!(!bad.is_nan() || row.iter().all(|y| y.is_nan()), "{} {kind:?}", form.name());
                    } else {
                        assert_eq!(bits(row), bits(&clean[i * outputs..][..outputs]));
                    }
                }
            }
        }
    }
}

/// The bound that `Activation` states, and that nothing large is lost.
#[test]
fn activations_are_as_near_as_they_say() {
    let threads = Threads::new(1).unwrap();
    let one = [1.0_f32];
    for kernel in Kernel::available() {
        let mut packed = PackedLinear::for_kernel(kernel, 1, 1, WeightKind::F32).unwrap();
        packed.pack_rows(0, Matrix::new(&one, 1, 1).unwrap(), &threads).unwrap();
        let mut x: Vec<f32> = (-6000..=6000).map(|i| i as f32 / 500.0).collect();
        x.extend([0.0, -0.0, 1e-30, -1e-30, 50.0, -50.0, 1e4, -1e4, 3e12, -3e12, f32::NAN]);
        for (name, activation) in Activation::NAMES {
            let mut out = vec![0.0; x.len()];
            let epilogue = Epilogue { activation, residual: Residual::None };
            let to = OutRows { data: &mut out, stride: 1 };
            linear(&packed, TokenRows { data: &x, stride: 1 }, x.len(), &epilogue, &threads, to).unwrap();
            for (&x, &y) in x.iter().zip(&out) {
                if x.is_nan() {
                    assert!(y.is_nan(), "{name}(NaN) is {y}");
                    continue;
                }
                let expected = activated(activation, f64::from(x));
                let off = (f64::from(y) - expected).abs();
                assert!(
                    off <= 3e-7 * f64::from(x.abs()),
                    "{} {name}({x}) is {y}, expected {expected}",
                    kernel.name()
                );
            }
        }
    }
}

/// 8 bits are off by half a step of the group's largest weight; zeros stay, and so does the largest.
#[test]
fn eight_bits_are_off_by_half_a_step() {
    let threads = Threads::new(1).unwrap();
    let (outputs, inputs, group_size) = (33, 100, 30);
    let mut given = numbers(11, outputs * inputs);
    given[..inputs].fill(0.0);
    let kernel = Kernel::best_for_products();
    let mut packed =
        PackedLinear::for_kernel(kernel, outputs, inputs, WeightKind::Int8 { group_size }).unwrap();
    packed.pack_rows(0, Matrix::new(&given, outputs, inputs).unwrap(), &threads).unwrap();
    let mut row = vec![0.0; inputs];
    for (i, given) in given.chunks(inputs).enumerate() {
        packed.unpack_row(i, &mut row).unwrap();
        for (given, found) in given.chunks(group_size).zip(row.chunks(group_size)) {
            let largest = given.iter().fold(0.0_f32, |a, x| a.max(x.abs()));
            for (given, found) in given.iter().zip(found) {
                assert!((given - found).abs() <= largest / 254.0 * 1.0001, "{given} became {found}");
            }
        }
    }
    assert!(packed.num_bytes() < outputs.next_multiple_of(32) * inputs * 2);
}

#[test]
fn bad_arrays_are_refused() {
    let threads = Threads::new(1).unwrap();
    let most = cpu_kernels::packed::MAX_FEATURES;
    let size = |name, value| LinearError::Size { name, value, most };
    assert_eq!(PackedLinear::new(0, 1, WeightKind::F32).unwrap_err(), size("out_features", 0));
    assert_eq!(PackedLinear::new(1, most + 1, WeightKind::F32).unwrap_err(), size("in_features", most + 1));
    let kind = WeightKind::Int8 { group_size: 0 };
    assert_eq!(PackedLinear::new(1, 1, kind).unwrap_err(), size("group_size", 0));
    assert!(matches!(
        PackedLinear::new(most, most, WeightKind::F32).unwrap_err(),
        LinearError::Memory { .. }
    ));

    let mut packed = PackedLinear::new(4, 3, WeightKind::Int8 { group_size: 3 }).unwrap();
    let mut out = [0.0_f32; 8];
    let epilogue = Epilogue::default();
    let mut product = |packed: &PackedLinear, x: &[f32], stride, num_rows, out_stride| {
        let to = OutRows { data: &mut out, stride: out_stride };
        linear(packed, TokenRows { data: x, stride }, num_rows, &epilogue, &threads, to)
    };
    let missing = LinearError::NotPacked { missing: 4, out_features: 4 };
    assert_eq!(product(&packed, &[0.0; 3], 3, 1, 4).unwrap_err(), missing);
    let weights = [1.0_f32; 12];
    let rows = |n: usize| Matrix::new(&weights[..n * 3], n, 3).unwrap();
    let beyond = LinearError::Rows { first: 2, end: 5, out_features: 4 };
    assert_eq!(packed.pack_rows(2, rows(3), &threads).unwrap_err(), beyond);
    let narrow = Matrix::new(&weights[..2], 1, 2).unwrap();
    assert!(matches!(packed.pack_rows(0, narrow, &threads).unwrap_err(), LinearError::Length { .. }));
    packed.pack_rows(0, rows(4), &threads).unwrap();
    let infinite = [1.0, f32::INFINITY, 1.0];
    let infinite = Matrix::new(&infinite, 1, 3).unwrap();
    assert_eq!(packed.pack_rows(1, infinite, &threads).unwrap_err(), LinearError::NotFinite { row: 1 });
    let missing = LinearError::NotPacked { missing: 1, out_features: 4 };
    assert_eq!(product(&packed, &[0.0; 3], 3, 1, 4).unwrap_err(), missing);
    packed.pack_rows(1, rows(1), &threads).unwrap();
    product(&packed, &[1.0; 3], 3, 1, 4).unwrap();
    product(&packed, &[], 3, 0, 4).unwrap();

    let length = |name, found, expected| LinearError::Length { name, found, expected };
    assert_eq!(product(&packed, &[1.0; 5], 3, 2, 4).unwrap_err(), length("x", 5, 6));
    assert_eq!(product(&packed, &[1.0; 9], 3, 3, 4).unwrap_err(), length("out", 8, 12));
    let close = LinearError::Stride { name: "x", stride: 2, row: 3 };
    assert_eq!(product(&packed, &[1.0; 9], 2, 2, 4).unwrap_err(), close);
    assert_eq!(packed.set_bias(Some(&[1.0])).unwrap_err(), length("bias", 1, 4));
    assert!(matches!(packed.unpack_row(4, &mut [0.0; 3]).unwrap_err(), LinearError::Rows { .. }));
    assert_eq!(packed.unpack_row(3, &mut [0.0; 2]).unwrap_err(), length("out", 2, 3));
}

/// From the number of rows on that was set, and as exact: sums of numbers far apart, which terms of 8 bits must all reach.
#[test]
fn the_matrix_unit_computes_from_some_rows_on() {
    let threads = Threads::new(2).unwrap();
    let kernel = Kernel::best_for_products();
    let (outputs, inputs) = (40, 500);
    let layer = layer(Form { kernel, has_matrix_unit: false }, WeightKind::F32, (outputs, inputs), true, 1);
    if !kernel.has_matrix_unit() {
        let error = layer.packed.set_matrix_rows(Some(2)).unwrap_err();
        assert_eq!(error, LinearError::NoMatrixUnit { kernel: kernel.name() });
        return;
    }
    let mut x = numbers(2, 40 * inputs);
    for (i, x) in x.iter_mut().enumerate() {
        *x *= 10_f32.powi(i as i32 % 7 - 3);
    }
    let plain = product(&layer.packed, &x, &threads);
    let few = product(&layer.packed, &x[..7 * inputs], &threads);
    layer.packed.set_matrix_rows(Some(8)).unwrap();
    assert_eq!(bits(&few), bits(&product(&layer.packed, &x[..7 * inputs], &threads)), "7 rows are not its");
    let unit = product(&layer.packed, &x, &threads);
    assert_ne!(bits(&plain), bits(&unit), "40 rows are its, or the orders of the sums are the same");
    let off = |out: &[f32]| {
        let mut most = 0.0_f64;
        for (i, row) in out.chunks(outputs).enumerate() {
            for (j, &found) in row.iter().enumerate() {
                let products = (0..inputs)
                    .map(|k| f64::from(x[i * inputs + k]) * f64::from(layer.weights[j * inputs + k]));
                let sizes: f64 = products.clone().map(f64::abs).sum();
                let sum = products.sum::<f64>() + f64::from(layer.bias[j]);
                most = most.max((f64::from(found) - activated(Activation::GeluErf, sum)).abs() / sizes);
            }
        }
        most
    };
    let (plain, unit) = (off(&plain), off(&unit));
    assert!(plain < 3e-7 && unit < 3e-7, "off by {plain} and, by the unit, {unit} of the sum of sizes");
    layer.packed.set_matrix_rows(None).unwrap();
    assert_eq!(bits(&few), bits(&product(&layer.packed, &x[..7 * inputs], &threads)));
}
