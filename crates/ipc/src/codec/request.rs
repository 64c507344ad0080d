//! `AddRequests`: a request and the requests that fork it. A prompt is not sent again if the previous request has the
//! same, with the same extra keys and prediction; neither are equal extras.

use std::sync::Arc;

use scheduler::{
    ExtraKeys, ListKind, MAX_WEIGHT, MAX_WORD_TOKENS, MultimodalSpan, NUM_LISTS, NewRequest, Payer,
    PromptTokens, RepetitionDetection, RequestKey, SAMPLING_LISTS, SamplingExtras, SamplingParams, TokenList,
    sampling_params::{NUM_FLOATS, NUM_INTS},
};

use crate::{
    codec::grammar,
    error::DecodeError,
    wire::{Reader, Writer},
};

/// The prompt, its extra keys and the prediction are those of the previous request.
const SAME_PROMPT: u16 = 1;
const SKIPS_PREFIX_CACHE: u16 = 1 << 1;
const WAITS_FOR_GRAMMAR: u16 = 1 << 2;
const HAS_FORK: u16 = 1 << 3;
const HAS_EOS: u16 = 1 << 4;
const HAS_EXTRAS: u16 = 1 << 5;
/// The extras are those of the previous request.
const SAME_EXTRAS: u16 = 1 << 6;
const REPORTS_PROMPT_PROGRESS: u16 = 1 << 7;
const HAS_STOP_STRINGS: u16 = 1 << 8;
/// The request names the bucket that it is charged to; without this flag it is charged to the default one.
const HAS_PAYER: u16 = 1 << 9;
const HAS_PREDICTION: u16 = 1 << 10;
const DETECTS_REPETITION: u16 = 1 << 11;
/// The highest flag; higher bits are invalid.
const LAST_FLAG: u16 = DETECTS_REPETITION;

/// Fewest bytes of a request.
const LEAST_BYTES: usize = 38 + 4 * NUM_FLOATS + 8 * NUM_INTS;

/// Append the body, with the keys replaced by what `rename` returns.
pub(crate) fn encode(requests: &[NewRequest], rename: impl Fn(RequestKey) -> RequestKey, body: &mut Vec<u8>) {
    let mut body = Writer(body);
    body.u32(requests.len() as u32);
    let mut previous: Option<&NewRequest> = None;
    for request in requests {
        let is_same = previous.is_some_and(|previous| {
            previous.prompt_token_ids == request.prompt_token_ids
                && previous.extra_keys == request.extra_keys
                && previous.prediction == request.prediction
        });
        let has_same_extras = previous.is_some_and(|previous| {
            is_same_extras(previous.params.extras.as_ref(), request.params.extras.as_ref())
        });
        encode_one(request, is_same, has_same_extras, &rename, &mut body);
        previous = Some(request);
    }
    grammar::encode(requests, &mut body);
}

fn encode_one(
    request: &NewRequest,
    is_same: bool,
    has_same_extras: bool,
    rename: &impl Fn(RequestKey) -> RequestKey,
    body: &mut Writer<'_>,
) {
    let params = &request.params;
    let flags = [
        (SAME_PROMPT, is_same),
        (SKIPS_PREFIX_CACHE, request.skip_reading_prefix_cache),
        (WAITS_FOR_GRAMMAR, grammar::waits(request)),
        (HAS_FORK, request.fork_from.is_some()),
        (HAS_EOS, params.eos_token_id.is_some()),
        (HAS_EXTRAS, params.extras.is_some() && !has_same_extras),
        (SAME_EXTRAS, has_same_extras),
        (REPORTS_PROMPT_PROGRESS, request.reports_prompt_progress),
        (HAS_STOP_STRINGS, request.has_stop_strings),
        (HAS_PAYER, request.payer != Payer::default()),
        (HAS_PREDICTION, request.prediction.is_some() && !is_same),
        (DETECTS_REPETITION, params.repetition_detection.is_some()),
    ];
    body.u16(flags.into_iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag).sum());
    body.u64(rename(request.key).0);
    body.str(&request.request_id);
    body.i32(request.priority);
    body.u64(request.age_ns);
    body.u32(params.max_tokens);
    body.u32(params.min_tokens);
    body.i32s(&params.stop_token_ids);
    for value in params.floats() {
        body.f32(value);
    }
    for value in params.ints() {
        body.i64(value);
    }
    if let Some(eos_token_id) = params.eos_token_id {
        body.i32(eos_token_id);
    }
    if let Some(wanted) = params.repetition_detection {
        body.u32(wanted.min_pattern_size());
        body.u32(wanted.max_pattern_size());
        body.u32(wanted.min_count());
    }
    if let Some(parent) = request.fork_from {
        body.u64(rename(parent).0);
    }
    if request.payer != Payer::default() {
        body.u64(request.payer.tenant);
        body.u64(request.payer.user);
        body.u32(request.payer.weight);
    }
    if let Some(extras) = params.extras.as_deref().filter(|_| !has_same_extras) {
        encode_extras(extras, body);
    }
    if !is_same {
        body.i32s(&request.prompt_token_ids);
        if let Some(prediction) = &request.prediction {
            body.i32s(prediction);
        }
        body.bytes(request.extra_keys.first_block());
        body.u32(request.extra_keys.multimodal().len() as u32);
        for span in request.extra_keys.multimodal() {
            body.u32(span.offset);
            body.u32(span.length);
            body.bytes(&span.digest);
            body.bytes(&span.content);
        }
    }
}

