//! `_core.count_body_values`: what the fields of a request's body hold, before it is parsed.

use pyo3::{prelude::*, types::PyBytes};

/// Name, values, objects and lists of each field of the JSON object `body`; `None` if it is not an object. Other threads of Python go
/// on meanwhile.
#[pyfunction]
fn count_body_values(py: Python<'_>, body: &Bound<'_, PyBytes>) -> Option<Vec<(String, u64, u64, u64)>> {
    let body = body.as_bytes();
    let fields = py.detach(|| output::count_body_values(body))?;
    Some(fields.into_iter().map(|of| (of.name, of.num_values, of.num_objects, of.num_lists)).collect())
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(count_body_values, module)?)
}
