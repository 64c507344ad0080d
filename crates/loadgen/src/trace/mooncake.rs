//! Mooncake's format: one JSON object per line.

use std::time::Duration;

use serde_json::{Map, Value};

use super::{
    HASH_BLOCK_TOKENS, HASH_ID_BITS, MAX_REQUEST_TOKENS, PromptContent, RecordError, TraceRequest,
    check_lengths, shortened,
};

/// Milliseconds at most: some thirty years.
const MAX_TIMESTAMP_MS: f64 = 1e12;

const FORM: &str =
    "each line must be one JSON object with timestamp, input_length, output_length and hash_ids";

/// One line.
pub(super) fn parse(line: &[u8]) -> Result<TraceRequest, RecordError> {
    let value: Value = serde_json::from_slice(line)
        .map_err(|error| RecordError::Form { problem: format!("not valid JSON ({error})"), rule: FORM })?;
    let Value::Object(fields) = value else {
        return Err(RecordError::Form { problem: format!("got {}", shown(&value)), rule: FORM });
    };
    let arrival = arrival(&fields)?;
    let longest = u64::from(MAX_REQUEST_TOKENS);
    let (num_prompt_tokens, num_output_tokens) = check_lengths(
        ("input_length", whole_number(&fields, "input_length", 1, longest)?),
        ("output_length", whole_number(&fields, "output_length", 0, longest)?),
    )?;
    let content = PromptContent::HashIds(hash_ids(&fields, num_prompt_tokens)?);
    Ok(TraceRequest { arrival, num_prompt_tokens, num_output_tokens, content })
}

fn arrival(fields: &Map<String, Value>) -> Result<Duration, RecordError> {
    let rule = || format!("a number of milliseconds between 0 and {MAX_TIMESTAMP_MS}");
    let value = get(fields, "timestamp", rule)?;
    match value.as_f64() {
        Some(ms) if (0.0..=MAX_TIMESTAMP_MS).contains(&ms) => Ok(Duration::from_nanos((ms * 1e6) as u64)),
        _ => Err(RecordError::Field { field: "timestamp", rule: rule(), value: shown(value) }),
    }
}

fn hash_ids(fields: &Map<String, Value>, num_prompt_tokens: u32) -> Result<Vec<u64>, RecordError> {
    let field = "hash_ids";
    let expected = num_prompt_tokens.div_ceil(HASH_BLOCK_TOKENS) as usize;
    let rule = || {
        format!("a list of {expected} ids, one per {HASH_BLOCK_TOKENS} of {num_prompt_tokens} prompt tokens")
    };
    let value = get(fields, field, rule)?;
    let Value::Array(values) = value else {
        return Err(RecordError::Field { field, rule: rule(), value: shown(value) });
    };
    if values.len() != expected {
        return Err(RecordError::Field { field, rule: rule(), value: values.len().to_string() });
    }
    values
        .iter()
        .map(|value| {
            value.as_u64().filter(|id| id >> HASH_ID_BITS == 0).ok_or_else(|| RecordError::Field {
                field,
                rule: format!("whole numbers between 0 and 2^{HASH_ID_BITS} - 1"),
                value: shown(value),
            })
        })
        .collect()
}

fn whole_number(
    fields: &Map<String, Value>,
    field: &'static str,
    low: u64,
    high: u64,
) -> Result<u64, RecordError> {
    let rule = || format!("a whole number between {low} and {high}");
    let value = get(fields, field, rule)?;
    value.as_u64().filter(|number| (low..=high).contains(number)).ok_or_else(|| RecordError::Field {
        field,
        rule: rule(),
        value: shown(value),
    })
}

fn get<'a>(
    fields: &'a Map<String, Value>,
    field: &'static str,
    rule: impl Fn() -> String,
) -> Result<&'a Value, RecordError> {
    fields.get(field).ok_or_else(|| RecordError::MissingField { field, rule: rule() })
}

fn shown(value: &Value) -> String {
    shortened(&value.to_string())
}
