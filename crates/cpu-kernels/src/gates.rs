//! The gates of an MLP: `activation(gate) · feature`, for rows that have their gates and then their features.
//!
//! gpt-oss changes the features, too: see [`Activation::ClampedSilu`].

pub(crate) mod row;

use crate::{element::Element, finish::Activation, kernel::Kernel, threads::Threads};

/// Features below which no helper is woken.
const MIN_SHARED_FEATURES: usize = 1 << 14;

/// Multiply each row's features by its gates; they take the gates' places.
///
/// `rows` has whole rows of `row` elements, of which the first half are gates.
///
/// # Panics
///
/// Rows of an odd length, or without any element.
pub fn apply_gates<E: Element>(
    rows: &mut [E],
    row: usize,
    activation: Activation,
    kernel: &Kernel,
    threads: &Threads,
) {
    assert!(row > 0 && row.is_multiple_of(2), "a row of {row} elements has no two halves");
    let (num_rows, is_shared) = (rows.len() / row, rows.len() / 2 >= MIN_SHARED_FEATURES);
    let start = Start(rows.as_mut_ptr());
    let gate = E::gate_of(kernel);
    threads.for_each(num_rows, is_shared, |i| {
        // SAFETY: a kernel is only reachable where it was detected; the row lies in `rows`, and is this part's alone.
        unsafe { gate(start.at(i * row), row / 2, activation) };
    });
}

/// The first row; parts write rows of their own.
struct Start<E>(*mut E);

// SAFETY: each part touches its own row, see `apply_gates`.
unsafe impl<E: Send> Sync for Start<E> {}

impl<E> Start<E> {
    fn at(&self, offset: usize) -> *mut E {
        self.0.wrapping_add(offset)
    }
}
