//! Memory of a thread that attention uses.

use std::ops::{Deref, DerefMut};

use crate::attention::{products::CHUNK, softmax::Softmax};

/// Used again by every tile; where it says a row, the tile's rows, `[kv_head][token][query head of the KV head]`.
#[derive(Default)]
pub(crate) struct Scratch {
    /// `[row][head_dim]`, scaled.
    pub(crate) query: Numbers,
    /// `[row][head_dim]`
    pub(crate) sums: Numbers,
    pub(crate) softmax: Vec<Softmax>,
    /// A chunk of one head, `[key][head_dim]`.
    pub(crate) packed_keys: Numbers,
    pub(crate) packed_values: Numbers,
    /// Of each row with a chunk's keys.
    pub(crate) scores: Vec<[f32; CHUNK]>,
    /// What a row's sums over earlier chunks are multiplied with.
    pub(crate) factors: Vec<f32>,
}

/// What begins with a cache line. A vector of AVX-512 that lies in two takes as long to read as two.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct OnLine<T>(pub(crate) T);

const LINE_LEN: usize = 16;
const LINE: OnLine<[f32; LINE_LEN]> = OnLine([0.0; LINE_LEN]);

/// Numbers that begin with a cache line.
#[derive(Default)]
pub(crate) struct Numbers {
    lines: Vec<OnLine<[f32; LINE_LEN]>>,
    len: usize,
}

impl Numbers {
    /// Have so many, of any values.
    pub(crate) fn set_len(&mut self, len: usize) {
        self.lines.resize(len.div_ceil(LINE_LEN), LINE);
        self.len = len;
    }

    /// Have so many zeros.
    pub(crate) fn set_zeros(&mut self, len: usize) {
        self.set_len(len);
        self.fill(0.0);
    }
}

impl Deref for Numbers {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: lines are nothing but numbers, one after the other, and there are lines for `len` of them.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Numbers {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and `&mut self` is the only reference to them.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}
