//! `SamplingExtras`: the parameters of a request that are lists: token ids with a bias, allowed ids, bad words, and what
//! its logits processors are given.
//!
//! The scheduler carries them from whoever hands a request in to the worker that samples it, and looks at none. The
//! worker fetches them once, when the request gets a row; few requests have any.

use std::{any::Any, fmt, sync::Arc};

use thiserror::Error;

/// Most bytes that the lists of one request may take together.
pub const MAX_SAMPLING_EXTRAS_BYTES: usize = 3 << 20;

/// Most sequences of token ids that the bad words of one request may be.
pub const MAX_BAD_WORDS: usize = 4096;

/// Most tokens of a bad word.
pub const MAX_BAD_WORD_TOKENS: usize = 128;

/// Why lists are not taken. Each names the parameter that is to blame.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum SamplingExtrasError {
    /// A token id below zero.
    #[error("{parameter} holds the token id {token_id}, but ids are not negative")]
    NegativeTokenId {
        /// The parameter's name.
        parameter: &'static str,
        /// The id.
        token_id: i32,
    },
    /// A bias that cannot be added.
    #[error("logit_bias of token id {token_id} is {bias}, but it must be finite")]
    NotFinite {
        /// Whose.
        token_id: i32,
        /// The bias.
        bias: f32,
    },
    /// A bad word of no tokens, or of too many.
    #[error("a word of bad_words has {got} tokens, but it must have 1 to {MAX_BAD_WORD_TOKENS}")]
    BadWordLength {
        /// Its tokens.
        got: usize,
    },
    /// Too many bad words.
    #[error("bad_words come to {got} sequences of tokens, at most {MAX_BAD_WORDS} are possible")]
    TooManyBadWords {
        /// Given.
        got: usize,
    },
    /// Too much of everything.
    #[error(
        "logit_bias, allowed_token_ids, bad_words and extra_args take {got} bytes together, at most {MAX_SAMPLING_EXTRAS_BYTES} are possible"
    )]
    TooLarge {
        /// Bytes.
        got: usize,
    },
}

/// Something that the worker understands and that cannot leave the process: Python's callables.
#[derive(Clone)]
pub struct Attachment(pub Arc<dyn Any + Send + Sync>);

impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Attachment")
    }
}

impl PartialEq for Attachment {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// See the module docs.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct SamplingExtras {
    logit_bias: Box<[(i32, f32)]>,
    allowed_token_ids: Box<[i32]>,
    bad_words: Box<[Box<[i32]>]>,
    arguments: Option<Box<str>>,
    attachment: Option<Attachment>,
}

impl SamplingExtras {
    /// Checked lists. Whether the ids are in the vocabulary is for those to see who know it.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn new(
        logit_bias: Vec<(i32, f32)>,
        allowed_token_ids: Vec<i32>,
        bad_words: Vec<Vec<i32>>,
        arguments: Option<String>,
    ) -> Result<Self, SamplingExtrasError> {
        if let Some(&(token_id, bias)) = logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
            return Err(SamplingExtrasError::NotFinite { token_id, bias });
        }
        if bad_words.len() > MAX_BAD_WORDS {
            return Err(SamplingExtrasError::TooManyBadWords { got: bad_words.len() });
        }
        if let Some(word) = bad_words.iter().find(|word| word.is_empty() || word.len() > MAX_BAD_WORD_TOKENS)
        {
            return Err(SamplingExtrasError::BadWordLength { got: word.len() });
        }
        no_negative("logit_bias", logit_bias.iter().map(|(token_id, _)| token_id))?;
        no_negative("allowed_token_ids", allowed_token_ids.iter())?;
        no_negative("bad_words", bad_words.iter().flatten())?;
        let got = size_of_val(&*logit_bias)
            + size_of_val(&*allowed_token_ids)
            + bad_words.iter().map(|word| size_of_val(&**word)).sum::<usize>()
            + arguments.as_ref().map_or(0, String::len);
        if got > MAX_SAMPLING_EXTRAS_BYTES {
            return Err(SamplingExtrasError::TooLarge { got });
        }
        Ok(Self {
            logit_bias: logit_bias.into(),
            allowed_token_ids: allowed_token_ids.into(),
            bad_words: bad_words.into_iter().map(Into::into).collect(),
            arguments: arguments.map(Into::into),
            attachment: None,
        })
    }

    /// The same with something that stays in this process.
    #[must_use]
    pub fn with_attachment(self, attachment: Option<Attachment>) -> Self {
        Self { attachment, ..self }
    }

    /// Token ids and what is added to their logits.
    #[must_use]
    pub fn logit_bias(&self) -> &[(i32, f32)] {
        &self.logit_bias
    }

    /// The only ids that may be sampled; empty: all may.
    #[must_use]
    pub fn allowed_token_ids(&self) -> &[i32] {
        &self.allowed_token_ids
    }

    /// Sequences of ids whose last one is not sampled behind the others.
    #[must_use]
    pub fn bad_words(&self) -> &[Box<[i32]>] {
        &self.bad_words
    }

    /// A JSON object for logits processors.
    #[must_use]
    pub fn arguments(&self) -> Option<&str> {
        self.arguments.as_deref()
    }

    /// What cannot leave the process.
    #[must_use]
    pub fn attachment(&self) -> Option<&Attachment> {
        self.attachment.as_ref()
    }
}

