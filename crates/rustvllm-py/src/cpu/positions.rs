//! How heads are turned by the positions of tokens, as Python gives both: see `cpu_kernels::rotary`.

use ::cpu_kernels::Turn;
use pyo3::{buffer::PyBuffer, exceptions::PyValueError, prelude::*};

use crate::cpu::{arrays::Vector, attention::int32_array};

/// Frequencies of pairs of features, what turned heads are multiplied by, and which part of a position turns each pair.
pub(crate) type TurnParts<'py> = (Bound<'py, PyAny>, f32, Vec<usize>);

pub(crate) fn turn_of((inv_freq, scaling, axes): &TurnParts<'_>) -> PyResult<Turn> {
    let inv_freq = Vector::new("the frequencies of heads", inv_freq)?.as_slice().to_vec();
    if !axes.is_empty() && axes.len() != inv_freq.len() {
        let message = format!(
            "axes are of {} pairs of features, but there are {} frequencies",
            axes.len(),
            inv_freq.len()
        );
        return Err(PyValueError::new_err(message));
    }
    Ok(Turn { inv_freq, scaling: *scaling, axes: axes.clone() })
}

/// The positions of a step's tokens, `[num_tokens]` or `[parts, num_tokens]`, and how many parts they have.
pub(crate) fn positions_of(positions: &Bound<'_, PyAny>) -> PyResult<(PyBuffer<i32>, usize)> {
    let dimensions = positions.getattr("ndim").and_then(|ndim| ndim.extract::<usize>());
    let array = int32_array("positions", positions, if matches!(dimensions, Ok(2)) { 2 } else { 1 })?;
    let parts = if array.dimensions() == 2 { array.shape()[0] } else { 1 };
    Ok((array, parts))
}
