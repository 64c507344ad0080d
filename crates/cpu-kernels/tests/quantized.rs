//! Products of weights of 4 and 8 bits with zero points, minima and scales of 16 bits or two levels, by every kernel that this
//! machine has, against the same sums written plainly: bit for bit where activations are rounded.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::float_cmp, reason = "sums of whole numbers are exact, and what scales them has one order")]

use cpu_kernels::{
    Epilogue, Kernel, LinearError, Matrix, OutRows, PackedLinear, Quantized, QuantizedRow, ScaleForm,
    Threads, TokenRows, WeightKind, ZeroForm, linear,
};
use half::{bf16, f16};
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

    /// From −1 to 1; now and then 0, and a number much larger.
    fn number(&mut self) -> f32 {
        let x = (self.next() & 0xffff) as f32 / 32768.0 - 1.0;
        match self.next() % 16 {
            0 => 0.0,
            1 => x * 300.0,
            _ => x,
        }
    }
}

/// Twice what the codes of MXFP4 stand for.
const CODES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

#[derive(Debug, Clone)]
struct Case {
    num_rows: usize,
    outputs: usize,
    inputs: usize,
    form: Quantized,
    seed: u64,
}

fn forms() -> impl Strategy<Value = Quantized> {
    let scales = [ScaleForm::F32, ScaleForm::F16, ScaleForm::Bf16];
    let zeros = [ZeroForm::Middle, ZeroForm::Point, ZeroForm::Minimum];
    let mut all = Vec::new();
    for rounds_activations in [true, false] {
        for group_size in [16, 32, 64, 128, 1 << 20] {
            for scales in scales {
                let zeros = ZeroForm::Codes;
                all.push(Quantized { bits: 4, group_size, scales, zeros, rounds_activations });
            }
            for (scales, zeros) in scales.iter().flat_map(|s| zeros.iter().map(move |z| (*s, *z))) {
                for bits in [4, 8] {
                    all.push(Quantized { bits, group_size, scales, zeros, rounds_activations });
                }
            }
        }
        for scales in [ScaleForm::F32, ScaleForm::F16, ScaleForm::Bf16, ScaleForm::TwoLevel] {
            let zeros = ZeroForm::Middle;
            all.extend([Quantized { bits: 6, group_size: 16, scales, zeros, rounds_activations }; 4]);
        }
        for bits in [4, 8] {
            let (scales, zeros) = (ScaleForm::TwoLevel, ZeroForm::Minimum);
            let two_level = Quantized { bits, group_size: 32, scales, zeros, rounds_activations };
            all.extend([two_level; 8]);
            if bits == 8 {
                all.extend([Quantized { group_size: 16, ..two_level }; 4]);
            }
        }
    }
    all.retain(|form| {
        (form.bits != 4 || form.group_size != 16) && (form.bits == 4 || form.zeros != ZeroForm::Point)
    });
    prop::sample::select(all)
}

fn cases() -> impl Strategy<Value = Case> {
    (0_usize..20, 1_usize..70, 1_usize..400, forms(), any::<u64>()).prop_map(
        |(num_rows, outputs, inputs, form, seed)| {
            let inputs =
                if form.scales == ScaleForm::TwoLevel { inputs.next_multiple_of(256) } else { inputs };
            Case { num_rows, outputs, inputs, form, seed }
        },
    )
}

