//! Products by the matrix unit, which multiplies numbers of 16 bits and sums in 32.
//!
//! A number of 32 bits is the sum of three of 16: its upper 8 significant bits, the next 8, the last 8. The product of two such
//! sums has nine terms; the six largest are computed, what the other three would add lies below the last bit. So a product of
//! 32-bit numbers is as exact as by multiply-adds, and takes a third of their time. Weights of 8 bits and numbers of 16 are one
//! such number already, and take fewer terms. Numbers that are infinite come out as no number.
//!
//! Each row's sums have one order, whatever the other rows are; but it is not that of [`crate::linear::product`].

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(clippy::wildcard_imports, reason = "the intrinsics carry their origin in their names")]

use std::arch::x86_64::*;

use crate::{
    attention::TokenRows,
    element::Element,
    linear::panel::{Bf16, F16, F32, Int8, PANEL_VECTORS, Weights},
    lines::Lines,
    packed::{LinearError, PackedLinear, WeightKind},
    simd::{
        Simd,
        amx::{self, TILE, TILE_INPUTS, TILE_ROWS, Tiles},
        avx512::Avx512,
    },
    threads::Threads,
};

/// Rows that are summed in registers at once.
pub(crate) const PAIR_ROWS: usize = 2 * TILE_ROWS;
/// Bytes by which weights that are used once are prefetched ahead of their use.
const AHEAD: usize = 8192;
/// Activations below which no helper is woken to arrange them.
const MIN_SHARED_ROWS: usize = 1 << 16;

/// Outputs of a panel.
const OUTPUTS: usize = PANEL_VECTORS * 16;
/// Steps of [`TILE_INPUTS`] inputs whose weights are split at once: they stay in the nearest cache while all rows meet them. With
/// four, what rows bring along pushes them out before they are written anew.
const STEPS: usize = 2;
/// Numbers of 16 bits that a step's split weights take at most.
const STEP: usize = TERMS * PANEL_VECTORS * TILE;
/// Numbers of 16 bits that are the sum of one of 32.
const TERMS: usize = 3;

/// A thread's room for split weights: `[step][term][half of the outputs][pair of inputs][output][input]`.
#[repr(C, align(64))]
pub(crate) struct SplitWeights([u16; STEPS * STEP]);

impl SplitWeights {
    pub(crate) const ZERO: Self = Self([0; STEPS * STEP]);
}

/// What one call computes: some rows times one panel.
struct TiledProduct<'a> {
    /// `[step][block][term][row][input]`: see [`arrange_row`].
    a: *const u16,
    /// Blocks of [`TILE_ROWS`] rows in `a`, and which of them are computed.
    num_blocks: usize,
    blocks: std::ops::Range<usize>,
    /// Rows of a block: fewer than [`TILE_ROWS`] where there is but one.
    block_rows: usize,
    num_k: usize,
    /// The panel's weights, `[k][output]`.
    b: *const u8,
    /// Scales that differ from group to group, `[group][output]`; null: none, or one that is applied to the sums.
    scales: *const f32,
    group_size: usize,
    /// Sums, `[row][output]`, from the first row of `blocks` on; room for whole blocks.
    c: *mut f32,
    split: &'a mut SplitWeights,
}

