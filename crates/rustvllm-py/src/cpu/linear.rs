//! Products with packed weights on the CPU for Python: arrays in, checked, and the kernels called on their memory in place.

use std::sync::Arc;

use ::cpu_kernels::{
    Activation, Element, Epilogue, Kernel, LinearError, Matrix, OutRows, PackedLinear, QuantizedRow,
    Residual, ScaleForm, Threads, WeightElement, WeightKind, ZeroForm, bf16, f16, fill_together,
    linear::work, num_streams, read_once,
};
use pyo3::{
    buffer::{self, PyBuffer},
    exceptions::{PyRuntimeError, PyTypeError, PyValueError},
    prelude::*,
};

use crate::{
    cpu::{
        arrays::{Rows, Vector, dimensions, expect_aligned, view},
        block_rows::{blocks_filling, check_blocks, row_bytes},
        threads::CpuThreads,
        weight_kind::{kind_name, weight_kind},
        word_rows::WordRows,
    },
    errors::linear_error,
    scheduler::buffers::native_buffer,
};

/// Multiplications from which on Python's lock is released meanwhile: about 20 µs of them.
const MIN_WORK_TO_DETACH: usize = 1 << 19;
/// Numbers from which on unpacking releases it.
const MIN_NUMBERS_TO_DETACH: usize = 1 << 14;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CpuLinear>()
}

/// The activation of a name.
pub(crate) fn activation_of(name: &str) -> PyResult<Activation> {
    let known = Activation::NAMES.iter().find(|(known, _)| *known == name);
    known.map(|(_, activation)| *activation).ok_or_else(|| {
        let names = Activation::NAMES.map(|(name, _)| name).join(", ");
        PyValueError::new_err(format!("activation is {name:?}, but it must be one of {names}"))
    })
}

/// The weights of a linear layer, packed for this machine.
#[pyclass(name = "PackedLinear", module = "rustvllm._core")]
pub(crate) struct CpuLinear {
    /// Shared with the decoders that it is a part of.
    pub(crate) layer: Arc<PackedLinear>,
    threads: Arc<Threads>,
}

#[pymethods]
impl CpuLinear {
    #[new]
    #[pyo3(signature = (threads, out_features, in_features, kind, group_size=None, *, scales=None, zeros="middle"))]
    fn new(
        threads: &CpuThreads,
        out_features: usize,
        in_features: usize,
        kind: &str,
        group_size: Option<usize>,
        scales: Option<&str>,
        zeros: &str,
    ) -> PyResult<Self> {
        let kind = weight_kind(kind, in_features, group_size, scales, zeros)?;
        let layer = PackedLinear::new(out_features, in_features, kind).map_err(linear_error)?;
        Ok(Self { layer: Arc::new(layer), threads: Arc::clone(&threads.threads) })
    }

    #[getter]
    fn out_features(&self) -> usize {
        self.layer.out_features()
    }

    #[getter]
    fn in_features(&self) -> usize {
        self.layer.in_features()
    }

