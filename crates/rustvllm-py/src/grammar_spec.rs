//! `_core.GrammarSpec`: what the output of a request must be.

use std::sync::Arc;

use ::grammar::{accepts, check};
use ::scheduler::{GrammarKind, GrammarSpec};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyString};

use crate::errors::InvalidRequestError;

/// What the output of a request must be.
#[pyclass(frozen, name = "GrammarSpec", module = "rustvllm._core")]
pub(crate) struct PyGrammarSpec {
    inner: Arc<GrammarSpec>,
}

impl PyGrammarSpec {
    pub(crate) fn shared(&self) -> Arc<GrammarSpec> {
        Arc::clone(&self.inner)
    }
}

#[pymethods]
impl PyGrammarSpec {
    #[new]
    #[pyo3(signature = (kind, text="", *, whitespace_pattern=None, disable_any_whitespace=false, disable_additional_properties=false))]
    fn new(
        kind: &str,
        text: &str,
        whitespace_pattern: Option<&str>,
        disable_any_whitespace: bool,
        disable_additional_properties: bool,
    ) -> PyResult<Self> {
        let kind = match kind {
            "json" => GrammarKind::JsonSchema,
            "json_object" => GrammarKind::JsonObject,
            "regex" => GrammarKind::Regex,
            "choice" => GrammarKind::Choice,
            "grammar" => GrammarKind::Grammar,
            other => return Err(PyValueError::new_err(format!("{other:?} is not a kind of grammar"))),
        };
        let spec = GrammarSpec {
            whitespace_pattern: whitespace_pattern.map(Into::into),
            disable_any_whitespace,
            disable_additional_properties,
            ..GrammarSpec::new(kind, text)
        };
        Ok(Self { inner: Arc::new(spec) })
    }

    /// Raise InvalidRequestError, about `param`, when it cannot be enforced. Releases the interpreter.
    fn check(&self, py: Python<'_>, param: &Bound<'_, PyString>) -> PyResult<()> {
        let checked = py.detach(|| check(&self.inner));
        checked.map_err(|error| InvalidRequestError::new_err((error.to_string(), param.clone().unbind())))
    }

    /// Whether a text obeys it as a whole; for tests and measurements. Raises ValueError when it cannot be enforced.
    fn accepts(&self, py: Python<'_>, text: &str) -> PyResult<bool> {
        py.detach(|| accepts(&self.inner, text)).map_err(|error| PyValueError::new_err(error.to_string()))
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyGrammarSpec>()
}
