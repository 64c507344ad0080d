//! Writing keys and values into the paged cache of a layer, and attention over it.

pub mod batch;
pub mod cache_element;
pub(crate) mod cache_rows;
pub mod cached;
pub(crate) mod decode;
pub mod heads;
pub(crate) mod keeping;
pub(crate) mod layer;
pub(crate) mod options;
pub(crate) mod products;
pub mod reference;
pub(crate) mod scratch;
pub(crate) mod softmax;
pub(crate) mod tile;

use std::{cell::RefCell, ops::Range};

use thiserror::Error;

use crate::{
    attention::{
        batch::{Part, RaggedBatch, TILE_TOKENS},
        cache_element::CacheElement,
        cached::Cached,
        layer::{Layer, Tile},
        options::AttentionOptions,
        scratch::Scratch,
    },
    element::Element,
    kernel::Kernel,
    threads::Threads,
};

/// Largest head that is taken: it bounds the memory of a thread.
pub const MAX_HEAD_DIM: usize = 1024;
/// Multiplications below which no helper is woken. So many read a quarter of a mebibyte of the cache, some 20 µs; within a
/// step the helpers look out for work between two products.
const MIN_SHARED_WORK: usize = 1 << 16;

/// What is wrong with the arrays of a layer.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum AttentionError {
    /// A size that is 0 or too large.
    #[error("{name} is {value}, but it must lie between 1 and {most}")]
    Size {
        /// What.
        name: &'static str,
        /// How large.
        value: usize,
        /// The limit.
        most: usize,
    },
    /// Query heads that cannot share the KV heads evenly.
    #[error("num_heads is {num_heads}, but it must be a multiple of num_kv_heads, {num_kv_heads}")]
    Heads {
        /// Of the query.
        num_heads: usize,
        /// Of the cache.
        num_kv_heads: usize,
    },
    /// An array with too few or too many elements.
    #[error("{name} has {found} elements, but the batch and the cache need {expected}")]
    Length {
        /// The array.
        name: &'static str,
        /// Its elements.
        found: usize,
        /// What it should have.
        expected: usize,
    },
    /// Tokens that lie closer together than they are long.
    #[error("tokens of {name} lie {stride} elements apart, but each has {row}")]
    Stride {
        /// The array.
        name: &'static str,
        /// Elements from one token to the next.
        stride: usize,
        /// Elements of a token.
        row: usize,
    },
    /// A block or slot that the cache does not have.
    #[error("the batch names block {block}, but the cache has {num_blocks} blocks")]
    Block {
        /// The largest id.
        block: usize,
        /// What there is.
        num_blocks: usize,
    },
    /// A batch of other blocks.
    #[error("the batch has blocks of {batch} tokens, but the cache has blocks of {cache}")]
    BlockSize {
        /// Of the batch.
        batch: usize,
        /// Of the cache.
        cache: usize,
    },
    /// A kernel whose lanes the heads do not fill.
    #[error("the kernel {kernel} does not take heads of {head_dim} features; the scalar one takes any")]
    Kernel {
        /// Its name.
        kernel: &'static str,
        /// The heads.
        head_dim: usize,
    },
}

/// Shape of one layer's cache: `[2 (keys, values), num_blocks, block_size, num_kv_heads, head_dim]`. Where heads have a scale,
/// it lies behind their features: `head_dim` + [`Cached::SCALE_LEN`] elements are a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheLayout {
    /// Blocks.
    pub num_blocks: usize,
    /// Tokens of each.
    pub block_size: usize,
    /// Heads of keys and of values.
    pub num_kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
}

