//! All blocks of a decoder in one call: norm, projection, attention, projection, norm, two products, and the norm at the end.
//!
//! It computes what the parts compute when they are called one by one, bit for bit. What it saves is what lies between them:
//! a step of one row is some eighty calls of a few microseconds of work each around the reading of weights, in which memory
//! waits.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use thiserror::Error;

use crate::{
    attention::{AttentionError, AttentionOptions, CacheLayout, TokenRows, attend, write_kv},
    batch::RaggedBatch,
    element::Element,
    finish::Activation,
    kernel::Kernel,
    linear::{Epilogue, OutRows, Residual, linear},
    lines::Lines,
    norm::{Norm, NormKind, Sum, norm},
    packed::{LinearError, PackedLinear},
    threads::Threads,
};

/// What is wrong with a decoder or with what it is given.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DecoderError {
    /// A part whose size is not that of its neighbours.
    #[error("block {block}: {name} has {found} features, but {expected} are needed")]
    Features {
        /// Which block; one more than there are: the norm at the end.
        block: usize,
        /// The part.
        name: &'static str,
        /// Its size.
        found: usize,
        /// What it should be.
        expected: usize,
    },
    /// Not a cache for each block.
    #[error("caches of {found} blocks are given, but there are {expected} blocks")]
    Caches {
        /// How many.
        found: usize,
        /// Blocks.
        expected: usize,
    },
    /// A block whose cache there is not.
    #[error("a block has cache {index}, but there are {found}")]
    CacheIndex {
        /// Which.
        index: usize,
        /// How many there are.
        found: usize,
    },
    /// Caches of other heads.
    #[error(
        "the caches have {found_heads} heads of {found_dim} features, but the decoder has {num_kv_heads} of {head_dim}"
    )]
    Cache {
        /// Heads of a cache.
        found_heads: usize,
        /// Features of each.
        found_dim: usize,
        /// Heads of keys and values.
        num_kv_heads: usize,
        /// Features of each.
        head_dim: usize,
    },
    /// No memory for what lies between the parts.
    #[error(
        "{num_bytes} bytes for the activations of {num_tokens} tokens cannot be had; fewer tokens in a step take fewer"
    )]
    Memory {
        /// What they need.
        num_bytes: usize,
        /// Tokens of the step.
        num_tokens: usize,
    },
    /// Of a product or a norm.
    #[error(transparent)]
    Linear(#[from] LinearError),
    /// Of attention.
    #[error(transparent)]
    Attention(#[from] AttentionError),
}

/// The numbers of a norm, kept.
#[derive(Debug, Clone)]
pub struct DecoderNorm {
    /// Which.
    pub kind: NormKind,
    /// A factor per feature.
    pub weight: Vec<f32>,
    /// Added per feature, or nothing.
    pub bias: Option<Vec<f32>>,
    /// Added to the variance or the mean square.
    pub eps: f32,
}

impl DecoderNorm {
    fn of(&self) -> Norm<'_> {
        Norm { kind: self.kind, weight: &self.weight, bias: self.bias.as_deref(), eps: self.eps }
    }
}

/// A block: attention and MLP, each on the normed stream and added to it.
#[derive(Debug)]
pub struct DecoderBlock {
    /// Before attention.
    pub attention_norm: DecoderNorm,
    /// Query, key and value, one after the other.
    pub qkv: Arc<PackedLinear>,
    /// Factor on the products of queries and keys.
    pub scale: f32,
    /// From the heads to the stream.
    pub out: Arc<PackedLinear>,
    /// Before the MLP.
    pub mlp_norm: DecoderNorm,
    /// From the stream to the MLP's features.
    pub up: Arc<PackedLinear>,
    /// Of those.
    pub activation: Activation,
    /// From them to the stream.
    pub down: Arc<PackedLinear>,
}

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
    fn query_row(&self) -> usize {
        self.num_heads.saturating_mul(self.head_dim)
    }

    fn key_row(&self) -> usize {
        self.num_kv_heads.saturating_mul(self.head_dim)
    }
}

/// Where the time of a run went.
#[derive(Debug, Clone, Copy, Default)]
pub struct DecoderTimes {
    /// In norms.
    pub norms: Duration,
    /// In products.
    pub products: Duration,
    /// In attention, and in writing keys and values.
    pub attention: Duration,
}

/// The blocks of a model and the norm at their end, whose weights are packed.
#[derive(Debug)]
pub struct Decoder {
    blocks: Vec<DecoderBlock>,
    last_norm: DecoderNorm,
    heads: Heads,
    hidden_size: usize,
    /// The widest MLP.
    inner_size: usize,
    room: Mutex<Option<Lines>>,
}

