//! Structured output: what a request asks its output to be becomes a mask over the vocabulary, token by token.
//!
//! * [`check()`]: whether a grammar can be enforced; a front end asks before it hands a request in.
//! * [`Grammars`]: the engine's side. Threads of its own compile grammars and compute masks; the thread that steps the
//!   engine says which tokens came and copies the masks out.
//!
//! A schema is enforced or refused by name, and what it may cost is bounded before and while it is compiled: by its size,
//! and by the fuel of the library that does the work (`llguidance`).

#![forbid(unsafe_code)]

mod check;
mod compile;
mod error;
mod grammars;
mod guarded;
mod limits;
mod lint;
mod matcher;
#[cfg(test)]
mod naive_masks;
mod room;
mod sample;
mod spare_memory;
mod thread_time;
mod timing;
mod vocabulary;
#[cfg(test)]
mod whole_requests;

pub use check::relax::{Relaxed, relax};
pub use check::{accepts, check};
pub use compile::gbnf::to_lark;
pub use compile::jobs::MAX_WAITING_COMPILES;
pub use compile::lark_rule::in_messages;
pub use error::GrammarError;
pub use grammars::Grammars;
pub use lint::{Places, check_tools, relax_tool};
pub use sample::{Matching, Verdict};
pub use spare_memory::give_back_memory_with;
pub use timing::{ForcedShare, MaskTimes, count_forced, time_masks};
pub use vocabulary::{LoadTokenizer, Vocabulary};

/// Most bytes of a grammar's text. The largest of 11,306 real schemas has 938 KB.
pub const MAX_GRAMMAR_BYTES: usize = 1 << 20;
/// Most bytes of a regular expression: one that is asked for, the whitespace pattern, and each in a schema.
pub const MAX_REGEX_BYTES: usize = 64 << 10;
/// Most properties of one object of a schema; of several, fewer in each. What they cost grows with their square: these take
/// half a second to compile and 20 ms for a mask, 5,000 took 3.5 s and 160 ms. Of 5,135 real schemas the largest has 21.
pub const MAX_PROPERTIES: usize = 2000;
/// Most names of properties in a schema, all objects together.
pub const MAX_DISTINCT_PROPERTIES: usize = 8000;
/// Most schemas in a schema, itself with it. Each takes the compiler some five kilobytes: of 20,000 one check took 106 MiB.
/// Of 5,135 real schemas the largest has 354.
pub const MAX_SUBSCHEMAS: usize = 10_000;
/// Most texts to choose from.
pub const MAX_CHOICES: usize = 50_000;
