//! Turns of messages (gpt-oss) as a grammar: thoughts, what is said, and calls, each in its channel.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::grammar::lark::{line, literal};
use super::grammar::{CallGrammar, GrammarRefusal, Thinking};
use super::messages::{CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START};

/// A text of a message where marks are not tokens of their own: it has none.
const UNMARKED: &str = r"~/(?s:.*)<\|(start|channel|message|end|call|return)\|>(?s:.*)/";

/// A grammar for thoughts and then an answer, in messages.
///
/// `wanted`: a rule of this name that says what the answer must be, with a line break at its end. `ids`: marks that are
/// one token each. `begins_within`: the prompt ends within thoughts.
#[must_use]
#[expect(
    clippy::implicit_hasher,
    reason = "the ids of special tokens lie in a map of the usual kind everywhere"
)]
pub fn messages_around(wanted: &str, ids: &HashMap<String, u32>, begins_within: bool) -> String {
    let mut lark = String::new();
    write_messages(&mut lark, Some(wanted), ids, begins_within, false);
    lark
}

impl CallGrammar<'_> {
    /// A grammar for messages, the last of which may be a call. `wanted`: as for [`messages_around`], of an answer
    /// without a call.
    ///
    /// The calls of strict tools obey their schemas; with `all_obey`, those of other tools do too.
    ///
    /// # Errors
    /// The format cannot express the schema of a tool.
    pub(super) fn of_messages(&self, wanted: Option<&str>, all_obey: bool) -> Result<String, GrammarRefusal> {
        let mut lark = String::new();
        let has_begun = matches!(self.thinking, Thinking::HasBegun(_));
        write_messages(&mut lark, wanted, self.ids, has_begun, !self.tools.is_empty());
        if self.tools.is_empty() {
            return Ok(lark);
        }
        // In parts, of which thoughts share the first two: a text that is one would be taken for its longer beginning.
        let rest = self.format.written.before.trim_start_matches(CHANNEL).trim_start_matches("commentary");
        let before = format!("{} \"commentary\" {}", self.literal(CHANNEL), self.literal(rest));
        let more = self.literal(self.format.written.between);
        let more = if self.is_parallel { format!("({more} call)*") } else { String::new() };
        line(&mut lark, "calls", &format!("{before} call {more} {}?", self.literal(CALL)));
        let names: Vec<String> = (0..self.tools.len()).map(|index| format!("f{index}")).collect();
        line(&mut lark, "call", &names.join(" | "));
        for (name, tool) in names.iter().zip(&self.tools) {
            self.write_tool(name, tool, tool.strict || all_obey, &mut lark)?;
        }
        Ok(lark)
    }
}

/// Write the rules of all messages but calls, which are the rule `calls` if there are some.
fn write_messages(
    lark: &mut String,
    wanted: Option<&str>,
    ids: &HashMap<String, u32>,
    has_begun: bool,
    has_calls: bool,
) {
    let literal = |text: &str| literal(text, ids);
    let (channel, message, end) = (literal(CHANNEL), literal(MESSAGE), literal(END));
    let has_tokens = end.starts_with("<[");
    let start = match (has_begun, wanted) {
        (true, None) => "text | closed (next turn)?",
        (true, Some(_)) => "closed next turn",
        (false, _) => "turn",
    };
    line(lark, "start", start);
    line(lark, "next", &literal(&format!("{START}assistant")));
    line(lark, "thought", &format!("{channel} \"analysis\" {message}"));
    let remark = format!("{channel} \"commentary\" {message}");
    let format = format!("(\" json\" | \" \" {} \"json\")?", literal(CONSTRAIN));
    let says = format!("{channel} \"final\" {format} {message}");
    let calls = if has_calls { " | (head closed next)* calls" } else { "" };
    if let Some(wanted) = wanted {
        // The content is the answer and nothing else: remarks come only before calls.
        line(lark, "turn", &format!("(thought closed next)* {says} wanted{calls}"));
        if has_calls {
            line(lark, "head", &format!("thought | {remark}"));
        }
        lark.push_str(wanted);
    } else {
        // A text may end without a mark, as the end of the answer is one.
        if has_tokens {
            line(lark, "text", "/(?s:.*)/");
        } else {
            line(lark, "text", "TEXT");
            line(lark, "TEXT", UNMARKED);
        }
        line(lark, "turn", &format!("(head closed next)* head (text | closed){calls}"));
        line(lark, "head", &format!("thought | {remark} | {says}"));
    }
    if has_tokens {
        line(lark, "closed", &format!("/(?s:.*)/ {end}"));
    } else {
        let _ = writeln!(lark, "closed[suffix={end}]: /(?s:.*)/");
    }
}
