//! Rust errors as the named exceptions of `rustvllm.exceptions`.

use ::cpu_kernels::LinearError;
use ::scheduler::{AddRequestError, SchedulerError};
use ipc::{ClientError, EndpointError};
use pyo3::{
    exceptions::{
        PyConnectionError, PyFileExistsError, PyIndexError, PyMemoryError, PyOSError, PyPermissionError,
        PyValueError,
    },
    import_exception,
    prelude::*,
};

import_exception!(rustvllm.exceptions, EngineDeadError);
import_exception!(rustvllm.exceptions, InvalidRequestError);
import_exception!(rustvllm.exceptions, QueryError);
import_exception!(rustvllm.exceptions, QueryTimeoutError);
import_exception!(rustvllm.exceptions, QueueFullError);
import_exception!(rustvllm.exceptions, SchedulerStateError);
import_exception!(rustvllm.exceptions, TraceError);
import_exception!(rustvllm.exceptions, WrongThreadError);

/// A refused request: which parameter is to blame travels with the message.
pub(crate) fn add_request_error(error: &AddRequestError) -> PyErr {
    match blamed_param(error) {
        None => QueueFullError::new_err(error.to_string()),
        Some(param) => InvalidRequestError::new_err((error.to_string(), param)),
    }
}

/// The parameter that is to blame; `None` when the request is right and the queue is full.
pub(crate) fn blamed_param(error: &AddRequestError) -> Option<&'static str> {
    Some(match error {
        AddRequestError::QueueFull { .. } | AddRequestError::QueueTokensFull { .. } => return None,
        AddRequestError::EmptyPrompt
        | AddRequestError::NegativeTokenId { .. }
        | AddRequestError::InputNotWhole { .. } => "prompt",
        AddRequestError::PromptTooLong { .. } | AddRequestError::PromptExceedsBudget { .. } => "input_tokens",
        AddRequestError::NeverFits { .. } => "max_tokens",
        AddRequestError::TooManyStopTokenIds { .. } => "stop_token_ids",
        AddRequestError::TooManyBeams { .. } | AddRequestError::WrongNumberOfBeams { .. } => "n",
    })
}

/// What a client of an engine in another process says.
pub(crate) fn client_error(error: &ClientError) -> PyErr {
    match error {
        ClientError::Request(error) => add_request_error(error),
        ClientError::RequestTooLarge { .. } => InvalidRequestError::new_err((error.to_string(), "prompt")),
        ClientError::Backlogged { .. } => QueueFullError::new_err(error.to_string()),
        ClientError::Dead { .. } => EngineDeadError::new_err(error.to_string()),
        ClientError::QueryFailed { .. } => QueryError::new_err(error.to_string()),
        ClientError::QueryTimeout { .. } => QueryTimeoutError::new_err(error.to_string()),
        ClientError::ForeignKey { .. } | ClientError::NotAlike { .. } | ClientError::QueryTooLarge { .. } => {
            PyValueError::new_err(error.to_string())
        }
        ClientError::NoSuchRank { .. } => PyIndexError::new_err(error.to_string()),
        ClientError::Endpoint(error) => endpoint_error(error),
        ClientError::Connect { .. } => PyConnectionError::new_err(error.to_string()),
    }
}

/// What is wrong with the place where an engine listens.
pub(crate) fn endpoint_error(error: &EndpointError) -> PyErr {
    match error {
        EndpointError::PathTooLong { .. }
        | EndpointError::NotAFilePath { .. }
        | EndpointError::NotAListener { .. }
        | EndpointError::NoEngine
        | EndpointError::SecretTooShort { .. }
        | EndpointError::SecretMissing => PyValueError::new_err(error.to_string()),
        EndpointError::DirectoryNotPrivate { .. } => PyPermissionError::new_err(error.to_string()),
        EndpointError::InUse { .. } | EndpointError::NotASocket { .. } => {
            PyFileExistsError::new_err(error.to_string())
        }
        EndpointError::System { .. } => PyOSError::new_err(error.to_string()),
    }
}

/// Misuse of the owner's side; numbers outside their limits are `ValueError`s.
pub(crate) fn scheduler_error(error: &SchedulerError) -> PyErr {
    match error {
        SchedulerError::Config(_) | SchedulerError::Pool(_) | SchedulerError::TooFewBuffers { .. } => {
            PyValueError::new_err(error.to_string())
        }
        SchedulerError::WrongRows { .. }
        | SchedulerError::WrongLogprobs { .. }
        | SchedulerError::WrongPromptLogprobs { .. }
        | SchedulerError::WrongPooledRows { .. }
        | SchedulerError::WrongStep { .. }
        | SchedulerError::NotTheNewestStep { .. }
        | SchedulerError::OutdatedOutput { .. }
        | SchedulerError::TooManyDrafts { .. }
        | SchedulerError::StepInFlight { .. } => SchedulerStateError::new_err(error.to_string()),
    }
}

/// What a product or its weights refuse.
pub(crate) fn linear_error(error: LinearError) -> PyErr {
    match error {
        LinearError::Memory { .. } => PyMemoryError::new_err(error.to_string()),
        _ => PyValueError::new_err(error.to_string()),
    }
}
