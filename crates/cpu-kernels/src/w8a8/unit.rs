//! The product by the matrix unit: tiles of sums for each block of inputs, scaled and added by vectors as everywhere else.
//!
//! A block has its own scales, so its tiles of sums leave the unit after one instruction each. The unit makes those of several
//! blocks before vectors come to them: what it has just written is not ready to be read. Weights of 4 and 6 bits become bytes
//! first, once for all rows.

#![allow(clippy::wildcard_imports, reason = "the intrinsics carry their origin in their names")]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over registers, of which several arrays are indexed alike"
)]

use std::{arch::x86_64::*, mem::MaybeUninit};

use super::{
    dot::QUAD,
    product::{LINE, Product},
};
use crate::simd::{
    Simd,
    amx::{self, TILE_ROWS, Tiles},
    avx512::Avx512,
};

/// Outputs of a tile.
const OUTPUTS: usize = 16;
/// Outputs of a panel for AVX-512.
pub(super) const PANEL: usize = 2 * OUTPUTS;
/// Blocks whose sums are made before the first are scaled.
const TOGETHER: usize = 4;
/// The most inputs of a block.
const MAX_BLOCK: usize = 32;
/// The most rows of a call.
const MAX_ROWS: usize = 256;

/// Sums of blocks as whole numbers.
type Whole = [[[[i32; OUTPUTS]; TILE_ROWS]; 2]; TOGETHER];

/// What lies near while a panel is computed; each part is written before it is read.
#[repr(C, align(64))]
struct Room {
    /// Those that the unit makes, and those that are scaled meanwhile.
    whole: [Whole; 2],
    /// Weights that were of 4 or 6 bits.
    bytes: [[i8; PANEL * MAX_BLOCK]; TOGETHER],
    /// Of each row, the sums of a group whose blocks were not all there yet.
    begun: [[f32; PANEL]; MAX_ROWS],
}

/// Blocks that are computed together.
#[derive(Clone, Copy)]
struct Part {
    first: usize,
    len: usize,
    /// The group of the first.
    group: usize,
    /// Whether some of that group's blocks came before.
    is_begun: bool,
    /// Whether a block is its group's last.
    ends: [bool; TOGETHER],
}

/// Rows of a part whose whole numbers are there, from the `skipped` one of a tile on: those before are another tile's.
#[derive(Clone, Copy)]
struct Made {
    part: Part,
    row: usize,
    skipped: usize,
    whole: *const Whole,
}

