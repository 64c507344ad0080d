//! Turns of messages (gpt-oss) as a grammar: thoughts, what is said, and calls, each in its channel.

use std::fmt::Write as _;

use serde_json::{Map, Value};

use super::grammar::{CallGrammar, GrammarRefusal, Thinking, json_rule, line};
use super::messages::{CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START};

/// A text of a message where marks are not tokens of their own: it has none.
const UNMARKED: &str = r"~/(?s:.*)<\|(start|channel|message|end|call|return)\|>(?s:.*)/";

impl CallGrammar<'_> {
    /// A grammar for messages, the last of which may be a call. `schema`: the answer, if it is not a call, is JSON of it.
    ///
    /// The calls of strict tools obey their schemas; with `all_obey`, those of other tools do too.
    ///
    /// # Errors
    /// The format cannot express the schema of a tool.
    pub(super) fn of_messages(
        &self,
        schema: Option<&Map<String, Value>>,
        all_obey: bool,
    ) -> Result<String, GrammarRefusal> {
        let mut lark = String::new();
        let has_begun = matches!(self.thinking, Thinking::HasBegun(_));
        line(&mut lark, "start", if has_begun { "text | closed (next turn)?" } else { "turn" });
        // In parts, of which thoughts share the first two: a text that is one would be taken for its longer beginning.
        let rest = self.format.written.before.trim_start_matches(CHANNEL).trim_start_matches("commentary");
        let before = format!("{} \"commentary\" {}", self.literal(CHANNEL), self.literal(rest));
        let (next, end) = (self.literal(&format!("{START}assistant")), self.literal(END));
        let call_end = self.literal(CALL);
        let (channel, message) = (self.literal(CHANNEL), self.literal(MESSAGE));
        let format = format!("(\" json\" | \" \" {} \"json\")?", self.literal(CONSTRAIN));
        let said = if schema.is_some() { "answer" } else { "head (text | closed)" };
        let last = if self.tools.is_empty() { said.to_owned() } else { format!("{said} | calls") };
        line(&mut lark, "turn", &format!("(head closed next)* ({last})"));
        line(&mut lark, "next", &next);
        let thinks = format!("{channel} (\"analysis\" | \"commentary\") {message}");
        let says = format!("{channel} \"final\" {format} {message}");
        line(&mut lark, "head", &if schema.is_some() { thinks } else { format!("{thinks} | {says}") });
        if let Some(schema) = schema {
            line(&mut lark, "answer", &format!("{says} json"));
            line(&mut lark, "json", &json_rule(schema.clone()));
        }
        if !self.tools.is_empty() {
            let more = self.literal(self.format.written.between);
            let more = if self.is_parallel { format!("({more} call)*") } else { String::new() };
            line(&mut lark, "calls", &format!("{before} call {more} {call_end}?"));
            let names: Vec<String> = (0..self.tools.len()).map(|index| format!("f{index}")).collect();
            line(&mut lark, "call", &names.join(" | "));
            for (name, tool) in names.iter().zip(&self.tools) {
                self.write_tool(name, tool, tool.strict || all_obey, &mut lark)?;
            }
        }
        // A text with the mark that ends it, and one without any.
        if end.starts_with("<[") {
            line(&mut lark, "closed", &format!("/(?s:.*)/ {end}"));
            line(&mut lark, "text", "/(?s:.*)/");
        } else {
            let _ = writeln!(lark, "closed[suffix={end}]: /(?s:.*)/");
            line(&mut lark, "text", "TEXT");
            line(&mut lark, "TEXT", UNMARKED);
        }
        Ok(lark)
    }
}
