//! The tables of sampling parameters, numbers and lists, as plain data of Python's, and the columns that follow.

use ::scheduler::{
    MAX_PATTERN_SIZE, SAMPLING_LISTS, SamplingList,
    sampling_params::{Number, SAMPLING_NUMBERS, SamplingNumber},
    step_buffers::{SAMPLING_FLOAT_COLUMNS, SAMPLING_INT_COLUMNS},
};
use pyo3::{
    prelude::*,
    types::{PyDict, PyTuple},
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let rows = SAMPLING_NUMBERS.iter().map(|number| row(py, number)).collect::<PyResult<Vec<_>>>()?;
    module.add("SAMPLING_NUMBERS", PyTuple::new(py, rows)?)?;
    let rows = SAMPLING_LISTS.iter().map(|list| list_row(py, list)).collect::<PyResult<Vec<_>>>()?;
    module.add("SAMPLING_LISTS", PyTuple::new(py, rows)?)?;
    module.add("MAX_PATTERN_SIZE", MAX_PATTERN_SIZE)?;
    module.add("SAMPLING_FLOAT_COLUMNS", PyTuple::new(py, SAMPLING_FLOAT_COLUMNS)?)?;
    module.add("SAMPLING_INT_COLUMNS", PyTuple::new(py, SAMPLING_INT_COLUMNS)?)
}

fn row<'py>(py: Python<'py>, number: &SamplingNumber) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("name", number.name)?;
    row.set_item("description", number.description.trim())?;
    match number.default {
        Number::Float(default) => row.set_item("default", default)?,
        Number::Int(default) => row.set_item("default", default)?,
    }
    row.set_item("role", number.role.as_str())?;
    row.set_item("low", number.range.low)?;
    row.set_item("high", number.range.high)?;
    row.set_item("is_low_excluded", number.range.is_low_excluded)?;
    Ok(row)
}

fn list_row<'py>(py: Python<'py>, list: &SamplingList) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("name", list.name)?;
    row.set_item("description", list.description.trim())?;
    row.set_item("kind", list.kind.as_str())?;
    row.set_item("max_entries", list.max_entries)?;
    Ok(row)
}