/// The sums of any number of rows up to [`MAX_ROWS`], in blocks of `BLOCK` inputs: the bits of [`super::product::product`].
///
/// All tiles have the same number of rows; the last one may begin with rows that the one before has, too.
///
/// # Safety
///
/// The arrays are as [`Product`] says, with a panel of [`PANEL`] outputs; [`amx::multiplies_whole_numbers`].
#[target_feature(enable = "avx512f,avx512bw,avx2,fma")]
pub(crate) unsafe fn product<const BLOCK: usize, const BITS: u8, const MINS: bool>(what: &Product) {
    debug_assert!(what.panel == PANEL && (1..=MAX_ROWS).contains(&what.num_rows));
    let mut room = MaybeUninit::<Room>::uninit();
    let room = room.as_mut_ptr();
    let block_bytes = PANEL * BLOCK * usize::from(BITS) / 8;
    let num_tiles = what.num_rows.div_ceil(TILE_ROWS);
    let tile_rows = what.num_rows.div_ceil(num_tiles);
    // Rows that are scaled while the unit computes a block.
    let at_once = tile_rows.div_ceil(TOGETHER);
    let share = what.ahead_step.div_ceil(num_tiles).next_multiple_of(LINE);
    let (mut left_of_group, mut group) = (what.blocks_per_group, 0);
    let (mut made, mut turn): (Option<Made>, usize) = (None, 0);
    // SAFETY: no other code of this thread uses tiles meanwhile; there are 1 to 16 rows, and blocks of 16 or 32 inputs.
    let _tiles = unsafe { Tiles::with_inputs(tile_rows, BLOCK) };
    for first in (0..what.num_blocks).step_by(TOGETHER) {
        let len = TOGETHER.min(what.num_blocks - first);
        let is_begun = left_of_group < what.blocks_per_group;
        let mut part = Part { first, len, group, is_begun, ends: [false; TOGETHER] };
        for (block, end) in part.ends.iter_mut().enumerate().take(len) {
            left_of_group -= 1;
            *end = left_of_group == 0 || first + block + 1 == what.num_blocks;
            if *end {
                (left_of_group, group) = (what.blocks_per_group, group + 1);
            }
        }
        // SAFETY: the caller gives arrays as `Product` says, so the weights of these blocks and every tile's rows lie within
        // them; what was made lies in the half of the room that the unit does not write.
        unsafe {
            let mut weights = what.weights.add(first * block_bytes).cast::<i8>();
            if BITS < 8 {
                let bytes = (&raw mut (*room).bytes).cast::<i8>();
                for block in 0..len {
                    let from = weights.cast::<u8>().add(block * block_bytes);
                    let to = bytes.add(block * PANEL * BLOCK);
                    if BITS == 6 { unpack_sixes::<BLOCK>(from, to) } else { unpack::<BLOCK, MINS>(from, to) }
                }
                weights = bytes;
            }
            for tile in 0..num_tiles {
                let row = (tile * tile_rows).min(what.num_rows - tile_rows);
                let whole = &raw mut (*room).whole[turn % 2];
                for block in 0..TOGETHER {
                    if block < len {
                        let numbers = what.numbers.add(((first + block) * what.row_stride + row) * BLOCK);
                        let weights = weights.add(block * PANEL * BLOCK);
                        let to = (&raw mut (*whole)[block]).cast();
                        amx::multiply_whole_numbers::<BLOCK, { PANEL * QUAD }>(numbers, weights, to);
                        let ahead = what.ahead.wrapping_add((first + block) * what.ahead_step + tile * share);
                        for line in (0..share).step_by(LINE) {
                            Avx512::prefetch(ahead.wrapping_add(line));
                        }
                    }
                    if let Some(made) = &made {
                        for r in (block * at_once).max(made.skipped)..tile_rows.min((block + 1) * at_once) {
                            scale_row::<MINS>(what, made, r, room);
                        }
                    }
                }
                made = Some(Made { part, row, skipped: tile * tile_rows - row, whole });
                turn += 1;
            }
        }
    }
    if let Some(made) = &made {
        for r in made.skipped..tile_rows {
            // SAFETY: the sums of the last tile were made.
            unsafe { scale_row::<MINS>(what, made, r, room) };
        }
    }
}

/// Scale the sums of a row's blocks, and add them.
///
/// # Safety
///
/// As [`product`]; the whole numbers of row `r` of a tile are there, and what its group has begun was written with the part
/// before.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx2,fma")]
unsafe fn scale_row<const MINS: bool>(what: &Product, made: &Made, r: usize, room: *mut Room) {
    let (part, row) = (&made.part, made.row + r);
    // SAFETY: the caller gives arrays as `Product` says, with this row and these blocks, whose sums it wrote.
    unsafe {
        let totals = what.sums.add(row * PANEL);
        let begun = (&raw mut (*room).begun[row]).cast::<f32>();
        let zero = _mm512_setzero_ps();
        let load = |from: *const f32, is_there: bool| {
            if is_there { [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(OUTPUTS))] } else { [zero; 2] }
        };
        let mut total = load(totals, part.first > 0 || !what.is_first);
        let mut sums = load(begun, part.is_begun);
        let mut group = part.group;
        for block in 0..part.len {
            let scale = _mm512_set1_ps(*what.scales.add((part.first + block) * what.row_stride + row));
            for half in 0..2 {
                let whole = _mm512_load_si512((&raw const (*made.whole)[block][half][r]).cast());
                sums[half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), scale, sums[half]);
            }
            if part.ends[block] {
                for half in 0..2 {
                    let place = group * PANEL + half * OUTPUTS;
                    let scale = _mm512_loadu_ps(what.weight_scales.add(4 * place).cast());
                    total[half] = _mm512_fmadd_ps(sums[half], scale, total[half]);
                    if MINS {
                        let min = _mm512_loadu_ps(what.weight_mins.add(place));
                        let sum = _mm512_set1_ps(*what.group_sums.add(group * what.row_stride + row));
                        total[half] = _mm512_fmadd_ps(min, sum, total[half]);
                    }
                    sums[half] = zero;
                }
                group += 1;
            }
        }
        for half in 0..2 {
            _mm512_storeu_ps(totals.add(half * OUTPUTS), total[half]);
        }
        if !part.ends[part.len - 1] {
            for half in 0..2 {
                _mm512_storeu_ps(begun.add(half * OUTPUTS), sums[half]);
            }
        }
    }
}

