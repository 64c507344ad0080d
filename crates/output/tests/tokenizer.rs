//! The tokenizer shell: what the library is asked for, and what happens with input that is not a tokenizer.

mod support;

use output::{DetokenizeOptions, IncrementalDetokenizer, MAX_TOKEN_ID, OutputError, Tokenizer};
use serde_json::{Value, json};

#[test]
fn gpt2_knows_its_words() {
    let Some(tokenizer) = support::shared("gpt2-tokenizer") else { return };
    assert_eq!(tokenizer.vocab_size(), 50_257);
    assert_eq!(tokenizer.max_token_id(), Some(50_256));
    assert_eq!(tokenizer.special_token_ids(), [50_256]);
    assert_eq!(tokenizer.encode("Hello", true).expect("encodes"), [15_496]);
    assert_eq!(tokenizer.encode("Hello, my name is", true).expect("encodes").len(), 5);
    assert_eq!(tokenizer.decode(&[15_496, 995, 50_256], true).expect("decodes"), "Hello world");
    assert_eq!(tokenizer.decode(&[15_496, 995, 50_256], false).expect("decodes"), "Hello world<|endoftext|>");
    assert_eq!(tokenizer.id_to_token(995).as_deref(), Some("Ġworld"));
    assert_eq!(tokenizer.token_to_id("Ġworld"), Some(995));
    assert_eq!((tokenizer.id_to_token(60_000), tokenizer.token_to_id("no such token")), (None, None));
    let batch = tokenizer.encode_batch(&["Hello", "", " world"], true).expect("encodes");
    assert_eq!(batch, [vec![15_496], vec![], vec![995]]);
}

#[test]
fn a_post_processor_adds_bos_only_when_asked() {
    let Some(tokenizer) = support::shared("stories260K/hf") else { return };
    assert_eq!(tokenizer.encode("", true).expect("encodes"), [1]);
    assert!(tokenizer.encode("", false).expect("encodes").is_empty());
    assert_eq!(tokenizer.encode("Once", true).expect("encodes")[0], 1);
}

#[test]
fn ids_that_stand_for_nothing_decode_to_nothing() {
    for tokenizer in
        [support::byte_level(), support::byte_fallback(), support::words(), support::word_suffix()]
    {
        let special = tokenizer.special_token_ids();
        for ids in [&[][..], &[u32::MAX, MAX_TOKEN_ID], special] {
            assert_eq!(tokenizer.decode(ids, true).expect("decodes"), "");
        }
    }
}

#[test]
fn what_is_no_tokenizer_is_an_error_that_says_where() {
    let missing = Tokenizer::from_file("/nonexistent/tokenizer.json").expect_err("no file");
    assert!(missing.to_string().contains("/nonexistent/tokenizer.json"), "{missing}");
    for data in
        [&b""[..], b"{}", b"null", b"[1, 2", b"\xff\xfe", br#"{"version": "1.0", "model": {"type": "BPE"}}"#]
    {
        let error = Tokenizer::from_bytes(data).expect_err("no tokenizer");
        assert!(matches!(error, OutputError::ParseTokenizer { .. }), "{error}");
    }
}

fn minimal() -> Value {
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
           "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
           "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<unk>": 2}, "unk_token": "<unk>"}})
}

fn load(file: &Value) -> Result<Tokenizer, OutputError> {
    Tokenizer::from_bytes(file.to_string().as_bytes())
}

#[test]
fn an_id_too_large_for_a_table_is_refused() {
    let mut file = minimal();
    file["model"]["vocab"]["huge"] = json!(u32::MAX);
    let error = load(&file).expect_err("too large");
    assert!(matches!(&error, OutputError::TokenIdTooLarge { token, .. } if token == "huge"), "{error}");
    assert!(error.to_string().contains(&u32::MAX.to_string()), "{error}");
}

#[test]
fn truncation_and_padding_of_the_file_are_not_applied() {
    let mut file = minimal();
    file["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    file["padding"] = json!({"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 2,
                             "pad_type_id": 0, "pad_token": "<unk>"});
    let tokenizer = load(&file).expect("valid");
    assert_eq!(tokenizer.encode("a b a b", true).expect("encodes"), [0, 1, 0, 1]);
}

#[test]
fn a_panic_in_the_library_is_an_error() {
    let mut file = minimal();
    // The library's Strip counts below zero on a token shorter than what it strips.
    file["decoder"] = json!({"type": "Strip", "content": "a", "start": 0, "stop": 3});
    let tokenizer = load(&file).expect("valid");
    let error = tokenizer.decode(&[0, 1], true).expect_err("the decoder fails");
    assert!(matches!(error, OutputError::Decode { num_tokens: 2, .. }), "{error}");
    let mut detokenizer = IncrementalDetokenizer::new(tokenizer.into(), &[0], DetokenizeOptions::default());
    let mut text = String::new();
    detokenizer.push(0, &mut text);
    detokenizer.finish(&mut text);
    assert_eq!(text, "");
}
