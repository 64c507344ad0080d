//! Python arrays as step buffers: checked once, kept alive for the scheduler's life.

use std::ptr::NonNull;

use ::scheduler::{
    SchedulerConfig, StepBuffers,
    step_buffers::{ArraySpec, BufferError, DType},
};
use pyo3::{
    buffer::PyBuffer,
    exceptions::{PyKeyError, PyTypeError, PyValueError},
    prelude::*,
};

/// A Python buffer view of any dtype, kept for its `Drop` alone.
type BufferView = Box<dyn std::any::Any + Send + Sync>;

/// Views of all registered arrays, with the addresses that they cover.
#[derive(Default)]
pub(crate) struct RegisteredViews {
    views: Vec<BufferView>,
    /// First byte, byte after the last, name.
    places: Vec<(usize, usize, &'static str)>,
}

impl RegisteredViews {
    /// Two arrays over the same memory would be written as if they were two.
    pub(crate) fn check_disjoint(&mut self) -> PyResult<()> {
        self.places.sort_unstable();
        for pair in self.places.windows(2) {
            let [(_, end, first), (start, _, second)] = [pair[0], pair[1]];
            if start < end {
                let message = format!(
                    "step buffers {first} and {second} share memory; each array of each set needs its own"
                );
                return Err(PyValueError::new_err(message));
            }
        }
        Ok(())
    }
}

/// A view of an array whose elements are `T` as this machine has them.
///
/// pyo3 takes `>` for the byte order of a little-endian machine (0.30), so an array of foreign order would be read as
/// other numbers.
pub(crate) fn native_buffer<T: pyo3::buffer::Element>(array: &Bound<'_, PyAny>) -> PyResult<PyBuffer<T>> {
    let view = PyBuffer::<T>::get(array)?;
    let foreign: &[u8] = if cfg!(target_endian = "little") { b">!" } else { b"<" };
    if view.format().to_bytes().first().is_some_and(|order| foreign.contains(order)) {
        return Err(PyTypeError::new_err("the elements have another byte order than this machine"));
    }
    Ok(view)
}

/// Copy rows of ids out of a Python array; returns the number of columns.
pub(crate) fn copy_rows(name: &str, array: &Bound<'_, PyAny>, ids: &mut Vec<i32>) -> PyResult<usize> {
    let view = native_buffer::<i32>(array)
        .map_err(|_| PyTypeError::new_err(format!("{name} must be an array of dtype int32")))?;
    let num_columns = match view.shape() {
        [_] => 1,
        [_, columns] => *columns,
        shape => {
            let message = format!("{name} must have 1 or 2 dimensions, got shape {shape:?}");
            return Err(PyValueError::new_err(message));
        }
    };
    ids.resize(view.item_count(), -1);
    view.copy_to_slice(array.py(), ids)?;
    Ok(num_columns)
}

/// Copy vectors out of a Python array; returns their numbers, one after the other, and the width of each.
pub(crate) fn copy_vectors(array: &Bound<'_, PyAny>) -> PyResult<(Vec<f32>, usize)> {
    let view = native_buffer::<f32>(array)
        .map_err(|_| PyTypeError::new_err("pooled must be an array of dtype float32"))?;
    let [_, width] = view.shape() else {
        let message = format!("pooled must have 2 dimensions, got shape {:?}", view.shape());
        return Err(PyValueError::new_err(message));
    };
    Ok((view.to_vec(array.py())?, *width))
}

/// `BufferError` and everything Python says, as one error.
struct Refusal(PyErr);

impl From<BufferError> for Refusal {
    fn from(error: BufferError) -> Self {
        Self(PyValueError::new_err(error.to_string()))
    }
}

impl From<PyErr> for Refusal {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

/// Register one set: a mapping from name to a writable C-contiguous array of the specified dtype.
/// The views pushed to `views` keep the memory alive and in place.
pub(crate) fn register_set(
    config: &SchedulerConfig,
    set: &Bound<'_, PyAny>,
    views: &mut RegisteredViews,
) -> PyResult<StepBuffers> {
    // SAFETY: the view of each array is kept in `views` by the scheduler's Python object, so its
    // memory stays valid and unmoved (a buffer export forbids resizing); dtype, contiguity and
    // writability are checked below; who may touch it when is the generation protocol of `Scheduler`.
    let buffers = unsafe {
        StepBuffers::from_raw(config, |spec| {
            let array = set.get_item(spec.name).map_err(|_| {
                PyKeyError::new_err(format!(
                    "step buffers lack the array {:?}; see step_buffer_spec",
                    spec.name
                ))
            })?;
            let (start, len, view) = match spec.dtype {
                DType::Int32 => writable::<i32>(spec, &array)?,
                DType::Int64 => writable::<i64>(spec, &array)?,
                DType::Float32 => writable::<f32>(spec, &array)?,
            };
            let first = start.as_ptr() as usize;
            views.places.push((first, first + len * spec.dtype.size(), spec.name));
            views.views.push(view);
            Ok((start, len))
        })
    };
    buffers.map_err(|Refusal(error)| error)
}

fn writable<T: pyo3::buffer::Element + Send + Sync + 'static>(
    spec: &ArraySpec,
    array: &Bound<'_, PyAny>,
) -> Result<(NonNull<u8>, usize, BufferView), Refusal> {
    let view = native_buffer::<T>(array).map_err(|_| {
        let message = format!("step buffer {} must be an array of dtype {}", spec.name, spec.dtype.as_str());
        PyTypeError::new_err(message)
    })?;
    if view.readonly() || !view.is_c_contiguous() {
        let message = format!("step buffer {} must be writable and C-contiguous", spec.name);
        return Err(PyValueError::new_err(message).into());
    }
    let start = NonNull::new(view.buf_ptr().cast::<u8>())
        .ok_or_else(|| PyValueError::new_err(format!("step buffer {} has no memory", spec.name)))?;
    Ok((start, view.item_count(), Box::new(view)))
}
