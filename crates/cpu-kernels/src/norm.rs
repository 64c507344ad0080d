//! Layer norm and RMS norm of rows, with the residual added before: the checks of a call, and its parts.

pub(crate) mod row;

use std::cell::RefCell;

use crate::{
    attention::TokenRows,
    element::Element,
    kernel::Kernel,
    linear::OutRows,
    norm::row::{MAX_LANES, Norm, NormRows},
    packed::{LinearError, check_rows},
    threads::Threads,
};

/// Elements below which no helper is woken.
const MIN_SHARED_ELEMENTS: usize = 1 << 15;

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
    let row = check(norm, &x, num_rows, &out)?;
    let OutRows { data: out, stride: out_stride } = out;
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
        adds: false,
        norm,
    };
    compute(&rows, num_rows, kernel, threads);
    Ok(())
}

/// `stream += norm(x)`; the normed row is rounded to its type before it is added, as if it had been written by itself.
///
/// # Errors
///
/// Arrays that do not fit; nothing is written then.
pub fn add_norm<E: Element>(
    norm: &Norm<'_>,
    x: TokenRows<'_, E>,
    num_rows: usize,
    kernel: &Kernel,
    threads: &Threads,
    stream: OutRows<'_, E>,
) -> Result<(), LinearError> {
    check(norm, &x, num_rows, &stream)?;
    let OutRows { data: out, stride: out_stride } = stream;
    let rows = NormRows {
        x: x.data.as_ptr(),
        x_stride: x.stride,
        residual: std::ptr::null(),
        residual_stride: 0,
        sum_out: std::ptr::null_mut(),
        sum_out_stride: 0,
        out: out.as_mut_ptr(),
        out_stride,
        adds: true,
        norm,
    };
    compute(&rows, num_rows, kernel, threads);
    Ok(())
}

/// Features of a row, if the arrays have so many.
fn check<E>(
    norm: &Norm<'_>,
    x: &TokenRows<'_, E>,
    num_rows: usize,
    out: &OutRows<'_, E>,
) -> Result<usize, LinearError> {
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
    check_rows("out", out.data.len(), out.stride, num_rows, row)?;
    Ok(row)
}

/// Norm rows that were checked to lie in their arrays.
fn compute<E: Element>(rows: &NormRows<'_, E>, num_rows: usize, kernel: &Kernel, threads: &Threads) {
    let row = rows.norm.weight.len();
    // Some rows at a time: handing out one costs as much as norming it.
    let together = (MIN_SHARED_ELEMENTS / 4 / row).max(1);
    let norm_row = E::norm_of(kernel);
    let is_shared = num_rows.saturating_mul(row) >= MIN_SHARED_ELEMENTS;
    threads.for_each(num_rows.div_ceil(together), is_shared, |part| {
        SCRATCH.with_borrow_mut(|scratch| {
            // Up to a whole vector.
            scratch.resize(row.next_multiple_of(MAX_LANES), 0.0);
            for i in part * together..num_rows.min((part + 1) * together) {
                // SAFETY: a kernel is only reachable where it was detected; the rows lie in their arrays, as was checked,
                // and each is one part's alone.
                unsafe { norm_row(rows, i, scratch.as_mut_ptr()) };
            }
        });
    });
}

thread_local! {
    /// A row as 32 bits.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}
