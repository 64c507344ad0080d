//! Grammars, as far as the scheduler knows them: what a request asks for, the news that a request came or left
//! with one, and a sample that obeys one. What a grammar means, `crates/grammar` knows.

use std::{any::Any, fmt::Debug, sync::Arc};

use crate::output::{RequestError, RequestKey};

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

/// How far a grammar is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GrammarProgress {
    /// Its request waits. `EngineHandle::grammar_ready`, or one of those that say that it failed, is called after this
    /// has changed.
    Compiling,
    /// Its request may run.
    Ready,
    /// Its request ends.
    Failed(RequestError),
}

/// The grammar of one request, in the hands of a [`GrammarCompiler`].
pub trait GrammarWork: Debug + Send + Sync {
    /// How far it is.
    fn progress(&self) -> GrammarProgress;

    /// How many of some tokens it takes behind those that it has seen; `None`: that cannot be said without waiting.
    fn num_taken(&self, token_ids: &[i32]) -> Option<usize>;

    /// Itself, for the compiler that made it.
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

/// Begins to compile the grammars of requests, on the threads that hand these in: what is compiled by the time of the
/// next plan holds no request up.
pub trait GrammarCompiler: Debug + Send + Sync {
    /// Begin, without waiting. The request has not arrived yet, and may never.
    fn begin(&self, key: RequestKey, spec: &Arc<GrammarSpec>, ignores_eos: bool) -> Arc<dyn GrammarWork>;
}

/// A request with a grammar came or left, in this order.
#[derive(Clone, Debug)]
pub enum GrammarNews {
    /// It waits for `EngineHandle::grammar_ready`, unless its grammar was ready before.
    Arrived {
        /// Whose grammar.
        key: RequestKey,
        /// The grammar.
        spec: Arc<GrammarSpec>,
        /// EOS does not end it.
        ignores_eos: bool,
        /// What the compiler has begun; `None` if there was none when the request was handed in.
        work: Option<Arc<dyn GrammarWork>>,
    },
    /// Finished, aborted or failed.
    Left(RequestKey),
}

/// A row of a step whose tokens must obey a grammar.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConstrainedSample {
    /// Place among the step's samples.
    pub place: u32,
    /// Whose tokens.
    pub key: RequestKey,
    /// Guesses of what follows the tokens that are known, which the step runs as well.
    pub draft_token_ids: Vec<i32>,
}
