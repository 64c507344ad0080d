//! Tokenizers for tests: small ones made here, one per kind of decoder chain, and real ones from the data folder.

#![allow(dead_code, reason = "each test crate uses its part")]

pub(crate) mod turns;

use std::path::PathBuf;
use std::sync::Arc;

use output::Tokenizer;
use proptest::prelude::ProptestConfig;
use serde_json::{Value, json};

/// So many random cases; a failing one is printed whole, so that it can become an example test.
pub(crate) fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// GPT-2's byte alphabet, from the library.
pub(crate) fn byte_alphabet() -> Vec<String> {
    let mut alphabet: Vec<String> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet()
        .into_iter()
        .map(|character| character.to_string())
        .collect();
    alphabet.sort();
    alphabet
}

/// Token strings with one id each; `<unk>` comes first, two special tokens and one added token come last.
pub(crate) fn synthetic(tokens: &[String], decoder: &Value) -> Arc<Tokenizer> {
    let mut vocab = serde_json::Map::new();
    vocab.insert("<unk>".to_owned(), json!(0));
    for token in tokens {
        let id = vocab.len();
        vocab.entry(token.clone()).or_insert(json!(id));
    }
    let num_tokens = vocab.len();
    let added: Vec<Value> = [("<s>", true), ("</s>", true), ("<tool>", false)]
        .iter()
        .enumerate()
        .map(|(index, (content, special))| {
            json!({"id": num_tokens + index, "content": content, "special": special, "single_word": false,
                   "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    let file = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
                      "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
                      "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}});
    Arc::new(Tokenizer::from_bytes(file.to_string().as_bytes()).expect("a valid tokenizer"))
}

fn strings(tokens: &[&str]) -> Vec<String> {
    tokens.iter().map(|&token| token.to_owned()).collect()
}

/// Every byte as a token, and a few longer ones that begin or end inside a character.
pub(crate) fn byte_level() -> Arc<Tokenizer> {
    let mut tokens = byte_alphabet();
    // "the", " the", "👋" cut in two, "é", the end of one character with the start of another.
    tokens.extend(strings(&["the", "Ġthe", "ðŁ", "ĳĭ", "Ã©", "©Ã"]));
    synthetic(
        &tokens,
        &json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
    )
}

fn llama_tokens() -> Vec<String> {
    let mut tokens = strings(&["▁", "▁▁", "▁a", "a", "b", "é", "▁é", "叫", "\u{301}", "<0xZZ>"]);
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    tokens
}

fn llama_decoder(strip: bool) -> Value {
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if strip {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    json!({"type": "Sequence", "decoders": decoders})
}

/// Llama 2's chain.
pub(crate) fn byte_fallback() -> Arc<Tokenizer> {
    synthetic(&llama_tokens(), &llama_decoder(true))
}

/// Gemma's chain.
pub(crate) fn byte_fallback_without_strip() -> Arc<Tokenizer> {
    synthetic(&llama_tokens(), &llama_decoder(false))
}

/// T5's chain.
pub(crate) fn metaspace() -> Arc<Tokenizer> {
    let decoder = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    synthetic(&strings(&["▁", "▁a", "a", "b", "▁b▁", "é"]), &decoder)
}

/// BERT's chain.
pub(crate) fn word_piece(cleanup: bool) -> Arc<Tokenizer> {
    let decoder = json!({"type": "WordPiece", "prefix": "##", "cleanup": cleanup});
    synthetic(&strings(&["a", "##a", "b", ".", "##s", "'", "é"]), &decoder)
}

/// No decoder: words with spaces between.
pub(crate) fn words() -> Arc<Tokenizer> {
    synthetic(&strings(&["a", "b", "é", "."]), &Value::Null)
}

/// Characters.
pub(crate) fn fuse() -> Arc<Tokenizer> {
    synthetic(&strings(&["a", " ", "é", "\n"]), &json!({"type": "Fuse"}))
}

/// A chain that the table does not know.
pub(crate) fn word_suffix() -> Arc<Tokenizer> {
    synthetic(&strings(&["a", "b</w>", "c</w>", "é"]), &json!({"type": "BPEDecoder", "suffix": "</w>"}))
}

/// Tells the reader of a test's output something.
pub(crate) fn note(text: &str) {
    println!("{text}");
}

/// A tokenizer of the data folder next to the repository; says so and gives `None` where there is none.
pub(crate) fn shared(path: &str) -> Option<Arc<Tokenizer>> {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/data")
        .join(path)
        .join("tokenizer.json");
    if !file.exists() {
        note(&format!("skipped: no {path}/tokenizer.json in ../shared/data next to the repository"));
        return None;
    }
    Some(Arc::new(Tokenizer::from_file(&file).expect("a valid tokenizer")))
}

/// The real tokenizers that are there.
pub(crate) fn all_shared() -> Vec<(&'static str, Arc<Tokenizer>)> {
    let names = [
        "gpt2-tokenizer",
        "modern-tokenizers/minimind",
        "modern-tokenizers/phi-3-mini",
        "stories260K/hf",
        "slm4096-gpt2/hf",
    ];
    names.into_iter().filter_map(|name| Some((name, shared(name)?))).collect()
}

/// Stop strings that are valid.
pub(crate) fn stop_strings(texts: &[&str]) -> std::sync::Arc<output::StopStrings> {
    let texts = texts.iter().map(ToString::to_string).collect();
    std::sync::Arc::new(output::StopStrings::new(texts).expect("valid stop strings"))
}
