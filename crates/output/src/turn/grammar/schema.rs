//! The schema of a tool's arguments: as a whole, one by one, and with the definitions that a part refers to.

use serde_json::{Map, Value, json};

use super::{CallGrammar, GrammarRefusal};
use crate::turn::tool::Tool;

/// An argument of a tool.
pub(super) struct Parameter {
    pub(super) name: String,
    pub(super) schema: Value,
    pub(super) is_required: bool,
}

impl CallGrammar<'_> {
    /// The schema of a tool's arguments, which are an object.
    pub(super) fn arguments(&self, tool: &Tool) -> Result<Map<String, Value>, GrammarRefusal> {
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
    pub(super) fn parameters(&self, tool: &Tool) -> Result<Vec<Parameter>, GrammarRefusal> {
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
    pub(super) fn subschema(
        &self,
        tool: &Tool,
        schema: &Value,
    ) -> Result<Map<String, Value>, GrammarRefusal> {
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