/// Whether both requests share one extras object, as samples do.
fn is_same_extras(one: Option<&Arc<SamplingExtras>>, other: Option<&Arc<SamplingExtras>>) -> bool {
    matches!((one, other), (Some(one), Some(other)) if Arc::ptr_eq(one, other))
}

/// Encode the extras. Attachments are not sent: the binding refuses requests that have one.
fn encode_extras(extras: &SamplingExtras, body: &mut Writer<'_>) {
    for (_, list) in extras.lists() {
        match list {
            TokenList::Ids(ids) => body.i32s(ids),
            TokenList::Biases(biases) => {
                body.u32(biases.len() as u32);
                for (token_id, bias) in biases {
                    body.i32(*token_id);
                    body.f32(*bias);
                }
            }
            TokenList::Words(words) => {
                body.u32(words.len() as u32);
                for word in words {
                    body.i32s(word);
                }
            }
        }
    }
    body.bool(extras.prompt_tokens().is_some());
    if let Some(tokens) = extras.prompt_tokens() {
        body.u32(tokens.start);
        body.bool(tokens.is_alone);
        body.u32(tokens.width);
        body.i32s(&tokens.ids);
    }
    body.bool(extras.arguments().is_some());
    if let Some(arguments) = extras.arguments() {
        body.str(arguments);
    }
}

fn decode_extras(body: &mut Reader<'_>) -> Result<SamplingExtras, DecodeError> {
    let mut lists = Vec::with_capacity(NUM_LISTS);
    for row in SAMPLING_LISTS {
        lists.push((row.name, decode_list(row.kind, body)?));
    }
    let prompt_tokens = if body.bool()? {
        let (start, is_alone, width) = (body.u32()?, body.bool()?, body.u32()?);
        Some(PromptTokens { start, is_alone, width, ids: body.i32s()?.into() })
    } else {
        None
    };
    let arguments = if body.bool()? { Some(body.str()?.to_owned()) } else { None };
    let extras = SamplingExtras::new(lists, arguments);
    let extras = match prompt_tokens {
        Some(tokens) => extras.and_then(|extras| extras.with_prompt_tokens(tokens)),
        None => extras,
    };
    extras.map_err(|error| DecodeError::BadExtras(error.to_string()))
}

fn decode_list(kind: ListKind, body: &mut Reader<'_>) -> Result<TokenList, DecodeError> {
    match kind {
        ListKind::Ids => body.i32s().map(TokenList::Ids),
        ListKind::Biases => {
            let count = body.count(8)?;
            let mut biases = Vec::with_capacity(count);
            for _ in 0..count {
                biases.push((body.i32()?, body.f32()?));
            }
            Ok(TokenList::Biases(biases))
        }
        ListKind::Words => {
            let count = body.count(4)?;
            let mut words = Vec::with_capacity(count);
            for _ in 0..count {
                let word = body.i32s()?;
                if word.len() > MAX_WORD_TOKENS {
                    return Err(DecodeError::BadValue {
                        what: "the length of a word",
                        value: word.len() as u64,
                    });
                }
                words.push(word);
            }
            Ok(TokenList::Words(words))
        }
    }
}

