//! What `add_request` takes: the same for an engine in this process (`handle.rs`) and for engines in others (`client.rs`).
//!
//! Their names, types and defaults are here and nowhere else in Rust; `_core.pyi` has them for Python.

use ::scheduler::{ExtraKeys, MultimodalSpan, NewRequest, RequestKey, SamplingParams};
use pyo3::{
    conversion::FromPyObjectOwned,
    exceptions::PyTypeError,
    intern,
    prelude::*,
    types::{PyDict, PyString},
};

use crate::handle::token_ids;

/// One request and those that fork it, before they are made.
pub(crate) struct RequestArguments {
    key: u64,
    request_id: Box<str>,
    prompt_token_ids: Vec<i32>,
    params: SamplingParams,
    priority: i32,
    cache_salt: Option<String>,
    lora_name: Option<String>,
    multimodal: Vec<(u32, u32, Vec<u8>)>,
    skip_reading_prefix_cache: bool,
    waits_for_grammar: bool,
    fork_from: Option<u64>,
    samples: Vec<(u64, String, i64)>,
}

impl RequestArguments {
    /// Read the arguments of one call.
    ///
    /// # Errors
    /// `TypeError` and `OverflowError`, as for a function with these keyword arguments.
    pub(crate) fn read(
        key: u64,
        request_id: &str,
        prompt_token_ids: &Bound<'_, PyAny>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let py = prompt_token_ids.py();
        let keywords = Keywords { dict: keywords };
        let default = SamplingParams::default();
        let params = SamplingParams {
            max_tokens: keywords.take(intern!(py, "max_tokens"))?.ok_or_else(|| {
                PyTypeError::new_err("add_request() missing 1 required keyword argument: 'max_tokens'")
            })?,
            min_tokens: keywords.take_or(intern!(py, "min_tokens"), default.min_tokens)?,
            eos_token_id: keywords.take_or(intern!(py, "eos_token_id"), default.eos_token_id)?,
            stop_token_ids: keywords.take_or(intern!(py, "stop_token_ids"), Vec::new())?.into(),
            temperature: keywords.take_or(intern!(py, "temperature"), default.temperature)?,
            top_p: keywords.take_or(intern!(py, "top_p"), default.top_p)?,
            min_p: keywords.take_or(intern!(py, "min_p"), default.min_p)?,
            presence_penalty: keywords.take_or(intern!(py, "presence_penalty"), default.presence_penalty)?,
            frequency_penalty: keywords
                .take_or(intern!(py, "frequency_penalty"), default.frequency_penalty)?,
            repetition_penalty: keywords
                .take_or(intern!(py, "repetition_penalty"), default.repetition_penalty)?,
            top_k: keywords.take_or(intern!(py, "top_k"), default.top_k)?,
            seed: keywords.take_or(intern!(py, "seed"), default.seed)?,
            num_logprobs: keywords.take_or(intern!(py, "num_logprobs"), default.num_logprobs)?,
        };
        let arguments = Self {
            key,
            request_id: request_id.into(),
            prompt_token_ids: token_ids(py, prompt_token_ids)?,
            params,
            priority: keywords.take_or(intern!(py, "priority"), 0)?,
            cache_salt: keywords.take_or(intern!(py, "cache_salt"), None)?,
            lora_name: keywords.take_or(intern!(py, "lora_name"), None)?,
            multimodal: keywords.take_or(intern!(py, "multimodal"), Vec::new())?,
            skip_reading_prefix_cache: keywords.take_or(intern!(py, "skip_reading_prefix_cache"), false)?,
            waits_for_grammar: keywords.take_or(intern!(py, "waits_for_grammar"), false)?,
            fork_from: keywords.take_or(intern!(py, "fork_from"), None)?,
            samples: keywords.take_or(intern!(py, "samples"), Vec::new())?,
        };
        keywords.finish()?;
        Ok(arguments)
    }

    /// The request and those that fork it. Hashes nothing, but copies prompts: call it without the interpreter.
    pub(crate) fn into_requests(self) -> Vec<NewRequest> {
        let spans = self.multimodal.into_iter().map(|(offset, length, digest)| MultimodalSpan {
            offset,
            length,
            digest: digest.into(),
        });
        let extra_keys =
            ExtraKeys::new(self.lora_name.as_deref(), self.cache_salt.as_deref(), spans.collect());
        let request = NewRequest {
            key: RequestKey(self.key),
            request_id: self.request_id,
            prompt_token_ids: self.prompt_token_ids,
            params: self.params,
            priority: self.priority,
            extra_keys,
            skip_reading_prefix_cache: self.skip_reading_prefix_cache,
            waits_for_grammar: self.waits_for_grammar,
            fork_from: self.fork_from.map(RequestKey),
        };
        let mut requests = Vec::with_capacity(1 + self.samples.len());
        requests.extend(self.samples.into_iter().map(|(sample_key, sample_id, seed)| NewRequest {
            key: RequestKey(sample_key),
            request_id: sample_id.into(),
            params: SamplingParams { seed, ..request.params.clone() },
            fork_from: Some(request.key),
            ..request.clone()
        }));
        requests.insert(0, request);
        requests
    }
}

/// Keyword arguments that a call was given; each is taken out once, and one that is left over is an error.
struct Keywords<'a, 'py> {
    /// Made by the interpreter for this call alone.
    dict: Option<&'a Bound<'py, PyDict>>,
}

impl<'py> Keywords<'_, 'py> {
    fn take<T: FromPyObjectOwned<'py>>(&self, name: &Bound<'py, PyString>) -> PyResult<Option<T>> {
        let Some(dict) = self.dict else { return Ok(None) };
        let Some(value) = dict.get_item(name)? else { return Ok(None) };
        dict.del_item(name)?;
        match value.extract::<T>() {
            Ok(value) => Ok(Some(value)),
            Err(error) => Err(name_argument(name, error.into())),
        }
    }

    fn take_or<T: FromPyObjectOwned<'py>>(&self, name: &Bound<'py, PyString>, default: T) -> PyResult<T> {
        Ok(self.take(name)?.unwrap_or(default))
    }

    fn finish(&self) -> PyResult<()> {
        match self.dict.and_then(|dict| dict.keys().iter().next()) {
            None => Ok(()),
            Some(name) => Err(PyTypeError::new_err(format!(
                "add_request() got an unexpected keyword argument '{name}'"
            ))),
        }
    }
}

/// A `TypeError` says which argument it is about; other errors have their meaning from their type.
fn name_argument(name: &Bound<'_, PyString>, error: PyErr) -> PyErr {
    if error.get_type(name.py()).is(name.py().get_type::<PyTypeError>()) {
        return PyTypeError::new_err(format!("argument '{name}': {}", error.value(name.py())));
    }
    error
}
