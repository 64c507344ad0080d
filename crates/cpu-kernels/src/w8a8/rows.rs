//! Rows of activations, rounded to whole numbers of 8 bits with a scale for each block of inputs.

#![allow(clippy::inline_always, reason = "see `simd`")]

#[cfg(target_arch = "x86_64")]
use crate::simd::instructions;
use crate::{attention::TokenRows, element::Element, lines::Lines, packed::LinearError, threads::Threads};

/// Activations below which nobody is asked to help round them.
const MIN_SHARED: usize = 1 << 15;
/// Bytes of a line, with which the numbers begin.
const LINE: usize = 64;
/// The largest whole number, and less the sign the smallest one.
const LARGEST: f32 = 127.0;
/// Adding 1.5 · 2²³ leaves no room for a fraction, and the whole number in the lowest bits.
const NO_FRACTION: f32 = 12_582_912.0;

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

/// Where a row's blocks go: of each array the place of the first, the others `stride` rows further.
struct RowTarget {
    numbers: *mut i8,
    scales: *mut f32,
    starts: *mut i32,
    stride: usize,
}

/// Round a row, with the widest instructions that there are; the numbers are the same with any.
///
/// # Safety
///
/// The places of `to` may be written, in as many blocks of 16 or 32 as the row takes, and are no other thread's.
unsafe fn round_row<X: Element>(from: &[X], block: usize, to: &RowTarget) {
    // SAFETY: the caller lets the row's places in every block be written; forms with instructions are called where these were
    // found.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        {
            if instructions::have_avx512_vnni() {
                return round_row_avx512(from, block, to);
            }
            if instructions::have_avx2() {
                return round_row_avx2(from, block, to);
            }
        }
        round_blocks(from, block, to);
    }
}

/// # Safety
///
/// As [`round_row`], and a machine with these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2")]
unsafe fn round_row_avx512<X: Element>(from: &[X], block: usize, to: &RowTarget) {
    // SAFETY: the caller lets the row's places in every block be written.
    unsafe { round_blocks(from, block, to) };
}

/// # Safety
///
/// As [`round_row`], and a machine with these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn round_row_avx2<X: Element>(from: &[X], block: usize, to: &RowTarget) {
    // SAFETY: the caller lets the row's places in every block be written.
    unsafe { round_blocks(from, block, to) };
}

/// # Safety
///
/// As [`round_row`].
#[inline(always)]
unsafe fn round_blocks<X: Element>(from: &[X], block: usize, to: &RowTarget) {
    // SAFETY: the caller lets the row's places in every block be written.
    unsafe {
        if block == 16 {
            round_blocks_of::<X, 16>(from, to);
        } else {
            round_blocks_of::<X, 32>(from, to);
        }
    }
}

/// # Safety
///
/// As [`round_row`], with blocks of `BLOCK`.
#[inline(always)]
unsafe fn round_blocks_of<X: Element, const BLOCK: usize>(from: &[X], to: &RowTarget) {
    let (whole, rest) = from.as_chunks::<BLOCK>();
    let mut x = [0.0_f32; BLOCK];
    for (index, from) in whole.iter().enumerate() {
        x.iter_mut().zip(from).for_each(|(x, from)| *x = from.widen());
        // SAFETY: the caller lets the place of this block be written.
        unsafe { round_block(&x, index * to.stride, to) };
    }
    if !rest.is_empty() {
        x.fill(0.0);
        x.iter_mut().zip(rest).for_each(|(x, from)| *x = from.widen());
        // SAFETY: the caller lets the place of the last block be written.
        unsafe { round_block(&x, whole.len() * to.stride, to) };
    }
}

/// Round a block, and note its scale and −128 times the sum of its numbers.
///
/// # Safety
///
/// The `place` of each array of `to` may be written.
#[inline(always)]
unsafe fn round_block<const BLOCK: usize>(x: &[f32; BLOCK], place: usize, to: &RowTarget) {
    // Without their signs the bits of numbers are in the order of the numbers; what is no number is above infinity.
    let largest = x.iter().fold(0, |largest, x| (x.to_bits() as i32 & i32::MAX).max(largest));
    let largest = f32::from_bits(largest as u32);
    let inverse = LARGEST / largest;
    let (mut numbers, mut sum) = ([0_i8; BLOCK], 0);
    let scale = if largest.is_finite() && inverse.is_finite() {
        for (number, x) in numbers.iter_mut().zip(x) {
            // The lowest byte, with its sign.
            let whole = ((x * inverse + NO_FRACTION).to_bits() << 24) as i32 >> 24;
            sum += whole;
            *number = whole as i8;
        }
        largest / LARGEST
    } else {
        // A block of zeros, or of numbers so small that their scale is none, is zeros.
        if largest.is_finite() { 0.0 } else { f32::NAN }
    };
    // SAFETY: the caller lets this place be written.
    unsafe {
        to.numbers.add(place * BLOCK).cast::<[i8; BLOCK]>().write(numbers);
        to.scales.add(place).write(scale);
        to.starts.add(place).write(-128 * sum);
    }
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
