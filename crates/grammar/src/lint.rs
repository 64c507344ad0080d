//! Schemas: what the compiler would ignore is refused, with the place where it stands.

use serde_json::{Map, Value};

use crate::{MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES, error::GrammarError};

/// Keywords that the compiler does not enforce.
const NOT_ENFORCED: [&str; 16] = [
    "not",
    "if",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "contains",
    "uniqueItems",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
    // Of drafts before the fourth.
    "disallow",
    "extends",
    "divisibleBy",
    "$data",
];

/// Keywords whose value is a schema, a list of schemas, or (`items` in old drafts) either.
const HOLD_SCHEMAS: [&str; 7] =
    ["additionalProperties", "additionalItems", "items", "prefixItems", "allOf", "anyOf", "oneOf"];

/// Keywords whose value maps names to schemas.
const HOLD_NAMED_SCHEMAS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Keywords whose numbers the compiler keeps as 64-bit floats.
const HOLD_NUMBERS: [&str; 7] =
    ["const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];

/// The largest whole number below which each has its own 64-bit float.
const MAX_EXACT: u64 = (1 << 53) - 1;

/// Check a schema and all schemas in it.
pub(crate) fn check_schema(schema: &Value) -> Result<(), GrammarError> {
    let mut todo = vec![(String::new(), schema)];
    while let Some((pointer, schema)) = todo.pop() {
        if let Value::Object(keywords) = schema {
            check_keywords(&pointer, keywords)?;
            push_subschemas(&pointer, keywords, &mut todo);
        }
    }
    Ok(())
}

/// Check the schemas of tools' arguments, each with its tool's name.
///
/// # Errors
/// Which tool's schema cannot be enforced, and why.
pub fn check_tools<'a>(tools: impl Iterator<Item = (&'a str, &'a Map<String, Value>)>) -> Result<(), String> {
    let mut size = 0;
    for (name, parameters) in tools {
        let refused = |error: GrammarError| {
            format!(
                "the parameters of the tool {name:?} cannot be enforced: {error}; tool_choice auto without strict takes them"
            )
        };
        let schema = Value::Object(parameters.clone());
        size += schema.to_string().len();
        if size > MAX_GRAMMAR_BYTES {
            let (got, limit) = (size, MAX_GRAMMAR_BYTES);
            return Err(refused(GrammarError::TooLarge {
                what: "schemas of all tools",
                got,
                limit,
                unit: "bytes",
            }));
        }
        check_schema(&schema).map_err(refused)?;
    }
    Ok(())
}

/// Close every object that does not say whether it is open.
pub(crate) fn close_objects(schema: &mut Value) {
    let mut todo = vec![schema];
    while let Some(schema) = todo.pop() {
        let Value::Object(keywords) = schema else { continue };
        if keywords.contains_key("properties") && !keywords.contains_key("additionalProperties") {
            keywords.insert("additionalProperties".to_owned(), Value::Bool(false));
        }
        for (keyword, value) in keywords {
            let holds_names = HOLD_NAMED_SCHEMAS.contains(&keyword.as_str());
            if !holds_names && !HOLD_SCHEMAS.contains(&keyword.as_str()) {
                continue;
            }
            if let Value::Array(members) = value {
                todo.extend(members);
            } else if !holds_names {
                todo.push(value);
            } else if let Value::Object(members) = value {
                todo.extend(members.values_mut());
            }
        }
    }
}

fn push_subschemas<'a>(pointer: &str, keywords: &'a Map<String, Value>, todo: &mut Vec<(String, &'a Value)>) {
    for (keyword, value) in keywords {
        match value {
            Value::Array(members) if HOLD_SCHEMAS.contains(&keyword.as_str()) => {
                todo.extend(
                    (0..).zip(members).map(|(i, member)| (format!("{pointer}/{keyword}/{i}"), member)),
                );
            }
            Value::Object(members) if HOLD_NAMED_SCHEMAS.contains(&keyword.as_str()) => {
                for (name, member) in members {
                    todo.push((format!("{pointer}/{keyword}/{}", escape(name)), member));
                }
            }
            value if HOLD_SCHEMAS.contains(&keyword.as_str()) => {
                todo.push((format!("{pointer}/{keyword}"), value));
            }
            _ => {}
        }
    }
}

