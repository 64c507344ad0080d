//! Weights as they are given: a matrix somewhere in memory, of numbers of 32 or 16 bits.

use half::{bf16, f16};

use super::error::LinearError;

/// A matrix somewhere in memory.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a, T> {
    start: *const T,
    pub(super) num_rows: usize,
    pub(super) num_columns: usize,
    row_stride: isize,
    column_stride: isize,
    memory: std::marker::PhantomData<&'a [T]>,
}

// SAFETY: it is only read.
unsafe impl<T: Sync> Sync for Matrix<'_, T> {}
// SAFETY: it is only read, so a thread that has it needs of `T` what one that shares it needs.
unsafe impl<T: Sync> Send for Matrix<'_, T> {}

impl<'a, T: Copy> Matrix<'a, T> {
    /// Rows side by side.
    ///
    /// # Errors
    ///
    /// Not as many elements.
    pub fn new(data: &'a [T], num_rows: usize, num_columns: usize) -> Result<Self, LinearError> {
        if num_rows.checked_mul(num_columns) != Some(data.len()) {
            let expected = num_rows.saturating_mul(num_columns);
            return Err(LinearError::Length { name: "the matrix", found: data.len(), expected });
        }
        // SAFETY: the slice has all of them.
        Ok(unsafe { Self::from_raw(data.as_ptr(), num_rows, num_columns, num_columns as isize, 1) })
    }

    /// Element (i, j) lies `i · row_stride + j · column_stride` elements from `start`.
    ///
    /// # Safety
    ///
    /// All of them may be read while the matrix lives, and no thread writes them.
    #[must_use]
    pub unsafe fn from_raw(
        start: *const T,
        num_rows: usize,
        num_columns: usize,
        row_stride: isize,
        column_stride: isize,
    ) -> Self {
        let memory = std::marker::PhantomData;
        Self { start, num_rows, num_columns, row_stride, column_stride, memory }
    }

    pub(super) fn get(&self, row: usize, column: usize) -> T {
        debug_assert!(row < self.num_rows && column < self.num_columns);
        // SAFETY: the promise of `from_raw`.
        unsafe { *self.start.offset(row as isize * self.row_stride + column as isize * self.column_stride) }
    }

    /// Elements of a row, if those lie side by side.
    pub(super) fn run(&self, row: usize, columns: std::ops::Range<usize>) -> Option<&[T]> {
        debug_assert!(row < self.num_rows && columns.end <= self.num_columns);
        let start = row as isize * self.row_stride + columns.start as isize;
        // SAFETY: the promise of `from_raw`.
        let run = || unsafe { std::slice::from_raw_parts(self.start.offset(start), columns.len()) };
        (self.column_stride == 1).then(run)
    }
}

/// What a weight is given as.
pub trait WeightElement: Copy + Send + Sync {
    /// The number as 32 bits, exactly.
    fn widen(self) -> f32;

    /// The nearest number of bfloat16, as its bits.
    fn narrow(self) -> u16;

    /// The nearest number of IEEE's 16 bits, as its bits.
    fn half(self) -> u16;
}

impl WeightElement for f32 {
    fn widen(self) -> f32 {
        self
    }

    fn narrow(self) -> u16 {
        bf16::from_f32(self).to_bits()
    }

    fn half(self) -> u16 {
        f16::from_f32(self).to_bits()
    }
}

impl WeightElement for bf16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn narrow(self) -> u16 {
        self.to_bits()
    }

    fn half(self) -> u16 {
        f16::from_f32(self.to_f32()).to_bits()
    }
}

impl WeightElement for f16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn narrow(self) -> u16 {
        bf16::from_f32(self.to_f32()).to_bits()
    }

    fn half(self) -> u16 {
        self.to_bits()
    }
}
