//! The last part of `AddRequests`, there only when a request waits for a grammar: which grammars, and of which requests.
//! Samples share theirs, so it is sent once for all that stand behind each other.

use std::sync::Arc;

use scheduler::{GrammarKind, GrammarSpec, NewRequest};

use crate::{
    error::DecodeError,
    wire::{Reader, Writer},
};

const HAS_WHITESPACE_PATTERN: u8 = 1;
const DISABLES_ANY_WHITESPACE: u8 = 1 << 1;
const DISABLES_ADDITIONAL_PROPERTIES: u8 = 1 << 2;

/// Fewest bytes of a grammar: its run of requests, kind, flags and the length of its text.
const LEAST_BYTES: usize = 14;

/// Append the grammars of requests, if one waits for its own.
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

/// Whether a request waits, for a grammar that it brings or for one that its caller keeps.
pub(crate) fn waits(request: &NewRequest) -> bool {
    request.waits_for_grammar || request.grammar.is_some()
}

fn encode_one(spec: &GrammarSpec, body: &mut Writer<'_>) {
    let flags = [
        (HAS_WHITESPACE_PATTERN, spec.whitespace_pattern.is_some()),
        (DISABLES_ANY_WHITESPACE, spec.disable_any_whitespace),
        (DISABLES_ADDITIONAL_PROPERTIES, spec.disable_additional_properties),
    ];
    body.u8(spec.kind as u8);
    body.u8(flags.into_iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag).sum());
    body.str(&spec.text);
    if let Some(pattern) = &spec.whitespace_pattern {
        body.str(pattern);
    }
}

/// Read them, and give them to their requests.
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
    let known = HAS_WHITESPACE_PATTERN | DISABLES_ANY_WHITESPACE | DISABLES_ADDITIONAL_PROPERTIES;
    if flags & !known != 0 {
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
    })
}
