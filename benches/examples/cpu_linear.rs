//! Products of the GPT-2-small shapes with packed weights, as JSON: `cargo run --release -p rustvllm-benches --example cpu_linear`.
//!
//! Each time is the lower quarter of several, over weights that take turns so that none stays near, as in a step of a model. In the
//! same run: reading as many bytes, and the machine's peak of fused multiply-adds, both with as many threads.
//! `cpu_linear [threads] [kind,…] [rows,…] [kernel] [inputsxoutputs,…]`

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use cpu_kernels::{
    Epilogue, Kernel, Matrix, OutRows, PackedLinear, Quantized, QuantizedRow, ScaleForm, Threads, TokenRows,
    WeightKind, ZeroForm, linear,
};

/// Inputs and outputs.
const SHAPES: &str = "768x2304,768x768,768x3072,3072x768,768x50257";
/// Bytes over which weights of one shape take turns.
const TURNS: usize = 160 << 20;
const BUDGET: Duration = Duration::from_millis(120);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |i: usize, default: &str| arguments.get(i).map_or(default, String::as_str).to_owned();
    let num_threads: usize = argument(0, "2").parse().expect("a number of threads");
    let rows = argument(2, "1,2,4,8,16,32,64,128,512");
    let rows: Vec<usize> = rows.split(',').map(|m| m.parse().expect("a number of rows")).collect();
    let name = argument(3, Kernel::best_for_products().name());
    let shapes = argument(4, SHAPES);
    let shapes: Vec<(usize, usize)> = shapes.split(',').map(shape).collect();
    let kernel =
        Kernel::available().iter().find(|kernel| kernel.name() == name).expect("a kernel of this machine");
    let threads = Threads::new(num_threads).expect("threads");
    println!("{{\"threads\": {num_threads}, \"kernel\": \"{name}\",");
    println!(" \"read_gb_per_s\": {:.1},", read_speed(num_threads));
    println!(" \"peak_gflop_per_s\": {:.1},", peak(num_threads));
    println!(" \"products\": [");
    let mut first = true;
    for kind in argument(1, "f32,bf16,int8").split(',') {
        let (weight_kind, bytes) = match kind {
            "f32" => (WeightKind::F32, 4),
            "bf16" => (WeightKind::Bf16, 2),
            "int8" => (WeightKind::Int8 { group_size: 1 << 24 }, 1),
            "w8a8" => (WeightKind::W8A8 { group_size: 1 << 24 }, 1),
            "w8a8-32" => (WeightKind::W8A8 { group_size: 32 }, 1),
            "int8-128" => (WeightKind::Int8 { group_size: 128 }, 1),
            "w4a8-32" | "w4a8-128" => (half_bytes(kind), 1),
            "q4_k" => (WeightKind::Quantized(TWO_LEVELS), 1),
            _ => panic!("{kind} is not a kind of weights"),
        };
        for &(inputs, outputs) in &shapes {
            let weights: Vec<f32> =
                (0..inputs * outputs).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
            let copies = (TURNS / (weights.len() * bytes)).clamp(1, 24);
            let layers: Vec<PackedLinear> = (0..copies)
                .map(|_| {
                    let mut layer =
                        PackedLinear::for_kernel(kernel, outputs, inputs, weight_kind).expect("memory");
                    let weights = Matrix::new(&weights, outputs, inputs).expect("a matrix");
                    if weight_kind == WeightKind::Quantized(TWO_LEVELS) {
                        layer.pack_quantized_rows(0, outputs, &threads, fill_levels).expect("good weights");
                    } else {
                        layer.pack_rows(0, weights, &threads).expect("good weights");
                    }
                    layer
                })
                .collect();
            for &m in &rows {
                let x: Vec<f32> = (0..m * inputs).map(|i| (i % 13) as f32 / 6.0 - 1.0).collect();
                let mut out = vec![0.0_f32; m * outputs];
                let mut turn = 0;
                let time = typical(|| {
                    turn += 1;
                    let x = TokenRows { data: &x, stride: inputs };
                    let to = OutRows { data: &mut out, stride: outputs };
                    linear(&layers[turn % copies], x, m, &Epilogue::default(), &threads, to)
                        .expect("arrays that fit");
                });
                let gflops = (2 * m * inputs * outputs) as f64 / time / 1e9;
                let gb = layers[0].num_bytes() as f64 / time / 1e9;
                let comma = if first { "" } else { ",\n" };
                print!(
                    "{comma}  {{\"kind\": \"{kind}\", \"inputs\": {inputs}, \"outputs\": {outputs}, \"rows\": {m}, \"us\": {:.1}, \"gflop_per_s\": {gflops:.1}, \"gb_per_s\": {gb:.1}}}",
                    time * 1e6
                );
                first = false;
            }
        }
    }
    println!("\n]}}");
}