impl Decoder {
    /// Parts that fit each other.
    ///
    /// # Errors
    ///
    /// Those that do not.
    pub fn new(
        blocks: Vec<DecoderBlock>,
        last_norm: DecoderNorm,
        heads: Heads,
    ) -> Result<Self, DecoderError> {
        let hidden_size = last_norm.weight.len();
        let (query_row, key_row) = (heads.query_row(), heads.key_row());
        let mut inner_size = 0;
        for (block, parts) in blocks.iter().enumerate() {
            for (name, found, expected) in [
                ("the norm before attention", parts.attention_norm.weight.len(), hidden_size),
                ("the input of qkv", parts.qkv.in_features(), hidden_size),
                ("qkv", parts.qkv.out_features(), query_row.saturating_add(key_row.saturating_mul(2))),
                ("the input of out", parts.out.in_features(), query_row),
                ("out", parts.out.out_features(), hidden_size),
                ("the norm before the MLP", parts.mlp_norm.weight.len(), hidden_size),
                ("the input of up", parts.up.in_features(), hidden_size),
                ("the input of down", parts.down.in_features(), parts.up.out_features()),
                ("down", parts.down.out_features(), hidden_size),
            ] {
                if found != expected {
                    return Err(DecoderError::Features { block, name, found, expected });
                }
            }
            inner_size = inner_size.max(parts.up.out_features());
        }
        Ok(Self { blocks, last_norm, heads, hidden_size, inner_size, room: Mutex::new(None) })
    }

    /// Blocks.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Features of the stream.
    #[must_use]
    pub fn hidden_size(&self) -> usize {
        self.hidden_size
    }

    /// Sizes of attention.
    #[must_use]
    pub fn heads(&self) -> Heads {
        self.heads
    }

    /// The blocks over a step's tokens, then the norm.
    ///
    /// # Arguments
    ///
    /// * `hidden`: `[num_tokens, hidden_size]`, the embedded tokens; the stream is written over them.
    /// * `caches`: as `layout` says; keys and values of the tokens are put there.
    /// * `cache_of_block`: which of them is each block's. A trial may have one for all, since blocks take turns.
    /// * `out`: `[num_tokens, hidden_size]`, the normed stream.
    ///
    /// # Errors
    ///
    /// Arrays that do not fit, in which case some of them may have been written to.
    ///
    /// # Returns
    ///
    /// Where the time went.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    pub fn run<E: Element>(
        &self,
        batch: &RaggedBatch,
        hidden: &mut [E],
        caches: &mut [&mut [E]],
        cache_of_block: &[usize],
        layout: CacheLayout,
        threads: &Threads,
        out: &mut [E],
    ) -> Result<DecoderTimes, DecoderError> {
        let (found, expected) = (cache_of_block.len(), self.blocks.len());
        if found != expected {
            return Err(DecoderError::Caches { found, expected });
        }
        let Heads { num_kv_heads, head_dim, .. } = self.heads;
        let (found_heads, found_dim) = (layout.num_kv_heads, layout.head_dim);
        if (found_heads, found_dim) != (num_kv_heads, head_dim) {
            return Err(DecoderError::Cache { found_heads, found_dim, num_kv_heads, head_dim });
        }
        let num_tokens = batch.num_tokens();
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let mut step = Step::<E>::new(self, num_tokens, &mut room)?;
        for (block, &index) in self.blocks.iter().zip(cache_of_block) {
            let found = caches.len();
            let cache = caches.get_mut(index).ok_or(DecoderError::CacheIndex { index, found })?;
            step.run(block, self.heads, batch, hidden, cache, layout, threads)?;
        }
        let width = self.hidden_size;
        let (from, to) = (TokenRows { data: &*hidden, stride: width }, OutRows { data: out, stride: width });
        let kernel = Kernel::best_for_products();
        norm(&self.last_norm.of(), from, num_tokens, Sum::None, kernel, threads, to)?;
        step.times.norms += lap(&mut step.began);
        Ok(step.times)
    }
}

/// What lies between the parts of a block.
struct Step<'a, E> {
    num_tokens: usize,
    hidden_size: usize,
    /// `[num_tokens, hidden_size]`
    normed: &'a mut [E],
    /// `[num_tokens, query · key · value]`
    qkv: &'a mut [E],
    /// `[num_tokens, query]`
    attended: &'a mut [E],
    /// `[num_tokens, inner_size]`
    inner: &'a mut [E],
    times: DecoderTimes,
    /// When the part began that runs now.
    began: Instant,
}

