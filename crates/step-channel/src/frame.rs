//! A frame in its slot: a head, then words of eight bytes, in this host's byte order, because only its own processes
//! read it.

use std::ptr::NonNull;

use thiserror::Error;

/// Bytes before the words.
pub(crate) const HEAD_BYTES: usize = 32;

/// Why a frame does not fit into a slot, or a reader cannot use it.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum FrameError {
    /// The writer's slots are too small.
    #[error("a frame needs more than the {available} bytes of a slot")]
    TooLong {
        /// Bytes of a slot.
        available: usize,
    },
    /// Another frame lies in the slot.
    #[error("frame {wanted} was to be read, but the slot has frame {got}: it was written too early")]
    Overwritten {
        /// The frame that was announced.
        wanted: u32,
        /// The frame in the slot.
        got: u32,
    },
    /// The frame's digest is wrong.
    #[error("frame {number} has digest {got:016x}, but its writer made {wanted:016x}")]
    Digest {
        /// The frame's number.
        number: u32,
        /// The writer's digest.
        wanted: u64,
        /// The reader's digest.
        got: u64,
    },
    /// A step has more elements than the reader's array.
    #[error("{name} of the step has {got} elements, but this rank has room for {room}")]
    Extent {
        /// The array.
        name: &'static str,
        /// Elements of the step.
        got: usize,
        /// Elements that there are.
        room: usize,
    },
    /// A frame ends too early.
    #[error("the frame has {got} bytes, but {wanted} or more were announced")]
    Short {
        /// Bytes that it announces.
        wanted: usize,
        /// Bytes that there are.
        got: usize,
    },
}

/// The part of a frame before its words.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Head {
    pub(crate) number: u32,
    pub(crate) command: u32,
    pub(crate) num_words: u64,
    pub(crate) digest: u64,
}

/// A slot that its writer is filling.
#[derive(Debug)]
pub(crate) struct Filling {
    start: NonNull<u8>,
    room: usize,
    num_words: usize,
}

impl Filling {
    /// # Safety
    /// `start` is aligned to 8 bytes and valid for writes of `room` bytes that nothing else touches while this lives.
    pub(crate) unsafe fn new(start: NonNull<u8>, room: usize) -> Self {
        debug_assert!(room > HEAD_BYTES && (start.as_ptr() as usize).is_multiple_of(8));
        Self { start, room, num_words: 0 }
    }

    pub(crate) fn words(&mut self, words: &[u64]) -> Result<(), FrameError> {
        // SAFETY: a slice of plain numbers is readable as bytes.
        unsafe { self.bytes(words.as_ptr().cast(), size_of_val(words)) }
    }

    /// Append bytes, and zeros up to the next word.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes, outside this slot.
    pub(crate) unsafe fn bytes(&mut self, from: *const u8, len: usize) -> Result<(), FrameError> {
        let num_words = len.div_ceil(8);
        let begin = HEAD_BYTES + self.num_words * 8;
        if begin + num_words * 8 > self.room {
            return Err(FrameError::TooLong { available: self.room });
        }
        if num_words == 0 {
            return Ok(());
        }
        // SAFETY: in bounds, by the check above and the contracts of both constructors; the last word is cleared
        // first, so that what is not copied is zero.
        unsafe {
            let place = self.start.add(begin);
            place.add((num_words - 1) * 8).cast::<u64>().write(0);
            place.as_ptr().copy_from_nonoverlapping(from, len);
        }
        self.num_words += num_words;
        Ok(())
    }

    /// Write the head, which completes the frame; returns its length in bytes.
    pub(crate) fn finish(self, number: u32, command: u32) -> usize {
        // SAFETY: the words were written above, and nothing else touches the slot.
        let words = unsafe {
            std::slice::from_raw_parts(self.start.add(HEAD_BYTES).cast::<u64>().as_ptr(), self.num_words)
        };
        let head = Head { number, command, num_words: self.num_words as u64, digest: digest(words) };
        // SAFETY: the slot is longer than a head, aligned, and ours.
        unsafe { self.start.cast::<Head>().write(head) };
        HEAD_BYTES + self.num_words * 8
    }
}

