//! Schemas: what the compiler would ignore is refused, with the place where it stands.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use crate::{
    MAX_DISTINCT_PROPERTIES, MAX_GRAMMAR_BYTES, MAX_PROPERTIES, MAX_REGEX_BYTES, MAX_SUBSCHEMAS,
    error::{GrammarError, check_limit},
};

/// Keywords that the compiler does not enforce.
const NOT_ENFORCED: [&str; 19] = [
    "not",
    "if",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "contains",
    "minContains",
    "maxContains",
    "contentSchema",
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

/// Formats of texts that the compiler enforces.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Most characters of a pointer that are shown.
const MAX_POINTER_CHARS: usize = 300;

/// The largest whole number below which each has its own 64-bit float.
const MAX_EXACT: u64 = (1 << 53) - 1;

/// A step from a schema to one within it.
#[derive(Clone, Copy)]
enum Step<'a> {
    Name(&'a str),
    Index(usize),
}

/// Check a schema and all schemas in it; the parser of its JSON has bounded how deep it is.
pub(crate) fn check_schema(schema: &Value) -> Result<(), GrammarError> {
    let mut sizes = Sizes::default();
    check_within(schema, &mut Vec::new(), &mut sizes)?;
    sizes.check()
}

/// What a schema costs to compile. The work grows with the square of the number of properties in each object, the stack
/// with the number in one, which `allOf` and `$ref` may put together out of all of them, and memory with the schemas in it.
#[derive(Default)]
struct Sizes<'a> {
    num_schemas: usize,
    num_properties: usize,
    sum_of_squares: usize,
    names: HashSet<&'a str>,
}

impl<'a> Sizes<'a> {
    fn add(&mut self, keywords: &'a Map<String, Value>) {
        self.num_schemas += 1;
        if let Some(Value::Object(properties)) = keywords.get("properties") {
            self.num_properties += properties.len();
            self.sum_of_squares += properties.len() * properties.len();
            self.names.extend(properties.keys().map(String::as_str));
        }
    }

    fn check(&self) -> Result<(), GrammarError> {
        let is_too_much = self.sum_of_squares > MAX_PROPERTIES * MAX_PROPERTIES
            || self.names.len() > MAX_DISTINCT_PROPERTIES;
        if is_too_much {
            return Err(GrammarError::TooManyProperties { got: self.num_properties });
        }
        check_limit("schema", self.num_schemas, MAX_SUBSCHEMAS, "schemas in it")
    }
}

fn check_within<'a>(
    schema: &'a Value,
    path: &mut Vec<Step<'a>>,
    sizes: &mut Sizes<'a>,
) -> Result<(), GrammarError> {
    let Value::Object(keywords) = schema else { return Ok(()) };
    check_keywords(path, keywords)?;
    sizes.add(keywords);
    for (keyword, value) in keywords {
        path.push(Step::Name(keyword));
        if HOLD_NAMED_SCHEMAS.contains(&keyword.as_str()) {
            for (name, member) in value.as_object().into_iter().flatten() {
                path.push(Step::Name(name));
                check_within(member, path, sizes)?;
                path.pop();
            }
        } else if HOLD_SCHEMAS.contains(&keyword.as_str()) {
            match value {
                Value::Array(members) => {
                    for (index, member) in members.iter().enumerate() {
                        path.push(Step::Index(index));
                        check_within(member, path, sizes)?;
                        path.pop();
                    }
                }
                value => check_within(value, path, sizes)?,
            }
        }
        path.pop();
    }
    Ok(())
}

/// The JSON pointer of a keyword, cut where it is very long.
fn pointer_of(path: &[Step<'_>], keyword: &str) -> String {
    let mut pointer = String::new();
    for step in path.iter().copied().chain([Step::Name(keyword)]) {
        match step {
            Step::Name(name) => {
                let shown: String = name.chars().take(MAX_POINTER_CHARS).collect();
                pointer.push('/');
                pointer.push_str(&escape(&shown));
            }
            Step::Index(index) => {
                pointer.push('/');
                pointer.push_str(&index.to_string());
            }
        }
    }
    match pointer.char_indices().nth(MAX_POINTER_CHARS) {
        Some((end, _)) => format!("{}…", &pointer[..end]),
        None => pointer,
    }
}

/// Check the schemas of tools' arguments, each with its tool's name.
///
/// # Errors
/// Which tool's schema cannot be enforced, and why.
pub fn check_tools<'a>(tools: impl Iterator<Item = (&'a str, &'a Map<String, Value>)>) -> Result<(), String> {
    let (mut size, mut sum_of_squares, mut num_schemas) = (0, 0, 0);
    for (name, parameters) in tools {
        let refused = |error: GrammarError| {
            format!(
                "the parameters of the tool {name:?} cannot be enforced: {error}; tool_choice auto without strict takes them"
            )
        };
        let schema = Value::Object(parameters.clone());
        size += schema.to_string().len();
        let mut own = Sizes::default();
        check_within(&schema, &mut Vec::new(), &mut own).map_err(refused)?;
        sum_of_squares += own.sum_of_squares;
        own.sum_of_squares = sum_of_squares;
        num_schemas += own.num_schemas;
        own.check().map_err(refused)?;
        let all = "list of tools";
        check_limit(all, num_schemas, MAX_SUBSCHEMAS, "schemas in it").map_err(refused)?;
        check_limit(all, size, MAX_GRAMMAR_BYTES, "bytes of schemas").map_err(refused)?;
    }
    Ok(())
}

