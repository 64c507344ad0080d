//! A panic of the library becomes an error: what a client sends ends its own request at most.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::GrammarError;

/// Run `work`, whatever happens in it.
pub(crate) fn guarded<T>(work: impl FnOnce() -> Result<T, GrammarError>) -> Result<T, GrammarError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(GrammarError::Refused("this grammar is more than the compiler can deal with".to_owned()))
    })
}
