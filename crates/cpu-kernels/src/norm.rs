//! Layer norm and RMS norm of rows, with the residual added before.
//!
//! Each row is summed by itself and in one order, so its bits depend on nothing else. Sums are of 32 bits, over the lanes of
//! the kernel first; the variance is that of the differences from the mean.

#![allow(clippy::inline_always, reason = "see `simd`")]

use std::cell::RefCell;

use half::bf16;

use crate::{
    attention::TokenRows,
    element::Element,
    kernel::Kernel,
    linear::{OutRows, check_rows},
    packed::LinearError,
    simd::Simd,
    threads::Threads,
};

/// Elements below which nobody is woken.
const MIN_SHARED_ELEMENTS: usize = 1 << 15;

/// What rows are divided by, and whether their mean is taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// Less the mean, over the standard deviation.
    Layer,
    /// Over the root of the mean square.
    Rms,
}

/// The numbers of a norm.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// Which.
    pub kind: NormKind,
    /// A factor per feature.
    pub weight: &'a [f32],
    /// Added per feature, or nothing.
    pub bias: Option<&'a [f32]>,
    /// Added to the variance or the mean square.
    pub eps: f32,
}

/// What is added to the rows before, and where their sum goes.
#[derive(Debug)]
pub enum Sum<'a, E> {
    /// Nothing is added.
    None,
    /// Rows to add; the sum is kept nowhere else.
    Add(TokenRows<'a, E>),
    /// Rows to add; the sum goes to other rows.
    AddTo(TokenRows<'a, E>, OutRows<'a, E>),
    /// Rows to add, which become the sum.
    Into(OutRows<'a, E>),
}

/// `out = norm(x + residual)`; the sum is rounded to its type before it is normed, as if it had been added by itself.
///
/// # Errors
///
/// Arrays that do not fit; nothing is written then.
pub fn norm<E: Element>(
    norm: &Norm<'_>,
    x: TokenRows<'_, E>,
    num_rows: usize,
    sum: Sum<'_, E>,
    kernel: &Kernel,
    threads: &Threads,
    out: OutRows<'_, E>,
) -> Result<(), LinearError> {
    let row = norm.weight.len();
    if row == 0 {
        return Err(LinearError::Size { name: "the length of weight", value: 0, most: isize::MAX as usize });
    }
    if let Some(bias) = norm.bias
        && bias.len() != row
    {
        return Err(LinearError::Length { name: "bias", found: bias.len(), expected: row });
    }
    check_rows("x", x.data.len(), x.stride, num_rows, row)?;
    let OutRows { data: out, stride: out_stride } = out;
    check_rows("out", out.len(), out_stride, num_rows, row)?;
    let (residual, residual_stride, sum_out, sum_out_stride) = match sum {
        Sum::None => (std::ptr::null(), 0, std::ptr::null_mut(), 0),
        Sum::Add(rows) => {
            check_rows("residual", rows.data.len(), rows.stride, num_rows, row)?;
            (rows.data.as_ptr(), rows.stride, std::ptr::null_mut(), 0)
        }
        Sum::AddTo(rows, to) => {
            check_rows("residual", rows.data.len(), rows.stride, num_rows, row)?;
            check_rows("sum_out", to.data.len(), to.stride, num_rows, row)?;
            (rows.data.as_ptr(), rows.stride, to.data.as_mut_ptr(), to.stride)
        }
        Sum::Into(rows) => {
            check_rows("residual", rows.data.len(), rows.stride, num_rows, row)?;
            let start = rows.data.as_mut_ptr();
            (start.cast_const(), rows.stride, start, rows.stride)
        }
    };
    let rows = NormRows {
        x: x.data.as_ptr(),
        x_stride: x.stride,
        residual,
        residual_stride,
        sum_out,
        sum_out_stride,
        out: out.as_mut_ptr(),
        out_stride,
        norm,
    };
    // Some rows at a time: handing out one costs as much as norming it.
    let together = (MIN_SHARED_ELEMENTS / 4 / row).max(1);
    let compute = E::norm_of(kernel);
    let is_shared = num_rows.saturating_mul(row) >= MIN_SHARED_ELEMENTS;
    threads.for_each(num_rows.div_ceil(together), is_shared, |part| {
        SCRATCH.with_borrow_mut(|scratch| {
            // Up to a whole vector.
            scratch.resize(row.next_multiple_of(MAX_LANES), 0.0);
            for i in part * together..num_rows.min((part + 1) * together) {
                // SAFETY: a kernel is only reachable where it was detected; the rows lie in their arrays, as was checked,
                // and each is one part's alone.
                unsafe { compute(&rows, i, scratch.as_mut_ptr()) };
            }
        });
    });
    Ok(())
}

thread_local! {
    /// A row as 32 bits.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// All rows of a call. Pointers, because what is read and what is written may be the same place.
pub(crate) struct NormRows<'a, E> {
    x: *const E,
    x_stride: usize,
    /// Null: none.
    residual: *const E,
    residual_stride: usize,
    /// Null: none; may be the residual.
    sum_out: *mut E,
    sum_out_stride: usize,
    out: *mut E,
    out_stride: usize,
    norm: &'a Norm<'a>,
}

// SAFETY: parts write rows of their own and read no others.
unsafe impl<E: Element> Sync for NormRows<'_, E> {}

/// One compiled form of [`norm_row`].
pub(crate) type NormFn<E> = unsafe fn(&NormRows<'_, E>, usize, *mut f32);

/// Row `i`. `sums` has room for it, up to a whole vector.
///
/// # Safety
///
/// The row lies in all arrays, and nobody else touches it; the machine has the instructions of `S`.
#[inline(always)]
unsafe fn norm_row<S: Simd, E: Element>(rows: &NormRows<'_, E>, i: usize, sums: *mut f32) {
    let norm = rows.norm;
    let row = norm.weight.len();
    // SAFETY: the caller's promise; what is no whole vector goes through `Room`.
    unsafe {
        let x = rows.x.add(i * rows.x_stride);
        let mut total = S::splat(0.0);
        for at in (0..row).step_by(S::LANES) {
            let count = row - at;
            let mut value = load::<S, E>(x.add(at), count);
            if !rows.residual.is_null() {
                value = S::add(value, load::<S, E>(rows.residual.add(i * rows.residual_stride + at), count));
                value = rounded::<S, E>(value);
            }
            if !rows.sum_out.is_null() {
                store::<S, E>(rows.sum_out.add(i * rows.sum_out_stride + at), value, count);
            }
            S::store(sums.add(at), value);
            total = match norm.kind {
                NormKind::Layer => S::add(total, value),
                NormKind::Rms => S::fma(value, value, total),
            };
        }
        if norm.kind == NormKind::Layer {
            let mean = S::sum(total) / row as f32;
            total = S::splat(0.0);
            for at in (0..row).step_by(S::LANES) {
                S::store(sums.add(at), S::add(S::load(sums.add(at)), S::splat(-mean)));
                if row - at < S::LANES {
                    // What fills the last vector is no part of the row.
                    std::slice::from_raw_parts_mut(sums.add(row), at + S::LANES - row).fill(0.0);
                }
                let difference = S::load(sums.add(at));
                total = S::fma(difference, difference, total);
            }
        }
        let factor = S::splat(1.0 / (S::sum(total) / row as f32 + norm.eps).sqrt());
        for at in (0..row).step_by(S::LANES) {
            let count = row - at;
            let weight = load::<S, f32>(norm.weight.as_ptr().add(at), count);
            let mut value = S::mul(S::mul(S::load(sums.add(at)), factor), weight);
            if let Some(bias) = norm.bias {
                value = S::add(value, load::<S, f32>(bias.as_ptr().add(at), count));
            }
            store::<S, E>(rows.out.add(i * rows.out_stride + at), value, count);
        }
    }
}

/// The most lanes that any instruction set has.
const MAX_LANES: usize = 16;

/// A vector of which `count` elements, or all where they are more, are read; the others are 0.
///
/// # Safety
///
/// As many may be read; the machine has the instructions of `S`.
#[inline(always)]
unsafe fn load<S: Simd, E: Element>(from: *const E, count: usize) -> S::V {
    // SAFETY: the caller's promise; `room` has all lanes.
    unsafe {
        if count >= S::LANES {
            return E::load::<S>(from);
        }
        let mut room = [E::narrow(0.0); MAX_LANES];
        room.as_mut_ptr().copy_from_nonoverlapping(from, count);
        E::load::<S>(room.as_ptr())
    }
}

/// Write `count` elements, or all where they are more.
///
/// # Safety
///
/// As many may be written; the machine has the instructions of `S`.
#[inline(always)]
unsafe fn store<S: Simd, E: Element>(to: *mut E, x: S::V, count: usize) {
    // SAFETY: the caller's promise; `room` has all lanes.
    unsafe {
        if count >= S::LANES {
            return E::store::<S>(to, x);
        }
        let mut room = [E::narrow(0.0); MAX_LANES];
        E::store::<S>(room.as_mut_ptr(), x);
        to.copy_from_nonoverlapping(room.as_ptr(), count);
    }
}

/// What is left of `x` as an `E`.
///
/// # Safety
///
/// The machine has the instructions of `S`.
#[inline(always)]
unsafe fn rounded<S: Simd, E: Element>(x: S::V) -> S::V {
    let mut room = [E::narrow(0.0); MAX_LANES];
    // SAFETY: `room` has all lanes.
    unsafe {
        E::store::<S>(room.as_mut_ptr(), x);
        E::load::<S>(room.as_ptr())
    }
}

/// Entry points: the one place where it gets its instruction set.
macro_rules! entry_points {
    ($f32:ident, $bf16:ident, $simd:ty $(, $features:literal)?) => {
        /// # Safety
        ///
        /// See [`norm_row`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $f32(rows: &NormRows<'_, f32>, i: usize, sums: *mut f32) {
            const { assert!(<$simd>::LANES <= MAX_LANES) };
            // SAFETY: the caller's promise is passed on.
            unsafe { norm_row::<$simd, f32>(rows, i, sums) }
        }
        /// # Safety
        ///
        /// See [`norm_row`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $bf16(rows: &NormRows<'_, bf16>, i: usize, sums: *mut f32) {
            // SAFETY: the caller's promise is passed on.
            unsafe { norm_row::<$simd, bf16>(rows, i, sums) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
entry_points!(avx512_f32, avx512_bf16, crate::avx512::Avx512, "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
entry_points!(avx2_f32, avx2_bf16, crate::avx2::Avx2, "avx2,fma");
entry_points!(portable_f32, portable_bf16, crate::portable::Portable<8>);
entry_points!(scalar_f32, scalar_bf16, crate::portable::Portable<1>);
