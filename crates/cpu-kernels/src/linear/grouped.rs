//! Products of several layers of one shape, each with rows of its own, in one call of the threads: what a token's experts take.
//!
//! A row's bits are those that [`linear()`] gives for it alone.

use std::ops::Range;

use super::{
    ARRANGED_GROUPS, Epilogue, LEAST_ROWS, MIN_SHARED_ROWS, MIN_SHARED_WORK, NEAR_ACTIVATIONS, OutRows,
    Residual, SCRATCH, Target, arranged_for,
    block::{Activations, Block, ROW_BLOCK},
    linear, share, work,
};
use crate::{
    attention::TokenRows,
    element::Element,
    finish::Activation,
    packed::{LinearError, PackedLinear, check_rows},
    threads::Threads,
};

/// A layer, and the rows that it multiplies.
#[derive(Clone)]
pub(crate) struct Group<'a> {
    pub(crate) layer: &'a PackedLinear,
    pub(crate) rows: Range<usize>,
}

/// `out = x · weightᵀ + bias` with the layer of each group for its rows.
///
/// # Arguments
///
/// * `groups`: each has rows of its own; the layers have the same numbers of inputs and outputs.
/// * `num_rows`: rows of `x`: as many as `out` has, or 1, which every group multiplies. Then each has one row of `out`.
///
/// # Errors
///
/// Arrays that do not fit, or a weight that is not wholly packed.
pub(crate) fn grouped_linear<E: Element>(
    groups: &[Group<'_>],
    x: TokenRows<'_, E>,
    num_rows: usize,
    threads: &Threads,
    out: OutRows<'_, E>,
) -> Result<(), LinearError> {
    let Some(first) = groups.first().map(|group| group.layer) else { return Ok(()) };
    let is_one = num_rows == 1;
    let row_of_x = |row: usize| if is_one { 0 } else { row };
    let end = groups.iter().map(|group| group.rows.end).max().unwrap_or_default();
    check_rows("x", x.data.len(), x.stride, row_of_x(end.saturating_sub(1)) + 1, first.in_features)?;
    check_rows("out", out.data.len(), out.stride, end, first.out_features)?;
    let is_together = |group: &Group<'_>| {
        let Group { layer, rows } = group;
        let is_alike = layer.kind == first.kind && std::ptr::eq(layer.kernel, first.kernel);
        is_alike && layer.input_order.is_none() && !layer.uses_matrix_unit(rows.len())
    };
    let most_rows = (NEAR_ACTIVATIONS / first.in_features).clamp(LEAST_ROWS, ROW_BLOCK);
    let epilogue = Epilogue { activation: Activation::None, residual: Residual::None };
    let mut blocks = Vec::with_capacity(groups.len());
    for group in groups {
        let Group { layer, rows } = group;
        let shape = |layer: &PackedLinear| (layer.out_features, layer.in_features);
        assert!(shape(layer) == shape(first), "the layers of a grouped product have one shape");
        assert!(!is_one || rows.len() == 1, "a row that all groups share gives each of them one row");
        if !is_together(group) {
            let x = TokenRows { data: &x.data[row_of_x(rows.start) * x.stride..], stride: x.stride };
            let out = OutRows { data: &mut out.data[rows.start * out.stride..], stride: out.stride };
            linear(layer, x, rows.len(), &epilogue, threads, out)?;
            continue;
        }
        layer.check_packed()?;
        let count = rows.len().div_ceil(most_rows);
        blocks.extend((0..count).map(|block| {
            let start = |block| rows.start + share(rows.len(), block, count);
            (*layer, start(block)..start(block + 1))
        }));
    }
    if blocks.is_empty() {
        return Ok(());
    }
    let OutRows { data: out, stride: out_stride } = out;
    let target = out.as_mut_ptr();
    ARRANGED_GROUPS.with_borrow_mut(|rooms| {
        let num_arranged = if is_one { 1 } else { blocks.len() };
        rooms.resize_with(rooms.len().max(num_arranged), || None);
        let mut arranged: Vec<Option<Result<Activations, LinearError>>> =
            (0..num_arranged).map(|_| None).collect();
        let (rooms, places) = (Target(rooms.as_mut_ptr()), Target(arranged.as_mut_ptr()));
        let is_shared = !is_one && end * first.in_features >= MIN_SHARED_ROWS;
        threads.for_each(num_arranged, is_shared, |index| {
            let (layer, rows) = &blocks[index];
            let start = row_of_x(rows.start) * x.stride;
            let x = TokenRows { data: &x.data[start..], stride: x.stride };
            // SAFETY: there are a room and a place for each of these, and each part has its own.
            let (room, place) = unsafe { (&mut *rooms.at(index), &mut *places.at(index)) };
            *place = Some(arranged_for(layer, &x, rows.len(), &Threads::alone(), room));
        });
        let arranged = arranged.into_iter().flatten().collect::<Result<Vec<_>, _>>()?;
        let multiplied = blocks.iter().enumerate().map(|(index, (layer, rows))| Block {
            layer,
            products: layer.kernel.products,
            a: arranged[index.min(num_arranged - 1)],
            num_rows: rows.len(),
            activation: Activation::None,
            residual: std::ptr::null(),
            residual_stride: 0,
            out: target.wrapping_add(rows.start * out_stride),
            out_stride,
            addition: None,
            first_row: 0,
        });
        let blocks: Vec<Block<'_, E>> = multiplied.collect();
        let num_panels = first.num_panels();
        let num_multiplied = blocks.iter().map(|block| work(block.layer, block.num_rows)).sum::<usize>();
        threads.for_each(num_panels * blocks.len(), num_multiplied >= MIN_SHARED_WORK, |part| {
            let block = &blocks[part / num_panels];
            let num_tiles = block.num_rows.div_ceil(block.tile_rows());
            let start = |tile: usize| share(block.num_rows, tile, num_tiles);
            SCRATCH.with_borrow_mut(|scratch| {
                // SAFETY: a kernel is only reachable where it was detected; `check_rows` saw that all rows lie in their arrays;
                // groups have rows of their own and parts panels of their own, so no two write the same output.
                unsafe { block.compute(part % num_panels, 0..num_tiles, start, scratch) };
            });
        });
        Ok(())
    })
}
