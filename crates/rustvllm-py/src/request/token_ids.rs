//! `_core.TokenIds`: the ids of a prompt, kept in Rust on their way from the tokenizer to the engine.
//!
//! A list of a hundred thousand Python ints costs a millisecond with the interpreter held each time it is made or read;
//! this costs a copy of memory.

use std::sync::Arc;

use pyo3::{
    exceptions::{PyIndexError, PyValueError},
    prelude::*,
    types::{PyBool, PyInt, PyIterator, PyList, PySlice, PyType},
};

use crate::scheduler::buffers::native_buffer;

/// Token ids, an immutable sequence of ints.
#[pyclass(frozen, sequence, name = "TokenIds", module = "rustvllm._core")]
pub(crate) struct PyTokenIds {
    pub(crate) ids: Arc<[i32]>,
}

impl From<Vec<u32>> for PyTokenIds {
    fn from(ids: Vec<u32>) -> Self {
        // The tokenizer's ids are below 2^24.
        Self { ids: ids.into_iter().map(u32::cast_signed).collect() }
    }
}

#[pymethods]
impl PyTokenIds {
    /// From a list of ints. Raises `ValueError` unless each is an int (no bool, no other type) from 0 to `limit` − 1.
    #[new]
    #[pyo3(signature = (ids, limit = None))]
    fn new(ids: &Bound<'_, PyAny>, limit: Option<i32>) -> PyResult<Self> {
        let limit = limit.unwrap_or(i32::MAX);
        let wrong = |position: usize| {
            PyValueError::new_err(format!(
                "the id at position {position} is not an int from 0 to {}",
                limit - 1
            ))
        };
        let Ok(list) = ids.cast::<PyList>() else {
            return Self::of_sequence(ids, limit);
        };
        let mut checked = Vec::with_capacity(list.len());
        for (position, item) in list.iter().enumerate() {
            let is_int = item.is_instance_of::<PyInt>() && !item.is_instance_of::<PyBool>();
            let id: i32 = item.extract().ok().filter(|_| is_int).ok_or_else(|| wrong(position))?;
            if !(0..limit).contains(&id) {
                return Err(wrong(position));
            }
            checked.push(id);
        }
        Ok(Self { ids: checked.into() })
    }

    fn __len__(&self) -> usize {
        self.ids.len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let len = self.ids.len() as isize;
        if let Ok(slice) = index.cast::<PySlice>() {
            let range = slice.indices(len)?;
            let ids: Arc<[i32]> = if range.step == 1 {
                self.ids[range.start as usize..range.start as usize + range.slicelength].into()
            } else {
                (0..range.slicelength as isize)
                    .map(|step| self.ids[(range.start + step * range.step) as usize])
                    .collect()
            };
            return Ok(Self { ids }.into_pyobject(py)?.into_any());
        }
        let index: isize = index.extract()?;
        let place = if index < 0 { index + len } else { index };
        let id = usize::try_from(place).ok().and_then(|place| self.ids.get(place));
        match id {
            Some(id) => Ok(id.into_pyobject(py)?.into_any()),
            None => Err(PyIndexError::new_err(format!("position {index} of {len} token ids"))),
        }
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.tolist(py)?.try_iter()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        if let Ok(other) = other.cast::<Self>() {
            return self.ids == other.get().ids;
        }
        other
            .cast::<PyList>()
            .is_ok_and(|list| list.extract::<Vec<i32>>().is_ok_and(|other| *self.ids == other[..]))
    }

    /// The largest id; −1 when there is none.
    fn largest(&self) -> i32 {
        self.ids.iter().copied().max().unwrap_or(-1)
    }

    /// The ids as a list.
    fn tolist<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.ids.iter())
    }

    /// For pickle: made again from a list.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyType>, (Bound<'py, PyList>,))> {
        Ok((py.get_type::<Self>(), (self.tolist(py)?,)))
    }

    /// Nothing changes the ids, so a copy is the object itself.
    fn __copy__(this: Py<Self>) -> Py<Self> {
        this
    }

    /// As `__copy__`: ints hold nothing that could be copied.
    fn __deepcopy__(this: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        this
    }

    fn __repr__(&self) -> String {
        format!("TokenIds(<{} ids>)", self.ids.len())
    }
}

impl PyTokenIds {
    /// Of an int32 array, or of any other sequence.
    fn of_sequence(ids: &Bound<'_, PyAny>, limit: i32) -> PyResult<Self> {
        let ids: Arc<[i32]> = if let Ok(other) = ids.cast::<Self>() {
            Arc::clone(&other.get().ids)
        } else if let Ok(buffer) = native_buffer::<i32>(ids) {
            buffer.to_vec(ids.py())?.into()
        } else {
            return Err(PyValueError::new_err("token ids must be a list or an int32 array"));
        };
        match ids.iter().position(|id| !(0..limit).contains(id)) {
            None => Ok(Self { ids }),
            Some(position) => Err(PyValueError::new_err(format!(
                "the id at position {position} is not an int from 0 to {}",
                limit - 1
            ))),
        }
    }
}

/// Ids from `TokenIds` or an int32 buffer (one copy), or from a sequence of ints.
pub(crate) fn token_ids(py: Python<'_>, object: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    if let Ok(ids) = object.cast::<PyTokenIds>() {
        return Ok(ids.get().ids.to_vec());
    }
    match native_buffer::<i32>(object) {
        Ok(buffer) => buffer.to_vec(py),
        Err(_) => object.extract(),
    }
}

/// Adds the class to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTokenIds>()
}
