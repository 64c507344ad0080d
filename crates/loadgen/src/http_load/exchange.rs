//! `exchange`: one request sent, its stream read, and everything timed.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::{Method, StatusCode, body::Incoming, header::CONTENT_TYPE};

use super::{
    chunk::{Chunk, DONE},
    client::Client,
    progress::Progress,
    record::{Failure, Record},
    sse::SseParser,
};

/// Bytes that are read of an answer that is not a stream, to say what it is.
const MAX_MESSAGE_BYTES: usize = 4096;

/// What all requests of a run have in common.
pub(super) struct Exchange<'a> {
    pub(super) client: &'a Client,
    pub(super) path: &'a str,
    pub(super) timeout: Duration,
    pub(super) progress: &'a Progress,
}

impl Exchange<'_> {
    /// Send one body and read the answer to its end.
    pub(super) async fn run(&self, body: Bytes, num_prompt_tokens: Option<u32>) -> Record {
        let mut record = Record { num_prompt_tokens: num_prompt_tokens.map(u64::from), ..Record::default() };
        let timed = tokio::time::timeout(self.timeout, self.stream(body, &mut record)).await;
        record.failure = timed.unwrap_or(Err(Failure::Timeout { timeout: self.timeout })).err();
        record
    }

    async fn stream(&self, body: Bytes, record: &mut Record) -> Result<(), Failure> {
        let start = Instant::now();
        let (response, connection) = self.client.send(Method::POST, self.path, body).await?;
        let status = response.status();
        let kind = response.headers().get(CONTENT_TYPE).cloned();
        let mut body = response.into_body();
        if status != StatusCode::OK {
            let message = message_of(&read_some(&mut body, MAX_MESSAGE_BYTES).await);
            return Err(Failure::Status { status: status.as_u16(), message });
        }
        let kind = kind.as_ref().and_then(|value| value.to_str().ok()).unwrap_or("none");
        if !kind.starts_with("text/event-stream") {
            let text = message_of(&read_some(&mut body, MAX_MESSAGE_BYTES).await);
            return Err(Failure::Invalid { problem: format!("content type {kind}: {text}") });
        }
        let mut stream = Stream::new(start, record);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Failure::Cut { error: error.to_string() })?;
            if let Ok(bytes) = frame.into_data() {
                let before = stream.record.num_events;
                let read = stream.push(&bytes);
                self.progress.add_events(stream.record.num_events - before);
                read?;
            }
        }
        stream.finish()?;
        self.client.keep(connection);
        Ok(())
    }
}

/// The state of one stream.
struct Stream<'a> {
    start: Instant,
    record: &'a mut Record,
    parser: SseParser,
    last_event: Duration,
    finished: bool,
    done: bool,
}

impl<'a> Stream<'a> {
    fn new(start: Instant, record: &'a mut Record) -> Self {
        let parser = SseParser::default();
        Self { start, record, parser, last_event: Duration::ZERO, finished: false, done: false }
    }

    /// Read the bytes that have just come.
    fn push(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let now = self.start.elapsed();
        self.record.num_bytes += bytes.len() as u64;
        let mut parser = std::mem::take(&mut self.parser);
        let mut result = Ok(());
        let read = parser.push(bytes, |data| {
            if result.is_ok() {
                result = self.on_event(data, now);
            }
        });
        self.parser = parser;
        result?;
        read.map_err(|error| Failure::Invalid { problem: error.to_string() })
    }

    fn on_event(&mut self, data: &[u8], now: Duration) -> Result<(), Failure> {
        if data == DONE {
            self.done = true;
            return Ok(());
        }
        let chunk = Chunk::parse(data).map_err(|error| Failure::Invalid {
            problem: format!("{error} in {:?}", shortened(&String::from_utf8_lossy(data))),
        })?;
        if let Some(error) = chunk.error {
            return Err(Failure::ErrorEvent { message: shortened(&error.0) });
        }
        if let Some(usage) = chunk.usage {
            self.record.num_prompt_tokens = Some(usage.prompt_tokens);
            self.record.num_output_tokens = Some(usage.completion_tokens);
        }
        if chunk.choices.any && (chunk.choices.has_text || self.record.num_events > 0) {
            self.record.end = now;
        }
        if chunk.choices.has_text {
            if self.record.num_events == 0 {
                self.record.first_token = now;
            } else {
                self.record.gaps_ns.push(now.saturating_sub(self.last_event).as_nanos() as u64);
            }
            self.last_event = now;
            self.record.num_events += 1;
        }
        self.finished |= chunk.choices.finished;
        Ok(())
    }

    /// The body has ended: was the answer whole?
    fn finish(&self) -> Result<(), Failure> {
        // A few servers leave the last line out; a reason to finish says as much.
        if !self.done && !self.finished {
            let error = format!("the stream ended after {} events without [DONE]", self.record.num_events);
            return Err(Failure::Cut { error });
        }
        if self.record.num_events == 0 {
            return Err(Failure::Empty);
        }
        Ok(())
    }
}

/// The beginning of a body, whatever it is: a little more than `limit` bytes at most.
pub(super) async fn read_some(body: &mut Incoming, limit: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while bytes.len() < limit {
        match body.frame().await {
            Some(Ok(frame)) => bytes.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data)),
            Some(Err(_)) | None => break,
        }
    }
    bytes
}

/// The message in an error's body, or the body itself.
pub(super) fn message_of(body: &[u8]) -> String {
    match Chunk::parse(body) {
        Ok(Chunk { error: Some(error), .. }) => shortened(&error.0),
        _ => shortened(&String::from_utf8_lossy(body)),
    }
}

fn shortened(text: &str) -> String {
    const LENGTH: usize = 200;
    let text = text.trim();
    if text.chars().count() <= LENGTH {
        return text.to_owned();
    }
    text.chars().take(LENGTH).chain(['…']).collect()
}
