//! Products of 8-bit weights with rounded activations, by every kernel that this machine has, against the same sums written
//! plainly: bit for bit.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::float_cmp, reason = "sums of whole numbers are exact, and what scales them has one order")]

use cpu_kernels::{
    Element, Epilogue, Kernel, LinearError, Matrix, OutRows, PackedLinear, Residual, Threads, TokenRows,
    WeightKind, bf16, linear,
};
use proptest::prelude::*;

/// Bits that any seed gives again.
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 24
    }

    /// From −1 to 1; now and then 0, and a number much larger or smaller.
    fn number(&mut self) -> f32 {
        let x = (self.next() & 0xffff) as f32 / 32768.0 - 1.0;
        match self.next() % 16 {
            0 => 0.0,
            1 => x * 300.0,
            2 => x * 1e-4,
            _ => x,
        }
    }
}

#[derive(Debug, Clone)]
struct Case {
    num_rows: usize,
    outputs: usize,
    inputs: usize,
    group_size: usize,
    /// Elements between rows of activations.
    gap: usize,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let groups = prop::sample::select(vec![16, 32, 64, 128, 1 << 20]);
    (0_usize..30, 1_usize..70, 1_usize..300, groups, 0_usize..4, any::<u64>()).prop_map(
        |(num_rows, outputs, inputs, group_size, gap, seed)| Case {
            num_rows,
            outputs,
            inputs,
            group_size,
            gap,
            seed,
        },
    )
}

/// A weight of whole numbers, the smallest and largest ones among them, with some scales that are 0.
struct Weight {
    numbers: Vec<i8>,
    scales: Vec<f32>,
    num_groups: usize,
}

impl Weight {
    fn new(case: &Case, bits: &mut Bits) -> Self {
        let num_groups = case.inputs.div_ceil(case.group_size);
        let numbers = (0..case.outputs * case.inputs).map(|_| match bits.next() % 8 {
            0 => [-128, 127, -127, 0][bits.next() as usize % 4],
            _ => bits.next() as i8,
        });
        let numbers = numbers.collect();
        let scales = (0..case.outputs * num_groups).map(|_| {
            let scale = (bits.next() & 0xff) as f32 / 1000.0;
            if bits.next().is_multiple_of(8) { 0.0 } else { scale }
        });
        Self { numbers, scales: scales.collect(), num_groups }
    }

    fn packed(&self, kernel: &'static Kernel, case: &Case, threads: &Threads) -> PackedLinear {
        let kind = WeightKind::W8A8 { group_size: case.group_size };
        let mut packed = PackedLinear::for_kernel(kernel, case.outputs, case.inputs, kind).unwrap();
        let fill = |row: usize, numbers: &mut [i8], scales: &mut [f32]| {
            numbers.copy_from_slice(&self.numbers[row * case.inputs..][..case.inputs]);
            scales.copy_from_slice(&self.scales[row * self.num_groups..][..self.num_groups]);
        };
        packed.pack_whole_rows(0, case.outputs, threads, fill).unwrap();
        packed
    }
}

/// A block as whole numbers and their scale.
fn rounded(x: &[f32]) -> (Vec<i32>, f32) {
    let largest = x.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
    if largest == 0.0 {
        return (vec![0; x.len()], 0.0);
    }
    let inverse = 127.0 / largest;
    (x.iter().map(|x| (x * inverse).round_ties_even() as i32).collect(), largest / 127.0)
}

/// One output: each block's products as a whole number, scaled and added block by block, and group by group.
fn twin(case: &Case, weight: &Weight, x: &[f32], output: usize) -> f32 {
    let numbers = &weight.numbers[output * case.inputs..][..case.inputs];
    let scales = &weight.scales[output * weight.num_groups..][..weight.num_groups];
    let block = if case.group_size == 16 { 16 } else { 32 };
    let mut total = 0.0_f32;
    for (group, scale) in scales.iter().enumerate() {
        let inputs = group * case.group_size..case.inputs.min((group + 1) * case.group_size);
        let mut sum = 0.0_f32;
        for (x, numbers) in x[inputs.clone()].chunks(block).zip(numbers[inputs].chunks(block)) {
            let (x, x_scale) = rounded(x);
            let whole: i32 = x.iter().zip(numbers).map(|(x, &number)| x * i32::from(number)).sum();
            sum = (whole as f32).mul_add(x_scale, sum);
        }
        total = sum.mul_add(*scale, total);
    }
    total
}

