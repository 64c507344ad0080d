//! A grammar as a rule within another one: what stands around an answer is then enforced with it.

use std::collections::HashMap;

use llguidance::regex_to_lark;
use output::messages_around;
use scheduler::{GrammarKind, GrammarSpec};
use serde_json::Value;

use super::{choices, gbnf, schema_keywords};
use crate::{
    MAX_GRAMMAR_BYTES,
    error::{GrammarError, check_limit},
};

/// The name of the rule.
const RULE: &str = "wanted";

/// Make a grammar for an answer in messages (gpt-oss): thoughts, which are free, then what `spec` accepts.
///
/// `ids`: marks that are one token each. `begins_within`: the prompt ends within thoughts.
///
/// # Errors
///
/// `spec` is not a grammar, or the whole is too long.
#[expect(
    clippy::implicit_hasher,
    reason = "the ids of special tokens lie in a map of the usual kind everywhere"
)]
pub fn in_messages(
    spec: &GrammarSpec,
    ids: &HashMap<String, u32>,
    begins_within: bool,
) -> Result<GrammarSpec, GrammarError> {
    let text = messages_around(&rule(spec)?, ids, begins_within);
    check_limit("grammar with the messages around it", text.len(), MAX_GRAMMAR_BYTES, "bytes")?;
    Ok(GrammarSpec::new(GrammarKind::Grammar, &text))
}

/// A grammar as a rule in Lark.
fn rule(spec: &GrammarSpec) -> Result<String, GrammarError> {
    Ok(match spec.kind {
        GrammarKind::JsonObject | GrammarKind::JsonSchema => {
            format!("{RULE}: %json {}\n", Value::Object(schema_keywords(spec)?))
        }
        GrammarKind::Regex => format!("{RULE}: /{}/\n", regex_to_lark(&spec.text, "")),
        GrammarKind::Choice => format!("{RULE}: CHOICE\nCHOICE: {}\n", choices(&spec.text)?),
        GrammarKind::Grammar if spec.text.contains("::=") => {
            format!("{RULE}: %lark {{\n{}\n}}\n", gbnf::to_lark(&spec.text)?)
        }
        GrammarKind::Grammar => format!("{RULE}: %lark {{\n{}\n}}\n", spec.text),
        GrammarKind::Anything => format!("{RULE}: /(?s:.*)/\n"),
    })
}