/// A compiled form of [`product`].
type TiledFn = unsafe fn(&mut TiledProduct<'_>);

/// The sums of the rows, with `A` terms to an activation and `B` to a weight.
///
/// # Safety
///
/// The arrays are as [`TiledProduct`] says, and [`amx::is_available`].
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn product<W: Weights, const A: usize, const B: usize>(what: &mut TiledProduct<'_>) {
    let num_steps = what.num_k.div_ceil(TILE_INPUTS);
    let split = what.split.0.as_mut_ptr();
    // SAFETY: the caller gives arrays as `TiledProduct` says, so every offset stays within them; no other code of this
    // thread uses tiles meanwhile.
    unsafe {
        let _tiles = Tiles::new(what.block_rows);
        if what.blocks.len() <= 2 {
            // The sums stay in their registers; a step's weights are split while the one before it is multiplied.
            let is_pair = what.blocks.len() == 2;
            zero_sums(is_pair);
            split_step::<W, B, true>(what, 0, split);
            for step in 0..num_steps {
                if step + 1 < num_steps {
                    split_step::<W, B, true>(what, step + 1, split.add((step + 1) % STEPS * STEP));
                }
                multiply::<A, B>(what, what.blocks.start, is_pair, step, split.add(step % STEPS * STEP));
            }
            store_sums(what.c, is_pair);
            return;
        }
        let num_pairs = what.blocks.len().div_ceil(2);
        let bytes = OUTPUTS * W::BYTES;
        for first in (0..num_steps).step_by(STEPS) {
            let steps = first..num_steps.min(first + STEPS);
            for step in steps.clone() {
                split_step::<W, B, false>(what, step, split.add(step % STEPS * STEP));
            }
            // The next steps' weights, shared out among what is multiplied meanwhile.
            let mut ahead = what.b.wrapping_add(steps.end * TILE_INPUTS * bytes);
            let lines = (STEPS * TILE_INPUTS * bytes / 64).div_ceil(num_pairs * STEPS);
            for pair in 0..num_pairs {
                let block = what.blocks.start + 2 * pair;
                let is_pair = block + 1 < what.blocks.end;
                let c = what.c.add(2 * pair * TILE_ROWS * OUTPUTS);
                if first == 0 {
                    zero_sums(is_pair);
                } else {
                    load_sums(c, is_pair);
                }
                for step in steps.clone() {
                    for _ in 0..lines {
                        Avx512::prefetch(ahead);
                        ahead = ahead.wrapping_add(64);
                    }
                    multiply::<A, B>(what, block, is_pair, step, split.add(step % STEPS * STEP));
                }
                store_sums(c, is_pair);
            }
        }
    }
}

/// Split the weights of one step into terms, two inputs of an output side by side, and ask for later ones if it `ASKS`.
///
/// # Safety
///
/// As [`product`]; `to` has room for a step.
#[inline(always)]
unsafe fn split_step<W: Weights, const B: usize, const ASKS: bool>(
    what: &TiledProduct<'_>,
    step: usize,
    to: *mut u16,
) {
    let bytes = OUTPUTS * W::BYTES;
    let first = step * TILE_INPUTS;
    // SAFETY: `to` has room for a step, by the contract of this function; inputs beyond the last are zeros.
    unsafe {
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        for pair in 0..TILE_ROWS {
            let k = first + 2 * pair;
            let mut even = load::<W>(what, k);
            let mut odd = load::<W>(what, k + 1);
            if ASKS {
                let from = what.b.wrapping_add(k * bytes + AHEAD);
                let mut line = 0;
                while line < 2 * bytes {
                    Avx512::prefetch(from.wrapping_add(line));
                    line += 64;
                }
            }
            for half in 0..PANEL_VECTORS {
                for term in 0..B {
                    let (x, y) = (_mm512_castps_si512(even[half]), _mm512_castps_si512(odd[half]));
                    // (x >> 16) | (y & upper)
                    let both = _mm512_ternarylogic_epi32::<0xf8>(_mm512_srli_epi32::<16>(x), y, upper);
                    let at = to.add((term * PANEL_VECTORS + half) * TILE + pair * TILE_INPUTS);
                    _mm512_storeu_si512(at.cast(), both);
                    if term + 1 < B {
                        let rest = |v: __m512, bits: __m512i| {
                            _mm512_sub_ps(v, _mm512_castsi512_ps(_mm512_and_si512(bits, upper)))
                        };
                        even[half] = rest(even[half], x);
                        odd[half] = rest(odd[half], y);
                    }
                }
            }
        }
    }
}

/// The weights of one input, scaled where groups have scales of their own.
///
/// # Safety
///
/// As [`product`].
#[inline(always)]
unsafe fn load<W: Weights>(what: &TiledProduct<'_>, k: usize) -> [__m512; PANEL_VECTORS] {
    // SAFETY: the arrays are as `TiledProduct` says, by the contract of this function, and `k` is compared with their end
    // first.
    unsafe {
        if k >= what.num_k {
            return [_mm512_setzero_ps(); PANEL_VECTORS];
        }
        let mut weights = W::load::<Avx512>(what.b.add(k * OUTPUTS * W::BYTES));
        if W::SCALED && !what.scales.is_null() {
            let scales = what.scales.add(k / what.group_size * OUTPUTS);
            for (half, weight) in weights.iter_mut().enumerate() {
                *weight = _mm512_mul_ps(*weight, _mm512_loadu_ps(scales.add(16 * half)));
            }
        }
        weights
    }
}

/// Multiply one or two blocks of rows with a step's weights.
///
/// # Safety
///
/// As [`product`]; `b` is the split step.
#[inline(always)]
unsafe fn multiply<const A: usize, const B: usize>(
    what: &TiledProduct<'_>,
    block: usize,
    is_pair: bool,
    step: usize,
    b: *const u16,
) {
    // SAFETY: the arrays are as `TiledProduct` says and `b` is a whole split step, by the contract of this function; a
    // `Tiles` lives.
    unsafe {
        let a = what.a.add((step * what.num_blocks + block) * A * TILE);
        let rows = |term: usize| {
            amx::load_first_rows(a.add(term * TILE));
            if is_pair {
                amx::load_second_rows(a.add((A + term) * TILE));
            }
        };
        let outputs = |term: usize| {
            amx::load_first_outputs(b.add(term * PANEL_VECTORS * TILE));
            amx::load_second_outputs(b.add((term * PANEL_VECTORS + 1) * TILE));
        };
        let add = || {
            amx::multiply_0();
            amx::multiply_1();
            if is_pair {
                amx::multiply_2();
                amx::multiply_3();
            }
        };
        // Terms whose places add up to less than three; what is in a register already stays there.
        rows(0);
        for term in (0..B).rev() {
            outputs(term);
            add();
        }
        if A > 1 {
            rows(1);
            add();
            if B > 1 {
                outputs(1);
                add();
            }
            rows(2);
            if B > 1 {
                outputs(0);
            }
            add();
        }
    }
}

/// # Safety
///
/// A [`Tiles`] lives.
#[inline(always)]
unsafe fn zero_sums(is_pair: bool) {
    // SAFETY: the caller keeps a `Tiles` alive, so the registers are configured.
    unsafe {
        amx::zero_0();
        amx::zero_1();
        if is_pair {
            amx::zero_2();
            amx::zero_3();
        }
    }
}

/// # Safety
///
/// A [`Tiles`] lives; `c` has room for the blocks.
#[inline(always)]
unsafe fn load_sums(c: *const f32, is_pair: bool) {
    const STRIDE: usize = OUTPUTS * 4;
    // SAFETY: the caller keeps a `Tiles` alive and gives a `c` with room for the blocks.
    unsafe {
        amx::load_0(c, STRIDE);
        amx::load_1(c.add(16), STRIDE);
        if is_pair {
            amx::load_2(c.add(TILE_ROWS * OUTPUTS), STRIDE);
            amx::load_3(c.add(TILE_ROWS * OUTPUTS + 16), STRIDE);
        }
    }
}

/// # Safety
///
/// A [`Tiles`] lives; `c` has room for the blocks.
#[inline(always)]
unsafe fn store_sums(c: *mut f32, is_pair: bool) {
    const STRIDE: usize = OUTPUTS * 4;
    // SAFETY: the caller keeps a `Tiles` alive and gives a `c` with room for the blocks.
    unsafe {
        amx::store_0(c, STRIDE);
        amx::store_1(c.add(16), STRIDE);
        if is_pair {
            amx::store_2(c.add(TILE_ROWS * OUTPUTS), STRIDE);
            amx::store_3(c.add(TILE_ROWS * OUTPUTS + 16), STRIDE);
        }
    }
}

/// Multiply sums by the scales of their outputs.
///
/// # Safety
///
/// `c` has `num_rows` rows of a panel's outputs, `scales` has one for each output; the machine has AVX-512.
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn scale_sums(c: *mut f32, num_rows: usize, scales: *const f32) {
    // SAFETY: `c` has `num_rows` rows of a panel's outputs and `scales` one for each output, by the contract of this
    // function.
    unsafe {
        for half in 0..PANEL_VECTORS {
            let scale = _mm512_loadu_ps(scales.add(16 * half));
            for row in 0..num_rows {
                let at = c.add(row * OUTPUTS + 16 * half);
                _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), scale));
            }
        }
    }
}

