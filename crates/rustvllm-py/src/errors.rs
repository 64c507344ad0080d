//! Rust errors as the named exceptions of `rustvllm.exceptions`.

use ::scheduler::{AddRequestError, SchedulerError};
use pyo3::{exceptions::PyValueError, import_exception, prelude::*};

import_exception!(rustvllm.exceptions, InvalidRequestError);
import_exception!(rustvllm.exceptions, QueueFullError);
import_exception!(rustvllm.exceptions, SchedulerStateError);
import_exception!(rustvllm.exceptions, TraceError);
import_exception!(rustvllm.exceptions, WrongThreadError);

/// A refused request: which parameter is to blame travels with the message.
pub(crate) fn add_request_error(error: &AddRequestError) -> PyErr {
    let param = match error {
        AddRequestError::QueueFull { .. } => return QueueFullError::new_err(error.to_string()),
        AddRequestError::EmptyPrompt | AddRequestError::NegativeTokenId { .. } => "prompt",
        AddRequestError::PromptTooLong { .. } | AddRequestError::PromptExceedsBudget { .. } => "input_tokens",
        AddRequestError::NeverFits { .. } => "max_tokens",
        AddRequestError::TooManyStopTokenIds { .. } => "stop_token_ids",
    };
    InvalidRequestError::new_err((error.to_string(), param))
}

/// Misuse of the owner's side; numbers outside their limits are `ValueError`s.
pub(crate) fn scheduler_error(error: &SchedulerError) -> PyErr {
    match error {
        SchedulerError::Config(_) | SchedulerError::Pool(_) | SchedulerError::TooFewBuffers { .. } => {
            PyValueError::new_err(error.to_string())
        }
        SchedulerError::WrongRows { .. }
        | SchedulerError::WrongStep { .. }
        | SchedulerError::NotTheNewestStep { .. }
        | SchedulerError::OutdatedOutput { .. }
        | SchedulerError::TooManyDrafts { .. }
        | SchedulerError::StepInFlight { .. } => SchedulerStateError::new_err(error.to_string()),
    }
}