/// A block of weights of 4 bits as bytes: as they are where groups have a minimum, else 8 less.
///
/// # Safety
///
/// A block of a panel may be read, and as many bytes written as it has weights.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx2,fma")]
unsafe fn unpack<const BLOCK: usize, const MINS: bool>(from: *const u8, to: *mut i8) {
    let lower = _mm512_set1_epi8(15);
    let middle = _mm512_set1_epi8(if MINS { 0 } else { 8 });
    for quads in 0..BLOCK / (2 * QUAD) {
        for half in 0..2 {
            let place = half * OUTPUTS * QUAD;
            // SAFETY: the caller lets the block be read, and its bytes be written.
            unsafe {
                let pairs = _mm512_loadu_si512(from.add(quads * PANEL * QUAD + place).cast());
                let to = to.add(2 * quads * PANEL * QUAD + place);
                let upper = _mm512_and_si512(_mm512_srli_epi16::<4>(pairs), lower);
                let numbers = _mm512_sub_epi8(_mm512_and_si512(pairs, lower), middle);
                _mm512_storeu_si512(to.cast(), numbers);
                _mm512_storeu_si512(to.add(PANEL * QUAD).cast(), _mm512_sub_epi8(upper, middle));
            }
        }
    }
}

/// A block of weights of 6 bits as bytes, 32 less.
///
/// # Safety
///
/// As [`unpack`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx2,fma")]
unsafe fn unpack_sixes<const BLOCK: usize>(from: *const u8, to: *mut i8) {
    let (low, middle) = (_mm512_set1_epi8(63), _mm512_set1_epi8(32));
    for quads in 0..BLOCK / (QUAD * QUAD) {
        for half in 0..2 {
            let place = half * OUTPUTS * QUAD;
            // SAFETY: the caller lets the block be read, and its bytes be written.
            unsafe {
                let from = from.add(3 * quads * PANEL * QUAD + place);
                let to = to.add(QUAD * quads * PANEL * QUAD + place);
                let line = |index: usize| _mm512_loadu_si512(from.add(index * PANEL * QUAD).cast());
                let (a, b, c) = (line(0), line(1), line(2));
                let first = _mm512_and_si512(_mm512_srli_epi16::<6>(a), _mm512_set1_epi8(3));
                let second = _mm512_and_si512(_mm512_srli_epi16::<4>(b), _mm512_set1_epi8(12));
                let third = _mm512_and_si512(_mm512_srli_epi16::<2>(c), _mm512_set1_epi8(48));
                let last = _mm512_or_si512(_mm512_or_si512(first, second), third);
                for (quad, numbers) in [a, b, c, last].into_iter().enumerate() {
                    let numbers = _mm512_sub_epi8(_mm512_and_si512(numbers, low), middle);
                    _mm512_storeu_si512(to.add(quad * PANEL * QUAD).cast(), numbers);
                }
            }
        }
    }
}
