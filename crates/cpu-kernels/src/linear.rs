//! Products with packed weights: `out = activation(x · weightᵀ + bias) + residual`, for any number of rows.
//!
//! The bits of a row do not depend on the others: see [`crate::linear::product`]. Only a layer that uses the matrix unit from
//! some number of rows on ([`PackedLinear::set_matrix_rows`]) sums those in another order. Up to [`ROW_BLOCK`] rows are computed with one
//! reading of the weights, a panel at a time; a thread takes the next panel, or some rows of it where there are fewer
//! panels than would keep all threads busy.

mod block;
pub(crate) mod grouped;
#[cfg(target_arch = "x86_64")]
pub(crate) mod pairs;
pub(crate) mod panel;
pub(crate) mod product;
mod streams;
#[cfg(target_arch = "x86_64")]
mod tiled;

use std::cell::RefCell;

use half::bf16;

use crate::{
    attention::TokenRows,
    element::Element,
    finish::Activation,
    linear::{
        block::{Activations, Block, ROW_BLOCK, Scratch},
        panel::CHUNK,
    },
    lines::{Lines, Plain},
    lora::Addition,
    packed::{LinearError, PackedLinear, check_rows},
    threads::Threads,
    w8a8::{Plan, round_for},
};

/// Activations of those rows, in elements, that are near enough: what the second cache does not hold is asked for ahead. But
/// rows as many as [`LEAST_ROWS`] are always computed together, or the reading of weights would take as long as the products.
const NEAR_ACTIVATIONS: usize = 1 << 19;
const LEAST_ROWS: usize = 84;
/// `NEAR_ACTIVATIONS` for the matrix unit, in bytes as they are given; split into terms they take half as much again.
const NEAR_TILES: usize = 1 << 20;
/// Multiplications below which no helper is woken.
const MIN_SHARED_WORK: usize = 1 << 16;
/// Activations below which no helper is woken to arrange them.
const MIN_SHARED_ROWS: usize = 1 << 16;
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
            let a = match () {
                #[cfg(target_arch = "x86_64")]
                () if unit => {
                    Activations::Tiles(tiled::arrange(&x, rows.len(), layer.in_features, threads, arranged)?)
                }
                () => arranged_for(layer, &x, rows.len(), threads, arranged)?,
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
                let (panel, split) = if splits == 1 { (part, 0) } else { (part / splits, part % splits) };
                let tiles = share(num_tiles, split, splits)..share(num_tiles, split + 1, splits);
                let start = |tile: usize| {
                    if unit { rows.len().min(tile * tile_rows) } else { share(rows.len(), tile, num_tiles) }
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
    /// Those of several products at once.
    static ARRANGED_GROUPS: RefCell<Vec<Option<Lines>>> = const { RefCell::new(Vec::new()) };
    /// Of any thread.
    static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Box::new(Scratch::ZERO));
}

/// Rows as the layer's products read them, but for those of the matrix unit.
fn arranged_for<X: Element>(
    layer: &PackedLinear,
    x: &TokenRows<'_, X>,
    num_rows: usize,
    threads: &Threads,
    arranged: &mut Option<Lines>,
) -> Result<Activations, LinearError> {
    let row = layer.in_features;
    Ok(match X::as_f32(x.data) {
        _ if layer.kind.rounds_activations() => {
            let rows = round_for(layer, x, num_rows, threads, arranged)?;
            Activations::Rounded(rows, Plan::new(layer, &rows, 0, num_rows))
        }
        None if layer.multiplies_narrow() => match X::as_bf16(x.data) {
            // One row lies as chunks do.
            Some(data) if num_rows == 1 => Activations::Narrow(data.as_ptr()),
            _ => Activations::Narrow(arrange(x, num_rows, row, threads, arranged, copy_narrow::<X>)?),
        },
        Some(data) if num_rows == 1 => Activations::Chunks(data.as_ptr()),
        _ => Activations::Chunks(arrange(x, num_rows, row, threads, arranged, copy_wide::<X>)?),
    })
}

/// Where the share `index` of `count` begins; without a division, which takes as long as twenty multiplications, where there is
/// one.
fn share(len: usize, index: usize, count: usize) -> usize {
    if count == 1 { len * index } else { len * index / count }
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
