//! `DrafterConfig` for Python: which drafts the scheduler makes, by the names of `--speculative-config`.

use ::scheduler::{DrafterConfig, DraftingMethod, SuffixLimits, TokenCap};
use pyo3::{exceptions::PyValueError, prelude::*};

/// Numbers that fix a drafter; checked here.
#[pyclass(frozen, name = "DrafterConfig", module = "rustvllm._core")]
pub(crate) struct PyDrafterConfig {
    pub(crate) inner: DrafterConfig,
}

#[pymethods]
impl PyDrafterConfig {
    #[new]
    #[pyo3(signature = (*, method, prompt_lookup_min=5, prompt_lookup_max=5, suffix_decoding_max_tree_depth=24,
        suffix_decoding_max_spec_factor=1.0, suffix_decoding_min_token_prob=0.1, suffix_decoding_max_cached_requests=0,
        caps=Vec::new(), adaptive=true))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
    fn new(
        method: &str,
        prompt_lookup_min: u32,
        prompt_lookup_max: u32,
        suffix_decoding_max_tree_depth: u32,
        suffix_decoding_max_spec_factor: f64,
        suffix_decoding_min_token_prob: f64,
        suffix_decoding_max_cached_requests: u32,
        caps: Vec<(u32, u32, u32)>,
        adaptive: bool,
    ) -> PyResult<Self> {
        let method = match method {
            "ngram" => DraftingMethod::Ngram { min: prompt_lookup_min, max: prompt_lookup_max },
            "suffix" => DraftingMethod::Suffix(SuffixLimits {
                max_match: suffix_decoding_max_tree_depth,
                max_factor: suffix_decoding_max_spec_factor,
                min_share: suffix_decoding_min_token_prob,
            }),
            "draft_model" => DraftingMethod::Model,
            other => {
                let message = format!("method must be 'ngram', 'suffix' or 'draft_model', got {other:?}");
                return Err(PyValueError::new_err(message));
            }
        };
        let caps =
            caps.into_iter().map(|(first, last, num_tokens)| TokenCap { first, last, num_tokens }).collect();
        let inner = DrafterConfig {
            method,
            caps,
            num_archived_requests: suffix_decoding_max_cached_requests,
            adaptive,
        };
        inner.check().map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self { inner })
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.inner)
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyDrafterConfig>()
}
