//! Products with packed weights: `out = activation(x · weightᵀ + bias) + residual`, for any number of rows.
//!
//! The bits of a row do not depend on the others: see [`crate::linear::product`]. Only a layer that uses the matrix unit from
//! some number of rows on ([`PackedLinear::set_matrix_rows`]) sums those in another order. Up to [`ROW_BLOCK`] rows are computed with one
//! reading of the weights, a panel at a time; a thread takes the next panel, or some rows of it where there are fewer
//! panels than would keep all threads busy.

#[cfg(target_arch = "x86_64")]
pub(crate) mod pairs;
pub(crate) mod product;
#[cfg(target_arch = "x86_64")]
mod tiled;

use std::cell::RefCell;

use half::bf16;

#[cfg(target_arch = "x86_64")]
use crate::{
    attention::TokenRows,
    element::Element,
    finish::{Activation, Finish},
    linear::product::{CHUNK, Product, ProductFn, Products},
    lines::{Lines, Plain},
    lora::Addition,
    packed::{LinearError, PackedLinear, WeightKind, check_rows, quantized::ReadyScales},
    threads::Threads,
    w8a8::{self, RoundedRows, round_for},
};

/// The most rows that are computed with one reading of the weights.
const ROW_BLOCK: usize = 256;
/// Activations of those rows, in elements, that a second cache holds in addition to the rest; but rows as many as
/// [`LEAST_ROWS`] are always computed together, or the reading of weights would take as long as the products.
const NEAR_ACTIVATIONS: usize = 1 << 18;
const LEAST_ROWS: usize = 84;
/// `NEAR_ACTIVATIONS` for the matrix unit, in bytes as they are given; split into terms they take half as much again.
const NEAR_TILES: usize = 1 << 20;
/// Bytes by which weights that are used once are prefetched ahead of their use.
const AHEAD: usize = 8192;
/// Multiplications below which no helper is woken.
const MIN_SHARED_WORK: usize = 1 << 16;
/// Activations below which no helper is woken to arrange them.
const MIN_SHARED_ROWS: usize = 1 << 16;
/// With fewer tiles of rows, narrow weights are widened for each; with more, once for all.
const MIN_TILES_TO_WIDEN: usize = 3;
/// Parts of a product that each thread should have, so that none waits long for another.
const PARTS_PER_THREAD: usize = 4;

/// What is added to the outputs.
#[derive(Debug, Clone, Copy, Default)]
pub enum Residual<'a, O> {
    /// Nothing.
    #[default]
    None,
    /// These rows.
    Rows(TokenRows<'a, O>),
    /// What `out` holds before.
    Out,
}

/// What follows the product.
#[derive(Debug, Clone, Copy, Default)]
pub struct Epilogue<'a, O> {
    /// Applied after the bias.
    pub activation: Activation,
    /// Added last.
    pub residual: Residual<'a, O>,
}

/// Rows of a product's output.
#[derive(Debug)]
pub struct OutRows<'a, O> {
    /// From the first element of the first row to the last of the last, or more.
    pub data: &'a mut [O],
    /// Elements from one row to the next.
    pub stride: usize,
}

/// Multiplications that a product takes.
#[must_use]
pub fn work(layer: &PackedLinear, num_rows: usize) -> usize {
    num_rows.saturating_mul(layer.out_features * layer.in_features)
}

/// `out = activation(x · weightᵀ + bias) + residual`.
///
/// # Errors
///
/// Arrays that do not fit, or a weight that is not wholly packed; nothing is written then.
pub fn linear<X: Element, O: Element>(
    layer: &PackedLinear,
    x: TokenRows<'_, X>,
    num_rows: usize,
    epilogue: &Epilogue<'_, O>,
    threads: &Threads,
    out: OutRows<'_, O>,
) -> Result<(), LinearError> {
    adapted_linear(layer, x, num_rows, epilogue, None, threads, out)
}

