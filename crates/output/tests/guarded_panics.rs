//! A panic over a foreign tokenizer file is an error of the call, and nothing of it is printed; any other is reported as
//! ever. In a process of its own: what reports panics is one for all threads.

use std::panic::{catch_unwind, set_hook};
use std::sync::Mutex;

use output::{OutputError, Tokenizer};
use serde_json::{Value, json};

static REPORTED: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn file(changes: &[(&str, Value)]) -> Vec<u8> {
    let mut file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    });
    for (name, value) in changes {
        file[*name] = value.clone();
    }
    serde_json::to_vec(&file).expect("JSON")
}

#[test]
fn panics_over_foreign_files_become_errors_and_are_not_printed() {
    set_hook(Box::new(|info| REPORTED.lock().expect("a lock").push(info.to_string())));

    let broken = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
    let error = Tokenizer::from_bytes(&file(&[("normalizer", broken)])).expect_err("cannot be read");
    assert!(
        matches!(&error, OutputError::ParseTokenizer { message, .. } if message.contains("internal failure"))
    );

    let bomb =
        json!({"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": false});
    let tokenizer = Tokenizer::from_bytes(&file(&[("pre_tokenizer", bomb)])).expect("valid");
    let text = "a".repeat(40) + "!";
    let error = tokenizer.encode(&text, true).expect_err("the pattern gives up");
    assert!(
        matches!(&error, OutputError::Encode { num_bytes: 41, message } if message.contains("retry-limit")),
        "{error}"
    );

    let unknown = json!({
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "X", "type_id": 0}}, {"Sequence": {"id": "A",
        "type_id": 0}}], "pair": [], "special_tokens": {},
    });
    let tokenizer = Tokenizer::from_bytes(&file(&[("post_processor", unknown)])).expect("valid");
    let error =
        tokenizer.encode_batch(&["ab"; 64], true).expect_err("each of them fails, in whatever thread");
    assert!(matches!(error, OutputError::Encode { num_bytes: 2, .. }), "{error}");

    let strip = json!({"type": "Strip", "content": "a", "start": 0, "stop": 3});
    let tokenizer = Tokenizer::from_bytes(&file(&[("decoder", strip)])).expect("valid");
    assert!(tokenizer.decode(&[0, 1], true).is_err());

    assert_eq!(*REPORTED.lock().expect("a lock"), Vec::<String>::new());
    assert!(catch_unwind(|| panic!("one of our own")).is_err());
    let reported = REPORTED.lock().expect("a lock");
    assert!(matches!(&reported[..], [only] if only.contains("one of our own")), "{reported:?}");
}
