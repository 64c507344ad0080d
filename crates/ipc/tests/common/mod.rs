//! A real scheduler with a model whose tokens a test chooses, behind a server, in this process.

#![allow(dead_code, reason = "each test file uses a part")]

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use ipc::{
    ClientMessage, ClientOptions, ClientOutput, EngineClient, EngineMessage, EngineRouter, EngineServer,
    Hello, Listener, Notifier, PROTOCOL_VERSION, ServerOptions,
};
use scheduler::{
    EngineHandle, FinishReason, NewRequest, RequestKey, SamplingParams, Scheduler, SchedulerConfig,
    StepBuffers, TokenRows,
};

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

static NEXT_DIRECTORY: AtomicU32 = AtomicU32::new(0);

/// A path in a directory that does not exist yet.
pub(crate) fn socket_path() -> PathBuf {
    let number = NEXT_DIRECTORY.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("rustvllm-ipc-{}-{number}", std::process::id())).join("engine")
}

pub(crate) fn config() -> SchedulerConfig {
    SchedulerConfig { max_num_seqs: 64, ..SchedulerConfig::new(8192, 16_384) }
}

/// A scheduler in a thread of its own, and its server.
pub(crate) struct Engine {
    pub(crate) path: PathBuf,
    pub(crate) handle: EngineHandle,
    pub(crate) server: EngineServer,
    is_stopping: Arc<AtomicBool>,
    /// While set, no step is run.
    pub(crate) is_paused: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    pub(crate) fn start() -> Self {
        Self::start_with(config(), Duration::ZERO, |_| {})
    }

    pub(crate) fn start_with(
        config: SchedulerConfig,
        step_time: Duration,
        change: impl FnOnce(&mut ServerOptions),
    ) -> Self {
        let notifier = Arc::new(Notifier::new().expect("an eventfd"));
        let (is_stopping, is_paused) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (sender, receiver) = std::sync::mpsc::channel();
        let thread = std::thread::spawn({
            let (notifier, is_stopping, is_paused) =
                (notifier.clone(), is_stopping.clone(), is_paused.clone());
            move || {
                let buffers = (0..2).map(|_| StepBuffers::owned(&config)).collect();
                let mut scheduler = Scheduler::new(config, buffers).expect("a valid configuration");
                let consumer = scheduler.take_consumer().expect("taken once");
                sender.send((scheduler.handle(), consumer)).expect("the test waits");
                step(&mut scheduler, &notifier, step_time, &is_stopping, &is_paused);
            }
        });
        let (handle, consumer) = receiver.recv().expect("a scheduler");
        let path = socket_path();
        let mut options = ServerOptions::new(handle.clone(), consumer, notifier);
        options.listeners.push(Listener::unix(&path).expect("a listener"));
        options.info = b"{\"model\": \"made up\"}".as_slice().into();
        change(&mut options);
        let server = EngineServer::start(options).expect("a server");
        Self { path, handle, server, is_stopping, is_paused, thread: Some(thread) }
    }

    pub(crate) fn client(&self) -> EngineClient {
        EngineClient::connect(ipc::Endpoint::Unix(self.path.clone()), ClientOptions::default())
            .expect("a client")
    }

    /// Wait until nothing is left of any request.
    pub(crate) fn wait_until_empty(&self) {
        wait_until("the engine is empty", || {
            let stats = self.handle.stats();
            self.handle.num_queued() == 0
                && !self.handle.is_busy()
                && stats.num_waiting == 0
                && stats.num_free_blocks == stats.num_usable_blocks
        });
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.server.stop();
        self.is_stopping.store(true, Ordering::Relaxed);
        self.handle.wake();
        let result = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            result.expect("joined once").expect("the scheduler's thread ended well");
        }
    }
}

fn step(
    scheduler: &mut Scheduler,
    notifier: &Notifier,
    step_time: Duration,
    is_stopping: &AtomicBool,
    is_paused: &AtomicBool,
) {
    let mut seen_wakes = 0;
    let handle = scheduler.handle();
    while !is_stopping.load(Ordering::Relaxed) {
        if is_paused.load(Ordering::Relaxed) {
            pause(Duration::from_millis(1));
            continue;
        }
        let Some(output) = scheduler.schedule().expect("a free set") else {
            // An abort may have been the last thing to do.
            notifier.notify();
            handle.wait_for_work(&mut seen_wakes, Some(PATIENCE)).expect("the waiter");
            continue;
        };
        if !step_time.is_zero() {
            pause(step_time);
        }
        let tokens = vec![7; output.num_sampled as usize];
        scheduler.update_from_output(&output, TokenRows::column(&tokens)).expect("the step in flight");
        notifier.notify();
    }
    scheduler.check_invariants();
}

