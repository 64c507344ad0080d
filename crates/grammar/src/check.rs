//! Whether a grammar can be enforced, asked before a request is handed in: without the model's vocabulary.

use std::sync::{Arc, Mutex, OnceLock};

use llguidance::ParserFactory;
use scheduler::{GrammarKind, GrammarSpec};
use toktrie::{ApproximateTokEnv, TokEnv};

use crate::{
    compile::compile,
    error::GrammarError,
    limits::limits,
    matcher::Matcher,
    passed::Passed,
    sample::lock,
    vocabulary::{Pieces, quiet_factory},
};

/// Compile a grammar over single bytes, and forget it. What passes here fails in an engine only if the vocabulary makes
/// it too complex.
///
/// Takes a millisecond for most schemas, and half a second for the largest: not for an event loop. One that passed not
/// long ago passes at once.
///
/// # Errors
/// Why it cannot be enforced.
pub fn check(spec: &GrammarSpec) -> Result<(), GrammarError> {
    static PASSED: Mutex<Option<Passed>> = Mutex::new(None);
    if spec.kind == GrammarKind::Anything {
        return Ok(());
    }
    // Thoughts before it make no other grammar.
    let spec = GrammarSpec { thinking: None, ..spec.clone() };
    if lock(&PASSED).as_ref().is_some_and(|passed| passed.has(&spec)) {
        return Ok(());
    }
    matcher_of_bytes(&spec)?;
    lock(&PASSED).get_or_insert_default().put(spec);
    Ok(())
}

/// Whether a text obeys a grammar as a whole; for tests and measurements.
///
/// # Errors
/// Why the grammar cannot be enforced.
pub fn accepts(spec: &GrammarSpec, text: &str) -> Result<bool, GrammarError> {
    if spec.kind == GrammarKind::Anything {
        return Ok(true);
    }
    let mut matcher = matcher_of_bytes(spec)?;
    for byte in text.bytes() {
        if !matcher.takes(u32::from(byte))? {
            return Ok(false);
        }
        matcher.take(u32::from(byte))?;
    }
    matcher.is_accepting()
}

/// A matcher whose tokens are single bytes.
///
/// # Errors
/// Why the grammar cannot be enforced.
pub(crate) fn matcher_of_bytes(spec: &GrammarSpec) -> Result<Matcher, GrammarError> {
    static FACTORY: OnceLock<Result<ParserFactory, GrammarError>> = OnceLock::new();
    let factory = FACTORY.get_or_init(|| {
        // Not the library's own environment: there a mask is made of all the text that must follow, a million bytes of it.
        let env: TokEnv = Arc::new(Pieces(ApproximateTokEnv::single_byte_env().tok_trie().clone()));
        quiet_factory(&env, &[], limits())
    });
    compile(spec, factory.as_ref().map_err(Clone::clone)?)
}
