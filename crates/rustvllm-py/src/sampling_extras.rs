//! `_core.SamplingExtras`: the parameters of a request that are lists, made by its front end and read by the worker.

use std::sync::Arc;

use ::scheduler::{Attachment, SamplingExtras, SamplingExtrasError};
use pyo3::prelude::*;

use crate::errors::InvalidRequestError;

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
    #[pyo3(signature = (*, logit_bias=Vec::new(), allowed_token_ids=Vec::new(), bad_words=Vec::new(), arguments=None, attachment=None))]
    fn new(
        logit_bias: Vec<(i32, f32)>,
        allowed_token_ids: Vec<i32>,
        bad_words: Vec<Vec<i32>>,
        arguments: Option<String>,
        attachment: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let extras = SamplingExtras::new(logit_bias, allowed_token_ids, bad_words, arguments)
            .map_err(|error| InvalidRequestError::new_err((error.to_string(), blamed(&error))))?;
        let attachment = attachment.map(|object| Attachment(Arc::new(PyAttachment(object))));
        Ok(Self { inner: Arc::new(extras.with_attachment(attachment)) })
    }

    #[getter]
    fn logit_bias(&self) -> Vec<(i32, f32)> {
        self.inner.logit_bias().to_vec()
    }

    #[getter]
    fn allowed_token_ids(&self) -> Vec<i32> {
        self.inner.allowed_token_ids().to_vec()
    }

    #[getter]
    fn bad_words(&self) -> Vec<Vec<i32>> {
        self.inner.bad_words().iter().map(|word| word.to_vec()).collect()
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

fn blamed(error: &SamplingExtrasError) -> &'static str {
    match error {
        SamplingExtrasError::NegativeTokenId { parameter, .. } => parameter,
        SamplingExtrasError::NotFinite { .. } | SamplingExtrasError::TooLarge { .. } => "logit_bias",
        SamplingExtrasError::BadWordLength { .. } | SamplingExtrasError::TooManyBadWords { .. } => {
            "bad_words"
        }
    }
}

/// Adds the class to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PySamplingExtras>()
}