/// Rows as files would have them, of the largest and smallest numbers and others.
fn rows_of(case: &Case, bits: &mut Bits) -> Vec<QuantizedRow> {
    let Case { inputs, form, .. } = *case;
    let groups = inputs.div_ceil(form.group_size);
    let slots = if form.scales == ScaleForm::TwoLevel { groups * form.group_size / 256 } else { groups };
    let kept = |x: f32| match form.scales {
        ScaleForm::F32 => x,
        ScaleForm::Bf16 => bf16::from_f32(x).to_f32(),
        ScaleForm::F16 | ScaleForm::TwoLevel => f16::from_f32(x).to_f32(),
    };
    let row = |_| {
        let mut number = || match (form.bits, form.zeros) {
            (4, ZeroForm::Middle) => (bits.next() % 16) as i8 - 8,
            (4, ZeroForm::Codes) => CODES[bits.next() as usize % 16],
            (4, _) => (bits.next() % 16) as i8,
            (6, _) => (bits.next() % 64) as i8 - 32,
            _ => bits.next() as i8,
        };
        let numbers = (0..inputs).map(|_| number()).collect();
        // One subnormal among those of 16 bits.
        let mut scale = || match bits.next() % 16 {
            0 => 0.0,
            1 => kept(3e-6),
            2 => kept(-0.05),
            _ => kept((bits.next() & 0xfff) as f32 / 5000.0),
        };
        let scales = (0..slots).map(|_| scale()).collect();
        let offsets = match form.zeros {
            ZeroForm::Middle | ZeroForm::Codes => Vec::new(),
            ZeroForm::Point => (0..slots).map(|_| (bits.next() % 17) as f32).collect(),
            ZeroForm::Minimum => (0..slots).map(|_| scale()).collect(),
        };
        let factors = if form.scales == ScaleForm::TwoLevel { groups } else { 0 };
        let factors = (0..factors).map(|_| [bits.next() as u8, bits.next() as u8]).collect();
        QuantizedRow { numbers, scales, offsets, factors }
    };
    (0..case.outputs).map(row).collect()
}

/// Scale, and what is taken away from each weight of a group.
fn group_of(form: Quantized, row: &QuantizedRow, group: usize) -> (f32, f32) {
    if form.scales == ScaleForm::TwoLevel {
        let (level, [scale, min]) = (group * form.group_size / 256, row.factors[group]);
        let min = row.offsets.get(level).map_or(0.0, |offset| offset * f32::from(min));
        return (row.scales[level] * f32::from(scale.cast_signed()), min);
    }
    let scale = row.scales[group];
    match form.zeros {
        ZeroForm::Middle | ZeroForm::Codes => (scale, 0.0),
        ZeroForm::Point => (scale, scale * row.offsets[group]),
        ZeroForm::Minimum => (scale, row.offsets[group]),
    }
}

fn packed(kernel: &'static Kernel, case: &Case, rows: &[QuantizedRow], threads: &Threads) -> PackedLinear {
    let kind = WeightKind::Quantized(case.form);
    let mut packed = PackedLinear::for_kernel(kernel, case.outputs, case.inputs, kind).unwrap();
    packed.pack_quantized_rows(0, rows.len(), threads, |i, to| copy_row(&rows[i], to)).unwrap();
    packed
}

fn copy_row(from: &QuantizedRow, to: &mut QuantizedRow) {
    to.numbers.copy_from_slice(&from.numbers);
    to.scales.copy_from_slice(&from.scales);
    to.offsets.copy_from_slice(&from.offsets);
    to.factors.copy_from_slice(&from.factors);
}