    #[getter]
    fn kind(&self) -> &'static str {
        kind_name(self.layer.kind())
    }

    #[getter]
    fn has_form(&self) -> bool {
        matches!(self.layer.kind(), WeightKind::Quantized(_))
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.layer.num_bytes()
    }

    /// Name of the kernel that computes products here: avx512, avx2 or portable.
    #[staticmethod]
    fn kernel() -> &'static str {
        Kernel::best_for_products().name()
    }

    /// What computes products of rounded activations, of few rows and of many, and what the machine has for them but computes
    /// something else.
    #[staticmethod]
    fn w8a8_kernels() -> ([&'static str; 2], Vec<&'static str>) {
        let kernel = Kernel::best_for_products();
        (kernel.w8a8_names(), kernel.w8a8_refused())
    }

    /// What multiplies `bf16` by `bf16` without the matrix unit, and whether something faster is there but wrong.
    #[staticmethod]
    fn bf16_kernel() -> (&'static str, bool) {
        let kernel = Kernel::best_for_products();
        (kernel.bf16_name(), kernel.is_bf16_refused())
    }

    /// Streams of memory that each core reads weights in, 1 or 2.
    #[staticmethod]
    fn num_streams() -> usize {
        num_streams()
    }

    /// Whether this machine's matrix unit multiplies packed weights.
    #[staticmethod]
    fn has_matrix_unit() -> bool {
        Kernel::best_for_products().has_matrix_unit()
    }

    #[pyo3(signature = (num_rows))]
    fn set_matrix_rows(&self, num_rows: Option<usize>) -> PyResult<()> {
        self.layer.set_matrix_rows(num_rows).map_err(linear_error)
    }

    fn pack_rows(&mut self, py: Python<'_>, first_row: usize, weight: &Bound<'_, PyAny>) -> PyResult<()> {
        if PyBuffer::<f32>::get(weight).is_ok() {
            self.pack_rows_as::<f32, f32>(py, first_row, weight)
        } else if self.layer.kind() == WeightKind::F16 {
            self.pack_rows_as::<u16, f16>(py, first_row, weight)
        } else {
            self.pack_rows_as::<u16, bf16>(py, first_row, weight)
        }
    }

    fn pack_blocks(
        &mut self,
        py: Python<'_>,
        first_row: usize,
        type_name: &str,
        blocks: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let tensor_type = crate::gguf::type_named(type_name)?;
        let rows = Rows::<u8>::new("blocks", blocks)?;
        rows.expect_contiguous()?;
        check_blocks(&self.layer, tensor_type)?;
        let row_bytes = row_bytes(&self.layer, tensor_type);
        rows.expect_shape(rows.len, row_bytes)?;
        // SAFETY: the view keeps the memory; any byte is one.
        let bytes = unsafe { std::slice::from_raw_parts(rows.start::<u8>(), rows.extent()) };
        let threads = Arc::clone(&self.threads);
        let filling = blocks_filling(self.layer_to_fill()?, first_row, rows.len, tensor_type, |row, take| {
            take(&bytes[row * row_bytes..(row + 1) * row_bytes]);
        });
        let filling = filling.map_err(linear_error)?;
        py.detach(|| fill_together(vec![filling], &threads)).map_err(|(_, error)| linear_error(error))
    }

    #[pyo3(signature = (first_row, numbers, scales, zeros=None))]
    fn pack_whole(
        &mut self,
        py: Python<'_>,
        first_row: usize,
        numbers: &Bound<'_, PyAny>,
        scales: &Bound<'_, PyAny>,
        zeros: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.whole_group_size()?;
        let numbers = Rows::<i8>::get("numbers", numbers)?
            .ok_or_else(|| PyTypeError::new_err("numbers must be an array of int8"))?;
        let in_features = self.layer.in_features();
        numbers.expect_columns(in_features)?;
        // SAFETY: the view keeps the memory; any byte is a number.
        let from = unsafe { std::slice::from_raw_parts(numbers.start::<i8>(), numbers.extent()) };
        let row =
            |row: usize, to: &mut [i8]| to.copy_from_slice(&from[row * numbers.stride..][..in_features]);
        self.pack_whole_numbers(py, first_row, numbers.len, scales, zeros, row)
    }

    #[pyo3(signature = (first_row, words, layout, bits, less, scales, zeros=None, order=None))]
    #[expect(clippy::too_many_arguments, reason = "they are what a tensor is made of")]
    fn pack_words(
        &mut self,
        py: Python<'_>,
        first_row: usize,
        words: &Bound<'_, PyAny>,
        layout: &str,
        bits: usize,
        less: u8,
        scales: &Bound<'_, PyAny>,
        zeros: Option<&Bound<'_, PyAny>>,
        order: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.whole_group_size()?;
        let words = Rows::<i32>::get("words", words)?
            .ok_or_else(|| PyTypeError::new_err("words must be an array of int32"))?;
        words.expect_contiguous()?;
        // SAFETY: the view keeps the memory; any bits are a word.
        let from = unsafe { std::slice::from_raw_parts(words.start::<u32>(), words.extent()) };
        let order = order.map(|order| indices(py, order)).transpose()?;
        let (shape, form) = ((words.len, words.width()), (layout, bits, less));
        let rows = WordRows::new(from, shape, form, self.layer.in_features(), order)?;
        let row = |row: usize, to: &mut [i8]| rows.write_row(row, to);
        self.pack_whole_numbers(py, first_row, rows.num_rows, scales, zeros, row)
    }

    fn set_input_order(&mut self, order: &Bound<'_, PyAny>) -> PyResult<()> {
        let order = indices(order.py(), order)?;
        self.layer_to_fill()?.set_input_order(order).map_err(linear_error)
    }

    #[pyo3(signature = (bias))]
    fn set_bias(&mut self, bias: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let bias = bias.map(|bias| Vector::new("bias", bias)).transpose()?;
        self.layer_to_fill()?.set_bias(bias.as_ref().map(Vector::as_slice)).map_err(linear_error)
    }

    #[pyo3(signature = (x, out, *, activation=None, residual=None))]
    fn forward(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        activation: Option<&str>,
        residual: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let activation = activation.map_or(Ok(Activation::None), activation_of)?;
        let what = (activation, residual);
        match (Rows::<f32>::get("x", x)?, Rows::<f32>::get("out", out)?) {
            (Some(x), Some(out)) => self.forward_as::<f32, f32, f32, f32>(py, &x, &out, what),
            (Some(x), None) => self.forward_as::<f32, f32, u16, bf16>(py, &x, &Rows::new("out", out)?, what),
            (None, Some(out)) => self.forward_as::<u16, bf16, f32, f32>(py, &Rows::new("x", x)?, &out, what),
            (None, None) => self.forward_as::<u16, bf16, u16, bf16>(
                py,
                &Rows::new("x", x)?,
                &Rows::new("out", out)?,
                what,
            ),
        }
    }

    fn read(&self, py: Python<'_>) -> u64 {
        py.detach(|| read_once(&self.layer, &self.threads))
    }

    fn unpack_row(&self, row: usize, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let out = Vector::new("out", out)?;
        if out.0.readonly() {
            return Err(PyValueError::new_err("out must be writable"));
        }
        // SAFETY: it is writable, and stays where it is while the view lives; see `forward_as` for other threads of Python.
        self.layer.unpack_row(row, unsafe { out.as_mut_slice() }).map_err(linear_error)
    }

    fn unpack_rows(&self, py: Python<'_>, rows: PyBuffer<i64>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        if rows.dimensions() != 1 || !rows.is_c_contiguous() {
            return Err(PyValueError::new_err("rows must have 1 dimension and be contiguous"));
        }
        expect_aligned("rows", &rows)?;
        let width = self.layer.in_features();
        let out = Rows::<f32>::new("out", out)?;
        out.expect_shape(rows.item_count(), width)?;
        out.expect_contiguous()?;
        out.expect_writable()?;
        if rows.item_count() == 0 || width == 0 {
            return Ok(());
        }
        // SAFETY: the view keeps the memory of as many elements.
        let rows = unsafe { std::slice::from_raw_parts(rows.buf_ptr().cast::<i64>(), rows.item_count()) };
        // SAFETY: it is writable, and stays where it is while the view lives; see `forward_as` for other threads of Python.
        let out = unsafe { out.as_mut_slice::<f32>() };
        let limit = self.layer.out_features();
        if let Some(row) = rows.iter().find(|&&row| usize::try_from(row).map_or(true, |row| row >= limit)) {
            return Err(PyValueError::new_err(format!("row {row} is asked for, but there are {limit}")));
        }
        let mut unpack = || {
            rows.iter()
                .zip(out.chunks_exact_mut(width))
                .try_for_each(|(&row, out)| self.layer.unpack_row(row as usize, out))
        };
        // Adapters are loaded from all rows of a layer while the engine's thread wants the interpreter.
        let is_long = rows.len() * width >= MIN_NUMBERS_TO_DETACH;
        if is_long { py.detach(unpack) } else { unpack() }.map_err(linear_error)
    }
}

