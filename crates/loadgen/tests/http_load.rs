//! A load against servers with scripted answers, some cut short: what is counted as what.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    io::{BufRead, BufReader, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use loadgen::http_load::{
    Goodput, HttpLoadError, HttpLoadOptions, HttpLoadReport, Prompts, RandomPrompts, Rate, Vocabulary,
    http_load, served_model,
};

const EVENT: &str = r#"data: {"choices":[{"index":0,"text":" é😀","finish_reason":null}],"usage":null}"#;
const LAST: &str = r#"data: {"choices":[{"index":0,"text":"","finish_reason":"length"}],"usage":null}"#;
const USAGE: &str = r#"data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":8}}"#;
const DONE: &str = "data: [DONE]";
const STREAM: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

/// How a server answers every request: pieces, each written after a pause, and whether the connection stays.
#[derive(Clone)]
struct Answer {
    pieces: Vec<Vec<u8>>,
    pause: Duration,
    keep_alive: bool,
}

impl Answer {
    /// Events as one HTTP chunk each.
    fn events(events: &[&str]) -> Self {
        let mut pieces = vec![STREAM.as_bytes().to_vec()];
        pieces.extend(events.iter().map(|event| chunk(format!("{event}\n\n").as_bytes())));
        pieces.push(b"0\r\n\r\n".to_vec());
        Self { pieces, pause: Duration::ZERO, keep_alive: true }
    }

    fn plain(text: &str) -> Self {
        Self { pieces: vec![text.as_bytes().to_vec()], pause: Duration::ZERO, keep_alive: false }
    }
}

fn chunk(bytes: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

/// Listens until the process ends; counts connections.
struct Server {
    url: String,
    connections: Arc<AtomicUsize>,
}

impl Server {
    fn new(answer: Answer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let connections = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&connections);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                counter.fetch_add(1, Ordering::Relaxed);
                let answer = answer.clone();
                std::thread::spawn(move || answer_all(&stream.unwrap(), &answer));
            }
        });
        Self { url, connections }
    }
}

fn answer_all(mut stream: &TcpStream, answer: &Answer) {
    stream.set_nodelay(true).unwrap();
    let mut reader = BufReader::new(stream);
    while read_request(&mut reader) {
        for piece in &answer.pieces {
            if !answer.pause.is_zero() {
                std::thread::park_timeout(answer.pause);
            }
            if stream.write_all(piece).is_err() {
                return;
            }
        }
        if !answer.keep_alive {
            drop(stream.shutdown(Shutdown::Both));
            return;
        }
    }
}

/// Head and body; false at the end of the connection.
fn read_request(reader: &mut impl BufRead) -> bool {
    let (mut line, mut length) = (String::new(), 0);
    loop {
        line.clear();
        match reader.read_line(&mut line) {
            Ok(0) | Err(_) => return false,
            Ok(_) => {}
        }
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.trim().parse().unwrap();
        }
        if line == "\r\n" {
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            return true;
        }
    }
}

fn options(url: &str) -> HttpLoadOptions {
    HttpLoadOptions {
        base_url: url.to_owned(),
        endpoint: "/v1/completions".to_owned(),
        fields: r#"{"model":"m","stream":true}"#.to_owned(),
        api_key: None,
        num_requests: 6,
        num_warmups: 0,
        max_concurrency: Some(2),
        rate: Rate::Unlimited,
        seed: 0,
        timeout: Duration::from_secs(20),
        percentiles: vec![50.0, 99.0],
        goodput: Goodput::default(),
    }
}

fn prompts() -> Prompts {
    Prompts::Random(RandomPrompts {
        vocabulary: Vocabulary::Ids(50),
        input_len: 4,
        output_len: 8,
        range_ratio: 0.0,
        prefix_len: 0,
        num_prefixes: 1,
    })
}

fn run(options: &HttpLoadOptions) -> Result<HttpLoadReport, HttpLoadError> {
    http_load(options, &prompts(), &mut |_| true)
}

fn report(answer: Answer) -> HttpLoadReport {
    run(&options(&Server::new(answer).url)).unwrap()
}

/// The only kind of failure, and what it says.
fn failure(answer: Answer) -> (String, String) {
    let report = report(answer);
    assert_eq!((report.completed, report.failed()), (0, 6), "{report:?}");
    let (kind, failure) = report.failures.into_iter().next().unwrap();
    assert_eq!(failure.count, 6);
    (kind, failure.first)
}

