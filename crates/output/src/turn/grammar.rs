//! Formats as grammars (Lark) that calls obey; the parser can read everything that they accept.

use std::collections::HashMap;
use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use super::format::{CallSyntax, Elements, TurnFormat};
use super::reasoning::ReasoningFormat;
use super::tool::{Tool, is_text};

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

/// JSON as models write it in calls: at most one space after a comma or a colon.
const JSON_STYLE: [(&str, &str); 2] = [("item_separator", ", ?"), ("key_separator", ": ?")];

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
            CallSyntax::Xml(elements) if !obeys => {
                let Elements { name: [before, behind], key, end, .. } = *elements;
                let head = quoted(&format!("{before}{name}{behind}\n"));
                let flag = elements.text_flag.map_or(String::new(), |flag| format!("{flag}true"));
                let opening = quoted(&format!("{flag}{}", value_opening(elements)));
                let key = format!("{} /[^<>\"\\n]{{1,64}}/ {opening}", quoted(key[0]));
                let end = self.literal(end);
                line(lark, rule, &format!("{head} ({key} {rule}_value \"\\n\")* {end}"));
                let (close, has_breaks) = (elements.value[1], elements.has_breaks);
                self.write_text_value(&format!("{rule}_value"), close, has_breaks, tool, &json!({}), lark)?;
            }
            CallSyntax::Xml(elements) => self.write_elements(rule, elements, tool, lark)?,
            CallSyntax::Python { .. } => self.write_literals(rule, tool, &PYTHON, lark)?,
            CallSyntax::Braces { quote } if obeys => self.write_literals(rule, tool, &braces(quote), lark)?,
            CallSyntax::Braces { quote } => {
                let head = quoted(&format!("call:{name}{{"));
                line(lark, rule, &format!("{head} {rule}_part* \"}}\""));
                let parts =
                    format!("/[^{{}}<]/ | {} {rule}_text | \"{{\" {rule}_part* \"}}\"", self.literal(quote));
                line(lark, &format!("{rule}_part"), &parts);
                self.write_text_value(&format!("{rule}_text"), quote, false, tool, &json!({}), lark)?;
            }
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

    fn write_elements(
        &self,
        rule: &str,
        elements: &'static Elements,
        tool: &Tool,
        lark: &mut String,
    ) -> Result<(), GrammarRefusal> {
        let Elements { name: [before, behind], key, value: [_, close], has_breaks, end, text_flag } =
            *elements;
        let mut parts = vec![quoted(&format!("{before}{}{behind}\n", tool.name))];
        for (index, parameter) in self.parameters(tool)?.into_iter().enumerate() {
            let Parameter { name, schema, is_required } = parameter;
            if name.is_empty() || name.trim() != name || name.contains(['<', '>', '"', '\n']) {
                return Err(self.refusal(tool, format!("{name:?} cannot be the name of an element")));
            }
            let value = format!("{rule}_{index}");
            let flag = text_flag.map_or(String::new(), |flag| format!("{flag}{}", is_text(&schema)));
            let opening = quoted(&format!("{}{name}{flag}{}", key[0], value_opening(elements)));
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

    /// Write a text value and what ends it.
    fn write_text_value(
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

    /// The schema of a tool's arguments, which are an object.
    fn arguments(&self, tool: &Tool) -> Result<Map<String, Value>, GrammarRefusal> {
        let mut schema = tool.parameters.clone();
        match schema.get("type") {
            None => {
                schema.insert("type".to_owned(), json!("object"));
            }
            Some(kind) if *kind == json!("object") => {}
            Some(kind) => {
                return Err(self.refusal(tool, format!("parameters of the type {kind}, not object")));
            }
        }
        Ok(schema)
    }

    /// The arguments one by one, in the order of the schema.
    fn parameters(&self, tool: &Tool) -> Result<Vec<Parameter>, GrammarRefusal> {
        const AS_A_WHOLE: [&str; 8] = [
            "anyOf",
            "oneOf",
            "allOf",
            "$ref",
            "patternProperties",
            "minProperties",
            "maxProperties",
            "enum",
        ];
        let schema = self.arguments(tool)?;
        if let Some(keyword) = AS_A_WHOLE.iter().find(|keyword| schema.contains_key(**keyword)) {
            return Err(
                self.refusal(tool, format!("{keyword} of all parameters, which are written one by one"))
            );
        }
        let mut required: Vec<&str> = schema
            .get("required")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let mut parameters = Vec::new();
        for (name, schema) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
            let is_required = required.contains(&name.as_str());
            required.retain(|required| required != name);
            let schema = if *schema == Value::Bool(true) { json!({}) } else { schema.clone() };
            if schema.is_object() {
                parameters.push(Parameter { name: name.clone(), schema, is_required });
            } else if is_required {
                return Err(
                    self.refusal(tool, format!("the parameter {name:?} has no schema, but is required"))
                );
            }
        }
        for name in required {
            parameters.push(Parameter {
                name: name.to_owned(),
                schema: json!({"type": "string"}),
                is_required: true,
            });
        }
        Ok(parameters)
    }

    /// A part of a tool's schema, together with the definitions that it refers to.
    fn subschema(&self, tool: &Tool, schema: &Value) -> Result<Map<String, Value>, GrammarRefusal> {
        let mut schema = schema.as_object().cloned().unwrap_or_default();
        for key in ["$defs", "definitions"] {
            if let Some(definitions) = tool.parameters.get(key) {
                schema.entry(key).or_insert_with(|| definitions.clone());
            }
        }
        if let Some(pointer) = stray_reference(&Value::Object(schema.clone())) {
            return Err(self.refusal(tool, format!("the reference {pointer}, which leads out of $defs")));
        }
        Ok(schema)
    }

    fn refusal(&self, tool: &Tool, what: String) -> GrammarRefusal {
        GrammarRefusal { tool: tool.name.clone(), format: self.format.name, what }
    }

    /// A text of the format, in which markers that are tokens are written as tokens.
    pub(super) fn literal(&self, text: &str) -> String {
        literal(text, self.ids)
    }
}

/// A text in which markers that are tokens are written as tokens.
pub(super) fn literal(text: &str, ids: &HashMap<String, u32>) -> String {
    let mut parts = Vec::new();
    let mut rest = text;
    loop {
        let found =
            ids.iter().filter_map(|(marker, id)| Some((rest.find(marker.as_str())?, marker.len(), id)));
        let Some((at, len, id)) = found.min() else { break };
        if at > 0 {
            parts.push(quoted(&rest[..at]));
        }
        parts.push(format!("<[{id}]>"));
        rest = &rest[at + len..];
    }
    if !rest.is_empty() {
        parts.push(quoted(rest));
    }
    parts.join(" ")
}

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

/// Most nested lists around a value in braces.
const MAX_BRACED_DEPTH: u32 = 8;

struct Parameter {
    name: String,
    schema: Value,
    is_required: bool,
}

/// A reference to something other than a definition.
fn stray_reference(schema: &Value) -> Option<&str> {
    match schema {
        Value::Object(members) => members.iter().find_map(|(key, value)| match value {
            Value::String(to) if key == "$ref" => {
                (!to.starts_with("#/$defs/") && !to.starts_with("#/definitions/")).then_some(to.as_str())
            }
            value => stray_reference(value),
        }),
        Value::Array(members) => members.iter().find_map(stray_reference),
        _ => None,
    }
}

/// The text between an argument's name and its value.
fn value_opening(elements: &Elements) -> String {
    match (elements.value[0], elements.has_breaks) {
        ("", true) => format!("{}\n", elements.key[1]),
        ("", false) => elements.key[1].to_owned(),
        (open, _) => format!("{}\n{open}", elements.key[1]),
    }
}

pub(super) fn line(lark: &mut String, rule: &str, body: &str) {
    let _ = writeln!(lark, "{rule}: {body}");
}

/// A text as a Lark literal.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A text escaped for a regular expression of Lark.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for char in text.chars() {
        if r"\^$.|?*+()[]{}/".contains(char) {
            out.push('\\');
        }
        out.push(char);
    }
    out
}

/// JSON of a schema, in which our options replace those given.
pub(super) fn json_rule(mut schema: Map<String, Value>) -> String {
    let style = JSON_STYLE.iter().map(|(name, separator)| ((*name).to_owned(), json!(separator)));
    let mut options: Map<String, Value> = style.collect();
    options.insert("whitespace_flexible".to_owned(), json!(false));
    schema.insert("x-guidance".to_owned(), Value::Object(options));
    format!("%json {}", Value::Object(schema))
}
