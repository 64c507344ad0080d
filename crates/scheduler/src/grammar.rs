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
    /// Any JSON object; the text is empty.
    JsonObject = 1,
    /// A regular expression that the whole output matches.
    Regex = 2,
    /// The allowed outputs, as a JSON array of strings.
    Choice = 3,
    /// A context-free grammar in Lark or in GBNF.
    Grammar = 4,
    /// Any text; only useful for the reasoning before it. The text is empty.
    Anything = 5,
}

impl GrammarKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; 6] =
        [Self::JsonSchema, Self::JsonObject, Self::Regex, Self::Choice, Self::Grammar, Self::Anything];
}

/// The grammar of a request's output. Plain data: it is sent with the request and compiled in the engine.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct GrammarSpec {
    /// The language of `text`.
    pub kind: GrammarKind,
    /// The text of the grammar.
    pub text: Box<str>,
    /// JSON: a regular expression for the whitespace between tokens of the language.
    pub whitespace_pattern: Option<Box<str>>,
    /// JSON: no whitespace at all.
    pub disable_any_whitespace: bool,
    /// JSON: an object has only the properties of its schema, unless the schema says otherwise.
    pub disable_additional_properties: bool,
    /// Reasoning before the part that the grammar applies to.
    pub thinking: Option<ThinkingGate>,
}

/// Reasoning before an answer, recognised by the tokens that begin and end it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ThinkingGate {
    /// The token that begins reasoning.
    pub open_id: u32,
    /// The token that ends reasoning.
    pub close_id: u32,
    /// Whether the output begins within reasoning.
    pub begins_within: bool,
    /// Most tokens of reasoning, without the two markers; `None`: no limit.
    pub budget: Option<u32>,
    /// The tokens that are forced when the budget is spent; the last is `close_id`.
    pub end_ids: Box<[u32]>,
}

impl GrammarSpec {
    /// Make a grammar without options.
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

/// The state of a grammar's compilation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GrammarProgress {
    /// The request waits. After this changes, `EngineHandle::grammar_ready`, or one of the methods that report a
    /// failure, is called.
    Compiling,
    /// The request may run.
    Ready,
    /// The request ends with this error.
    Failed(RequestError),
}

/// The grammar of one request, while a [`GrammarCompiler`] compiles it.
pub trait GrammarWork: Debug + Send + Sync {
    /// The state of the compilation.
    fn progress(&self) -> GrammarProgress;

    /// How many of these tokens the grammar accepts after those that it has seen; `None` if this cannot be answered
    /// without waiting.
    fn num_taken(&self, token_ids: &[i32]) -> Option<usize>;

    /// Returns itself, for the compiler that made it.
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

/// Starts to compile the grammars of requests on the threads that submit them. A grammar that is compiled before the
/// next step is planned delays no request.
pub trait GrammarCompiler: Debug + Send + Sync {
    /// Start without waiting. The request has not reached the scheduler yet, and may never do so.
    fn begin(&self, key: RequestKey, spec: &Arc<GrammarSpec>, ignores_eos: bool) -> Arc<dyn GrammarWork>;
}

/// A request with a grammar arrived or left.
#[derive(Clone, Debug)]
pub enum GrammarNews {
    /// The request waits for `EngineHandle::grammar_ready`, unless its grammar was ready before.
    Arrived {
        /// The request.
        key: RequestKey,
        /// Its grammar.
        spec: Arc<GrammarSpec>,
        /// Whether EOS does not end it.
        ignores_eos: bool,
        /// The compilation that has begun; `None` if there was no compiler when the request was submitted.
        work: Option<Arc<dyn GrammarWork>>,
    },
    /// The request finished, was aborted or failed.
    Left(RequestKey),
}

/// A row of a step with tokens that must obey a grammar.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConstrainedSample {
    /// Its index among the step's samples.
    pub place: u32,
    /// The request.
    pub key: RequestKey,
    /// Drafts that the step runs after the known tokens.
    pub draft_token_ids: Vec<i32>,
}
