//! `SharedBytes`: bytes that are put together from parts, of which the large ones are shared and not copied.

use std::sync::Arc;

/// Parts below this size are copied.
const LEAST_SHARED: usize = 4096;

/// The end of a long answer repeats all of its text several times. So the parts of that end refer to the text.
#[derive(Debug, Clone, Default)]
pub struct SharedBytes {
    parts: Vec<Arc<Vec<u8>>>,
    /// What comes after the parts.
    last: Vec<u8>,
}

impl SharedBytes {
    /// Where to append bytes that nothing else refers to.
    pub(crate) fn last(&mut self) -> &mut Vec<u8> {
        &mut self.last
    }

    /// Append bytes that others refer to, too.
    pub(crate) fn share(&mut self, bytes: &Arc<Vec<u8>>) {
        if bytes.len() < LEAST_SHARED {
            self.last.extend_from_slice(bytes);
            return;
        }
        self.end_last();
        self.parts.push(Arc::clone(bytes));
    }

    /// Append other bytes, whose large parts stay shared.
    pub(crate) fn append(&mut self, other: &Self) {
        for part in &other.parts {
            self.share(part);
        }
        self.last.extend_from_slice(&other.last);
    }

    /// Append all of them to a buffer.
    pub(crate) fn copy_to(&self, into: &mut Vec<u8>) {
        for part in &self.parts {
            into.extend_from_slice(part);
        }
        into.extend_from_slice(&self.last);
    }

    /// The bytes as slices of at most `most` bytes each, copied one by one.
    pub fn into_slices(mut self, most: usize) -> impl Iterator<Item = Vec<u8>> + Send + Sync {
        self.end_last();
        let starts = move |part: Arc<Vec<u8>>| {
            (0..part.len()).step_by(most).map(move |start| (Arc::clone(&part), start))
        };
        let slices = self.parts.into_iter().flat_map(starts);
        slices.map(move |(part, start)| part[start..part.len().min(start + most)].to_vec())
    }

    fn end_last(&mut self) {
        if !self.last.is_empty() {
            self.parts.push(Arc::new(std::mem::take(&mut self.last)));
        }
    }
}
