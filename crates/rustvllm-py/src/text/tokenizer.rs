//! `_core.Tokenizer`: a thin face of [`output::Tokenizer`].

use std::sync::Arc;

use output::OutputError;
use pyo3::exceptions::{PyOSError, PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyString};

use crate::errors::InvalidRequestError;
use crate::request::token_ids::PyTokenIds;

/// Texts and id lists up to these sizes are converted without a hand-over of the interpreter, which would cost more.
const SHORT_TEXT_BYTES: usize = 256;
const SHORT_NUM_TOKENS: usize = 64;

/// A Hugging Face fast tokenizer (`tokenizer.json`). Long calls release the interpreter.
#[pyclass(frozen, name = "Tokenizer", module = "rustvllm._core")]
pub(crate) struct PyTokenizer {
    pub(crate) inner: Arc<output::Tokenizer>,
}

#[pymethods]
impl PyTokenizer {
    /// Read a `tokenizer.json`. Raises `OSError` when it cannot be read, `ValueError` when it is not a tokenizer.
    #[staticmethod]
    fn from_file(py: Python<'_>, path: std::path::PathBuf) -> PyResult<Self> {
        let tokenizer = py.detach(|| output::Tokenizer::from_file(path)).map_err(load_error)?;
        Ok(Self { inner: Arc::new(tokenizer) })
    }

    /// Read the content of a `tokenizer.json`. Raises `ValueError` when it is not a tokenizer.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        // Bytes objects are immutable, so the slice stays as it is while the interpreter is released.
        let tokenizer = py.detach(|| output::Tokenizer::from_bytes(data)).map_err(load_error)?;
        Ok(Self { inner: Arc::new(tokenizer) })
    }

    /// Token ids of a text. Raises `InvalidRequestError` for a text that is not valid Unicode.
    #[pyo3(signature = (text, add_special_tokens = true))]
    fn encode(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyString>,
        add_special_tokens: bool,
    ) -> PyResult<Vec<u32>> {
        let text = valid_text(text)?;
        let encode = || self.inner.encode(&text, add_special_tokens);
        let ids = if text.len() <= SHORT_TEXT_BYTES { encode() } else { py.detach(encode) };
        ids.map_err(|error| request_error(&error))
    }

    /// Token ids of a text as `TokenIds`, without a list of ints.
    #[pyo3(signature = (text, add_special_tokens = true))]
    fn encode_ids(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyString>,
        add_special_tokens: bool,
    ) -> PyResult<PyTokenIds> {
        self.encode(py, text, add_special_tokens).map(PyTokenIds::from)
    }

    /// Token ids of several texts, in their order, encoded in parallel.
    #[pyo3(signature = (texts, add_special_tokens = true))]
    fn encode_batch(
        &self,
        py: Python<'_>,
        texts: &Bound<'_, PyAny>,
        add_special_tokens: bool,
    ) -> PyResult<Vec<Vec<u32>>> {
        let texts: Vec<Bound<'_, PyString>> = texts.extract()?;
        let texts = texts.iter().map(valid_text).collect::<PyResult<Vec<_>>>()?;
        py.detach(|| {
            let texts: Vec<&str> = texts.iter().map(|text| &**text).collect();
            self.inner.encode_batch(&texts, add_special_tokens)
        })
        .map_err(|error| request_error(&error))
    }

    /// Text of token ids; ids that are in no vocabulary stand for nothing.
    #[pyo3(signature = (token_ids, skip_special_tokens = true))]
    fn decode(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        skip_special_tokens: bool,
    ) -> PyResult<String> {
        let token_ids = valid_token_ids(token_ids)?;
        let decode = || self.inner.decode(&token_ids, skip_special_tokens);
        let text = if token_ids.len() <= SHORT_NUM_TOKENS { decode() } else { py.detach(decode) };
        text.map_err(|error| request_error(&error))
    }

    /// The bytes that an id adds to a text, which need not be whole characters; none for an id that is in no vocabulary.
    fn token_bytes<'py>(&self, py: Python<'py>, token_id: i64) -> Bound<'py, PyBytes> {
        let token_id = u32::try_from(token_id).ok();
        PyBytes::new(py, &token_id.map(|token_id| self.inner.token_bytes(token_id)).unwrap_or_default())
    }

    /// The vocabulary entry of an id, or None.
    fn id_to_token(&self, token_id: i64) -> Option<String> {
        u32::try_from(token_id).ok().and_then(|token_id| self.inner.id_to_token(token_id))
    }

    /// The id of a vocabulary entry, or None.
    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Entries with the added tokens.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    fn __repr__(&self) -> String {
        format!("Tokenizer(vocab_size={})", self.inner.vocab_size())
    }
}

/// The text as UTF-8. Python strings may hold half a surrogate pair, which is not a character.
pub(crate) fn valid_text(text: &Bound<'_, PyString>) -> PyResult<PyBackedStr> {
    PyBackedStr::try_from(text.clone()).map_err(|error| {
        InvalidRequestError::new_err(format!("the prompt is not valid Unicode text: {error}"))
    })
}

/// A sequence of ids. Negative and huge numbers are an error about the request, not Python's `OverflowError`.
pub(crate) fn valid_token_ids(token_ids: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if let Ok(token_ids) = token_ids.cast::<PyTokenIds>() {
        // None of them is negative.
        return Ok(token_ids.get().ids.iter().map(|id| id.cast_unsigned()).collect());
    }
    token_ids.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(token_ids.py()) {
            InvalidRequestError::new_err(format!("token ids must be from 0 to {}: {error}", u32::MAX))
        } else {
            error
        }
    })
}

fn load_error(error: OutputError) -> PyErr {
    match error {
        OutputError::ReadTokenizer { path, source } => {
            let message = format!("cannot read the tokenizer: {source}");
            match source.raw_os_error() {
                // With an error number Python picks the subclass (FileNotFoundError, PermissionError, …).
                Some(code) => PyOSError::new_err((code, message, path)),
                None => PyOSError::new_err(message),
            }
        }
        error => PyValueError::new_err(error.to_string()),
    }
}

/// An error about one request, as the front end's exception.
pub(crate) fn request_error(error: &OutputError) -> PyErr {
    let param = match error {
        OutputError::EmptyStopString { .. }
        | OutputError::StopStringsTooLong { .. }
        | OutputError::StopNeedsText => Some("stop"),
        OutputError::Encode { .. } => Some("prompt"),
        _ => None,
    };
    InvalidRequestError::new_err((error.to_string(), param))
}

/// Adds the class to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTokenizer>()
}
