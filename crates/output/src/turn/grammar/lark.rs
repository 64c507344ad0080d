//! Rules, literals and JSON in the notation of grammars (Lark).

use std::collections::HashMap;
use std::fmt::Write as _;

use serde_json::{Map, Value, json};

/// JSON as models write it in calls: at most one space after a comma or a colon.
const JSON_STYLE: [(&str, &str); 2] = [("item_separator", ", ?"), ("key_separator", ": ?")];

/// Write a rule.
pub(in crate::turn) fn line(lark: &mut String, rule: &str, body: &str) {
    let _ = writeln!(lark, "{rule}: {body}");
}

/// A text as a Lark literal.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A text escaped for a regular expression of Lark.
pub(super) fn escaped(text: &str) -> String {
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
pub(in crate::turn) fn json_rule(mut schema: Map<String, Value>) -> String {
    let style = JSON_STYLE.iter().map(|(name, separator)| ((*name).to_owned(), json!(separator)));
    let mut options: Map<String, Value> = style.collect();
    options.insert("whitespace_flexible".to_owned(), json!(false));
    schema.insert("x-guidance".to_owned(), Value::Object(options));
    format!("%json {}", Value::Object(schema))
}

/// A text in which markers that are tokens are written as tokens.
pub(in crate::turn) fn literal(text: &str, ids: &HashMap<String, u32>) -> String {
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