/// As [`linear()`], and then what adapters add, whose outputs the layer has.
pub(crate) fn adapted_linear<X: Element, O: Element>(
    layer: &PackedLinear,
    x: TokenRows<'_, X>,
    num_rows: usize,
    epilogue: &Epilogue<'_, O>,
    addition: Option<&Addition<'_>>,
    threads: &Threads,
    out: OutRows<'_, O>,
) -> Result<(), LinearError> {
    layer.check_packed()?;
    check_rows("x", x.data.len(), x.stride, num_rows, layer.in_features)?;
    let OutRows { data: out, stride: out_stride } = out;
    check_rows("out", out.len(), out_stride, num_rows, layer.out_features)?;
    let target = out.as_mut_ptr();
    let (residual, residual_stride) = match epilogue.residual {
        Residual::None => (std::ptr::null(), 0),
        Residual::Out => (target.cast_const(), out_stride),
        Residual::Rows(rows) => {
            check_rows("residual", rows.data.len(), rows.stride, num_rows, layer.out_features)?;
            (rows.data.as_ptr(), rows.stride)
        }
    };
    if num_rows == 0 {
        return Ok(());
    }
    let unit = layer.uses_matrix_unit(num_rows);
    let most_rows = if unit {
        (NEAR_TILES / (layer.in_features * size_of::<X>())).clamp(LEAST_ROWS, ROW_BLOCK)
    } else {
        (NEAR_ACTIVATIONS / layer.in_features).clamp(LEAST_ROWS, ROW_BLOCK)
    };
    let num_blocks = num_rows.div_ceil(most_rows);
    let is_shared = work(layer, num_rows) >= MIN_SHARED_WORK;
    let mut gathered = Vec::new();
    ARRANGED.with_borrow_mut(|arranged| {
        for block in 0..num_blocks {
            let rows = num_rows * block / num_blocks..num_rows * (block + 1) / num_blocks;
            let x = TokenRows { data: &x.data[rows.start * x.stride..], stride: x.stride };
            let x = match &layer.input_order {
                None => x,
                Some(order) => gather(&x, rows.len(), order, &mut gathered),
            };
            let a = match X::as_f32(x.data) {
                #[cfg(target_arch = "x86_64")]
                _ if unit => {
                    Activations::Tiles(tiled::arrange(&x, rows.len(), layer.in_features, threads, arranged)?)
                }
                _ if layer.kind.rounds_activations() => {
                    Activations::Rounded(round_for(layer, &x, rows.len(), threads, arranged)?)
                }
                None if layer.multiplies_narrow() => match X::as_bf16(x.data) {
                    // One row lies as chunks do.
                    Some(data) if rows.len() == 1 => Activations::Narrow(data.as_ptr()),
                    _ => {
                        let copy = copy_narrow::<X>;
                        Activations::Narrow(arrange(
                            &x,
                            rows.len(),
                            layer.in_features,
                            threads,
                            arranged,
                            copy,
                        )?)
                    }
                },
                Some(data) if rows.len() == 1 => Activations::Chunks(data.as_ptr()),
                _ => {
                    let copy = copy_wide::<X>;
                    Activations::Chunks(arrange(&x, rows.len(), layer.in_features, threads, arranged, copy)?)
                }
            };
            let whole = Block {
                layer,
                products: layer.kernel.products,
                a,
                num_rows: rows.len(),
                activation: epilogue.activation,
                residual: if residual.is_null() {
                    residual
                } else {
                    residual.wrapping_add(rows.start * residual_stride)
                },
                residual_stride,
                out: target.wrapping_add(rows.start * out_stride),
                out_stride,
                addition,
                first_row: rows.start,
            };
            let tile_rows = whole.tile_rows();
            let num_tiles = rows.len().div_ceil(tile_rows);
            let num_panels = layer.num_panels();
            // Rows are shared out only where panels are too few, for each part reads its panel anew.
            let splits = (PARTS_PER_THREAD * threads.num_threads()).div_ceil(num_panels).clamp(1, num_tiles);
            threads.for_each(num_panels * splits, is_shared, |part| {
                let (panel, split) = (part / splits, part % splits);
                let tiles = num_tiles * split / splits..num_tiles * (split + 1) / splits;
                let start = |tile: usize| {
                    if unit { rows.len().min(tile * tile_rows) } else { rows.len() * tile / num_tiles }
                };
                if let Some(addition) = addition {
                    addition.help();
                }
                SCRATCH.with_borrow_mut(|scratch| {
                    // SAFETY: a kernel is only reachable where it was detected; `check_rows` saw that all rows lie in their
                    // arrays; parts do not overlap, so no two write the same output, and what is read is not written but
                    // for a residual, which is read by the part that writes its place.
                    unsafe { whole.compute(panel, tiles, start, scratch) };
                });
            });
        }
        Ok(())
    })
}

