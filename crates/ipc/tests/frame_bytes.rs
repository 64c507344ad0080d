//! Frames: the bytes of each kind are fixed. A change here is a change of `PROTOCOL_VERSION`.

use std::sync::Arc;

use ipc::{
    Challenge, ClientMessage, EngineFacts, EngineMessage, HEADER_BYTES, Hello, Refusal, Welcome, key_of,
};
use scheduler::{
    AddRequestError, EngineCoreOutput, FinishReason, NewRequest, Payer, PooledVector, PredictedDrafts,
    PromptLogprobs, PromptTokens, RepetitionDetection, RequestError, RequestKey, RequestLimits,
    SamplingExtras, SamplingParams, TokenList, TokenLogprobs,
};

const CLIENT: u32 = 0x00ab_cdef;

fn frame(encode: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let mut frame = Vec::new();
    encode(&mut frame);
    let length = u32::from_le_bytes(frame[..4].try_into().expect("four bytes"));
    assert_eq!(length as usize, frame.len() - HEADER_BYTES);
    frame
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes all");
        text
    })
}

fn client_hex(message: &ClientMessage) -> String {
    hex(&frame(|buffer| message.encode(buffer)))
}

fn engine_hex(message: &EngineMessage) -> String {
    hex(&frame(|buffer| message.encode(buffer)))
}

#[test]
fn the_bytes_of_a_clients_frames_are_these() {
    let lists = [
        ("logit_bias", TokenList::Biases(vec![(7, 0.5)])),
        ("allowed_token_ids", TokenList::Ids(vec![9])),
        ("bad_words", TokenList::Words(vec![vec![3, 4]])),
        ("logprob_token_ids", TokenList::Ids(vec![8])),
    ];
    let extras = SamplingExtras::new(lists, Some("{}".to_owned())).expect("lists that may be");
    let of_prompt = PromptTokens { start: 3, is_alone: true, width: 1, ids: [6, -1].into() };
    let extras = extras.with_prompt_tokens(of_prompt).expect("rows");
    let request = NewRequest {
        priority: -2,
        payer: Payer { tenant: 0x0506, user: 7, weight: 3 },
        fork_from: Some(RequestKey(9)),
        age_ns: 0x0304,
        has_stop_strings: true,
        prediction: Some([6, 7].into()),
        params: SamplingParams {
            eos_token_id: Some(2),
            stop_token_ids: [5].into(),
            repetition_detection: Some(RepetitionDetection::new(4, 20, 3).expect("in range")),
            extras: Some(Arc::new(extras)),
            ..SamplingParams::default()
        },
        ..NewRequest::new(RequestKey(0x0102), "ab", vec![1, -1], SamplingParams::default())
    };
    let nonce = [0x11; 32];
    let eleven = "11".repeat(32);
    let proof = Some([0x22; 32]);
    let proof_hex = format!("01{}", "22".repeat(32));
    let hello = Hello { version: 4, capabilities: 3, nonce, proof };
    let clients = [
        (
            ClientMessage::Hello(hello),
            format!("4f000000 01 72766c6d 0400 0300000000000000 {eleven} {proof_hex}"),
        ),
        (
            ClientMessage::AddRequests(vec![request]),
            "1d010000 02 01000000 380f 0201000000000000 02000000 6162 feffffff 0403000000000000 10000000 00000000 01000000 05000000 \
             0000803f 0000803f 00000000 00000000 00000000 00000000 0000803f 0000803f 0000000000000000 0000000000000000 ffffffffffffffff ffffffffffffffff \
             0000000000000000 0000000000000000 0000000000000000 02000000 04000000 14000000 03000000 0900000000000000 \
             0605000000000000 0700000000000000 03000000 \
             01000000 07000000 0000003f 01000000 09000000 01000000 02000000 03000000 04000000 01000000 08000000 \
             01 03000000 01 01000000 02000000 06000000 ffffffff 01 02000000 7b7d \
             02000000 01000000 ffffffff 02000000 06000000 07000000 00000000 00000000"
                .to_owned(),
        ),
        (
            ClientMessage::Abort(vec![RequestKey(1)]),
            "0c000000 03 01000000 0100000000000000".to_owned(),
        ),
        (ClientMessage::GrammarReady(RequestKey(1)), "08000000 04 0100000000000000".to_owned()),
        (ClientMessage::GrammarFailed(RequestKey(1)), "08000000 05 0100000000000000".to_owned()),
        (ClientMessage::StatsQuery(1), "08000000 06 0100000000000000".to_owned()),
        (ClientMessage::Ping(1), "08000000 07 0100000000000000".to_owned()),
        (ClientMessage::MetricsQuery(1), "08000000 08 0100000000000000".to_owned()),
        (ClientMessage::Stop(vec![RequestKey(1)]), "0c000000 0a 01000000 0100000000000000".to_owned()),
        (
            ClientMessage::Settle { key: RequestKey(1), found_stop: true },
            "09000000 0b 0100000000000000 01".to_owned(),
        ),
        (
            ClientMessage::Query { id: 1, kind: "ab".into(), payload: [0xee].into() },
            "13000000 09 0100000000000000 02000000 6162 01000000 ee".to_owned(),
        ),
    ];
    for (message, expected) in &clients {
        assert_eq!(client_hex(message), expected.replace(' ', ""), "{message:?}");
    }
}

