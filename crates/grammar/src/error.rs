//! Why a grammar is refused.

use output::floor_char_boundary;
use thiserror::Error;

use crate::{MAX_DISTINCT_PROPERTIES, MAX_PROPERTIES};

/// A grammar that is not taken. The text is for its author.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum GrammarError {
    /// A keyword of a schema that would be ignored.
    #[error("{pointer} is not supported: {what} cannot be enforced")]
    NotEnforced {
        /// Where it stands in the schema.
        pointer: String,
        /// Its name.
        keyword: &'static str,
        /// It, or the value of it that is not known.
        what: String,
    },
    /// A number that is not kept exactly.
    #[error("{pointer} is {value}, but whole numbers beyond 9007199254740991 cannot be enforced")]
    InexactNumber {
        /// Where it stands in the schema.
        pointer: String,
        /// The number.
        value: String,
    },
    /// Too much to compile.
    #[error("the {what} has {got} {unit}; the limit is {limit}")]
    TooLarge {
        /// Of which part.
        what: &'static str,
        /// Given.
        got: usize,
        /// Possible.
        limit: usize,
        /// What is counted.
        unit: &'static str,
    },
    /// Objects that are too large to compile.
    #[error(
        "the objects of this schema have {got} properties; the limit is {MAX_PROPERTIES} in one object, fewer in each of \
         several, and {MAX_DISTINCT_PROPERTIES} different names in all"
    )]
    TooManyProperties {
        /// Given.
        got: usize,
    },
    /// A schema that is not JSON.
    #[error("the schema is not valid JSON: {0}")]
    NotJson(String),
    /// JSON that is not a schema.
    #[error("a schema must be an object or a boolean, got {0}")]
    NotASchema(&'static str),
    /// A list of choices that cannot be one.
    #[error("choice must be a list of one or more texts, none of them empty")]
    BadChoice,
    /// A grammar in GBNF that cannot be read.
    #[error("the GBNF grammar has an error in line {line}: {what}")]
    BadGbnf {
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// The library refuses it.
    #[error("{0}")]
    Refused(String),
    /// No text obeys it.
    #[error("no text obeys this grammar")]
    NoText,
    /// The matchers of other requests take all the memory that there is for them.
    #[error("the grammars of other requests take all the memory that there is for grammars")]
    NoRoom,
    /// The tokenizer that grammars are compiled for is not there, or damaged.
    #[error("the tokenizer of the model cannot be read: {0}")]
    UnreadableTokenizer(String),
    /// The tokenizer does not say which bytes its tokens stand for.
    #[error("structured output is not possible with the tokenizer of this model")]
    OpaqueTokenizer,
}

/// Check how much there is of something.
///
/// # Errors
/// More than is possible.
pub(crate) fn check_limit(
    what: &'static str,
    got: usize,
    limit: usize,
    unit: &'static str,
) -> Result<(), GrammarError> {
    if got > limit { Err(GrammarError::TooLarge { what, got, limit, unit }) } else { Ok(()) }
}

/// Most bytes of the library's words that are passed on.
const MAX_MESSAGE_BYTES: usize = 500;

impl GrammarError {
    /// The first line of what the library says: what follows may be its state or a backtrace. Where it announces more, the
    /// line that says what is wrong stands behind it.
    pub(crate) fn refused(message: &str) -> Self {
        let first = message.lines().next().unwrap_or_default();
        let reason = message.lines().find(|line| first.ends_with(':') && line.starts_with("error: "));
        let mut text = first[..floor_char_boundary(first, MAX_MESSAGE_BYTES)].to_owned();
        if let Some(reason) = reason {
            text.push(' ');
            text.push_str(&reason["error: ".len()..floor_char_boundary(reason, MAX_MESSAGE_BYTES)]);
        }
        Self::Refused(text)
    }
}