impl CpuLinear {
    pub(crate) fn layer_to_fill(&mut self) -> PyResult<&mut PackedLinear> {
        Arc::get_mut(&mut self.layer).ok_or_else(|| {
            PyRuntimeError::new_err("the layer is part of a decoder, so its weight and bias stay as they are")
        })
    }

    /// Inputs that share a scale.
    fn whole_group_size(&self) -> PyResult<usize> {
        let kind = self.layer.kind();
        kind.group_size().ok_or_else(|| linear_error(LinearError::NotWhole { kind }))
    }

    /// Pack rows whose whole numbers `row` writes.
    fn pack_whole_numbers(
        &mut self,
        py: Python<'_>,
        first_row: usize,
        num_rows: usize,
        scales: &Bound<'_, PyAny>,
        zeros: Option<&Bound<'_, PyAny>>,
        row: impl Fn(usize, &mut [i8]) + Send + Sync,
    ) -> PyResult<()> {
        let (kind, group_size) = (self.layer.kind(), self.whole_group_size()?);
        let num_groups = self.layer.in_features().div_ceil(group_size);
        let scales = Rows::<f32>::get("scales", scales)?
            .ok_or_else(|| PyTypeError::new_err("scales must be an array of float32"))?;
        scales.expect_shape(num_rows, num_groups)?;
        let scales_from = scales.token_rows::<f32>();
        let zeros = zeros.map(|zeros| Rows::<f32>::new("zeros", zeros)).transpose()?;
        if let Some(zeros) = &zeros {
            zeros.expect_shape(num_rows, num_groups)?;
        }
        let has_zeros = matches!(
            kind,
            WeightKind::Quantized(form) if matches!(form.zeros, ZeroForm::Point | ZeroForm::Minimum)
        );
        if zeros.is_some() != has_zeros {
            let message = "zeros are given to weights that have none, or missing where weights have them";
            return Err(PyValueError::new_err(message));
        }
        let threads = Arc::clone(&self.threads);
        let layer = self.layer_to_fill()?;
        if let WeightKind::Quantized(form) = kind {
            if form.scales == ScaleForm::TwoLevel {
                return Err(PyValueError::new_err(
                    "scales in two levels come from blocks alone: see pack_blocks",
                ));
            }
            let zeros_from = zeros.as_ref().map(Rows::token_rows::<f32>);
            let fill = |index: usize, to: &mut QuantizedRow| {
                let QuantizedRow { numbers, scales: to_scales, offsets, .. } = to;
                row(index, numbers);
                to_scales.copy_from_slice(&scales_from.data[index * scales_from.stride..][..num_groups]);
                if let Some(zeros) = &zeros_from {
                    let zeros = &zeros.data[index * zeros.stride..];
                    let parts = offsets.iter_mut().zip(zeros).zip(&*to_scales);
                    let is_point = form.zeros == ZeroForm::Point;
                    parts.for_each(|((to, zero), scale)| *to = if is_point { *zero } else { zero * scale });
                }
            };
            return py
                .detach(|| layer.pack_quantized_rows(first_row, num_rows, &threads, fill))
                .map_err(linear_error);
        }
        let fill = |index: usize, to: &mut [i8], scales: &mut [f32]| {
            row(index, to);
            scales.copy_from_slice(&scales_from.data[index * scales_from.stride..][..scales.len()]);
        };
        py.detach(|| layer.pack_whole_rows(first_row, num_rows, &threads, fill)).map_err(linear_error)
    }

