//! Arguments as elements, each with its name (XML), and texts that an end mark closes.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::lark::{escaped, json_rule, line, quoted};
use super::schema::Parameter;
use super::{CallGrammar, GrammarRefusal};
use crate::turn::format::Elements;
use crate::turn::tool::{Tool, is_text};

impl CallGrammar<'_> {
    /// Write a call whose arguments obey the tool's schema.
    pub(super) fn write_elements(
        &self,
        rule: &str,
        elements: &'static Elements,
        tool: &Tool,
        lark: &mut String,
    ) -> Result<(), GrammarRefusal> {
        let Elements { key, value: [_, close], has_breaks, end, .. } = *elements;
        let mut parts = vec![call_opening(elements, tool)];
        for (index, parameter) in self.parameters(tool)?.into_iter().enumerate() {
            let Parameter { name, schema, is_required } = parameter;
            if name.is_empty() || name.trim() != name || name.contains(['<', '>', '"', '\n']) {
                return Err(self.refusal(tool, format!("{name:?} cannot be the name of an element")));
            }
            let value = format!("{rule}_{index}");
            let opening = quoted(&format!("{}{name}{}", key[0], value_opening(elements, is_text(&schema))));
            let element = format!("({opening} {value} \"\\n\")");
            parts.push(element + if is_required { "" } else { "?" });
            if is_text(&schema) {
                self.write_text_value(&value, close, has_breaks, tool, &schema, lark)?;
            } else {
                let closing = if has_breaks { format!("\n{close}") } else { close.to_owned() };
                line(lark, &value, &format!("{value}_json {}", quoted(&closing)));
                line(lark, &format!("{value}_json"), &json_rule(self.subschema(tool, &schema)?));
            }
        }
        parts.push(self.literal(end));
        line(lark, rule, &parts.join(" "));
        Ok(())
    }

    /// Write a call with arguments of any names, all of them texts.
    pub(super) fn write_any_elements(
        &self,
        rule: &str,
        elements: &'static Elements,
        tool: &Tool,
        lark: &mut String,
    ) -> Result<(), GrammarRefusal> {
        let Elements { key, value: [_, close], has_breaks, end, .. } = *elements;
        let head = call_opening(elements, tool);
        let opening = quoted(&value_opening(elements, true));
        let key = format!("{} /[^<>\"\\n]{{1,64}}/ {opening}", quoted(key[0]));
        let end = self.literal(end);
        line(lark, rule, &format!("{head} ({key} {rule}_value \"\\n\")* {end}"));
        self.write_text_value(&format!("{rule}_value"), close, has_breaks, tool, &json!({}), lark)
    }

    /// Write a text value and what ends it.
    pub(super) fn write_text_value(
        &self,
        rule: &str,
        close: &str,
        has_breaks: bool,
        tool: &Tool,
        schema: &Value,
        lark: &mut String,
    ) -> Result<(), GrammarRefusal> {
        let space = if has_breaks { "\n" } else { "" };
        let fixed = schema.get("const").into_iter();
        let listed = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
        let texts: Vec<&str> = fixed.chain(listed).filter_map(Value::as_str).collect();
        if texts.iter().any(|text| text.contains(close)) {
            return Err(self.refusal(tool, format!("a text that holds {close}")));
        }
        if !texts.is_empty() {
            let texts: Vec<String> =
                texts.into_iter().map(|text| self.literal(&format!("{text}{space}{close}"))).collect();
            line(lark, rule, &texts.join(" | "));
            return Ok(());
        }
        if let Some(keyword) =
            ["pattern", "format", "contentEncoding"].iter().find(|it| schema.get(**it).is_some())
        {
            return Err(self.refusal(tool, format!("{keyword} of a text that is written without quotes")));
        }
        let limit = |keyword: &str| schema.get(keyword).and_then(Value::as_u64);
        let least = limit("minLength").unwrap_or(0);
        let most = limit("maxLength").map_or(String::new(), |most| most.to_string());
        let terminal = rule.to_uppercase();
        let _ = writeln!(lark, "{rule}[suffix={}]: {terminal}", quoted(close));
        if self.ids.contains_key(close) {
            // The end is a token, which text cannot contain.
            line(lark, rule, &format!("{terminal} {}", self.literal(close)));
            line(lark, &terminal, &format!("/(?s:.{{{least},{most}}})/"));
            return Ok(());
        }
        let space = if has_breaks { "\\n" } else { "" };
        let text = format!("/(?s:.{{{least},{most}}}){space}/ & ~/(?s:.*){}(?s:.*)/", escaped(close));
        line(lark, &terminal, &text);
        Ok(())
    }
}

/// A call's first line, which names its tool.
fn call_opening(elements: &Elements, tool: &Tool) -> String {
    let [before, behind] = elements.name;
    quoted(&format!("{before}{}{behind}\n", tool.name))
}

/// The text between an argument's name and its value.
fn value_opening(elements: &Elements, is_text: bool) -> String {
    let flag = elements.text_flag.map_or(String::new(), |flag| format!("{flag}{is_text}"));
    let behind_name = elements.key[1];
    match (elements.value[0], elements.has_breaks) {
        ("", true) => format!("{flag}{behind_name}\n"),
        ("", false) => format!("{flag}{behind_name}"),
        (open, _) => format!("{flag}{behind_name}\n{open}"),
    }
}