impl CacheLayout {
    /// Features of a token's keys.
    #[must_use]
    pub fn row(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Elements that a cache of `C` holds of a token's keys.
    #[must_use]
    pub fn kept_row<C: Cached>(&self) -> usize {
        self.num_kv_heads * (self.head_dim + C::SCALE_LEN)
    }

    /// Elements of all keys, when that is a number; as many values follow.
    fn num_keys<C: Cached>(&self) -> Option<usize> {
        self.num_blocks
            .checked_mul(self.block_size)?
            .checked_mul(self.num_kv_heads)?
            .checked_mul(self.head_dim + C::SCALE_LEN)
    }

    fn check<C: Cached>(&self, batch: &RaggedBatch, cache: &[C]) -> Result<(), AttentionError> {
        for (name, value, most) in [
            ("block_size", self.block_size, i32::MAX as usize),
            ("num_kv_heads", self.num_kv_heads, i32::MAX as usize),
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
        ] {
            if value == 0 || value > most {
                return Err(AttentionError::Size { name, value, most });
            }
        }
        let expected = self.num_keys::<C>().and_then(|keys| keys.checked_mul(2)).unwrap_or(usize::MAX);
        if expected != cache.len() {
            return Err(AttentionError::Length { name: "kv_cache", found: cache.len(), expected });
        }
        if batch.block_size() != self.block_size {
            return Err(AttentionError::BlockSize { batch: batch.block_size(), cache: self.block_size });
        }
        if batch.num_blocks() > self.num_blocks {
            return Err(AttentionError::Block { block: batch.num_blocks() - 1, num_blocks: self.num_blocks });
        }
        Ok(())
    }
}

/// Rows of a flattened batch, `[num_tokens, heads · head_dim]`: each row is contiguous, the rows need not touch.
#[derive(Debug, Clone, Copy)]
pub struct TokenRows<'a, E> {
    /// From the first element of the first row to the last of the last, or more.
    pub data: &'a [E],
    /// Elements from one row to the next.
    pub stride: usize,
}

impl<'a, E> TokenRows<'a, E> {
    fn check(&self, name: &'static str, num_tokens: usize, row: usize) -> Result<(), AttentionError> {
        if num_tokens > 1 && self.stride < row {
            return Err(AttentionError::Stride { name, stride: self.stride, row });
        }
        let expected = match num_tokens.checked_sub(1) {
            None => 0,
            Some(last) => {
                last.checked_mul(self.stride).and_then(|start| start.checked_add(row)).unwrap_or(usize::MAX)
            }
        };
        if self.data.len() < expected {
            return Err(AttentionError::Length { name, found: self.data.len(), expected });
        }
        Ok(())
    }

    pub(crate) fn row(&self, token: usize, row: usize) -> &'a [E] {
        &self.data[token * self.stride..][..row]
    }
}

/// Put the step's keys and values where `slot_mapping` says; tokens with −1 are not kept. A cache in fewer bits takes what is
/// nearest, ties to even.
///
/// # Errors
///
/// See [`AttentionError`]; nothing is written then.
pub fn write_kv<E: Element, C: CacheElement<E>>(
    batch: &RaggedBatch,
    key: TokenRows<'_, E>,
    value: TokenRows<'_, E>,
    cache: &mut [C],
    layout: CacheLayout,
    kernel: &Kernel,
) -> Result<(), AttentionError> {
    layout.check(batch, cache)?;
    let (row, kept_row, dim) = (layout.row(), layout.kept_row::<C>(), layout.head_dim);
    key.check("key", batch.num_tokens(), row)?;
    value.check("value", batch.num_tokens(), row)?;
    let half = cache.len() / 2;
    let (keys, values) = cache.split_at_mut(half);
    for (token, &slot) in batch.slot_mapping().iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else { continue };
        let place = slot * kept_row..(slot + 1) * kept_row;
        C::keep(key.row(token, row), dim, &mut keys[place.clone()], kernel);
        C::keep(value.row(token, row), dim, &mut values[place], kernel);
    }
    Ok(())
}

