//! A tool that a model may call.

use serde_json::{Map, Value};

/// A function with the schema of its arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// How it is called.
    pub name: String,
    /// The keywords of the schema of its arguments, which is that of an object.
    pub parameters: Map<String, Value>,
    /// Its arguments obey the schema whenever it is called.
    pub strict: bool,
}

impl Tool {
    /// Parameters from the JSON text of a schema.
    ///
    /// # Errors
    /// It is not the JSON of an object.
    pub fn read_parameters(text: &str) -> Result<Map<String, Value>, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    /// The part of the schema of all arguments that a JSON pointer leads to.
    pub(super) fn whole(&self, pointer: &str) -> Option<&Value> {
        let (first, rest) = pointer.strip_prefix('/')?.split_once('/')?;
        self.parameters.get(first)?.pointer(&format!("/{rest}"))
    }

    /// The schema of an argument; none if the tool does not describe it.
    pub(super) fn parameter(&self, name: &str) -> Option<&Value> {
        self.parameters.get("properties")?.get(name)
    }
}

/// Whether a schema is for texts alone, which formats that mark their texts do not write as JSON.
pub(super) fn is_text(schema: &Value) -> bool {
    schema.get("type").and_then(Value::as_str) == Some("string")
        || schema.get("type").is_none()
            && (schema.get("const").is_some_and(Value::is_string)
                || schema
                    .get("enum")
                    .and_then(Value::as_array)
                    .is_some_and(|of| !of.is_empty() && of.iter().all(Value::is_string)))
}

/// Whether a value is of the types that a schema names; true where it names none.
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

/// An argument that was written as bare text, as JSON: the value that it spells if the schema takes one like it, else the
/// text.
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
    // As written, where it can be: a number keeps its digits.
    if value.is_some() { spelled.to_owned() } else { Value::from(text).to_string() }
}
