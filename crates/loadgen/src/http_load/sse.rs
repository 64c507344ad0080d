//! `SseParser`: the bytes of a response body, cut anywhere, as the data of server-sent events.

use memchr::memchr;
use thiserror::Error;

/// Bytes of one event at most; a server that sends more is not one to be measured.
pub const MAX_EVENT_BYTES: usize = 16 << 20;

/// The stream cannot be read any further.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("an event is longer than {MAX_EVENT_BYTES} bytes")]
pub struct EventTooLong;

/// Lines end with `\n` or `\r\n`; an empty line ends an event. Comments and fields other than `data` say nothing here.
/// Whatever is unfinished at the end of the stream is dropped, as the format wants it.
#[derive(Debug, Default)]
pub struct SseParser {
    /// The beginning of a line whose end has not come.
    line: Vec<u8>,
    /// Data of the event so far; its lines are joined by `\n`.
    data: Vec<u8>,
    has_data: bool,
}

impl SseParser {
    /// Take the next bytes and call `on_event` with the data of every event that they end.
    ///
    /// # Errors
    /// An event longer than [`MAX_EVENT_BYTES`]; the parser is of no use after that.
    pub fn push(&mut self, mut bytes: &[u8], mut on_event: impl FnMut(&[u8])) -> Result<(), EventTooLong> {
        while let Some(end) = memchr(b'\n', bytes) {
            if self.line.is_empty() {
                self.end_line(&bytes[..end], &mut on_event)?;
            } else {
                let mut line = std::mem::take(&mut self.line);
                line.extend_from_slice(&bytes[..end]);
                self.end_line(&line, &mut on_event)?;
                line.clear();
                self.line = line; // its memory is used again
            }
            bytes = &bytes[end + 1..];
        }
        if self.line.len() + bytes.len() > MAX_EVENT_BYTES {
            return Err(EventTooLong);
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn end_line(&mut self, line: &[u8], on_event: &mut impl FnMut(&[u8])) -> Result<(), EventTooLong> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            if self.has_data {
                on_event(&self.data);
                self.data.clear();
                self.has_data = false;
            }
            return Ok(());
        }
        let Some(rest) = line.strip_prefix(b"data") else { return Ok(()) };
        let value = match rest.strip_prefix(b":") {
            Some(value) => value.strip_prefix(b" ").unwrap_or(value),
            None if rest.is_empty() => rest,
            None => return Ok(()), // another field whose name begins so
        };
        if self.data.len() + value.len() > MAX_EVENT_BYTES {
            return Err(EventTooLong);
        }
        if self.has_data {
            self.data.push(b'\n');
        }
        self.data.extend_from_slice(value);
        self.has_data = true;
        Ok(())
    }
}
