//! Frames: what goes in comes out, and no bytes at all make the decoder panic.

use std::{borrow::Cow, sync::Arc};

use ipc::{
    Challenge, ClientMessage, DecodeError, EngineFacts, EngineMessage, HEADER_BYTES, Hello, PROTOCOL_VERSION,
    Refusal, Welcome, key_of,
};
use proptest::{collection::vec, option, prelude::*};
use scheduler::{
    AddRequestError, EngineCoreOutput, ExtraKeys, FinishReason, GrammarKind, GrammarSpec, HistogramSnapshot,
    MAX_WEIGHT, MetricsSnapshot, MultimodalSpan, NewRequest, Payer, PooledVector, PredictedDrafts,
    PromptLogprobs, PromptTokens, RepetitionDetection, RequestError, RequestKey, RequestLimits,
    SamplingExtras, SamplingParams, ThinkingGate, TokenList, TokenLogprobs,
    sampling_params::{NUM_FLOATS, NUM_INTS},
};

const CLIENT: u32 = 0x00ab_cdef;

fn extras() -> impl Strategy<Value = SamplingExtras> {
    let bias = vec((0..i32::MAX, -100f32..100.0), 0..4);
    let words = vec(vec(0..i32::MAX, 1..4), 0..4);
    let arguments = option::of(".{0,8}");
    let ids = || vec(0..i32::MAX, 0..4);
    let of_prompt = option::of((any::<u32>(), any::<bool>(), vec(-1..i32::MAX, 1..6)));
    (bias, ids(), words, ids(), arguments, of_prompt).prop_map(
        |(bias, allowed, words, listed, arguments, of_prompt)| {
            let lists = [
                ("logit_bias", TokenList::Biases(bias)),
                ("allowed_token_ids", TokenList::Ids(allowed)),
                ("bad_words", TokenList::Words(words)),
                ("logprob_token_ids", TokenList::Ids(listed)),
            ];
            let extras = SamplingExtras::new(lists, arguments).expect("lists that may be");
            let Some((start, is_alone, ids)) = of_prompt else { return extras };
            let tokens = PromptTokens { start, is_alone, width: ids.len() as u32, ids: ids.into() };
            extras.with_prompt_tokens(tokens).expect("one row")
        },
    )
}

fn repetition_detection() -> impl Strategy<Value = RepetitionDetection> {
    (1..1000u32, 0..25u32, 2..=u32::MAX)
        .prop_map(|(min, more, count)| RepetitionDetection::new(min, min + more, count).expect("in range"))
}

fn sampling_params() -> impl Strategy<Value = SamplingParams> {
    let numbers = (
        any::<[u8; NUM_FLOATS]>().prop_map(|floats| floats.map(|value| 1e7 * f32::from(value) - 1e9)),
        any::<[i64; NUM_INTS]>(),
    );
    let ids = (any::<u32>(), any::<u32>(), option::of(any::<i32>()), vec(any::<i32>(), 0..5));
    let extras = option::of(extras().prop_map(Arc::new));
    let repetition = option::of(repetition_detection());
    (numbers, ids, extras, repetition).prop_map(|((floats, ints), ids, extras, repetition_detection)| {
        let (max_tokens, min_tokens, eos_token_id, stop_token_ids) = ids;
        let mut params = SamplingParams {
            max_tokens,
            min_tokens,
            eos_token_id,
            stop_token_ids: stop_token_ids.into(),
            repetition_detection,
            extras,
            ..SamplingParams::default()
        };
        params.set_numbers(floats, ints);
        params
    })
}

prop_compose! {
    fn extra_keys()(
        lora in option::of(".{0,8}"),
        salt in option::of(".{0,8}"),
        spans in vec((any::<u32>(), any::<u32>(), vec(any::<u8>(), 0..20), vec(any::<u8>(), 0..40)), 0..3),
    ) -> ExtraKeys {
        let spans = spans.into_iter().map(|(offset, length, digest, content)| {
            MultimodalSpan { offset, length, digest: digest.into(), content: content.into() }
        });
        ExtraKeys::new(lora.as_deref(), salt.as_deref(), spans.collect())
    }
}