#[test]
fn a_whole_stream_is_counted_by_its_usage() {
    let server = Server::new(Answer::events(&[EVENT, ": keep-alive", EVENT, LAST, USAGE, DONE]));
    let report = run(&options(&server.url)).unwrap();
    assert_eq!((report.completed, report.failed()), (6, 0), "{:?}", report.failures);
    assert_eq!((report.input_tokens, report.output_tokens, report.events), (18, 48, 12));
    assert_eq!((report.itl_ms.count, report.tpot_ms.count, report.requests_without_usage), (6, 6, 0));
    assert_eq!(report.max_concurrent_requests, 2);
    assert!(report.ttft_ms.max <= report.e2el_ms.max);
    // The connections are used again.
    assert_eq!(server.connections.load(Ordering::Relaxed), 2);
}

#[test]
fn without_usage_events_are_counted_and_prompts_known() {
    let report = report(Answer::events(&[EVENT, EVENT, EVENT, LAST, DONE]));
    assert_eq!((report.completed, report.requests_without_usage), (6, 6));
    assert_eq!((report.input_tokens, report.output_tokens), (24, 18));
}

#[test]
fn a_reason_to_finish_ends_a_stream_too() {
    assert_eq!(report(Answer::events(&[EVENT, LAST])).completed, 6);
}

#[test]
fn pieces_may_be_cut_anywhere() {
    let stream = format!("{EVENT}\n\n{EVENT}\n\n{USAGE}\n\n{DONE}\n\n");
    let pieces = [
        vec![STREAM.as_bytes().to_vec()],
        stream.as_bytes().chunks(3).map(chunk).collect(),
        vec![b"0\r\n\r\n".to_vec()],
    ]
    .concat();
    let report = report(Answer { pieces, pause: Duration::from_micros(200), keep_alive: true });
    assert_eq!((report.completed, report.events, report.output_tokens), (6, 12, 48), "{:?}", report.failures);
}

#[test]
fn a_stream_that_is_cut_is_no_answer() {
    let mut answer = Answer::events(&[EVENT, EVENT]);
    answer.pieces.pop();
    answer.keep_alive = false;
    let (kind, message) = failure(answer);
    assert_eq!(kind, "cut");
    assert!(message.starts_with("the answer was cut off: "), "{message}");
    let (kind, message) = failure(Answer::events(&[EVENT, EVENT]));
    assert_eq!(kind, "cut");
    assert!(message.contains("ended after 2 events without [DONE]"), "{message}");
}

#[test]
fn an_error_in_the_stream_is_no_answer() {
    let error = r#"data: {"error":{"message":"the engine died","code":500}}"#;
    let (kind, message) = failure(Answer::events(&[EVENT, error, DONE]));
    assert_eq!((kind.as_str(), message.as_str()), ("error_event", "error in the stream: the engine died"));
}

