//! Attention on the CPU for Python: arrays in, checked, and the kernels called on their memory in place.

use std::{num::NonZeroU32, sync::Arc};

use ::cpu_kernels::{
    AttentionError, AttentionOptions, BatchError, CacheElement, CacheLayout, Cached, Element, Int8Head,
    Kernel, RaggedBatch, Threads, TokenRows, attend, attention::work, bf16, write_kv,
};
use pyo3::{
    buffer::{self, PyBuffer},
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
};

use crate::{
    cpu::{arrays::Place, threads::ThreadsOrNumber},
    scheduler::buffers::native_buffer,
};

/// Multiplications, about 20 µs of them, from which on other threads of Python get their turn meanwhile.
const MIN_WORK_TO_DETACH: usize = 1 << 18;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CpuAttention>()?;
    module.add_class::<CpuAttentionPlan>()
}

/// Makes the plans of an engine's steps, and knows the threads that compute them.
#[pyclass(frozen, module = "rustvllm._core")]
struct CpuAttention {
    threads: Arc<Threads>,
}

#[pymethods]
impl CpuAttention {
    #[new]
    fn new(threads: ThreadsOrNumber<'_>) -> PyResult<Self> {
        Ok(Self { threads: threads.threads()? })
    }

    #[getter]
    fn num_threads(&self) -> usize {
        self.threads.num_threads()
    }

    /// Name of the kernel that computes heads of `head_dim` features here: avx512, avx2, portable or scalar.
    #[staticmethod]
    fn kernel(head_dim: usize) -> &'static str {
        Kernel::best(head_dim).name()
    }

    #[pyo3(signature = (block_size, query_start_loc, seq_lens, block_table, slot_mapping, table_rows=None, visible=None))]
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    fn plan(
        &self,
        py: Python<'_>,
        block_size: usize,
        query_start_loc: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        block_table: &Bound<'_, PyAny>,
        slot_mapping: &Bound<'_, PyAny>,
        table_rows: Option<&Bound<'_, PyAny>>,
        visible: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<CpuAttentionPlan> {
        let query_start_loc = int32_array("query_start_loc", query_start_loc, 1)?;
        let seq_lens = int32_array("seq_lens", seq_lens, 1)?;
        let block_table = int32_array("block_table", block_table, 2)?;
        let slot_mapping = int32_array("slot_mapping", slot_mapping, 1)?;
        let table_rows = table_rows.map(|rows| int32_array("table_rows", rows, 1)).transpose()?;
        let num_rows = block_table.shape()[0];
        if table_rows.is_none() && num_rows != seq_lens.item_count() {
            let message = format!(
                "block_table has {} rows, but seq_lens has {} requests",
                num_rows,
                seq_lens.item_count()
            );
            return Err(PyValueError::new_err(message));
        }
        let rows = table_rows.as_ref().map(int32_slice).transpose()?;
        // A table that has rows of other requests, too, is large: it is read where it lies.
        let copied = if rows.is_some() { Vec::new() } else { block_table.to_vec(py)? };
        let table = if rows.is_some() { int32_slice(&block_table)? } else { &copied };
        let batch = RaggedBatch::of_rows(
            block_size,
            &query_start_loc.to_vec(py)?,
            &seq_lens.to_vec(py)?,
            table,
            rows.map(|rows| (num_rows, rows)),
            &slot_mapping.to_vec(py)?,
        );
        let visible = visible.map(|ends| int32_array("visible", ends, 1)?.to_vec(py)).transpose()?;
        let batch = match visible {
            Some(visible) => batch.and_then(|batch| batch.seeing(&visible)),
            None => batch,
        };
        let batch = batch.map_err(|error: BatchError| PyValueError::new_err(error.to_string()))?;
        Ok(CpuAttentionPlan { batch, threads: Arc::clone(&self.threads) })
    }
}

/// One step, checked; `forward` computes a layer of it.
#[pyclass(frozen, module = "rustvllm._core")]
pub(crate) struct CpuAttentionPlan {
    pub(crate) batch: RaggedBatch,
    pub(crate) threads: Arc<Threads>,
}