fn product(packed: &PackedLinear, x: &[f32], num_rows: usize, threads: &Threads) -> Vec<f32> {
    let (inputs, outputs) = (packed.in_features(), packed.out_features());
    let mut out = vec![f32::NAN; num_rows * outputs];
    let to = OutRows { data: &mut out, stride: outputs };
    linear(packed, TokenRows { data: x, stride: inputs }, num_rows, &Epilogue::default(), threads, to)
        .unwrap();
    out
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
fn twin(case: &Case, row: &QuantizedRow, x: &[f32]) -> f32 {
    let Case { inputs, form, .. } = *case;
    let block = if form.group_size == 16 { 16 } else { 32 };
    let mut total = 0.0_f32;
    for group in 0..inputs.div_ceil(form.group_size) {
        let places =
            group * form.group_size..inputs.min(group.saturating_add(1).saturating_mul(form.group_size));
        let (mut sum, mut of_inputs) = (0.0_f32, 0.0_f32);
        for (x, numbers) in x[places.clone()].chunks(block).zip(row.numbers[places].chunks(block)) {
            let (x, x_scale) = rounded(x);
            let whole: i32 = x.iter().zip(numbers).map(|(x, &number)| x * i32::from(number)).sum();
            sum = (whole as f32).mul_add(x_scale, sum);
            of_inputs += x_scale * x.iter().sum::<i32>() as f32;
        }
        let (scale, min) = group_of(form, row, group);
        total = sum.mul_add(scale, total);
        if matches!(form.zeros, ZeroForm::Point | ZeroForm::Minimum) {
            total = (-min).mul_add(of_inputs, total);
        }
    }
    total
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equals_sums_written_plainly(case in cases()) {
        let threads = Threads::new(2).unwrap();
        let mut bits = Bits(case.seed | 1);
        let rows = rows_of(&case, &mut bits);
        let x: Vec<f32> = (0..case.num_rows * case.inputs).map(|_| bits.number()).collect();
        for kernel in Kernel::available() {
            let packed = packed(kernel, &case, &rows, &threads);
            let mut unpacked = vec![f32::NAN; case.inputs];
            let found = product(&packed, &x, case.num_rows, &threads);
            for (j, row) in rows.iter().enumerate() {
                packed.unpack_row(j, &mut unpacked).unwrap();
                for (k, weight) in unpacked.iter().enumerate() {
                    let (scale, min) = group_of(case.form, row, k / case.form.group_size);
                    prop_assert_eq!(*weight, f32::from(row.numbers[k]) * scale - min);
                }
                for (i, x) in x.chunks(case.inputs).enumerate() {
                    let found = found[i * case.outputs + j];
                    if case.form.rounds_activations {
                        let expected = twin(&case, row, x);
                        prop_assert!(found == expected, "{} [{i}, {j}]: {found}, not {expected}", kernel.name());
                    } else {
                        let products = x.iter().zip(&unpacked).map(|(x, w)| f64::from(*x) * f64::from(*w));
                        let (expected, size) =
                            products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + f64::abs(p)));
                        let error = (f64::from(found) - expected).abs();
                        prop_assert!(error <= 3e-5 * size + 1e-9, "{} [{i}, {j}]: {error}", kernel.name());
                    }
                }
            }
        }
    }
}

/// On any number of threads, in one reading of the weights and in several, and by every kernel.
#[test]
fn a_row_alone_has_the_same_bits_as_in_company() {
    const MOST: usize = 300;
    let threads: Vec<Threads> = (1..=3).map(|n| Threads::new(n).unwrap()).collect();
    let of = |bits, group_size, scales, zeros| Quantized {
        bits,
        group_size,
        scales,
        zeros,
        rounds_activations: true,
    };
    for form in [
        of(4, 32, ScaleForm::F16, ZeroForm::Middle),
        of(8, 64, ScaleForm::F16, ZeroForm::Middle),
        of(4, 128, ScaleForm::F32, ZeroForm::Point),
        of(4, 32, ScaleForm::TwoLevel, ZeroForm::Minimum),
        of(8, 16, ScaleForm::F32, ZeroForm::Minimum),
        of(6, 16, ScaleForm::TwoLevel, ZeroForm::Middle),
        of(4, 32, ScaleForm::Bf16, ZeroForm::Codes),
    ] {
        // More groups than are made ready together.
        let case = Case { num_rows: MOST, outputs: 70, inputs: 2304, form, seed: 0x1234_5678_9abc };
        let mut bits = Bits(case.seed);
        let rows = rows_of(&case, &mut bits);
        let x: Vec<f32> = (0..MOST * case.inputs).map(|_| bits.number()).collect();
        let to_bits = |out: Vec<f32>| out.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let mut first: Option<Vec<u32>> = None;
        for kernel in Kernel::available().iter().filter(|kernel| !kernel.name().contains("scalar")) {
            let packed = packed(kernel, &case, &rows, &threads[0]);
            let alone: Vec<u32> = x
                .chunks(case.inputs)
                .take(20)
                .flat_map(|row| to_bits(product(&packed, row, 1, &threads[0])))
                .collect();
            assert!(*first.get_or_insert_with(|| alone.clone()) == alone, "{}: {form:?}", kernel.name());
            for num_rows in [2, 5, 7, 8, 11, 12, 13, 16, 17, 20, 24, 257] {
                let found = to_bits(product(&packed, &x, num_rows, &threads[num_rows % 3]));
                let both = 20.min(num_rows) * case.outputs;
                assert!(found[..both] == alone[..both], "{}: {num_rows} rows, {form:?}", kernel.name());
            }
        }
    }
}

