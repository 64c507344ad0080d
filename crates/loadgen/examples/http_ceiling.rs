//! What the load generator itself can take: streams from a trivial server in the same process, which writes ready bytes.
//!
//! `cargo run --release -p loadgen --example http_ceiling -- [concurrency] [events per write]`
//!
//! The figure that counts is the processor time of the load thread per event: its inverse is the ceiling.

use std::{
    error::Error,
    io::Write,
    time::{Duration, Instant},
};

use loadgen::http_load::{Goodput, HttpLoadOptions, Prompts, RandomPrompts, Rate, Vocabulary, http_load};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

const EVENTS_PER_STREAM: usize = 256;
const EVENT: &str = "data: {\"id\":\"cmpl-51926a1c8a7c3ece68fdf3d53380bca5\",\"object\":\"text_completion\",\"created\":\
    1795281036,\"model\":\"rustvllm-tiny\",\"system_fingerprint\":\"rustvllm-0.1.0\",\"choices\":[{\"index\":0,\"text\":\
    \" word\",\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null}],\"usage\":null}\n\n";
const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

async fn serve(mut stream: TcpStream, events_per_write: usize) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let events = EVENT.repeat(events_per_write);
    let piece = format!("{:x}\r\n{events}\r\n", events.len());
    let done = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    let mut request = vec![0; 1 << 16];
    // A request of this program fits into one read.
    while stream.read(&mut request).await? > 0 {
        stream.write_all(HEAD.as_bytes()).await?;
        for _ in 0..EVENTS_PER_STREAM / events_per_write {
            stream.write_all(piece.as_bytes()).await?;
            tokio::task::yield_now().await; // the other streams have their turn: events come one by one
        }
        stream.write_all(done.as_bytes()).await?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let concurrency: usize = arguments.next().map_or(Ok(64), |text| text.parse())?;
    let events_per_write: usize = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let base_url = format!("http://{}", listener.local_addr()?);
    listener.set_nonblocking(true)?;
    std::thread::spawn(move || -> std::io::Result<()> {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
            let listener = TcpListener::from_std(listener)?;
            loop {
                let (stream, _) = listener.accept().await?;
                tokio::spawn(serve(stream, events_per_write));
            }
        })
    });
    let options = HttpLoadOptions {
        base_url,
        endpoint: "/v1/completions".to_owned(),
        fields: r#"{"model":"m","stream":true}"#.to_owned(),
        api_key: None,
        num_requests: 20_000.max(concurrency * 8) / 8,
        num_warmups: concurrency,
        max_concurrency: Some(concurrency),
        rate: Rate::Unlimited,
        seed: 0,
        timeout: Duration::from_secs(60),
        percentiles: vec![50.0, 99.0],
        goodput: Goodput::default(),
    };
    let prompts = Prompts::Random(RandomPrompts {
        vocabulary: Vocabulary::Ids(2048),
        input_len: 32,
        output_len: EVENTS_PER_STREAM as u32,
        range_ratio: 0.0,
        prefix_len: 0,
        num_prefixes: 1,
    });
    let started = Instant::now();
    let report = http_load(&options, &prompts, &mut |_| true)?;
    let seconds = report.duration.as_secs_f64();
    let cpu = report.client_cpu.as_secs_f64();
    writeln!(
        std::io::stdout(),
        "{concurrency} streams, {events_per_write} events per write: {:.0} events/s, load thread {:.0} % busy, \
         {:.2} us of processor time per event: a ceiling of {:.0} events/s ({} failed, {:?} in all)",
        report.events as f64 / seconds,
        100.0 * cpu / seconds,
        1e6 * cpu / report.events as f64,
        report.events as f64 / cpu,
        report.failed(),
        started.elapsed()
    )?;
    Ok(())
}