/// Take out of a tool's parameters what cannot be enforced, and any `oneOf`, of whose branches any may hold then.
pub fn relax_tool(parameters: &mut Map<String, Value>, limit: usize, places: &mut Places) {
    let mut schema = Value::Object(std::mem::take(parameters));
    for leniency in [Leniency::Keywords, Leniency::OneOf] {
        leniency.apply(&mut schema, limit, places);
    }
    if let Value::Object(relaxed) = schema {
        *parameters = relaxed;
    }
}

/// What is given up of a schema that cannot be enforced as it stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Leniency {
    /// Keywords that are not enforced.
    Keywords,
    /// That one branch of `oneOf` alone holds.
    OneOf,
    /// How many properties there are.
    NumProperties,
}

impl Leniency {
    /// What has to be given up for a schema that was refused with this error; `None`: nothing would help.
    pub(crate) fn after(error: &GrammarError) -> Option<Self> {
        match error {
            GrammarError::NotEnforced { keyword, .. } if *keyword != "$ref" => Some(Self::Keywords),
            GrammarError::Refused(message) if message.contains("oneOf constraints are not supported") => {
                Some(Self::OneOf)
            }
            GrammarError::Refused(message) if message.contains("min/maxProperties only supported") => {
                Some(Self::NumProperties)
            }
            _ => None,
        }
    }

    /// Take it out of a schema and of all schemas in it; where, up to `limit` places.
    pub(crate) fn apply(self, schema: &mut Value, limit: usize, places: &mut Places) {
        self.apply_within(schema, &mut Vec::new(), limit, places);
    }

    fn apply_within(self, schema: &mut Value, path: &mut Vec<PathPart>, limit: usize, places: &mut Places) {
        let Value::Object(keywords) = schema else { return };
        for keyword in self.given_up(keywords) {
            places.count += 1;
            if places.pointers.len() < limit {
                let steps: Vec<Step<'_>> = path.iter().map(PathPart::step).collect();
                places.pointers.push(pointer_of(&steps, keyword));
            }
            take_out(keywords, keyword);
        }
        for (keyword, value) in keywords {
            let holds_names = HOLD_NAMED_SCHEMAS.contains(&keyword.as_str());
            if !holds_names && !HOLD_SCHEMAS.contains(&keyword.as_str()) {
                continue;
            }
            path.push(PathPart::Name(keyword.clone()));
            match value {
                Value::Object(members) if holds_names => {
                    for (name, member) in members {
                        path.push(PathPart::Name(name.chars().take(MAX_POINTER_CHARS).collect()));
                        self.apply_within(member, path, limit, places);
                        path.pop();
                    }
                }
                Value::Array(members) => {
                    for (index, member) in members.iter_mut().enumerate() {
                        path.push(PathPart::Index(index));
                        self.apply_within(member, path, limit, places);
                        path.pop();
                    }
                }
                value if !holds_names => self.apply_within(value, path, limit, places),
                _ => {}
            }
            path.pop();
        }
    }

    fn given_up(self, keywords: &Map<String, Value>) -> Vec<&'static str> {
        let has = |name: &&'static str| keywords.contains_key(*name);
        match self {
            Self::Keywords => not_enforced(keywords).collect(),
            Self::OneOf => ["oneOf"].into_iter().filter(has).collect(),
            Self::NumProperties => ["minProperties", "maxProperties"].into_iter().filter(has).collect(),
        }
    }
}

/// Where something was given up.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Places {
    /// JSON pointers of the first ones.
    pub pointers: Vec<String>,
    /// All of them.
    pub count: usize,
}

/// A step that holds its own name.
enum PathPart {
    Name(String),
    Index(usize),
}

impl PathPart {
    fn step(&self) -> Step<'_> {
        match self {
            Self::Name(name) => Step::Name(name),
            Self::Index(index) => Step::Index(*index),
        }
    }
}

