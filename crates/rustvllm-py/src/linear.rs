//! Products with packed weights on the CPU for Python: arrays in, checked, and the kernels called on their memory in place.

use std::sync::Arc;

use ::cpu_kernels::{
    Activation, Element, Epilogue, Kernel, LinearError, Matrix, OutRows, PackedLinear, Residual, Threads,
    TokenRows, WeightElement, WeightKind, bf16, linear::work, read_once,
};
use pyo3::{
    buffer::{self, PyBuffer},
    exceptions::{PyMemoryError, PyRuntimeError, PyTypeError, PyValueError},
    prelude::*,
};

use crate::{buffers::native_buffer, cpu_threads::CpuThreads};

/// Multiplications from which on Python's lock is released meanwhile: about 20 µs of them.
const MIN_WORK_TO_DETACH: usize = 1 << 19;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CpuLinear>()
}

pub(crate) fn linear_error(error: LinearError) -> PyErr {
    match error {
        LinearError::Memory { .. } => PyMemoryError::new_err(error.to_string()),
        _ => PyValueError::new_err(error.to_string()),
    }
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
    #[pyo3(signature = (threads, out_features, in_features, kind, group_size=None))]
    fn new(
        threads: &CpuThreads,
        out_features: usize,
        in_features: usize,
        kind: &str,
        group_size: Option<usize>,
    ) -> PyResult<Self> {
        let kind = match (kind, group_size) {
            ("int8", group_size) => WeightKind::Int8 { group_size: group_size.unwrap_or(in_features) },
            ("w8a8", group_size) => WeightKind::W8A8 { group_size: group_size.unwrap_or(in_features) },
            ("f32" | "bf16", Some(group_size)) => {
                return Err(linear_error(LinearError::Group { group_size }));
            }
            ("f32", None) => WeightKind::F32,
            ("bf16", None) => WeightKind::Bf16,
            _ => {
                let message = format!("kind is {kind:?}, but it must be f32, bf16, int8 or w8a8");
                return Err(PyValueError::new_err(message));
            }
        };
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
        match self.layer.kind() {
            WeightKind::F32 => "f32",
            WeightKind::Bf16 => "bf16",
            WeightKind::Int8 { .. } => "int8",
            WeightKind::W8A8 { .. } => "w8a8",
        }
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
        let kind = self.layer.kind();
        let group_size = kind.group_size().ok_or_else(|| linear_error(LinearError::NotWhole { kind }))?;
        let rows = Rows::<u8>::new("blocks", blocks)?;
        rows.expect_contiguous()?;
        let in_features = self.layer.in_features();
        let row_bytes = in_features / tensor_type.block() * tensor_type.block_bytes();
        rows.expect_shape(rows.len, row_bytes)?;
        // What is wrong with one row's lengths is wrong with every row's: said before any is packed.
        let mut numbers = vec![0; in_features];
        let mut scales = vec![0.0; in_features.div_ceil(group_size)];
        tensor_type
            .whole_numbers(&vec![0; row_bytes], group_size, &mut numbers, &mut scales)
            .map_err(crate::gguf::block_error)?;
        // SAFETY: the view keeps the memory; any byte is one.
        let bytes = unsafe { std::slice::from_raw_parts(rows.start::<u8>(), rows.extent()) };
        let threads = Arc::clone(&self.threads);
        let layer = self.layer_to_fill()?;
        let fill = |row: usize, numbers: &mut [i8], scales: &mut [f32]| {
            let bytes = &bytes[row * row_bytes..(row + 1) * row_bytes];
            let done = tensor_type.whole_numbers(bytes, group_size, numbers, scales);
            debug_assert!(done.is_ok(), "the lengths were tried above");
        };
        py.detach(|| layer.pack_whole_rows(first_row, rows.len, &threads, fill)).map_err(linear_error)
    }

    fn pack_whole(
        &mut self,
        py: Python<'_>,
        first_row: usize,
        numbers: &Bound<'_, PyAny>,
        scales: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let kind = self.layer.kind();
        let group_size = kind.group_size().ok_or_else(|| linear_error(LinearError::NotWhole { kind }))?;
        let numbers = Rows::<i8>::get("numbers", numbers)?
            .ok_or_else(|| PyTypeError::new_err("numbers must be an array of int8"))?;
        let scales = Rows::<f32>::get("scales", scales)?
            .ok_or_else(|| PyTypeError::new_err("scales must be an array of float32"))?;
        let in_features = self.layer.in_features();
        numbers.expect_columns(in_features)?;
        scales.expect_shape(numbers.len, in_features.div_ceil(group_size))?;
        // SAFETY: the view keeps the memory; any byte is a number.
        let from = unsafe { std::slice::from_raw_parts(numbers.start::<i8>(), numbers.extent()) };
        let scales_from = scales.token_rows::<f32>();
        let threads = Arc::clone(&self.threads);
        let layer = self.layer_to_fill()?;
        let fill = |row: usize, to: &mut [i8], scales: &mut [f32]| {
            to.copy_from_slice(&from[row * numbers.stride..][..to.len()]);
            scales.copy_from_slice(&scales_from.data[row * scales_from.stride..][..scales.len()]);
        };
        py.detach(|| layer.pack_whole_rows(first_row, numbers.len, &threads, fill)).map_err(linear_error)
    }

    fn set_input_order(&mut self, order: &Bound<'_, PyAny>) -> PyResult<()> {
        let view = native_buffer::<u32>(order)
            .map_err(|error| PyTypeError::new_err(format!("order must be an array of uint32: {error}")))?;
        let order = Python::attach(|py| view.to_vec(py))?;
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
}

impl CpuLinear {
    fn layer_to_fill(&mut self) -> PyResult<&mut PackedLinear> {
        Arc::get_mut(&mut self.layer).ok_or_else(|| {
            PyRuntimeError::new_err("the layer is part of a decoder, so its weight and bias stay as they are")
        })
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

fn dimensions(name: &str, found: usize) -> PyErr {
    PyValueError::new_err(format!("{name} has {found} dimensions, but it must have 2"))
}

fn view<T: buffer::Element>(name: &str, array: &Bound<'_, PyAny>) -> PyResult<PyBuffer<T>> {
    let view = native_buffer::<T>(array).map_err(|error| {
        PyTypeError::new_err(format!(
            "{name} must be an array of float32, or of bfloat16 seen as uint16: {error}"
        ))
    })?;
    expect_aligned(name, &view)?;
    Ok(view)
}

fn expect_aligned<T: buffer::Element>(name: &str, view: &PyBuffer<T>) -> PyResult<()> {
    if !(view.buf_ptr() as usize).is_multiple_of(size_of::<T>()) {
        return Err(PyValueError::new_err(format!("{name} is not aligned to its elements")));
    }
    Ok(())
}

/// A contiguous array of float32.
pub(crate) struct Vector(PyBuffer<f32>);

impl Vector {
    pub(crate) fn new(name: &'static str, array: &Bound<'_, PyAny>) -> PyResult<Self> {
        let view = native_buffer::<f32>(array)
            .map_err(|error| PyTypeError::new_err(format!("{name} must be an array of float32: {error}")))?;
        if view.dimensions() != 1 || !view.is_c_contiguous() {
            let message = format!("{name} must have 1 dimension and be contiguous");
            return Err(PyValueError::new_err(message));
        }
        expect_aligned(name, &view)?;
        Ok(Self(view))
    }

    pub(crate) fn as_slice(&self) -> &[f32] {
        if self.0.item_count() == 0 {
            return &[];
        }
        // SAFETY: the view keeps the memory of as many elements.
        unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast(), self.0.item_count()) }
    }

    /// # Safety
    ///
    /// The array is writable, and nothing else reads or writes it while the slice lives.
    #[expect(
        clippy::mut_from_ref,
        reason = "the memory is Python's; the caller's promise stands for the borrow"
    )]
    unsafe fn as_mut_slice(&self) -> &mut [f32] {
        if self.0.item_count() == 0 {
            return &mut [];
        }
        // SAFETY: the view keeps the memory of as many elements, and the caller lets no one else touch them while the
        // slice lives.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast(), self.0.item_count()) }
    }
}