/// Split one step of a row into `A` terms, each into its tile; `to` is the row's place in the first.
///
/// # Safety
///
/// `count` activations may be read, at most [`TILE_INPUTS`]; the rest of the step are zeros. The machine has AVX-512.
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn arrange_row<X: Element, const A: usize>(from: *const X, count: usize, to: *mut u16) {
    // SAFETY: `count` activations may be read, by the contract of this function; a step that is not full goes through a
    // place that has room for it.
    unsafe {
        let mut room = [X::narrow(0.0); TILE_INPUTS];
        let mut start = from;
        if count < TILE_INPUTS {
            room.as_mut_ptr().copy_from_nonoverlapping(from, count);
            start = room.as_ptr();
        }
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        for half in 0..2 {
            let mut x = X::load::<Avx512>(start.add(16 * half));
            for term in 0..A {
                let bits = _mm512_castps_si512(x);
                let short = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(bits));
                _mm256_storeu_si256(to.add(term * TILE + 16 * half).cast(), short);
                x = _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(bits, upper)));
            }
        }
    }
}

/// Rows in tiles: `[step][block][term][row][input]`.
#[derive(Clone, Copy)]
pub(crate) struct Arranged {
    start: *const u16,
    /// Of each number: one for those of 16 bits.
    num_terms: usize,
    num_blocks: usize,
    block_rows: usize,
}

