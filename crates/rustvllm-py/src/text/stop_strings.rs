//! `_core.StopStrings`: the stop strings of a request, made by its front end and shared by its samples.

use std::sync::Arc;

use output::StopStrings;
use pyo3::prelude::*;

use crate::text::tokenizer::request_error;

/// Immutable; with many texts it takes milliseconds and megabytes, so it is made once per request, in a thread.
#[pyclass(frozen, name = "StopStrings", module = "rustvllm._core")]
pub(crate) struct PyStopStrings {
    inner: Arc<StopStrings>,
}

impl PyStopStrings {
    pub(crate) fn shared(&self) -> Arc<StopStrings> {
        Arc::clone(&self.inner)
    }
}

#[pymethods]
impl PyStopStrings {
    /// Prepare the search for any of `texts`.
    #[new]
    fn new(py: Python<'_>, texts: Vec<String>) -> PyResult<Self> {
        let inner = py.detach(|| StopStrings::new(texts)).map_err(|error| request_error(&error))?;
        Ok(Self { inner: Arc::new(inner) })
    }
}

/// What a request may give: texts, or what was made of them for several samples.
#[derive(FromPyObject)]
pub(crate) enum StopArgument {
    Shared(Py<PyStopStrings>),
    Texts(Vec<String>),
}

impl StopArgument {
    /// Ready to be looked for; `None` without stop strings.
    ///
    /// # Errors
    /// A text is empty, or all together are too long.
    pub(crate) fn into_shared(self) -> PyResult<Option<Arc<StopStrings>>> {
        match self {
            Self::Shared(stop) => Ok(Some(stop.get().shared())),
            Self::Texts(texts) if texts.is_empty() => Ok(None),
            Self::Texts(texts) => {
                let stop = StopStrings::new(texts).map_err(|error| request_error(&error))?;
                Ok(Some(Arc::new(stop)))
            }
        }
    }
}

/// Adds the class to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyStopStrings>()
}