/// Forms that sum a block in 16 bits have room for it: the largest activations of both signs, for the first two and the last two of
/// four inputs, with the largest and the smallest weights.
#[test]
fn the_largest_sums_of_four_bits_are_right() {
    let threads = Threads::new(1).unwrap();
    let halves = |first: i8, last: i8| move |k: usize| if k % 4 < 2 { first } else { last };
    let pairs = |of: [i8; 3]| of.into_iter().flat_map(move |first| of.map(|last| (first, last)));
    let x: Vec<Vec<f32>> = pairs([-127, 0, 127])
        .map(|(first, last)| (0..32).map(halves(first, last)).map(f32::from).collect())
        .collect();
    for (zeros, extremes, largest) in [
        (ZeroForm::Middle, [-8, 0, 7], 8.0),
        (ZeroForm::Minimum, [0, 0, 15], 12.0),
        (ZeroForm::Codes, [-12, 0, 12], 12.0),
    ] {
        let scales = ScaleForm::F32;
        let form = Quantized { bits: 4, group_size: 32, scales, zeros, rounds_activations: true };
        let rows: Vec<QuantizedRow> = pairs(extremes)
            .map(|(first, last)| QuantizedRow {
                numbers: (0..32).map(halves(first, last)).collect(),
                scales: vec![1.0],
                offsets: if zeros == ZeroForm::Minimum { vec![3.0] } else { vec![] },
                factors: vec![],
            })
            .collect();
        let case = Case { num_rows: x.len(), outputs: rows.len(), inputs: 32, form, seed: 0 };
        let expected: Vec<f32> = x.iter().flat_map(|x| rows.iter().map(|row| twin(&case, row, x))).collect();
        let most = 127.0 * largest * 32.0;
        assert!(expected.contains(&most) && expected.contains(&-most), "{expected:?}");
        for kernel in Kernel::available() {
            let packed = packed(kernel, &case, &rows, &threads);
            for num_rows in 1..=x.len() {
                let found = product(&packed, &x[..num_rows].concat(), num_rows, &threads);
                assert_eq!(found, expected[..num_rows * rows.len()], "{}, {num_rows} rows", kernel.name());
            }
        }
    }
}

/// A weight, its scales and zeros take what their bits take.
#[test]
fn memory_is_that_of_the_bits() {
    let num_bytes = |group_size, scales, zeros| {
        let form = Quantized { bits: 4, group_size, scales, zeros, rounds_activations: true };
        PackedLinear::new(1024, 4096, WeightKind::Quantized(form)).unwrap().num_bytes() as f64
    };
    let per_weight = |bytes: f64| bytes * 8.0 / (1024.0 * 4096.0);
    let close = |bytes: f64, bits: f64| {
        assert!((per_weight(bytes) / bits - 1.0).abs() < 1e-3, "{}", per_weight(bytes));
    };
    close(num_bytes(32, ScaleForm::F16, ZeroForm::Middle), 4.5);
    close(num_bytes(32, ScaleForm::F16, ZeroForm::Minimum), 5.0);
    close(num_bytes(32, ScaleForm::TwoLevel, ZeroForm::Minimum), 4.625);
    close(num_bytes(128, ScaleForm::F16, ZeroForm::Point), 4.1875);
    close(num_bytes(32, ScaleForm::Bf16, ZeroForm::Codes), 4.5);
    let (scales, zeros) = (ScaleForm::TwoLevel, ZeroForm::Middle);
    let six = Quantized { bits: 6, group_size: 16, scales, zeros, rounds_activations: true };
    let bytes = PackedLinear::new(1024, 4096, WeightKind::Quantized(six)).unwrap().num_bytes();
    close(bytes as f64, 6.5625);
}

