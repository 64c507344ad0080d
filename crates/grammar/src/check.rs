//! Whether a grammar can be enforced, asked before a request is handed in: without the model's vocabulary.

mod passed;
pub(crate) mod relax;

use std::{
    sync::{Arc, Mutex, OnceLock},
    thread,
};

use llguidance::ParserFactory;
use scheduler::{GrammarKind, GrammarSpec};
use toktrie::{ApproximateTokEnv, TokEnv};

use crate::{
    check::passed::Passed,
    compile::{
        compile,
        jobs::{LARGE_NICENESS, LARGE_TEXT_BYTES, STACK_BYTES},
    },
    error::GrammarError,
    limits::limits,
    matcher::Matcher,
    sample::lock,
    spare_memory::giving_back,
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
    if spec.text.len() > LARGE_TEXT_BYTES {
        compile_aside(&spec)?;
    } else {
        giving_back(|| matcher_of_bytes(&spec).map(|_| ()))?;
    }
    lock(&PASSED).get_or_insert_default().put(spec);
    Ok(())
}

/// Compile a large grammar in a thread of its own, which leaves processors to what is urgent: it may take half a second.
fn compile_aside(spec: &GrammarSpec) -> Result<(), GrammarError> {
    let compile = || {
        let _ = rustix::process::nice(LARGE_NICENESS); // it is a favour to others, not a need
        giving_back(|| matcher_of_bytes(spec).map(|_| ()))
    };
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("grammar-check".to_owned()).stack_size(STACK_BYTES);
        match builder.spawn_scoped(scope, compile) {
            // Panics of the library are caught in it.
            Ok(thread) => {
                thread.join().unwrap_or_else(|_| Err(GrammarError::refused("it could not be checked")))
            }
            Err(_) => matcher_of_bytes(spec).map(|_| ()), // no thread is left
        }
    })
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
