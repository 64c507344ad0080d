//! Drawing ids on the CPU for Python: arrays in, checked, and the kernel called on their memory in place.

use ::cpu_kernels::sampling::{Passes, RowOptions, draw};
use pyo3::{
    buffer::{Element, PyBuffer},
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
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
#[expect(clippy::too_many_arguments, reason = "one array per parameter")]
fn draw_token_ids(
    py: Python<'_>,
    threads: &CpuThreads,
    logits: &Bound<'_, PyAny>,
    rows: &Bound<'_, PyAny>,
    temperature: &Bound<'_, PyAny>,
    min_p: &Bound<'_, PyAny>,
    top_k: &Bound<'_, PyAny>,
    top_p: &Bound<'_, PyAny>,
    uniforms: &Bound<'_, PyAny>,
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
    let temperature: Vec<f32> = column(py, "temperature", temperature, len)?;
    let min_p: Vec<f32> = column(py, "min_p", min_p, len)?;
    let top_k: Vec<i64> = column(py, "top_k", top_k, len)?;
    let top_p: Vec<f32> = column(py, "top_p", top_p, len)?;
    let uniforms: Vec<f64> = column(py, "uniforms", uniforms, len)?;
    let options: Vec<RowOptions> = (0..rows.len())
        .map(|i| RowOptions {
            temperature: temperature[i],
            min_p: min_p[i],
            top_k: top_k[i],
            top_p: top_p[i],
            uniform: uniforms[i],
        })
        .collect();
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