#[test]
fn rounding_leaves_at_most_half_a_step() {
    let threads = Threads::new(2).unwrap();
    let (outputs, inputs) = (37, 200);
    let mut bits = Bits(99);
    let weight: Vec<f32> =
        (0..outputs * inputs).map(|_| (bits.next() & 0xffff) as f32 / 32768.0 - 1.0).collect();
    for group_size in [32, 64, 128] {
        let (scales, zeros) = (ScaleForm::F16, ZeroForm::Middle);
        let form = Quantized { bits: 4, group_size, scales, zeros, rounds_activations: true };
        let mut packed = PackedLinear::new(outputs, inputs, WeightKind::Quantized(form)).unwrap();
        packed.pack_rows(0, Matrix::new(&weight, outputs, inputs).unwrap(), &threads).unwrap();
        let mut row = vec![0.0; inputs];
        let (mut squares, mut distinct) = (0.0, std::collections::BTreeSet::new());
        for j in 0..outputs {
            packed.unpack_row(j, &mut row).unwrap();
            for (found, given) in row.iter().zip(&weight[j * inputs..]) {
                assert!((found - given).abs() <= 0.18, "{given} became {found}");
                squares += f64::from((found - given).powi(2));
                distinct.insert(found.to_bits());
            }
        }
        // A step is an eighth, so a right rounding leaves about 1/8/√12.
        let error = (squares / (outputs * inputs) as f64).sqrt();
        assert!(distinct.len() > 16 && (0.02..0.042).contains(&error), "{error}");
    }
}

