//! What the transport costs: a token through the socket for N streams, compared with the same without a socket; and one request
//! there and back.
//!
//! The "model" takes no time and says 7, so the engine's thread steps as fast as it can, and several steps travel together;
//! engine, I/O threads and reader are in one process. In addition to the time per token, each group prints the processor time of all
//! threads per token, and so does a run whose steps take a while, as those of a model do: there every step wakes every thread.

use std::{
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ipc::{
    ClientOptions, ClientOutput, Endpoint, EngineClient, EngineServer, Listener, Notifier, ServerOptions,
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    time::{ClockId, clock_gettime},
};
use scheduler::{
    EngineHandle, NewRequest, SamplingParams, Scheduler, SchedulerConfig, StepBuffers, TokenRows,
    egress::Consumer,
};

/// Tokens of one stream.
const MAX_TOKENS: u32 = 1000;

/// Time of a step in the paced runs.
const STEP_TIME: Duration = Duration::from_micros(250);

/// A scheduler that is stepped by a thread of its own.
struct Engine {
    handle: EngineHandle,
    notifier: Arc<Notifier>,
    is_stopping: Arc<AtomicBool>,
    is_paced: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    fn start() -> (Self, Consumer) {
        let notifier = Arc::new(Notifier::new().expect("an eventfd"));
        let (is_stopping, is_paced) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (sender, receiver) = std::sync::mpsc::channel();
        let thread = std::thread::spawn({
            let (notifier, is_stopping, is_paced) = (notifier.clone(), is_stopping.clone(), is_paced.clone());
            move || {
                let config = SchedulerConfig { max_num_seqs: 256, ..SchedulerConfig::new(32_768, 4096) };
                let buffers = (0..2).map(|_| StepBuffers::owned(&config)).collect();
                let mut scheduler = Scheduler::new(config, buffers).expect("a valid configuration");
                let consumer = scheduler.take_consumer().expect("taken once");
                let handle = scheduler.handle();
                sender.send((handle.clone(), consumer)).expect("the benchmark waits");
                let tokens = vec![7; 256];
                let mut seen_wakes = 0;
                while !is_stopping.load(Ordering::Relaxed) {
                    if let Some(output) = scheduler.schedule().expect("a free set") {
                        if is_paced.load(Ordering::Relaxed) {
                            std::thread::park_timeout(STEP_TIME);
                        }
                        let rows = TokenRows::column(&tokens[..output.num_sampled as usize]);
                        scheduler.update_from_output(&output, rows).expect("the step in flight");
                        notifier.notify();
                    } else {
                        notifier.notify();
                        handle.wait_for_work(&mut seen_wakes, None).expect("the waiter");
                    }
                }
            }
        });
        let (handle, consumer) = receiver.recv().expect("a scheduler");
        (Self { handle, notifier, is_stopping, is_paced, thread: Some(thread) }, consumer)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::Relaxed);
        self.handle.wake();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the scheduler's thread ended well");
        }
    }
}

fn sleep_until_notified(notifier: &Notifier) {
    poll(&mut [PollFd::new(&notifier.as_fd(), PollFlags::IN)], None).expect("poll");
}

fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, ..SamplingParams::default() }
}

/// Runs streams and adds up what they cost.
#[derive(Default)]
struct Cost {
    num_tokens: u64,
    cpu: Duration,
}

impl Cost {
    fn measure(&mut self, num_streams: u64, run: impl FnOnce()) -> Duration {
        let (cpu, began) = (cpu_time(), Instant::now());
        run();
        let elapsed = began.elapsed();
        self.cpu += cpu_time().saturating_sub(cpu);
        self.num_tokens += num_streams * u64::from(MAX_TOKENS);
        elapsed
    }

    fn print(&self, what: &str) {
        let per_token = self.cpu.as_secs_f64() * 1e6 / self.num_tokens as f64;
        println!("{what}: {per_token:.3} µs of processor time per token, all threads");
    }
}

