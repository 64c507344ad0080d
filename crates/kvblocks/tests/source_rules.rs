//! Rules that no lint knows: atomics come from one module only, so that loom sees all of them, and each ordering stronger
//! than `Relaxed` has a comment that names its partner.

use std::fs;
use std::path::Path;

/// Name and text of every source file, without its test module.
fn sources() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources: Vec<(String, String)> = fs::read_dir(folder)
        .expect("the source folder")
        .map(|entry| {
            let path = entry.expect("a readable entry").path();
            let text = fs::read_to_string(&path).expect("a readable file");
            let code = text.split("mod tests {").next().unwrap_or_default().to_owned();
            (path.file_name().expect("a file").to_string_lossy().into_owned(), code)
        })
        .collect();
    sources.sort();
    assert!(sources.iter().any(|(name, _)| name == "sync.rs"), "these are not the sources: {sources:?}");
    sources
}

#[test]
fn atomics_come_from_the_shim() {
    let naming: Vec<String> = sources()
        .into_iter()
        .filter(|(_, code)| code.contains("sync::atomic") || code.contains("loom::"))
        .map(|(name, _)| name)
        .collect();
    assert_eq!(naming, ["sync.rs"]);
}

#[test]
fn strong_orderings_name_their_partner() {
    let mut found = 0;
    for (name, code) in sources() {
        let lines: Vec<&str> = code.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            assert!(!code.contains("Ordering::SeqCst"), "{name}:{}: which pair needs a total order?", at + 1);
            if ["Acquire", "Release", "AcqRel"]
                .iter()
                .any(|strong| code.contains(&format!("Ordering::{strong}")))
            {
                found += 1;
                let above = &lines[at.saturating_sub(4)..at];
                let explained = above.iter().any(|line| line.trim_start().starts_with("//"));
                assert!(explained, "{name}:{}: no comment names this ordering's partner", at + 1);
            }
        }
    }
    assert!(found >= 9, "only {found} orderings found: the test no longer looks in the right place");
}

#[test]
fn nothing_is_unsafe_and_no_lock_is_named() {
    for (name, code) in sources() {
        let code: Vec<&str> = code.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
        let code = code.join("\n");
        assert_eq!(code.contains("forbid(unsafe_code)"), name == "lib.rs", "{name}");
        for lock in ["Mutex", "RwLock", "Condvar"] {
            assert!(!code.contains(lock), "{name} names {lock}");
        }
    }
}