/// Put rows into tiles.
///
/// # Errors
///
/// No memory.
pub(crate) fn arrange<X: Element>(
    x: &TokenRows<'_, X>,
    num_rows: usize,
    row: usize,
    threads: &Threads,
    room: &mut Option<Lines>,
) -> Result<Arranged, LinearError> {
    debug_assert!(amx::is_available());
    let num_terms = if size_of::<X>() == 2 { 1 } else { TERMS };
    let (num_steps, num_blocks) = (row.div_ceil(TILE_INPUTS), num_rows.div_ceil(TILE_ROWS));
    let num_bytes = num_steps * num_blocks * num_terms * TILE * 2;
    let memory = LinearError::Memory { num_bytes, out_features: num_rows, in_features: row };
    let start = Lines::at_least(num_bytes, room).ok_or(memory)?.as_mut_slice::<u16>().as_mut_ptr();
    let target = Target(start);
    threads.for_each(num_steps, num_rows * row >= MIN_SHARED_ROWS, |step| {
        let first = step * TILE_INPUTS;
        let count = TILE_INPUTS.min(row - first);
        for i in 0..num_rows {
            let from = x.data[i * x.stride..][first..first + count].as_ptr();
            let tile = (step * num_blocks + i / TILE_ROWS) * num_terms * TILE;
            let to = target.at(tile + i % TILE_ROWS * TILE_INPUTS);
            // SAFETY: as many numbers are there; the row's places in its tiles belong to this part alone; a machine with a
            // matrix unit has AVX-512.
            unsafe {
                if num_terms == 1 {
                    arrange_row::<X, 1>(from, count, to);
                } else {
                    arrange_row::<X, TERMS>(from, count, to);
                }
            }
        }
    });
    Ok(Arranged { start: start.cast_const(), num_terms, num_blocks, block_rows: num_rows.min(TILE_ROWS) })
}

/// Memory that parts write at different places.
struct Target(*mut u16);

// SAFETY: the parts see to it, see `arrange`.
unsafe impl Sync for Target {}

impl Target {
    fn at(&self, offset: usize) -> *mut u16 {
        self.0.wrapping_add(offset)
    }
}

/// Sums of some rows with one panel, `[row][output]`.
///
/// # Safety
///
/// [`amx::is_available`], and the layer is packed for AVX-512; the rows are in `a`, and begin with a pair of blocks; `sums` has
/// room for whole blocks.
pub(crate) unsafe fn sum(
    layer: &PackedLinear,
    panel: usize,
    a: &Arranged,
    first_row: usize,
    num_rows: usize,
    sums: *mut f32,
    split: &mut SplitWeights,
) {
    let scales = layer.panel_scales(panel);
    let is_exact = a.num_terms == 1;
    let (form, group_scales): (TiledFn, _) = match layer.kind {
        WeightKind::F32 if is_exact => (product::<F32, 1, TERMS>, std::ptr::null()),
        WeightKind::F32 => (product::<F32, TERMS, TERMS>, std::ptr::null()),
        WeightKind::F16 if is_exact => (product::<F16, 1, TERMS>, std::ptr::null()),
        WeightKind::F16 => (product::<F16, TERMS, TERMS>, std::ptr::null()),
        WeightKind::Bf16 if is_exact => (product::<Bf16, 1, 1>, std::ptr::null()),
        WeightKind::Bf16 => (product::<Bf16, TERMS, 1>, std::ptr::null()),
        WeightKind::Int8 { .. } if layer.num_groups() > 1 => {
            (if is_exact { product::<Int8, 1, TERMS> } else { product::<Int8, TERMS, TERMS> }, scales)
        }
        WeightKind::Int8 { .. } if is_exact => (product::<Int8, 1, 1>, std::ptr::null()),
        WeightKind::Int8 { .. } => (product::<Int8, TERMS, 1>, std::ptr::null()),
        WeightKind::W8A8 { .. } | WeightKind::Quantized(_) => unreachable!("`set_matrix_rows` refuses them"),
    };
    let mut what = TiledProduct {
        a: a.start,
        num_blocks: a.num_blocks,
        blocks: first_row / TILE_ROWS..(first_row + num_rows).div_ceil(TILE_ROWS),
        block_rows: a.block_rows,
        num_k: layer.in_features,
        b: layer.panel_weights(panel),
        scales: group_scales,
        group_size: layer.group_size(),
        c: sums,
        split,
    };
    // SAFETY: the caller found the unit available and gives rows that `a` and `sums` hold, in whole pairs of blocks.
    unsafe {
        form(&mut what);
        if matches!(layer.kind, WeightKind::Int8 { .. }) && layer.num_groups() == 1 {
            scale_sums(sums, num_rows, scales);
        }
    }
}
