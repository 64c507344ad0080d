//! Drawing and scoring ids on the CPU for Python: arrays in, checked, and the kernel called on their memory in place.

use ::cpu_kernels::sampling::{Passes, RowOptions, RowPenalties, Scores, draw, mask, penalize, score};
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

use crate::{
    cpu::{arrays::expect_aligned, threads::CpuThreads},
    scheduler::buffers::native_buffer,
};

/// Logits from which on other threads of Python get their turn meanwhile.
const MIN_LOGITS_TO_DETACH: usize = 1 << 14;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(draw_token_ids, module)?)?;
    module.add_function(wrap_pyfunction!(mask_logits, module)?)?;
    module.add_function(wrap_pyfunction!(penalize_logits, module)?)?;
    module.add_function(wrap_pyfunction!(score_token_ids, module)?)?;
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
    let LogitRows { logits, vocab_size, rows } = LogitRows::new(py, logits, rows)?;
    let len = Some(rows.len());
    if vocab_size == 0 && !rows.is_empty() {
        return Err(PyValueError::new_err("logits of no ids cannot be drawn from"));
    }
    let uniforms: Vec<f64> = column(py, "uniforms", uniforms, len)?;
    let params = params_of_rows(py, numbers, rows.len())?;
    let options: Vec<RowOptions> =
        params.iter().zip(uniforms).map(|(params, uniform)| row_options(params, uniform)).collect();
    // SAFETY: the view lives until the end of this function. That no other thread of Python touches the logits meanwhile is
    // the caller's part, as with every call of numpy and torch.
    let values = unsafe { read_elements(&logits) };
    let mut out = vec![-1; rows.len()];
    detached(py, rows.len() * vocab_size, || {
        draw(values, vocab_size, &rows, &options, &threads.threads, &mut out);
    });
    Ok(out)
}

#[pyfunction]
fn mask_logits(
    py: Python<'_>,
    threads: &CpuThreads,
    logits: &Bound<'_, PyAny>,
    rows: &Bound<'_, PyAny>,
    bitmask: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let LogitRows { logits, vocab_size, rows } = LogitRows::new(py, logits, rows)?;
    let masks = native::<i32>("bitmask", bitmask)?;
    let expected = [rows.len(), vocab_size.div_ceil(32)];
    if masks.shape() != expected {
        return Err(PyValueError::new_err(format!(
            "bitmask must have the shape {expected:?}, got {:?}",
            masks.shape()
        )));
    }
    let masks = masks.to_vec(py)?;
    expect_writable("logits", &logits)?;
    // SAFETY: the view lives until the end of this function. That no other thread of Python touches the logits meanwhile is
    // the caller's part, as with every call of numpy and torch.
    let values = unsafe { elements(&logits) };
    detached(py, rows.len() * vocab_size, || mask(values, vocab_size, &rows, &masks, &threads.threads));
    Ok(())
}

#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "the columns of a batch's penalties")]
fn penalize_logits(
    py: Python<'_>,
    threads: &CpuThreads,
    logits: &Bound<'_, PyAny>,
    rows: &Bound<'_, PyAny>,
    slots: &Bound<'_, PyAny>,
    presence: &Bound<'_, PyAny>,
    frequency: &Bound<'_, PyAny>,
    repetition: &Bound<'_, PyAny>,
    output_counts: &Bound<'_, PyAny>,
    prompt_mask: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let LogitRows { logits, vocab_size, rows } = LogitRows::new(py, logits, rows)?;
    let len = Some(rows.len());
    let slots: Vec<i64> = column(py, "slots", slots, len)?;
    let [presence, frequency, repetition] =
        [("presence", presence), ("frequency", frequency), ("repetition", repetition)]
            .map(|(name, array)| column::<f32>(py, name, array, len));
    let (presence, frequency, repetition) = (presence?, frequency?, repetition?);
    let output_counts = table::<i32>("output_counts", output_counts, vocab_size)?;
    let prompt_mask = table::<u8>("prompt_mask", prompt_mask, vocab_size)?;
    expect_writable("logits", &logits)?;
    // SAFETY: the views live until the end of this function. That no other thread of Python touches these arrays meanwhile is
    // the caller's part, as with every call of numpy and torch.
    let (values, counts, marks) =
        unsafe { (elements(&logits), read_elements(&output_counts), read_elements(&prompt_mask)) };
    let num_slots = output_counts.shape()[0].min(prompt_mask.shape()[0]);
    let penalties: Vec<RowPenalties<'_>> = slots
        .iter()
        .enumerate()
        .map(|(index, &slot)| {
            let place = usize::try_from(slot).ok().filter(|&place| place < num_slots).ok_or_else(|| {
                PyValueError::new_err(format!("slot {slot} is not in 0 to {num_slots} − 1"))
            })?;
            let ids = place * vocab_size..(place + 1) * vocab_size;
            Ok(RowPenalties {
                presence: presence[index],
                frequency: frequency[index],
                repetition: repetition[index],
                output_counts: &counts[ids.clone()],
                prompt_mask: &marks[ids],
            })
        })
        .collect::<PyResult<_>>()?;
    detached(py, rows.len() * vocab_size, || {
        penalize(values, vocab_size, &rows, &penalties, &threads.threads);
    });
    Ok(())
}

