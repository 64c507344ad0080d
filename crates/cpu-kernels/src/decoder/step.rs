//! A step of a decoder: what lies between the parts of its blocks, and the order in which they run.

use std::time::{Duration, Instant};

use super::{
    AdapterTokens, Decoder, DecoderBlock, DecoderError, DecoderNorm, DecoderTimes, ExpertMlp, Mlp, Room,
    SharedMlp,
    adapters::{self, Part, runs_of},
    experts::ExpertRoom,
};
use crate::{
    attention::{
        CacheLayout, TokenRows, attend,
        batch::RaggedBatch,
        cache_element::CacheElement,
        heads::{Heads, prepare_heads, split_heads},
        options::AttentionOptions,
        write_kv,
    },
    element::Element,
    finish::Activation,
    gates::apply_gates,
    kernel::Kernel,
    linear::{Epilogue, OutRows, Residual, adapted_linear, linear},
    lines::Lines,
    lora::{Addition, LayerDelta},
    norm::{Sum, add_norm, norm},
    packed::{LinearError, PackedLinear},
    rotary::Rotary,
    threads::{Threads, ahead::Ahead},
};

/// What lies between the parts of a block.
pub(super) struct Step<'a, E> {
    heads: Heads,
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
    experts: &'a mut ExpertRoom,
    /// What is added to the layers of the block with this number.
    adapters: &'a [AdapterTokens<'a>],
    block: usize,
    /// The product after this block's, if it follows in this call or soon after it.
    after: Option<&'a PackedLinear>,
    /// Of the last block: the tokens that go on to the head, ascending. None: all do.
    kept: Option<&'a [i32]>,
    /// Room for what adapters compute first.
    ranks: Vec<f32>,
    times: DecoderTimes,
    /// When the part began that runs now.
    began: Instant,
}

impl<'a, E: Element> Step<'a, E> {
    pub(super) fn new(
        decoder: &'a Decoder,
        num_tokens: usize,
        room: &'a mut Room,
    ) -> Result<Self, DecoderError> {
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
        let all = Lines::at_least(num_bytes, &mut room.lines).ok_or(memory)?.as_mut_slice::<E>();
        let (normed, rest) = all.split_at_mut(num_tokens * widths[0]);
        let (qkv, rest) = rest.split_at_mut(num_tokens * widths[1]);
        let (attended, rest) = rest.split_at_mut(num_tokens * widths[2]);
        let inner = &mut rest[..num_tokens * widths[3]];
        let (hidden_size, times, began) = (decoder.hidden_size, DecoderTimes::default(), Instant::now());
        Ok(Self {
            heads,
            num_tokens,
            hidden_size,
            normed,
            qkv,
            attended,
            inner,
            experts: &mut room.experts,
            adapters: &[],
            block: 0,
            after: None,
            kept: None,
            ranks: Vec::new(),
            times,
            began,
        })
    }