thread_local! {
    /// Activations as the product reads them: of a calling thread.
    static ARRANGED: RefCell<Option<Lines>> = const { RefCell::new(None) };
    /// Of any thread.
    static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Box::new(Scratch {
        sums: [[0.0; MAX_PANEL]; ROW_BLOCK],
        wide: [[0.0; MAX_PANEL]; CHUNK],
        ready: ReadyScales::ZERO,
        #[cfg(target_arch = "x86_64")]
        split: tiled::SplitWeights::ZERO,
    }));
}

/// The most outputs of a panel that any kernel has.
const MAX_PANEL: usize = 32;

/// Memory of one thread, used again by every part; each array begins with a line.
#[repr(C, align(64))]
struct Scratch {
    sums: [[f32; MAX_PANEL]; ROW_BLOCK],
    wide: [[f32; MAX_PANEL]; CHUNK],
    ready: ReadyScales,
    #[cfg(target_arch = "x86_64")]
    split: tiled::SplitWeights,
}

/// Rows with their inputs in another order.
fn gather<'a, X: Element>(
    x: &TokenRows<'_, X>,
    num_rows: usize,
    order: &[u32],
    gathered: &'a mut Vec<X>,
) -> TokenRows<'a, X> {
    gathered.clear();
    for row in 0..num_rows {
        let from = &x.data[row * x.stride..][..order.len()];
        gathered.extend(order.iter().map(|&input| from[input as usize]));
    }
    TokenRows { data: gathered, stride: order.len() }
}

/// Put rows into chunks, `[chunk][row][CHUNK]`, as numbers that `copy` writes: rows of a tile then lie side by side wherever
/// they came from, and on addresses that do not compete for the same few places of the nearest cache.
fn arrange<X: Element, A: Plain>(
    x: &TokenRows<'_, X>,
    num_rows: usize,
    row: usize,
    threads: &Threads,
    arranged: &mut Option<Lines>,
    copy: impl Fn(&[X], &mut [A]) + Sync,
) -> Result<*const A, LinearError> {
    let num_chunks = row.div_ceil(CHUNK);
    let num_bytes = num_chunks * CHUNK * num_rows * size_of::<A>();
    let memory = LinearError::Memory { num_bytes, out_features: num_rows, in_features: row };
    let start = Lines::at_least(num_bytes, arranged).ok_or(memory)?.as_mut_slice::<A>().as_mut_ptr();
    let target = Target(start);
    threads.for_each(num_chunks, num_rows * row >= MIN_SHARED_ROWS, |chunk| {
        let inputs = chunk * CHUNK..row.min((chunk + 1) * CHUNK);
        for i in 0..num_rows {
            let from = &x.data[i * x.stride..][inputs.clone()];
            // SAFETY: the place of this row in this chunk, which no other part writes.
            let to = unsafe {
                std::slice::from_raw_parts_mut(target.at((chunk * num_rows + i) * CHUNK), from.len())
            };
            copy(from, to);
        }
    });
    Ok(start.cast_const())
}

/// Rows as 32 bits.
fn copy_wide<X: Element>(from: &[X], to: &mut [f32]) {
    match X::as_f32(from) {
        Some(from) => to.copy_from_slice(from),
        None => to.iter_mut().zip(from).for_each(|(to, x)| *to = x.widen()),
    }
}

/// Rows of 16 bits as they are.
fn copy_narrow<X: Element>(from: &[X], to: &mut [bf16]) {
    if let Some(from) = X::as_bf16(from) {
        to.copy_from_slice(from);
    }
}

/// Memory that parts write at different places.
struct Target<A>(*mut A);