/// `768x2304`
fn shape(text: &str) -> (usize, usize) {
    let (inputs, outputs) = text.split_once('x').expect("a shape as 768x2304");
    (inputs.parse().expect("a number of inputs"), outputs.parse().expect("a number of outputs"))
}

/// As files of `Q4_K` have them.
const TWO_LEVELS: Quantized = Quantized {
    bits: 4,
    group_size: 32,
    scales: ScaleForm::TwoLevel,
    zeros: ZeroForm::Minimum,
    rounds_activations: true,
};

/// As `--quantization int4-g32` and `int4-g128` make them.
fn half_bytes(kind: &str) -> WeightKind {
    let group_size = if kind == "w4a8-32" { 32 } else { 128 };
    WeightKind::Quantized(Quantized {
        group_size,
        scales: ScaleForm::F16,
        zeros: ZeroForm::Middle,
        ..TWO_LEVELS
    })
}

fn fill_levels(row: usize, to: &mut QuantizedRow) {
    to.numbers.iter_mut().enumerate().for_each(|(k, number)| *number = ((row + k * 7) % 16) as i8);
    to.scales.fill(0.001_953_125);
    to.offsets.fill(0.003_906_25);
    to.factors.fill([33, 17]);
}

/// Seconds of a call, the lower quarter of as many as fit the budget: others use the machine, too.
fn typical(mut call: impl FnMut()) -> f64 {
    call();
    let start = Instant::now();
    let mut times = Vec::new();
    while times.len() < 5 || (start.elapsed() < BUDGET && times.len() < 2000) {
        let start = Instant::now();
        call();
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 4]
}

/// 10⁹ bytes a second, read by all threads together, in large pages as weights are, from memory that no cache near holds.
fn read_speed(num_threads: usize) -> f64 {
    const LEN: usize = (480 << 20) / 8;
    let mut data: Vec<u64> = Vec::with_capacity(LEN);
    #[cfg(target_os = "linux")]
    {
        use rustix::mm::{Advice, madvise};
        let start = data.as_mut_ptr().cast::<u8>();
        let skipped = start.align_offset(2 << 20);
        // SAFETY: memory of the vector, from its first large page on; how it is paged changes nothing in it.
        let _ = unsafe { madvise(start.add(skipped).cast(), LEN * 8 - skipped, Advice::LinuxHugepage) };
    }
    data.resize(LEN, 1);
    let time = typical(|| {
        std::thread::scope(|scope| {
            for part in data.chunks(LEN.div_ceil(num_threads)) {
                scope.spawn(move || {
                    let mut sums = [0_u64; 64];
                    for piece in part.chunks_exact(64) {
                        for (sum, x) in sums.iter_mut().zip(piece) {
                            *sum = sum.wrapping_add(*x);
                        }
                    }
                    black_box(sums)
                });
            }
        });
    });
    (LEN * 8) as f64 / time / 1e9
}

/// 10⁹ floating-point operations a second, by all threads together and from registers alone.
fn peak(num_threads: usize) -> f64 {
    const ROUNDS: usize = 2_000_000;
    let time = typical(|| {
        std::thread::scope(|scope| {
            for _ in 0..num_threads {
                scope.spawn(|| black_box(multiply_adds(ROUNDS)));
            }
        });
    });
    (num_threads * ROUNDS * multiply_adds(0) * 2) as f64 / time / 1e9
}

/// So many rounds, each of as many multiplications as are returned.
fn multiply_adds(rounds: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: just detected.
            return unsafe { x86::avx512(rounds) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: just detected.
            return unsafe { x86::avx2(rounds) };
        }
    }
    let mut sums = [1.0_f32; 64];
    for _ in 0..rounds {
        let x = black_box(0.5_f32);
        for sum in &mut sums {
            *sum = *sum * x + 0.25;
        }
    }
    black_box(sums);
    64
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::{
        arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps, _mm512_fmadd_ps, _mm512_set1_ps},
        hint::black_box,
    };

    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512(rounds: usize) -> usize {
        let mut sums = [_mm512_set1_ps(1.0); 16];
        let (x, y) = (_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(black_box(0.25)));
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, x, y);
            }
        }
        black_box(sums);
        16 * 16
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2(rounds: usize) -> usize {
        let mut sums = [_mm256_set1_ps(1.0); 12];
        let (x, y) = (_mm256_set1_ps(black_box(0.5)), _mm256_set1_ps(black_box(0.25)));
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, x, y);
            }
        }
        black_box(sums);
        12 * 8
    }
}