#[test]
fn statuses_and_other_answers() {
    let body = r#"{"error":{"message":"queue is full"}}"#;
    let head =
        format!("HTTP/1.1 503 Busy\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
    let (kind, message) = failure(Answer::plain(&head));
    assert_eq!((kind.as_str(), message.as_str()), ("http_503", "HTTP status 503: queue is full"));
    let (kind, message) = failure(Answer::plain(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
    ));
    assert_eq!(kind, "invalid");
    assert!(message.contains("content type application/json: {}"), "{message}");
    let (kind, message) = failure(Answer::events(&["data: {\"choices\":", DONE]));
    assert_eq!(kind, "invalid");
    assert!(message.contains("EOF while parsing"), "{message}");
    assert_eq!(failure(Answer::events(&[LAST, USAGE, DONE])).0, "empty");
    assert_eq!(failure(Answer::plain("garbage\r\n\r\n")).0, "cut");
    assert_eq!(failure(Answer::plain("")).0, "cut");
}

#[test]
fn a_slow_server_is_measured_and_a_hanging_one_given_up() {
    let mut answer = Answer::events(&[EVENT, EVENT, EVENT, USAGE, DONE]);
    answer.pause = Duration::from_millis(20);
    let slow = report(answer.clone());
    assert!(slow.ttft_ms.min >= 38.0, "{:?}", slow.ttft_ms);
    assert!(slow.itl_ms.median >= 18.0, "{:?}", slow.itl_ms);
    assert!(slow.duration >= Duration::from_millis(3 * 6 * 20));
    let server = Server::new(Answer { pause: Duration::from_secs(5), ..answer });
    let hanging = HttpLoadOptions { timeout: Duration::from_millis(100), ..options(&server.url) };
    let given_up = run(&hanging).unwrap();
    assert_eq!(given_up.failures["timeout"].count, 6);
    assert_eq!(given_up.failures["timeout"].first, "no end after 0.1 s");
}

#[test]
fn requests_come_at_their_rate() {
    let server = Server::new(Answer::events(&[EVENT, USAGE, DONE]));
    let rate = Rate::PerSecond { rate: 50.0, burstiness: 1.0 };
    let paced = HttpLoadOptions { num_requests: 20, rate, max_concurrency: None, ..options(&server.url) };
    let report = run(&paced).unwrap();
    assert_eq!(report.completed, 20);
    assert!((0.4..2.0).contains(&report.duration.as_secs_f64()), "{:?}", report.duration);
}

#[test]
fn warm_ups_are_not_measured_and_must_succeed() {
    let server = Server::new(Answer::events(&[EVENT, USAGE, DONE]));
    assert_eq!(run(&HttpLoadOptions { num_warmups: 5, ..options(&server.url) }).unwrap().completed, 6);
    let broken = Server::new(Answer::plain("HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"));
    let error = run(&HttpLoadOptions { num_warmups: 1, ..options(&broken.url) }).unwrap_err();
    assert_eq!(error.to_string(), "a warm-up request failed: HTTP status 500: ");
}

#[test]
fn the_caller_may_end_it() {
    let mut answer = Answer::events(&[EVENT, DONE]);
    answer.pause = Duration::from_secs(30);
    let server = Server::new(answer);
    let started = Instant::now();
    let mut asked = 0;
    let error = http_load(&options(&server.url), &prompts(), &mut |_| {
        asked += 1;
        asked < 3
    })
    .unwrap_err();
    assert!(matches!(error, HttpLoadError::Interrupted));
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}

#[test]
fn what_cannot_be_run() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let usual = options(&format!("http://{closed}"));
    let message = |options: HttpLoadOptions| run(&options).unwrap_err().to_string();
    assert!(message(usual.clone()).contains("cannot connect: Connection refused"));
    assert!(message(HttpLoadOptions { base_url: "https://x".to_owned(), ..usual.clone() }).contains("https"));
    assert!(
        message(HttpLoadOptions { fields: "[]".to_owned(), ..usual.clone() }).contains("one JSON object")
    );
    assert!(
        message(HttpLoadOptions { api_key: Some("a\nb".to_owned()), ..usual.clone() }).contains("header")
    );
    assert!(
        message(HttpLoadOptions { num_requests: 0, ..usual.clone() })
            .contains("num_prompts must be between 1")
    );
    assert!(
        message(HttpLoadOptions { max_concurrency: Some(0), ..usual.clone() }).contains("max_concurrency")
    );
    assert!(
        message(HttpLoadOptions { percentiles: vec![101.0], ..usual.clone() }).contains("between 0 and 100")
    );
    let rate = Rate::PerSecond { rate: f64::NAN, burstiness: 1.0 };
    assert!(message(HttpLoadOptions { rate, ..usual.clone() }).contains("request_rate must be above 0"));
    let goodput = Goodput { ttft_ms: Some(-1.0), ..Goodput::default() };
    assert!(message(HttpLoadOptions { goodput, ..usual }).contains("goodput ttft"));
}

#[test]
fn the_served_model_is_asked_for() {
    let answer = |body: &str| {
        Answer::plain(&format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
    };
    let named = Server::new(answer(r#"{"object":"list","data":[{"id":"tiny"},{"id":"other"}]}"#));
    assert_eq!(served_model(&named.url, Some("key")).unwrap(), "tiny");
    for body in ["{}", "no json", r#"{"data":[]}"#] {
        let error = served_model(&Server::new(answer(body)).url, None).unwrap_err().to_string();
        assert!(error.contains("no model in the answer") && error.contains("--model"), "{error}");
    }
    let locked = Server::new(Answer::plain("HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n"));
    assert!(served_model(&locked.url, None).unwrap_err().to_string().contains("HTTP status 401"));
}
