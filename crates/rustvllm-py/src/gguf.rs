//! GGUF files for Python: their headers, and the numbers of blocks.

use std::path::PathBuf;

use ::gguf::{Array, BlockError, GgufError, TensorType, Value};
use pyo3::{
    buffer::PyBuffer,
    exceptions::{PyOSError, PyTypeError, PyValueError},
    prelude::*,
};

use crate::{cpu::arrays::expect_aligned, scheduler::buffers::native_buffer};

/// Numbers from which on their unpacking is shared among threads.
const MIN_SHARED_NUMBERS: usize = 1 << 20;
/// The most threads that unpack: memory is what they wait for.
const MOST_THREADS: usize = 8;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<GgufFile>()?;
    module.add_function(wrap_pyfunction!(gguf_type_sizes, module)?)?;
    module.add_function(wrap_pyfunction!(unpack_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(whole_blocks, module)?)
}

pub(crate) fn block_error(error: BlockError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// The type of tensor of a name.
pub(crate) fn type_named(name: &str) -> PyResult<TensorType> {
    TensorType::from_name(name)
        .ok_or_else(|| PyValueError::new_err(format!("there is no type of GGUF tensors called {name:?}")))
}

/// The headers of a model's file, or of the files that it was split into.
#[pyclass(name = "GgufFile", module = "rustvllm._core", frozen)]
pub(crate) struct GgufFile {
    file: ::gguf::GgufFile,
}

/// Name, type, shape, index of the file, offset in it, bytes.
type TensorRow<'a> = (&'a str, &'static str, &'a [u64], usize, u64, u64);

#[pymethods]
impl GgufFile {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let file = py.detach(|| ::gguf::GgufFile::open(&path)).map_err(|error| {
            let message = format!("{}: {error}", path.display());
            match error {
                GgufError::Read(_) => PyOSError::new_err(message),
                _ => PyValueError::new_err(message),
            }
        })?;
        Ok(Self { file })
    }

    #[getter]
    fn paths(&self) -> Vec<PathBuf> {
        self.file.paths().to_vec()
    }

    #[getter]
    fn version(&self) -> u32 {
        self.file.header().version
    }

    #[getter]
    fn alignment(&self) -> u64 {
        self.file.header().alignment
    }

    fn keys(&self) -> Vec<&str> {
        self.file.header().metadata.iter().map(|(key, _)| key.as_str()).collect()
    }

    fn get(&self, py: Python<'_>, key: &str) -> PyResult<Option<Py<PyAny>>> {
        self.file.header().get(key).map(|value| object(py, value)).transpose()
    }

    fn tensors(&self) -> Vec<TensorRow<'_>> {
        self.file.tensors().map(tensor_row).collect()
    }
}

