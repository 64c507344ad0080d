//! Arrivals, prompts, addresses and statistics of a load over HTTP.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{io::Write, time::Duration};

use loadgen::{
    Trace,
    http_load::{
        Content, Distribution, FIRST_ID, Failure, Goodput, HttpLoadReport, LoadRequest, Prompts,
        RandomPrompts, Rate, Record, RunTotals, Target, TextPrompt, Vocabulary, arrivals,
    },
};

const RANDOM: RandomPrompts = RandomPrompts {
    vocabulary: Vocabulary::Ids(100),
    input_len: 50,
    output_len: 20,
    range_ratio: 0.0,
    prefix_len: 0,
    num_prefixes: 1,
};

fn requests(prompts: &Prompts, seed: u64, count: usize) -> Vec<LoadRequest> {
    prompts.check().unwrap();
    prompts.requests(seed, count, false).unwrap().map(Result::unwrap).collect()
}

fn ids(request: &LoadRequest) -> &[u32] {
    match &request.content {
        Content::Ids(ids) => ids,
        Content::Text(text) => panic!("ids expected, got {text:?}"),
    }
}

#[test]
fn arrivals_keep_the_rate_and_the_burstiness() {
    assert_eq!(arrivals(Rate::Unlimited, 3, 0), [Duration::ZERO; 3]);
    assert_eq!(arrivals(Rate::Unlimited, 0, 0), []);
    for burstiness in [0.3, 1.0, 5.0] {
        let rate = Rate::PerSecond { rate: 50.0, burstiness };
        let times = arrivals(rate, 20_000, 7);
        assert_eq!(times, arrivals(rate, 20_000, 7));
        assert_ne!(times, arrivals(rate, 20_000, 8));
        let last = times.last().unwrap().as_secs_f64();
        assert!((last - 400.0).abs() < 1e-6, "{last}");
        let gaps: Vec<f64> =
            times.windows(2).map(|pair| pair[1].saturating_sub(pair[0]).as_secs_f64() * 50.0).collect();
        let gaps = Distribution::of(gaps, &[]);
        // A gamma distribution of mean 1 has the standard deviation 1 / √shape.
        assert!((gaps.mean - 1.0).abs() < 0.05, "{}", gaps.mean);
        assert!((gaps.std * f64::sqrt(burstiness) - 1.0).abs() < 0.05, "{burstiness}: {}", gaps.std);
    }
}

#[test]
fn random_prompts_are_reproducible_and_unlike_each_other() {
    let prompts = Prompts::Random(RANDOM);
    let all = requests(&prompts, 1, 20);
    assert_eq!(all, requests(&prompts, 1, 20));
    assert_ne!(all, requests(&prompts, 2, 20));
    for (place, request) in all.iter().enumerate() {
        assert_eq!((ids(request).len(), request.num_prompt_tokens, request.max_tokens), (50, Some(50), 20));
        assert!(ids(request).iter().all(|id| (FIRST_ID..100).contains(id)));
        assert!(all[..place].iter().all(|other| other.content != request.content));
    }
    let warmup: Vec<_> = prompts.requests(1, 20, true).unwrap().map(Result::unwrap).collect();
    assert!(warmup.iter().all(|request| !all.contains(request)));
}

#[test]
fn lengths_vary_within_the_ratio() {
    let all = requests(&Prompts::Random(RandomPrompts { range_ratio: 0.5, ..RANDOM }), 3, 2000);
    let lengths: Vec<u32> = all.iter().map(|request| ids(request).len() as u32).collect();
    assert_eq!((lengths.iter().min(), lengths.iter().max()), (Some(&25), Some(&75)));
    let outputs: Vec<u32> = all.iter().map(|request| request.max_tokens).collect();
    assert_eq!((outputs.iter().min(), outputs.iter().max()), (Some(&10), Some(&30)));
}

