//! Norms of rows on the CPU for Python.

use ::cpu_kernels::{Element, Kernel, Norm, NormKind, OutRows, Sum, bf16};
use pyo3::{
    buffer::{self, PyBuffer},
    exceptions::PyValueError,
    prelude::*,
};

use crate::{
    cpu::{
        arrays::{Rows, Vector},
        threads::CpuThreads,
    },
    errors::linear_error,
};

/// Elements from which on other threads of Python get their turn meanwhile.
const MIN_ELEMENTS_TO_DETACH: usize = 1 << 16;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(layer_norm, module)?)?;
    module.add_function(wrap_pyfunction!(rms_norm, module)?)
}

#[pyfunction]
#[pyo3(signature = (threads, x, weight, bias, eps, out, *, residual=None, sum_out=None))]
#[expect(clippy::too_many_arguments, reason = "the arrays of a norm")]
fn layer_norm(
    py: Python<'_>,
    threads: &CpuThreads,
    x: &Bound<'_, PyAny>,
    weight: &Bound<'_, PyAny>,
    bias: Option<&Bound<'_, PyAny>>,
    eps: f32,
    out: &Bound<'_, PyAny>,
    residual: Option<&Bound<'_, PyAny>>,
    sum_out: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let bias = bias.map(|bias| Vector::new("bias", bias)).transpose()?;
    let weight = Vector::new("weight", weight)?;
    let bias = bias.as_ref().map(Vector::as_slice);
    let norm = Norm { kind: NormKind::Layer, weight: weight.as_slice(), bias, eps };
    any_norm(py, threads, &norm, x, out, residual, sum_out)
}

#[pyfunction]
#[pyo3(signature = (threads, x, weight, eps, out, *, residual=None, sum_out=None))]
#[expect(clippy::too_many_arguments, reason = "the arrays of a norm")]
fn rms_norm(
    py: Python<'_>,
    threads: &CpuThreads,
    x: &Bound<'_, PyAny>,
    weight: &Bound<'_, PyAny>,
    eps: f32,
    out: &Bound<'_, PyAny>,
    residual: Option<&Bound<'_, PyAny>>,
    sum_out: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let weight = Vector::new("weight", weight)?;
    let norm = Norm { kind: NormKind::Rms, weight: weight.as_slice(), bias: None, eps };
    any_norm(py, threads, &norm, x, out, residual, sum_out)
}

fn any_norm(
    py: Python<'_>,
    threads: &CpuThreads,
    norm: &Norm<'_>,
    x: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    residual: Option<&Bound<'_, PyAny>>,
    sum_out: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    if PyBuffer::<f32>::get(x).is_ok() {
        norm_as::<f32, f32>(py, threads, norm, x, out, residual, sum_out)
    } else {
        norm_as::<u16, bf16>(py, threads, norm, x, out, residual, sum_out)
    }
}

/// `T` is what the buffers say they hold, `E` what that means.
fn norm_as<T: buffer::Element + Sync, E: Element>(
    py: Python<'_>,
    threads: &CpuThreads,
    norm: &Norm<'_>,
    x: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    residual: Option<&Bound<'_, PyAny>>,
    sum_out: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let (x, out) = (Rows::<T>::new("x", x)?, Rows::<T>::new("out", out)?);
    let num_rows = x.len;
    x.expect_columns(norm.weight.len())?;
    out.expect_shape(num_rows, norm.weight.len())?;
    out.expect_writable()?;
    x.expect_apart(&out)?;
    let residual = residual.map(|residual| Rows::<T>::new("residual", residual)).transpose()?;
    let sum_out = sum_out.map(|sum_out| Rows::<T>::new("sum_out", sum_out)).transpose()?;
    for rows in residual.iter().chain(&sum_out) {
        rows.expect_shape(num_rows, norm.weight.len())?;
        rows.expect_apart(&out)?;
    }
    if let Some(sum_out) = &sum_out {
        sum_out.expect_writable()?;
        x.expect_apart(sum_out)?;
    }
    let sum = match (&residual, &sum_out) {
        (None, None) => Sum::None,
        (Some(residual), None) => Sum::Add(residual.token_rows::<E>()),
        (None, Some(_)) => {
            return Err(PyValueError::new_err("sum_out is given without the residual that the sum is of"));
        }
        (Some(residual), Some(sum_out)) => {
            // SAFETY: it is writable, shares no byte with `x` or `out`, and stays where it is while the view lives; see
            // `PackedLinear.forward` for other threads of Python.
            let to = OutRows { data: unsafe { sum_out.as_mut_slice::<E>() }, stride: sum_out.stride };
            if residual.is_same(sum_out) {
                Sum::Into(to)
            } else {
                residual.expect_apart(sum_out)?;
                Sum::AddTo(residual.token_rows::<E>(), to)
            }
        }
    };
    let x = x.token_rows::<E>();
    // SAFETY: `out` is writable, shares no byte with the other arrays, as was checked, and stays where it is while the
    // view lives; see `forward_as` for other threads of Python.
    let out = OutRows { data: unsafe { out.as_mut_slice::<E>() }, stride: out.stride };
    let (kernel, threads) = (Kernel::best_for_products(), &threads.threads);
    let compute = || ::cpu_kernels::norm::norm(norm, x, num_rows, sum, kernel, threads, out);
    let elements = num_rows * norm.weight.len();
    let done = if elements >= MIN_ELEMENTS_TO_DETACH { py.detach(compute) } else { compute() };
    done.map_err(linear_error)
}
