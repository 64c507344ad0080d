//! The optional last part of `AddRequests`: the grammars that requests wait for, and which requests wait for which.
//! Samples of one request share a grammar, so it is sent once for each run of consecutive requests.

use std::sync::Arc;

use scheduler::{GrammarKind, GrammarSpec, NewRequest, ThinkingGate};

use crate::{
    error::DecodeError,
    wire::{Reader, Writer},
};

const HAS_WHITESPACE_PATTERN: u8 = 1;
const DISABLES_ANY_WHITESPACE: u8 = 1 << 1;
const DISABLES_ADDITIONAL_PROPERTIES: u8 = 1 << 2;
const HAS_THINKING: u8 = 1 << 3;
const BEGINS_WITHIN: u8 = 1 << 4;
const HAS_BUDGET: u8 = 1 << 5;
/// Flags that describe a thinking gate.
const OF_THINKING: u8 = BEGINS_WITHIN | HAS_BUDGET;

/// Fewest bytes of a grammar: the length of its run of requests, its kind, its flags and the length of its text.
const LEAST_BYTES: usize = 14;

/// Append the grammars of the requests, if any request waits for one that it brings.
pub(crate) fn encode(requests: &[NewRequest], body: &mut Writer<'_>) {
    let mut runs: Vec<(u32, u32, &Arc<GrammarSpec>)> = Vec::new();
    for (index, request) in (0..).zip(requests) {
        let Some(spec) = &request.grammar else { continue };
        match runs.last_mut() {
            Some((first, count, shared)) if *first + *count == index && Arc::ptr_eq(shared, spec) => {
                *count += 1;
            }
            _ => runs.push((index, 1, spec)),
        }
    }
    if !requests.iter().any(waits) {
        return;
    }
    body.u32(runs.len() as u32);
    for (first, count, spec) in runs {
        body.u32(first);
        body.u32(count);
        encode_one(spec, body);
    }
}

/// Whether a request waits for a grammar: one that it brings, or one that its caller keeps.
pub(crate) fn waits(request: &NewRequest) -> bool {
    request.waits_for_grammar || request.grammar.is_some()
}

fn encode_one(spec: &GrammarSpec, body: &mut Writer<'_>) {
    let thinking = spec.thinking.as_ref();
    let flags = [
        (HAS_WHITESPACE_PATTERN, spec.whitespace_pattern.is_some()),
        (DISABLES_ANY_WHITESPACE, spec.disable_any_whitespace),
        (DISABLES_ADDITIONAL_PROPERTIES, spec.disable_additional_properties),
        (HAS_THINKING, thinking.is_some()),
        (BEGINS_WITHIN, thinking.is_some_and(|gate| gate.begins_within)),
        (HAS_BUDGET, thinking.is_some_and(|gate| gate.budget.is_some())),
    ];
    body.u8(spec.kind as u8);
    body.u8(flags.into_iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag).sum());
    body.str(&spec.text);
    if let Some(pattern) = &spec.whitespace_pattern {
        body.str(pattern);
    }
    if let Some(gate) = thinking {
        body.u32(gate.open_id);
        body.u32(gate.close_id);
        if let Some(budget) = gate.budget {
            body.u32(budget);
        }
        body.u32(gate.end_ids.len() as u32);
        for &token_id in &gate.end_ids {
            body.u32(token_id);
        }
    }
}

/// Read the grammars and attach them to their requests.
pub(crate) fn decode(body: &mut Reader<'_>, requests: &mut [NewRequest]) -> Result<(), DecodeError> {
    if !requests.iter().any(waits) {
        return Ok(());
    }
    for _ in 0..body.count(LEAST_BYTES)? {
        let (first, count) = (body.u32()?, body.u32()?);
        let end = u64::from(first) + u64::from(count);
        let run = requests.get_mut(first as usize..end as usize);
        let run = run.ok_or(DecodeError::BadValue { what: "the end of a run of requests", value: end })?;
        let spec = Arc::new(decode_one(body)?);
        for request in run {
            request.grammar = Some(spec.clone());
        }
    }
    Ok(())
}

fn decode_one(body: &mut Reader<'_>) -> Result<GrammarSpec, DecodeError> {
    let kind = body.u8()?;
    let kind = *GrammarKind::ALL
        .get(usize::from(kind))
        .ok_or(DecodeError::BadValue { what: "a kind of grammar", value: kind.into() })?;
    let flags = body.u8()?;
    let known = HAS_WHITESPACE_PATTERN
        | DISABLES_ANY_WHITESPACE
        | DISABLES_ADDITIONAL_PROPERTIES
        | HAS_THINKING
        | OF_THINKING;
    if flags & !known != 0 || (flags & HAS_THINKING == 0 && flags & OF_THINKING != 0) {
        return Err(DecodeError::BadValue { what: "a set of grammar flags", value: flags.into() });
    }
    let text = body.str()?.into();
    let has_pattern = flags & HAS_WHITESPACE_PATTERN != 0;
    Ok(GrammarSpec {
        kind,
        text,
        whitespace_pattern: if has_pattern { Some(body.str()?.into()) } else { None },
        disable_any_whitespace: flags & DISABLES_ANY_WHITESPACE != 0,
        disable_additional_properties: flags & DISABLES_ADDITIONAL_PROPERTIES != 0,
        thinking: if flags & HAS_THINKING != 0 { Some(decode_thinking(flags, body)?) } else { None },
    })
}

fn decode_thinking(flags: u8, body: &mut Reader<'_>) -> Result<ThinkingGate, DecodeError> {
    let (open_id, close_id) = (body.u32()?, body.u32()?);
    let budget = if flags & HAS_BUDGET != 0 { Some(body.u32()?) } else { None };
    let end_ids = (0..body.count(4)?).map(|_| body.u32()).collect::<Result<_, _>>()?;
    Ok(ThinkingGate { open_id, close_id, begins_within: flags & BEGINS_WITHIN != 0, budget, end_ids })
}
