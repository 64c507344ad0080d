//! How the answers of one request are read.

use std::sync::Arc;

use super::format::{CallIds, TurnFormat};
use super::parser::TurnParser;
use super::reasoning::ReasoningFormat;
use super::tool::Tool;

/// What all answers of a request have in common; each gets a parser of its own.
#[derive(Debug, Clone)]
pub struct TurnReading {
    parser: TurnParser,
    pub(crate) call_ids: CallIds,
    pub(crate) is_parallel: bool,
    pub(crate) reasoning_fields: Vec<String>,
}

impl TurnReading {
    /// Answers of which all calls and thoughts are passed on.
    ///
    /// `format`: calls are looked for. `reasoning`: so are thoughts, within which an answer begins if `begins_within`.
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

    /// Read answers that have thoughts at their beginning or nowhere: what looks like their marker later is text.
    #[must_use]
    pub fn thinking_once(mut self) -> Self {
        self.parser = self.parser.thinking_once();
        self
    }

    /// Pass on the first call alone, and nothing behind it.
    #[must_use]
    pub fn with_one_call(mut self) -> Self {
        self.is_parallel = false;
        self
    }

    /// Pass on thoughts in each of these fields; in none, not at all.
    #[must_use]
    pub fn with_reasoning_in(mut self, fields: Vec<String>) -> Self {
        self.reasoning_fields = fields;
        self
    }

    /// What reads one answer from its beginning.
    #[must_use]
    pub fn parser(&self) -> TurnParser {
        self.parser.clone()
    }
}
