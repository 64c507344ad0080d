//! What one step costs the control plane: schedule, update and both, for N running decodes; and an admission.

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use loadgen::{
    Decoding, DecodingOptions,
    decoding::{BLOCK_SIZE, StepTimes},
};
use scheduler::{NewRequest, SamplingParams, Scheduler, SchedulerConfig, StepBuffers, TokenRows};

#[derive(Clone, Copy)]
enum Part {
    Schedule,
    Update,
    Both,
}

/// `steps` steps, of which only `part` is on the clock.
fn measure(decoding: &mut Decoding, steps: u64, part: Part) -> Duration {
    let part_of = |times: StepTimes| match part {
        Part::Schedule => times.schedule,
        Part::Update => times.update,
        Part::Both => times.schedule + times.update,
    };
    (0..steps).map(|_| part_of(decoding.step().1)).sum()
}

/// Schedule, update and both, for so many decodes, and a prompt of `prefill_tokens` in each step.
fn steps(criterion: &mut Criterion, group: &str, num_running: u32, prefill_tokens: u32) {
    let options = DecodingOptions { prefill_tokens, ..DecodingOptions::new(num_running) };
    run(criterion, group, options);
}

fn run(criterion: &mut Criterion, group: &str, options: DecodingOptions) {
    let DecodingOptions { num_running, prefill_tokens, .. } = options;
    let mut decoding = Decoding::new(options).expect("a valid configuration");
    println!(
        "{num_running} running decodes and {prefill_tokens} prompt tokens in each step, pool of {} blocks of {BLOCK_SIZE} tokens",
        decoding.num_blocks()
    );
    let mut group = criterion.benchmark_group(group);
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

fn decodes(criterion: &mut Criterion) {
    for num_running in [1, 64, 256, 1024] {
        steps(criterion, "step", num_running, 0);
    }
}

/// Decodes with a prompt of 2,048 tokens in each step, admitted in it, computed whole and ended by it.
fn decodes_and_a_prompt(criterion: &mut Criterion) {
    for num_running in [64, 256] {
        steps(criterion, "step with 2048 prompt tokens", num_running, 2048);
    }
}

/// Decodes whose drafts are looked for and run: 16 of each, found in each step, or none, where nothing repeats.
fn decodes_with_drafts(criterion: &mut Criterion) {
    for (group, repeats) in
        [("step with 16 drafts of each", true), ("step that looks for drafts in vain", false)]
    {
        run(criterion, group, DecodingOptions { num_drafts: 16, repeats, ..DecodingOptions::new(256) });
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

criterion_group!(benches, decodes, decodes_and_a_prompt, decodes_with_drafts, admission);
criterion_main!(benches);
