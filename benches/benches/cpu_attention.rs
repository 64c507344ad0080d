//! Attention of a GPT-2-small layer (12 heads of 64) by each kernel that this machine has, on one thread. Layers take turns,
//! as in a step, so that the cache of none stays near.

use cpu_kernels::{
    AttentionOptions, CacheElement, CacheLayout, Element, Int8Head, Kernel, RaggedBatch, Threads, TokenRows,
    attend, bf16, reference::PlainHead,
};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

const BLOCK_SIZE: usize = 16;
const NUM_HEADS: usize = 12;
const HEAD_DIM: usize = 64;

/// Name, requests, tokens of each that are computed before, new ones.
const STEPS: [(&str, usize, usize, usize); 4] = [
    ("decode 1 x 1024", 1, 1023, 1),
    ("decode 32 x 256", 32, 255, 1),
    ("prefill 512", 1, 0, 512),
    ("prefill 2048", 1, 0, 2048),
];
/// All layers' caches together have so many bytes: more than processors keep.
const CACHE_BYTES: usize = 256 << 20;

fn step<E: Element, C: PlainHead + CacheElement<E>>(criterion: &mut Criterion, dtype: &str) {
    for (name, num_reqs, computed, new) in STEPS {
        let seq_len = computed + new;
        let columns = seq_len.div_ceil(BLOCK_SIZE);
        let num_blocks = 1 + num_reqs * columns;
        let layout =
            CacheLayout { num_blocks, block_size: BLOCK_SIZE, num_kv_heads: NUM_HEADS, head_dim: HEAD_DIM };
        // Any order will do that is not the order of addresses; 7 shares no factor with what is likely.
        let table: Vec<i32> = (0..num_blocks - 1).map(|i| (i * 7 % (num_blocks - 1) + 1) as i32).collect();
        let starts: Vec<i32> = (0..=num_reqs).map(|i| (i * new) as i32).collect();
        let num_tokens = num_reqs * new;
        let lens = vec![seq_len as i32; num_reqs];
        let batch =
            RaggedBatch::new(BLOCK_SIZE, &starts, &lens, &table, &vec![-1; num_tokens]).expect("a good step");
        let number = |i: usize| (i * 37 % 101) as f32 / 50.0 - 1.0;
        let query: Vec<E> = (0..num_tokens * NUM_HEADS * HEAD_DIM).map(|i| E::narrow(number(i))).collect();
        let head = |head: usize| -> Vec<f32> { (0..HEAD_DIM).map(|i| number(head * HEAD_DIM + i)).collect() };
        let heads = 0..2 * num_blocks * BLOCK_SIZE * NUM_HEADS;
        let cache: Vec<C> = heads.flat_map(|index| C::kept(&head(index))).collect();
        let num_layers = CACHE_BYTES.div_ceil(size_of_val(&cache[..]));
        let caches = vec![cache; num_layers];
        let mut layers = caches.iter().cycle();
        let mut out = query.clone();
        let threads = Threads::new(1).expect("no thread to start");
        let mut group = criterion.benchmark_group(format!("attention/{name}/{dtype}"));
        group.sample_size(10);
        for kernel in Kernel::available() {
            group.bench_function(BenchmarkId::from_parameter(kernel.name()), |bencher| {
                bencher.iter(|| {
                    let query = TokenRows { data: &query, stride: NUM_HEADS * HEAD_DIM };
                    let options = AttentionOptions::causal(0.125);
                    let cache = layers.next().expect("a layer");
                    attend(&batch, query, NUM_HEADS, cache, layout, &options, kernel, &threads, &mut out)
                        .expect("arrays that fit");
                });
            });
        }
        group.finish();
    }
}

fn attention(criterion: &mut Criterion) {
    step::<f32, f32>(criterion, "f32");
    step::<bf16, bf16>(criterion, "bf16");
    step::<f32, bf16>(criterion, "f32 over bf16");
    step::<f32, Int8Head>(criterion, "f32 over int8");
    step::<bf16, Int8Head>(criterion, "bf16 over int8");
}

criterion_group!(benches, attention);
criterion_main!(benches);
