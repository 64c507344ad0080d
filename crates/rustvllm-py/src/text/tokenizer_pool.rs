//! `_core.TokenizerPool`: a thin face of [`output::TokenizerPool`]. Its threads never take the interpreter: what is done
//! makes a descriptor readable.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::available_parallelism;

use ipc::Notifier;
use output::{MAX_TOKENIZER_THREADS, OutputError};
use pyo3::{exceptions::PyOSError, prelude::*, types::PyString};

use crate::errors::QueueFullError;
use crate::request::token_ids::PyTokenIds;
use crate::text::tokenizer::{PyTokenizer, request_error, valid_text};

/// Tokenises long texts in threads of its own.
#[pyclass(frozen, name = "TokenizerPool", module = "rustvllm._core")]
pub(crate) struct PyTokenizerPool {
    inner: output::TokenizerPool,
    notifier: Arc<Notifier>,
}

#[pymethods]
impl PyTokenizerPool {
    /// As many threads as processors, 2 to 4; they start with the first texts. Raises `OSError` when no descriptor is
    /// left.
    #[new]
    fn new(tokenizer: &Bound<'_, PyTokenizer>) -> PyResult<Self> {
        let notifier = Notifier::new().map_err(|error| PyOSError::new_err(format!("eventfd: {error}")))?;
        let notifier = Arc::new(notifier);
        let num_threads = available_parallelism().map_or(MAX_TOKENIZER_THREADS, usize::from);
        let tokenizer = Arc::clone(&tokenizer.get().inner);
        let done = Arc::clone(&notifier);
        let inner = output::TokenizerPool::new(tokenizer, num_threads, move || done.notify());
        Ok(Self { inner, notifier })
    }

    /// A descriptor that is readable when there is something to take.
    #[getter]
    fn fd(&self) -> i32 {
        self.notifier.as_raw_fd()
    }

    /// Hand a text in; returns the number under which it comes back. Raises `InvalidRequestError` for a text that is not
    /// valid Unicode and `QueueFullError` when too much waits already.
    #[pyo3(signature = (text, add_special_tokens = true))]
    fn submit(&self, text: &Bound<'_, PyString>, add_special_tokens: bool) -> PyResult<u64> {
        let text = valid_text(text)?.to_string();
        self.inner.submit(text, add_special_tokens).map_err(|error| match error {
            OutputError::TokenizerBusy { .. } => QueueFullError::new_err(error.to_string()),
            OutputError::NoTokenizerThread { .. } => PyOSError::new_err(error.to_string()),
            error => request_error(&error),
        })
    }

    /// Drop a text whose caller no longer waits.
    fn cancel(&self, job: u64) {
        self.inner.cancel(job);
    }

    /// What is done since the last call: number and ids, or the error to raise.
    fn take<'py>(&self, py: Python<'py>) -> PyResult<Vec<(u64, Bound<'py, PyAny>)>> {
        self.notifier.clear();
        let result = |result: Result<Vec<u32>, OutputError>| -> PyResult<Bound<'py, PyAny>> {
            Ok(match result {
                Ok(ids) => Bound::new(py, PyTokenIds::from(ids))?.into_any(),
                Err(error) => request_error(&error).into_value(py).into_bound(py).into_any(),
            })
        };
        self.inner.take().into_iter().map(|done| Ok((done.id, result(done.result)?))).collect()
    }

    /// Bytes of the texts that wait and are worked on.
    #[getter]
    fn num_waiting_bytes(&self) -> usize {
        self.inner.num_waiting_bytes()
    }
}

/// Adds the class to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTokenizerPool>()
}
