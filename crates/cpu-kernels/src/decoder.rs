//! All blocks of a decoder in one call: norm, projection, attention, projection, norm, two products, and the norm at the end;
//! between them, where a model has it, the norms and the turn of heads, and the gate of the MLP.
//!
//! It computes what the parts compute when they are called one by one, bit for bit. What it saves is what lies between them:
//! a step of one row is some eighty calls of a few microseconds of work each around the reading of weights, in which memory
//! waits.
//!
//! Where it has the model's head, too, a call may end in the logits of some tokens, and in the likeliest ids.
//!
//! Where the ranks of a group share a model, a block runs in two halves, after each of which they add what they have.

mod adapters;
mod error;
mod experts;
mod mlp;
mod routing;
mod step;

use std::{
    num::NonZeroU32,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

pub use self::{
    adapters::{AdapterTokens, DecoderAdapter},
    error::DecoderError,
    mlp::{DenseMlp, ExpertMlp, Mlp, SharedMlp},
    routing::{Routing, Scores},
};
use self::{experts::ExpertRoom, step::Step};
use crate::{
    attention::{CacheLayout, TokenRows, batch::RaggedBatch, cache_element::CacheElement, heads::Heads},
    element::Element,
    kernel::Kernel,
    linear::OutRows,
    lines::Lines,
    norm::{
        Sum, norm,
        row::{Norm, NormKind},
    },
    packed::PackedLinear,
    rotary::Rotary,
    sampling::greedy::largest_ids,
    threads::Threads,
};

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
    pub(crate) fn of(&self) -> Norm<'_> {
        Norm { kind: self.kind, weight: &self.weight, bias: self.bias.as_deref(), eps: self.eps }
    }
}

/// A block: attention and MLP, each on the stream and added to it. There are norms before, after, or on both sides of each.
#[derive(Debug)]
pub struct DecoderBlock {
    /// Before attention. None: it reads the stream as it is.
    pub attention_norm: Option<DecoderNorm>,
    /// Query, key and value, one after the other.
    pub qkv: Arc<PackedLinear>,
    /// Whether these are of one head after the other, instead of all heads' queries, all keys and all values.
    pub is_by_head: bool,
    /// Of each head of queries and of keys, or of all heads of queries and all of keys together, or none.
    pub head_norms: Option<[DecoderNorm; 2]>,
    /// Which of a step's angles queries and keys are turned by; None: they are not turned.
    pub rotary: Option<usize>,
    /// Factor on the products of queries and keys.
    pub scale: f32,
    /// A query sees this many tokens, itself included; None: all before it.
    pub sliding_window: Option<NonZeroU32>,
    /// Scores become `cap · tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// Of each head of queries a score besides those of the keys; see [`crate::AttentionOptions::sinks`]. Empty: there are none.
    pub sinks: Vec<f32>,
    /// From the heads to the stream.
    pub out: Arc<PackedLinear>,
    /// Before the MLP. None: it reads the stream as it is.
    pub mlp_norm: Option<DecoderNorm>,
    /// Whether the MLP reads the stream that attention reads, before anything is added to that.
    pub is_parallel: bool,
    /// The MLP.
    pub mlp: Mlp,
    /// Of what attention and the MLP give, before it is added, or none.
    pub post_norms: Option<[DecoderNorm; 2]>,
}

impl DecoderBlock {
    fn check_rotary(&self, rotary: &[Rotary<'_>]) -> Result<(), DecoderError> {
        match self.rotary {
            Some(index) if index >= rotary.len() => {
                Err(DecoderError::NoRotary { index, found: rotary.len() })
            }
            _ => Ok(()),
        }
    }
}

/// Where the time of a run went.
#[derive(Debug, Clone, Copy, Default)]
pub struct DecoderTimes {
    /// In norms, of heads too, in turning those, and in gates.
    pub norms: Duration,
    /// In products.
    pub products: Duration,
    /// In attention, and in writing keys and values.
    pub attention: Duration,
}

/// What a call leaves that goes on to the head.
#[derive(Debug)]
pub struct Logits<'a, E> {
    /// The tokens whose logits are wanted, in this order; None: all.
    pub places: Option<&'a [i32]>,
    /// `[places, outputs of the head]`
    pub logits: &'a mut [E],
    /// Of each row of logits the id of the largest, the first of equals; −1 where one is NaN, or all are minus infinity. None
    /// if the caller does not ask.
    pub ids: Option<&'a mut [i32]>,
}

