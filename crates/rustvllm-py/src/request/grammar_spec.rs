//! `_core.GrammarSpec`: what the output of a request must be.

use std::{collections::HashMap, sync::Arc};

use ::grammar::{accepts, check, in_messages, relax, to_lark};
use ::scheduler::{GrammarKind, GrammarSpec, ThinkingGate};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyString};

use crate::errors::InvalidRequestError;

/// Ids that begin and end thoughts, whether the output begins within them, their budget, and what comes once it is spent.
type Thinking = (u32, u32, bool, Option<u32>, Vec<u32>);

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
    #[pyo3(signature = (kind, text="", *, whitespace_pattern=None, disable_any_whitespace=false, disable_additional_properties=false, thinking=None))]
    fn new(
        kind: &str,
        text: &str,
        whitespace_pattern: Option<&str>,
        disable_any_whitespace: bool,
        disable_additional_properties: bool,
        thinking: Option<Thinking>,
    ) -> PyResult<Self> {
        let kind = match kind {
            "json" => GrammarKind::JsonSchema,
            "json_object" => GrammarKind::JsonObject,
            "regex" => GrammarKind::Regex,
            "choice" => GrammarKind::Choice,
            "grammar" => GrammarKind::Grammar,
            "anything" => GrammarKind::Anything,
            other => return Err(PyValueError::new_err(format!("{other:?} is not a kind of grammar"))),
        };
        let spec = GrammarSpec {
            whitespace_pattern: whitespace_pattern.map(Into::into),
            disable_any_whitespace,
            disable_additional_properties,
            thinking: thinking.map(|(open_id, close_id, begins_within, budget, end_ids)| ThinkingGate {
                open_id,
                close_id,
                begins_within,
                budget,
                end_ids: end_ids.into(),
            }),
            ..GrammarSpec::new(kind, text)
        };
        Ok(Self { inner: Arc::new(spec) })
    }

    /// Raise InvalidRequestError, about `param`, when it cannot be enforced. Releases the interpreter.
    fn check(&self, py: Python<'_>, param: &Bound<'_, PyString>) -> PyResult<()> {
        let checked = py.detach(|| check(&self.inner));
        checked.map_err(|error| InvalidRequestError::new_err((error.to_string(), param.clone().unbind())))
    }

    /// What of it can be enforced, the places of what cannot, and how many they are; raises as `check` does.
    fn relaxed(&self, py: Python<'_>, param: &Bound<'_, PyString>) -> PyResult<(Self, Vec<String>, usize)> {
        let relaxed = py.detach(|| relax(&self.inner));
        let relaxed = relaxed
            .map_err(|error| InvalidRequestError::new_err((error.to_string(), param.clone().unbind())))?;
        let places = relaxed.unenforced;
        Ok((Self { inner: Arc::new(relaxed.spec) }, places.pointers, places.count))
    }

    /// The same behind the thoughts of an answer of messages, whose marks have these ids; raises as `check` does.
    fn in_messages(
        &self,
        py: Python<'_>,
        param: &Bound<'_, PyString>,
        ids: HashMap<String, u32>,
        begins_within: bool,
    ) -> PyResult<Self> {
        let framed = py.detach(|| in_messages(&self.inner, &ids, begins_within));
        let inner = framed
            .map_err(|error| InvalidRequestError::new_err((error.to_string(), param.clone().unbind())))?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Whether a text obeys it as a whole; for tests and measurements. Raises ValueError when it cannot be enforced.
    fn accepts(&self, py: Python<'_>, text: &str) -> PyResult<bool> {
        py.detach(|| accepts(&self.inner, text)).map_err(|error| PyValueError::new_err(error.to_string()))
    }
}

/// A grammar in Lark, written in Lark or in GBNF, which has `::=`.
#[pyfunction]
fn grammar_as_lark(text: &str) -> PyResult<String> {
    if !text.contains("::=") {
        return Ok(text.to_owned());
    }
    to_lark(text).map_err(|error| PyValueError::new_err(error.to_string()))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyGrammarSpec>()?;
    module.add_function(wrap_pyfunction!(grammar_as_lark, module)?)
}
