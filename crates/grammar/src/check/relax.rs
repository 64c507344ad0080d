//! Schemas taken leniently: what cannot be enforced is given up, and its places are listed.

use scheduler::{GrammarKind, GrammarSpec};
use serde_json::Value;

use crate::{
    check::check,
    error::GrammarError,
    lint::{Leniency, Places},
};

/// Most pointers that are listed.
const MAX_PLACES: usize = 64;

/// Kinds of things to give up.
const MAX_PASSES: usize = 3;

/// A grammar that can be enforced, and what was given up for that.
#[derive(Debug)]
pub struct Relaxed {
    /// As it was handed in, or without what cannot be enforced.
    pub spec: GrammarSpec,
    /// What was left out.
    pub unenforced: Places,
}

/// Check a grammar as [`check`] does, and take out of a schema what is refused as not enforced.
///
/// # Errors
/// Why it cannot be enforced even so.
pub fn relax(spec: &GrammarSpec) -> Result<Relaxed, GrammarError> {
    let mut unenforced = Places::default();
    let Err(mut error) = check(spec) else { return Ok(Relaxed { spec: spec.clone(), unenforced }) };
    if spec.kind != GrammarKind::JsonSchema || Leniency::after(&error).is_none() {
        return Err(error);
    }
    let mut schema: Value =
        serde_json::from_str(&spec.text).map_err(|error| GrammarError::NotJson(error.to_string()))?;
    for _ in 0..MAX_PASSES {
        let Some(leniency) = Leniency::after(&error) else { break };
        let before = unenforced.count;
        leniency.apply(&mut schema, MAX_PLACES, &mut unenforced);
        if unenforced.count == before {
            break;
        }
        let spec = GrammarSpec { text: schema.to_string().into(), ..spec.clone() };
        match check(&spec) {
            Ok(()) => return Ok(Relaxed { spec, unenforced }),
            Err(next) => error = next,
        }
    }
    Err(error)
}

#[cfg(test)]
mod tests {
    use scheduler::{GrammarKind, GrammarSpec};
    use serde_json::{Value, json};

    use super::{MAX_PLACES, relax};
    use crate::check::accepts;

    fn spec(schema: &Value) -> GrammarSpec {
        GrammarSpec::new(GrammarKind::JsonSchema, &schema.to_string())
    }

    #[test]
    fn what_is_not_enforced_is_left_out_and_listed() {
        let schema = json!({
            "type": "object",
            "properties": {
                "a": {"type": "integer", "not": {"const": 3}, "minimum": 0},
                "b/c": {"type": "array", "items": {"format": "colour", "type": "string"}, "uniqueItems": true},
                "d": {"if": {"minimum": 1}, "then": {"maximum": 2}, "else": {}, "type": "integer"},
                "e": {"oneOf": [{"type": "integer"}, {"type": "number"}], "anyOf": [{"minimum": 3}]},
            },
            "required": ["a"],
            "additionalProperties": false,
        });
        let relaxed = relax(&spec(&schema)).expect("enforced but for what is listed");
        let listed = [
            "/properties/a/not",
            "/properties/b~1c/uniqueItems",
            "/properties/b~1c/items/format",
            "/properties/d/if",
            "/properties/e/oneOf",
        ];
        assert_eq!(relaxed.unenforced.pointers, listed);
        assert_eq!(relaxed.unenforced.count, listed.len());
        for (text, expected) in [
            (r#"{"a": 3}"#, true),
            (r#"{"a": -1}"#, false),
            (r#"{"a": 1, "b/c": ["x", "x"]}"#, true),
            (r#"{"a": 1, "b/c": [1]}"#, false),
            (r#"{"a": 1, "d": 9}"#, true),
            (r#"{"a": 1, "e": 2}"#, false),
            (r#"{"a": 1, "e": 3.5}"#, true),
        ] {
            assert_eq!(accepts(&relaxed.spec, text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_can_be_enforced_stays_and_what_cannot_be_at_all_is_refused() {
        let schema = json!({"type": "object", "properties": {"not": {"const": "oneOf"}}});
        let relaxed = relax(&spec(&schema)).expect("enforced");
        assert_eq!((&*relaxed.spec.text, relaxed.unenforced.count), (&*schema.to_string(), 0));
        for (schema, says) in [
            (json!({"type": "string", "enum": [1], "uniqueItems": true}), "nsatisfiable"),
            (json!({"$ref": "https://example.com/schema", "not": {}}), "example.com"),
            (json!({"$ref": "#/x", "x": {"not": {}}}), "/$ref is not supported"),
            (json!({"pattern": "(?=a)", "not": {}}), "look-around"),
            (json!(3), "a number"),
        ] {
            let error = relax(&spec(&schema)).expect_err(says).to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_long_name_over_many_places_takes_little_room() {
        let many: serde_json::Map<String, Value> =
            (0..700).map(|index| (index.to_string(), json!({"not": {}}))).collect();
        let schema = json!({"properties": {"x".repeat(500_000): {"properties": many}}});
        let relaxed = relax(&spec(&schema)).expect("enforced but for what is listed");
        assert_eq!((relaxed.unenforced.count, relaxed.unenforced.pointers.len()), (700, MAX_PLACES));
        assert!(relaxed.unenforced.pointers.iter().all(|pointer| pointer.len() < 400));
    }
}