/// Groups of ordinary numbers, of such as need the smallest scales there are, and of zeros.
#[test]
fn eight_bits_have_the_least_scale_of_16_bits_that_holds_the_largest_number() {
    let threads = Threads::new(2).unwrap();
    let (group_size, sizes) = (32, [1.0, 300.0, 1e-3, 3e-5, 2e-6, 1e-9, 0.0, 8e6]);
    let inputs = group_size * sizes.len();
    let mut bits = Bits(7);
    for scales in [ScaleForm::F16, ScaleForm::Bf16, ScaleForm::F32] {
        let weight: Vec<f32> = (0..40 * inputs)
            .map(|at| sizes[at % inputs / group_size] * ((bits.next() & 0xffff) as f32 / 32768.0 - 1.0))
            .collect();
        let form =
            Quantized { bits: 8, group_size, scales, zeros: ZeroForm::Middle, rounds_activations: true };
        let mut packed = PackedLinear::new(40, inputs, WeightKind::Quantized(form)).unwrap();
        packed.pack_rows(0, Matrix::new(&weight, 40, inputs).unwrap(), &threads).unwrap();
        let mut found = vec![0.0; inputs];
        for (j, row) in weight.chunks(inputs).enumerate() {
            packed.unpack_row(j, &mut found).unwrap();
            for (found, given) in found.chunks(group_size).zip(row.chunks(group_size)) {
                let wanted = given.iter().fold(0.0_f32, |largest, x| largest.max(x.abs())) / 127.0;
                let least = match scales {
                    ScaleForm::F16 => (0..=u16::MAX / 2)
                        .map(|bits| f16::from_bits(bits).to_f32())
                        .find(|scale| *scale >= wanted)
                        .unwrap(),
                    ScaleForm::Bf16 => f32::from_bits(wanted.to_bits().next_multiple_of(1 << 16)),
                    ScaleForm::F32 | ScaleForm::TwoLevel => wanted,
                };
                for (found, given) in found.iter().zip(given) {
                    let expected = if least == 0.0 { 0.0 } else { (given / least).round_ties_even() * least };
                    assert_eq!(*found, expected, "{given} in steps of {least}");
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let threads = Threads::new(1).unwrap();
    let (scales, zeros) = (ScaleForm::F16, ZeroForm::Middle);
    let form = Quantized { bits: 4, group_size: 32, scales, zeros, rounds_activations: true };
    let new = |form, inputs| PackedLinear::new(4, inputs, WeightKind::Quantized(form));
    for (wrong, inputs) in [
        (Quantized { bits: 3, ..form }, 64),
        (Quantized { bits: 6, ..form }, 64),
        (Quantized { bits: 6, group_size: 16, zeros: ZeroForm::Minimum, ..form }, 64),
        (Quantized { bits: 8, group_size: 16, scales: ScaleForm::TwoLevel, ..form }, 256),
        (
            Quantized {
                bits: 8,
                group_size: 64,
                scales: ScaleForm::TwoLevel,
                zeros: ZeroForm::Minimum,
                ..form
            },
            256,
        ),
        (Quantized { bits: 8, zeros: ZeroForm::Point, ..form }, 64),
        (Quantized { bits: 8, zeros: ZeroForm::Codes, ..form }, 64),
        (Quantized { bits: 6, group_size: 16, zeros: ZeroForm::Codes, ..form }, 64),
        (Quantized { scales: ScaleForm::TwoLevel, zeros: ZeroForm::Codes, ..form }, 256),
        (Quantized { scales: ScaleForm::TwoLevel, ..form }, 256),
        (Quantized { scales: ScaleForm::TwoLevel, zeros: ZeroForm::Minimum, ..form }, 64),
    ] {
        assert_eq!(new(wrong, inputs).unwrap_err(), LinearError::Form { form: wrong, in_features: inputs });
    }
    for group_size in [16, 48] {
        let group = LinearError::RoundedGroup { group_size, in_features: 100 };
        assert_eq!(new(Quantized { group_size, ..form }, 100).unwrap_err(), group);
    }
    let mut layer = new(form, 64).unwrap();
    assert_eq!(layer.set_matrix_rows(Some(1)).unwrap_err(), LinearError::RoundedOnMatrixUnit);
    let not_held = |row| LinearError::NotHeld { row, form };
    for (number, scale) in [(8, 1.0), (-9, 1.0), (0, f32::NAN), (0, f32::INFINITY), (0, 1e6), (0, 0.1)] {
        let fill = |_: usize, row: &mut QuantizedRow| {
            row.numbers.fill(number);
            row.scales.fill(scale);
        };
        assert_eq!(layer.pack_quantized_rows(1, 1, &threads, fill).unwrap_err(), not_held(1));
    }
    let coded = Quantized { zeros: ZeroForm::Codes, scales: ScaleForm::Bf16, ..form };
    let mut codes = new(coded, 64).unwrap();
    for (number, scale) in
        [(5, 1.0), (-7, 1.0), (13, 1.0), (-13, 1.0), (127, 1.0), (-128, 1.0), (1, f32::NAN)]
    {
        let fill = |_: usize, row: &mut QuantizedRow| {
            row.numbers[63] = number;
            row.scales.fill(scale);
        };
        let not_held = LinearError::NotHeld { row: 1, form: coded };
        assert_eq!(codes.pack_quantized_rows(1, 1, &threads, fill).unwrap_err(), not_held);
    }
    let rounded = codes.pack_rows(0, Matrix::new(&[0.5_f32; 64], 1, 64).unwrap(), &threads);
    assert_eq!(rounded.unwrap_err(), LinearError::Form { form: coded, in_features: 64 });
    let mut weight = [0.5_f32; 64];
    let row = |layer: &mut PackedLinear, weight: &[f32]| {
        layer.pack_rows(2, Matrix::new(weight, 1, 64).unwrap(), &threads)
    };
    row(&mut layer, &weight).unwrap();
    weight[63] = 1e7;
    assert_eq!(row(&mut layer, &weight).unwrap_err(), not_held(2));
    weight[63] = f32::NAN;
    assert_eq!(row(&mut layer, &weight).unwrap_err(), LinearError::NotFinite { row: 2 });
    let eight = Quantized { bits: 8, ..form };
    let mut bytes = new(eight, 64).unwrap();
    assert_eq!(row(&mut bytes, &weight).unwrap_err(), LinearError::NotFinite { row: 2 });
    weight[63] = 8.4e6;
    assert_eq!(row(&mut bytes, &weight).unwrap_err(), LinearError::NotHeld { row: 2, form: eight });
    let x = [0.0; 64];
    let to = OutRows { data: &mut [0.0; 4], stride: 4 };
    let found = linear(&layer, TokenRows { data: &x, stride: 64 }, 1, &Epilogue::default(), &threads, to);
    assert_eq!(found.unwrap_err(), LinearError::NotPacked { missing: 4, out_features: 4 });
}