/// Remove a keyword and those that mean nothing without it; branches of `oneOf` become branches of which any may hold.
fn take_out(keywords: &mut Map<String, Value>, keyword: &str) {
    let value = keywords.shift_remove(keyword);
    if keyword == "if" {
        keywords.shift_remove("then");
        keywords.shift_remove("else");
    }
    let Some(branches) = value.filter(|_| keyword == "oneOf") else { return };
    if let Some(Value::Array(all)) = keywords.get_mut("allOf") {
        all.push(json!({"anyOf": branches}));
    } else if keywords.contains_key("anyOf") {
        keywords.insert("allOf".to_owned(), json!([{"anyOf": branches}]));
    } else {
        keywords.insert("anyOf".to_owned(), branches);
    }
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

/// Keywords of a schema that the compiler does not enforce, those that ask for nothing aside.
fn not_enforced(keywords: &Map<String, Value>) -> impl Iterator<Item = &'static str> {
    let names = NOT_ENFORCED.iter().copied().filter(|&keyword| {
        keywords.get(keyword).is_some_and(|value| match keyword {
            "uniqueItems" => *value != Value::Bool(false),
            "if" => keywords.contains_key("then") || keywords.contains_key("else"),
            "minContains" | "maxContains" => keywords.contains_key("contains"),
            _ => *value != Value::Bool(true) || keyword == "not",
        })
    });
    let may_be_text = match keywords.get("type") {
        None => true,
        Some(Value::Array(types)) => types.iter().any(|kind| kind == "string"),
        Some(kind) => kind == "string",
    };
    let format = keywords.get("format").and_then(Value::as_str).filter(|_| may_be_text);
    names.chain(format.filter(|format| !FORMATS.contains(format)).map(|_| "format"))
}

fn check_keywords(path: &[Step<'_>], keywords: &Map<String, Value>) -> Result<(), GrammarError> {
    if let Some(keyword) = not_enforced(keywords).next() {
        let what = match keywords.get(keyword) {
            Some(Value::String(format)) if keyword == "format" => {
                format!("the format {:?}", format.chars().take(64).collect::<String>())
            }
            _ => keyword.to_owned(),
        };
        return Err(GrammarError::NotEnforced { pointer: pointer_of(path, keyword), keyword, what });
    }
    let referred = keywords.get("$ref").and_then(Value::as_str);
    // This walk has not looked where a pointer leads to something other than a place for a schema.
    if referred.is_some_and(|to| to.starts_with("#/") && !leads_to_a_schema(to)) {
        let (pointer, keyword) = (pointer_of(path, "$ref"), "$ref");
        return Err(GrammarError::NotEnforced { pointer, keyword, what: keyword.to_owned() });
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
            return Err(GrammarError::InexactNumber { pointer: pointer_of(path, keyword), value });
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

    use super::{check_schema, check_tools, close_objects};
    use crate::MAX_SUBSCHEMAS;

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
            (
                json!({"items": {"format": "unknown"}}),
                "/items/format is not supported: the format \"unknown\"",
            ),
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
            json!({"type": "integer", "format": "int32", "minContains": 1}),
            json!({"properties": {"not": {"type": "string"}, "if": true}}),
            json!({"enum": [{"not": 1}], "const": {"contains": 2}}),
            json!({"$ref": "#/$defs/a/items/0", "$defs": {"a": {"items": [{}]}}}),
            json!({"required": ["not"], "title": "not"}),
        ] {
            check_schema(&schema).expect("nothing to refuse");
        }
    }

    #[test]
    fn more_schemas_in_one_or_in_all_tools_than_are_possible_are_refused() {
        let with =
            |num_within: usize| json!({"items": {"anyOf": vec![json!({"type": "null"}); num_within - 2]}});
        check_schema(&with(MAX_SUBSCHEMAS)).expect("as many as are possible");
        let error = check_schema(&with(MAX_SUBSCHEMAS + 1)).expect_err("one more");
        assert_eq!(error.to_string(), "the schema has 10001 schemas in it; the limit is 10000");

        let tools = [("a", with(MAX_SUBSCHEMAS / 2)), ("b", with(MAX_SUBSCHEMAS / 2)), ("c", json!({}))];
        let check = |count| {
            let tools = tools[..count].iter();
            check_tools(tools.map(|(name, schema)| (*name, schema.as_object().expect("an object"))))
        };
        check(2).expect("together as many as are possible");
        let error = check(3).expect_err("one more");
        assert!(error.contains("tool \"c\""), "{error}");
        assert!(error.contains("list of tools has 10001 schemas in it; the limit is 10000"), "{error}");
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
