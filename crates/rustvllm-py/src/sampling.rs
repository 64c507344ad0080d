//! Drawing ids on the CPU for Python: arrays in, checked, and the kernel called on their memory in place.

use ::cpu_kernels::sampling::{Passes, RowOptions, draw};
use ::scheduler::{
    SamplingParams,
    sampling_params::{FLOAT_NAMES, INT_NAMES, NumberMut},
};
use pyo3::{
    buffer::{Element, PyBuffer},
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    types::PyDict,
};

use crate::{buffers::native_buffer, cpu_threads::CpuThreads};

/// Logits from which on other threads of Python get their turn meanwhile.
const MIN_LOGITS_TO_DETACH: usize = 1 << 14;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(draw_token_ids, module)?)?;
    module.add_function(wrap_pyfunction!(draw_kernel, module)?)
}

/// Name of the kernel that `draw_token_ids` runs here: avx512, avx2 or portable.
#[pyfunction]
fn draw_kernel() -> &'static str {
    Passes::best().name()
}

#[pyfunction]
fn draw_token_ids(
    py: Python<'_>,
    threads: &CpuThreads,
    logits: &Bound<'_, PyAny>,
    rows: &Bound<'_, PyAny>,
    uniforms: &Bound<'_, PyAny>,
    numbers: &Bound<'_, PyDict>,
) -> PyResult<Vec<i64>> {
    let logits = native_buffer::<f32>(logits)
        .map_err(|error| PyTypeError::new_err(format!("logits must be an array of float32: {error}")))?;
    let &[num_rows, vocab_size] = logits.shape() else {
        return Err(PyValueError::new_err(format!(
            "logits must have 2 dimensions, got {:?}",
            logits.shape()
        )));
    };
    if logits.readonly() || !logits.is_c_contiguous() {
        return Err(PyValueError::new_err("logits must be writable and C-contiguous"));
    }
    let rows = checked_rows(column(py, "rows", rows, None)?, num_rows)?;
    let len = Some(rows.len());
    if vocab_size == 0 && !rows.is_empty() {
        return Err(PyValueError::new_err("logits of no ids cannot be drawn from"));
    }
    let uniforms: Vec<f64> = column(py, "uniforms", uniforms, len)?;
    let params = params_of_rows(py, numbers, rows.len())?;
    let options: Vec<RowOptions> =
        params.iter().zip(uniforms).map(|(params, uniform)| row_options(params, uniform)).collect();
    let num_logits = logits.item_count();
    let start = if num_logits == 0 { std::ptr::dangling_mut() } else { logits.buf_ptr().cast::<f32>() };
    if !start.is_aligned() {
        return Err(PyValueError::new_err("logits are not aligned to their elements"));
    }
    // SAFETY: the view keeps `num_logits` writable, contiguous and aligned elements where they are while it lives. That no
    // other thread of Python touches them meanwhile is the caller's part, as with every call of numpy and torch.
    let values = unsafe { std::slice::from_raw_parts_mut(start, num_logits) };
    let mut out = vec![-1; rows.len()];
    let mut compute = || draw(values, vocab_size, &rows, &options, &threads.threads, &mut out);
    if rows.len() * vocab_size >= MIN_LOGITS_TO_DETACH {
        py.detach(compute);
    } else {
        compute();
    }
    Ok(out)
}

fn row_options(params: &SamplingParams, uniform: f64) -> RowOptions {
    RowOptions {
        temperature: params.temperature,
        min_p: params.min_p,
        top_n_sigma: params.top_n_sigma,
        top_k: params.top_k,
        top_p: params.top_p,
        uniform,
    }
}

/// The parameters of each row, from a column for each number that is not its default everywhere.
fn params_of_rows(
    py: Python<'_>,
    numbers: &Bound<'_, PyDict>,
    num_rows: usize,
) -> PyResult<Vec<SamplingParams>> {
    let mut params = vec![SamplingParams::default(); num_rows];
    for (name, array) in numbers {
        let name: String = name.extract()?;
        if FLOAT_NAMES.contains(&name.as_str()) {
            let values = column(py, &name, &array, Some(num_rows))?;
            for (params, value) in params.iter_mut().zip(values) {
                if let Some(NumberMut::Float(number)) = params.number_mut(&name) {
                    *number = value;
                }
            }
        } else if INT_NAMES.contains(&name.as_str()) {
            let values = column(py, &name, &array, Some(num_rows))?;
            for (params, value) in params.iter_mut().zip(values) {
                if let Some(NumberMut::Int(number)) = params.number_mut(&name) {
                    *number = value;
                }
            }
        } else {
            return Err(PyValueError::new_err(format!(
                "numbers has {name}, which is not in SAMPLING_NUMBERS"
            )));
        }
    }
    Ok(params)
}

fn column<T: Element>(
    py: Python<'_>,
    name: &str,
    array: &Bound<'_, PyAny>,
    len: Option<usize>,
) -> PyResult<Vec<T>> {
    let view: PyBuffer<T> = native_buffer::<T>(array)
        .map_err(|error| PyTypeError::new_err(format!("{name} has another dtype: {error}")))?;
    if view.dimensions() != 1 || len.is_some_and(|len| view.item_count() != len) {
        let expected = len.map_or_else(|| "[n]".to_owned(), |len| format!("[{len}]"));
        return Err(PyValueError::new_err(format!(
            "{name} must have the shape {expected}, got {:?}",
            view.shape()
        )));
    }
    view.to_vec(py)
}

/// Rows that are there, each once.
fn checked_rows(rows: Vec<i64>, num_rows: usize) -> PyResult<Vec<usize>> {
    let mut is_taken = vec![false; num_rows];
    rows.into_iter()
        .map(|row| {
            let index = usize::try_from(row).ok().filter(|&index| index < num_rows);
            index.filter(|&index| !std::mem::replace(&mut is_taken[index], true)).ok_or_else(|| {
                PyValueError::new_err(format!("row {row} is given twice, or is not in 0 to {num_rows} − 1"))
            })
        })
        .collect()
}
