//! How the answers of one request are parsed.

use std::sync::Arc;

use super::format::{CallIds, TurnFormat};
use super::parser::TurnParser;
use super::reasoning::ReasoningFormat;
use super::tool::Tool;

/// What all answers of a request have in common; each answer gets a parser of its own.
#[derive(Debug, Clone)]
pub struct TurnReading {
    parser: TurnParser,
    pub(crate) call_ids: CallIds,
    pub(crate) is_parallel: bool,
    pub(crate) reasoning_fields: Vec<String>,
}

impl TurnReading {
    /// Pass on all calls and all reasoning of the answers.
    ///
    /// `format`: look for calls. `reasoning`: look for reasoning; an answer begins within it if `begins_within`.
    #[must_use]
    pub fn new(
        format: Option<&'static TurnFormat>,
        reasoning: Option<&'static ReasoningFormat>,
        tools: Arc<[Tool]>,
        begins_within: bool,
    ) -> Self {
        Self {
            parser: TurnParser::new(format, reasoning, tools, begins_within),
            call_ids: format.map_or(CallIds::Random, |format| format.ids),
            is_parallel: true,
            reasoning_fields: ["reasoning", "reasoning_content"].map(str::to_owned).into(),
        }
    }

    /// Expect reasoning only at the beginning of an answer: later, what looks like its marker is text.
    #[must_use]
    pub fn thinking_once(mut self) -> Self {
        self.parser = self.parser.thinking_once();
        self
    }

    /// Pass on only the first call, and nothing after it.
    #[must_use]
    pub fn with_one_call(mut self) -> Self {
        self.is_parallel = false;
        self
    }

    /// Pass on reasoning in each of these fields; without any, drop it.
    #[must_use]
    pub fn with_reasoning_in(mut self, fields: Vec<String>) -> Self {
        self.reasoning_fields = fields;
        self
    }

    /// Make a parser for one answer.
    #[must_use]
    pub fn parser(&self) -> TurnParser {
        self.parser.clone()
    }
}
