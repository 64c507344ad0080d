//! A model's turn, read while it comes: what it says, what it thinks, and the tools it calls.
//!
//! * [`TurnFormat`], [`ReasoningFormat`]: how models write calls and thoughts, one row of a table each.
//! * [`TurnReading`]: what the answers of a request have in common.
//! * [`TurnParser`]: text in, in pieces of any size; [`TurnEvent`]s out, whose joined text does not depend on the pieces.
//! * [`CallGrammar`]: the same row, written as a grammar. What it accepts the parser reads back.
//!
//! Nothing fails: what is not a call is content. Held back is at most a marker, the head of a call, a value that has to be
//! whole to be read, and whitespace that a call may follow.

mod arguments;
mod brace_values;
mod call_finder;
mod call_syntax;
mod event;
mod format;
mod grammar;
mod header;
mod json_span;
mod members;
mod parser;
mod progress;
mod python_values;
mod reading;
mod reasoning;
mod tool;
mod xml_values;

pub(crate) use call_finder::CallFinder;
pub use event::TurnEvent;
pub use format::{CallIds, TurnFormat};
pub use grammar::{CallGrammar, GrammarRefusal, Thinking};
pub use parser::TurnParser;
pub use reading::TurnReading;
pub use reasoning::ReasoningFormat;
pub use tool::Tool;
