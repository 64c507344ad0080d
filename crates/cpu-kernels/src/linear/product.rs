//! The product kernel: a few rows of activations times one panel of packed weights, summed in registers.
//!
//! The inputs are cut into pieces: a chunk each, and with scales a group within a chunk. A piece's sum begins at 0 and takes
//! one product after the other, by one fused multiply-add each, and then is scaled and added to the total of those before;
//! short sums also lose less than one long one. How many rows are computed together changes no bit of that. What a call is
//! given, and how weights lie, is in [`crate::linear::panel`].

#![allow(clippy::inline_always, reason = "see `simd`")]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over registers, of which several arrays are indexed alike"
)]

use crate::{
    linear::{
        panel::{
            Bf16, CHUNK, F16, F32, Int8, PANEL_VECTORS, Product, Weights, WideInt8, ask, ask_near, multiply,
        },
        streams,
    },
    simd::{
        Simd,
        memory::{self, SECOND_ASK, WAITING_ROWS},
    },
};

/// A compiled form of [`product`] for a number of rows.
pub(crate) type ProductFn<A = f32> = unsafe fn(&Product<A>);
/// Turns weights (second argument: how many steps of k) into `f32` panels of the same order.
pub(crate) type WidenFn = unsafe fn(*const u8, usize, *mut f32);

/// The sums of `R` rows.
///
/// # Safety
///
/// The arrays are as [`Product`] says, with `R` rows; the machine has the instructions of `S`.
#[inline(always)]
unsafe fn product<S: Simd, W: Weights, const R: usize>(what: &Product) {
    let outputs = PANEL_VECTORS * S::LANES;
    let step = outputs * W::BYTES;
    // SAFETY: the caller gives arrays as `Product` says, with `R` rows, so every offset below stays within them.
    unsafe {
        let (mut a, mut b, mut ahead) = (what.a, what.b, what.ahead);
        let (mut k, end) = (what.first_k, what.first_k + what.num_k);
        // One tile, as its step ahead says: these weights are read once, and with few rows reading them is what takes the time.
        let is_alone = what.ahead_step == step;
        let asks_twice = R > WAITING_ROWS && is_alone && memory::is_one_stream();
        if !W::SCALED && R <= S::STREAM_ROWS && k == 0 && is_alone && !memory::is_one_stream() {
            let num_chunks = streams::sum_chunks::<S, W, R>(what);
            k = num_chunks * CHUNK;
            a = a.wrapping_add(num_chunks * what.chunk_stride);
            b = b.wrapping_add(k * step);
            ahead = ahead.wrapping_add(k * step);
        }
        while k < end {
            // A piece: inputs of one chunk, and of one group.
            let chunk_end = k - k % CHUNK + CHUNK;
            let mut piece_end = end.min(chunk_end);
            if W::SCALED {
                piece_end = piece_end.min(k - k % what.group_size + what.group_size);
            }
            let mut sums = [[S::splat(0.0); PANEL_VECTORS]; R];
            let (mut i, piece) = (k % CHUNK, k % CHUNK + (piece_end - k));
            let next_a = if chunk_end < end { a.wrapping_add(what.chunk_stride) } else { what.next_a };
            // Where tiles share out what is asked for, what one input asks for covers two: every other one asks.
            while 2 * what.ahead_step <= step && i + 2 <= piece {
                ask::<S>(ahead, step);
                S::prefetch_near(next_a.wrapping_add(i * R).cast());
                multiply::<S, W, R>(a.add(i), b, &mut sums);
                multiply::<S, W, R>(a.add(i + 1), b.add(step), &mut sums);
                b = b.add(2 * step);
                ahead = ahead.wrapping_add(2 * what.ahead_step);
                i += 2;
            }
            while i < piece {
                if asks_twice {
                    ask::<S>(ahead, step);
                    ask_near::<S>(b.wrapping_add(SECOND_ASK), step);
                } else {
                    ask_near::<S>(ahead, step);
                }
                multiply::<S, W, R>(a.add(i), b, &mut sums);
                b = b.add(step);
                ahead = ahead.wrapping_add(what.ahead_step);
                i += 1;
            }
            for r in 0..R {
                for n in 0..PANEL_VECTORS {
                    let to = what.c.add(r * outputs + n * S::LANES);
                    let before = if k == 0 { S::splat(0.0) } else { S::load(to) };
                    let total = if W::SCALED {
                        let scales = what.scales.add(k / what.group_size * outputs);
                        S::fma(sums[r][n], S::load(scales.add(n * S::LANES)), before)
                    } else {
                        S::add(sums[r][n], before)
                    };
                    S::store(to, total);
                }
            }
            k = piece_end;
            if k == chunk_end {
                a = a.wrapping_add(what.chunk_stride);
            }
        }
    }
}

