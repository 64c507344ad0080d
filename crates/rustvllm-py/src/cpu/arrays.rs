//! Arrays of Python that kernels read and write in place: their type, shape, layout and place are checked here.

use ::cpu_kernels::{Element, TokenRows};
use pyo3::{
    buffer::{self, PyBuffer},
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
};

use crate::scheduler::buffers::native_buffer;

/// Where an array lies: its first byte, the byte after its last.
pub(crate) type Place = (usize, usize);

/// Refuses arrays that share memory.
pub(crate) fn expect_all_apart(mut places: Vec<Place>, message: &str) -> PyResult<()> {
    places.retain(|(start, end)| start < end);
    places.sort_unstable();
    if places.windows(2).any(|pair| pair[0].1 > pair[1].0) {
        return Err(PyValueError::new_err(message.to_owned()));
    }
    Ok(())
}

pub(crate) fn dimensions(name: &str, found: usize) -> PyErr {
    PyValueError::new_err(format!("{name} has {found} dimensions, but it must have 2"))
}

pub(crate) fn view<T: buffer::Element>(name: &str, array: &Bound<'_, PyAny>) -> PyResult<PyBuffer<T>> {
    let view = native_buffer::<T>(array).map_err(|error| {
        PyTypeError::new_err(format!(
            "{name} must be an array of float32, or of bfloat16 seen as uint16: {error}"
        ))
    })?;
    expect_aligned(name, &view)?;
    Ok(view)
}

pub(crate) fn expect_aligned<T: buffer::Element>(name: &str, view: &PyBuffer<T>) -> PyResult<()> {
    if !(view.buf_ptr() as usize).is_multiple_of(size_of::<T>()) {
        return Err(PyValueError::new_err(format!("{name} is not aligned to its elements")));
    }
    Ok(())
}

/// A contiguous array of float32.
pub(crate) struct Vector(pub(crate) PyBuffer<f32>);

impl Vector {
    pub(crate) fn new(name: &'static str, array: &Bound<'_, PyAny>) -> PyResult<Self> {
        let view = native_buffer::<f32>(array)
            .map_err(|error| PyTypeError::new_err(format!("{name} must be an array of float32: {error}")))?;
        if view.dimensions() != 1 || !view.is_c_contiguous() {
            let message = format!("{name} must have 1 dimension and be contiguous");
            return Err(PyValueError::new_err(message));
        }
        expect_aligned(name, &view)?;
        Ok(Self(view))
    }

    pub(crate) fn as_slice(&self) -> &[f32] {
        if self.0.item_count() == 0 {
            return &[];
        }
        // SAFETY: the view keeps the memory of as many elements.
        unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast(), self.0.item_count()) }
    }

    /// # Safety
    ///
    /// The array is writable, and nothing else reads or writes it while the slice lives.
    #[expect(
        clippy::mut_from_ref,
        reason = "the memory is Python's; the caller's promise stands for the borrow"
    )]
    pub(crate) unsafe fn as_mut_slice(&self) -> &mut [f32] {
        if self.0.item_count() == 0 {
            return &mut [];
        }
        // SAFETY: the view keeps the memory of as many elements, and the caller lets no one else touch them while the
        // slice lives.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast(), self.0.item_count()) }
    }
}

/// A two-dimensional array of contiguous rows, with its name for messages.
pub(crate) struct Rows<T: buffer::Element> {
    name: &'static str,
    view: PyBuffer<T>,
    pub(crate) len: usize,
    width: usize,
    /// Elements from one row to the next.
    pub(crate) stride: usize,
}

impl<T: buffer::Element> Rows<T> {
    /// None: an array of another type.
    pub(crate) fn get(name: &'static str, array: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        native_buffer::<T>(array).ok().map(|view| Self::of(name, view)).transpose()
    }

    pub(crate) fn new(name: &'static str, array: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::of(name, view::<T>(name, array)?)
    }

