//! Heads of queries and keys before attention reads them: each is normed, where the model does that, and turned.

use std::cell::RefCell;

use crate::{
    element::Element,
    kernel::Kernel,
    norm::row::{MAX_LANES, Norm, NormRows},
    rotary::{Rotary, RotaryError},
    threads::Threads,
};

/// Features below which no helper is woken.
const MIN_SHARED_FEATURES: usize = 1 << 15;

/// Sizes of attention, the same in all blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Of queries: a multiple of the next.
    pub num_heads: usize,
    /// Of keys and of values.
    pub num_kv_heads: usize,
    /// Features of each.
    pub head_dim: usize,
}

impl Heads {
    pub(crate) fn query_row(&self) -> usize {
        self.num_heads.saturating_mul(self.head_dim)
    }

    pub(crate) fn key_row(&self) -> usize {
        self.num_kv_heads.saturating_mul(self.head_dim)
    }
}

/// Queries, keys and values of one head after the other as all queries, all keys and all values.
///
/// `by_head` and `out` have those of `num_tokens` tokens, one token after the other.
///
/// # Panics
///
/// Fewer rows, or fewer keys than queries.
pub(crate) fn split_heads<E: Element>(
    by_head: &[E],
    num_tokens: usize,
    heads: Heads,
    threads: &Threads,
    out: &mut [E],
) {
    let (dim, size) = (heads.head_dim, heads.query_row());
    assert_eq!(heads.num_heads, heads.num_kv_heads, "each head has its key");
    let is_shared = num_tokens * 3 * size >= MIN_SHARED_FEATURES;
    let (from, start) = (&by_head[..num_tokens * 3 * size], Start(out[..num_tokens * 3 * size].as_mut_ptr()));
    threads.for_each(num_tokens, is_shared, |token| {
        let row = &from[token * 3 * size..][..3 * size];
        for (index, head) in row.chunks_exact(dim).enumerate() {
            let to = start.at((3 * token + index % 3) * size + index / 3 * dim);
            // SAFETY: the place is of `dim` elements within the token's row of `out`, which has one for each token and is
            // this part's alone; `from` is another array.
            unsafe { to.copy_from_nonoverlapping(head.as_ptr(), dim) };
        }
    });
}

/// Norm and turn the heads of queries and keys in place.
///
/// `rows` has the queries, keys and values of `num_tokens` tokens, one token after the other. The norms, of queries and of keys,
/// are of a head's features, or of all heads' together.
///
/// # Errors
///
/// Cosines and sines that do not fit; nothing is written then.
///
/// # Panics
///
/// Fewer rows, or norms of other heads.
pub fn prepare_heads<E: Element>(
    rows: &mut [E],
    num_tokens: usize,
    heads: Heads,
    norms: Option<&[Norm<'_>; 2]>,
    rotary: Option<&Rotary<'_>>,
    kernel: &Kernel,
    threads: &Threads,
) -> Result<(), RotaryError> {
    if norms.is_none() && rotary.is_none() {
        return Ok(());
    }
    let dim = heads.head_dim;
    let stride = heads.query_row() + 2 * heads.key_row();
    rotary.map_or(Ok(()), |rotary| rotary.check(num_tokens, dim))?;
    assert!(rows.len() >= num_tokens * stride, "each token has its row");
    let fits = |norm: &Norm<'_>, row: usize| [dim, row].contains(&norm.weight.len());
    let fit = norms.is_none_or(|[of_queries, of_keys]| {
        fits(of_queries, heads.query_row()) && fits(of_keys, heads.key_row())
    });
    assert!(fit, "norms are of a head's features, or of all heads' together");
    let start = Start(rows.as_mut_ptr());
    let (norm, turn) = (E::norm_of(kernel), E::turn_of(kernel));
    let num_features = num_tokens * (heads.query_row() + heads.key_row());
    threads.for_each(num_tokens, num_features >= MIN_SHARED_FEATURES, |token| {
        let first = start.at(token * stride);
        if let Some([of_queries, of_keys]) = norms {
            let keys = first.wrapping_add(heads.query_row());
            for (norm_of, place, row) in
                [(of_queries, first, heads.query_row()), (of_keys, keys, heads.key_row())]
            {
                let width = norm_of.weight.len();
                let rows = NormRows {
                    x: place.cast_const(),
                    x_stride: width,
                    residual: std::ptr::null(),
                    residual_stride: 0,
                    sum_out: std::ptr::null_mut(),
                    sum_out_stride: 0,
                    out: place,
                    out_stride: width,
                    adds: false,
                    norm: norm_of,
                };
                SCRATCH.with_borrow_mut(|scratch| {
                    // Up to a whole vector.
                    scratch.resize(width.next_multiple_of(MAX_LANES), 0.0);
                    for part in 0..row / width {
                        // SAFETY: a kernel is only reachable where it was detected; the heads lie in the token's row, which
                        // is this part's alone, and each is read before it is written.
                        unsafe { norm(&rows, part, scratch.as_mut_ptr()) };
                    }
                });
            }
        }
        if let Some(rotary) = rotary {
            let (cos, sin) = (&rotary.cos[token * rotary.width..], &rotary.sin[token * rotary.width..]);
            for head in 0..heads.num_heads + heads.num_kv_heads {
                // SAFETY: a kernel is only reachable where it was detected; queries and keys lie side by side in the token's
                // row, which is this part's alone; `Rotary::check` saw that heads, cosines and sines are as wide.
                unsafe { turn(first.wrapping_add(head * dim), cos.as_ptr(), sin.as_ptr(), rotary.width) };
            }
        }
    });
    Ok(())
}

/// The first row; parts write rows of their own.
struct Start<E>(*mut E);

// SAFETY: each part touches the row of its own token, see `split_heads` and `prepare_heads`.
unsafe impl<E: Send> Sync for Start<E> {}

impl<E> Start<E> {
    fn at(&self, offset: usize) -> *mut E {
        self.0.wrapping_add(offset)
    }
}

thread_local! {
    /// A head, or all of them, as 32 bits.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}