#[expect(clippy::disallowed_methods, reason = "what a test waits for has no descriptor")]
pub(crate) fn pause(duration: Duration) {
    std::thread::sleep(duration);
}

pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "not so in time: {what}");
        pause(Duration::from_millis(1));
    }
}

pub(crate) fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, ..SamplingParams::default() }
}

/// A client of one engine or of several.
pub(crate) trait Client {
    fn fresh_key(&self) -> RequestKey;
    fn drain(&self, receive: &mut dyn FnMut(ClientOutput));
}

impl Client for EngineClient {
    fn fresh_key(&self) -> RequestKey {
        self.new_key()
    }

    fn drain(&self, receive: &mut dyn FnMut(ClientOutput)) {
        self.drain_outputs(receive);
    }
}

impl Client for EngineRouter {
    fn fresh_key(&self) -> RequestKey {
        self.new_key()
    }

    fn drain(&self, receive: &mut dyn FnMut(ClientOutput)) {
        self.drain_outputs(receive);
    }
}

pub(crate) fn request(client: &impl Client, id: &str, num_prompt: i32, max_tokens: u32) -> NewRequest {
    NewRequest::new(client.fresh_key(), id, (1..=num_prompt).collect(), params(max_tokens))
}

/// Everything that comes until `num_ends` requests have ended.
pub(crate) fn collect(client: &impl Client, num_ends: usize) -> Vec<ClientOutput> {
    let mut outputs = Vec::new();
    let mut ends = 0;
    wait_until("all requests have ended", {
        let collected = std::cell::RefCell::new((&mut outputs, &mut ends));
        move || {
            let (outputs, ends) = &mut *collected.borrow_mut();
            client.drain(&mut |output| {
                **ends += usize::from(output.is_last());
                outputs.push(output);
            });
            **ends >= num_ends
        }
    });
    outputs
}

/// Tokens of one request, in order.
pub(crate) fn tokens_of(outputs: &[ClientOutput], key: RequestKey) -> Vec<i32> {
    outputs
        .iter()
        .filter_map(|output| match output {
            ClientOutput::Output(output) if output.key == key && output.new_token_id >= 0 => {
                Some(output.new_token_id)
            }
            _ => None,
        })
        .collect()
}

pub(crate) fn finish_of(outputs: &[ClientOutput], key: RequestKey) -> Option<FinishReason> {
    outputs.iter().find_map(|output| match output {
        ClientOutput::Output(output) if output.key == key => output.finish_reason,
        _ => None,
    })
}

/// A connection that says what it likes.
pub(crate) struct RawClient {
    pub(crate) stream: UnixStream,
    pub(crate) index: u32,
}

impl RawClient {
    /// Connect and say nothing.
    pub(crate) fn silent(engine: &Engine) -> Self {
        let stream = UnixStream::connect(&engine.path).expect("a connection");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Self { stream, index: 0 }
    }

    /// Connect and be welcomed.
    pub(crate) fn greeted(engine: &Engine) -> Self {
        let mut client = Self::silent(engine);
        let Some(EngineMessage::Challenge(_)) = client.read() else { panic!("a challenge") };
        client.send(&ClientMessage::Hello(Hello {
            version: PROTOCOL_VERSION,
            capabilities: 0,
            nonce: [0; 32],
            proof: None,
        }));
        let Some(EngineMessage::Welcome(welcome)) = client.read() else { panic!("a welcome") };
        client.index = welcome.client_index;
        client
    }

    pub(crate) fn send(&mut self, message: &ClientMessage) {
        let mut frame = Vec::new();
        message.encode(&mut frame);
        self.stream.write_all(&frame).expect("written");
    }

    /// The next message, or `None` at the end.
    pub(crate) fn read(&mut self) -> Option<EngineMessage> {
        let mut header = [0; ipc::HEADER_BYTES];
        self.stream.read_exact(&mut header).ok()?;
        let mut body = vec![0; u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize];
        self.stream.read_exact(&mut body).ok()?;
        Some(EngineMessage::decode(header[4], &body, self.index).expect("a whole message"))
    }

    /// Read until the engine closes the connection.
    pub(crate) fn read_to_end(&mut self) {
        while self.read().is_some() {}
    }

    pub(crate) fn request(&self, counter: u64, max_tokens: u32) -> NewRequest {
        let key = ipc::key_of(self.index, counter);
        NewRequest::new(key, &format!("raw-{counter}"), vec![1, 2, 3], params(max_tokens))
    }
}