/// A two-dimensional array of contiguous rows, with its name for messages.
pub(crate) struct Rows<T: buffer::Element> {
    name: &'static str,
    view: PyBuffer<T>,
    pub(crate) len: usize,
    width: usize,
    /// Elements from one row to the next.
    pub(crate) stride: usize,
}

impl<T: buffer::Element> Rows<T> {
    /// None: an array of another type.
    fn get(name: &'static str, array: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        native_buffer::<T>(array).ok().map(|view| Self::of(name, view)).transpose()
    }

    pub(crate) fn new(name: &'static str, array: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::of(name, view::<T>(name, array)?)
    }

    fn of(name: &'static str, view: PyBuffer<T>) -> PyResult<Self> {
        expect_aligned(name, &view)?;
        let &[num_rows, num_columns] = view.shape() else {
            return Err(dimensions(name, view.dimensions()));
        };
        let (size, strides) = (size_of::<T>() as isize, view.strides());
        // The stride of a dimension with fewer than two places says nothing.
        let is_contiguous = num_columns < 2 || strides[1] == size;
        let stride = if num_rows < 2 { num_columns as isize * size } else { strides[0] };
        if !is_contiguous || stride < num_columns as isize * size || stride % size != 0 {
            let message = format!(
                "{name} has the strides {strides:?}: its rows must be contiguous and follow each other without overlap"
            );
            return Err(PyValueError::new_err(message));
        }
        let stride = (stride / size) as usize;
        Ok(Self { name, view, len: num_rows, width: num_columns, stride })
    }