    fn pack_rows_as<T: buffer::Element + Sync, E: WeightElement>(
        &mut self,
        py: Python<'_>,
        first_row: usize,
        weight: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        const { assert!(size_of::<E>() == size_of::<T>() && align_of::<E>() <= size_of::<T>()) };
        let view = view::<T>("weight", weight)?;
        let &[num_rows, num_columns] = view.shape() else {
            return Err(dimensions("weight", view.dimensions()));
        };
        let mut strides = [0; 2];
        for (stride, bytes) in strides.iter_mut().zip(view.strides()) {
            let size = size_of::<T>() as isize;
            if bytes % size != 0 {
                let message =
                    format!("weight has the strides {:?}, which are not whole elements", view.strides());
                return Err(PyValueError::new_err(message));
            }
            *stride = bytes / size;
        }
        // SAFETY: the view keeps the memory, whose elements lie where shape and strides say; `E` is as large as `T` and
        // takes all bits.
        let rows = unsafe {
            Matrix::from_raw(view.buf_ptr().cast::<E>(), num_rows, num_columns, strides[0], strides[1])
        };
        let threads = Arc::clone(&self.threads);
        let layer = self.layer_to_fill()?;
        py.detach(|| layer.pack_rows(first_row, rows, &threads)).map_err(linear_error)
    }

    /// `T` and `U` are what the buffers say they hold, `X` and `O` what that means.
    fn forward_as<T, X, U, O>(
        &self,
        py: Python<'_>,
        x: &Rows<T>,
        out: &Rows<U>,
        (activation, residual): (Activation, Option<&Bound<'_, PyAny>>),
    ) -> PyResult<()>
    where
        T: buffer::Element + Sync,
        X: Element,
        U: buffer::Element + Sync,
        O: Element,
    {
        let num_rows = x.len;
        x.expect_columns(self.layer.in_features())?;
        out.expect_shape(num_rows, self.layer.out_features())?;
        out.expect_writable()?;
        x.expect_apart(out)?;
        let residual = residual.map(|residual| Rows::<U>::new("residual", residual)).transpose()?;
        let residual = match &residual {
            None => Residual::None,
            Some(rows) => {
                rows.expect_shape(num_rows, self.layer.out_features())?;
                if rows.is_same(out) {
                    Residual::Out
                } else {
                    rows.expect_apart(out)?;
                    Residual::Rows(rows.token_rows::<O>())
                }
            }
        };
        let epilogue = Epilogue { activation, residual };
        let x = x.token_rows::<X>();
        // SAFETY: it is writable, shares no byte with what is read but a residual that is itself, and stays where it is
        // while the view lives. That no other thread of Python touches it meanwhile is the caller's part, as with every
        // call of numpy and torch.
        let out = OutRows { data: unsafe { out.as_mut_slice::<O>() }, stride: out.stride };
        let layer = &self.layer;
        let threads = &self.threads;
        let compute = || ::cpu_kernels::linear(layer, x, num_rows, &epilogue, threads, out);
        let done = if work(layer, num_rows) >= MIN_WORK_TO_DETACH { py.detach(compute) } else { compute() };
        done.map_err(linear_error)
    }
}

/// An array of whole numbers without a sign.
fn indices(py: Python<'_>, order: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let view = native_buffer::<u32>(order)
        .map_err(|error| PyTypeError::new_err(format!("order must be an array of uint32: {error}")))?;
    view.to_vec(py)
}
