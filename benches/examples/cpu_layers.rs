//! Products of all layers of GPT-2 small and its head, one after the other as in a step, over reading the same weights in turn, as
//! JSON: `cargo run --release -p rustvllm-benches --example cpu_layers`.
//!
//! Medians of 60 turns; both by the same threads. Rows have 32 bits, but 16 with `bf16-rows`, which are weights of `bf16`. `w8a8` are
//! weights of 8 bits with a scale for each output, `w8a8-32` and `w4a8-32` those that `--quantization int8-g32` and `int4-g32` make.
//! `cpu_layers [threads] [f32|bf16|bf16-rows|w8a8|w8a8-32|w4a8-32,…] [rows,…] [kernel]`

use std::{hint::black_box, time::Instant};

use cpu_kernels::{
    Element, Epilogue, Kernel, Matrix, OutRows, PackedLinear, Quantized, ScaleForm, Threads, TokenRows,
    WeightKind, ZeroForm, bf16, linear, read_once,
};

/// Inputs and outputs of the layers of a block.
const BLOCK: [(usize, usize); 4] = [(768, 2304), (768, 768), (768, 3072), (3072, 768)];
const NUM_BLOCKS: usize = 12;
const HEAD: (usize, usize) = (768, 50257);
const TURNS: usize = 60;
/// More than any layer has, so that a group is all inputs of an output.
const MANY_INPUTS: usize = 1 << 16;
/// Bytes of a cache line.
const LINE: usize = 64;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |i: usize, default: &str| arguments.get(i).map_or(default, String::as_str).to_owned();
    let num_threads: usize = argument(0, "2").parse().expect("a number of threads");
    let threads = Threads::new(num_threads).expect("threads");
    let rows = argument(2, "1,2,4,8,14");
    let rows: Vec<usize> = rows.split(',').map(|m| m.parse().expect("a number of rows")).collect();
    let name = argument(3, Kernel::best_for_products().name());
    let kernel =
        Kernel::available().iter().find(|kernel| kernel.name() == name).expect("a kernel of this machine");
    println!("{{\"threads\": {num_threads}, \"kernel\": \"{name}\", \"layers\": [");
    let mut comma = "";
    for name in argument(1, "f32,bf16").split(',') {
        let kind = match name {
            "f32" => WeightKind::F32,
            "bf16" | "bf16-rows" => WeightKind::Bf16,
            "w8a8" => WeightKind::W8A8 { group_size: MANY_INPUTS },
            "w8a8-32" => WeightKind::Quantized(groups_of_32(8)),
            "w4a8-32" => WeightKind::Quantized(groups_of_32(4)),
            _ => panic!("{name} is not a kind of weights"),
        };
        let shapes = BLOCK.into_iter().cycle().take(NUM_BLOCKS * BLOCK.len()).chain([HEAD]);
        let layers: Vec<PackedLinear> = shapes.map(|shape| layer(kernel, kind, shape, &threads)).collect();
        for &num_rows in &rows {
            let medians = if name == "bf16-rows" { medians::<bf16> } else { medians::<f32> };
            let [product, reading] = medians(&layers, num_rows, &threads).map(|seconds| seconds * 1e3);
            print!(
                "{comma}  {{\"kind\": \"{name}\", \"rows\": {num_rows}, \"ms\": {product:.3}, \"reading_ms\": {reading:.3}, \"ratio\": {:.3}}}",
                product / reading
            );
            comma = ",\n";
        }
    }
    println!("\n]}}");
}

/// As the engine makes them of a checkpoint.
fn groups_of_32(bits: u8) -> Quantized {
    Quantized {
        bits,
        group_size: 32,
        scales: ScaleForm::F16,
        zeros: ZeroForm::Middle,
        rounds_activations: true,
    }
}

fn layer(
    kernel: &'static Kernel,
    kind: WeightKind,
    (inputs, outputs): (usize, usize),
    threads: &Threads,
) -> PackedLinear {
    let weights: Vec<f32> = (0..inputs * outputs).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
    let mut layer = PackedLinear::for_kernel(kernel, outputs, inputs, kind).expect("memory");
    let weights = Matrix::new(&weights, outputs, inputs).expect("a matrix");
    layer.pack_rows(0, weights, threads).expect("good weights");
    layer
}

/// Seconds of the products of all layers, and of reading their weights.
fn medians<X: Element + Default>(layers: &[PackedLinear], num_rows: usize, threads: &Threads) -> [f64; 2] {
    let most = |size: fn(&PackedLinear) -> usize| layers.iter().map(size).max().unwrap_or(0);
    let num_inputs = num_rows * most(PackedLinear::in_features);
    let x: Vec<X> = (0..num_inputs).map(|i| X::narrow((i % 13) as f32 - 6.0)).collect();
    // From a cache line on, as the arrays of an engine lie.
    let num_outputs = num_rows * most(PackedLinear::out_features);
    let mut out = vec![X::narrow(0.0); num_outputs + LINE / size_of::<X>()];
    let first = out.as_ptr().align_offset(LINE);
    let out = &mut out[first..];
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..TURNS {
        let start = Instant::now();
        for layer in layers {
            let from = TokenRows { data: &x, stride: layer.in_features() };
            let to = OutRows { data: &mut *out, stride: layer.out_features() };
            linear(layer, from, num_rows, &Epilogue::default(), threads, to).expect("arrays that fit");
        }
        times[0].push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        for layer in layers {
            black_box(read_once(layer, threads));
        }
        times[1].push(start.elapsed().as_secs_f64());
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[TURNS / 2]
    })
}
