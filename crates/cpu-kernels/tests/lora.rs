//! What an adapter adds to a layer: against sums in 64 bits, for every kernel, any rows and both kinds of numbers.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/numbers.rs"]
mod numbers;

use cpu_kernels::{DeltaError, Element, Kernel, LayerDelta, LinearError, Threads, TokenRows, Up, bf16};
use numbers::numbers;

/// A layer with stretches of different ranks, none of them a multiple of any vector, and outputs between them.
struct Case {
    inputs: usize,
    /// First output, outputs, rank.
    stretches: Vec<(usize, usize, usize)>,
    down: Vec<f32>,
    ups: Vec<Vec<f32>>,
}

const NUM_OUTPUTS: usize = 230;
const STRIDE: usize = NUM_OUTPUTS + 3;

impl Case {
    fn new(seed: u64, inputs: usize, stretches: &[(usize, usize, usize)], keep: fn(f32) -> f32) -> Self {
        let random = |seed, count| -> Vec<f32> { numbers(seed, count).into_iter().map(keep).collect() };
        let ranks: usize = stretches.iter().map(|each| each.2).sum();
        Self {
            inputs,
            stretches: stretches.to_vec(),
            down: random(seed, ranks * inputs),
            ups: stretches.iter().zip(1..).map(|(each, i)| random(seed + i, each.1 * each.2)).collect(),
        }
    }

    fn parts(&self) -> Vec<Up<'_>> {
        let stretches = self.stretches.iter().zip(&self.ups);
        stretches
            .map(|(&(first, num_outputs, _), weight)| Up { first, num_outputs, weight, gains: None })
            .collect()
    }

    fn pack(&self, kernel: &'static Kernel) -> LayerDelta {
        LayerDelta::with_kernel(&self.down, self.inputs, &self.parts(), false, kernel).unwrap()
    }

    /// What is added to each output of a row.
    fn expected(&self, x: &[f32]) -> Vec<f64> {
        let mut sums = vec![0.0; NUM_OUTPUTS];
        let mut first_rank = 0;
        for (&(first, outputs, rank), up) in self.stretches.iter().zip(&self.ups) {
            let ranks: Vec<f64> = (first_rank..first_rank + rank)
                .map(|r| {
                    (0..self.inputs)
                        .map(|k| f64::from(x[k]) * f64::from(self.down[r * self.inputs + k]))
                        .sum()
                })
                .collect();
            for output in 0..outputs {
                sums[first + output] =
                    (0..rank).map(|r| ranks[r] * f64::from(up[output * rank + r])).sum::<f64>();
            }
            first_rank += rank;
        }
        sums
    }
}

fn cases(keep: fn(f32) -> f32) -> Vec<Case> {
    vec![
        Case::new(100, 37, &[(5, 70, 3), (75, 1, 1), (90, 140, 9)], keep),
        Case::new(200, 64, &[(0, NUM_OUTPUTS, 16)], keep),
        Case::new(300, 3, &[(200, 30, 21)], keep),
    ]
}

fn add<E: Element>(delta: &LayerDelta, x: &[E], rows: &[u32], threads: &Threads, out: &mut [E]) {
    let x = TokenRows { data: x, stride: delta.num_inputs() };
    delta.add(x, rows, threads, out, STRIDE).unwrap();
}

fn agrees<E: Element>(tolerance: f64, keep: fn(f32) -> f32) {
    const NUM_ROWS: usize = 45;
    let rows_of =
        [vec![], vec![44], vec![0, 7, 9], (3..10).collect(), (0..45).collect(), (0..45).step_by(2).collect()];
    for (case, threads) in cases(keep).iter().flat_map(|case| [1, 3].map(|count| (case, count))) {
        let threads = Threads::new(threads).unwrap();
        let x: Vec<E> = numbers(1, NUM_ROWS * case.inputs).into_iter().map(E::narrow).collect();
        let before: Vec<E> = numbers(2, NUM_ROWS * STRIDE).into_iter().map(E::narrow).collect();
        for kernel in Kernel::available() {
            let delta = case.pack(kernel);
            for rows in &rows_of {
                let mut out = before.clone();
                add(&delta, &x, rows, &threads, &mut out);
                for (row, (found, was)) in out.chunks(STRIDE).zip(before.chunks(STRIDE)).enumerate() {
                    let wide: Vec<f32> =
                        x[row * case.inputs..][..case.inputs].iter().map(|x| x.widen()).collect();
                    let is_added = rows.contains(&(row as u32));
                    let sums = if is_added { case.expected(&wide) } else { vec![0.0; NUM_OUTPUTS] };
                    assert!(!is_added || sums.iter().any(|sum| sum.abs() > 0.1), "too little is added");
                    for (output, sum) in sums.iter().enumerate() {
                        let expected = f64::from(was[output].widen()) + sum;
                        let off = (f64::from(found[output].widen()) - expected).abs();
                        let name = kernel.name();
                        assert!(off <= tolerance * (1.0 + expected.abs()), "{name} {row} {output}: {off}");
                    }
                    assert!(
                        found[NUM_OUTPUTS..]
                            .iter()
                            .zip(&was[NUM_OUTPUTS..])
                            .all(|(a, b)| a.widen().to_bits() == b.widen().to_bits())
                    );
                }
            }
        }
    }
}

