//! `DrafterConfig`: which drafter, and its limits.

use thiserror::Error;

use crate::matches::{MAX_MATCH_TOKENS, SuffixLimits};

/// Lengths of n-grams that one drafter keeps apart: each is an index of its own.
pub const MAX_NGRAM_LENGTHS: u32 = 16;

/// Tokens of an answer that the archive has room for, on average.
const ARCHIVED_TOKENS: usize = 512;

/// Where drafts come from.
#[derive(Clone, PartialEq, Debug)]
pub enum DraftingMethod {
    /// What stood behind the earliest occurrence of the longest suffix of `min..=max` tokens that occurred before.
    Ngram {
        /// Shortest suffix.
        min: u32,
        /// Longest.
        max: u32,
    },
    /// What stood behind the longest matches of the suffix, token by token by the vote of several.
    Suffix(SuffixLimits),
    /// What a second model says, where the step runs: here it is decided how many tokens it guesses of whom.
    Model,
}

/// Drafts per request at most while so many requests run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TokenCap {
    /// Fewest running requests.
    pub first: u32,
    /// Most.
    pub last: u32,
    /// Drafts per request.
    pub num_tokens: u32,
}

/// See the field docs; `check` holds the limits.
#[derive(Clone, PartialEq, Debug)]
pub struct DrafterConfig {
    /// Where drafts come from.
    pub method: DraftingMethod,
    /// The first that holds the number of running requests counts; none: as many drafts as were found.
    pub caps: Vec<TokenCap>,
    /// Requests whose answers may be drafts of others, which are kept as far as there is room; 0: none.
    pub num_archived_requests: u32,
    /// Whether what steps take and how often drafts are right decide how many run; else all that were found do.
    pub adaptive: bool,
}

/// A number outside its limits.
#[derive(Clone, PartialEq, Debug, Error)]
#[error("{name} must be {rule}, got {value}")]
pub struct DrafterConfigError {
    /// Field.
    pub name: &'static str,
    /// What it must be.
    pub rule: String,
    /// What it was.
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

    /// Drafts per request at most while `num_running` requests run.
    #[must_use]
    pub fn cap(&self, num_running: u32) -> u32 {
        let holds = |cap: &&TokenCap| (cap.first..=cap.last).contains(&num_running);
        self.caps.iter().find(holds).map_or(u32::MAX, |cap| cap.num_tokens)
    }
}