#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "three arrays that it reads and four that it writes")]
fn score_token_ids(
    py: Python<'_>,
    threads: &CpuThreads,
    logits: &Bound<'_, PyAny>,
    rows: &Bound<'_, PyAny>,
    token_ids: &Bound<'_, PyAny>,
    is_normalized: bool,
    ids: &Bound<'_, PyAny>,
    values: &Bound<'_, PyAny>,
    ranks: &Bound<'_, PyAny>,
    log_totals: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let LogitRows { logits, vocab_size, rows } = LogitRows::new(py, logits, rows)?;
    let token_ids: Vec<i64> = column(py, "token_ids", token_ids, Some(rows.len()))?;
    let token_ids = token_ids
        .into_iter()
        .map(|id| {
            usize::try_from(id).ok().filter(|&id| id < vocab_size).ok_or_else(|| {
                PyValueError::new_err(format!("token id {id} is not in 0 to {vocab_size} − 1"))
            })
        })
        .collect::<PyResult<Vec<usize>>>()?;
    let ids = array::<i32>("ids", ids, 2, "[m, 1 + k]")?;
    let width = ids.shape()[1];
    if ids.shape()[0] != rows.len() || width == 0 || width > vocab_size + 1 {
        let shape = format!("[{}, 1 to {}]", rows.len(), vocab_size + 1);
        return Err(other_layout("ids", &shape, &ids));
    }
    let values = array::<f32>("values", values, 2, "[m, 1 + k]")?;
    if values.shape() != ids.shape() {
        return Err(other_layout("values", &format!("{:?}", ids.shape()), &values));
    }
    let ranks = array::<i32>("ranks", ranks, 1, "[m]")?;
    if ranks.shape() != [rows.len()] {
        return Err(other_layout("ranks", &format!("[{}]", rows.len()), &ranks));
    }
    let log_totals = array::<f64>("log_totals", log_totals, 1, "[m]")?;
    if log_totals.shape() != [rows.len()] {
        return Err(other_layout("log_totals", &format!("[{}]", rows.len()), &log_totals));
    }
    expect_writable("ids", &ids)?;
    expect_writable("values", &values)?;
    expect_writable("ranks", &ranks)?;
    expect_writable("log_totals", &log_totals)?;
    // SAFETY: the views live until the end of this function, and those that are written are writable. That they are five
    // arrays, and that no other thread of Python touches them meanwhile, is the caller's part, as with every call of numpy
    // and torch.
    let (logits, ids, values, ranks, log_totals) = unsafe {
        (read_elements(&logits), elements(&ids), elements(&values), elements(&ranks), elements(&log_totals))
    };
    detached(py, rows.len() * vocab_size, || {
        let scores =
            Scores { ids: &mut *ids, values: &mut *values, ranks: &mut *ranks, log_totals: &mut *log_totals };
        score(logits, vocab_size, &rows, &token_ids, is_normalized, &threads.threads, scores);
    });
    Ok(())
}

