//! Structured output: what a request asks its output to be becomes a mask over the vocabulary, token by token.
//!
//! * [`check`]: whether a grammar can be enforced; a front end asks before it hands a request in.
//! * [`Grammars`]: the engine's side. Threads of its own compile grammars and compute masks; the thread that steps the
//!   engine says which tokens came and copies the masks out.
//!
//! A schema is enforced or refused by name, and what it may cost is bounded before and while it is compiled: by its size,
//! and by the fuel of the library that does the work (`llguidance`).

#![forbid(unsafe_code)]

mod cache;
mod check;
mod compile;
mod error;
mod gbnf;
mod grammars;
mod guarded;
mod lint;
mod sample;
mod vocabulary;
mod work_queue;

pub use check::{accepts, check};
pub use error::GrammarError;
pub use gbnf::to_lark;
pub use grammars::{Grammars, MAX_WAITING_COMPILES};
pub use lint::check_tools;
pub use sample::{Matching, Verdict};
pub use vocabulary::{LoadTokenizer, Vocabulary};

/// Most bytes of a grammar's text. The largest of 11,306 real schemas has 938 KB.
pub const MAX_GRAMMAR_BYTES: usize = 1 << 20;
/// Most bytes of a regular expression: one that is asked for, the whitespace pattern, and each in a schema.
pub const MAX_REGEX_BYTES: usize = 64 << 10;
/// Most texts to choose from.
pub const MAX_CHOICES: usize = 50_000;
