//! Products of the GPT-2-small shapes with packed weights, as JSON: `cargo run --release -p rustvllm-benches --example cpu_linear`.
//!
//! Each time is the lower quarter of several, over weights that take turns so that none stays near, as in a step of a model. In the
//! same run: the speed of reading, and the machine's peaks of products from registers, both with as many threads.
//! `bf16-rows` are weights of `bf16` times rows of `bf16`; all others meet rows of 32 bits.
//! `cpu_linear [threads] [kind,…] [rows,…] [kernel] [inputsxoutputs,…]`

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use cpu_kernels::{
    Element, Epilogue, Kernel, Matrix, OutRows, PackedLinear, PeakKind, Quantized, QuantizedRow, ScaleForm,
    Threads, TokenRows, WeightKind, ZeroForm, bf16, linear, peak, read_once,
};

/// Inputs and outputs.
const SHAPES: &str = "768x2304,768x768,768x3072,3072x768,768x50257";
/// Bytes over which weights of one shape take turns.
const TURNS: usize = 160 << 20;
/// Bytes of a cache line.
const LINE: usize = 64;
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
    println!(" \"read_gb_per_s\": {:.1},", read_speed(&threads));
    for (name, kind) in [("f32", PeakKind::F32), ("bf16", PeakKind::Bf16), ("int8", PeakKind::Int8)] {
        println!(" \"peak_gflop_per_s_{name}\": {:.1},", peak(kind, &threads).unwrap_or(0.0) / 1e9);
    }
    println!(" \"products\": [");
    let mut first = true;
    for kind in argument(1, "f32,bf16,int8").split(',') {
        let (weight_kind, bytes) = match kind {
            "f32" => (WeightKind::F32, 4),
            "bf16" | "bf16-rows" => (WeightKind::Bf16, 2),
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
                let time = if kind == "bf16-rows" {
                    time_of::<bf16>(&layers, m, &threads)
                } else {
                    time_of::<f32>(&layers, m, &threads)
                };
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

/// Seconds of a product with so many rows, of weights that take turns.
fn time_of<X: Element + Default>(layers: &[PackedLinear], num_rows: usize, threads: &Threads) -> f64 {
    let (inputs, outputs) = (layers[0].in_features(), layers[0].out_features());
    let x: Vec<X> = (0..num_rows * inputs).map(|i| X::narrow((i % 13) as f32 / 6.0 - 1.0)).collect();
    // From a cache line on, as the arrays of an engine lie: a store across two lines costs more than the rest.
    let mut out = vec![X::narrow(0.0); num_rows * outputs + LINE / size_of::<X>()];
    let first = out.as_ptr().align_offset(LINE);
    let out = &mut out[first..][..num_rows * outputs];
    let mut turn = 0;
    typical(|| {
        turn += 1;
        let x = TokenRows { data: &x, stride: inputs };
        let to = OutRows { data: &mut *out, stride: outputs };
        linear(&layers[turn % layers.len()], x, num_rows, &Epilogue::default(), threads, to)
            .expect("arrays that fit");
    })
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

/// 10⁹ bytes a second, read by all threads together with a loop that asks ahead, from memory that no cache near holds.
fn read_speed(threads: &Threads) -> f64 {
    const OUTPUTS: usize = 61_440;
    const INPUTS: usize = 2048;
    let mut layer = PackedLinear::new(OUTPUTS, INPUTS, WeightKind::F32).expect("memory");
    let rows = vec![1.0_f32; 1024 * INPUTS];
    for first in (0..OUTPUTS).step_by(1024) {
        layer
            .pack_rows(first, Matrix::new(&rows, 1024, INPUTS).expect("a matrix"), threads)
            .expect("good weights");
    }
    let time = typical(|| {
        black_box(read_once(&layer, threads));
    });
    layer.num_bytes() as f64 / time / 1e9
}
