//! Memory of a thread that attention uses.

use crate::attention::{products::CHUNK, softmax::Softmax};

/// Used again by every tile; where it says a row, the tile's rows, `[kv_head][token][query head of the KV head]`.
#[derive(Default)]
pub(crate) struct Scratch {
    /// `[row][head_dim]`, scaled.
    pub(crate) query: Vec<f32>,
    /// `[row][head_dim]`
    pub(crate) sums: Vec<f32>,
    pub(crate) softmax: Vec<Softmax>,
    /// A chunk of one head, `[key][head_dim]`.
    pub(crate) packed_keys: Vec<f32>,
    pub(crate) packed_values: Vec<f32>,
    /// Of each row with a chunk's keys.
    pub(crate) scores: Vec<[f32; CHUNK]>,
    /// What a row's sums over earlier chunks are multiplied with.
    pub(crate) factors: Vec<f32>,
    /// `[row][head_dim]`: of a chunk's values, from keys at even and at odd places.
    pub(crate) even: Vec<f32>,
    pub(crate) odd: Vec<f32>,
}