prop_compose! {
    fn thinking_gate()(
        (open_id, close_id) in any::<(u32, u32)>(),
        begins_within in any::<bool>(),
        budget in option::of(any::<u32>()),
        end_ids in vec(any::<u32>(), 0..4),
    ) -> ThinkingGate {
        ThinkingGate { open_id, close_id, begins_within, budget, end_ids: end_ids.into() }
    }
}

prop_compose! {
    fn grammar_spec()(
        kind in 0..GrammarKind::ALL.len(),
        text in ".{0,40}",
        pattern in option::of(".{0,8}"),
        flags in any::<(bool, bool)>(),
        thinking in option::of(thinking_gate()),
    ) -> Arc<GrammarSpec> {
        Arc::new(GrammarSpec {
            kind: GrammarKind::ALL[kind],
            text: text.into(),
            whitespace_pattern: pattern.map(Into::into),
            disable_any_whitespace: flags.0,
            disable_additional_properties: flags.1,
            thinking,
        })
    }
}

fn payer() -> impl Strategy<Value = Payer> {
    let some = (any::<u64>(), any::<u64>(), 1..=MAX_WEIGHT);
    prop_oneof![
        Just(Payer::default()),
        some.prop_map(|(tenant, user, weight)| Payer { tenant, user, weight })
    ]
}

prop_compose! {
    fn new_request()(
        key in any::<u64>(),
        request_id in ".{0,20}",
        // Few different prompts: neighbours are often equal.
        prompt in prop_oneof![Just(vec![1, 2, 3]), vec(any::<i32>(), 0..300)],
        params in sampling_params(),
        priority in any::<i32>(),
        extra_keys in prop_oneof![Just(ExtraKeys::default()), extra_keys()],
        flags in any::<(bool, bool, bool, bool)>(),
        grammar in option::of(grammar_spec()),
        fork_from in option::of(any::<u64>()),
        age_ns in any::<u64>(),
        payer in payer(),
        prediction in option::of(prop_oneof![Just(vec![4, 5]), vec(any::<i32>(), 0..20)]),
    ) -> NewRequest {
        NewRequest {
            key: RequestKey(key),
            request_id: request_id.into(),
            prompt_token_ids: prompt,
            params,
            priority,
            payer,
            extra_keys,
            skip_reading_prefix_cache: flags.0,
            waits_for_grammar: flags.1 || grammar.is_some(),
            grammar,
            prediction: prediction.map(Into::into),
            reports_prompt_progress: flags.2,
            has_stop_strings: flags.3,
            fork_from: fork_from.map(RequestKey),
            age_ns,
        }
    }
}

fn client_message() -> impl Strategy<Value = ClientMessage> {
    let keys = vec(any::<u64>().prop_map(RequestKey), 0..20).boxed();
    let proof = option::of(any::<[u8; 32]>());
    prop_oneof![
        vec(new_request(), 1..5).prop_map(ClientMessage::AddRequests),
        keys.clone().prop_map(ClientMessage::Abort),
        keys.prop_map(ClientMessage::Stop),
        any::<(u64, bool)>()
            .prop_map(|(key, found_stop)| ClientMessage::Settle { key: RequestKey(key), found_stop }),
        any::<u64>().prop_map(ClientMessage::MetricsQuery),
        any::<u64>().prop_map(|key| ClientMessage::GrammarReady(RequestKey(key))),
        any::<u64>().prop_map(|key| ClientMessage::GrammarFailed(RequestKey(key))),
        any::<u64>().prop_map(ClientMessage::StatsQuery),
        any::<u64>().prop_map(ClientMessage::Ping),
        (any::<u64>(), "[a-z]{0,16}", vec(any::<u8>(), 0..50)).prop_map(|(id, kind, payload)| {
            ClientMessage::Query { id, kind: kind.into(), payload: payload.into() }
        }),
        (any::<u64>(), any::<[u8; 32]>(), proof).prop_map(|(capabilities, nonce, proof)| {
            ClientMessage::Hello(Hello { version: PROTOCOL_VERSION, capabilities, nonce, proof })
        }),
    ]
}