/// The head of the frame in a slot, and its words.
///
/// # Safety
/// `start` must be aligned to 8 bytes and valid for reads of `room` bytes, which nothing writes during `'a`.
pub(crate) unsafe fn read<'a>(
    start: NonNull<u8>,
    room: usize,
    number: u32,
) -> Result<(Head, &'a [u64]), FrameError> {
    // SAFETY: a slot is longer than a head and aligned; any bytes are a head.
    let head = unsafe { start.cast::<Head>().read() };
    if head.number != number {
        return Err(FrameError::Overwritten { wanted: number, got: head.number });
    }
    let most = (room - HEAD_BYTES) / 8;
    let num_words = usize::try_from(head.num_words).unwrap_or(usize::MAX);
    if num_words > most {
        return Err(FrameError::Short { wanted: num_words.saturating_mul(8), got: most * 8 });
    }
    // SAFETY: in bounds by the check above.
    let words =
        unsafe { std::slice::from_raw_parts(start.add(HEAD_BYTES).cast::<u64>().as_ptr(), num_words) };
    let got = digest(words);
    if got != head.digest {
        return Err(FrameError::Digest { number, wanted: head.digest, got });
    }
    Ok((head, words))
}

/// A 64-bit digest of the words, which detects accidental changes but not forged ones.
pub(crate) fn digest(words: &[u64]) -> u64 {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
    // Four lanes, so that a multiplication need not wait for the previous one.
    let mut lanes = [1_u64, 2, 3, 4].map(|lane| lane.wrapping_mul(FACTOR) ^ words.len() as u64);
    let (fours, rest) = words.as_chunks::<4>();
    for four in fours {
        for (lane, word) in lanes.iter_mut().zip(four) {
            *lane = (*lane ^ word).wrapping_mul(FACTOR).rotate_left(29);
        }
    }
    for (lane, word) in lanes.iter_mut().zip(rest) {
        *lane = (*lane ^ word).wrapping_mul(FACTOR).rotate_left(29);
    }
    lanes.into_iter().fold(0, |sum, lane| (sum ^ lane ^ (lane >> 32)).wrapping_mul(FACTOR).rotate_left(17))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(num_words: usize) -> Vec<u64> {
        vec![0; num_words]
    }

    fn start_of(slot: &mut [u64]) -> NonNull<u8> {
        NonNull::new(slot.as_mut_ptr().cast()).expect("a slice has a place")
    }

    #[test]
    fn what_is_read_is_what_was_written() {
        let mut slot = slot(16);
        let start = start_of(&mut slot);
        // SAFETY: the slot is ours, aligned and 128 bytes long; the bytes lie elsewhere.
        let (head, words) = unsafe {
            let mut filling = Filling::new(start, 128);
            filling.words(&[7, 8]).expect("there is room");
            filling.bytes([1_u8, 2, 3].as_ptr(), 3).expect("there is room");
            filling.finish(5, 9);
            read(start, 128, 5).expect("it is whole")
        };
        assert_eq!((head.number, head.command), (5, 9));
        assert_eq!(words, [7, 8, 0x03_0201]);
    }

    #[test]
    fn a_changed_bit_another_frame_and_a_long_one_are_refused() {
        let mut slot = slot(16);
        let start = start_of(&mut slot);
        // SAFETY: the slot is ours, aligned and 128 bytes long.
        unsafe {
            let mut filling = Filling::new(start, 128);
            filling.words(&[1, 2, 3]).expect("there is room");
            assert_eq!(filling.words(&[0; 10]), Err(FrameError::TooLong { available: 128 }));
            filling.finish(5, 0);
            assert_eq!(
                read(start, 128, 6).expect_err("it is refused"),
                FrameError::Overwritten { wanted: 6, got: 5 }
            );
        }
        for bit in 0..3 * 64 {
            slot[4 + bit / 64] ^= 1 << (bit % 64);
            // SAFETY: the slot is ours, aligned and 128 bytes long.
            let found = unsafe { read(start_of(&mut slot), 128, 5) };
            assert!(matches!(found, Err(FrameError::Digest { number: 5, .. })), "bit {bit}");
            slot[4 + bit / 64] ^= 1 << (bit % 64);
        }
        slot[1] = 1000;
        // SAFETY: the slot is ours, aligned and 128 bytes long.
        let found = unsafe { read(start_of(&mut slot), 128, 5) };
        assert_eq!(found.expect_err("it is refused"), FrameError::Short { wanted: 8000, got: 96 });
    }

    #[test]
    fn words_in_another_order_or_number_have_another_digest() {
        let all = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 6, 5], [5, 2, 3, 4, 1, 6], [2, 1, 3, 4, 5, 6]];
        let digests: std::collections::HashSet<u64> = all.iter().map(|words| digest(words)).collect();
        assert_eq!(digests.len(), all.len());
        assert_ne!(digest(&[0; 4]), digest(&[0; 5]));
    }
}
