//! A `GrammarSpec` as the library's grammar.

pub(crate) mod cache;
pub(crate) mod gbnf;
pub(crate) mod jobs;
pub(crate) mod lark_rule;
pub(crate) mod work_queue;

use std::sync::Arc;

use llguidance::{ParserFactory, api::TopLevelGrammar};
use scheduler::{GrammarKind, GrammarSpec};
use serde_json::{Map, Value, json};
use toktrie::TokEnv;

use crate::{
    MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES,
    error::{GrammarError, check_limit},
    guarded::guarded,
    limits::limits,
    lint,
    matcher::Matcher,
    vocabulary::{Pieces, quiet_factory},
};

/// Whitespace in JSON: so much in a row at most, else a model may go on with it until its tokens are spent.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// Compile a grammar for a vocabulary.
///
/// # Errors
/// Why it cannot be enforced.
pub(crate) fn compile(spec: &GrammarSpec, factory: &ParserFactory) -> Result<Matcher, GrammarError> {
    // Read again where it is needed again: kept meanwhile it would take as much as the compiler makes of it.
    let mut matcher = begin(grammar_of(spec)?, factory)?;
    let mut mask = matcher.mask();
    if matcher.has_failed() && factory.tok_env().tokenize_is_canonical() {
        // More has to follow than can be followed at once: token by token it is.
        let pieces: TokEnv = Arc::new(Pieces(factory.tok_env().tok_trie().clone()));
        matcher = begin(grammar_of(spec)?, &quiet_factory(&pieces, &[], limits())?)?;
        mask = matcher.mask();
    }
    // Where nothing is left to say, the library has stopped already; a mask tells whether there is a first token.
    if mask?.num_set() > 0 { Ok(matcher) } else { Err(GrammarError::NoText) }
}

fn begin(grammar: TopLevelGrammar, factory: &ParserFactory) -> Result<Matcher, GrammarError> {
    guarded(|| {
        let parser = factory.create_parser(grammar);
        parser.map(Matcher::new).map_err(|error| GrammarError::refused(&error.to_string()))
    })
}

/// The grammar in the library's terms, its size checked first.
fn grammar_of(spec: &GrammarSpec) -> Result<TopLevelGrammar, GrammarError> {
    let limit = if spec.kind == GrammarKind::Regex { MAX_REGEX_BYTES } else { MAX_GRAMMAR_BYTES };
    let what = match spec.kind {
        GrammarKind::JsonSchema | GrammarKind::JsonObject => "schema",
        GrammarKind::Regex => "regular expression",
        GrammarKind::Choice => "list of choices",
        GrammarKind::Grammar | GrammarKind::Anything => "grammar",
    };
    check_limit(what, spec.text.len(), limit, "bytes")?;
    if let Some(pattern) = &spec.whitespace_pattern {
        check_limit("whitespace_pattern", pattern.len(), MAX_REGEX_BYTES, "bytes")?;
    }
    match spec.kind {
        GrammarKind::JsonObject | GrammarKind::JsonSchema => {
            Ok(TopLevelGrammar::from_json_schema(Value::Object(schema_keywords(spec)?)))
        }
        GrammarKind::Regex => Ok(TopLevelGrammar::from_regex(&spec.text)),
        // One lexeme: the library has as many of them as it has choices to make.
        GrammarKind::Choice => {
            Ok(TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {}", choices(&spec.text)?)))
        }
        GrammarKind::Grammar if spec.text.contains("::=") => {
            Ok(TopLevelGrammar::from_lark(gbnf::to_lark(&spec.text)?))
        }
        GrammarKind::Grammar => Ok(TopLevelGrammar::from_lark(spec.text.to_string())),
        GrammarKind::Anything => Ok(TopLevelGrammar::from_regex("(?s:.*)")),
    }
}

/// The schema that JSON obeys, with our options in the place of any that a client has put there.
fn schema_keywords(spec: &GrammarSpec) -> Result<Map<String, Value>, GrammarError> {
    let mut keywords = match spec.kind {
        GrammarKind::JsonObject => Map::from_iter([("type".to_owned(), json!("object"))]),
        _ => read_schema(spec)?,
    };
    let whitespace = spec.whitespace_pattern.as_deref().unwrap_or(WHITESPACE);
    let options = if spec.disable_any_whitespace {
        json!({"whitespace_flexible": false})
    } else {
        json!({"whitespace_pattern": whitespace})
    };
    keywords.insert("x-guidance".to_owned(), options);
    Ok(keywords)
}

fn read_schema(spec: &GrammarSpec) -> Result<Map<String, Value>, GrammarError> {
    let mut schema: Value =
        serde_json::from_str(&spec.text).map_err(|error| GrammarError::NotJson(error.to_string()))?;
    lint::check_schema(&schema)?;
    if spec.disable_additional_properties {
        lint::close_objects(&mut schema);
    }
    match schema {
        Value::Object(keywords) => Ok(keywords),
        Value::Bool(true) => Ok(Map::new()),
        Value::Bool(false) => Err(GrammarError::NoText),
        Value::Null => Err(GrammarError::NotASchema("null")),
        Value::Number(_) => Err(GrammarError::NotASchema("a number")),
        Value::String(_) => Err(GrammarError::NotASchema("a text")),
        Value::Array(_) => Err(GrammarError::NotASchema("a list")),
    }
}

/// Texts to choose from, as Lark's.
fn choices(text: &str) -> Result<String, GrammarError> {
    let choices: Vec<String> = serde_json::from_str(text).map_err(|_| GrammarError::BadChoice)?;
    check_limit("list of choices", choices.len(), MAX_CHOICES, "texts")?;
    if choices.is_empty() || choices.iter().any(String::is_empty) {
        return Err(GrammarError::BadChoice);
    }
    let quoted: Vec<String> = choices.into_iter().map(|choice| Value::String(choice).to_string()).collect();
    Ok(quoted.join(" | "))
}