fn add_request_error() -> impl Strategy<Value = AddRequestError> {
    (any::<[u32; 3]>(), any::<i32>(), 0..11).prop_map(|([a, b, c], token_id, variant)| match variant {
        0 => AddRequestError::EmptyPrompt,
        1 => AddRequestError::PromptTooLong { num_prompt_tokens: a, max_model_len: b },
        2 => AddRequestError::NeverFits { needed_blocks: a, usable_blocks: b, block_size: c },
        3 => AddRequestError::PromptExceedsBudget { num_prompt_tokens: a, max_num_batched_tokens: b },
        4 => AddRequestError::TooManyStopTokenIds { got: a as usize },
        5 => AddRequestError::NegativeTokenId { token_id, position: a as usize },
        6 => AddRequestError::TooManyBeams { beam_width: i64::from(token_id), limit: a },
        7 => AddRequestError::WrongNumberOfBeams { beam_width: i64::from(token_id), got: a as usize },
        8 => AddRequestError::InputNotWhole { offset: a, length: b, most: c, num_prompt_tokens: a ^ b },
        9 => AddRequestError::QueueFull { queued: a, wanted: b, limit: c },
        _ => AddRequestError::QueueTokensFull { queued: a.into(), wanted: b.into(), limit: c.into() },
    })
}

prop_compose! {
    fn output(timestamp_ns: u64)(
        counter in 0u64..1 << 40,
        new_token_id in any::<i32>(),
        reason in 0usize..6,
        error in 0usize..7,
        is_plain in any::<bool>(),
        stop_reason in any::<i32>(),
        first in option::of(any::<(u64, u32)>()),
        predicted in option::of(any::<(u16, u16)>()),
    ) -> EngineCoreOutput {
        const REASONS: [FinishReason; 5] = [
            FinishReason::Stop, FinishReason::Length, FinishReason::Abort, FinishReason::Error,
            FinishReason::Repetition,
        ];
        const ERRORS: [RequestError; 13] = [
            RequestError::None, RequestError::DuplicateRequestId, RequestError::StepFailed,
            RequestError::NoToken, RequestError::GrammarRejected, RequestError::GrammarFailed,
            RequestError::ProcessorFailed, RequestError::ProcessorRefused, RequestError::AdapterMissing,
            RequestError::QueueTimeout, RequestError::GrammarsFull, RequestError::NothingAllowed,
            RequestError::TokenizerUnreadable,
        ];
        let (first_scheduled_ns, num_cached_tokens) = first.unwrap_or_default();
        let (num_accepted, num_rejected) = predicted.unwrap_or_default();
        EngineCoreOutput {
            key: key_of(CLIENT, counter),
            new_token_id,
            finish_reason: if is_plain { None } else { REASONS.get(reason).copied() },
            stop_reason: if is_plain { -1 } else { stop_reason },
            num_cached_tokens,
            first_scheduled_ns,
            timestamp_ns,
            error: if is_plain { RequestError::None } else { ERRORS[error] },
            predicted: PredictedDrafts { num_accepted, num_rejected },
        }
    }
}

prop_compose! {
    fn facts()(
        [max_model_len, block_size, num_blocks] in proptest::array::uniform3(1u32..),
        [max_num_seqs, max_num_queued_reqs, max_frame_bytes, pid, max_num_batched_tokens] in any::<[u32; 5]>(),
        enable_chunked_prefill in any::<bool>(),
        info in vec(any::<u8>(), 0..50),
    ) -> EngineFacts {
        let limits =
            RequestLimits { max_model_len, max_num_batched_tokens, enable_chunked_prefill, block_size, num_blocks, max_num_seqs };
        EngineFacts { limits, max_num_seqs, max_num_queued_reqs, max_frame_bytes, pid, info: info.into() }
    }
}

prop_compose! {
    fn token_logprobs()(
        counter in 0..1u64 << 40,
        rank in any::<u32>(),
        entries in vec((any::<i32>(), -1e9f32..0.0), 0..21),
    ) -> TokenLogprobs {
        TokenLogprobs { key: key_of(CLIENT, counter), rank, entries: entries.into() }
    }
}

prop_compose! {
    fn of_a_prompt()(
        counter in 0..1u64 << 40,
        first_position in 1..1u32 << 20,
        num_columns in 1..22u32,
        ranks in vec(any::<u32>(), 0..9),
        token_id in any::<i32>(),
        logprob in -1e9f32..0.0,
    ) -> PromptLogprobs {
        let num_entries = ranks.len() * num_columns as usize;
        PromptLogprobs {
            key: key_of(CLIENT, counter),
            first_position,
            num_columns,
            ranks: ranks.into(),
            token_ids: (0..num_entries).map(|entry| token_id ^ entry as i32).collect(),
            logprobs: (0..num_entries).map(|entry| logprob / (1.0 + entry as f32)).collect(),
        }
    }
}