/// Logits, and those of their rows that a call is for.
struct LogitRows {
    /// `[n, vocab_size]`
    logits: PyBuffer<f32>,
    vocab_size: usize,
    rows: Vec<usize>,
}

impl LogitRows {
    fn new(py: Python<'_>, logits: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<Self> {
        let logits = array::<f32>("logits", logits, 2, "[n, vocab_size]")?;
        let (num_rows, vocab_size) = (logits.shape()[0], logits.shape()[1]);
        let rows = checked_rows(column(py, "rows", rows, None)?, num_rows)?;
        Ok(Self { logits, vocab_size, rows })
    }
}

/// Something for each id of each slot: `[capacity, vocab_size]`.
fn table<T: Element>(name: &str, table: &Bound<'_, PyAny>, vocab_size: usize) -> PyResult<PyBuffer<T>> {
    let shape = format!("[capacity, {vocab_size}]");
    let table = array::<T>(name, table, 2, &shape)?;
    if table.shape()[1] != vocab_size {
        return Err(other_layout(name, &shape, &table));
    }
    Ok(table)
}

/// An array of so many dimensions, contiguous and aligned; `shape` is what its shape is called.
fn array<T: Element>(
    name: &str,
    array: &Bound<'_, PyAny>,
    dimensions: usize,
    shape: &str,
) -> PyResult<PyBuffer<T>> {
    let view = native::<T>(name, array)?;
    if view.dimensions() != dimensions || !view.is_c_contiguous() {
        return Err(other_layout(name, shape, &view));
    }
    expect_aligned(name, &view)?;
    Ok(view)
}

fn other_layout<T: Element>(name: &str, shape: &str, view: &PyBuffer<T>) -> PyErr {
    PyValueError::new_err(format!(
        "{name} must be C-contiguous and have the shape {shape}, got {:?}",
        view.shape()
    ))
}

fn native<T: Element>(name: &str, array: &Bound<'_, PyAny>) -> PyResult<PyBuffer<T>> {
    native_buffer::<T>(array).map_err(|error| {
        // Of numpy and torch, whose names differ from Rust's.
        let dtype = match std::any::type_name::<T>() {
            "f32" => "float32",
            "f64" => "float64",
            "i32" => "int32",
            "i64" => "int64",
            "u8" => "uint8",
            other => other,
        };
        PyTypeError::new_err(format!("{name} must be an array of {dtype}: {error}"))
    })
}

fn expect_writable<T: Element>(name: &str, view: &PyBuffer<T>) -> PyResult<()> {
    if view.readonly() { Err(PyValueError::new_err(format!("{name} must be writable"))) } else { Ok(()) }
}

/// The elements of an [`array()`].
///
/// # Safety
/// Nothing writes them while the slice lives, which is no longer than the view does.
unsafe fn read_elements<T: Element>(view: &PyBuffer<T>) -> &[T] {
    let count = view.item_count();
    let start = if count == 0 { std::ptr::dangling() } else { view.buf_ptr().cast::<T>().cast_const() };
    // SAFETY: the view keeps `count` contiguous and aligned elements where they are, as was checked.
    unsafe { std::slice::from_raw_parts(start, count) }
}

/// The elements of an [`array()`] that is writable.
///
/// # Safety
/// Nothing else touches them while the slice lives, which is no longer than the view does.
#[expect(clippy::mut_from_ref, reason = "the memory is Python's, and the view only names it")]
unsafe fn elements<T: Element>(view: &PyBuffer<T>) -> &mut [T] {
    let count = view.item_count();
    let start = if count == 0 { std::ptr::dangling_mut() } else { view.buf_ptr().cast::<T>() };
    // SAFETY: the view keeps `count` writable, contiguous and aligned elements where they are, as was checked.
    unsafe { std::slice::from_raw_parts_mut(start, count) }
}

/// Run it; where it takes long, other threads of Python get their turn meanwhile.
fn detached(py: Python<'_>, num_logits: usize, mut compute: impl FnMut() + Send) {
    if num_logits >= MIN_LOGITS_TO_DETACH {
        py.detach(compute);
    } else {
        compute();
    }
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
    let view = native::<T>(name, array)?;
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
