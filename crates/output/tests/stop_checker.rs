//! Stop strings against a naive search over the whole text, with small alphabets so that partial matches abound.

mod support;

use std::sync::Arc;

use output::{MAX_STOP_BYTES, OutputError, StopChecker, StopStrings};
use proptest::prelude::*;

fn checker(stop: &[String], include: bool) -> StopChecker {
    StopChecker::new(Arc::new(StopStrings::new(stop.to_vec()).expect("valid stop strings")), include)
}

/// Index and end of the match that ends first, among those that end in an armed chunk.
fn naive_match(stop: &[String], chunks: &[(String, bool)]) -> Option<(usize, usize)> {
    let text: String = chunks.iter().map(|(chunk, _)| chunk.as_str()).collect();
    let mut chunk_start = 0;
    for (chunk, is_armed) in chunks {
        for end in chunk_start + 1..=chunk_start + chunk.len() {
            let is_match = |pattern: &&String| text.as_bytes()[..end].ends_with(pattern.as_bytes());
            if let Some(found) = stop.iter().find(is_match).filter(|_| *is_armed) {
                return Some((stop.iter().position(|pattern| pattern == found).expect("found"), end));
            }
        }
        chunk_start += chunk.len();
    }
    None
}

/// Bytes at the end of a text that may begin a stop string.
fn naive_undecided(stop: &[String], text: &str) -> usize {
    (1..=text.len())
        .rev()
        .find(|&len| {
            let suffix = &text.as_bytes()[text.len() - len..];
            stop.iter().any(|pattern| pattern.len() > len && pattern.as_bytes().starts_with(suffix))
        })
        .unwrap_or(0)
}

fn word(len: impl Into<prop::sample::SizeRange>) -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(vec!['a', 'b', 'é', '叫']), len)
        .prop_map(|word| word.into_iter().collect())
}

proptest! {
    #![proptest_config(support::cases(8000))]
    #[test]
    fn same_as_a_naive_search(
        stop in prop::collection::vec(word(1..5), 1..5),
        chunks in prop::collection::vec((word(0..4), prop::bool::weighted(0.7)), 0..12),
        include: bool,
    ) {
        let mut checker = checker(&stop, include);
        let expected = naive_match(&stop, &chunks);
        let mut released = String::new();
        let mut text = String::new();
        let mut found = None;
        for (chunk, is_armed) in &chunks {
            text.push_str(chunk);
            found = checker.push(chunk, *is_armed, &mut released);
            if found.is_some() {
                break;
            }
            let num_held = if include { 0 } else { naive_undecided(&stop, &text) };
            prop_assert_eq!(&released, &text[..text.len() - num_held]);
        }
        prop_assert_eq!(found, expected.map(|(index, _)| index));
        if let Some((index, end)) = expected {
            let end = if include { end } else { end - stop[index].len() };
            prop_assert_eq!(&released, &text[..end]);
        } else {
            checker.finish(&mut released);
            prop_assert_eq!(&released, &text);
        }
    }
}

#[test]
fn list_order_decides_between_matches_that_end_together() {
    let run = |stop: [&str; 2]| {
        let mut released = String::new();
        let stop = stop.map(str::to_owned);
        let found = checker(&stop, false).push("xabcd", true, &mut released);
        (found, released)
    };
    assert_eq!(run(["bc", "abc"]), (Some(0), "xa".to_owned()));
    assert_eq!(run(["abc", "bc"]), (Some(0), "x".to_owned()));
    assert_eq!(run(["abcd", "bc"]), (Some(1), "xa".to_owned()));
}

#[test]
fn bad_stop_strings_are_refused_with_their_numbers() {
    let empty = StopStrings::new(vec!["a".to_owned(), String::new()]).expect_err("empty");
    assert!(matches!(empty, OutputError::EmptyStopString { index: 1 }), "{empty}");
    let long = StopStrings::new(vec!["a".repeat(MAX_STOP_BYTES), "b".to_owned()]).expect_err("too long");
    assert!(long.to_string().contains(&(MAX_STOP_BYTES + 1).to_string()), "{long}");
    let longest = "a".repeat(MAX_STOP_BYTES);
    let mut checker = checker(std::slice::from_ref(&longest), false);
    assert_eq!(checker.push(&longest, true, &mut String::new()), Some(0));
}

#[test]
fn texts_share_their_stop_strings_and_nothing_else() {
    let stop = Arc::new(StopStrings::new(vec!["ab".to_owned()]).expect("valid stop strings"));
    let [mut one, mut other] = [(); 2].map(|()| StopChecker::new(stop.clone(), false));
    assert_eq!(Arc::strong_count(&stop), 3);
    let (mut of_one, mut of_other) = (String::new(), String::new());
    assert_eq!(one.push("xa", true, &mut of_one), None);
    assert_eq!(other.push("b", true, &mut of_other), None, "the text before it is not its own");
    assert_eq!(one.push("b", true, &mut of_one), Some(0));
    assert_eq!((of_one.as_str(), of_other.as_str(), stop.text(0)), ("x", "b", Some("ab")));
}
