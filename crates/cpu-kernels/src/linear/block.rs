//! Some rows of a product with packed weights, a panel at a time: sums in registers, and then bias, activation and residual.

use half::bf16;

#[cfg(target_arch = "x86_64")]
use crate::linear::tiled;
use crate::{
    element::Element,
    finish::{Activation, Finish},
    linear::{
        panel::{CHUNK, Product},
        product::{ProductFn, Products},
    },
    lines::ask_for,
    lora::Addition,
    packed::{PackedLinear, WeightKind, ready::ReadyScales},
    w8a8::{self, RoundedRows},
};

/// The most rows that are computed with one reading of the weights.
pub(super) const ROW_BLOCK: usize = 256;
/// Bytes by which weights that are used once are prefetched ahead of their use.
const AHEAD: usize = 8192;
/// With fewer tiles of rows, narrow weights are widened for each; with more, once for all.
const MIN_TILES_TO_WIDEN: usize = 3;

/// The most outputs of a panel that any kernel has.
const MAX_PANEL: usize = 32;

/// Memory of one thread, used again by every part; each array begins with a line.
#[repr(C, align(64))]
pub(super) struct Scratch {
    sums: [[f32; MAX_PANEL]; ROW_BLOCK],
    wide: [[f32; MAX_PANEL]; CHUNK],
    ready: ReadyScales,
    #[cfg(target_arch = "x86_64")]
    split: tiled::SplitWeights,
}

impl Scratch {
    #[expect(clippy::large_stack_arrays, reason = "a constant that goes to the heap as it is")]
    pub(super) const ZERO: Self = Self {
        sums: [[0.0; MAX_PANEL]; ROW_BLOCK],
        wide: [[0.0; MAX_PANEL]; CHUNK],
        ready: ReadyScales::ZERO,
        #[cfg(target_arch = "x86_64")]
        split: tiled::SplitWeights::ZERO,
    };
}

/// Rows as the one or the other kind of product reads them.
#[derive(Clone, Copy)]
pub(super) enum Activations {
    /// `[chunk][row][CHUNK]`
    Chunks(*const f32),
    /// Likewise, of 16 bits.
    Narrow(*const bf16),
    /// With what all panels have in common.
    Rounded(RoundedRows, w8a8::Plan),
    #[cfg(target_arch = "x86_64")]
    Tiles(tiled::Arranged),
}

/// Some rows of a product.
pub(super) struct Block<'a, O> {
    pub(super) layer: &'a PackedLinear,
    pub(super) products: &'static Products,
    pub(super) a: Activations,
    pub(super) num_rows: usize,
    pub(super) activation: Activation,
    /// First row, first output; null: none.
    pub(super) residual: *const O,
    pub(super) residual_stride: usize,
    pub(super) out: *mut O,
    pub(super) out_stride: usize,
    pub(super) addition: Option<&'a Addition<'a>>,
    /// Rows of the product before the first of these.
    pub(super) first_row: usize,
}

// SAFETY: everything but `out` is only read; of `out` each part writes its own rows of its own panel.
unsafe impl<O: Element> Sync for Block<'_, O> {}