/// Causal attention of the step's queries over what their requests have in the cache; see [`RaggedBatch::seeing`] for tokens
/// that see further.
///
/// # Arguments
///
/// * `query`: `[num_tokens, num_heads, head_dim]`.
/// * `num_heads`: a multiple of the layout's `num_kv_heads`.
/// * `cache`: see [`CacheLayout`].
/// * `out`: `[num_tokens, num_heads, head_dim]`, contiguous; padding gets zeros.
///
/// # Errors
///
/// See [`AttentionError`]; nothing is written then.
#[expect(clippy::too_many_arguments, reason = "the arrays of a layer")]
pub fn attend<E: Element, C: CacheElement<E>>(
    batch: &RaggedBatch,
    query: TokenRows<'_, E>,
    num_heads: usize,
    cache: &[C],
    layout: CacheLayout,
    options: &AttentionOptions<'_>,
    kernel: &Kernel,
    threads: &Threads,
    out: &mut [E],
) -> Result<(), AttentionError> {
    check_attend(batch, &query, num_heads, cache, layout, options, out)?;
    if !kernel.takes(layout.head_dim) {
        return Err(AttentionError::Kernel { kernel: kernel.name(), head_dim: layout.head_dim });
    }
    let row = num_heads * layout.head_dim;
    let num_queries = batch.spans().last().map_or(0, |span| span.start + span.num_tokens);
    out[num_queries * row..].fill(E::narrow(0.0));
    let (keys, values) = cache.split_at(cache.len() / 2);
    let layer = Layer {
        query: query.data.as_ptr(),
        query_stride: query.stride,
        keys: keys.as_ptr(),
        values: values.as_ptr(),
        out: out.as_mut_ptr(),
        num_heads,
        num_kv_heads: layout.num_kv_heads,
        head_dim: layout.head_dim,
        block_size: layout.block_size,
        options,
    };
    let tiles = C::tiles_of(kernel);
    let group = num_heads / layout.num_kv_heads;
    let shared = work(batch, num_heads, layout.head_dim) >= MIN_SHARED_WORK;
    let shares = share_out(batch, num_heads, layout.num_kv_heads, threads.num_threads());
    let tile_of = |share: &Share| {
        let part = &share.part;
        let span = &batch.spans()[part.span];
        let first = span.start + part.first;
        Tile {
            blocks: batch.blocks(span),
            tokens: first..first + part.num_tokens,
            position: span.seq_len - span.num_tokens + part.first,
            visible: batch.visible(first..first + part.num_tokens),
            kv_heads: share.kv_heads.clone(),
            next: None,
        }
    };
    threads.for_each(shares.len(), shared, |index| {
        // Threads take shares as they come, so in turn where all are about as long.
        let next = shares.get(index + threads.num_threads()).map(tile_of);
        let tile = Tile { next: next.as_ref(), ..tile_of(&shares[index]) };
        let compute = tiles.taking(tile.tokens.len() * group);
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: a kernel is only reachable where it was detected, and takes the heads; `RaggedBatch::new` checked
            // that tokens lie in the batch and blocks cover each sequence, `seeing` that no token sees beyond its own,
            // `check_attend` that the batch lies in the arrays and its blocks in the cache. Parts do not overlap, so no
            // two tiles write the same output.
            unsafe { compute(&layer, &tile, scratch) };
        });
    });
    Ok(())
}

/// What one thread computes at once: some KV heads of a part of the batch.
struct Share {
    part: Part,
    kv_heads: Range<usize>,
}

