//! What one step costs the control plane: schedule, update and both, for N running decodes; and an admission.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rustvllm_benches::{BLOCK_SIZE, Decoding};
use scheduler::{NewRequest, SamplingParams, Scheduler, SchedulerConfig, StepBuffers, TokenRows};

#[derive(Clone, Copy)]
enum Part {
    Schedule,
    Update,
    Both,
}

/// `steps` steps, of which only `part` is on the clock. Outputs are drained and ended requests replaced off it.
fn measure(decoding: &mut Decoding, steps: u64, part: Part) -> Duration {
    let mut elapsed = Duration::ZERO;
    for _ in 0..steps {
        let start = Instant::now();
        let output = decoding.schedule();
        let scheduled = Instant::now();
        let finished = decoding.update(&output);
        let updated = Instant::now();
        elapsed += match part {
            Part::Schedule => scheduled - start,
            Part::Update => updated - scheduled,
            Part::Both => updated - start,
        };
        decoding.drain(|record| {
            black_box(record);
        });
        if finished > 0 {
            decoding.refill();
        }
    }
    elapsed
}

fn steps(criterion: &mut Criterion) {
    for num_running in [1, 64, 256, 1024] {
        let mut decoding = Decoding::new(num_running);
        println!(
            "{num_running} running decodes, pool of {} blocks of {BLOCK_SIZE} tokens",
            decoding.num_blocks()
        );
        let mut group = criterion.benchmark_group("step");
        group.throughput(Throughput::Elements(u64::from(num_running)));
        for (name, part) in
            [("schedule", Part::Schedule), ("update", Part::Update), ("schedule+update", Part::Both)]
        {
            group.bench_function(BenchmarkId::new(name, num_running), |bencher| {
                bencher.iter_custom(|iterations| measure(&mut decoding, iterations, part));
            });
        }
        group.finish();
    }
}

/// From `add_request` to the first plan, for a prompt of 1,024 tokens of which 512 are cached.
fn admission(criterion: &mut Criterion) {
    let config = SchedulerConfig { max_num_batched_tokens: 2048, ..SchedulerConfig::new(16_384, 4096) };
    let buffers = (0..2).map(|_| StepBuffers::owned(&config)).collect();
    let mut scheduler = Scheduler::new(config, buffers).expect("a valid configuration");
    let mut consumer = scheduler.take_consumer().expect("taken once");
    let mut added = 0;
    criterion.bench_function("admission/1024 tokens, 512 cached", |bencher| {
        bencher.iter_custom(|iterations| {
            let mut elapsed = Duration::ZERO;
            for _ in 0..iterations {
                added += 1;
                let prompt_token_ids = (0..1024).map(|i| if i < 512 { i } else { i ^ added << 11 }).collect();
                let handle = scheduler.handle();
                let params = SamplingParams { max_tokens: 1, ..SamplingParams::default() };
                let request = NewRequest::new(handle.new_key(), &added.to_string(), prompt_token_ids, params);
                let start = Instant::now();
                handle.add_request(request).expect("a request that fits");
                let output = scheduler.schedule().expect("a free set").expect("the request");
                elapsed += start.elapsed();
                assert_eq!(output.total_num_scheduled_tokens, if added == 1 { 1024 } else { 512 });
                scheduler.update_from_output(&output, TokenRows::column(&[7])).expect("the step in flight");
                consumer.drain(drop);
            }
            elapsed
        });
    });
}

criterion_group!(benches, steps, admission);
criterion_main!(benches);