    /// These adapters add to the layers of all blocks.
    pub(super) fn adapt(&mut self, adapters: &'a [AdapterTokens<'a>]) {
        self.adapters = adapters;
    }

    /// Whether they fit so many blocks and the step's tokens.
    pub(super) fn check_adapters(&self, num_blocks: usize) -> Result<(), DecoderError> {
        adapters::check(self.adapters, num_blocks, self.num_tokens)
    }

    /// The next block has this number, and this layer's product follows its own.
    pub(super) fn begin_block(&mut self, block: usize, after: Option<&'a PackedLinear>) {
        (self.block, self.after) = (block, after);
    }

    /// The next block is the last one, behind whose keys and values only these tokens are computed; they ascend. The stream then
    /// has a row of each, and further rows that mean nothing.
    pub(super) fn keep(&mut self, places: &'a [i32]) {
        self.kept = Some(places);
    }

    /// One block: `hidden` is the stream before and after it.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a block")]
    pub(super) fn run<C: CacheElement<E>>(
        &mut self,
        block: &DecoderBlock,
        batch: &RaggedBatch,
        hidden: &mut [E],
        cache: &mut [C],
        layout: CacheLayout,
        rotary: &[Rotary<'_>],
        threads: &Threads,
    ) -> Result<(), DecoderError> {
        self.attend(block, true, batch, hidden, cache, layout, rotary, threads)?;
        self.multiply(block, true, hidden, threads)
    }

    /// Logits of some tokens (None: of all) by the norm at the end and the head; `next` is the layer that comes after that.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a product")]
    pub(super) fn project(
        &mut self,
        last_norm: &DecoderNorm,
        head: &PackedLinear,
        next: Option<&PackedLinear>,
        hidden: &[E],
        places: Option<&[i32]>,
        threads: &Threads,
        logits: &mut [E],
    ) -> Result<(), DecoderError> {
        let (width, kernel) = (self.hidden_size, Kernel::best_for_products());
        // The last block may have left the rows of these tokens alone.
        let places = places.filter(|_| self.kept.is_none());
        let num_rows = places.map_or(self.num_tokens, <[i32]>::len);
        let last_norm = last_norm.of();
        if let Some(places) = places {
            for (&place, normed) in places.iter().zip(self.normed.chunks_exact_mut(width)) {
                let from = hidden.get(place as usize * width..).unwrap_or_default();
                let (from, to) =
                    (TokenRows { data: from, stride: width }, OutRows { data: normed, stride: width });
                norm(&last_norm, from, 1, Sum::None, kernel, threads, to)?;
            }
        } else {
            let from = TokenRows { data: hidden, stride: width };
            let to = OutRows { data: &mut *self.normed, stride: width };
            norm(&last_norm, from, num_rows, Sum::None, kernel, threads, to)?;
        }
        self.times.norms += lap(&mut self.began);
        let from = TokenRows { data: &*self.normed, stride: width };
        let to = OutRows { data: logits, stride: head.out_features() };
        threads.announce(next.map(ahead_of));
        linear(head, from, num_rows, &onto(false), threads, to)?;
        self.times.products += lap(&mut self.began);
        Ok(())
    }

    /// Where the time went; the norm at the end was the last part.
    pub(super) fn finish(mut self) -> DecoderTimes {
        self.times.norms += lap(&mut self.began);
        self.times
    }

    /// Attention on the normed stream: added to it, or (`adds` off) in its place.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a block")]
    pub(super) fn attend<C: CacheElement<E>>(
        &mut self,
        block: &DecoderBlock,
        adds: bool,
        batch: &RaggedBatch,
        hidden: &mut [E],
        cache: &mut [C],
        layout: CacheLayout,
        rotary: &[Rotary<'_>],
        threads: &Threads,
    ) -> Result<(), DecoderError> {
        let (num_tokens, width, heads) = (self.num_tokens, self.hidden_size, self.heads);
        let products = Kernel::best_for_products();
        self.norm_stream(block.attention_norm.as_ref(), hidden, threads)?;
        let (query_row, key_row) = (heads.query_row(), heads.key_row());
        let qkv_row = query_row + 2 * key_row;
        let read = if block.attention_norm.is_some() { &*self.normed } else { &*hidden };
        let read = TokenRows { data: read, stride: width };
        let projected = if block.is_by_head { &mut *self.inner } else { &mut *self.qkv };
        let projected = OutRows { data: projected, stride: qkv_row };
        let runs = runs_of(self.adapters, self.block, Part::Qkv);
        threads.announce(Some(ahead_of(&block.out)));
        product(&block.qkv, read, num_tokens, &onto(false), &runs, &mut self.ranks, threads, projected)?;
        self.times.products += lap(&mut self.began);

        if block.is_by_head {
            split_heads(self.inner, num_tokens, heads, threads, self.qkv);
        }
        if block.is_parallel {
            self.norm_stream(block.mlp_norm.as_ref(), hidden, threads)?;
        }
        let norms = block.head_norms.as_ref().map(|norms| norms.each_ref().map(DecoderNorm::of));
        let rotary = block.rotary.and_then(|index| rotary.get(index));
        prepare_heads(self.qkv, num_tokens, heads, norms.as_ref(), rotary, products, threads)?;
        self.times.norms += lap(&mut self.began);

        let part = |first: usize| TokenRows { data: self.qkv.get(first..).unwrap_or(&[]), stride: qkv_row };
        let (query, key, value) = (part(0), part(query_row), part(query_row + key_row));
        write_kv(batch, key, value, cache, layout, products)?;
        let options = AttentionOptions {
            scale: block.scale,
            sliding_window: block.sliding_window,
            soft_cap: block.soft_cap,
            alibi_slopes: &[],
            sinks: &block.sinks,
        };
        let kernel = Kernel::best(layout.head_dim);
        let attended = &mut *self.attended;
        attend(batch, query, heads.num_heads, cache, layout, &options, kernel, threads, attended)?;
        self.times.attention += lap(&mut self.began);

        self.drop_others(block.is_parallel, hidden);
        let num_tokens = self.num_tokens;
        let attended = TokenRows { data: &*self.attended, stride: query_row };
        let post_norm = block.post_norms.as_ref().map(|[of_attention, _]| of_attention);
        let is_added = adds && post_norm.is_none();
        let to = if post_norm.is_some() { &mut *self.normed } else { &mut *hidden };
        let to = OutRows { data: to, stride: width };
        let runs = runs_of(self.adapters, self.block, Part::Out);
        threads.announce(Some(ahead_of(block.mlp.first_layer())));
        product(&block.out, attended, num_tokens, &onto(is_added), &runs, &mut self.ranks, threads, to)?;
        self.times.products += lap(&mut self.began);
        self.add_normed(post_norm, hidden, threads)
    }

    /// Moves the rows of the tokens that are kept to the front: no other token's go further than attention.
    fn drop_others(&mut self, is_parallel: bool, hidden: &mut [E]) {
        let Some(places) = self.kept else { return };
        let (width, query_row) = (self.hidden_size, self.heads.query_row());
        // Ascending places are never before their row's number, so no row is written over before it is moved.
        for (row, &place) in places.iter().enumerate() {
            let move_row = |rows: &mut [E], width: usize| {
                let from = place as usize * width;
                rows.copy_within(from..from + width, row * width);
            };
            move_row(self.attended, query_row);
            move_row(hidden, width);
            if is_parallel {
                move_row(self.normed, width);
            }
        }
        self.num_tokens = places.len();
    }

    /// The MLP on the normed stream, which `attend` left where it reads the same: added to it, or (`adds` off) in its place.
    pub(super) fn multiply(
        &mut self,
        block: &DecoderBlock,
        adds: bool,
        hidden: &mut [E],
        threads: &Threads,
    ) -> Result<(), DecoderError> {
        let (num_tokens, width) = (self.num_tokens, self.hidden_size);
        if !block.is_parallel {
            self.norm_stream(block.mlp_norm.as_ref(), hidden, threads)?;
        }

        let mlp = match &block.mlp {
            Mlp::Dense(mlp) => mlp,
            Mlp::Experts(mlp) => return self.add_experts(mlp, adds, hidden, threads),
        };
        let inner_row = mlp.up.out_features();
        let read = if block.mlp_norm.is_some() { &*self.normed } else { &*hidden };
        let read = TokenRows { data: read, stride: width };
        let activation = if mlp.is_gated { Activation::None } else { mlp.activation };
        let activated = Epilogue { activation, residual: Residual::None };
        let inner = OutRows { data: &mut *self.inner, stride: inner_row };
        let runs = runs_of(self.adapters, self.block, Part::Up);
        threads.announce(Some(ahead_of(&mlp.down)));
        product(&mlp.up, read, num_tokens, &activated, &runs, &mut self.ranks, threads, inner)?;
        if mlp.is_gated {
            self.times.products += lap(&mut self.began);
            let inner = &mut self.inner[..num_tokens * inner_row];
            apply_gates(inner, inner_row, mlp.activation, Kernel::best_for_products(), threads);
            self.times.norms += lap(&mut self.began);
        }

        let inner = TokenRows { data: &*self.inner, stride: inner_row };
        let post_norm = block.post_norms.as_ref().map(|[_, of_mlp]| of_mlp);
        let is_added = adds && post_norm.is_none();
        let to = if post_norm.is_some() { &mut *self.normed } else { &mut *hidden };
        let to = OutRows { data: to, stride: width };
        let runs = runs_of(self.adapters, self.block, Part::Down);
        threads.announce(self.after.map(ahead_of));
        product(&mlp.down, inner, num_tokens, &onto(is_added), &runs, &mut self.ranks, threads, to)?;
        self.times.products += lap(&mut self.began);
        self.add_normed(post_norm, hidden, threads)
    }

    /// As `multiply`, by experts, of what is in `normed`.
    fn add_experts(
        &mut self,
        mlp: &ExpertMlp,
        adds: bool,
        hidden: &mut [E],
        threads: &Threads,
    ) -> Result<(), DecoderError> {
        if let Some(shared) = &mlp.shared {
            self.share(mlp, shared, threads)?;
        }
        let (num_tokens, width) = (self.num_tokens, self.hidden_size);
        let normed = &self.normed[..num_tokens * width];
        threads.announce(None);
        if mlp.routing.is_wide && size_of::<E>() < size_of::<f32>() {
            mlp.choose_widely(normed, self.experts, threads)?;
        } else {
            let logits = &mut self.inner[..num_tokens * mlp.router.out_features()];
            let x = TokenRows { data: normed, stride: width };
            let to = OutRows { data: &mut *logits, stride: mlp.router.out_features() };
            linear(&mlp.router, x, num_tokens, &onto(false), threads, to)?;
            mlp.choose(logits, self.experts, threads);
        }
        mlp.add(normed, adds, self.after.map(ahead_of), self.experts, threads, hidden)?;
        self.times.products += lap(&mut self.began);
        Ok(())
    }

    /// The results of the MLP next to the experts, and the logits of its gate, where `mlp.add` finds them.
    fn share(&mut self, mlp: &ExpertMlp, shared: &SharedMlp, threads: &Threads) -> Result<(), DecoderError> {
        let (num_tokens, width) = (self.num_tokens, self.hidden_size);
        let (products, inner_row) = (Kernel::best_for_products(), shared.mlp.up.out_features());
        let normed = TokenRows { data: &*self.normed, stride: width };
        let inner = OutRows { data: &mut *self.inner, stride: inner_row };
        let runs = runs_of(self.adapters, self.block, Part::Up);
        threads.announce(Some(ahead_of(&shared.mlp.down)));
        product(&shared.mlp.up, normed, num_tokens, &onto(false), &runs, &mut self.ranks, threads, inner)?;
        let inner = &mut self.inner[..num_tokens * inner_row];
        apply_gates(inner, inner_row, shared.mlp.activation, products, threads);

        let (rows, gates) = mlp.shared_rows::<E>(num_tokens, self.experts)?;
        let inner = TokenRows { data: &*self.inner, stride: inner_row };
        let to = OutRows { data: rows, stride: width };
        let runs = runs_of(self.adapters, self.block, Part::Down);
        threads.announce(Some(ahead_of(&mlp.router)));
        product(&shared.mlp.down, inner, num_tokens, &onto(false), &runs, &mut self.ranks, threads, to)?;
        if let Some(gate) = &shared.gate {
            let normed = TokenRows { data: &*self.normed, stride: width };
            linear(gate, normed, num_tokens, &onto(false), threads, OutRows { data: gates, stride: 1 })?;
        }
        self.times.products += lap(&mut self.began);
        Ok(())
    }

    /// The stream into `normed`, if there is a norm.
    fn norm_stream(
        &mut self,
        of_stream: Option<&DecoderNorm>,
        hidden: &[E],
        threads: &Threads,
    ) -> Result<(), DecoderError> {
        let Some(of_stream) = of_stream else { return Ok(()) };
        let x = TokenRows { data: hidden, stride: self.hidden_size };
        let normed = OutRows { data: &mut *self.normed, stride: self.hidden_size };
        let kernel = Kernel::best_for_products();
        norm(&of_stream.of(), x, self.num_tokens, Sum::None, kernel, threads, normed)?;
        self.times.norms += lap(&mut self.began);
        Ok(())
    }

    /// What a part with a norm after it left in `normed`, onto the stream.
    fn add_normed(
        &mut self,
        post_norm: Option<&DecoderNorm>,
        hidden: &mut [E],
        threads: &Threads,
    ) -> Result<(), DecoderError> {
        let Some(post_norm) = post_norm else { return Ok(()) };
        let x = TokenRows { data: &*self.normed, stride: self.hidden_size };
        let stream = OutRows { data: hidden, stride: self.hidden_size };
        add_norm(&post_norm.of(), x, self.num_tokens, Kernel::best_for_products(), threads, stream)?;
        self.times.norms += lap(&mut self.began);
        Ok(())
    }
}

/// What a layer's product reads, panel by panel.
fn ahead_of(layer: &PackedLinear) -> Ahead {
    let scales = (layer.scales.as_ptr(), layer.panel_scale_bytes());
    let weights = (layer.weights.as_ptr(), layer.panel_bytes());
    Ahead { arrays: [scales, weights], num_parts: layer.num_panels() }
}

/// A layer's product, and what adapters add to it.
#[expect(clippy::too_many_arguments, reason = "the arrays of a product")]
fn product<E: Element>(
    layer: &PackedLinear,
    x: TokenRows<'_, E>,
    num_tokens: usize,
    epilogue: &Epilogue<'_, E>,
    runs: &[(&LayerDelta, &[u32])],
    ranks: &mut Vec<f32>,
    threads: &Threads,
    out: OutRows<'_, E>,
) -> Result<(), LinearError> {
    if runs.is_empty() {
        return linear(layer, x, num_tokens, epilogue, threads, out);
    }
    let addition = Addition::new(runs, &x, threads.num_threads(), ranks)?;
    adapted_linear(layer, x, num_tokens, epilogue, Some(&addition), threads, out)
}

/// A product that is added to what is there, or takes its place.
fn onto<E>(adds: bool) -> Epilogue<'static, E> {
    Epilogue { activation: Activation::None, residual: if adds { Residual::Out } else { Residual::None } }
}

/// What the part took that is over now; the next one begins.
fn lap(began: &mut Instant) -> Duration {
    let now = Instant::now();
    now - std::mem::replace(began, now)
}
