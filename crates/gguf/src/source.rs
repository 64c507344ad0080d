//! Bytes of a header, of which no more are read than there can be.

use std::io::Read;

use crate::error::GgufError;

/// Reads forward and knows how many bytes are left.
#[derive(Debug)]
pub(crate) struct Source<R> {
    reader: R,
    position: u64,
    end: u64,
}

impl<R: Read> Source<R> {
    /// At most `end` bytes are read.
    pub(crate) fn new(reader: R, end: u64) -> Self {
        Self { reader, position: 0, end }
    }

    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    pub(crate) fn left(&self) -> u64 {
        self.end - self.position
    }

    /// Refuses what is longer than the rest, before memory for it is taken.
    pub(crate) fn expect(&self, what: &str, length: u64) -> Result<(), GgufError> {
        if length > self.left() {
            return Err(GgufError::Length { what: what.to_owned(), length, left: self.left() });
        }
        Ok(())
    }

    pub(crate) fn take<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        self.expect(what, N as u64)?;
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes)?;
        self.position += N as u64;
        Ok(bytes)
    }

    pub(crate) fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        self.take(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        self.take(what).map(u64::from_le_bytes)
    }

    /// As many bytes behind those of `to`.
    pub(crate) fn append(&mut self, what: &str, length: u64, to: &mut Vec<u8>) -> Result<(), GgufError> {
        self.expect(what, length)?;
        let start = to.len();
        to.resize(start + length as usize, 0);
        self.reader.read_exact(&mut to[start..])?;
        self.position += length;
        Ok(())
    }

    /// A text of at most `most` bytes: its length, then its bytes.
    pub(crate) fn text(&mut self, what: &str, most: u64) -> Result<String, GgufError> {
        let length = self.u64(what)?;
        if length > most && length <= self.left() {
            return Err(GgufError::Count { what: format!("the length of {what}"), count: length, most });
        }
        let mut bytes = Vec::new();
        self.append(what, length, &mut bytes)?;
        String::from_utf8(bytes).map_err(|_| GgufError::Text(what.to_owned()))
    }
}