/// In decode a thread walks through the context with all KV heads together, so that it reads whole rows of the cache; in a
/// prompt with one, whose queries and sums fill the nearest caches by themselves. With few requests the heads are shared
/// out among the threads; with many parts of a prompt some of them that follow each other are one, so that keys and values
/// are read less often.
fn share_out(batch: &RaggedBatch, num_heads: usize, num_kv_heads: usize, num_threads: usize) -> Vec<Share> {
    const MAX_ROWS: usize = 32;
    const MAX_ROWS_OF_HEAD: usize = 128;
    const SHARES_PER_THREAD: usize = 4;
    let parts = batch.parts();
    let group = num_heads / num_kv_heads;
    let wanted = if num_threads == 1 { 1 } else { SHARES_PER_THREAD * num_threads };
    let pieces = wanted.div_ceil(parts.len().max(1));
    let most_tokens = TILE_TOKENS * (parts.len() * num_kv_heads / wanted).max(1);
    let most_tokens = most_tokens.min(MAX_ROWS_OF_HEAD / group).max(TILE_TOKENS);
    let mut shares = Vec::with_capacity(parts.len());
    let mut rest = parts;
    while let Some((&last, before)) = rest.split_first() {
        let mut part = last;
        rest = before;
        // The parts of a request lie one behind the other, the last one first.
        while let Some(next) = rest.first()
            && next.span == part.span
            && next.num_tokens + part.num_tokens <= most_tokens
        {
            part = Part { span: part.span, first: next.first, num_tokens: next.num_tokens + part.num_tokens };
            rest = &rest[1..];
        }
        let fitting = MAX_ROWS / (part.num_tokens * group);
        let heads = fitting.min(num_kv_heads.div_ceil(pieces)).max(1);
        for start in (0..num_kv_heads).step_by(heads) {
            shares.push(Share { part, kv_heads: start..num_kv_heads.min(start + heads) });
        }
    }
    shares
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Multiplications that attention takes, about.
#[must_use]
pub fn work(batch: &RaggedBatch, num_heads: usize, head_dim: usize) -> usize {
    batch.num_pairs().saturating_mul(2 * num_heads * head_dim)
}

/// Whether queries, cache and output fit the batch and each other.
pub(crate) fn check_attend<E, C: Cached>(
    batch: &RaggedBatch,
    query: &TokenRows<'_, E>,
    num_heads: usize,
    cache: &[C],
    layout: CacheLayout,
    options: &AttentionOptions<'_>,
    out: &[E],
) -> Result<(), AttentionError> {
    layout.check(batch, cache)?;
    if num_heads == 0 || num_heads > i32::MAX as usize {
        return Err(AttentionError::Size { name: "num_heads", value: num_heads, most: i32::MAX as usize });
    }
    if !num_heads.is_multiple_of(layout.num_kv_heads) {
        return Err(AttentionError::Heads { num_heads, num_kv_heads: layout.num_kv_heads });
    }
    let row = num_heads * layout.head_dim;
    query.check("query", batch.num_tokens(), row)?;
    let expected = batch.num_tokens().saturating_mul(row);
    if out.len() != expected {
        return Err(AttentionError::Length { name: "out", found: out.len(), expected });
    }
    for (name, found) in [("alibi_slopes", options.alibi_slopes.len()), ("sinks", options.sinks.len())] {
        if found != 0 && found != num_heads {
            return Err(AttentionError::Length { name, found, expected: num_heads });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{RaggedBatch, share_out};

    /// Shares of a prompt of `num_tokens` behind a decode: the tokens of each. Every token and head is in one.
    fn shares(num_tokens: usize, group: usize, num_kv_heads: usize, num_threads: usize) -> Vec<usize> {
        let (end, columns) = (1 + num_tokens, num_tokens.div_ceil(16));
        let table: Vec<i32> = (0..2 * columns as i32).collect();
        let starts = [0, 1, end as i32];
        let batch = RaggedBatch::new(16, &starts, &[1, num_tokens as i32], &table, &vec![-1; end]);
        let batch = batch.expect("a good step");
        let mut counts = vec![0; end * num_kv_heads];
        let shares = share_out(&batch, group * num_kv_heads, num_kv_heads, num_threads);
        for share in &shares {
            let first = batch.spans()[share.part.span].start + share.part.first;
            for token in first..first + share.part.num_tokens {
                share.kv_heads.clone().for_each(|head| counts[token * num_kv_heads + head] += 1);
            }
        }
        assert!(counts.iter().all(|&count| count == 1), "{counts:?}");
        shares.iter().map(|share| share.part.num_tokens).collect()
    }

    #[test]
    fn parts_of_a_prompt_are_one_where_threads_have_enough_to_do() {
        let longest = |shares: Vec<usize>| shares.into_iter().max();
        assert_eq!(longest(shares(2_000, 1, 12, 2)), Some(128), "as many rows as a head may have");
        assert_eq!(longest(shares(2_000, 4, 3, 2)), Some(32), "a group of four fills them with fewer tokens");
        assert_eq!(longest(shares(128, 1, 12, 64)), Some(32), "with many threads none is without work");
        assert!(shares(128, 1, 12, 2).len() >= 8, "each thread has some parts");
        assert_eq!(longest(shares(5, 1, 2, 1)), Some(5));
    }
}
