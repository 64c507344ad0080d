//! Rows of activations, rounded to whole numbers of 8 bits with a scale for each block of inputs.

use crate::{attention::TokenRows, element::Element, lines::Lines, packed::LinearError, threads::Threads};

/// Activations below which nobody is asked to help round them.
const MIN_SHARED: usize = 1 << 15;
/// The largest whole number, and less the sign the smallest one.
const LARGEST: f32 = 127.0;
/// Adding 1.5 · 2²³ leaves no room for a fraction, and the whole number in the lowest bits.
const NO_FRACTION: f32 = 12_582_912.0;

/// Rows in blocks, `[block][row][input]`, and their scales, `[block][row]`, in memory that the caller keeps.
pub(crate) struct RoundedRows {
    numbers: *const i8,
    scales: *const f32,
    num_rows: usize,
    block: usize,
}

impl RoundedRows {
    pub(crate) fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// The first block of a row.
    pub(crate) fn numbers(&self, row: usize) -> *const i8 {
        self.numbers.wrapping_add(row * self.block)
    }

    /// Its scale.
    pub(crate) fn scales(&self, row: usize) -> *const f32 {
        self.scales.wrapping_add(row)
    }
}

/// Round rows of `row` activations in blocks of 16 or 32; what the last block lacks is zeros.
///
/// A block with an activation that is not finite has no number for a scale, so that none of the row's outputs has one. Products
/// are summed before they are scaled, so activations above 10³⁴ may have sums that leave 32 bits.
pub(crate) fn round_rows<X: Element>(
    x: &TokenRows<'_, X>,
    num_rows: usize,
    row: usize,
    block: usize,
    threads: &Threads,
    room: &mut Option<Lines>,
) -> Result<RoundedRows, LinearError> {
    let num_blocks = row.div_ceil(block);
    let scale_bytes = (num_blocks * num_rows * 4).next_multiple_of(block);
    let num_bytes = scale_bytes + num_blocks * num_rows * block;
    let memory = LinearError::Memory { num_bytes, out_features: num_rows, in_features: row };
    let start = Lines::at_least(num_bytes, room).ok_or(memory)?.as_mut_slice::<f32>().as_mut_ptr();
    let (scales, numbers) = (Target(start), Target(start.cast::<i8>().wrapping_add(scale_bytes)));
    threads.for_each(num_rows, num_rows * row >= MIN_SHARED, |i| {
        for (index, from) in x.data[i * x.stride..][..row].chunks(block).enumerate() {
            let place = index * num_rows + i;
            // SAFETY: this block of this row, which no other part writes; the memory has room for all of them.
            let to = unsafe { std::slice::from_raw_parts_mut(numbers.at(place * block), block) };
            let scale = if block == 16 { round::<X, 16>(from, to) } else { round::<X, 32>(from, to) };
            // SAFETY: the scale of that block.
            unsafe { scales.at(place).write(scale) };
        }
    });
    let numbers = numbers.0.cast_const();
    Ok(RoundedRows { numbers, scales: scales.0.cast_const(), num_rows, block })
}

/// Round a block, or what there is of it, and give its scale.
fn round<X: Element, const BLOCK: usize>(from: &[X], to: &mut [i8]) -> f32 {
    let mut x = [0.0_f32; BLOCK];
    x.iter_mut().zip(from).for_each(|(x, from)| *x = from.widen());
    // Without their signs the bits of numbers are in the order of the numbers; what is no number is above infinity.
    let largest = x.iter().fold(0, |largest, x| (x.to_bits() as i32 & i32::MAX).max(largest));
    let largest = f32::from_bits(largest as u32);
    let inverse = LARGEST / largest;
    if !largest.is_finite() || !inverse.is_finite() {
        // A block of zeros, or of numbers so small that their scale is none, is zeros.
        to.fill(0);
        return if largest.is_finite() { 0.0 } else { f32::NAN };
    }
    for (to, x) in to.iter_mut().zip(x) {
        *to = (x * inverse + NO_FRACTION).to_bits() as i8;
    }
    largest / LARGEST
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
