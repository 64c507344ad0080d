//! `DrafterConfig`: the method of drafting, and its limits.

use thiserror::Error;

use crate::matches::{MAX_MATCH_TOKENS, SuffixLimits};

/// Most lengths of n-grams of one drafter; each length is an index of its own.
pub const MAX_NGRAM_LENGTHS: u32 = 16;

/// Average tokens per answer for which the archive has room.
const ARCHIVED_TOKENS: usize = 512;

/// Where drafts come from.
#[derive(Clone, PartialEq, Debug)]
pub enum DraftingMethod {
    /// The tokens after the earliest occurrence of the longest suffix of `min..=max` tokens that occurred before.
    Ngram {
        /// The shortest suffix.
        min: u32,
        /// The longest suffix.
        max: u32,
    },
    /// The tokens after the longest matches of the suffix; several matches vote on each token.
    Suffix(SuffixLimits),
    /// The guesses of a second model, which runs with the step. This crate only decides how many tokens it guesses for
    /// each request.
    Model,
}

/// Most drafts per request while the number of running requests is in a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TokenCap {
    /// The fewest running requests of the range.
    pub first: u32,
    /// The most.
    pub last: u32,
    /// Most drafts per request.
    pub num_tokens: u32,
}

/// See the field docs; `check` holds the limits.
#[derive(Clone, PartialEq, Debug)]
pub struct DrafterConfig {
    /// Where drafts come from.
    pub method: DraftingMethod,
    /// The first entry whose range holds the number of running requests applies; if none does, there is no further
    /// limit.
    pub caps: Vec<TokenCap>,
    /// Number of requests whose answers may become drafts of others, kept as far as there is room; 0: none.
    pub num_archived_requests: u32,
    /// Whether the time of steps and the share of right drafts decide how many drafts run; otherwise all found drafts
    /// run.
    pub adaptive: bool,
}

/// A number is outside its limits.
#[derive(Clone, PartialEq, Debug, Error)]
#[error("{name} must be {rule}, got {value}")]
pub struct DrafterConfigError {
    /// The field.
    pub name: &'static str,
    /// The rule for it.
    pub rule: String,
    /// Its value.
    pub value: String,
}

impl DrafterConfig {
    /// # Errors
    /// The first number that is outside its limits.
    pub fn check(&self) -> Result<(), DrafterConfigError> {
        let between = |name, value: u32, low: u32, high: u32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(DrafterConfigError {
                name,
                rule: format!("between {low} and {high}"),
                value: value.to_string(),
            })
        };
        match self.method {
            DraftingMethod::Ngram { min, max } => {
                between("prompt_lookup_max", max, 1, MAX_MATCH_TOKENS)?;
                between("prompt_lookup_min", min, (max + 1).saturating_sub(MAX_NGRAM_LENGTHS).max(1), max)
            }
            DraftingMethod::Suffix(limits) => {
                between("suffix_decoding_max_tree_depth", limits.max_match, 1, MAX_MATCH_TOKENS)?;
                if !(limits.max_factor >= 0.0 && limits.max_factor.is_finite()) {
                    let value = limits.max_factor.to_string();
                    return Err(DrafterConfigError {
                        name: "suffix_decoding_max_spec_factor",
                        rule: "at least 0".to_owned(),
                        value,
                    });
                }
                if !(0.0..=1.0).contains(&limits.min_share) {
                    let value = limits.min_share.to_string();
                    return Err(DrafterConfigError {
                        name: "suffix_decoding_min_token_prob",
                        rule: "between 0 and 1".to_owned(),
                        value,
                    });
                }
                Ok(())
            }
            DraftingMethod::Model => Ok(()),
        }
    }

    /// Tokens of answers that are kept for other requests.
    pub(crate) fn num_archived_tokens(&self) -> Option<usize> {
        let has_archive = matches!(self.method, DraftingMethod::Suffix(_)) && self.num_archived_requests > 0;
        has_archive.then(|| (self.num_archived_requests as usize).saturating_mul(ARCHIVED_TOKENS))
    }

    /// Most drafts per request while `num_running` requests run.
    #[must_use]
    pub fn cap(&self, num_running: u32) -> u32 {
        let holds = |cap: &&TokenCap| (cap.first..=cap.last).contains(&num_running);
        self.caps.iter().find(holds).map_or(u32::MAX, |cap| cap.num_tokens)
    }
}