fn product<X: Element>(
    packed: &PackedLinear,
    x: &[X],
    stride: usize,
    num_rows: usize,
    threads: &Threads,
) -> Vec<f32> {
    let outputs = packed.out_features();
    let mut out = vec![f32::NAN; num_rows * outputs];
    let to = OutRows { data: &mut out, stride: outputs };
    linear(packed, TokenRows { data: x, stride }, num_rows, &Epilogue::default(), threads, to).unwrap();
    out
}

fn check<X: Element>(case: &Case, threads: &Threads) {
    let mut bits = Bits(case.seed | 1);
    let weight = Weight::new(case, &mut bits);
    let stride = case.inputs + case.gap;
    let x: Vec<X> = (0..case.num_rows * stride).map(|_| X::narrow(bits.number())).collect();
    let wide: Vec<f32> = x.iter().map(|x| x.widen()).collect();
    for kernel in Kernel::available() {
        let packed = weight.packed(kernel, case, threads);
        let found = product(&packed, &x, stride, case.num_rows, threads);
        for (i, row) in found.chunks(case.outputs).enumerate() {
            for (j, found) in row.iter().enumerate() {
                let expected = twin(case, &weight, &wide[i * stride..][..case.inputs], j);
                // Equal as numbers: a sum of nothing may have either sign.
                assert!(*found == expected, "{} [{i}, {j}]: {found} and not {expected}", kernel.name());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equals_whole_numbers_summed_plainly(case in cases()) {
        let threads = Threads::new(2).unwrap();
        check::<f32>(&case, &threads);
        check::<bf16>(&case, &threads);
    }

    /// The weights are those that activations in 32 bits meet, in another order.
    #[test]
    fn weights_are_rounded_as_for_other_activations(case in cases(), cut in any::<prop::sample::Index>()) {
        let threads = Threads::new(2).unwrap();
        let mut bits = Bits(case.seed | 1);
        let given: Vec<f32> = (0..case.outputs * case.inputs).map(|_| bits.number()).collect();
        let cut = cut.index(case.outputs + 1);
        let part = |rows: std::ops::Range<usize>| {
            Matrix::new(&given[rows.start * case.inputs..rows.end * case.inputs], rows.len(), case.inputs).unwrap()
        };
        let group_size = case.group_size;
        for kernel in Kernel::available() {
            let [mut plain, mut ours] = [WeightKind::Int8 { group_size }, WeightKind::W8A8 { group_size }]
                .map(|kind| PackedLinear::for_kernel(kernel, case.outputs, case.inputs, kind).unwrap());
            plain.pack_rows(0, part(0..case.outputs), &threads).unwrap();
            ours.pack_rows(cut, part(cut..case.outputs), &threads).unwrap();
            ours.pack_rows(0, part(0..cut), &threads).unwrap();
            let (mut expected, mut found) = (vec![0.0; case.inputs], vec![1.0; case.inputs]);
            for row in 0..case.outputs {
                plain.unpack_row(row, &mut expected).unwrap();
                ours.unpack_row(row, &mut found).unwrap();
                prop_assert_eq!(&found, &expected);
            }
        }
    }
}

/// On any number of threads, in one reading of the weights and in several, and by every kernel.
#[test]
fn a_row_alone_has_the_same_bits_as_in_company() {
    const MOST: usize = 300;
    let case =
        Case { num_rows: MOST, outputs: 70, inputs: 330, group_size: 64, gap: 0, seed: 0x1234_5678_9abc };
    let all_threads: Vec<Threads> = (1..=3).map(|n| Threads::new(n).unwrap()).collect();
    let mut bits = Bits(case.seed);
    let weight = Weight::new(&case, &mut bits);
    let x: Vec<f32> = (0..MOST * case.inputs).map(|_| bits.number()).collect();
    let to_bits = |out: Vec<f32>| out.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let mut first: Option<Vec<u32>> = None;
    for kernel in Kernel::available() {
        let packed = weight.packed(kernel, &case, &all_threads[0]);
        let rows = x.chunks(case.inputs);
        let alone: Vec<u32> =
            rows.flat_map(|row| to_bits(product(&packed, row, 0, 1, &all_threads[0]))).collect();
        assert_eq!(first.get_or_insert_with(|| alone.clone()), &alone, "{}", kernel.name());
        for num_rows in (1..=20).chain([31, 64, 255, 256, 257, MOST]) {
            let found = product(&packed, &x, case.inputs, num_rows, &all_threads[num_rows % 3]);
            assert!(to_bits(found) == alone[..num_rows * case.outputs], "{}: {num_rows} rows", kernel.name());
        }
    }
}

#[test]
fn bias_and_residual_follow() {
    let threads = Threads::new(1).unwrap();
    let case = Case { num_rows: 3, outputs: 21, inputs: 40, group_size: 32, gap: 0, seed: 77 };
    let mut bits = Bits(case.seed);
    let weight = Weight::new(&case, &mut bits);
    let x: Vec<f32> = (0..3 * 40).map(|_| bits.number()).collect();
    let bias: Vec<f32> = (0..21).map(|_| bits.number()).collect();
    let mut packed = weight.packed(Kernel::best_for_products(), &case, &threads);
    let plain = product(&packed, &x, 40, 3, &threads);
    packed.set_bias(Some(&bias)).unwrap();
    let mut out = vec![2.5_f32; 3 * 21];
    let epilogue = Epilogue { residual: Residual::Out, ..Epilogue::default() };
    let to = OutRows { data: &mut out, stride: 21 };
    linear(&packed, TokenRows { data: &x, stride: 40 }, 3, &epilogue, &threads, to).unwrap();
    for (at, (found, plain)) in out.iter().zip(&plain).enumerate() {
        assert_eq!(*found, plain + bias[at % 21] + 2.5);
    }
}

/// A row with a number that is none, or is infinite, has no number in any output; other rows keep theirs.
#[test]
fn what_is_not_finite_stays_in_its_row() {
    let threads = Threads::new(1).unwrap();
    let case = Case { num_rows: 7, outputs: 37, inputs: 150, group_size: 1 << 20, gap: 0, seed: 5 };
    let mut bits = Bits(case.seed);
    let weight = Weight::new(&case, &mut bits);
    let good: Vec<f32> = (0..7 * 150).map(|_| bits.number()).collect();
    for kernel in Kernel::available() {
        let packed = weight.packed(kernel, &case, &threads);
        let clean = product(&packed, &good, 150, 7, &threads);
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = good.clone();
            x[3 * 150 + 149] = bad;
            let out = product(&packed, &x, 150, 7, &threads);
            for (i, (row, clean)) in out.chunks(37).zip(clean.chunks(37)).enumerate() {
                assert!(if i == 3 { row.iter().all(|y| y.is_nan()) } else { row == clean }, "{bad}, row {i}");
            }
        }
    }
}

/// Large numbers have a scale, and the smallest ones have none, and count as zeros.
#[test]
fn numbers_at_the_ends_of_the_range() {
    let threads = Threads::new(1).unwrap();
    let weights = [1.0_f32; 33];
    let kind = WeightKind::W8A8 { group_size: 1 << 20 };
    let mut packed = PackedLinear::new(1, 33, kind).unwrap();
    packed.pack_rows(0, Matrix::new(&weights, 1, 33).unwrap(), &threads).unwrap();
    let mut x = [0.0_f32; 33];
    x[5] = 1e34;
    let found = product(&packed, &x, 33, 1, &threads)[0];
    assert!((found / 1e34 - 1.0).abs() < 1e-6, "{found}");
    x[5] = f32::MIN_POSITIVE / 1e3;
    x[32] = 3.0;
    let found = product(&packed, &x, 33, 1, &threads)[0];
    assert!((found - 3.0).abs() < 1e-6, "{found}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |group_size, in_features| {
        PackedLinear::new(4, in_features, WeightKind::W8A8 { group_size }).unwrap_err()
    };
    let group = |group_size, in_features| LinearError::RoundedGroup { group_size, in_features };
    assert_eq!(refused(24, 100), group(24, 100));
    assert_eq!(refused(48, 100), group(48, 100));
    assert_eq!(refused(8, 100), group(8, 100));
    let most = cpu_kernels::packed::MAX_FEATURES;
    assert_eq!(refused(0, 100), LinearError::Size { name: "group_size", value: 0, most });
    for (group_size, in_features) in [(16, 100), (32, 100), (96, 100), (100, 100), (24, 20), (1 << 20, 7)] {
        let packed = PackedLinear::new(4, in_features, WeightKind::W8A8 { group_size }).unwrap();
        assert_eq!(packed.set_matrix_rows(Some(1)).unwrap_err(), LinearError::RoundedOnMatrixUnit);
        packed.set_matrix_rows(None).unwrap();
    }
}