// SAFETY: the parts see to it, see `arrange`.
unsafe impl<A> Sync for Target<A> {}

impl<A> Target<A> {
    fn at(&self, offset: usize) -> *mut A {
        self.0.wrapping_add(offset)
    }
}

/// Rows as the one or the other kind of product reads them.
enum Activations {
    /// `[chunk][row][CHUNK]`
    Chunks(*const f32),
    /// Likewise, of 16 bits.
    Narrow(*const bf16),
    Rounded(RoundedRows),
    #[cfg(target_arch = "x86_64")]
    Tiles(tiled::Arranged),
}

/// Some rows of a product.
struct Block<'a, O> {
    layer: &'a PackedLinear,
    products: &'static Products,
    a: Activations,
    num_rows: usize,
    activation: Activation,
    /// First row, first output; null: none.
    residual: *const O,
    residual_stride: usize,
    out: *mut O,
    out_stride: usize,
    addition: Option<&'a Addition<'a>>,
    /// Rows of the product before the first of these.
    first_row: usize,
}

// SAFETY: everything but `out` is only read; of `out` each part writes its own rows of its own panel.
unsafe impl<O: Element> Sync for Block<'_, O> {}

impl<O: Element> Block<'_, O> {
    /// The most rows that are summed in registers at once.
    fn tile_rows(&self) -> usize {
        match self.a {
            Activations::Chunks(_) | Activations::Narrow(_) => self.products.f32.len(),
            Activations::Rounded(_) => w8a8::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Activations::Tiles(_) => tiled::PAIR_ROWS,
        }
    }

    /// One panel's outputs for some tiles of rows; tile `t` begins with row `start(t)`.
    ///
    /// # Safety
    ///
    /// Rows and panel lie in the arrays, and no other thread touches these outputs.
    unsafe fn compute(
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
        let fetch = |share, num_shares| self.fetch(panel, first_row..first_row + num_rows, share, num_shares);
        match &self.a {
            // SAFETY: the caller gives rows and a panel that lie in the arrays; `sums` was made with room for the rows.
            &Activations::Chunks(a) => unsafe { self.sum_chunks(a, panel, tiles, start, scratch, fetch) },
            // SAFETY: likewise.
            &Activations::Narrow(a) => unsafe { self.sum_narrow(a, panel, tiles, start, sums, fetch) },
            // SAFETY: the caller gives rows and a panel that lie in the arrays; `sums` has room for the rows, which were
            // rounded for this layer's kind.
            Activations::Rounded(a) => unsafe {
                w8a8::sum(self.layer, panel, a, first_row, num_rows, sums, &mut scratch.ready, fetch);
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller gives rows and a panel that lie in the arrays; `sums` has room for them; there are tiles
            // only where `uses_matrix_unit` said so.
            Activations::Tiles(a) => unsafe {
                fetch(0, 1);
                tiled::sum(self.layer, panel, a, first_row, num_rows, sums, &mut scratch.split);
            },
        }
        // SAFETY: the sums of these rows were just written; no other thread touches these outputs, by the contract of
        // this function.
        unsafe { self.finish(panel, first_row, num_rows, sums) };
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
        for (index, tile) in tiles.enumerate() {
            let rows = start(tile)..start(tile + 1);
            let what = Product {
                a: a.wrapping_add(k / CHUNK * CHUNK * self.num_rows + rows.start * CHUNK),
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
            // SAFETY: a tile has at least one row and at most as many as there are forms; its activations are in `a`,
            // its sums in `sums`, the weights of `len` inputs at `b`.
            unsafe { forms[rows.len() - 1](&what) };
        }
    }

    /// Ask for a share of what adapters need for some rows of a panel's outputs.
    fn fetch(&self, panel: usize, rows: std::ops::Range<usize>, share: usize, num_shares: usize) {
        let Some(addition) = self.addition else { return };
        let outputs = self.layer.kernel.panel();
        let rows = self.first_row + rows.start..self.first_row + rows.end;
        addition.fetch(&(panel * outputs..(panel + 1) * outputs), &rows, share, num_shares);
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
