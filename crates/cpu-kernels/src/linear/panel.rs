//! A panel of packed weights: how it lies, what a call of a product computes with it, and one input of it times some rows.

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over registers, of which several arrays are indexed alike"
)]

use crate::{lines::LINE, simd::Simd};

/// Inputs of a row of activations that lie together: see [`Product::a`].
pub(crate) const CHUNK: usize = 128;
/// Vectors of a panel: its outputs are twice the lanes.
pub(crate) const PANEL_VECTORS: usize = 2;

/// What one call computes, of activations of `A`.
pub(crate) struct Product<A = f32> {
    /// Activations in chunks, `[chunk][row][CHUNK]`, from the first row of this call on.
    pub(crate) a: *const A,
    /// Elements from one chunk to the next.
    pub(crate) chunk_stride: usize,
    /// The inputs: from `first_k`, where a chunk begins, as many as `num_k`.
    pub(crate) first_k: usize,
    pub(crate) num_k: usize,
    /// The panel's weights from `first_k` on, `[k][output]`.
    pub(crate) b: *const u8,
    /// Sums so far, `[row][output]`; not read when `first_k` is 0.
    pub(crate) c: *mut f32,
    /// The panel's scales, `[group][output]`; only where weights have any.
    pub(crate) scales: *const f32,
    /// Inputs that share a scale.
    pub(crate) group_size: usize,
    /// Where to begin to ask for weights that come later, and how many bytes further with each input: memory answers while
    /// this one is multiplied. Any address will do.
    pub(crate) ahead: *const u8,
    pub(crate) ahead_step: usize,
    /// Activations that come after these, laid out alike: each input asks for its share of them. Any address will do.
    pub(crate) next_a: *const A,
}

/// How weights lie in a panel.
pub(crate) trait Weights {
    /// Bytes of a weight.
    const BYTES: usize;
    /// Whether a piece's sum is multiplied by a scale.
    const SCALED: bool;
    /// # Safety
    ///
    /// The weights of one k may be read, and the machine has the instructions of `S`.
    unsafe fn load<S: Simd>(from: *const u8) -> [S::V; PANEL_VECTORS];
}

pub(crate) struct F32;
pub(crate) struct Bf16;
pub(crate) struct F16;
pub(crate) struct Int8;
/// Weights of 8 bits, widened before.
pub(crate) struct WideInt8;

impl Weights for F32 {
    const BYTES: usize = 4;
    const SCALED: bool = false;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> [S::V; PANEL_VECTORS] {
        // SAFETY: the caller lets a panel's weights for one input be read at `from`, and has found the instructions of
        // `S`.
        unsafe { [S::load(from.cast()), S::load(from.add(4 * S::LANES).cast())] }
    }
}

impl Weights for Bf16 {
    const BYTES: usize = 2;
    const SCALED: bool = false;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> [S::V; PANEL_VECTORS] {
        // SAFETY: the caller lets a panel's weights for one input be read at `from`, and has found the instructions of
        // `S`.
        unsafe { S::load_pair_bf16(from.cast()) }
    }
}

impl Weights for F16 {
    const BYTES: usize = 2;
    const SCALED: bool = false;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> [S::V; PANEL_VECTORS] {
        // SAFETY: the caller lets a panel's weights for one input be read at `from`, and has found the instructions of
        // `S`.
        unsafe { [S::load_f16(from.cast()), S::load_f16(from.add(2 * S::LANES).cast())] }
    }
}

impl Weights for Int8 {
    const BYTES: usize = 1;
    const SCALED: bool = true;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> [S::V; PANEL_VECTORS] {
        // SAFETY: the caller lets a panel's weights for one input be read at `from`, and has found the instructions of
        // `S`.
        unsafe { [S::load_i8(from.cast()), S::load_i8(from.cast::<i8>().add(S::LANES))] }
    }
}

impl Weights for WideInt8 {
    const BYTES: usize = 4;
    const SCALED: bool = true;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> [S::V; PANEL_VECTORS] {
        // SAFETY: the caller lets a panel's weights for one input be read at `from`, and has found the instructions of
        // `S`.
        unsafe { F32::load::<S>(from) }
    }
}

/// Ask for `num_bytes` of weights that are used several times.
#[inline(always)]
pub(crate) fn ask<S: Simd>(ahead: *const u8, num_bytes: usize) {
    let mut at = 0;
    while at < num_bytes {
        S::prefetch(ahead.wrapping_add(at));
        at += LINE;
    }
}

/// Ask for `num_bytes` of weights that are used once, soon, and so are wanted in the first cache.
#[inline(always)]
pub(crate) fn ask_near<S: Simd>(ahead: *const u8, num_bytes: usize) {
    let mut at = 0;
    while at < num_bytes {
        S::prefetch_near(ahead.wrapping_add(at));
        at += LINE;
    }
}

/// One input of `R` rows, whose activations begin at `a`, times its weights at `b`.
///
/// # Safety
///
/// The `R` rows of the chunk at `a` and the weights of the input at `b` may be read; the machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn multiply<S: Simd, W: Weights, const R: usize>(
    a: *const f32,
    b: *const u8,
    sums: &mut [[S::V; PANEL_VECTORS]; R],
) {
    // SAFETY: the caller gives `R` rows of a chunk, and a panel's weights of one input.
    unsafe {
        let weights = W::load::<S>(b);
        for r in 0..R {
            let x = S::splat(*a.add(r * CHUNK));
            for n in 0..PANEL_VECTORS {
                sums[r][n] = S::fma(x, weights[n], sums[r][n]);
            }
        }
    }
}
