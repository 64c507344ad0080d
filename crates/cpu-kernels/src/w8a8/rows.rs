//! Rows of activations, rounded to whole numbers of 8 bits with a scale for each block of inputs.

use super::rounding::{RowTarget, round_row};
use crate::{attention::TokenRows, element::Element, lines::Lines, packed::LinearError, threads::Threads};

/// Activations below which nobody is asked to help round them.
const MIN_SHARED: usize = 1 << 15;
/// Bytes of a line, with which the numbers begin.
const LINE: usize = 64;
/// Rows in blocks, with their scales and −128 times their sums, in memory that the caller keeps.
///
/// Rows lie in bundles, each of which has all of its blocks together, `[bundle][block][row][input]` (scales and sums
/// `[bundle][block][row]`): then the blocks of the rows that are computed at once compete for few places of the nearest
/// cache. The last bundle has room for as many rows as the others.
#[derive(Clone, Copy)]
pub(crate) struct RoundedRows {
    numbers: *const i8,
    scales: *const f32,
    starts: *const i32,
    group_sums: *const f32,
    shape: Shape,
}

/// Sizes of rounded rows.
#[derive(Clone, Copy)]
struct Shape {
    /// Rows of a bundle.
    bundle: usize,
    block: usize,
    num_blocks: usize,
    num_groups: usize,
}

impl Shape {
    /// Where a row's part of the first of `count` things lies that each bundle has for all its rows.
    fn place(self, row: usize, count: usize) -> usize {
        // Without a division, for all of few rows.
        if row < self.bundle {
            return row;
        }
        row / self.bundle * self.bundle * count + row % self.bundle
    }
}

impl RoundedRows {
    /// Rows of a bundle: what lies between a row's block and its next one.
    pub(crate) fn bundle(&self) -> usize {
        self.shape.bundle
    }

    /// The first block of a row.
    pub(crate) fn numbers(&self, row: usize) -> *const i8 {
        self.numbers.wrapping_add(self.shape.place(row, self.shape.num_blocks) * self.shape.block)
    }

    /// Its scale.
    pub(crate) fn scales(&self, row: usize) -> *const f32 {
        self.scales.wrapping_add(self.shape.place(row, self.shape.num_blocks))
    }

    /// −128 times the sum of its numbers: see [`super::dot::Dot::start`].
    pub(crate) fn starts(&self, row: usize) -> *const i32 {
        self.starts.wrapping_add(self.shape.place(row, self.shape.num_blocks))
    }

    /// The rounded activations of each group from one on, summed; only where they were asked for.
    pub(crate) fn group_sums(&self, group: usize, row: usize) -> *const f32 {
        let place = self.shape.place(row, self.shape.num_groups);
        self.group_sums.wrapping_add(place + group * self.shape.bundle)
    }
}

/// Round rows of `row` activations in blocks of 16 or 32 and bundles of `bundle` rows; what the last block lacks is zeros.
/// With `blocks_per_group` also sum them over so many blocks.
///
/// A block with an activation that is not finite has no number for a scale, so that none of the row's outputs has one. Products
/// are summed before they are scaled, so activations above 10³⁴ may have sums that leave 32 bits.
#[expect(clippy::too_many_arguments, reason = "rows, and how they are to lie")]
pub(crate) fn round_rows<X: Element>(
    x: &TokenRows<'_, X>,
    num_rows: usize,
    row: usize,
    block: usize,
    bundle: usize,
    blocks_per_group: Option<usize>,
    threads: &Threads,
    room: &mut Option<Lines>,
) -> Result<RoundedRows, LinearError> {
    let num_blocks = row.div_ceil(block);
    let num_groups = blocks_per_group.map_or(0, |blocks| num_blocks.div_ceil(blocks));
    let shape = Shape { bundle, block, num_blocks, num_groups };
    let places = num_rows.next_multiple_of(bundle);
    let scale_bytes = (num_blocks * places * 4).next_multiple_of(LINE);
    let number_bytes = num_blocks * places * block;
    let num_bytes = 2 * scale_bytes + number_bytes + num_groups * places * 4;
    let memory = LinearError::Memory { num_bytes, out_features: num_rows, in_features: row };
    let start = Lines::at_least(num_bytes, room).ok_or(memory)?.as_mut_slice::<f32>().as_mut_ptr();
    let scales = Target(start);
    let starts = Target(start.cast::<i32>().wrapping_byte_add(scale_bytes));
    let numbers = Target(start.cast::<i8>().wrapping_add(2 * scale_bytes));
    let group_sums = Target(start.wrapping_byte_add(2 * scale_bytes + number_bytes));
    threads.for_each(num_rows, num_rows * row >= MIN_SHARED, |i| {
        let place = shape.place(i, num_blocks);
        let to = RowTarget {
            numbers: numbers.at(place * block),
            scales: scales.at(place),
            starts: starts.at(place),
            stride: bundle,
        };
        // SAFETY: the places of this row in every block, which no other part writes; the memory has room for all of them.
        unsafe { round_row(&x.data[i * x.stride..][..row], block, &to) };
        for group in 0..num_groups {
            let blocks = blocks_per_group.unwrap_or(num_blocks);
            let mut sum = 0.0;
            for block in group * blocks..num_blocks.min((group + 1) * blocks) {
                // SAFETY: the row's scales and starts in every block, which were just written.
                let (scale, start) =
                    unsafe { (*to.scales.add(block * bundle), *to.starts.add(block * bundle)) };
                sum += scale * (start / -128) as f32;
            }
            // SAFETY: the place of this row in this group, which no other part writes.
            unsafe { group_sums.at(shape.place(i, num_groups) + group * bundle).write(sum) };
        }
    });
    let (numbers, scales, starts) = (numbers.0.cast_const(), scales.0.cast_const(), starts.0.cast_const());
    Ok(RoundedRows { numbers, scales, starts, group_sums: group_sums.0.cast_const(), shape })
}

/// Memory that parts write at different places.
struct Target<T>(*mut T);

// SAFETY: each part writes the blocks and scales of its own row, see `round_rows`.
unsafe impl<T: Send> Sync for Target<T> {}

impl<T> Target<T> {
    fn at(&self, offset: usize) -> *mut T {
        self.0.wrapping_add(offset)
    }
}
