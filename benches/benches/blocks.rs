//! What a block costs: allocate and free, register and find.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use kvblocks::{BlockPool, ChainHasher};

fn blocks(criterion: &mut Criterion) {
    let mut pool = BlockPool::new(16_384).expect("a valid size");
    criterion.bench_function("block/allocate+free", |bencher| {
        bencher.iter(|| {
            let block = pool.allocate_one().expect("a free block");
            pool.free(black_box(block));
        });
    });
    let hasher = ChainHasher::random();
    let tokens: Vec<i32> = (0..16).collect();
    criterion.bench_function("block/hash 16 tokens", |bencher| {
        bencher.iter(|| hasher.hash_block(None, black_box(&tokens), &[]));
    });
    let mut next = 0;
    criterion.bench_function("block/allocate+register+lookup+free", |bencher| {
        bencher.iter(|| {
            next += 1;
            let hash = hasher.hash_block(None, &[next], &[]);
            let block = pool.allocate_one().expect("a free block");
            pool.register(block, hash, 1);
            black_box(pool.lookup(&hash));
            pool.free(block);
        });
    });
}

criterion_group!(benches, blocks);
criterion_main!(benches);
