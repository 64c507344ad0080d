//! Readers of traces: what they make of good lines, and what they say about bad ones.

mod common;

use std::{
    collections::HashSet,
    io::{BufReader, Cursor},
    path::Path,
    time::Duration,
};

use common::{CONVERSATIONS, file, hash_request, unique_request};
use loadgen::{
    Trace, TraceError, TraceFormat, TraceReader, TraceRequest,
    trace::{PromptContent, output_token_id},
};

const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n";

fn read(text: &[u8], format: TraceFormat) -> Result<Vec<TraceRequest>, TraceError> {
    TraceReader::new(Cursor::new(text), Path::new("t"), format).collect()
}

fn mooncake_error(line: &str) -> String {
    let good = r#"{"timestamp": 7, "input_length": 1, "output_length": 1, "hash_ids": [0]}"#;
    let text = format!("{good}\n\n{line}\n");
    read(text.as_bytes(), TraceFormat::Mooncake).expect_err(line).to_string()
}

fn azure_error(line: &str) -> String {
    let text = format!("{HEADER}2023-11-16 18:15:46.5,374,44\n{line}\n");
    read(text.as_bytes(), TraceFormat::Azure).expect_err(line).to_string()
}

#[test]
fn mooncake_lines_are_requests() {
    let text =
        br#"{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [3, 1152921504606846975]}
{"timestamp": 1.5, "input_length": 512, "output_length": 0, "hash_ids": [3], "more": null}"#;
    let requests = read(text, TraceFormat::Mooncake).expect("good lines");
    assert_eq!(requests[0], hash_request(0, 600, 5, &[3, (1 << 60) - 1]));
    assert_eq!(requests[1].arrival, Duration::from_micros(1500));
    assert_eq!(requests[1].content, PromptContent::HashIds(vec![3]));
}

#[test]
fn azure_lines_are_requests() {
    let text = "\u{feff}TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 23:59:59.5000000,374,44\r\n\
                2023-11-17 00:00:00.2500000,1,0\r\n";
    let requests = read(text.as_bytes(), TraceFormat::Azure).expect("good lines");
    assert_eq!(requests, [unique_request(0, 0, 374, 44), unique_request(750, 1, 1, 0)]);
    let reordered = "id,GeneratedTokens,TIMESTAMP,ContextTokens\n9,44,2023-11-16T23:59:59+00:00,374\n";
    let requests = read(reordered.as_bytes(), TraceFormat::Azure).expect("columns by name");
    assert_eq!(requests, [unique_request(0, 0, 374, 44)]);
}

#[test]
fn a_mooncake_line_that_is_wrong_is_named_with_its_value() {
    let line = |timestamp: &str, input: &str, output: &str, ids: &str| {
        format!(
            r#"{{"timestamp": {timestamp}, "input_length": {input}, "output_length": {output}, "hash_ids": {ids}}}"#
        )
    };
    for (line, message) in [
        ("{\"timestamp\": 8, \"input_le".to_owned(), "t, line 3: not valid JSON (EOF while parsing a string"),
        ("[1]".to_owned(), "got [1]; each line must be one JSON object with timestamp"),
        ("\u{7f}".to_owned(), "not valid JSON"),
        (
            "{\"timestamp\": 8}".to_owned(),
            "the field input_length is missing; it must be a whole number between 1 and 67108864",
        ),
        (line("NaN", "1", "1", "[0]"), "not valid JSON"),
        (
            line("-1", "1", "1", "[0]"),
            "timestamp must be a number of milliseconds between 0 and 1000000000000, got -1",
        ),
        (line("\"9\"", "1", "1", "[0]"), "got \"9\""),
        (line("6", "1", "1", "[0]"), "timestamp must be no earlier than the line before"),
        (line("8", "0", "1", "[]"), "input_length must be a whole number between 1 and 67108864, got 0"),
        (line("8", "-5", "1", "[]"), "got -5"),
        (line("8", "1.5", "1", "[0]"), "got 1.5"),
        (line("8", "1e400", "1", "[0]"), "not valid JSON (number out of range"),
        (line("8", "99999999999999999999", "1", "[0]"), "got 1e+20"),
        (line("8", "1", "-1", "[0]"), "output_length must be a whole number between 0 and 67108864, got -1"),
        (
            line("8", "1", "67108864", "[0]"),
            "output_length must be a whole number between 0 and 67108863, the prompt having 1, got 67108864",
        ),
        (
            line("8", "513", "1", "[0]"),
            "hash_ids must be a list of 2 ids, one per 512 of 513 prompt tokens, got 1",
        ),
        (line("8", "512", "1", "[0, 1]"), "must be a list of 1 ids"),
        (line("8", "1", "1", "7"), "hash_ids must be a list of 1 ids"),
        (line("8", "1", "1", "[-1]"), "hash_ids must be whole numbers between 0 and 2^60 - 1, got -1"),
        (line("8", "1", "1", "[1152921504606846976]"), "got 1152921504606846976"),
    ] {
        let said = mooncake_error(&line);
        assert!(said.starts_with("t, line 3: ") && said.contains(message), "{line}\n{said}");
    }
}