#[test]
fn the_bytes_of_an_engines_frames_are_these() {
    let nonce = [0x11; 32];
    let eleven = "11".repeat(32);
    let proof = Some([0x22; 32]);
    let proof_hex = format!("01{}", "22".repeat(32));
    let token = EngineCoreOutput {
        key: key_of(CLIENT, 7),
        new_token_id: 42,
        finish_reason: None,
        stop_reason: -1,
        num_cached_tokens: 0,
        first_scheduled_ns: 0,
        timestamp_ns: 0x55,
        error: RequestError::None,
        predicted: PredictedDrafts::NONE,
    };
    let first = EngineCoreOutput { num_cached_tokens: 16, first_scheduled_ns: 0x44, ..token };
    let predicted = PredictedDrafts { num_accepted: 3, num_rejected: 1 };
    let last =
        EngineCoreOutput { finish_reason: Some(FinishReason::Stop), stop_reason: 3, predicted, ..token };
    let limits = RequestLimits {
        max_model_len: 1,
        max_num_batched_tokens: 2,
        enable_chunked_prefill: true,
        block_size: 3,
        num_blocks: 4,
        max_num_seqs: 5,
    };
    let info = [0xee].as_slice().into();
    let facts =
        EngineFacts { limits, max_num_seqs: 5, max_num_queued_reqs: 6, max_frame_bytes: 7, pid: 8, info };
    let challenge = Challenge { version: 4, capabilities: 3, needs_secret: true, nonce };
    let engines = [
        (
            EngineMessage::Challenge(challenge),
            format!("2f000000 80 72766c6d 0400 0300000000000000 01 {eleven}"),
        ),
        (
            EngineMessage::Welcome(Welcome { client_index: 1, proof, facts }),
            format!(
                "4b000000 81 01000000 {proof_hex} 01000000 02000000 03000000 04000000 01 05000000 06000000 07000000 \
                 08000000 01000000 ee"
            ),
        ),
        (
            EngineMessage::Rejected(Refusal::Version { engine: 1, client: 2 }),
            "05000000 82 01 0100 0200".to_owned(),
        ),
        (
            EngineMessage::Refused {
                keys: vec![RequestKey(1)],
                error: AddRequestError::QueueFull { queued: 8, wanted: 2, limit: 9 },
            },
            "19000000 83 01000000 0100000000000000 07 08000000 02000000 09000000".to_owned(),
        ),
        (
            EngineMessage::Refused {
                keys: vec![RequestKey(1)],
                error: AddRequestError::QueueTokensFull { queued: 8, wanted: 2, limit: 9 },
            },
            "25000000 83 01000000 0100000000000000 08 0800000000000000 0200000000000000 0900000000000000"
                .to_owned(),
        ),
        (
            EngineMessage::Outputs(vec![first, token, last]),
            "42000000 84 5500000000000000 \
             0700000000010000 2a000000 4400000000000000 10000000 \
             0700000000000000 2a000000 \
             0700000000060000 2a000000 01 00 03000000 0300 0100"
                .to_owned(),
        ),
        (
            EngineMessage::Stats { id: 1, entries: vec![("a".to_owned(), 2)] },
            "19000000 85 0100000000000000 01000000 01000000 61 0200000000000000".to_owned(),
        ),
        (
            EngineMessage::Pong { id: 1, step_age_ns: 2, num_steps: 3 },
            "18000000 86 0100000000000000 0200000000000000 0300000000000000".to_owned(),
        ),
        (EngineMessage::Fatal("no".to_owned()), "06000000 87 02000000 6e6f".to_owned()),
        (EngineMessage::Goodbye, "00000000 88".to_owned()),
        (EngineMessage::StepFailed("no".to_owned()), "06000000 89 02000000 6e6f".to_owned()),
    ];
    for (message, expected) in &engines {
        assert_eq!(engine_hex(message), expected.replace(' ', ""), "{message:?}");
    }
}

#[test]
fn the_bytes_of_an_engines_log_probabilities_are_these() {
    let frames = [
        (
            EngineMessage::Logprobs(vec![TokenLogprobs {
                key: key_of(CLIENT, 7),
                rank: 2,
                entries: [(42, -1.0), (3, -0.5)].into(),
            }]),
            "20000000 8a 0700000000000000 02000000 02000000 2a000000 000080bf 03000000 000000bf".to_owned(),
        ),
        (
            EngineMessage::PromptLogprobs(vec![PromptLogprobs {
                key: key_of(CLIENT, 7),
                first_position: 1,
                num_columns: 2,
                ranks: [1, 4].into(),
                token_ids: [42, 3, 8, -1].into(),
                logprobs: [-1.0, -0.5, -2.0, 0.0].into(),
            }]),
            "3c000000 8b 0700000000000000 01000000 02000000 02000000 \
             01000000 2a000000 000080bf 03000000 000000bf 04000000 08000000 000000c0 ffffffff 00000000"
                .to_owned(),
        ),
        (
            EngineMessage::Pooled(vec![PooledVector { key: key_of(CLIENT, 7), values: [1.0, -0.5].into() }]),
            "14000000 8e 0700000000000000 02000000 0000803f 000000bf".to_owned(),
        ),
    ];
    for (message, expected) in &frames {
        assert_eq!(engine_hex(message), expected.replace(' ', ""), "{message:?}");
    }
}
