//! A tool that a model may call.

use serde_json::{Map, Value};

/// A function with the schema of its arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The keywords of the schema of its arguments, which describes an object.
    pub parameters: Map<String, Value>,
    /// Whether its arguments must obey the schema in every call.
    pub strict: bool,
}

impl Tool {
    /// Parse a schema for `parameters`.
    ///
    /// # Errors
    /// The text is not a JSON object.
    pub fn read_parameters(text: &str) -> Result<Map<String, Value>, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    /// The part of the schema of all arguments at a JSON pointer.
    pub(super) fn whole(&self, pointer: &str) -> Option<&Value> {
        let (first, rest) = pointer.strip_prefix('/')?.split_once('/')?;
        self.parameters.get(first)?.pointer(&format!("/{rest}"))
    }

    /// The schema of an argument; `None` if the tool does not describe it.
    pub(super) fn parameter(&self, name: &str) -> Option<&Value> {
        self.parameters.get("properties")?.get(name)
    }
}

/// Whether a schema allows only strings; formats that mark strings do not write them as JSON.
pub(super) fn is_text(schema: &Value) -> bool {
    schema.get("type").and_then(Value::as_str) == Some("string")
        || schema.get("type").is_none()
            && (schema.get("const").is_some_and(Value::is_string)
                || schema
                    .get("enum")
                    .and_then(Value::as_array)
                    .is_some_and(|of| !of.is_empty() && of.iter().all(Value::is_string)))
}

/// Whether a value has one of the types that a schema names; true if it names none.
fn has_type(schema: &Value, value: &Value) -> bool {
    let is = |name: &Value| match name.as_str() {
        Some("string") => value.is_string(),
        Some("integer") => {
            value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|it| it.fract() == 0.0)
        }
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        Some("null") => value.is_null(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        _ => true,
    };
    match schema.get("type") {
        Some(Value::Array(names)) => names.iter().any(is),
        Some(name) => is(name),
        None => true,
    }
}

/// Turn an argument written as bare text into JSON: the value that it spells if the schema accepts such a value, else
/// the text as a string.
pub(super) fn typed(schema: Option<&Value>, text: &str) -> String {
    let spelled = match text.trim() {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    let value = schema.and_then(|schema| {
        let value: Value = serde_json::from_str(spelled).ok()?;
        (!is_text(schema) && has_type(schema, &value)).then_some(value)
    });
    // Unchanged if possible, so that a number keeps its digits.
    if value.is_some() { spelled.to_owned() } else { Value::from(text).to_string() }
}