#[test]
fn every_kernel_adds_what_sums_in_64_bits_say() {
    agrees::<f32>(1e-5, |x| x);
    agrees::<f32>(1e-5, |x| bf16::from_f32(x).to_f32());
    agrees::<bf16>(1e-2, |x| x);
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_any_others() {
    for case in cases(|x| x) {
        let x = numbers(1, 45 * case.inputs);
        for kernel in Kernel::available() {
            let delta = case.pack(kernel);
            let mut all = vec![0.5; 45 * STRIDE];
            add(&delta, &x, &(0..45).collect::<Vec<_>>(), &Threads::new(2).unwrap(), &mut all);
            for row in 0..45 {
                let mut out = vec![0.5; 45 * STRIDE];
                add(&delta, &x, &[row], &Threads::alone(), &mut out);
                let place = row as usize * STRIDE..(row as usize + 1) * STRIDE;
                assert!(out[place.clone()].iter().any(|&x| (x - 0.5_f32).abs() > 0.1), "nothing is added");
                assert_eq!(out[place.clone()], all[place], "{} {row}", kernel.name());
            }
        }
    }
}

/// A thread that computes outputs first needs ranks that another one may just be computing.
#[test]
fn threads_wait_for_each_others_ranks() {
    let case = Case::new(600, 300, &[(0, 100, 40), (100, 130, 16)], |x| x);
    let (x, rows) = (numbers(1, 5 * case.inputs), [0, 1, 2, 3, 4]);
    let delta = case.pack(Kernel::best_for_products());
    let mut alone = vec![0.5; 5 * STRIDE];
    add(&delta, &x, &rows, &Threads::alone(), &mut alone);
    assert!(alone.iter().any(|&x| (x - 0.5_f32).abs() > 0.1), "nothing is added");
    for num_threads in [2, 5] {
        let threads = Threads::new(num_threads).unwrap();
        for _ in 0..200 {
            let mut out = vec![0.5; 5 * STRIDE];
            add(&delta, &x, &rows, &threads, &mut out);
            assert_eq!(out, alone);
        }
    }
}

#[test]
fn numbers_of_16_bits_take_half_the_memory() {
    let wide = Case::new(100, 64, &[(0, 128, 16)], |x| x);
    let narrow = Case::new(100, 64, &[(0, 128, 16)], |x| bf16::from_f32(x).to_f32());
    let size = |case: &Case| case.pack(Kernel::best_for_products()).num_bytes();
    assert_eq!((size(&wide), size(&narrow)), (4 * 16 * (64 + 128), 2 * 16 * (64 + 128)));
}

#[test]
fn numbers_that_are_rounded_are_the_nearest_of_16_bits_and_what_16_bits_do_not_hold_stays() {
    for (seed, inputs) in [(300, 64), (400, 70)] {
        let stretches = [(0, 37, 16), (37, 150, 5)];
        let wide = Case::new(seed, inputs, &stretches, |x| x);
        let nearest = Case::new(seed, inputs, &stretches, |x| bf16::from_f32(x).to_f32());
        assert_ne!(wide.down, nearest.down);
        let x = numbers(1, 9 * inputs);
        for kernel in Kernel::available() {
            let rounded = LayerDelta::with_kernel(&wide.down, inputs, &wide.parts(), true, kernel).unwrap();
            let expected = nearest.pack(kernel);
            assert_eq!(rounded.num_bytes(), expected.num_bytes());
            let outputs = [rounded, expected].map(|delta| {
                let mut out = vec![0.5_f32; 9 * STRIDE];
                add(&delta, &x, &[0, 3, 8], &Threads::alone(), &mut out);
                out
            });
            assert_eq!(outputs[0], outputs[1], "{}", kernel.name());
        }
    }
    let mut large = Case::new(500, 64, &[(0, 128, 16)], |x| x);
    large.down[70] = f32::MAX;
    let kernel = Kernel::best_for_products();
    let delta = LayerDelta::with_kernel(&large.down, 64, &large.parts(), true, kernel).unwrap();
    assert_eq!(delta.num_bytes(), 4 * 16 * 64 + 2 * 16 * 128);
}

#[test]
fn what_does_not_fit_is_said() {
    let case = Case::new(100, 6, &[(0, 5, 2), (5, 4, 2)], |x| x);
    let new = |down: &[f32], ups: &[Up<'_>]| LayerDelta::new(down, 6, ups, false).unwrap_err();
    let mut parts = case.parts();
    assert_eq!(new(&case.down[1..], &parts), DeltaError::Length { name: "down", found: 23, expected: 24 });
    parts[1].first = 4;
    assert_eq!(new(&case.down, &parts), DeltaError::Overlap { output: 4 });
    parts[1].weight = &case.ups[1][1..];
    assert_eq!(new(&case.down, &parts), DeltaError::Length { name: "up", found: 7, expected: 4 });
    (parts[1].weight, parts[1].gains) = (&case.ups[1], Some(&case.down[..3]));
    assert_eq!(new(&case.down, &parts), DeltaError::Length { name: "gains", found: 3, expected: 4 });
    let delta = LayerDelta::new(&case.down, 6, &case.parts(), false).unwrap();
    let (x, mut out) = (vec![1.0_f32; 12], vec![0.0_f32; 18]);
    let mut add = |rows: &[u32], stride| {
        let x = TokenRows { data: &x[..], stride: 6 };
        delta.add(x, rows, &Threads::alone(), &mut out, stride)
    };
    for (rows, row, before) in [([1, 1], 1, 1), ([1, 0], 0, 1)] {
        assert_eq!(add(&rows, 9), Err(LinearError::Unsorted { row, before }));
    }
    assert!(matches!(add(&[0, 2], 9), Err(LinearError::Length { name: "x", found: 12, expected: 18 })));
    assert!(matches!(add(&[1], 10), Err(LinearError::Length { name: "out", found: 18, expected: 19 })));
    assert!(matches!(add(&[1], 8), Err(LinearError::Stride { name: "out", stride: 8, row: 9 })));
    assert!(out.iter().all(|x| x.to_bits() == 0));
}
