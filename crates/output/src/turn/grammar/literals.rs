//! Named arguments whose values are literals: keyword arguments as in Python, and those in braces.

use serde_json::{Value, json};

use super::lark::{json_rule, line, quoted};
use super::schema::Parameter;
use super::{CallGrammar, GrammarRefusal};
use crate::turn::tool::{Tool, is_text};

/// Most nested lists around a value in braces.
const MAX_BRACED_DEPTH: u32 = 8;

/// How named arguments are written.
struct Literals {
    before: &'static str,
    open: &'static str,
    equals: &'static str,
    comma: &'static str,
    close: &'static str,
    /// Quotes around strings; `None`: as in JSON.
    quote: Option<&'static str>,
}

const PYTHON: Literals =
    Literals { before: "", open: "(", equals: "=", comma: ", ", close: ")", quote: None };

fn braces(quote: &'static str) -> Literals {
    Literals { before: "call:", open: "{", equals: ":", comma: ",", close: "}", quote: Some(quote) }
}

impl CallGrammar<'_> {
    /// Write a call with keyword arguments, as in Python.
    pub(super) fn write_python(
        &self,
        rule: &str,
        tool: &Tool,
        lark: &mut String,
    ) -> Result<(), GrammarRefusal> {
        self.write_literals(rule, tool, &PYTHON, lark)
    }

    /// Write a call with arguments in braces, whose strings stand between `quote`s.
    pub(super) fn write_braces(
        &self,
        rule: &str,
        quote: &'static str,
        tool: &Tool,
        lark: &mut String,
    ) -> Result<(), GrammarRefusal> {
        self.write_literals(rule, tool, &braces(quote), lark)
    }

    /// Write a call with anything between matching braces.
    pub(super) fn write_any_braces(
        &self,
        rule: &str,
        quote: &str,
        tool: &Tool,
        lark: &mut String,
    ) -> Result<(), GrammarRefusal> {
        let head = quoted(&format!("call:{}{{", tool.name));
        line(lark, rule, &format!("{head} {rule}_part* \"}}\""));
        let parts = format!("/[^{{}}<]/ | {} {rule}_text | \"{{\" {rule}_part* \"}}\"", self.literal(quote));
        line(lark, &format!("{rule}_part"), &parts);
        self.write_text_value(&format!("{rule}_text"), quote, false, tool, &json!({}), lark)
    }

    /// Write arguments one after another, each with its name.
    fn write_literals(
        &self,
        rule: &str,
        tool: &Tool,
        style: &Literals,
        lark: &mut String,
    ) -> Result<(), GrammarRefusal> {
        let mut parameters = self.parameters(tool)?;
        parameters.sort_by_key(|parameter| !parameter.is_required);
        let num_required = parameters.iter().filter(|parameter| parameter.is_required).count();
        for (index, Parameter { name, schema, .. }) in parameters.iter().enumerate() {
            let is_name = |char: char| char.is_ascii_alphanumeric() || char == '_';
            if !name.chars().all(is_name)
                || name.is_empty()
                || name.starts_with(|char: char| char.is_ascii_digit())
            {
                return Err(self.refusal(tool, format!("{name:?} cannot be the name of an argument")));
            }
            let value = format!("{rule}_{index}");
            line(lark, &value, &format!("{} {value}_value", quoted(&format!("{name}{}", style.equals))));
            if let Some(quote) = style.quote {
                self.write_braced(&format!("{value}_value"), quote, tool, schema, 0, lark)?;
            }
            let literal = match schema.get("type").and_then(Value::as_str) {
                Some("boolean")
                    if schema
                        .as_object()
                        .is_some_and(|it| !it.contains_key("enum") && !it.contains_key("const")) =>
                {
                    r#""True" | "False""#.to_owned()
                }
                Some("null") => r#""None""#.to_owned(),
                _ => json_rule(self.subschema(tool, schema)?),
            };
            if style.quote.is_none() {
                line(lark, &format!("{value}_value"), &literal);
            }
            // What may follow after at least one argument.
            let rest = format!("{rule}_{}_rest", index + 1);
            let more = format!(
                "({} {value}){} {rest}",
                quoted(style.comma),
                if index < num_required { "" } else { "?" }
            );
            line(lark, &format!("{value}_rest"), &more);
        }
        line(lark, &format!("{rule}_{}_rest", parameters.len()), "\"\"");
        let firsts = if num_required > 0 { 0..1 } else { 0..parameters.len() };
        let mut bodies: Vec<String> =
            firsts.map(|index| format!("{rule}_{index} {rule}_{}_rest", index + 1)).collect();
        if num_required == 0 {
            bodies.push("\"\"".to_owned());
        }
        let Literals { before, open, close, .. } = *style;
        let head = quoted(&format!("{before}{}{open}", tool.name));
        line(lark, rule, &format!("{head} ({}) {}", bodies.join(" | "), quoted(close)));
        Ok(())
    }

    /// Write a value in the braces notation: strings between marks, everything else as JSON, and lists of these.
    fn write_braced(
        &self,
        rule: &str,
        quote: &str,
        tool: &Tool,
        schema: &Value,
        depth: u32,
        lark: &mut String,
    ) -> Result<(), GrammarRefusal> {
        if is_text(schema) {
            line(lark, rule, &format!("{} {rule}_text", self.literal(quote)));
            return self.write_text_value(&format!("{rule}_text"), quote, false, tool, schema, lark);
        }
        if let Some(to) = schema.get("$ref").and_then(Value::as_str) {
            let found = to.strip_prefix('#').and_then(|pointer| tool.whole(pointer));
            let Some(found) = found.filter(|_| depth < MAX_BRACED_DEPTH) else {
                return Err(
                    self.refusal(tool, format!("the reference {to}, which leads nowhere or on and on"))
                );
            };
            return self.write_braced(rule, quote, tool, found, depth + 1, lark);
        }
        let is_scalar = |value: &Value| value.is_number() || value.is_boolean() || value.is_null();
        let listed = schema.get("enum").and_then(Value::as_array);
        if schema.get("const").is_some_and(is_scalar)
            || listed.is_some_and(|values| values.iter().all(is_scalar))
        {
            line(lark, rule, &json_rule(self.subschema(tool, schema)?));
            return Ok(());
        }
        match schema.get("type").and_then(Value::as_str) {
            Some("integer" | "number" | "boolean" | "null") => {
                line(lark, rule, &json_rule(self.subschema(tool, schema)?));
                Ok(())
            }
            Some("array")
                if depth < MAX_BRACED_DEPTH && schema.get("items").is_some_and(Value::is_object) =>
            {
                if let Some(keyword) =
                    ["prefixItems", "contains", "uniqueItems", "enum", "const", "anyOf", "oneOf", "allOf"]
                        .iter()
                        .find(|keyword| schema.get(**keyword).is_some())
                {
                    return Err(self.refusal(tool, format!("{keyword} of a list")));
                }
                let limit = |keyword: &str| schema.get(keyword).and_then(Value::as_u64);
                let (least, most) = (limit("minItems").unwrap_or(0), limit("maxItems"));
                if most.is_some_and(|most| most < least) {
                    return Err(self.refusal(tool, "a list whose maxItems is below its minItems".to_owned()));
                }
                let item = format!("{rule}_item");
                let rest = least.saturating_sub(1);
                let most_rest = most.map_or(String::new(), |most| most.saturating_sub(1).to_string());
                let items = format!("({item} (\",\" {item}){{{rest},{most_rest}}})");
                let is_optional = if least == 0 { "?" } else { "" };
                let body = if most == Some(0) { String::new() } else { format!("{items}{is_optional}") };
                line(lark, rule, &format!("\"[\" {body} \"]\""));
                self.write_braced(&item, quote, tool, &schema["items"], depth + 1, lark)
            }
            _ => Err(self.refusal(
                tool,
                "a value that is not a text, a number, a boolean, null or a list of these".to_owned(),
            )),
        }
    }
}