fn check_keywords(pointer: &str, keywords: &Map<String, Value>) -> Result<(), GrammarError> {
    for keyword in NOT_ENFORCED {
        let Some(value) = keywords.get(keyword) else { continue };
        let asks_nothing = match keyword {
            "uniqueItems" => *value == Value::Bool(false),
            "if" => !keywords.contains_key("then") && !keywords.contains_key("else"),
            _ => *value == Value::Bool(true) && keyword != "not",
        };
        if !asks_nothing {
            return Err(GrammarError::NotEnforced { pointer: format!("{pointer}/{keyword}"), keyword });
        }
    }
    let referred = keywords.get("$ref").and_then(Value::as_str);
    // This walk has not looked where a pointer leads to something other than a place for a schema.
    if referred.is_some_and(|to| to.starts_with("#/") && !leads_to_a_schema(to)) {
        return Err(GrammarError::NotEnforced { pointer: format!("{pointer}/$ref"), keyword: "$ref" });
    }
    if keywords.get("pattern").and_then(Value::as_str).is_some_and(is_long)
        || keywords
            .get("patternProperties")
            .and_then(Value::as_object)
            .is_some_and(|of| of.keys().any(is_long))
    {
        let got = longest_pattern(keywords);
        return Err(GrammarError::TooLarge { what: "pattern", got, limit: MAX_REGEX_BYTES, unit: "bytes" });
    }
    for keyword in HOLD_NUMBERS {
        let Some(value) = keywords.get(keyword) else { continue };
        if let Some(value) = inexact_number(value) {
            return Err(GrammarError::InexactNumber { pointer: format!("{pointer}/{keyword}"), value });
        }
    }
    Ok(())
}

fn is_long(pattern: impl AsRef<str>) -> bool {
    pattern.as_ref().len() > MAX_REGEX_BYTES
}

fn longest_pattern(keywords: &Map<String, Value>) -> usize {
    let pattern = keywords.get("pattern").and_then(Value::as_str).map_or(0, str::len);
    let names = keywords.get("patternProperties").and_then(Value::as_object);
    names.into_iter().flat_map(Map::keys).map(String::len).fold(pattern, usize::max)
}

/// Whether each keyword on the way of a pointer is one that the walk follows.
fn leads_to_a_schema(pointer: &str) -> bool {
    let mut parts = pointer[2..].split('/').peekable();
    while let Some(part) = parts.next() {
        let part = part.replace("%24", "$");
        if HOLD_NAMED_SCHEMAS.contains(&part.as_str()) {
            if parts.next().is_none() {
                return false;
            }
        } else if HOLD_SCHEMAS.contains(&part.as_str()) {
            parts.next_if(|next| next.parse::<usize>().is_ok());
        } else {
            return false;
        }
    }
    true
}

/// A whole number that is not kept exactly, anywhere in a value.
fn inexact_number(value: &Value) -> Option<String> {
    match value {
        Value::Number(number) => {
            let magnitude = number.as_i64().map(i64::unsigned_abs).or_else(|| number.as_u64());
            let whole = magnitude.is_some_and(|magnitude| magnitude > MAX_EXACT);
            let large =
                magnitude.is_none() && number.as_f64().is_some_and(|float| float.abs() > MAX_EXACT as f64);
            (whole || large).then(|| number.to_string())
        }
        Value::Array(members) => members.iter().find_map(inexact_number),
        Value::Object(members) => members.values().find_map(inexact_number),
        _ => None,
    }
}

/// A name as a part of a JSON pointer.
fn escape(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{check_schema, close_objects};

    #[test]
    fn what_is_not_enforced_is_named_with_its_place() {
        let cases = [
            (json!({"not": {}}), "/not is not"),
            (json!({"properties": {"a/b": {"uniqueItems": true}}}), "/properties/a~1b/uniqueItems is not"),
            (json!({"items": [true, {"if": {}, "then": {}}]}), "/items/1/if is not"),
            (json!({"$defs": {"x": {"contains": {}}}}), "/$defs/x/contains is not"),
            (json!({"anyOf": [{"propertyNames": {"maxLength": 1}}]}), "/anyOf/0/propertyNames is not"),
            (
                json!({"additionalProperties": {"dependencies": {}}}),
                "/additionalProperties/dependencies is not",
            ),
            (json!({"$ref": "#/x/y", "x": {"y": {"not": {}}}}), "/$ref is not"),
            (json!({"enum": [[9_007_199_254_740_993_i64]]}), "/enum is 9007199254740993"),
            (json!({"maximum": 1e300}), "/maximum is 1e+300"),
            (json!({"pattern": "a".repeat(70_000)}), "pattern has 70000 bytes"),
        ];
        for (schema, expected) in cases {
            let error = check_schema(&schema).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn what_asks_for_nothing_and_what_is_no_schema_passes() {
        for schema in [
            json!(true),
            json!({"uniqueItems": false, "if": {}, "unevaluatedProperties": true}),
            json!({"properties": {"not": {"type": "string"}, "if": true}}),
            json!({"enum": [{"not": 1}], "const": {"contains": 2}}),
            json!({"$ref": "#/$defs/a/items/0", "$defs": {"a": {"items": [{}]}}}),
            json!({"required": ["not"], "title": "not"}),
        ] {
            check_schema(&schema).expect("nothing to refuse");
        }
    }

    #[test]
    fn objects_are_closed_where_they_do_not_say() {
        let mut schema = json!({"properties": {"a": {"properties": {}}, "b": {"properties": {}, "additionalProperties": true}}});
        close_objects(&mut schema);
        let closed = json!({
            "properties": {
                "a": {"properties": {}, "additionalProperties": false},
                "b": {"properties": {}, "additionalProperties": true},
            },
            "additionalProperties": false,
        });
        assert_eq!(schema, closed);
    }
}
