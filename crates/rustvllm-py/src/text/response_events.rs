//! `_core.ResponseEvents`, and the bytes that it makes at the end of an answer.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use output::{ResponseEvents, SharedBytes};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::text::turn::PyTurnReading;

/// Most bytes of a slice: what is copied and sent in one go.
const SLICE_BYTES: usize = 256 << 10;

/// The events of one response, of which an output processor makes some.
#[pyclass(frozen, name = "ResponseEvents", module = "rustvllm._core")]
pub(crate) struct PyResponseEvents {
    /// Nothing waits for the interpreter while it holds this.
    inner: Arc<Mutex<ResponseEvents>>,
}

impl PyResponseEvents {
    pub(crate) fn shared(&self) -> Arc<Mutex<ResponseEvents>> {
        Arc::clone(&self.inner)
    }

    fn lock(&self) -> MutexGuard<'_, ResponseEvents> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl PyResponseEvents {
    #[new]
    #[pyo3(signature = (turn_reading = None, custom = HashSet::new()))]
    fn new(turn_reading: Option<&Bound<'_, PyTurnReading>>, custom: HashSet<String>) -> Self {
        let reading = turn_reading.map(|reading| reading.get().shared());
        Self { inner: Arc::new(Mutex::new(ResponseEvents::new(reading, custom))) }
    }

    /// The events of more text, whose tokens have these log-probabilities: the inner part of a JSON list.
    #[pyo3(signature = (text, logprobs = None))]
    fn read<'py>(&self, py: Python<'py>, text: &str, logprobs: Option<&[u8]>) -> Bound<'py, PyBytes> {
        let mut events = Vec::new();
        self.lock().read(text, logprobs.unwrap_or_default(), &mut events);
        PyBytes::new(py, &events)
    }

    /// The events of what was held back, and of the end of the last item.
    fn finish(&self, py: Python<'_>, is_whole: bool) -> PyByteSlices {
        py.detach(|| PyByteSlices::new(self.lock().finish(is_whole)))
    }

    /// The events of the end of an item that an error has cut short.
    fn break_off(&self, py: Python<'_>) -> PyByteSlices {
        py.detach(|| PyByteSlices::new(self.lock().break_off()))
    }

    /// The JSON list of the items that are complete.
    fn output(&self, py: Python<'_>) -> PyByteSlices {
        py.detach(|| PyByteSlices::new(self.lock().output()))
    }

    /// The number of the next event, which the caller makes.
    fn take_number(&self) -> u64 {
        self.lock().take_number()
    }
}

/// Bytes in slices, each of which is copied when it is asked for.
#[pyclass(name = "ByteSlices", module = "rustvllm._core")]
pub(crate) struct PyByteSlices {
    slices: Box<dyn Iterator<Item = Vec<u8>> + Send + Sync>,
}

impl PyByteSlices {
    fn new(bytes: SharedBytes) -> Self {
        Self { slices: Box::new(bytes.into_slices(SLICE_BYTES)) }
    }
}

#[pymethods]
impl PyByteSlices {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.slices.next().map(|slice| PyBytes::new(py, &slice))
    }
}

/// The input of a custom tool, out of the arguments of the function that it is for the model.
#[pyfunction]
fn custom_input(py: Python<'_>, arguments: &str) -> String {
    py.detach(|| output::custom_input(arguments))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyResponseEvents>()?;
    module.add_class::<PyByteSlices>()?;
    module.add_function(wrap_pyfunction!(custom_input, module)?)
}
