//! `_core.SamplingExtras`: the parameters of a request that are lists, made by its front end and read by the worker.

use std::sync::Arc;

use ::scheduler::{Attachment, PromptTokens, SAMPLING_LISTS, SamplingExtras, TokenList};
use pyo3::{
    IntoPyObjectExt,
    exceptions::{PyKeyError, PyTypeError},
    prelude::*,
    types::{PyBytes, PyDict},
};

use crate::{errors::InvalidRequestError, keyword::extract};

/// Immutable; shared by the samples of a request.
#[pyclass(frozen, name = "SamplingExtras", module = "rustvllm._core")]
pub(crate) struct PySamplingExtras {
    inner: Arc<SamplingExtras>,
}

/// A Python object on its way through the scheduler, which does not look at it.
struct PyAttachment(Py<PyAny>);

impl PySamplingExtras {
    pub(crate) fn of(inner: &Arc<SamplingExtras>) -> Self {
        Self { inner: Arc::clone(inner) }
    }

    pub(crate) fn shared(&self) -> Arc<SamplingExtras> {
        Arc::clone(&self.inner)
    }
}

/// Whether they can be sent to an engine in another process.
///
/// # Errors
/// When something is attached that cannot go there.
pub(crate) fn check_sendable(extras: &SamplingExtras) -> PyResult<()> {
    if extras.attachment().is_none() {
        return Ok(());
    }
    let message = "logits_processors are callables of this process and cannot be sent to an engine in another one; \
                   load a class into the engine with --logits-processors module:Class instead";
    Err(InvalidRequestError::new_err((message, "logits_processors")))
}

#[pymethods]
impl PySamplingExtras {
    #[new]
    #[pyo3(signature = (*, arguments=None, attachment=None, prompt_tokens=None, **lists))]
    fn new(
        arguments: Option<String>,
        attachment: Option<Py<PyAny>>,
        prompt_tokens: Option<(u32, bool, u32, Bound<'_, PyBytes>)>,
        lists: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let lists = lists.into_iter().flatten().map(|(name, value)| extract_list(name.extract()?, &value));
        let extras = SamplingExtras::new(lists.collect::<PyResult<Vec<_>>>()?, arguments);
        let extras = match prompt_tokens {
            Some(tokens) => extras.and_then(|extras| extras.with_prompt_tokens(of_bytes(&tokens))),
            None => extras,
        };
        let extras =
            extras.map_err(|error| InvalidRequestError::new_err((error.to_string(), error.parameter())))?;
        let attachment = attachment.map(|object| Attachment(Arc::new(PyAttachment(object))));
        Ok(Self { inner: Arc::new(extras.with_attachment(attachment)) })
    }

    fn __getitem__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        match self.inner.list(name) {
            Some(TokenList::Ids(ids)) => ids.into_bound_py_any(py),
            Some(TokenList::Biases(biases)) => biases.into_bound_py_any(py),
            Some(TokenList::Words(words)) => words.into_bound_py_any(py),
            None => Err(PyKeyError::new_err(format!("{name} is not a list of SAMPLING_LISTS"))),
        }
    }

    /// The first list with a token id that the vocabulary does not have, and the largest such id.
    fn outside_vocabulary(&self, vocab_size: i32) -> Option<(&'static str, i32)> {
        let of_lists = self.inner.lists().map(|(row, list)| (row.name, list.token_ids().max()));
        let of_prompt = self.inner.prompt_tokens().map(|tokens| (PromptTokens::NAME, max_of(&tokens.ids)));
        of_lists.chain(of_prompt).find_map(|(name, largest)| {
            let largest = largest?;
            (largest >= vocab_size).then_some((name, largest))
        })
    }

    /// Tokens that are asked for at places of the prompt: the first place, whether nothing else is asked of it, ids per row,
    /// and the ids.
    #[getter]
    fn prompt_tokens<'py>(&self, py: Python<'py>) -> Option<(u32, bool, u32, Bound<'py, PyBytes>)> {
        let tokens = self.inner.prompt_tokens()?;
        let bytes: Vec<u8> = tokens.ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
        Some((tokens.start, tokens.is_alone, tokens.width, PyBytes::new(py, &bytes)))
    }

    #[getter]
    fn arguments(&self) -> Option<&str> {
        self.inner.arguments()
    }

    #[getter]
    fn attachment(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let attached = self.inner.attachment()?.0.downcast_ref::<PyAttachment>()?;
        Some(attached.0.clone_ref(py))
    }
}

fn max_of(ids: &[i32]) -> Option<i32> {
    ids.iter().copied().max()
}

/// Ids as numpy has them in memory, int32; what is left over is not a row.
fn of_bytes((start, is_alone, width, bytes): &(u32, bool, u32, Bound<'_, PyBytes>)) -> PromptTokens {
    let (ids, _) = bytes.as_bytes().as_chunks::<4>();
    let ids = ids.iter().map(|id| i32::from_ne_bytes(*id)).collect();
    PromptTokens { start: *start, is_alone: *is_alone, width: *width, ids }
}

/// The list that a keyword gives, with the name and of the kind that the table says.
fn extract_list(name: &str, value: &Bound<'_, PyAny>) -> PyResult<(&'static str, TokenList)> {
    let Some(row) = SAMPLING_LISTS.iter().find(|row| row.name == name) else {
        return Err(PyTypeError::new_err(format!("SamplingExtras has no keyword {name}")));
    };
    let mut list = TokenList::empty(row.kind);
    match &mut list {
        TokenList::Ids(ids) => extract(name, value, ids),
        TokenList::Biases(biases) => extract(name, value, biases),
        TokenList::Words(words) => extract(name, value, words),
    }?;
    Ok((row.name, list))
}

/// Adds the class to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PySamplingExtras>()
}
