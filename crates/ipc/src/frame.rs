//! Frames: `u32` length of the body, `u8` kind, body; and `FrameReader`, which reads them from a stream.

use tokio::io::{AsyncRead, AsyncReadExt};

use crate::error::{ConnectionError, DecodeError};

/// Length and kind.
pub const HEADER_BYTES: usize = 5;

/// A stream is read in chunks of at least this size.
const READ_BYTES: usize = 16 << 10;

/// A buffer that grew beyond this is freed when it is empty.
const KEEP_BYTES: usize = 1 << 20;

/// Append a frame; `write` appends its body.
pub(crate) fn write_frame(buffer: &mut Vec<u8>, kind: u8, write: impl FnOnce(&mut Vec<u8>)) {
    let start = begin_frame(buffer, kind);
    write(buffer);
    end_frame(buffer, start);
}

/// Append a header with an unknown length. Returns the start of the frame for `end_frame`.
pub(crate) fn begin_frame(buffer: &mut Vec<u8>, kind: u8) -> usize {
    let start = buffer.len();
    buffer.extend_from_slice(&[0, 0, 0, 0, kind]);
    start
}

/// Write the length of the frame that begins at `start` and ends with the buffer.
pub(crate) fn end_frame(buffer: &mut [u8], start: usize) {
    let length = (buffer.len() - start - HEADER_BYTES) as u32;
    buffer[start..start + 4].copy_from_slice(&length.to_le_bytes());
}

/// Reads frames from a stream. Its memory grows with what has arrived, not with what a header announces.
#[derive(Debug)]
pub(crate) struct FrameReader<R> {
    stream: R,
    buffer: Vec<u8>,
    /// The bytes before this position were returned already.
    start: usize,
    /// Largest body.
    limit: usize,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    pub(crate) fn new(stream: R, limit: usize) -> Self {
        Self { stream, buffer: Vec::new(), start: 0, limit }
    }

    /// Change the limit, once the handshake is over.
    pub(crate) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Wait for the next whole frame; returns its kind and body. Safe to cancel and call again.
    ///
    /// # Errors
    /// The frame is too large, or the stream ends or fails.
    pub(crate) async fn next(&mut self) -> Result<(u8, &[u8]), ConnectionError> {
        let body_bytes = loop {
            let ready = &self.buffer[self.start..];
            let mut expected = HEADER_BYTES;
            if let Some((header, body)) = ready.split_first_chunk::<HEADER_BYTES>() {
                let num_bytes = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
                if num_bytes > self.limit {
                    return Err(DecodeError::TooLarge { num_bytes, limit: self.limit }.into());
                }
                if body.len() >= num_bytes {
                    break num_bytes;
                }
                expected += num_bytes;
            }
            let got = ready.len();
            self.make_room(expected - got);
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(match got {
                    0 => ConnectionError::Closed,
                    _ => ConnectionError::ClosedWithinFrame { got, expected },
                });
            }
        };
        let body_start = self.start + HEADER_BYTES;
        self.start = body_start + body_bytes;
        Ok((self.buffer[body_start - 1], &self.buffer[body_start..self.start]))
    }

    /// Discard the bytes that were returned, and make room for the next read.
    fn make_room(&mut self, missing: usize) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
            if self.buffer.is_empty() && self.buffer.capacity() > KEEP_BYTES {
                self.buffer = Vec::new();
            }
        }
        // At most double the buffer, so that a large announced length alone takes no memory.
        let room = missing.min(self.buffer.len()).max(READ_BYTES);
        self.buffer.reserve(room);
    }
}

#[cfg(test)]
mod tests {
    use super::{FrameReader, HEADER_BYTES, write_frame};
    use crate::error::{ConnectionError, DecodeError};

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
    }

    #[test]
    fn frames_come_out_as_they_went_in() {
        let mut bytes = Vec::new();
        let bodies: Vec<Vec<u8>> =
            [0, 1, 5, 70_000, 3].iter().map(|&n| (0..n).map(|i: u32| i as u8).collect()).collect();
        for (kind, body) in bodies.iter().enumerate() {
            write_frame(&mut bytes, kind as u8, |frame| frame.extend_from_slice(body));
        }
        let mut reader = FrameReader::new(bytes.as_slice(), 100_000);
        block_on(async {
            for (kind, body) in bodies.iter().enumerate() {
                assert_eq!(reader.next().await.expect("a frame"), (kind as u8, body.as_slice()));
            }
            assert!(matches!(reader.next().await, Err(ConnectionError::Closed)));
        });
    }

    #[test]
    fn an_announced_length_takes_no_memory() {
        let limit = 1 << 30;
        let mut reader = FrameReader::new([0, 0, 0, 32, 1, 9].as_slice(), limit);
        let error = block_on(reader.next()).expect_err("the stream ends");
        let expected = (32 << 24) + HEADER_BYTES;
        assert!(
            matches!(error, ConnectionError::ClosedWithinFrame { got: 6, expected: e } if e == expected),
            "{error}"
        );
        assert!(reader.buffer.capacity() < 1 << 20, "{} bytes", reader.buffer.capacity());
        let mut reader = FrameReader::new([0, 0, 0, 65, 1].as_slice(), limit);
        let error = block_on(reader.next()).expect_err("too large");
        let num_bytes = 65 << 24;
        assert!(
            matches!(error, ConnectionError::Decode(DecodeError::TooLarge { num_bytes: n, limit: l }) if (n, l) == (num_bytes, limit)),
            "{error}"
        );
    }
}
