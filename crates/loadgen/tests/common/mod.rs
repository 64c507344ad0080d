//! Small traces, and files to read them from.
#![allow(dead_code, reason = "each test takes what it needs")]

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use loadgen::{Trace, TraceRequest, trace::PromptContent};

/// A Mooncake trace of conversations that go on: in the repository, so that the code runs everywhere.
pub(crate) const CONVERSATIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/conversations.jsonl");

/// Its requests.
pub(crate) fn requests() -> Vec<TraceRequest> {
    let trace = Trace::open(Path::new(CONVERSATIONS), None, None).expect("a trace");
    let requests = trace.requests().expect("a file").collect::<Result<Vec<_>, _>>().expect("good lines");
    assert!(requests.len() >= 20);
    requests
}

/// A request that shares nothing.
pub(crate) fn unique_request(arrival_ms: u64, number: u64, prompt: u32, output: u32) -> TraceRequest {
    request(arrival_ms, prompt, output, PromptContent::Unique(number))
}

/// A request with hash ids.
pub(crate) fn hash_request(arrival_ms: u64, prompt: u32, output: u32, ids: &[u64]) -> TraceRequest {
    request(arrival_ms, prompt, output, PromptContent::HashIds(ids.to_vec()))
}

fn request(arrival_ms: u64, prompt: u32, output: u32, content: PromptContent) -> TraceRequest {
    TraceRequest {
        arrival: Duration::from_millis(arrival_ms),
        num_prompt_tokens: prompt,
        num_output_tokens: output,
        content,
    }
}

/// The recorded trace next to the clone, if it is there.
pub(crate) fn mooncake(limit: Option<u64>) -> Option<Trace> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/data/traces/mooncake_conversation_trace.jsonl");
    if !path.is_file() {
        println!("skipped: there is no {}", path.display());
        return None;
    }
    Some(Trace::open(&path, None, limit).expect("a trace"))
}

/// Removes its file.
pub(crate) struct Guard(PathBuf);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A file with these bytes, for as long as the guard lives.
pub(crate) fn file(name: &str, bytes: &[u8]) -> (PathBuf, Guard) {
    let path = std::env::temp_dir().join(format!("loadgen-{}-{name}", std::process::id()));
    fs::write(&path, bytes).expect("a temporary file");
    (path.clone(), Guard(path))
}
