//! Formats as grammars (Lark) that calls obey; the parser can read everything that they accept.
//!
//! | file | noun |
//! |---|---|
//! | `elements.rs` | arguments as elements (XML), and texts up to an end mark |
//! | `literals.rs` | named arguments, as in Python or in braces |
//! | `schema.rs` | the schema of a tool's arguments, whole and one by one |
//! | `lark.rs` | the notation of grammars |

mod elements;
pub(super) mod lark;
mod literals;
mod schema;

use std::collections::HashMap;
use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use self::lark::{escaped, json_rule, line, literal, quoted};
use super::format::{CallSyntax, TurnFormat};
use super::reasoning::ReasoningFormat;
use super::tool::Tool;

/// Why a format cannot make a tool's arguments obey their schema.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the tool {tool:?} cannot be enforced with the format {format}: {what}")]
pub struct GrammarRefusal {
    tool: String,
    format: &'static str,
    what: String,
}

/// What may precede the calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Thinking {
    /// Nothing.
    #[default]
    None,
    /// Reasoning, beginning with its marker.
    MayBegin(&'static ReasoningFormat),
    /// The rest of reasoning that the prompt began.
    HasBegun(&'static ReasoningFormat),
}

/// What a turn with calls may look like.
#[derive(Debug, Clone)]
pub struct CallGrammar<'a> {
    /// How calls are written.
    pub format: &'static TurnFormat,
    /// The tools that may be called.
    pub tools: Vec<&'a Tool>,
    /// Whether there may be more than one call.
    pub is_parallel: bool,
    /// What may precede them.
    pub thinking: Thinking,
    /// Markers that are one token each, and therefore not text.
    pub ids: &'a HashMap<String, u32>,
}