impl<O: Element> Block<'_, O> {
    /// The most rows that are summed in registers at once.
    pub(super) fn tile_rows(&self) -> usize {
        match self.a {
            Activations::Chunks(_) | Activations::Narrow(_) => self.products.f32.len(),
            Activations::Rounded(..) => w8a8::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Activations::Tiles(_) => tiled::PAIR_ROWS,
        }
    }

    /// One panel's outputs for some tiles of rows; tile `t` begins with row `start(t)`.
    ///
    /// # Safety
    ///
    /// Rows and panel lie in the arrays, and no other thread touches these outputs.
    pub(super) unsafe fn compute(
        &self,
        panel: usize,
        tiles: std::ops::Range<usize>,
        start: impl Fn(usize) -> usize,
        scratch: &mut Scratch,
    ) {
        let first_row = start(tiles.start);
        let num_rows = start(tiles.end) - first_row;
        debug_assert!(num_rows <= ROW_BLOCK && self.layer.kernel.panel() <= MAX_PANEL);
        let sums = scratch.sums.as_mut_ptr().cast::<f32>();
        let rows = first_row..first_row + num_rows;
        let fetch = |share, num_shares| {
            self.fetch(panel, rows.clone(), share, num_shares);
            if !self.finishes_tiles() {
                let end_of = |shares: usize| first_row + num_rows * shares / num_shares;
                self.fetch_outputs(panel, &(end_of(share)..end_of(share + 1)));
            }
        };
        match &self.a {
            // SAFETY: the caller gives rows and a panel that lie in the arrays; `sums` was made with room for the rows.
            &Activations::Chunks(a) => unsafe { self.sum_chunks(a, panel, tiles, start, scratch, fetch) },
            // SAFETY: likewise.
            &Activations::Narrow(a) => unsafe { self.sum_narrow(a, panel, tiles, start, sums, fetch) },
            Activations::Rounded(a, plan) => {
                let is_whole = num_rows == self.num_rows;
                let plan = if is_whole { *plan } else { w8a8::Plan::new(self.layer, a, first_row, num_rows) };
                // SAFETY: the caller gives rows and a panel that lie in the arrays; `sums` has room for the rows, which were
                // rounded for this layer's kind, and of which the plan was made.
                unsafe { plan.sum(self.layer, panel, a, sums, &mut scratch.ready, fetch) };
            }
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller gives rows and a panel that lie in the arrays; `sums` has room for them; there are tiles
            // only where `uses_matrix_unit` said so.
            Activations::Tiles(a) => unsafe {
                self.fetch(panel, rows.clone(), 0, 1);
                tiled::sum(self.layer, panel, a, first_row, num_rows, sums, &mut scratch.split);
            },
        }
        if !self.finishes_tiles() {
            // SAFETY: the sums of these rows were just written; no other thread touches these outputs, by the contract of
            // this function.
            unsafe { self.finish(panel, first_row, num_rows, sums) };
        }
    }

    /// Sums of the tiles' rows, in registers.
    ///
    /// # Safety
    ///
    /// As [`Self::compute`]; `a` has the rows in chunks.
    unsafe fn sum_chunks(
        &self,
        a: *const f32,
        panel: usize,
        tiles: std::ops::Range<usize>,
        start: impl Fn(usize) -> usize,
        scratch: &mut Scratch,
        fetch: impl Fn(usize, usize),
    ) {
        let sums = scratch.sums.as_mut_ptr().cast::<f32>();
        let (layer, products) = (self.layer, self.products);
        let (num_k, step) = (layer.in_features, layer.step());
        let weights = layer.panel_weights(panel);
        let (direct, widened, widen): (&[ProductFn], &[ProductFn], _) = match layer.kind {
            WeightKind::F32 | WeightKind::Quantized(_) => (products.f32, products.f32, None),
            WeightKind::Bf16 => {
                let (direct, widen) = layer.bf16_products();
                (direct, products.f32, Some(widen))
            }
            WeightKind::F16 => (products.f16, products.f32, Some(products.widen_f16)),
            WeightKind::Int8 { .. } => (products.int8, products.wide_int8, Some(products.widen_int8)),
            WeightKind::W8A8 { .. } => unreachable!("their rows are rounded"),
        };
        let quantized = if let WeightKind::Quantized(form) = layer.kind { Some(form) } else { None };
        let widen = widen.filter(|_| tiles.len() >= MIN_TILES_TO_WIDEN);
        // With one tile the weights are read once, whatever their number; several read each chunk again while it is near.
        let together = if tiles.len() == 1 && quantized.is_none() { num_k } else { CHUNK };
        for k in (0..num_k).step_by(together) {
            fetch(k / together, num_k.div_ceil(together));
            let len = together.min(num_k - k);
            let mut b = weights.wrapping_add(k * step);
            let mut forms = direct;
            if let Some(widen) = widen {
                // SAFETY: the panel has `len` more inputs, and `wide` room for a chunk of them.
                unsafe { widen(b, len, scratch.wide.as_mut_ptr().cast()) };
                (b, forms) = (scratch.wide.as_ptr().cast(), widened);
            }
            if let Some(form) = quantized {
                let wide = scratch.wide.as_flattened_mut();
                layer.widen_quantized(form, panel, k..k + len, &mut scratch.ready, wide);
                b = scratch.wide.as_ptr().cast();
            }
            // SAFETY: the caller's tiles lie in `a` and in `sums`; the weights of `len` inputs are at `b`.
            unsafe { self.sum_tiles(forms, a, k, len, b, panel, tiles.clone(), &start, sums) };
        }
    }

    /// Sums of the tiles' rows of 16 bits, in registers.
    ///
    /// # Safety
    ///
    /// As [`Self::sum_chunks`], for a layer that multiplies such rows.
    unsafe fn sum_narrow(
        &self,
        a: *const bf16,
        panel: usize,
        tiles: std::ops::Range<usize>,
        start: impl Fn(usize) -> usize,
        sums: *mut f32,
        fetch: impl Fn(usize, usize),
    ) {
        let (num_k, step) = (self.layer.in_features, self.layer.step());
        let weights = self.layer.panel_weights(panel);
        let together = if tiles.len() == 1 { num_k } else { CHUNK };
        for k in (0..num_k).step_by(together) {
            fetch(k / together, num_k.div_ceil(together));
            let len = together.min(num_k - k);
            let b = weights.wrapping_add(k * step);
            // SAFETY: the caller's tiles lie in `a` and in `sums`; the panel has `len` more inputs.
            unsafe {
                self.sum_tiles(
                    self.layer.narrow_products(),
                    a,
                    k,
                    len,
                    b,
                    panel,
                    tiles.clone(),
                    &start,
                    sums,
                );
            };
        }
    }

    /// The products of the tiles' rows with `len` inputs from `k` on, whose weights are at `b`.
    ///
    /// # Safety
    ///
    /// Rows and inputs lie in the arrays, in which `a` has the rows in chunks; `sums` are of the first row of `tiles`.
    #[expect(clippy::too_many_arguments, reason = "the parts of a product")]
    unsafe fn sum_tiles<A>(
        &self,
        forms: &[ProductFn<A>],
        a: *const A,
        k: usize,
        len: usize,
        b: *const u8,
        panel: usize,
        tiles: std::ops::Range<usize>,
        start: &impl Fn(usize) -> usize,
        sums: *mut f32,
    ) {
        let layer = self.layer;
        let (outputs, step) = (layer.kernel.panel(), layer.step());
        let weights = layer.panel_weights(panel);
        let first_row = start(tiles.start);
        // One tile asks for its own weights a little ahead; several share out the next chunk among them.
        let (ahead, ahead_step) = if tiles.len() == 1 {
            (weights.wrapping_add(k * step + AHEAD), step)
        } else {
            (weights.wrapping_add((k + len) * step), (CHUNK * step).div_ceil(tiles.len() * len))
        };
        let is_last = k + len == layer.in_features && self.finishes_tiles();
        let rows_at = |k: usize, row: usize| a.wrapping_add(k / CHUNK * CHUNK * self.num_rows + row * CHUNK);
        let last = tiles.end - 1;
        for (index, tile) in tiles.enumerate() {
            let rows = start(tile)..start(tile + 1);
            let what = Product {
                a: rows_at(k, rows.start),
                next_a: if tile == last { rows_at(k + len, first_row) } else { rows_at(k, rows.end) },
                chunk_stride: self.num_rows * CHUNK,
                first_k: k,
                num_k: len,
                b,
                c: sums.wrapping_add((rows.start - first_row) * outputs),
                scales: layer.panel_scales(panel),
                group_size: layer.group_size(),
                ahead: ahead.wrapping_add(index * ahead_step * len),
                ahead_step,
            };
            if is_last {
                self.fetch_outputs(panel, &rows);
            }
            // SAFETY: a tile has at least one row and at most as many as there are forms; its activations are in `a`,
            // its sums in `sums`, the weights of `len` inputs at `b`.
            unsafe { forms[rows.len() - 1](&what) };
            if is_last {
                // SAFETY: these are the sums of the tile's rows over all inputs; no other thread touches their outputs.
                unsafe { self.finish(panel, rows.start, rows.len(), what.c) };
            }
        }
    }

    /// Ask for a share of what adapters need for some rows of a panel's outputs.
    fn fetch(&self, panel: usize, rows: std::ops::Range<usize>, share: usize, num_shares: usize) {
        let Some(addition) = self.addition else { return };
        let outputs = self.layer.kernel.panel();
        let rows = self.first_row + rows.start..self.first_row + rows.end;
        addition.fetch(&(panel * outputs..(panel + 1) * outputs), &rows, share, num_shares);
    }

    /// Whether a tile's outputs are written as soon as it has met all inputs, while the next tile's sums are computed. Adapters
    /// are read for all rows of a part at once.
    fn finishes_tiles(&self) -> bool {
        self.addition.is_none() && matches!(self.a, Activations::Chunks(_) | Activations::Narrow(_))
    }

    /// Ask for the places of a panel's outputs of some rows, and for what is added to them: each is in another page, and a
    /// store whose line is far away holds up those behind it.
    fn fetch_outputs(&self, panel: usize, rows: &std::ops::Range<usize>) {
        let outputs = self.layer.kernel.panel();
        let first_output = panel * outputs;
        let num_bytes = outputs.min(self.layer.out_features - first_output) * size_of::<O>();
        for row in rows.clone() {
            ask_for(self.out.wrapping_add(row * self.out_stride + first_output).cast(), num_bytes);
            if !self.residual.is_null() {
                ask_for(
                    self.residual.wrapping_add(row * self.residual_stride + first_output).cast(),
                    num_bytes,
                );
            }
        }
    }

    /// Bias, activation and residual of some rows' sums, and where they go.
    ///
    /// # Safety
    ///
    /// As [`Self::compute`]; `sums` are those of the rows, `[row][output]`.
    unsafe fn finish(&self, panel: usize, first_row: usize, num_rows: usize, sums: *mut f32) {
        let layer = self.layer;
        let outputs = layer.kernel.panel();
        let first_output = panel * outputs;
        let rows = self.first_row + first_row..self.first_row + first_row + num_rows;
        if let Some(addition) = self.addition {
            addition.wait();
            // SAFETY: the sums of these rows, which nothing else refers to while this lives.
            let sums = unsafe { std::slice::from_raw_parts_mut(sums, num_rows * outputs) };
            addition.scale(first_output..first_output + outputs, rows.clone(), sums);
        }
        let offset = |start: *const O, stride: usize| start.wrapping_add(first_row * stride + first_output);
        let finish = Finish {
            sums,
            num_rows,
            num_outputs: outputs.min(layer.out_features - first_output),
            bias: layer
                .bias
                .as_ref()
                .map_or(std::ptr::null(), |bias| bias.as_slice::<f32>()[first_output..].as_ptr()),
            activation: self.activation,
            residual: if self.residual.is_null() {
                self.residual
            } else {
                offset(self.residual, self.residual_stride)
            },
            residual_stride: self.residual_stride,
            out: offset(self.out, self.out_stride).cast_mut(),
            out_stride: self.out_stride,
        };
        // SAFETY: sums, bias, residual and outputs of these rows lie in their arrays, which `check_rows` saw before the
        // parts were handed out.
        unsafe { O::finish_of(layer.kernel)(&finish) };
        let Some(addition) = self.addition else { return };
        let out = self.out.wrapping_sub(self.first_row * self.out_stride);
        // SAFETY: as for the outputs that were just written; `adapted_linear` is given adapters whose outputs the layer has.
        unsafe { addition.add(first_output..first_output + outputs, rows, out, self.out_stride) };
    }
}