fn no_negative<'a>(
    parameter: &'static str,
    mut token_ids: impl Iterator<Item = &'a i32>,
) -> Result<(), SamplingExtrasError> {
    match token_ids.find(|&&token_id| token_id < 0) {
        Some(&token_id) => Err(SamplingExtrasError::NegativeTokenId { parameter, token_id }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{
        Attachment, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_SAMPLING_EXTRAS_BYTES, SamplingExtras,
        SamplingExtrasError,
    };

    type Lists = (Vec<(i32, f32)>, Vec<i32>, Vec<Vec<i32>>, Option<String>);

    fn extras((bias, allowed, words, arguments): Lists) -> Result<SamplingExtras, SamplingExtrasError> {
        SamplingExtras::new(bias, allowed, words, arguments)
    }

    #[test]
    fn what_is_wrong_is_named_with_its_number() {
        let long = vec![1; MAX_BAD_WORD_TOKENS + 1];
        let wrong: Vec<(Lists, &str)> = vec![
            ((vec![(-1, 0.0)], vec![], vec![], None), "logit_bias holds the token id -1"),
            ((vec![(3, f32::NAN)], vec![], vec![], None), "token id 3 is NaN"),
            ((vec![(3, f32::INFINITY)], vec![], vec![], None), "token id 3 is inf"),
            ((vec![], vec![4, -2], vec![], None), "allowed_token_ids holds the token id -2"),
            ((vec![], vec![], vec![vec![1], vec![2, -7]], None), "bad_words holds the token id -7"),
            ((vec![], vec![], vec![vec![]], None), "has 0 tokens"),
            ((vec![], vec![], vec![long], None), "has 129 tokens"),
            ((vec![], vec![], vec![vec![1]; MAX_BAD_WORDS + 1], None), "come to 4097 sequences"),
            ((vec![], vec![0; MAX_SAMPLING_EXTRAS_BYTES / 4 + 1], vec![], None), "3145732 bytes"),
            ((vec![], vec![], vec![], Some(" ".repeat(MAX_SAMPLING_EXTRAS_BYTES + 1))), "3145729 bytes"),
        ];
        for (lists, expected) in wrong {
            let error = extras(lists).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn the_largest_that_may_be_are_taken() {
        let words = vec![vec![1; MAX_BAD_WORD_TOKENS]; MAX_BAD_WORDS];
        assert_eq!(
            extras((vec![], vec![], words, None)).expect("as large as may be").bad_words().len(),
            MAX_BAD_WORDS
        );
        extras((vec![], vec![0; MAX_SAMPLING_EXTRAS_BYTES / 4], vec![], None)).expect("as large as may be");
    }

    #[test]
    fn an_attachment_equals_itself_alone() {
        let attachment = Attachment(Arc::new(1u8));
        let plain = SamplingExtras::default();
        let with = plain.clone().with_attachment(Some(attachment.clone()));
        assert_eq!(with, plain.clone().with_attachment(Some(attachment)));
        assert_ne!(with, plain.clone().with_attachment(Some(Attachment(Arc::new(1u8)))));
        assert_ne!(with, plain);
    }
}