#[pymethods]
impl CpuAttentionPlan {
    #[pyo3(signature = (query, key, value, kv_cache, out, scale, *, sliding_window=None, soft_cap=None, alibi_slopes=None, sinks=None))]
    #[expect(clippy::too_many_arguments, reason = "the arrays of a layer")]
    fn forward(
        &self,
        py: Python<'_>,
        query: &Bound<'_, PyAny>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        kv_cache: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        scale: f32,
        sliding_window: Option<u32>,
        soft_cap: Option<f32>,
        alibi_slopes: Option<Vec<f32>>,
        sinks: Option<Vec<f32>>,
    ) -> PyResult<()> {
        let sliding_window = sliding_window.map(|window| {
            NonZeroU32::new(window).ok_or_else(|| {
                PyValueError::new_err("sliding_window is 0, but a query sees at least itself; None sees all")
            })
        });
        if let Some(cap) = soft_cap
            && !(cap > 0.0 && cap.is_finite())
        {
            return Err(PyValueError::new_err(format!("soft_cap is {cap}, but it must be a number above 0")));
        }
        let (alibi_slopes, sinks) = (alibi_slopes.unwrap_or_default(), sinks.unwrap_or_default());
        let sliding_window = sliding_window.transpose()?;
        let options =
            AttentionOptions { scale, sliding_window, soft_cap, alibi_slopes: &alibi_slopes, sinks: &sinks };
        let arrays = [query, key, value, kv_cache, out];
        let is_wide = PyBuffer::<f32>::get(query).is_ok();
        if PyBuffer::<i8>::get(kv_cache).is_ok() {
            if is_wide {
                self.forward_as::<f32, f32, i8, Int8Head>(py, arrays, &options)
            } else {
                self.forward_as::<u16, bf16, i8, Int8Head>(py, arrays, &options)
            }
        } else if !is_wide {
            self.forward_as::<u16, bf16, u16, bf16>(py, arrays, &options)
        } else if PyBuffer::<u16>::get(kv_cache).is_ok() {
            self.forward_as::<f32, f32, u16, bf16>(py, arrays, &options)
        } else {
            self.forward_as::<f32, f32, f32, f32>(py, arrays, &options)
        }
    }
}

