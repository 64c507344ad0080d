//! What each kind of grammar takes and refuses, by the check that a front end makes.

use grammar::{GrammarError, accepts, check};
use scheduler::{GrammarKind, GrammarSpec};

fn refused(kind: GrammarKind, text: &str) -> GrammarError {
    check(&GrammarSpec::new(kind, text)).expect_err(text)
}

fn taken(kind: GrammarKind, text: &str) {
    check(&GrammarSpec::new(kind, text)).expect(text);
}

#[test]
fn more_properties_than_can_be_compiled_are_refused_at_once() {
    let object = |names: std::ops::Range<u32>| {
        let members: Vec<String> = names.map(|name| format!(r#""{name}":{{}}"#)).collect();
        format!(r#"{{"properties":{{{}}}}}"#, members.join(","))
    };
    let merged: Vec<String> = (0..10).map(|index| object(index * 1000..(index + 1) * 1000)).collect();
    let apart: Vec<String> = (0..8).map(|_| object(0..2500)).collect();
    for (schema, got) in [
        (object(0..20_000), 20_000),
        (format!(r#"{{"allOf":[{}]}}"#, merged.join(",")), 10_000),
        (format!(r#"{{"prefixItems":[{}]}}"#, apart.join(",")), 20_000),
    ] {
        assert_eq!(refused(GrammarKind::JsonSchema, &schema), GrammarError::TooManyProperties { got });
    }
    taken(GrammarKind::JsonSchema, &object(0..300));
}

#[test]
fn what_can_be_enforced_is_taken() {
    taken(GrammarKind::JsonObject, "");
    taken(GrammarKind::JsonSchema, "true");
    taken(
        GrammarKind::JsonSchema,
        r#"{"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}}"#,
    );
    taken(
        GrammarKind::JsonSchema,
        r##"{"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}"##,
    );
    taken(GrammarKind::Regex, r"\d{3}-[a-z/\n]+");
    taken(GrammarKind::Choice, r#"["yes", "no", "it's \"so\"\n", "é"]"#);
    taken(GrammarKind::Grammar, "start: \"a\" start | \"b\"");
    taken(GrammarKind::Grammar, "root ::= \"a\" root | [b-d]{2}");
}

#[test]
fn what_cannot_be_enforced_is_refused_by_name() {
    for (kind, text, expected) in [
        (GrammarKind::JsonSchema, r#"{"properties": {"a": {"not": {}}}}"#, "/properties/a/not"),
        (
            GrammarKind::JsonSchema,
            r#"{"type": "string", "format": "colour"}"#,
            "the format \"colour\" cannot be enforced",
        ),
        (GrammarKind::JsonSchema, "{", "not valid JSON"),
        (GrammarKind::JsonSchema, r#""\ud800""#, "not valid JSON"),
        (GrammarKind::JsonSchema, "3", "must be an object or a boolean, got a number"),
        (GrammarKind::JsonSchema, "false", "no text obeys"),
        (GrammarKind::JsonSchema, r#"{"type": "string", "enum": [1]}"#, "nsatisfiable"),
        (GrammarKind::JsonSchema, r#"{"$ref": "https://example.com/schema"}"#, "example.com"),
        (GrammarKind::JsonSchema, r#"{"oneOf": [{"type": "integer"}, {"type": "number"}]}"#, "oneOf"),
        (GrammarKind::Regex, "(?=a)b", "look-around"),
        (GrammarKind::Regex, "(", "unclosed"),
        (GrammarKind::Choice, "[]", "one or more texts"),
        (GrammarKind::Choice, r#"["a", ""]"#, "none of them empty"),
        (GrammarKind::Grammar, "start: undefined", "undefined"),
        (GrammarKind::Grammar, "root ::= undefined", "there is no rule undefined"),
    ] {
        let error = refused(kind, text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
        assert!(!error.contains('\n') && error.len() < 1100, "one line: {error}");
    }
}

#[test]
fn a_clients_own_options_for_the_compiler_are_dropped() {
    taken(GrammarKind::JsonSchema, r#"{"x-guidance": {"whitespace_pattern": "("}, "type": "integer"}"#);
    taken(GrammarKind::JsonSchema, r#"{"x-guidance": 7, "type": "integer"}"#);
}

#[test]
fn what_is_too_much_is_refused_in_bounded_time() {
    let deep = format!("{}true{}", r#"{"items":"#.repeat(500), "}".repeat(500));
    let products = {
        let any = r#"{"anyOf": [{"minLength": 1}, {"maxLength": 3}, {"pattern": "a"}, {"pattern": "b"}]}"#;
        format!(r#"{{"type": "string", "allOf": [{}]}}"#, [any; 12].join(","))
    };
    let entries: Vec<String> = (0..90_000).map(|index| format!("\"value {index}\"")).collect();
    let huge_enum = format!(r#"{{"enum": [{}]}}"#, entries.join(","));
    for (kind, text) in [
        (GrammarKind::JsonSchema, deep.as_str()),
        (GrammarKind::JsonSchema, products.as_str()),
        (GrammarKind::JsonSchema, huge_enum.as_str()),
        (GrammarKind::JsonSchema, r#"{"type": "string", "minLength": 1000000000}"#),
        (GrammarKind::JsonSchema, r#"{"type": "array", "minItems": 1000000000, "maxItems": 2000000000}"#),
        (GrammarKind::JsonSchema, r#"{"type": "string", "pattern": "^(a{1000}){1000}$"}"#),
        (GrammarKind::Regex, "(.*a){20}b{5000}"),
        (GrammarKind::Regex, "((a{0,300}){0,300}){0,300}"),
        (GrammarKind::Grammar, "start: start start"),
        (GrammarKind::Grammar, "root ::= \"a\"{1000000000}"),
    ] {
        let began = std::time::Instant::now();
        let checked = check(&GrammarSpec::new(kind, text));
        let shown: String = text.chars().take(60).collect();
        println!("{:>8.1} ms  {shown}: {checked:?}", began.elapsed().as_secs_f64() * 1e3);
        assert!(began.elapsed().as_secs() < 60, "{shown}: fuel bounds it, whatever it says");
    }
}

#[test]
fn sizes_are_bounded_before_anything_is_read() {
    let large = " ".repeat((1 << 20) + 1);
    assert!(refused(GrammarKind::JsonSchema, &large).to_string().contains("the limit is 1048576"));
    assert!(refused(GrammarKind::Regex, &large[..=64 << 10]).to_string().contains("the limit is 65536"));
    let many = serde_json::to_string(&vec!["a"; 50_001]).expect("JSON");
    assert!(refused(GrammarKind::Choice, &many).to_string().contains("the limit is 50000"));
}

#[test]
fn hundreds_of_properties_can_be_written_and_left_out() {
    let properties: Vec<String> =
        (0..600).map(|index| format!(r#""property_{index}": {{"type": "integer"}}"#)).collect();
    let schema = format!(
        r#"{{"type": "object", "properties": {{{}}}, "additionalProperties": false}}"#,
        properties.join(", ")
    );
    let spec = GrammarSpec::new(GrammarKind::JsonSchema, &schema);
    let obeys = |text| accepts(&spec, text).expect("it can be followed");
    assert!(obeys(r#"{"property_3": 4, "property_77": 5, "property_599": 6}"#));
    assert!(!obeys(r#"{"property_3": 4, "property_600": 5}"#), "no such property");
    assert!(!obeys(r#"{"property_77": 4, "property_3": 5}"#), "out of their order");
}
