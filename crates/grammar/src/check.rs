//! Whether a grammar can be enforced, asked before a request is handed in: without the model's vocabulary.

use std::sync::OnceLock;

use llguidance::{Matcher, ParserFactory};
use scheduler::GrammarSpec;
use toktrie::ApproximateTokEnv;

use crate::{
    compile::{compile, limits},
    error::GrammarError,
    guarded::guarded,
    vocabulary::quiet_factory,
};

/// Compile a grammar over single bytes, and forget it. What passes here fails in an engine only if the vocabulary makes
/// it too complex.
///
/// Takes a millisecond for most schemas, and seconds where one text of a million bytes is all that may follow: not for an
/// event loop.
///
/// # Errors
/// Why it cannot be enforced.
pub fn check(spec: &GrammarSpec) -> Result<(), GrammarError> {
    matcher_of_bytes(spec).map(|_| ())
}

/// Whether a text obeys a grammar as a whole; for tests and measurements.
///
/// # Errors
/// Why the grammar cannot be enforced.
pub fn accepts(spec: &GrammarSpec, text: &str) -> Result<bool, GrammarError> {
    let mut matcher = matcher_of_bytes(spec)?;
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    let refused = |error: &dyn std::fmt::Display| GrammarError::refused(&error.to_string());
    let num_taken = guarded(|| matcher.try_consume_tokens(&tokens).map_err(|error| refused(&error)))?;
    Ok(num_taken == tokens.len() && matcher.is_accepting().map_err(|error| refused(&error))?)
}

fn matcher_of_bytes(spec: &GrammarSpec) -> Result<Matcher, GrammarError> {
    static FACTORY: OnceLock<Result<ParserFactory, GrammarError>> = OnceLock::new();
    let factory = FACTORY.get_or_init(|| quiet_factory(&ApproximateTokEnv::single_byte_env(), &[], limits()));
    compile(spec, factory.as_ref().map_err(Clone::clone)?)
}
