//! The log-probabilities that an update brings, as Python's arrays have them.

use ::scheduler::{LogprobRows, PromptLogprobRows};
use pyo3::{exceptions::PyTypeError, prelude::*};

use crate::scheduler::buffers::{copy_rows, native_buffer};

/// Places, token ids, log-probabilities and ranks.
pub(crate) type LogprobArrays<'py> =
    (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// The log-probabilities of one update, copied out of Python's arrays. Few steps have them.
pub(crate) struct CopiedLogprobs {
    places: Vec<i32>,
    token_ids: Vec<i32>,
    logprobs: Vec<f32>,
    ranks: Vec<i32>,
    num_columns: usize,
}

impl CopiedLogprobs {
    pub(crate) fn new((places, token_ids, logprobs, ranks): LogprobArrays<'_>) -> PyResult<Self> {
        let py = places.py();
        let values = native_buffer::<f32>(&logprobs)
            .map_err(|_| PyTypeError::new_err("values of logprobs must be an array of dtype float32"))?;
        let mut copied = Self {
            places: Vec::new(),
            token_ids: Vec::new(),
            logprobs: values.to_vec(py)?,
            ranks: Vec::new(),
            num_columns: 0,
        };
        copy_rows("places of logprobs", &places, &mut copied.places)?;
        copied.num_columns = copy_rows("token ids of logprobs", &token_ids, &mut copied.token_ids)?;
        copy_rows("ranks of logprobs", &ranks, &mut copied.ranks)?;
        Ok(copied)
    }

    pub(crate) fn rows(&self) -> LogprobRows<'_> {
        LogprobRows {
            places: &self.places,
            token_ids: &self.token_ids,
            logprobs: &self.logprobs,
            ranks: &self.ranks,
            num_columns: self.num_columns,
        }
    }
}

/// Candidates per place of each request; token ids, log-probabilities; ranks.
pub(crate) type PromptLogprobArrays<'py> =
    (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Log-probabilities of places of prompts, whose rows follow one another without gaps.
pub(crate) struct CopiedPromptLogprobs {
    num_columns: Vec<i32>,
    token_ids: Vec<i32>,
    logprobs: Vec<f32>,
    ranks: Vec<i32>,
}

impl CopiedPromptLogprobs {
    pub(crate) fn new((num_columns, token_ids, logprobs, ranks): PromptLogprobArrays<'_>) -> PyResult<Self> {
        let values = native_buffer::<f32>(&logprobs).map_err(|_| {
            PyTypeError::new_err("values of prompt_logprobs must be an array of dtype float32")
        })?;
        let mut copied = Self {
            num_columns: Vec::new(),
            token_ids: Vec::new(),
            logprobs: values.to_vec(num_columns.py())?,
            ranks: Vec::new(),
        };
        copy_rows("columns of prompt_logprobs", &num_columns, &mut copied.num_columns)?;
        copy_rows("token ids of prompt_logprobs", &token_ids, &mut copied.token_ids)?;
        copy_rows("ranks of prompt_logprobs", &ranks, &mut copied.ranks)?;
        Ok(copied)
    }

    pub(crate) fn rows(&self) -> PromptLogprobRows<'_> {
        PromptLogprobRows {
            num_columns: &self.num_columns,
            token_ids: &self.token_ids,
            logprobs: &self.logprobs,
            ranks: &self.ranks,
        }
    }
}