impl CpuAttentionPlan {
    /// `T` is what the buffers say they hold, `E` what that means; `K` and `C` of the cache.
    fn forward_as<T, E, K, C>(
        &self,
        py: Python<'_>,
        [query, key, value, kv_cache, out]: [&Bound<'_, PyAny>; 5],
        options: &AttentionOptions<'_>,
    ) -> PyResult<()>
    where
        T: buffer::Element + Sync,
        E: Element,
        K: buffer::Element + Sync,
        C: CacheElement<E>,
    {
        let query = Array::<T>::new("query", query, 3)?;
        let key = Array::<T>::new("key", key, 3)?;
        let value = Array::<T>::new("value", value, 3)?;
        let cache = Array::<K>::new("kv_cache", kv_cache, 5)?;
        let out = Array::<T>::new("out", out, 3)?;
        let (num_heads, head_dim) = (query.shape()[1], query.shape()[2]);
        let layout = cache.layout::<C>()?;
        let num_tokens = self.batch.num_tokens();
        for (array, heads) in [
            (&query, num_heads),
            (&key, layout.num_kv_heads),
            (&value, layout.num_kv_heads),
            (&out, num_heads),
        ] {
            array.expect_shape([num_tokens, heads, layout.head_dim])?;
        }
        cache.expect_writable()?;
        out.expect_writable()?;
        for read in [&query, &key, &value] {
            read.expect_apart(&cache)?;
            read.expect_apart(&out)?;
        }
        cache.expect_apart(&out)?;
        let (query, key, value) =
            (query.token_rows::<E>()?, key.token_rows::<E>()?, value.token_rows::<E>()?);
        cache.expect_contiguous()?;
        out.expect_contiguous()?;
        // SAFETY: both are writable and contiguous, share no byte with each other or with what is read, and stay where they
        // are while the views live. That no other thread of Python touches them meanwhile is the caller's part, as with
        // every call of numpy and torch.
        let (cache, out) = unsafe { (cache.as_mut_slice::<C>(), out.as_mut_slice::<E>()) };
        let kernel = Kernel::best(head_dim);
        let mut compute = || {
            write_kv(&self.batch, key, value, cache, layout, kernel)?;
            attend(&self.batch, query, num_heads, cache, layout, options, kernel, &self.threads, out)
        };
        let done = if work(&self.batch, num_heads, head_dim) >= MIN_WORK_TO_DETACH {
            py.detach(compute)
        } else {
            compute()
        };
        done.map_err(|error: AttentionError| PyValueError::new_err(error.to_string()))
    }
}

/// A view of a Python array, with its name for messages.
pub(crate) struct Array<T: buffer::Element> {
    name: &'static str,
    view: PyBuffer<T>,
}

impl<T: buffer::Element> Array<T> {
    pub(crate) fn new(name: &'static str, array: &Bound<'_, PyAny>, dimensions: usize) -> PyResult<Self> {
        let view = native_buffer::<T>(array).map_err(|error| {
            PyTypeError::new_err(format!(
                "{name} must be an array of float32, or of bfloat16 seen as uint16, as all others (a KV cache may hold \
                 bfloat16 for queries of float32, and int8 for both): {error}"
            ))
        })?;
        if view.dimensions() != dimensions {
            let message =
                format!("{name} has {} dimensions, but it must have {dimensions}", view.dimensions());
            return Err(PyValueError::new_err(message));
        }
        if !(view.buf_ptr() as usize).is_multiple_of(size_of::<T>()) {
            return Err(PyValueError::new_err(format!("{name} is not aligned to its elements")));
        }
        Ok(Self { name, view })
    }

    fn shape(&self) -> &[usize] {
        self.view.shape()
    }

    /// Of a cache whose elements mean `C`.
    pub(crate) fn layout<C: Cached>(&self) -> PyResult<CacheLayout> {
        let &[2, num_blocks, block_size, num_kv_heads, head_len] = self.shape() else {
            let message = format!(
                "{} has the shape {:?}, but its first dimension must be 2: keys, values",
                self.name,
                self.shape()
            );
            return Err(PyValueError::new_err(message));
        };
        let Some(head_dim) = head_len.checked_sub(C::SCALE_LEN) else {
            let message = format!(
                "{} has heads of {head_len} bytes, but {} are a scale, and features come before it",
                self.name,
                C::SCALE_LEN
            );
            return Err(PyValueError::new_err(message));
        };
        Ok(CacheLayout { num_blocks, block_size, num_kv_heads, head_dim })
    }

    fn expect_shape(&self, expected: [usize; 3]) -> PyResult<()> {
        if self.shape() == expected {
            return Ok(());
        }
        let message = format!(
            "{} has the shape {:?}, but the step and the cache need {expected:?}",
            self.name,
            self.shape()
        );
        Err(PyValueError::new_err(message))
    }

    pub(crate) fn expect_writable(&self) -> PyResult<()> {
        if self.view.readonly() {
            return Err(PyValueError::new_err(format!("{} must be writable", self.name)));
        }
        Ok(())
    }

    pub(crate) fn expect_contiguous(&self) -> PyResult<()> {
        if !self.view.is_c_contiguous() {
            return Err(PyValueError::new_err(format!("{} must be C-contiguous", self.name)));
        }
        Ok(())
    }

    /// Elements from one token to the next.
    fn stride(&self) -> PyResult<usize> {
        let size = size_of::<T>();
        let (shape, strides) = (self.shape(), self.view.strides());
        // The stride of a dimension with fewer than two places says nothing.
        let is = |dimension: usize, expected: usize| {
            shape[dimension] < 2 || usize::try_from(strides[dimension]) == Ok(expected * size)
        };
        let row = shape[1] * shape[2];
        if !is(2, 1) || !is(1, shape[2]) {
            let message =
                format!("{} has the strides {strides:?}: the heads of a token must be contiguous", self.name);
            return Err(PyValueError::new_err(message));
        }
        if shape[0] < 2 {
            return Ok(row);
        }
        match usize::try_from(strides[0]) {
            Ok(stride) if stride.is_multiple_of(size) && stride / size >= row => Ok(stride / size),
            _ => {
                let message = format!(
                    "{} has the strides {strides:?}: its tokens must follow each other without overlap",
                    self.name
                );
                Err(PyValueError::new_err(message))
            }
        }
    }