#[test]
fn prefixes_are_shared() {
    let shape = RandomPrompts { prefix_len: 8, num_prefixes: 3, input_len: 2, ..RANDOM };
    let all = requests(&Prompts::Random(shape), 3, 60);
    let mut prefixes: Vec<&[u32]> = all.iter().map(|request| &ids(request)[..8]).collect();
    assert!(all.iter().all(|request| ids(request).len() == 10));
    prefixes.sort_unstable();
    prefixes.dedup();
    assert_eq!(prefixes.len(), 3);
}

#[test]
fn words_and_texts() {
    let words = requests(&Prompts::Random(RandomPrompts { vocabulary: Vocabulary::Words, ..RANDOM }), 0, 1);
    let Content::Text(text) = &words[0].content else { panic!("text expected") };
    assert_eq!((text.split(' ').count(), words[0].num_prompt_tokens), (50, None));
    let texts = vec![
        TextPrompt { text: "a \"b\"\n".to_owned(), output_len: 3 },
        TextPrompt { text: "c".to_owned(), output_len: 4 },
    ];
    let all = requests(&Prompts::Texts(texts), 0, 3);
    assert_eq!(all.iter().map(|request| request.max_tokens).collect::<Vec<_>>(), [3, 4, 3]);
    let body = |is_chat| -> serde_json::Value {
        serde_json::from_str(&all[0].body(r#"{"model":"m""#, is_chat)).unwrap()
    };
    assert_eq!(body(false), serde_json::json!({"model": "m", "max_tokens": 3, "prompt": "a \"b\"\n"}));
    let messages = serde_json::json!([{"role": "user", "content": "a \"b\"\n"}]);
    assert_eq!(body(true), serde_json::json!({"model": "m", "max_tokens": 3, "messages": messages}));
    let bare = requests(&Prompts::Random(RandomPrompts { input_len: 2, ..RANDOM }), 0, 1)[0].body("{", false);
    assert!(serde_json::from_str::<serde_json::Value>(&bare).unwrap()["prompt"].is_array());
}

#[test]
fn a_trace_keeps_its_lengths_times_and_common_beginnings() {
    let path = std::env::temp_dir().join(format!("loadgen-http-{}.jsonl", std::process::id()));
    let mut file = std::fs::File::create(&path).unwrap();
    for (timestamp, length, hashes) in [(0, 600, "[0, 1]"), (250, 700, "[0, 2]")] {
        let line = format!(
            r#"{{"timestamp": {timestamp}, "input_length": {length}, "output_length": 9, "hash_ids": {hashes}}}"#
        );
        writeln!(file, "{line}").unwrap();
    }
    let trace = Trace::open(&path, None, None).unwrap();
    let all = requests(&Prompts::Trace(trace, Vocabulary::Ids(1000)), 0, 10);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(all.iter().map(|request| ids(request).len()).collect::<Vec<_>>(), [600, 700]);
    assert_eq!(all[1].arrival, Duration::from_millis(250));
    assert_eq!(ids(&all[0])[..512], ids(&all[1])[..512]);
    assert_ne!(ids(&all[0])[512..600], ids(&all[1])[512..600]);
    assert_eq!(all[0].max_tokens, 9);
}

#[test]
fn numbers_outside_their_limits() {
    let wrong = [
        (RandomPrompts { vocabulary: Vocabulary::Ids(5), ..RANDOM }, "vocab_size must be between 6"),
        (RandomPrompts { input_len: 0, ..RANDOM }, "random_input_len must be between 1"),
        (RandomPrompts { output_len: 0, ..RANDOM }, "random_output_len must be between 1"),
        (
            RandomPrompts { range_ratio: 1.0, ..RANDOM },
            "random_range_ratio must be at least 0 and below 1, got 1",
        ),
        (RandomPrompts { range_ratio: f64::NAN, ..RANDOM }, "got NaN"),
        (RandomPrompts { num_prefixes: 0, ..RANDOM }, "num_prefixes must be between 1"),
    ];
    for (prompts, message) in wrong {
        let error = Prompts::Random(prompts).check().unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    assert!(Prompts::Texts(Vec::new()).check().is_err());
}

#[test]
fn addresses() {
    let parse = |url: &str| Target::parse(url).map_err(|error| error.to_string());
    let target = parse("http://localhost:8000/").unwrap();
    assert_eq!((target.host.as_str(), target.port, target.path.as_str()), ("localhost", 8000, ""));
    let target = parse("http://[::1]:81/gateway/").unwrap();
    assert_eq!((target.host.as_str(), target.port, target.path.as_str()), ("::1", 81, "/gateway"));
    assert_eq!(target.authority, "[::1]:81");
    assert_eq!(parse("http://host").unwrap().port, 80);
    assert!(parse("https://host:1").unwrap_err().contains("https is not supported"));
    for wrong in
        ["", "host:80", "localhost", "ftp://host", "http://", "http://host:x", "http://h:99999", "http://u@h"]
    {
        let error = parse(wrong).unwrap_err();
        assert!(error.contains("must be of the form http://HOST:PORT"), "{wrong}: {error}");
    }
}

#[test]
fn distributions_are_those_of_numpy() {
    let values = vec![4.0, 1.0, 3.0, 2.0];
    let got = Distribution::of(values, &[0.0, 25.0, 90.0, 100.0]);
    assert_eq!((got.count, got.mean, got.median, got.min, got.max), (4, 2.5, 2.5, 1.0, 4.0));
    assert!((got.std - 1.25_f64.sqrt()).abs() < 1e-12);
    let expected = [1.0, 1.75, 3.7, 4.0];
    assert!(got.percentiles.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 1e-9));
    assert_eq!(Distribution::of(vec![5.0], &[99.0]).percentiles, [5.0]);
    assert_eq!(Distribution::of(Vec::new(), &[99.0]).percentiles, [0.0]);
}

#[test]
fn a_report_counts_tokens_events_and_failures() {
    let milliseconds = Duration::from_millis;
    let whole = Record {
        number: 0,
        sent: milliseconds(1),
        first_token: milliseconds(10),
        end: milliseconds(50),
        gaps_ns: vec![30_000_000],
        num_events: 2,
        num_prompt_tokens: Some(7),
        num_output_tokens: Some(5),
        num_bytes: 100,
        failure: None,
    };
    assert_eq!(whole.time_per_token(), Some(milliseconds(10)));
    let silent =
        Record { num_prompt_tokens: None, num_output_tokens: None, end: milliseconds(40), ..whole.clone() };
    assert_eq!((silent.output_tokens(), silent.time_per_token()), (2, Some(milliseconds(30))));
    let failed = |status| Record {
        failure: Some(Failure::Status { status, message: "full".to_owned() }),
        ..whole.clone()
    };
    let records = [whole.clone(), silent, failed(503), failed(503), failed(500)];
    let limits = Goodput { tpot_ms: Some(20.0), ..Goodput::default() };
    let totals =
        RunTotals { duration: milliseconds(60), max_concurrent_requests: 3, client_cpu: milliseconds(2) };
    let report = HttpLoadReport::of(totals, &records, &[50.0], limits);
    assert_eq!((report.duration, report.max_concurrent_requests), (milliseconds(60), 3));
    assert_eq!(report.client_cpu, milliseconds(2));
    assert_eq!((report.completed, report.failed(), report.good), (2, 3, Some(1)));
    assert_eq!((report.input_tokens, report.output_tokens, report.events), (7, 7, 4));
    assert_eq!((report.requests_without_usage, report.requests_of_unknown_input), (1, 1));
    let kinds: Vec<(&str, u64)> =
        report.failures.iter().map(|(kind, of)| (kind.as_str(), of.count)).collect();
    assert_eq!(kinds, [("http_500", 1), ("http_503", 2)]);
    assert_eq!(report.failures["http_503"].first, "HTTP status 503: full");
    assert_eq!((report.ttft_ms.mean, report.itl_ms.count, report.e2el_ms.max), (10.0, 2, 50.0));
    assert_eq!(HttpLoadReport::of(totals, &[], &[50.0], Goodput::default()).completed, 0);
}
