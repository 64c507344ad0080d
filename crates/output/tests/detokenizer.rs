//! Incremental detokenisation against the library's full decode: random tokens and awkward text, on small tokenizers of
//! every kind and on real ones.

mod support;

use std::sync::Arc;

use output::{DetokenizeOptions, IncrementalDetokenizer, Tokenizer};
use proptest::prelude::*;

/// Everything a detokeniser emits, token by token.
fn stream(tokenizer: &Arc<Tokenizer>, context: &[u32], output: &[u32], options: DetokenizeOptions) -> String {
    let mut detokenizer = IncrementalDetokenizer::new(Arc::clone(tokenizer), context, options);
    let mut text = String::new();
    for &token_id in output {
        detokenizer.push(token_id, &mut text);
    }
    detokenizer.finish(&mut text);
    text
}

/// `decode(context + output)` without `decode(context)`. Where the prompt's text is not a prefix because it ended inside a
/// character, what both have in common belongs to the prompt.
fn difference(tokenizer: &Tokenizer, context: &[u32], output: &[u32], skip_special_tokens: bool) -> String {
    let before = tokenizer.decode(context, skip_special_tokens).expect("decodes");
    let after = tokenizer.decode(&[context, output].concat(), skip_special_tokens).expect("decodes");
    let common: usize =
        before.chars().zip(after.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
    after[common..].to_owned()
}

/// The byte of a byte-fallback token.
fn byte_of(tokenizer: &Tokenizer, token_id: u32) -> Option<u8> {
    let token = tokenizer.id_to_token(token_id)?;
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok()
}

/// As `difference`, for byte fallback, where whole characters at the prompt's end are the prompt's, whatever bytes follow: they
/// are replaced by a token of plain text.
fn difference_with_fallback(tokenizer: &Tokenizer, context: &[u32], output: &[u32], skip: bool) -> String {
    let seen: Vec<u32> = context
        .iter()
        .copied()
        .filter(|&id| {
            tokenizer.id_to_token(id).is_some() && !(skip && tokenizer.special_token_ids().contains(&id))
        })
        .collect();
    let run_start = seen.iter().rposition(|&id| byte_of(tokenizer, id).is_none()).map_or(0, |last| last + 1);
    let run: Vec<u8> = seen[run_start..].iter().filter_map(|&id| byte_of(tokenizer, id)).collect();
    let num_whole = match std::str::from_utf8(&run) {
        Ok(_) => run.len(),
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        Err(_) => 0,
    };
    if num_whole == 0 {
        return difference(tokenizer, &seen, output, skip);
    }
    let plain = tokenizer.token_to_id("a").expect("a plain token");
    let context = [&seen[..run_start], &[plain], &seen[run_start + num_whole..]].concat();
    difference(tokenizer, &context, output, skip)
}

fn options(skip_special_tokens: bool) -> DetokenizeOptions {
    DetokenizeOptions { skip_special_tokens, spaces_between_special_tokens: true }
}

fn check(tokenizer: &Arc<Tokenizer>, context: &[u32], output: &[u32], skip: bool) {
    let expected = difference_with_fallback(tokenizer, context, output, skip);
    let streamed = stream(tokenizer, context, output, options(skip));
    let tokens = |ids: &[u32]| ids.iter().map(|&id| tokenizer.id_to_token(id)).collect::<Vec<_>>();
    assert_eq!(streamed, expected, "context {:?} output {:?} skip {skip}", tokens(context), tokens(output));
}

/// Ids of a whole vocabulary and a few beyond it.
fn any_ids(tokenizer: &Tokenizer, len: usize) -> BoxedStrategy<Vec<u32>> {
    let last = tokenizer.max_token_id().expect("not empty");
    prop::collection::vec(0..=last + 2, 0..len).boxed()
}

/// Bytes that make and break characters, as ids of byte tokens; a few other ids between.
fn byte_ids(tokenizer: &Tokenizer, byte_level: bool) -> BoxedStrategy<Vec<u32>> {
    let id_of = |byte: u8| {
        let token = if byte_level { byte_character(byte) } else { format!("<0x{byte:02X}>") };
        tokenizer.token_to_id(&token).expect("a byte token")
    };
    let bytes = [0x20, 0x41, 0xC3, 0xA9, 0xE5, 0x8F, 0xAB, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xED, 0xCC, 0x81];
    let mut ids: Vec<u32> = bytes.iter().map(|&byte| id_of(byte)).collect();
    let last = tokenizer.max_token_id().expect("not empty");
    ids.extend([1, 2, 3, last, last - 1, last + 1]);
    let whole = |text: &str| text.bytes().map(id_of).collect::<Vec<_>>();
    let parts = prop_oneof![
        3 => prop::sample::select(ids).prop_map(|id| vec![id]),
        1 => prop::sample::select(vec![whole("é"), whole("叫"), whole("😀"), whole("\u{301}")]),
    ];
    prop::collection::vec(parts, 0..12).prop_map(|parts| parts.concat()).boxed()
}

/// GPT-2's character for a byte: itself where that can be printed, else one from U+0100 on.
fn byte_character(byte: u8) -> String {
    let is_printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_printable(byte) {
        return char::from(byte).to_string();
    }
    let index = (0..byte).filter(|&before| !is_printable(before)).count();
    char::from_u32(0x100 + index as u32).expect("a character").to_string()
}

macro_rules! random_tokens {
    ($($name:ident => $tokenizer:expr;)*) => {$(
        #[test]
        fn $name() {
            let tokenizer = $tokenizer;
            let ids = any_ids(&tokenizer, 12);
            proptest!(support::cases(1000), |(context in ids.clone(), output in ids, skip: bool)| {
                check(&tokenizer, &context, &output, skip);
            });
        }
    )*};
}

random_tokens! {
    random_tokens_byte_level => support::byte_level();
    random_tokens_byte_fallback => support::byte_fallback();
    random_tokens_byte_fallback_without_strip => support::byte_fallback_without_strip();
    random_tokens_metaspace => support::metaspace();
    random_tokens_word_piece => support::word_piece(false);
    random_tokens_word_piece_with_cleanup => support::word_piece(true);
    random_tokens_words => support::words();
    random_tokens_fuse => support::fuse();
    random_tokens_unknown_chain => support::word_suffix();
}

#[test]
fn random_bytes() {
    let tokenizers = [
        (support::byte_level(), true),
        (support::byte_fallback(), false),
        (support::byte_fallback_without_strip(), false),
    ];
    for (tokenizer, byte_level) in tokenizers {
        let ids = byte_ids(&tokenizer, byte_level);
        proptest!(support::cases(5000), |(context in ids.clone(), output in ids, skip: bool)| {
            check(&tokenizer, &context, &output, skip);
        });
    }
}

#[test]
fn random_tokens_of_real_tokenizers() {
    for (name, tokenizer) in support::all_shared() {
        support::note(name);
        let few = prop::collection::vec(0..tokenizer.max_token_id().expect("not empty").min(300), 0..40);
        let ids = prop_oneof![any_ids(&tokenizer, 40), few].boxed();
        proptest!(support::cases(500), |(context in ids.clone(), output in ids, skip: bool)| {
            check(&tokenizer, &context, &output, skip);
        });
    }
}

/// Text with what breaks detokenisers: emoji with joiners and modifiers, scripts outside small vocabularies, combining
/// marks, control characters, spaces of all kinds, replacement characters, special tokens spelled out.
fn awkward_text() -> impl Strategy<Value = String> {
    let parts = prop::sample::select(vec![
        "Hello",
        " world",
        "  ",
        " ",
        "\n",
        "\t",
        "don't",
        " 123",
        "👨‍👩‍👧‍👦",
        "👍🏽",
        "🇩🇪",
        "😀",
        "日本語",
        "漢",
        "한국어",
        "ไทย",
        "ខ្មែរ",
        "العربية",
        "e\u{301}",
        "Z\u{351}\u{36B}\u{343}",
        "\u{FFFD}",
        "\u{0}",
        "\u{7F}",
        "\u{200B}",
        "\u{A0}",
        "ﬁ",
        "ß",
        "İ",
        "▁",
        "Ġ",
        "<0x41>",
        "<s>",
        "</s>",
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|user|>",
    ])
    .prop_map(str::to_owned);
    let part = prop_oneof![4 => parts, 1 => any::<char>().prop_map(String::from), 1 => "\\PC{1,6}"];
    prop::collection::vec(part, 0..14).prop_map(|parts| parts.concat())
}

#[test]
fn awkward_text_of_real_tokenizers() {
    for (name, tokenizer) in support::all_shared() {
        support::note(name);
        let texts = (awkward_text(), any::<prop::sample::Index>(), any::<prop::sample::Index>());
        proptest!(support::cases(800), |((text, split, end) in texts, skip: bool, bos: bool)| {
            let ids = tokenizer.encode(&text, bos).expect("encodes");
            // Any place may end the prompt, and any place the answer: inside a character too.
            let end = end.index(ids.len() + 1);
            let split = split.index(end + 1);
            check(&tokenizer, &ids[..split], &ids[split..end], skip);
        });
    }
}

#[test]
fn the_first_token_keeps_the_spacing_the_prompt_gives_it() {
    let tokenizer = support::byte_fallback();
    let [a, bos] = ["▁a", "<s>"].map(|token| tokenizer.token_to_id(token).expect("a token"));
    assert_eq!(stream(&tokenizer, &[a], &[a, a], options(true)), " a a");
    assert_eq!(stream(&tokenizer, &[bos], &[a, a], options(true)), "a a");
    assert_eq!(stream(&tokenizer, &[bos], &[a, a], options(false)), " a a");
    assert_eq!(stream(&tokenizer, &[], &[a, a], options(true)), "a a");
}

#[test]
fn a_character_appears_when_it_is_whole() {
    let tokenizer = support::byte_level();
    let ids: Vec<u32> =
        ["ðŁ", "ĳĭ", "the"].map(|token| tokenizer.token_to_id(token).expect("a token")).to_vec();
    let mut detokenizer = IncrementalDetokenizer::new(Arc::clone(&tokenizer), &[], options(true));
    let mut texts = Vec::new();
    for &id in &ids {
        let mut text = String::new();
        detokenizer.push(id, &mut text);
        texts.push(text);
    }
    assert_eq!(texts, ["", "👋", "the"]);
}

#[test]
fn an_invalid_run_of_byte_tokens_is_not_held_back() {
    let tokenizer = support::byte_fallback();
    let id = |byte: u8| tokenizer.token_to_id(&format!("<0x{byte:02X}>")).expect("a token");
    let mut detokenizer = IncrementalDetokenizer::new(Arc::clone(&tokenizer), &[], options(true));
    let mut text = String::new();
    for byte in [0xE5, 0x8F] {
        detokenizer.push(id(byte), &mut text);
        assert_eq!(text, "");
    }
    detokenizer.push(id(0xFF), &mut text);
    assert_eq!(text, "\u{FFFD}".repeat(3));
    detokenizer.push(id(0x41), &mut text);
    assert_eq!(text, "\u{FFFD}".repeat(4));
    detokenizer.push(tokenizer.token_to_id("a").expect("a token"), &mut text);
    assert_eq!(text, "\u{FFFD}".repeat(4) + "a");
}

#[test]
fn spaces_between_special_tokens() {
    let close = DetokenizeOptions { skip_special_tokens: false, spaces_between_special_tokens: false };
    for (tokenizer, spaced, closed) in [
        (support::words(), "a <s> <tool> a </s>", "a <s><tool> a </s>"),
        (support::word_piece(false), "a <s> <tool> a </s>", "a <s><tool> a </s>"),
        (support::fuse(), "a<s><tool>a</s>", "a<s><tool>a</s>"),
    ] {
        let ids =
            ["a", "<s>", "<tool>", "a", "</s>"].map(|token| tokenizer.token_to_id(token).expect("a token"));
        assert_eq!(stream(&tokenizer, &[], &ids, options(false)), spaced);
        assert_eq!(stream(&tokenizer, &[], &ids, close), closed);
    }
}

#[test]
fn a_long_prompt_gives_the_same_context_as_its_end() {
    let tokenizer = support::byte_level();
    let ids =
        [tokenizer.token_to_id("Ġthe").expect("a token"), tokenizer.token_to_id("ðŁ").expect("a token")];
    let mut context = vec![ids[0]; 100_000];
    context.push(ids[1]);
    let rest = tokenizer.token_to_id("ĳĭ").expect("a token");
    assert_eq!(stream(&tokenizer, &context, &[rest, ids[0]], options(true)), "👋 the");
}