    /// Elements from the first to the last.
    fn extent(&self) -> PyResult<usize> {
        if self.view.item_count() == 0 {
            return Ok(0);
        }
        if self.view.dimensions() != 3 {
            return Ok(self.view.item_count());
        }
        let shape = self.shape();
        Ok((shape[0] - 1) * self.stride()? + shape[1] * shape[2])
    }

    fn token_rows<E: Element>(&self) -> PyResult<TokenRows<'_, E>> {
        let (stride, extent) = (self.stride()?, self.extent()?);
        // SAFETY: the view keeps the memory; `extent` ends with its last element; `E` is as large as `T`, as is checked when
        // compiling, and takes all bits.
        let data = unsafe { std::slice::from_raw_parts(self.start::<E>(extent), extent) };
        Ok(TokenRows { data, stride })
    }

    /// # Safety
    ///
    /// The array is contiguous and writable, and nothing else reads or writes it while the slice lives.
    #[expect(
        clippy::mut_from_ref,
        reason = "the memory is Python's; the caller's promise stands for the borrow"
    )]
    pub(crate) unsafe fn as_mut_slice<E: Cached>(&self) -> &mut [E] {
        let len = self.view.item_count();
        // SAFETY: the view keeps the memory of `len` elements; see `token_rows` for their type.
        unsafe { std::slice::from_raw_parts_mut(self.start::<E>(len), len) }
    }

    fn start<E: Cached>(&self, len: usize) -> *mut E {
        const { assert!(size_of::<E>() == size_of::<T>() && align_of::<E>() <= size_of::<T>()) };
        if len == 0 {
            return std::ptr::dangling_mut();
        }
        self.view.buf_ptr().cast()
    }

    pub(crate) fn place(&self) -> PyResult<Place> {
        let start = self.view.buf_ptr() as usize;
        Ok((start, start + self.extent()? * size_of::<T>()))
    }

    fn expect_apart<U: buffer::Element>(&self, other: &Array<U>) -> PyResult<()> {
        let ((start, end), (other_start, other_end)) = (self.place()?, other.place()?);
        if start < other_end && other_start < end {
            let message =
                format!("{} and {} share memory, but one of them is written", self.name, other.name);
            return Err(PyValueError::new_err(message));
        }
        Ok(())
    }
}

pub(crate) fn int32_array(
    name: &str,
    array: &Bound<'_, PyAny>,
    dimensions: usize,
) -> PyResult<PyBuffer<i32>> {
    let view = native_buffer::<i32>(array)
        .map_err(|error| PyTypeError::new_err(format!("{name} must be an array of int32: {error}")))?;
    if view.dimensions() != dimensions {
        let message = format!("{name} has {} dimensions, but it must have {dimensions}", view.dimensions());
        return Err(PyValueError::new_err(message));
    }
    Ok(view)
}

/// The elements of an array, where they lie.
pub(crate) fn int32_slice(view: &PyBuffer<i32>) -> PyResult<&[i32]> {
    if view.item_count() == 0 {
        return Ok(&[]);
    }
    if !view.is_c_contiguous() || !view.buf_ptr().cast::<i32>().is_aligned() {
        return Err(PyValueError::new_err("an array of int32 must be C-contiguous and aligned"));
    }
    // SAFETY: the view keeps as many elements where they are, which are contiguous and aligned. That no other thread of
    // Python writes them meanwhile is the caller's part, as with every call of numpy and torch.
    Ok(unsafe { std::slice::from_raw_parts(view.buf_ptr().cast(), view.item_count()) })
}