prop_compose! {
    fn pooled()(
        counter in 0..1u64 << 40,
        values in vec(-1e9f32..1e9, 0..40),
    ) -> PooledVector {
        PooledVector { key: key_of(CLIENT, counter), values: values.into() }
    }
}

prop_compose! {
    fn histogram()(
        bounds in vec(any::<f64>(), 0..6),
        last in any::<u64>(),
        sum in any::<f64>(),
    ) -> HistogramSnapshot {
        let counts = (0..bounds.len() as u64).chain([last]).collect();
        HistogramSnapshot { bounds, counts, sum }
    }
}

fn metrics() -> impl Strategy<Value = MetricsSnapshot> {
    let name = || ".{0,9}".prop_map(Cow::Owned);
    let parts = (vec((name(), any::<u64>()), 0..5), vec((name(), histogram()), 0..5));
    parts.prop_map(|(counters, histograms)| MetricsSnapshot { counters, histograms })
}

fn engine_message() -> impl Strategy<Value = EngineMessage> {
    let keys = vec(any::<u64>().prop_map(RequestKey), 0..5);
    let proof = option::of(any::<[u8; 32]>());
    prop_oneof![
        any::<u64>().prop_flat_map(|time| vec(output(time), 1..30)).prop_map(EngineMessage::Outputs),
        vec(token_logprobs(), 0..9).prop_map(EngineMessage::Logprobs),
        vec(of_a_prompt(), 0..5).prop_map(EngineMessage::PromptLogprobs),
        vec(pooled(), 0..5).prop_map(EngineMessage::Pooled),
        (keys, add_request_error()).prop_map(|(keys, error)| EngineMessage::Refused { keys, error }),
        (any::<u64>(), vec((".{0,9}", any::<u64>()), 0..5))
            .prop_map(|(id, entries)| EngineMessage::Stats { id, entries }),
        (any::<u64>(), metrics()).prop_map(|(id, metrics)| EngineMessage::Metrics { id, metrics }),
        any::<(u64, u64, u64)>().prop_map(|(id, step_age_ns, num_steps)| EngineMessage::Pong {
            id,
            step_age_ns,
            num_steps
        }),
        ".*".prop_map(EngineMessage::Fatal),
        Just(EngineMessage::Goodbye),
        ".*".prop_map(EngineMessage::StepFailed),
        (any::<u64>(), vec(any::<u8>(), 0..50))
            .prop_map(|(id, answer)| EngineMessage::Reply { id, outcome: Ok(answer) }),
        (any::<u64>(), ".*").prop_map(|(id, why)| EngineMessage::Reply { id, outcome: Err(why) }),
        prop_oneof![
            any::<(u16, u16)>().prop_map(|(engine, client)| Refusal::Version { engine, client }),
            any::<u64>().prop_map(|missing| Refusal::Capabilities { missing }),
            Just(Refusal::Secret),
            any::<u32>().prop_map(|limit| Refusal::TooManyClients { limit }),
        ]
        .prop_map(EngineMessage::Rejected),
        (any::<u64>(), any::<bool>(), any::<[u8; 32]>()).prop_map(|(capabilities, needs_secret, nonce)| {
            let version = PROTOCOL_VERSION;
            EngineMessage::Challenge(Challenge { version, capabilities, needs_secret, nonce })
        }),
        (any::<u32>(), proof, facts()).prop_map(|(client_index, proof, facts)| {
            EngineMessage::Welcome(Welcome { client_index, proof, facts })
        }),
    ]
}

fn frame(encode: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let mut frame = Vec::new();
    encode(&mut frame);
    let length = u32::from_le_bytes(frame[..4].try_into().expect("four bytes"));
    assert_eq!(length as usize, frame.len() - HEADER_BYTES);
    frame
}

/// The multimodal inputs of a message, which its words leave out.
fn contents(message: &ClientMessage) -> Vec<Vec<u8>> {
    let ClientMessage::AddRequests(requests) = message else { return Vec::new() };
    let spans = requests.iter().flat_map(|request| request.extra_keys.multimodal());
    spans.map(|span| span.content.to_vec()).collect()
}

