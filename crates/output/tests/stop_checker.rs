//! Stop strings against a naive search over the whole text, with small alphabets so that partial matches abound.

mod support;

use output::{MAX_STOP_BYTES, OutputError, StopChecker};
use proptest::prelude::*;

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
        let mut checker = StopChecker::new(&stop, include).expect("valid stop strings");
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
        let found = StopChecker::new(&stop, false).expect("valid").push("xabcd", true, &mut released);
        (found, released)
    };
    assert_eq!(run(["bc", "abc"]), (Some(0), "xa".to_owned()));
    assert_eq!(run(["abc", "bc"]), (Some(0), "x".to_owned()));
    assert_eq!(run(["abcd", "bc"]), (Some(1), "xa".to_owned()));
}

#[test]
fn bad_stop_strings_are_refused_with_their_numbers() {
    let empty = StopChecker::new(&["a".to_owned(), String::new()], false).expect_err("empty");
    assert!(matches!(empty, OutputError::EmptyStopString { index: 1 }), "{empty}");
    let long = StopChecker::new(&["a".repeat(MAX_STOP_BYTES), "b".to_owned()], false).expect_err("too long");
    assert!(long.to_string().contains(&(MAX_STOP_BYTES + 1).to_string()), "{long}");
    let longest = "a".repeat(MAX_STOP_BYTES);
    let mut checker = StopChecker::new(std::slice::from_ref(&longest), false).expect("at the limit");
    assert_eq!(checker.push(&longest, true, &mut String::new()), Some(0));
}