    /// Elements from the first to the last.
    pub(crate) fn extent(&self) -> usize {
        if self.view.item_count() == 0 { 0 } else { (self.len - 1) * self.stride + self.width }
    }

    pub(crate) fn token_rows<E: Element>(&self) -> TokenRows<'_, E> {
        // SAFETY: the view keeps the memory; the extent ends with its last element; `E` is as large as `T`, as is checked when
        // compiling, and takes all bits.
        let data = unsafe { std::slice::from_raw_parts(self.start::<E>(), self.extent()) };
        TokenRows { data, stride: self.stride }
    }

    /// # Safety
    ///
    /// The array is writable, and nothing else reads or writes it while the slice lives.
    #[expect(
        clippy::mut_from_ref,
        reason = "the memory is Python's; the caller's promise stands for the borrow"
    )]
    pub(crate) unsafe fn as_mut_slice<E>(&self) -> &mut [E] {
        // SAFETY: see `token_rows`.
        unsafe { std::slice::from_raw_parts_mut(self.start::<E>(), self.extent()) }
    }

    fn start<E>(&self) -> *mut E {
        const { assert!(size_of::<E>() == size_of::<T>() && align_of::<E>() <= size_of::<T>()) };
        if self.view.item_count() == 0 { std::ptr::dangling_mut() } else { self.view.buf_ptr().cast() }
    }

    pub(crate) fn expect_columns(&self, expected: usize) -> PyResult<()> {
        self.expect_shape(self.len, expected)
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }

    pub(crate) fn expect_shape(&self, num_rows: usize, num_columns: usize) -> PyResult<()> {
        if (self.len, self.width) == (num_rows, num_columns) {
            return Ok(());
        }
        let message = format!(
            "{} has the shape ({}, {}), but ({num_rows}, {num_columns}) is needed",
            self.name, self.len, self.width
        );
        Err(PyValueError::new_err(message))
    }

    pub(crate) fn expect_contiguous(&self) -> PyResult<()> {
        if self.len > 1 && self.stride != self.width {
            return Err(PyValueError::new_err(format!(
                "the rows of {} must follow each other without a gap",
                self.name
            )));
        }
        Ok(())
    }

    pub(crate) fn expect_writable(&self) -> PyResult<()> {
        if self.view.readonly() {
            return Err(PyValueError::new_err(format!("{} must be writable", self.name)));
        }
        Ok(())
    }

    pub(crate) fn place(&self) -> (usize, usize) {
        let start = self.view.buf_ptr() as usize;
        (start, start + self.extent() * size_of::<T>())
    }

    /// Whether both are the same memory, of which each element is its own place in both.
    pub(crate) fn is_same<U: buffer::Element>(&self, other: &Rows<U>) -> bool {
        size_of::<T>() == size_of::<U>() && self.place() == other.place() && self.stride == other.stride
    }

    pub(crate) fn expect_apart<U: buffer::Element>(&self, other: &Rows<U>) -> PyResult<()> {
        let ((start, end), (other_start, other_end)) = (self.place(), other.place());
        if start < other_end && other_start < end {
            let message =
                format!("{} and {} share memory, but one of them is written", self.name, other.name);
            return Err(PyValueError::new_err(message));
        }
        Ok(())
    }
}