impl CallGrammar<'_> {
    /// A grammar for one or more calls.
    ///
    /// # Errors
    /// The format cannot express the schema of a tool.
    pub fn of_calls(&self) -> Result<String, GrammarRefusal> {
        self.write("calls", self.format.written.before, |_| true)
    }

    /// A grammar for calls, or for JSON of a schema instead.
    ///
    /// # Errors
    /// See [`Self::of_calls`].
    pub fn of_calls_or_json(&self, schema: &Map<String, Value>) -> Result<String, GrammarRefusal> {
        if self.format.is_of_messages() {
            return self.of_messages(Some(&format!("wanted: {}\n", json_rule(schema.clone()))), false);
        }
        let mut lark = self.write("(calls | answer)", self.format.written.before, |tool| tool.strict)?;
        line(&mut lark, "answer", &json_rule(schema.clone()));
        Ok(lark)
    }

    /// A grammar for text and calls, in which the calls of strict tools obey their schemas; with `all_obey`, those of
    /// other tools do too. `None` if the format has no marker that tells calls from text.
    ///
    /// # Errors
    /// See [`Self::of_calls`].
    pub fn of_text_and_calls(&self, all_obey: bool) -> Result<Option<String>, GrammarRefusal> {
        if self.format.is_of_messages() {
            return self.of_messages(None, all_obey).map(Some);
        }
        let Some(open) = self.format.open.first().filter(|_| self.format.bare.is_none()) else {
            return Ok(None);
        };
        let body = if self.is_parallel { "(text calls)* tail" } else { "(text calls)? tail" };
        // The marker ends the text before the calls, so they begin after it.
        let before = self.format.written.before.strip_prefix(open).unwrap_or_default();
        let mut lark = self.write(body, before, |tool| tool.strict || all_obey)?;
        let marker = self.literal(open);
        if marker.starts_with("<[") {
            line(&mut lark, "text", &format!("/(?s:.*)/ {marker}"));
            line(&mut lark, "tail", "/(?s:.*)/");
        } else {
            let _ = writeln!(lark, "text[suffix={marker}]: /(?s:.*)/");
            line(&mut lark, "tail", "TAIL");
            line(&mut lark, "TAIL", &format!("~/(?s:.*){}(?s:.*)/", escaped(open)));
        }
        Ok(Some(lark))
    }

    fn write(
        &self,
        body: &str,
        before: &str,
        obeys: impl Fn(&Tool) -> bool,
    ) -> Result<String, GrammarRefusal> {
        let mut lark = String::new();
        self.write_thinking(body, &mut lark);
        let written = &self.format.written;
        let more = if self.is_parallel {
            format!("({} call)*", self.literal(written.between))
        } else {
            String::new()
        };
        let parts = [self.literal(before), "call".to_owned(), more, self.literal(written.behind)];
        let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        line(&mut lark, "calls", &parts.join(" "));
        let names: Vec<String> = (0..self.tools.len()).map(|index| format!("f{index}")).collect();
        line(&mut lark, "call", &names.join(" | "));
        for (name, tool) in names.iter().zip(&self.tools) {
            self.write_tool(name, tool, obeys(tool), &mut lark)?;
        }
        Ok(lark)
    }

    fn write_thinking(&self, body: &str, lark: &mut String) {
        let (begin, format) = match self.thinking {
            Thinking::None => return line(lark, "start", body),
            Thinking::MayBegin(format) => (format!("({} think)?", self.literal(format.open)), format),
            Thinking::HasBegun(format) => ("think".to_owned(), format),
        };
        line(lark, "start", &format!("{begin} {body}"));
        let close = self.literal(format.close);
        if close.starts_with("<[") {
            line(lark, "think", &format!(r"/(?s:.*)/ {close} /\n{{0,2}}/"));
        } else {
            line(lark, "think", r"thought /\n{0,2}/");
            let _ = writeln!(lark, "thought[suffix={close}]: /(?s:.*)/");
        }
    }

    pub(super) fn write_tool(
        &self,
        rule: &str,
        tool: &Tool,
        obeys: bool,
        lark: &mut String,
    ) -> Result<(), GrammarRefusal> {
        let any_object = || Map::from_iter([("type".to_owned(), json!("object"))]);
        let arguments = || if obeys { self.arguments(tool) } else { Ok(any_object()) };
        let name = &tool.name;
        match self.format.syntax {
            CallSyntax::Object { arguments: key } => {
                Self::write_object(rule, tool, key, arguments()?, lark);
            }
            CallSyntax::Named { writes_objects: true, .. } => {
                Self::write_object(rule, tool, "arguments", arguments()?, lark);
            }
            CallSyntax::Named { separator, .. } => {
                line(lark, rule, &format!("{} {} {rule}_args", quoted(name), self.literal(separator)));
                line(lark, &format!("{rule}_args"), &json_rule(arguments()?));
            }
            CallSyntax::Numbered { separator } => {
                let head = quoted(&format!("{name}:"));
                line(lark, rule, &format!("{head} /[0-9]{{1,4}}/ {} {rule}_args", self.literal(separator)));
                line(lark, &format!("{rule}_args"), &json_rule(arguments()?));
            }
            CallSyntax::Xml(elements) if obeys => self.write_elements(rule, elements, tool, lark)?,
            CallSyntax::Xml(elements) => self.write_any_elements(rule, elements, tool, lark)?,
            CallSyntax::Python { .. } => self.write_python(rule, tool, lark)?,
            CallSyntax::Braces { quote } if obeys => self.write_braces(rule, quote, tool, lark)?,
            CallSyntax::Braces { quote } => self.write_any_braces(rule, quote, tool, lark)?,
            CallSyntax::Channel { words, separator } => {
                let head = format!("{} {}", quoted(name), self.literal(&format!("{words}{separator}")));
                line(lark, rule, &format!("{head} {rule}_args"));
                line(lark, &format!("{rule}_args"), &json_rule(arguments()?));
            }
        }
        Ok(())
    }

    fn write_object(rule: &str, tool: &Tool, key: &str, schema: Map<String, Value>, lark: &mut String) {
        let head = quoted(&format!(r#"{{"name": "{}", "{key}": "#, tool.name));
        line(lark, rule, &format!("{head} {rule}_args \"}}\""));
        line(lark, &format!("{rule}_args"), &json_rule(schema));
    }

    fn refusal(&self, tool: &Tool, what: String) -> GrammarRefusal {
        GrammarRefusal { tool: tool.name.clone(), format: self.format.name, what }
    }

    /// A text of the format, in which markers that are tokens are written as tokens.
    pub(super) fn literal(&self, text: &str) -> String {
        literal(text, self.ids)
    }
}