#[test]
fn an_azure_line_that_is_wrong_is_named_with_its_value() {
    for (line, message) in [
        ("2023-11-16 18:15:47,374", "2 fields where the header has 3; each line must be TIMESTAMP,"),
        (
            "yesterday,374,44",
            "TIMESTAMP must be a time in UTC such as 2023-11-16 18:15:46.6805900, got yesterday",
        ),
        ("2023-11-16 18:15:46.4,374,44", "TIMESTAMP must be no earlier than the first line"),
        ("2023-11-16 18:15:47,0,44", "ContextTokens must be a whole number between 1 and 67108864, got 0"),
        ("2023-11-16 18:15:47,-3,44", "got -3"),
        ("2023-11-16 18:15:47,NaN,44", "got NaN"),
        ("2023-11-16 18:15:47,374,", "GeneratedTokens must be a whole number between 0 and 67108864, got "),
    ] {
        let said = azure_error(line);
        assert!(said.starts_with("t, line 3: ") && said.contains(message), "{line}\n{said}");
    }
    let back = format!("{HEADER}2023-11-16 18:00:00,1,1\n2023-11-16 18:00:09,1,1\n2023-11-16 18:00:08,1,1\n");
    let said = read(back.as_bytes(), TraceFormat::Azure).expect_err("unsorted").to_string();
    assert!(said.contains("line 4: TIMESTAMP must be no earlier than the line before"), "{said}");
    let said = read(b"TIMESTAMP,Context\n", TraceFormat::Azure).expect_err("no column").to_string();
    assert!(said.contains("the field ContextTokens is missing"), "{said}");
    let said = read(b"\xff\xfe\n", TraceFormat::Azure).expect_err("no text").to_string();
    assert!(said.contains("not UTF-8"), "{said}");
}

#[test]
fn reading_ends_at_the_first_error() {
    let text = b"{}\n{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [0]}\n";
    let mut reader = TraceReader::new(Cursor::new(text), Path::new("t"), TraceFormat::Mooncake);
    assert!(reader.next().is_some_and(|first| first.is_err()));
    assert!(reader.next().is_none());
}

#[test]
fn a_line_without_end_is_refused() {
    let said = TraceReader::new(BufReader::new(std::io::repeat(b' ')), Path::new("t"), TraceFormat::Mooncake)
        .next()
        .and_then(Result::err)
        .map(|error| error.to_string());
    assert!(said.is_some_and(|said| said.contains("the line is longer than 16777216 bytes")));
}

#[test]
fn the_format_is_found_out() {
    let trace = Trace::open(Path::new(CONVERSATIONS), None, None).expect("a trace");
    assert_eq!(trace.format(), TraceFormat::Mooncake);
    let (path, _guard) = file("azure.csv", format!("{HEADER}2023-11-16 18:15:46,374,44\n").as_bytes());
    let trace = Trace::open(&path, None, None).expect("a trace");
    assert_eq!(trace.format(), TraceFormat::Azure);
    assert_eq!(trace.summarise(&mut || true).expect("good lines").max_request_tokens, 374 + 44);
    for format in [TraceFormat::Mooncake, TraceFormat::Azure] {
        assert_eq!(TraceFormat::from_name(format.as_str()), Some(format));
    }
    assert_eq!(TraceFormat::from_name("auto"), None);
}

#[test]
fn files_that_are_no_traces_are_named() {
    let message = |bytes: &[u8]| {
        let (path, _guard) = file("wrong", bytes);
        let opened = Trace::open(&path, None, None).and_then(|trace| trace.summarise(&mut || true));
        opened.expect_err("no trace").to_string()
    };
    assert!(message(b"").contains("has no requests"));
    assert!(message(b"\n  \n").contains("has no requests"));
    assert!(message(HEADER.as_bytes()).contains("has no requests"));
    let said = message(format!("hello {}\n", "x".repeat(1000)).as_bytes());
    assert!(
        said.contains("unknown trace format, the first line is \"hello xxx") && said.len() < 500,
        "{said}"
    );

    let said = Trace::open(Path::new("/no/such/file"), None, None).expect_err("no file").to_string();
    assert_eq!(said, "cannot read /no/such/file: No such file or directory (os error 2)");
    for special in ["/", "/dev/null"] {
        let said = Trace::open(Path::new(special), None, None).expect_err("no file").to_string();
        assert!(said.contains("is not a regular file"), "{said}");
    }
}

#[test]
fn a_limit_and_an_interrupt_end_a_reading() {
    let trace = Trace::open(Path::new(CONVERSATIONS), None, Some(3)).expect("a trace");
    assert_eq!(trace.summarise(&mut || true).expect("good lines").num_requests, 3);
    assert_eq!(trace.requests().expect("a file").count(), 3);

    let line = "2023-11-16 18:15:46,374,44\n";
    let (path, _guard) = file("long.csv", format!("{HEADER}{}", line.repeat(3000)).as_bytes());
    let trace = Trace::open(&path, None, None).expect("a trace");
    assert!(matches!(trace.summarise(&mut || false), Err(TraceError::Interrupted)));
}

#[test]
fn equal_ids_are_equal_tokens_and_different_ids_differ_at_once() {
    let tokens = hash_request(0, 1100, 1, &[5, 6, 7]).prompt_token_ids();
    assert_eq!(tokens.len(), 1100);
    assert_eq!(tokens[512..1024], hash_request(0, 512, 1, &[6]).prompt_token_ids()[..]);
    assert_eq!(tokens[1024..], hash_request(0, 512, 1, &[7]).prompt_token_ids()[..76]);

    let ids = [0, 1, 2, (1 << 30) - 1, 1 << 30, (1 << 30) + 1, 1 << 59, (1 << 60) - 1];
    let pieces: HashSet<Vec<i32>> =
        ids.iter().map(|&id| hash_request(0, 2, 1, &[id]).prompt_token_ids()).collect();
    assert_eq!(pieces.len(), ids.len());
    assert!(pieces.iter().flatten().all(|&token| (0..1 << 30).contains(&token)));
    // No output looks like a prompt.
    assert!((0..3).chain([(1 << 30) - 1, 1 << 30]).map(output_token_id).all(|token| token >= 1 << 30));
    assert_ne!(output_token_id(1), output_token_id(2));
}