impl<'a, E: Element> Step<'a, E> {
    fn new(decoder: &Decoder, num_tokens: usize, room: &'a mut Option<Lines>) -> Result<Self, DecoderError> {
        let heads = decoder.heads;
        let widths = [
            decoder.hidden_size,
            heads.query_row() + 2 * heads.key_row(),
            heads.query_row(),
            decoder.inner_size,
        ];
        let width: usize = widths.iter().sum();
        let num_bytes = num_tokens.saturating_mul(width).saturating_mul(size_of::<E>());
        let memory = DecoderError::Memory { num_bytes, num_tokens };
        let all = Lines::at_least(num_bytes, room).ok_or(memory)?.as_mut_slice::<E>();
        let (normed, rest) = all.split_at_mut(num_tokens * widths[0]);
        let (qkv, rest) = rest.split_at_mut(num_tokens * widths[1]);
        let (attended, rest) = rest.split_at_mut(num_tokens * widths[2]);
        let inner = &mut rest[..num_tokens * widths[3]];
        let (hidden_size, times, began) = (decoder.hidden_size, DecoderTimes::default(), Instant::now());
        Ok(Self { num_tokens, hidden_size, normed, qkv, attended, inner, times, began })
    }

    /// One block: `hidden` is the stream before and after it.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a block")]
    fn run(
        &mut self,
        block: &DecoderBlock,
        heads: Heads,
        batch: &RaggedBatch,
        hidden: &mut [E],
        cache: &mut [E],
        layout: CacheLayout,
        threads: &Threads,
    ) -> Result<(), DecoderError> {
        let (num_tokens, width) = (self.num_tokens, self.hidden_size);
        let products = Kernel::best_for_products();
        let plain = Epilogue { activation: Activation::None, residual: Residual::None };
        let onto_stream = Epilogue { activation: Activation::None, residual: Residual::Out };

        let stream = TokenRows { data: &*hidden, stride: width };
        let normed = OutRows { data: &mut *self.normed, stride: width };
        norm(&block.attention_norm.of(), stream, num_tokens, Sum::None, products, threads, normed)?;
        self.times.norms += lap(&mut self.began);

        let (query_row, key_row) = (heads.query_row(), heads.key_row());
        let qkv_row = query_row + 2 * key_row;
        let normed = TokenRows { data: &*self.normed, stride: width };
        let qkv = OutRows { data: &mut *self.qkv, stride: qkv_row };
        linear(&block.qkv, normed, num_tokens, &plain, threads, qkv)?;
        self.times.products += lap(&mut self.began);

        let part = |first: usize| TokenRows { data: self.qkv.get(first..).unwrap_or(&[]), stride: qkv_row };
        let (query, key, value) = (part(0), part(query_row), part(query_row + key_row));
        write_kv(batch, key, value, cache, layout)?;
        let options = AttentionOptions::causal(block.scale);
        let kernel = Kernel::best(layout.head_dim);
        let attended = &mut *self.attended;
        attend(batch, query, heads.num_heads, cache, layout, &options, kernel, threads, attended)?;
        self.times.attention += lap(&mut self.began);

        let attended = TokenRows { data: &*self.attended, stride: query_row };
        let stream = OutRows { data: &mut *hidden, stride: width };
        linear(&block.out, attended, num_tokens, &onto_stream, threads, stream)?;
        self.times.products += lap(&mut self.began);

        let stream = TokenRows { data: &*hidden, stride: width };
        let normed = OutRows { data: &mut *self.normed, stride: width };
        norm(&block.mlp_norm.of(), stream, num_tokens, Sum::None, products, threads, normed)?;
        self.times.norms += lap(&mut self.began);

        let inner_row = block.up.out_features();
        let normed = TokenRows { data: &*self.normed, stride: width };
        let activated = Epilogue { activation: block.activation, residual: Residual::None };
        let inner = OutRows { data: &mut *self.inner, stride: inner_row };
        linear(&block.up, normed, num_tokens, &activated, threads, inner)?;

        let inner = TokenRows { data: &*self.inner, stride: inner_row };
        let stream = OutRows { data: hidden, stride: width };
        linear(&block.down, inner, num_tokens, &onto_stream, threads, stream)?;
        self.times.products += lap(&mut self.began);
        Ok(())
    }
}

/// What the part took that is over now; the next one begins.
fn lap(began: &mut Instant) -> Duration {
    let now = Instant::now();
    now - std::mem::replace(began, now)
}
