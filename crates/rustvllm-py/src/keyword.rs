//! A keyword of a call: its value converted, or an error that names it.

use pyo3::{conversion::FromPyObjectOwned, exceptions::PyTypeError, prelude::*};

/// Put an argument into its place. A `TypeError` says which argument it is about.
pub(crate) fn extract<'py, T: FromPyObjectOwned<'py>>(
    name: &str,
    value: &Bound<'py, PyAny>,
    place: &mut T,
) -> PyResult<()> {
    match value.extract::<T>() {
        Ok(value) => {
            *place = value;
            Ok(())
        }
        Err(error) => {
            let (py, error): (_, PyErr) = (value.py(), error.into());
            if error.get_type(py).is(py.get_type::<PyTypeError>()) {
                return Err(PyTypeError::new_err(format!("argument '{name}': {}", error.value(py))));
            }
            Err(error)
        }
    }
}