fn tensor_row(tensor: ::gguf::Tensor<'_>) -> TensorRow<'_> {
    let (file, info) = (tensor.file, tensor.info);
    (&info.name, info.tensor_type.name(), &info.shape, file, info.offset, info.num_bytes)
}

fn object(py: Python<'_>, value: &Value) -> PyResult<Py<PyAny>> {
    Ok(match value {
        Value::Unsigned(value) => value.into_pyobject(py)?.into_any().unbind(),
        Value::Signed(value) => value.into_pyobject(py)?.into_any().unbind(),
        Value::Float(value) => value.into_pyobject(py)?.into_any().unbind(),
        Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any().unbind(),
        Value::Text(value) => value.into_pyobject(py)?.into_any().unbind(),
        Value::Array(Array::Unsigned(values)) => values.into_pyobject(py)?.into_any().unbind(),
        Value::Array(Array::Signed(values)) => values.into_pyobject(py)?.into_any().unbind(),
        Value::Array(Array::Float(values)) => values.into_pyobject(py)?.into_any().unbind(),
        Value::Array(Array::Bool(values)) => values.into_pyobject(py)?.into_any().unbind(),
        Value::Array(Array::Text { joined, ends }) => {
            let starts = std::iter::once(&0).chain(ends);
            let texts = starts.zip(ends).map(|(&start, &end)| &joined[start as usize..end as usize]);
            texts.collect::<Vec<_>>().into_pyobject(py)?.into_any().unbind()
        }
    })
}

/// Every type of tensor: its name, the numbers of a block, the bytes of a block.
#[pyfunction]
fn gguf_type_sizes() -> Vec<(&'static str, usize, usize)> {
    TensorType::all().map(|known| (known.name(), known.block(), known.block_bytes())).collect()
}

#[pyfunction]
fn unpack_blocks(
    py: Python<'_>,
    type_name: &str,
    blocks: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let tensor_type = type_named(type_name)?;
    let blocks = contiguous::<u8>("blocks", "uint8", blocks)?;
    let out = contiguous::<f32>("out", "float32", out)?;
    if out.readonly() {
        return Err(PyValueError::new_err("out must be writable"));
    }
    let place = |start: usize, len: usize| (start, start + len);
    let (from, to) = place(blocks.buf_ptr() as usize, blocks.len_bytes());
    let (start, end) = place(out.buf_ptr() as usize, out.len_bytes());
    if from < end && start < to {
        return Err(PyValueError::new_err("blocks and out share memory, but out is written"));
    }
    if blocks.item_count() == 0 && out.item_count() == 0 {
        return Ok(());
    }
    if !start.is_multiple_of(align_of::<f32>()) {
        return Err(PyValueError::new_err("out is not aligned to its elements"));
    }
    // SAFETY: the view keeps the memory, which is contiguous; any byte is one.
    let blocks = unsafe { std::slice::from_raw_parts(blocks.buf_ptr().cast::<u8>(), blocks.item_count()) };
    // SAFETY: likewise, aligned, and apart from the blocks. That no other thread of Python touches it meanwhile is the
    // caller's part, as with every call of numpy and torch.
    let out = unsafe { std::slice::from_raw_parts_mut(out.buf_ptr().cast::<f32>(), out.item_count()) };
    py.detach(|| unpack(tensor_type, blocks, out)).map_err(block_error)
}

#[pyfunction]
fn whole_blocks(
    py: Python<'_>,
    type_name: &str,
    blocks: &Bound<'_, PyAny>,
    numbers: &Bound<'_, PyAny>,
    scales: &Bound<'_, PyAny>,
    minima: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let tensor_type = type_named(type_name)?;
    let blocks = contiguous::<u8>("blocks", "uint8", blocks)?;
    let numbers = contiguous::<i8>("numbers", "int8", numbers)?;
    let scales = contiguous::<f32>("scales", "float32", scales)?;
    let minima = contiguous::<f32>("minima", "float32", minima)?;
    if numbers.readonly() || scales.readonly() || minima.readonly() {
        return Err(PyValueError::new_err("numbers, scales and minima must be writable"));
    }
    if scales.item_count() == 0 || !numbers.item_count().is_multiple_of(scales.item_count()) {
        let (numbers, scales) = (numbers.item_count(), scales.item_count());
        return Err(PyValueError::new_err(format!("{scales} scales cannot share {numbers} numbers")));
    }
    if blocks.item_count() == 0 || minima.item_count() != scales.item_count() {
        let (bytes, minima, scales) = (blocks.item_count(), minima.item_count(), scales.item_count());
        return Err(PyValueError::new_err(format!(
            "{bytes} bytes, {minima} minima and {scales} scales do not fit"
        )));
    }
    let place = |start: usize, len: usize| (start, start + len);
    let mut places = [
        place(blocks.buf_ptr() as usize, blocks.len_bytes()),
        place(numbers.buf_ptr() as usize, numbers.len_bytes()),
        place(scales.buf_ptr() as usize, scales.len_bytes()),
        place(minima.buf_ptr() as usize, minima.len_bytes()),
    ];
    places.sort_unstable();
    if places.windows(2).any(|pair| pair[1].0 < pair[0].1) {
        return Err(PyValueError::new_err("blocks, numbers, scales and minima share memory"));
    }
    expect_aligned("scales", &scales)?;
    expect_aligned("minima", &minima)?;
    // SAFETY: the view keeps the memory, which is contiguous and not empty; any byte is one.
    let blocks = unsafe { std::slice::from_raw_parts(blocks.buf_ptr().cast::<u8>(), blocks.item_count()) };
    // SAFETY: likewise, writable, and apart from all others. That no other thread of Python touches the arrays
    // meanwhile is the caller's part, as with every call of numpy and torch.
    let numbers =
        unsafe { std::slice::from_raw_parts_mut(numbers.buf_ptr().cast::<i8>(), numbers.item_count()) };
    // SAFETY: likewise, and aligned.
    let scales =
        unsafe { std::slice::from_raw_parts_mut(scales.buf_ptr().cast::<f32>(), scales.item_count()) };
    // SAFETY: likewise.
    let minima =
        unsafe { std::slice::from_raw_parts_mut(minima.buf_ptr().cast::<f32>(), minima.item_count()) };
    let group_size = numbers.len() / scales.len();
    py.detach(|| tensor_type.with_minima(blocks, group_size, numbers, scales, minima)).map_err(block_error)
}

/// Unpacks in as many threads as it is worth.
fn unpack(tensor_type: TensorType, blocks: &[u8], out: &mut [f32]) -> Result<(), BlockError> {
    let num_blocks = out.len() / tensor_type.block();
    let num_threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
    if out.len() < MIN_SHARED_NUMBERS
        || num_threads == 1
        || blocks.len() != num_blocks * tensor_type.block_bytes()
    {
        return tensor_type.unpack(blocks, out);
    }
    let each = num_blocks.div_ceil(num_threads);
    let pieces =
        blocks.chunks(each * tensor_type.block_bytes()).zip(out.chunks_mut(each * tensor_type.block()));
    std::thread::scope(|scope| {
        let unpack = |(blocks, out): (&[u8], &mut [f32])| tensor_type.unpack(blocks, out);
        let threads: Vec<_> = pieces.map(|piece| scope.spawn(move || unpack(piece))).collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

fn contiguous<T: pyo3::buffer::Element>(
    name: &str,
    dtype: &str,
    array: &Bound<'_, PyAny>,
) -> PyResult<PyBuffer<T>> {
    let view = native_buffer::<T>(array)
        .map_err(|error| PyTypeError::new_err(format!("{name} must be an array of {dtype}: {error}")))?;
    if !view.is_c_contiguous() {
        return Err(PyValueError::new_err(format!("{name} must be contiguous")));
    }
    Ok(view)
}