proptest! {
    #[test]
    fn a_clients_message_comes_out_as_it_went_in(message in client_message()) {
        let bytes = frame(|buffer| message.encode(buffer));
        let decoded = ClientMessage::decode(bytes[4], &bytes[HEADER_BYTES..], 100).expect("whole");
        // No equality for requests in the scheduler; their words are as good.
        prop_assert_eq!(format!("{decoded:?}"), format!("{message:?}"));
        prop_assert_eq!(contents(&decoded), contents(&message));
    }

    #[test]
    fn an_engines_message_comes_out_as_it_went_in(message in engine_message()) {
        let bytes = frame(|buffer| message.encode(buffer));
        let decoded = EngineMessage::decode(bytes[4], &bytes[HEADER_BYTES..], CLIENT).expect("whole");
        prop_assert_eq!(decoded, message);
    }

    #[test]
    fn a_part_of_a_frame_is_an_error(message in client_message(), answer in engine_message(), cut in any::<prop::sample::Index>()) {
        let bytes = frame(|buffer| message.encode(buffer));
        let body = &bytes[HEADER_BYTES..];
        let part = &body[..cut.index(body.len())];
        prop_assert!(ClientMessage::decode(bytes[4], part, 100).is_err());
        let mut longer = body.to_vec();
        longer.push(0);
        prop_assert!(ClientMessage::decode(bytes[4], &longer, 100).is_err());
        // Outputs may end behind any record; whatever is read, nothing panics.
        let bytes = frame(|buffer| answer.encode(buffer));
        let body = &bytes[HEADER_BYTES..];
        let _ = EngineMessage::decode(bytes[4], &body[..cut.index(body.len() + 1)], CLIENT);
    }

    #[test]
    fn no_bytes_make_the_decoder_panic(kind in any::<u8>(), body in vec(any::<u8>(), 0..400)) {
        let _ = ClientMessage::decode(kind, &body, 100);
        let _ = EngineMessage::decode(kind, &body, CLIENT);
    }

    #[test]
    fn wrong_bits_make_the_decoder_neither_panic_nor_take_memory(
        message in client_message(),
        flips in vec((any::<prop::sample::Index>(), 0u8..8), 1..5),
    ) {
        let mut bytes = frame(|buffer| message.encode(buffer));
        for (at, bit) in flips {
            let at = HEADER_BYTES + at.index(bytes.len() - HEADER_BYTES);
            bytes[at] ^= 1 << bit;
        }
        let _ = ClientMessage::decode(bytes[4], &bytes[HEADER_BYTES..], 100);
    }
}

#[test]
fn a_group_that_is_too_large_is_refused() {
    let request = NewRequest::new(RequestKey(1), "a", vec![1], SamplingParams::default());
    let bytes = frame(|buffer| ClientMessage::AddRequests(vec![request.clone(); 3]).encode(buffer));
    let error = ClientMessage::decode(bytes[4], &bytes[HEADER_BYTES..], 2).expect_err("three");
    assert_eq!(error, DecodeError::BadValue { what: "a possible number of requests", value: 3 });
}

#[test]
fn samples_carry_their_grammar_once() {
    let spec = Arc::new(GrammarSpec::new(GrammarKind::Regex, &"a".repeat(10_000)));
    let request = NewRequest {
        grammar: Some(spec),
        ..NewRequest::new(RequestKey(1), "a", vec![1], SamplingParams::default())
    };
    let bytes = frame(|buffer| ClientMessage::AddRequests(vec![request.clone(); 8]).encode(buffer));
    assert!((10_000..11_500).contains(&bytes.len()), "{} bytes", bytes.len());
    let read = ClientMessage::decode(bytes[4], &bytes[HEADER_BYTES..], 100).expect("whole");
    let ClientMessage::AddRequests(read) = read else { panic!("requests") };
    assert!(read.iter().all(|read| read.grammar == request.grammar));
}

#[test]
fn a_group_carries_its_prompt_once() {
    let request = NewRequest::new(RequestKey(1), "a", vec![1; 10_000], SamplingParams::default());
    let bytes = frame(|buffer| ClientMessage::AddRequests(vec![request.clone(); 8]).encode(buffer));
    assert!(bytes.len() < 41_500, "{} bytes", bytes.len());
}
