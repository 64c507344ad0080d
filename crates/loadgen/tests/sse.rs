//! `SseParser` and `Chunk`: any cut of the bytes gives the same events; what each event says.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use loadgen::http_load::{Chunk, MAX_EVENT_BYTES, SseParser};

fn events(pieces: &[&[u8]]) -> Vec<String> {
    let mut found = Vec::new();
    let mut parser = SseParser::default();
    for piece in pieces {
        parser.push(piece, |data| found.push(String::from_utf8_lossy(data).into_owned())).unwrap();
    }
    found
}

#[test]
fn every_cut_gives_the_same_events() {
    let stream = "\u{feff}: hello\n\ndata: {\"a\":\"é日😀\"}\r\n\r\nevent: x\nid: 1\ndata: one\ndata:two\n\n: keep-alive\n\n\
                  data\n\ndatabase: no\n\ndata: [DONE]\n\ndata: unfinished\n"
        .as_bytes();
    let expected = ["{\"a\":\"é日😀\"}", "one\ntwo", "", "[DONE]"];
    assert_eq!(events(&[stream]), expected);
    for cut in 0..=stream.len() {
        let (left, right) = stream.split_at(cut);
        assert_eq!(events(&[left, right]), expected, "cut at {cut}");
    }
    let bytes: Vec<&[u8]> = stream.chunks(1).collect();
    assert_eq!(events(&bytes), expected);
}

#[test]
fn an_event_without_end_is_refused() {
    let piece = vec![b'x'; 1 << 20];
    let mut parser = SseParser::default();
    let refused = (0..=MAX_EVENT_BYTES >> 20).any(|_| parser.push(&piece, |_| ()).is_err());
    assert!(refused);
    let line = [b"data: ".as_slice(), &piece, b"\n"].concat();
    let mut parser = SseParser::default();
    let refused = (0..=MAX_EVENT_BYTES >> 20).any(|_| parser.push(&line, |_| ()).is_err());
    assert!(refused);
}

#[test]
fn a_chunk_says_what_a_measurement_needs() {
    let chunk = |text: &str| Chunk::parse(text.as_bytes()).unwrap();
    for with_text in [
        r#"{"choices":[{"index":0,"text":"a\u00e9","finish_reason":null}],"usage":null}"#,
        r#"{"choices":[{"text":""},{"text":"b"}]}"#,
        r#"{"choices":[{"delta":{"content":"a"}}]}"#,
        r#"{"choices":[{"delta":{"content":null,"reasoning_content":"a"}}]}"#,
        r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#,
    ] {
        let choices = chunk(with_text).choices;
        assert!(choices.any && choices.has_text && !choices.finished, "{with_text}");
    }
    for without in [
        r#"{"choices":[{"text":"","logprobs":null}]}"#,
        r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
        r#"{"choices":[{"delta":{"content":null,"tool_calls":[]}}]}"#,
    ] {
        let choices = chunk(without).choices;
        assert!(choices.any && !choices.has_text, "{without}");
    }
    let last = chunk(r#"{"choices":[{"delta":{},"finish_reason":"length"}]}"#);
    assert!(last.choices.finished && !last.choices.has_text);
    let usage = chunk(r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8}}"#);
    assert!(!usage.choices.any);
    assert_eq!(usage.usage.map(|usage| (usage.prompt_tokens, usage.completion_tokens)), Some((3, 5)));
    for error in [r#"{"error":{"message":"gone","code":500}}"#, r#"{"error":"gone"}"#] {
        assert_eq!(chunk(error).error.map(|error| error.0).as_deref(), Some("gone"));
    }
    assert!(chunk(r#"{"error":{"code":1}}"#).error.is_some());
    assert_eq!(chunk("{}"), Chunk::default());
    for wrong in ["", "{", "[1]", r#"{"choices":[{"text":3}]}"#, "{\"choices\":[{\"text\":\"a\u{1}\"}]}"] {
        assert!(Chunk::parse(wrong.as_bytes()).is_err(), "{wrong}");
    }
    assert!(Chunk::parse(b"{\"choices\":[{\"text\":\"\xff\"}]}").is_err());
}