/// Read the body. If it has more than `max_requests`, refuse it before copying any prompt.
pub(crate) fn decode(body: &[u8], max_requests: usize) -> Result<Vec<NewRequest>, DecodeError> {
    let mut body = Reader::new(body);
    let count = body.count(LEAST_BYTES)?;
    if count == 0 || count > max_requests {
        return Err(DecodeError::BadValue { what: "a possible number of requests", value: count as u64 });
    }
    let mut requests: Vec<NewRequest> = Vec::with_capacity(count);
    for _ in 0..count {
        let request = decode_one(&mut body, requests.last())?;
        requests.push(request);
    }
    grammar::decode(&mut body, &mut requests)?;
    body.finish()?;
    Ok(requests)
}

fn decode_one(body: &mut Reader<'_>, previous: Option<&NewRequest>) -> Result<NewRequest, DecodeError> {
    let flags = body.u16()?;
    let has = |flag: u16| flags & flag != 0;
    let has_unknown = flags >= LAST_FLAG << 1;
    let is_twice = (has(SAME_EXTRAS) && has(HAS_EXTRAS)) || (has(SAME_PROMPT) && has(HAS_PREDICTION));
    if has_unknown || (has(SAME_PROMPT) && previous.is_none()) || is_twice {
        return Err(DecodeError::BadValue { what: "a set of request flags", value: flags.into() });
    }
    let key = RequestKey(body.u64()?);
    let request_id = body.str()?.into();
    let priority = body.i32()?;
    let age_ns = body.u64()?;
    let mut params = SamplingParams {
        max_tokens: body.u32()?,
        min_tokens: body.u32()?,
        stop_token_ids: body.i32s()?.into(),
        ..SamplingParams::default()
    };
    let (mut floats, mut ints) = ([0.0; NUM_FLOATS], [0; NUM_INTS]);
    for value in &mut floats {
        *value = body.f32()?;
    }
    for value in &mut ints {
        *value = body.i64()?;
    }
    params.set_numbers(floats, ints);
    if has(HAS_EOS) {
        params.eos_token_id = Some(body.i32()?);
    }
    if has(DETECTS_REPETITION) {
        params.repetition_detection = Some(RepetitionDetection::new(body.u32()?, body.u32()?, body.u32()?)?);
    }
    let fork_from = if has(HAS_FORK) { Some(RequestKey(body.u64()?)) } else { None };
    let payer = if has(HAS_PAYER) { decode_payer(body)? } else { Payer::default() };
    params.extras = if has(HAS_EXTRAS) { Some(Arc::new(decode_extras(body)?)) } else { None };
    if has(SAME_EXTRAS) {
        params.extras = previous.and_then(|previous| previous.params.extras.clone());
        if params.extras.is_none() {
            return Err(DecodeError::BadValue { what: "a set of request flags", value: flags.into() });
        }
    }
    let (prompt_token_ids, prediction, extra_keys) = match previous {
        Some(previous) if has(SAME_PROMPT) => {
            (previous.prompt_token_ids.clone(), previous.prediction.clone(), previous.extra_keys.clone())
        }
        _ => {
            let prompt_token_ids = body.i32s()?;
            let prediction = if has(HAS_PREDICTION) { Some(body.i32s()?.into()) } else { None };
            (prompt_token_ids, prediction, decode_extra_keys(body)?)
        }
    };
    Ok(NewRequest {
        key,
        request_id,
        prompt_token_ids,
        params,
        priority,
        payer,
        extra_keys,
        skip_reading_prefix_cache: has(SKIPS_PREFIX_CACHE),
        reports_prompt_progress: has(REPORTS_PROMPT_PROGRESS),
        has_stop_strings: has(HAS_STOP_STRINGS),
        waits_for_grammar: has(WAITS_FOR_GRAMMAR),
        grammar: None,
        prediction,
        fork_from,
        age_ns,
    })
}

fn decode_payer(body: &mut Reader<'_>) -> Result<Payer, DecodeError> {
    let payer = Payer { tenant: body.u64()?, user: body.u64()?, weight: body.u32()? };
    if !(1..=MAX_WEIGHT).contains(&payer.weight) {
        return Err(DecodeError::BadValue { what: "a weight", value: payer.weight.into() });
    }
    Ok(payer)
}

fn decode_extra_keys(body: &mut Reader<'_>) -> Result<ExtraKeys, DecodeError> {
    let first_block = body.bytes()?.into();
    let count = body.count(16)?;
    let mut multimodal = Vec::with_capacity(count);
    for _ in 0..count {
        let (offset, length) = (body.u32()?, body.u32()?);
        let (digest, content) = (body.bytes()?.into(), body.bytes()?.into());
        multimodal.push(MultimodalSpan { offset, length, digest, content });
    }
    Ok(ExtraKeys::from_encoded(first_block, multimodal))
}