/// The engine's outputs read by another thread of its process.
fn without_socket(num_streams: u64, engine: &Engine, consumer: &mut Consumer) {
    for index in 0..num_streams {
        let key = engine.handle.new_key();
        let request = NewRequest::new(key, &index.to_string(), vec![1, 2, 3], params(MAX_TOKENS));
        engine.handle.add_request(request).expect("taken");
    }
    let mut num_left = num_streams;
    while num_left > 0 {
        sleep_until_notified(&engine.notifier);
        engine.notifier.clear();
        consumer.drain(|output| num_left -= u64::from(output.finish_reason.is_some()));
        if engine.handle.num_held_back() > 0 {
            engine.handle.wake();
        }
    }
}

fn through_socket(num_streams: u64, client: &EngineClient) {
    for index in 0..num_streams {
        let key = client.new_key();
        let request = NewRequest::new(key, &index.to_string(), vec![1, 2, 3], params(MAX_TOKENS));
        client.add_requests(&[request]).expect("sent");
    }
    wait_for_ends(num_streams, client);
}

fn wait_for_ends(mut num_left: u64, client: &EngineClient) {
    while num_left > 0 {
        sleep_until_notified(client.notifier());
        client.drain_outputs(|output| match output {
            ClientOutput::Output(output) => num_left -= u64::from(output.finish_reason.is_some()),
            lost => panic!("{lost:?}"),
        });
    }
}

fn serve(engine: &Engine, consumer: Consumer) -> (EngineServer, EngineClient) {
    let directory = std::env::temp_dir().join(format!("rustvllm-bench-{}", std::process::id()));
    let path = directory.join("engine");
    let mut options = ServerOptions::new(engine.handle.clone(), consumer, engine.notifier.clone());
    options.listeners.push(Listener::unix(&path).expect("a listener"));
    let server = EngineServer::start(options).expect("a server");
    let client = EngineClient::connect(Endpoint::Unix(path), ClientOptions::default()).expect("a connection");
    (server, client)
}

fn streams(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("token");
    group.sample_size(10);
    for num_streams in [1, 64, 256] {
        group.throughput(Throughput::Elements(num_streams * u64::from(MAX_TOKENS)));
        let (engine, mut consumer) = Engine::start();
        let mut cost = Cost::default();
        group.bench_function(BenchmarkId::new("without socket", num_streams), |bencher| {
            bencher.iter_custom(|iterations| {
                (0..iterations)
                    .map(|_| {
                        cost.measure(num_streams, || without_socket(num_streams, &engine, &mut consumer))
                    })
                    .sum()
            });
        });
        cost.print(&format!("{num_streams} streams without socket"));
        engine.is_paced.store(true, Ordering::Relaxed);
        let mut cost = Cost::default();
        cost.measure(num_streams, || without_socket(num_streams, &engine, &mut consumer));
        cost.print(&format!("{num_streams} streams without socket, steps of {STEP_TIME:?}"));
        let (_server, client) = serve(&engine, consumer);
        let mut cost = Cost::default();
        cost.measure(num_streams, || through_socket(num_streams, &client));
        cost.print(&format!("{num_streams} streams through socket, steps of {STEP_TIME:?}"));
        engine.is_paced.store(false, Ordering::Relaxed);
        let mut cost = Cost::default();
        group.bench_function(BenchmarkId::new("through socket", num_streams), |bencher| {
            bencher.iter_custom(|iterations| {
                (0..iterations)
                    .map(|_| cost.measure(num_streams, || through_socket(num_streams, &client)))
                    .sum()
            });
        });
        cost.print(&format!("{num_streams} streams through socket"));
    }
    group.finish();
}

/// From `add_requests` to the one token of the request, drained.
fn round_trip(criterion: &mut Criterion) {
    let (engine, consumer) = Engine::start();
    let (_server, client) = serve(&engine, consumer);
    let mut group = criterion.benchmark_group("round trip");
    for num_prompt in [16, 2048] {
        group.bench_function(BenchmarkId::new("one request", num_prompt), |bencher| {
            bencher.iter_custom(|iterations| {
                let mut elapsed = Duration::ZERO;
                for _ in 0..iterations {
                    let key = client.new_key();
                    let prompt = (0..num_prompt).collect();
                    let request = [NewRequest::new(key, "a", prompt, params(1))];
                    let began = Instant::now();
                    client.add_requests(&request).expect("sent");
                    wait_for_ends(1, &client);
                    elapsed += began.elapsed();
                }
                elapsed
            });
        });
    }
    group.finish();
}

criterion_group!(benches, streams, round_trip);
criterion_main!(benches);
