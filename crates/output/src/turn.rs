//! Parses a model's turn while it arrives: its content, its reasoning, and the tools that it calls.
//!
//! * [`TurnFormat`], [`ReasoningFormat`]: how models write calls and reasoning, one row of a table each.
//! * [`TurnReading`]: what the answers of a request have in common.
//! * [`TurnParser`]: takes text in pieces of any size and gives [`TurnEvent`]s, whose joined text does not depend on
//!   the pieces.
//! * [`CallGrammar`]: the same row as a grammar. The parser can read everything that it accepts.
//!
//! Nothing fails: what is not a call is content. At most these are held back: a marker, the head of a call, a value
//! that can only be read when it is whole, and whitespace before a possible call.

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
mod messages;
mod messages_grammar;
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
pub use messages_grammar::messages_around;
pub use parser::TurnParser;
pub use reading::TurnReading;
pub use reasoning::ReasoningFormat;
pub use tool::Tool;
