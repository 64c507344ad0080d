//! What `add_request` takes: the same for an engine in this process (`handle.rs`) and for engines in others (`transport/client.rs`).
//!
//! Their names and types are here, those of sampling numbers in `scheduler::sampling_params`; `_core.pyi` has them for Python.

use std::sync::Arc;

use ::scheduler::{
    ExtraKeys, GrammarSpec, MAX_WEIGHT, MultimodalSpan, NewRequest, Payer, RepetitionDetection, RequestKey,
    SamplingExtras, SamplingParams, monotonic_ns, sampling_params::NumberMut,
};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    pybacked::PyBackedBytes,
    types::{PyDict, PyString},
};

use crate::{
    keyword::extract,
    request::{grammar_spec::PyGrammarSpec, sampling_extras::PySamplingExtras, token_ids::token_ids},
};

/// One request and those that fork it, before they are made.
#[derive(Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "keywords of a call that have nothing to do with each other"
)]
pub(crate) struct RequestArguments {
    key: u64,
    request_id: Box<str>,
    prompt_token_ids: Vec<i32>,
    params: SamplingParams,
    priority: i32,
    payer: Payer,
    cache_salt: Option<String>,
    lora_name: Option<String>,
    multimodal: Vec<(u32, u32, Vec<u8>, PyBackedBytes)>,
    skip_reading_prefix_cache: bool,
    reports_prompt_progress: bool,
    has_stop_strings: bool,
    waits_for_grammar: bool,
    grammar: Option<Arc<GrammarSpec>>,
    prediction: Option<Arc<[i32]>>,
    fork_from: Option<u64>,
    arrival_ns: Option<u64>,
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
        let mut arguments = Self {
            key,
            request_id: request_id.into(),
            prompt_token_ids: token_ids(prompt_token_ids.py(), prompt_token_ids)?,
            ..Self::default()
        };
        let mut has_max_tokens = false;
        for (name, value) in keywords.into_iter().flat_map(PyDictMethods::iter) {
            let name = name.cast::<PyString>()?.to_str()?;
            has_max_tokens |= name == "max_tokens";
            arguments.set(name, &value)?;
        }
        if has_max_tokens {
            return Ok(arguments);
        }
        Err(PyTypeError::new_err("add_request() missing 1 required keyword argument: 'max_tokens'"))
    }

    fn set(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        match self.params.number_mut(name) {
            Some(NumberMut::Float(number)) => return extract(name, value, number),
            Some(NumberMut::Int(number)) => return extract(name, value, number),
            None => (),
        }
        let params = &mut self.params;
        match name {
            "max_tokens" => extract(name, value, &mut params.max_tokens),
            "min_tokens" => extract(name, value, &mut params.min_tokens),
            "eos_token_id" => extract(name, value, &mut params.eos_token_id),
            "stop_token_ids" => {
                let mut ids = Vec::new();
                extract(name, value, &mut ids)?;
                params.stop_token_ids = ids.into();
                Ok(())
            }
            "repetition_detection" => {
                let mut numbers: Option<(u32, u32, u32)> = None;
                extract(name, value, &mut numbers)?;
                params.repetition_detection = numbers.map(repetition_detection).transpose()?;
                Ok(())
            }
            "sampling_extras" => {
                let mut extras: Option<Py<PySamplingExtras>> = None;
                extract(name, value, &mut extras)?;
                params.extras = extras.map(|extras| extras.get().shared());
                Ok(())
            }
            "priority" => extract(name, value, &mut self.priority),
            "payer" => {
                let mut numbers: Option<(u64, u64, u32)> = None;
                extract(name, value, &mut numbers)?;
                self.payer = numbers.map_or(Ok(Payer::default()), payer)?;
                Ok(())
            }
            "cache_salt" => extract(name, value, &mut self.cache_salt),
            "lora_name" => extract(name, value, &mut self.lora_name),
            "multimodal" => extract(name, value, &mut self.multimodal),
            "skip_reading_prefix_cache" => extract(name, value, &mut self.skip_reading_prefix_cache),
            "reports_prompt_progress" => extract(name, value, &mut self.reports_prompt_progress),
            "has_stop_strings" => extract(name, value, &mut self.has_stop_strings),
            "waits_for_grammar" => extract(name, value, &mut self.waits_for_grammar),
            "grammar" => {
                let mut grammar: Option<Py<PyGrammarSpec>> = None;
                extract(name, value, &mut grammar)?;
                self.grammar = grammar.map(|grammar| grammar.get().shared());
                Ok(())
            }
            "prediction" => {
                let given = !value.is_none();
                self.prediction = given.then(|| token_ids(value.py(), value)).transpose()?.map(Into::into);
                Ok(())
            }
            "fork_from" => extract(name, value, &mut self.fork_from),
            "arrival_ns" => extract(name, value, &mut self.arrival_ns),
            "samples" => extract(name, value, &mut self.samples),
            _ => {
                let message = format!("add_request() got an unexpected keyword argument '{name}'");
                Err(PyTypeError::new_err(message))
            }
        }
    }

    /// Parameters that are lists.
    pub(crate) fn extras(&self) -> Option<&SamplingExtras> {
        self.params.extras.as_deref()
    }

    /// The request and those that fork it. Hashes nothing, but copies prompts: call it without the interpreter.
    pub(crate) fn into_requests(self) -> Vec<NewRequest> {
        let spans = self.multimodal.into_iter().map(|(offset, length, digest, content)| MultimodalSpan {
            offset,
            length,
            digest: digest.into(),
            content: Arc::from(&*content),
        });
        let extra_keys =
            ExtraKeys::new(self.lora_name.as_deref(), self.cache_salt.as_deref(), spans.collect());
        let request = NewRequest {
            key: RequestKey(self.key),
            request_id: self.request_id,
            prompt_token_ids: self.prompt_token_ids,
            params: self.params,
            priority: self.priority,
            payer: self.payer,
            extra_keys,
            skip_reading_prefix_cache: self.skip_reading_prefix_cache,
            reports_prompt_progress: self.reports_prompt_progress,
            has_stop_strings: self.has_stop_strings,
            waits_for_grammar: self.waits_for_grammar,
            grammar: self.grammar,
            prediction: self.prediction,
            fork_from: self.fork_from.map(RequestKey),
            age_ns: self.arrival_ns.map_or(0, |arrival_ns| monotonic_ns().saturating_sub(arrival_ns)),
        };
        let mut requests = Vec::with_capacity(1 + self.samples.len());
        requests.extend(self.samples.into_iter().map(|(sample_key, sample_id, seed)| NewRequest {
            key: RequestKey(sample_key),
            request_id: sample_id.into(),
            // The first computes the prompt, and says what there is to be said of it.
            params: SamplingParams { seed, num_prompt_logprobs: -1, ..request.params.clone() },
            fork_from: Some(request.key),
            reports_prompt_progress: false,
            ..request.clone()
        }));
        requests.insert(0, request);
        requests
    }
}

fn repetition_detection((min_size, max_size, count): (u32, u32, u32)) -> PyResult<RepetitionDetection> {
    RepetitionDetection::new(min_size, max_size, count)
        .map_err(|error| PyValueError::new_err(error.to_string()))
}

fn payer((tenant, user, weight): (u64, u64, u32)) -> PyResult<Payer> {
    if (1..=MAX_WEIGHT).contains(&weight) {
        return Ok(Payer { tenant, user, weight });
    }
    Err(PyValueError::new_err(format!("payer: its weight must be between 1 and {MAX_WEIGHT}, got {weight}")))
}
