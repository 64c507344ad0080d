//! Grammars, as far as the scheduler knows them: what a request asks for, the news that a request came or left
//! with one, and a sample that obeys one. What a grammar means, `crates/grammar` knows.

use std::sync::Arc;

use crate::output::RequestKey;

/// The language of a grammar.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum GrammarKind {
    /// A JSON schema, as JSON text.
    JsonSchema = 0,
    /// Any JSON object; there is no text.
    JsonObject = 1,
    /// A regular expression that the whole output matches.
    Regex = 2,
    /// Texts of which the output is one, as a JSON array.
    Choice = 3,
    /// A context-free grammar in Lark or in GBNF.
    Grammar = 4,
    /// Any text; there is none. For the thoughts before it alone.
    Anything = 5,
}

impl GrammarKind {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 6] =
        [Self::JsonSchema, Self::JsonObject, Self::Regex, Self::Choice, Self::Grammar, Self::Anything];
}

/// What the output of a request must be. Plain data: it travels with the request and is compiled where it runs.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct GrammarSpec {
    /// The language of `text`.
    pub kind: GrammarKind,
    /// The grammar.
    pub text: Box<str>,
    /// JSON: a regular expression for the whitespace between tokens of the language.
    pub whitespace_pattern: Option<Box<str>>,
    /// JSON: no whitespace at all.
    pub disable_any_whitespace: bool,
    /// JSON: an object has no other properties than those of its schema, where the schema does not say.
    pub disable_additional_properties: bool,
    /// Thoughts that the grammar does not hold, before what it holds.
    pub thinking: Option<ThinkingGate>,
}

/// Thoughts before an answer, told by the tokens that begin and end them.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ThinkingGate {
    /// Begins them.
    pub open_id: u32,
    /// Ends them.
    pub close_id: u32,
    /// The output begins within them.
    pub begins_within: bool,
    /// Most tokens of them, the two markers aside; `None`: any number.
    pub budget: Option<u32>,
    /// What comes once the budget is spent; it ends with `close_id`.
    pub end_ids: Box<[u32]>,
}

impl GrammarSpec {
    /// A grammar without options.
    #[must_use]
    pub fn new(kind: GrammarKind, text: &str) -> Self {
        Self {
            kind,
            text: text.into(),
            whitespace_pattern: None,
            disable_any_whitespace: false,
            disable_additional_properties: false,
            thinking: None,
        }
    }
}

/// A request with a grammar came or left, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GrammarNews {
    /// It waits for `EngineHandle::grammar_ready`.
    Arrived {
        /// Whose grammar.
        key: RequestKey,
        /// The grammar.
        spec: Arc<GrammarSpec>,
        /// EOS does not end it.
        ignores_eos: bool,
    },
    /// Finished, aborted or failed.
    Left(RequestKey),
}

/// A row of a step whose token must obey a grammar.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConstrainedSample {
    /// Place among the step's samples.
    pub place: u32,
    /// Whose token.
    pub key: RequestKey,
}
