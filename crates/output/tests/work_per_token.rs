//! A token costs the same at any place of an answer: what a request remembers at token 100,000 is what it remembered at
//! token 100, to the letter, so the same next token is the same work. `examples/detokenize_cost.rs` has the time.

mod support;

use std::sync::Arc;

use output::{DetokenizeOptions, IncrementalDetokenizer, StopChecker, StopStrings, Tokenizer};

const NUM_TOKENS: usize = 100_000;
/// A chain that only the library can decode costs microseconds per token; so many are enough to see it grow.
const NUM_SLOW_TOKENS: usize = 5_000;
const TEXT: &str = "The quick brown fox — naïve, 12.5 €, 日本語 😀👨‍👩‍👧‍👦 e\u{301} 한국어 — jumps.\n";

/// What a detokeniser remembers: all that it shows of itself but the tokenizer, which no request owns.
fn memory_of(detokenizer: &IncrementalDetokenizer) -> String {
    let shown = format!("{detokenizer:?}");
    let start = shown.rfind("options: DetokenizeOptions").expect("its options come after the tokenizer");
    shown[start..].to_owned()
}

/// The text of one more turn through the same tokens.
fn turn(detokenizer: &mut IncrementalDetokenizer, ids: &[u32]) -> String {
    let mut text = String::new();
    for &id in ids {
        detokenizer.push(id, &mut text);
    }
    text
}

/// Goes through the same tokens again and again, and compares text and memory at the end with those near token 100.
fn check(name: &str, tokenizer: &Arc<Tokenizer>, ids: &[u32], num_tokens: usize) {
    let mut detokenizer =
        IncrementalDetokenizer::new(Arc::clone(tokenizer), &[], DetokenizeOptions::default());
    for _ in 0..100_usize.div_ceil(ids.len()) {
        turn(&mut detokenizer, ids); // the beginning of a text may be special
    }
    let text = turn(&mut detokenizer, ids);
    let memory = memory_of(&detokenizer);
    for _ in 0..num_tokens / ids.len() {
        assert_eq!(turn(&mut detokenizer, ids), text, "{name}");
    }
    assert_eq!(memory_of(&detokenizer), memory, "{name}");
}

#[test]
fn real_tokenizers_remember_no_more_after_100_000_tokens() {
    for (name, tokenizer) in support::all_shared() {
        let ids = tokenizer.encode(TEXT, false).expect("encodes");
        assert!(ids.len() > 20, "{name}");
        check(name, &tokenizer, &ids, NUM_TOKENS);
    }
}

#[test]
fn tokenizers_of_every_kind_remember_no_more_after_100_000_tokens() {
    for (name, tokenizer, num_tokens) in [
        ("byte level", support::byte_level(), NUM_TOKENS),
        ("byte fallback", support::byte_fallback(), NUM_TOKENS),
        ("byte fallback without strip", support::byte_fallback_without_strip(), NUM_TOKENS),
        ("metaspace", support::metaspace(), NUM_TOKENS),
        ("word piece", support::word_piece(true), NUM_TOKENS),
        ("words", support::words(), NUM_TOKENS),
        ("fuse", support::fuse(), NUM_TOKENS),
        ("a chain that the table does not know", support::word_suffix(), NUM_SLOW_TOKENS),
    ] {
        // The whole vocabulary: halves of characters, special tokens, what stands for nothing. The last is plain text, so
        // that each turn begins alike.
        let last = tokenizer.token_to_id("a").expect("a token");
        let ids: Vec<u32> = (0..=tokenizer.max_token_id().expect("not empty")).chain([last]).collect();
        check(name, &tokenizer, &ids, num_tokens);
    }
}

#[test]
fn a_run_of_invalid_bytes_is_not_remembered() {
    let tokenizer = support::byte_fallback();
    let id = tokenizer.token_to_id("<0xFF>").expect("a token");
    check("invalid bytes", &tokenizer, &[id], NUM_TOKENS);
}

#[test]
fn a_stop_checker_remembers_no_more_than_a_stop_string() {
    let stop = ["jumps over".to_owned(), "\n\nUser:".to_owned(), "日本語 😀!".to_owned()];
    for include in [false, true] {
        let mut checker =
            StopChecker::new(Arc::new(StopStrings::new(stop.to_vec()).expect("valid")), include);
        let mut turn = |released: &mut String| {
            released.clear();
            for character in TEXT.chars() {
                assert_eq!(checker.push(character.encode_utf8(&mut [0; 4]), true, released), None);
            }
            format!("{checker:?}")
        };
        let (mut released, mut expected) = (String::new(), String::new());
        turn(&mut released);
        let memory = turn(&mut expected);
        for _ in 0..NUM_TOKENS / TEXT.len() {
            assert_eq!(turn(&mut released), memory);
            assert_eq!(released, expected);
        }
    }
}