    fn of(name: &'static str, view: PyBuffer<T>) -> PyResult<Self> {
        expect_aligned(name, &view)?;
        let &[num_rows, num_columns] = view.shape() else {
            return Err(dimensions(name, view.dimensions()));
        };
        let (size, strides) = (size_of::<T>() as isize, view.strides());
        // The stride of a dimension with fewer than two places says nothing.
        let is_contiguous = num_columns < 2 || strides[1] == size;
        let stride = if num_rows < 2 { num_columns as isize * size } else { strides[0] };
        if !is_contiguous || stride < num_columns as isize * size || stride % size != 0 {
            let message = format!(
                "{name} has the strides {strides:?}: its rows must be contiguous and follow each other without overlap"
            );
            return Err(PyValueError::new_err(message));
        }
        let stride = (stride / size) as usize;
        Ok(Self { name, view, len: num_rows, width: num_columns, stride })
    }

    /// Elements from the first to the last.
    pub(crate) fn extent(&self) -> usize {
        if self.view.item_count() == 0 { 0 } else { (self.len - 1) * self.stride + self.width }
    }

    pub(crate) fn token_rows<E: Element>(&self) -> TokenRows<'_, E> {
        // SAFETY: the view keeps the memory; the extent ends with its last element; `E` is as large as `T`, as is checked when
        // compiling, and takes all bits.
        let data = unsafe { std::slice::from_raw_parts(self.start::<E>(), self.extent()) };
        TokenRows { data, stride: self.stride }
    }

    /// # Safety
    ///
    /// The array is writable, and nothing else reads or writes it while the slice lives.
    #[expect(
        clippy::mut_from_ref,
        reason = "the memory is Python's; the caller's promise stands for the borrow"
    )]
    pub(crate) unsafe fn as_mut_slice<E>(&self) -> &mut [E] {
        // SAFETY: see `token_rows`.
        unsafe { std::slice::from_raw_parts_mut(self.start::<E>(), self.extent()) }
    }

    pub(crate) fn start<E>(&self) -> *mut E {
        const { assert!(size_of::<E>() == size_of::<T>() && align_of::<E>() <= size_of::<T>()) };
        if self.view.item_count() == 0 { std::ptr::dangling_mut() } else { self.view.buf_ptr().cast() }
    }

    pub(crate) fn expect_columns(&self, expected: usize) -> PyResult<()> {
        self.expect_shape(self.len, expected)
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }

    pub(crate) fn expect_shape(&self, num_rows: usize, num_columns: usize) -> PyResult<()> {
        if (self.len, self.width) == (num_rows, num_columns) {
            return Ok(());
        }
        let message = format!(
            "{} has the shape ({}, {}), but ({num_rows}, {num_columns}) is needed",
            self.name, self.len, self.width
        );
        Err(PyValueError::new_err(message))
    }

    pub(crate) fn expect_contiguous(&self) -> PyResult<()> {
        if self.len > 1 && self.stride != self.width {
            return Err(PyValueError::new_err(format!(
                "the rows of {} must follow each other without a gap",
                self.name
            )));
        }
        Ok(())
    }

    pub(crate) fn expect_writable(&self) -> PyResult<()> {
        if self.view.readonly() {
            return Err(PyValueError::new_err(format!("{} must be writable", self.name)));
        }
        Ok(())
    }

    pub(crate) fn place(&self) -> Place {
        let start = self.view.buf_ptr() as usize;
        (start, start + self.extent() * size_of::<T>())
    }

    /// Whether both are the same memory, of which each element is its own place in both.
    pub(crate) fn is_same<U: buffer::Element>(&self, other: &Rows<U>) -> bool {
        size_of::<T>() == size_of::<U>() && self.place() == other.place() && self.stride == other.stride
    }

    pub(crate) fn expect_apart<U: buffer::Element>(&self, other: &Rows<U>) -> PyResult<()> {
        let ((start, end), (other_start, other_end)) = (self.place(), other.place());
        if start < other_end && other_start < end {
            let message =
                format!("{} and {} share memory, but one of them is written", self.name, other.name);
            return Err(PyValueError::new_err(message));
        }
        Ok(())
    }
}