/// What a call ends in.
#[derive(Debug)]
pub enum DecoderOut<'a, E> {
    /// `[num_tokens, hidden_size]`, the stream, normed if there is a norm.
    Stream(&'a mut [E]),
    /// By the norm and the head.
    Logits(Logits<'a, E>),
}

/// Blocks of a model, and the norm at its end where they are the last ones. Their weights are packed.
#[derive(Debug)]
pub struct Decoder {
    blocks: Vec<DecoderBlock>,
    /// None: other blocks follow elsewhere.
    last_norm: Option<DecoderNorm>,
    /// From the normed stream to the logits; None: something else computes them.
    head: Option<Arc<PackedLinear>>,
    heads: Heads,
    hidden_size: usize,
    /// The widest MLP.
    inner_size: usize,
    room: Mutex<Room>,
}

/// Memory for what lies between the parts of blocks, used again by every step.
#[derive(Debug, Default)]
struct Room {
    lines: Option<Lines>,
    experts: ExpertRoom,
}

impl Decoder {
    /// Parts that fit each other.
    ///
    /// # Errors
    ///
    /// Those that do not.
    pub fn new(
        blocks: Vec<DecoderBlock>,
        last_norm: impl Into<Option<DecoderNorm>>,
        heads: Heads,
    ) -> Result<Self, DecoderError> {
        let last_norm = last_norm.into();
        let first_input = blocks.first().map_or(0, |block| block.qkv.in_features());
        let hidden_size = last_norm.as_ref().map_or(first_input, |norm| norm.weight.len());
        let (query_row, key_row, head_dim) = (heads.query_row(), heads.key_row(), heads.head_dim);
        let mut inner_size = 0;
        for (block, parts) in blocks.iter().enumerate() {
            let head_norms = widths(parts.head_norms.as_ref(), [head_dim; 2]);
            let post_norms = widths(parts.post_norms.as_ref(), [hidden_size; 2]);
            let pre_norms = [&parts.attention_norm, &parts.mlp_norm]
                .map(|norm| norm.as_ref().map_or(hidden_size, |norm| norm.weight.len()));
            let has_all = parts.attention_norm.is_some() && parts.mlp_norm.is_some();
            if !has_all && parts.post_norms.is_none() {
                return Err(DecoderError::NoNorm { block });
            }
            if parts.is_parallel && parts.post_norms.is_some() {
                return Err(DecoderError::Parallel { block });
            }
            if matches!(parts.mlp, Mlp::Experts(_)) && (parts.is_parallel || parts.post_norms.is_some()) {
                return Err(DecoderError::ExpertPlan { block });
            }
            if parts.is_by_head {
                if heads.num_heads != heads.num_kv_heads {
                    let Heads { num_heads, num_kv_heads, .. } = heads;
                    return Err(DecoderError::ByHead { block, num_heads, num_kv_heads });
                }
                // The product goes there first.
                inner_size = inner_size.max(parts.qkv.out_features());
            }
            for (name, found, expected) in [
                ("the norm of a query's head", head_norms[0], one_or_all(head_norms[0], head_dim, query_row)),
                ("the norm of a key's head", head_norms[1], one_or_all(head_norms[1], head_dim, key_row)),
                ("the norm before attention", pre_norms[0], hidden_size),
                ("the input of qkv", parts.qkv.in_features(), hidden_size),
                ("qkv", parts.qkv.out_features(), query_row.saturating_add(key_row.saturating_mul(2))),
                ("the sinks", parts.sinks.len(), if parts.sinks.is_empty() { 0 } else { heads.num_heads }),
                ("the input of out", parts.out.in_features(), query_row),
                ("out", parts.out.out_features(), hidden_size),
                ("the norm before the MLP", pre_norms[1], hidden_size),
                ("the norm after attention", post_norms[0], hidden_size),
                ("the norm after the MLP", post_norms[1], hidden_size),
            ] {
                if found != expected {
                    return Err(DecoderError::Features { block, name, found, expected });
                }
            }
            parts.mlp.check(block, hidden_size)?;
            inner_size = inner_size.max(parts.mlp.inner_size());
        }
        Ok(Self { blocks, last_norm, head: None, heads, hidden_size, inner_size, room: Mutex::default() })
    }

    /// Adds the model's head.
    ///
    /// # Errors
    ///
    /// It takes another stream, or no norm is before it.
    pub fn with_head(self, head: Arc<PackedLinear>) -> Result<Self, DecoderError> {
        let (found, expected) = (head.in_features(), self.hidden_size);
        if self.last_norm.is_none() {
            return Err(DecoderError::Head(
                "a head takes the normed stream, but there is no norm at the end",
            ));
        }
        if found != expected {
            return Err(DecoderError::HeadFeatures { found, expected });
        }
        Ok(Self { head: Some(head), ..self })
    }

    /// Logits of a token; None: there is no head.
    #[must_use]
    pub fn vocab_size(&self) -> Option<usize> {
        self.head.as_ref().map(|head| head.out_features())
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

    /// The blocks over a step's tokens, then the norm if there is one.
    ///
    /// # Arguments
    ///
    /// * `hidden`: `[num_tokens, hidden_size]`, the embedded tokens; the stream is written over them.
    /// * `caches`: as `layout` says; keys and values of the tokens are put there. They may hold `bf16` where the stream is `f32`.
    /// * `cache_of_block`: which of them is each block's. A trial may have one for all, since blocks take turns.
    /// * `rotary`: what heads are turned by; a block says which it takes.
    /// * `out`: `[num_tokens, hidden_size]`, the stream, normed if there is a norm.
    ///
    /// # Errors
    ///
    /// Arrays that do not fit, in which case some of them may have been written to.
    ///
    /// # Returns
    ///
    /// Where the time went.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    pub fn run<E: Element, C: CacheElement<E>>(
        &self,
        batch: &RaggedBatch,
        hidden: &mut [E],
        caches: &mut [&mut [C]],
        cache_of_block: &[usize],
        layout: CacheLayout,
        rotary: &[Rotary<'_>],
        threads: &Threads,
        out: &mut [E],
    ) -> Result<DecoderTimes, DecoderError> {
        let out = DecoderOut::Stream(out);
        self.run_adapted(batch, hidden, caches, cache_of_block, layout, rotary, &[], threads, out)
    }

    /// As `run`, with what adapters add for their tokens, and to the stream or to the logits.
    ///
    /// With the logits of some tokens, in ascending order and without adapters, the last block goes on behind its keys and values
    /// with those alone. Then `hidden` has their rows first, and further rows mean nothing.
    ///
    /// # Errors
    ///
    /// As `run`; another decoder's adapters, or tokens that the step does not have. With logits: there is no head, places
    /// outside the step, more of them than tokens, or arrays of other sizes.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    pub fn run_adapted<E: Element, C: CacheElement<E>>(
        &self,
        batch: &RaggedBatch,
        hidden: &mut [E],
        caches: &mut [&mut [C]],
        cache_of_block: &[usize],
        layout: CacheLayout,
        rotary: &[Rotary<'_>],
        adapters: &[AdapterTokens<'_>],
        threads: &Threads,
        out: DecoderOut<'_, E>,
    ) -> Result<DecoderTimes, DecoderError> {
        let num_tokens = batch.num_tokens();
        let after = match &out {
            DecoderOut::Stream(_) => None,
            DecoderOut::Logits(wanted) => Some(self.check_logits(wanted, num_tokens)?),
        };
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let mut step = Step::<E>::new(self, num_tokens, &mut room)?;
        step.adapt(adapters);
        let kept = match &out {
            DecoderOut::Logits(Logits { places: Some(places), .. }) if adapters.is_empty() => {
                Some(*places).filter(|places| places.len() < num_tokens && places.is_sorted_by(|a, b| a < b))
            }
            _ => None,
        };
        self.run_blocks(
            &mut step,
            after,
            kept,
            batch,
            hidden,
            caches,
            cache_of_block,
            layout,
            rotary,
            threads,
        )?;
        match out {
            DecoderOut::Stream(out) => self.end_in_stream(num_tokens, hidden, threads, out)?,
            DecoderOut::Logits(wanted) => self.end_in_logits(&mut step, hidden, threads, wanted)?,
        }
        Ok(step.finish())
    }

    /// The model's last norm and its head.
    fn last_parts(&self) -> Result<(&DecoderNorm, &PackedLinear), DecoderError> {
        match (&self.last_norm, &self.head) {
            (Some(last_norm), Some(head)) => Ok((last_norm, head)),
            _ => Err(DecoderError::Head("logits are asked for, but the decoder has no head")),
        }
    }

    /// The head, if what is wanted of it fits it and the step's tokens.
    fn check_logits<E>(
        &self,
        wanted: &Logits<'_, E>,
        num_tokens: usize,
    ) -> Result<&PackedLinear, DecoderError> {
        let (_, head) = self.last_parts()?;
        let Logits { places, logits, ids } = wanted;
        let num_rows = places.map_or(num_tokens, <[i32]>::len);
        let is_place = |place: &i32| usize::try_from(*place).is_ok_and(|place| place < num_tokens);
        if let Some(&place) = places.unwrap_or_default().iter().find(|place| !is_place(place)) {
            return Err(DecoderError::Place { place, num_tokens });
        }
        for (name, found, expected) in [
            ("logits", logits.len(), num_rows.saturating_mul(head.out_features())),
            ("ids", ids.as_ref().map_or(num_rows, |ids| ids.len()), num_rows),
            // There is room for so many normed rows.
            ("places", num_rows, num_rows.min(num_tokens)),
        ] {
            if found != expected {
                return Err(DecoderError::Logits { name, found, expected });
            }
        }
        Ok(head)
    }

    /// The blocks over a step's tokens; `after` is the layer whose product follows soon, and `kept` are the tokens that go on to it
    /// if others do not: the rest of the last block is computed for those alone.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    fn run_blocks<'a, E: Element, C: CacheElement<E>>(
        &'a self,
        step: &mut Step<'a, E>,
        after: Option<&'a PackedLinear>,
        kept: Option<&'a [i32]>,
        batch: &RaggedBatch,
        hidden: &mut [E],
        caches: &mut [&mut [C]],
        cache_of_block: &[usize],
        layout: CacheLayout,
        rotary: &[Rotary<'_>],
        threads: &Threads,
    ) -> Result<(), DecoderError> {
        let (found, expected) = (cache_of_block.len(), self.blocks.len());
        if found != expected {
            return Err(DecoderError::Caches { found, expected });
        }
        self.check_layout(layout)?;
        self.blocks.iter().try_for_each(|block| block.check_rotary(rotary))?;
        step.check_adapters(expected)?;
        for (number, (block, &index)) in self.blocks.iter().zip(cache_of_block).enumerate() {
            let found = caches.len();
            let cache = caches.get_mut(index).ok_or(DecoderError::CacheIndex { index, found })?;
            step.begin_block(number, self.blocks.get(number + 1).map(|block| &*block.qkv).or(after));
            if let Some(places) = kept.filter(|_| number + 1 == expected) {
                step.keep(places);
            }
            step.run(block, batch, hidden, cache, layout, rotary, threads)?;
        }
        Ok(())
    }

    /// What the blocks left, by the norm if there is one.
    fn end_in_stream<E: Element>(
        &self,
        num_tokens: usize,
        hidden: &[E],
        threads: &Threads,
        out: &mut [E],
    ) -> Result<(), DecoderError> {
        let width = self.hidden_size;
        let Some(last_norm) = &self.last_norm else {
            let (found, expected) = (out.len(), num_tokens * width);
            let (Some(out), Some(stream)) = (out.get_mut(..expected), hidden.get(..expected)) else {
                return Err(DecoderError::Out { found, expected });
            };
            out.copy_from_slice(stream);
            return Ok(());
        };
        let (from, to) = (TokenRows { data: hidden, stride: width }, OutRows { data: out, stride: width });
        let kernel = Kernel::best_for_products();
        Ok(norm(&last_norm.of(), from, num_tokens, Sum::None, kernel, threads, to)?)
    }

    /// What the blocks left, by the norm and the head; `wanted` was checked.
    fn end_in_logits<E: Element>(
        &self,
        step: &mut Step<'_, E>,
        hidden: &[E],
        threads: &Threads,
        wanted: Logits<'_, E>,
    ) -> Result<(), DecoderError> {
        let (last_norm, head) = self.last_parts()?;
        let Logits { places, logits, ids } = wanted;
        // The next step begins with the first block.
        let next = self.blocks.first().map(|block| &*block.qkv);
        step.project(last_norm, head, next, hidden, places, threads, logits)?;
        if let Some(ids) = ids {
            largest_ids(logits, head.out_features(), threads, ids);
        }
        Ok(())
    }

    /// The first half of a block, for a stream that others add to between the halves: attention.
    ///
    /// # Arguments
    ///
    /// * `block`: which.
    /// * `adds`: whether the result is added to the stream; if not, it takes its place.
    /// * `hidden`: `[num_tokens, hidden_size]`, the stream before and after it.
    /// * `cache`: the block's, as `layout` says.
    /// * `rotary`: as for `run`.
    ///
    /// # Errors
    ///
    /// Arrays that do not fit, in which case some of them may have been written to; a block that there is not, or that
    /// has no halves.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    pub fn attend<E: Element, C: CacheElement<E>>(
        &self,
        block: usize,
        adds: bool,
        batch: &RaggedBatch,
        hidden: &mut [E],
        cache: &mut [C],
        layout: CacheLayout,
        rotary: &[Rotary<'_>],
        threads: &Threads,
    ) -> Result<DecoderTimes, DecoderError> {
        let parts = self.half_of(block)?;
        self.check_layout(layout)?;
        parts.check_rotary(rotary)?;
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let mut step = Step::<E>::new(self, batch.num_tokens(), &mut room)?;
        step.attend(parts, adds, batch, hidden, cache, layout, rotary, threads)?;
        Ok(step.finish())
    }

    /// The second half of a block, the MLP; as `attend`.
    ///
    /// # Errors
    ///
    /// A stream that does not have so many tokens; a block that there is not, or that has no halves.
    pub fn multiply<E: Element>(
        &self,
        block: usize,
        adds: bool,
        num_tokens: usize,
        hidden: &mut [E],
        threads: &Threads,
    ) -> Result<DecoderTimes, DecoderError> {
        let parts = self.half_of(block)?;
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let mut step = Step::<E>::new(self, num_tokens, &mut room)?;
        step.begin_block(block, self.blocks.get(block + 1).map(|next| &*next.qkv));
        step.multiply(parts, adds, hidden, threads)?;
        Ok(step.finish())
    }

    /// A block that may run in halves.
    fn half_of(&self, index: usize) -> Result<&DecoderBlock, DecoderError> {
        let found = self.blocks.len();
        let block = self.blocks.get(index).ok_or(DecoderError::Block { index, found })?;
        if block.is_parallel || block.post_norms.is_some() {
            return Err(DecoderError::Halves { block: index });
        }
        Ok(block)
    }

    fn check_layout(&self, layout: CacheLayout) -> Result<(), DecoderError> {
        let Heads { num_kv_heads, head_dim, .. } = self.heads;
        let (found_heads, found_dim) = (layout.num_kv_heads, layout.head_dim);
        if (found_heads, found_dim) != (num_kv_heads, head_dim) {
            return Err(DecoderError::Cache { found_heads, found_dim, num_kv_heads, head_dim });
        }
        Ok(())
    }
}

/// Features of two norms; without norms those that they would have.
fn widths(norms: Option<&[DecoderNorm; 2]>, without: [usize; 2]) -> [usize; 2] {
    norms.map_or(without, |norms| norms.each_ref().map(|norm| norm.weight.len()))
}

/// What the norm of heads may have: the features of all heads, if it has these, else those of one.
fn one_or_all(found: usize, head_dim: usize, row: usize) -> usize {
    if found == row { row } else { head_dim }
}