/// `num_k` steps of a panel as `f32`: exact, so that sums of them have the same bits.
///
/// # Safety
///
/// As many weights may be read and written; the machine has the instructions of `S`.
#[inline(always)]
unsafe fn widen<S: Simd, W: Weights>(from: *const u8, num_k: usize, to: *mut f32) {
    let outputs = PANEL_VECTORS * S::LANES;
    for k in 0..num_k {
        // SAFETY: the caller lets `num_k` panels of weights be read at `from` and as many numbers be written at `to`.
        unsafe {
            let weights = W::load::<S>(from.add(k * outputs * W::BYTES));
            for n in 0..PANEL_VECTORS {
                S::store(to.add(k * outputs + n * S::LANES), weights[n]);
            }
        }
    }
}

/// The forms of [`product`] for each kind of weights: entry `r − 1` takes `r` rows.
#[derive(Debug)]
pub(crate) struct Products {
    pub(crate) f32: &'static [ProductFn],
    pub(crate) bf16: &'static [ProductFn],
    pub(crate) f16: &'static [ProductFn],
    pub(crate) int8: &'static [ProductFn],
    pub(crate) wide_int8: &'static [ProductFn],
    pub(crate) widen_bf16: WidenFn,
    pub(crate) widen_f16: WidenFn,
    pub(crate) widen_int8: WidenFn,
}

/// Entry points: the one place where a product gets its instruction set.
macro_rules! products {
    ($name:ident, $module:ident, $simd:ty, [$($rows:literal)*] $(, $features:literal)?) => {
        mod $module {
            use super::*;
            /// # Safety
            ///
            /// See [`product`].
            $(#[target_feature(enable = $features)])?
            unsafe fn rows<W: Weights, const R: usize>(what: &Product) {
                // SAFETY: the caller gives arrays as `Product` says; a set of products is reached only where its
                // instructions were found.
                unsafe { product::<$simd, W, R>(what) }
            }
            /// # Safety
            ///
            /// See [`widen`].
            $(#[target_feature(enable = $features)])?
            unsafe fn wide<W: Weights>(from: *const u8, num_k: usize, to: *mut f32) {
                // SAFETY: the caller lets as many weights be read and written; a set of products is reached only where
                // its instructions were found.
                unsafe { widen::<$simd, W>(from, num_k, to) }
            }
            pub(super) static FORMS: Products = Products {
                f32: &[$(rows::<F32, $rows>),*],
                bf16: &[$(rows::<Bf16, $rows>),*],
                f16: &[$(rows::<F16, $rows>),*],
                int8: &[$(rows::<Int8, $rows>),*],
                wide_int8: &[$(rows::<WideInt8, $rows>),*],
                widen_bf16: wide::<Bf16>,
                widen_f16: wide::<F16>,
                widen_int8: wide::<Int8>,
            };
        }
        pub(crate) static $name: &Products = &$module::FORMS;
    };
}

#[cfg(target_arch = "x86_64")]
products!(AVX512, avx512, crate::simd::avx512::Avx512, [1 2 3 4 5 6 7 8 9 10 11 12 13 14], "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
products!(AVX2, avx2, crate::simd::avx2::Avx2, [1 2 3 4 5 6], "avx2,fma,f16c");
products!(PORTABLE, portable, crate::simd::portable::Portable<8>, [1 2 3 4]);
products!(SCALAR, scalar, crate::simd::portable::Portable<1>, [1 2]);
