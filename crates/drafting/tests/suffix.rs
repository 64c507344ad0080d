//! The suffix index against a search through all tokens.

use drafting::{SuffixIndex, SuffixLimits};
use proptest::prelude::*;

const LIMITS: SuffixLimits = SuffixLimits { max_match: 16, max_factor: 2.0, min_share: 0.0 };

fn drafts(tokens: &[i32], limits: SuffixLimits, limit: usize) -> Vec<i32> {
    let mut index = SuffixIndex::new(limits, tokens.len(), 5);
    index.append(tokens);
    let mut drafts = Vec::new();
    index.propose(tokens, limit, &mut drafts);
    drafts
}

/// The length of the longest suffix that occurred before, overlaps included.
fn longest_match(tokens: &[i32]) -> usize {
    (1..tokens.len())
        .map(|end| tokens[..end].iter().rev().zip(tokens.iter().rev()).take_while(|(a, b)| a == b).count())
        .max()
        .unwrap_or(0)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Few tokens, so that a search with 32 links sees every place of them.
    #[test]
    fn it_finds_a_match_where_there_is_one(tokens in prop::collection::vec(0..3, 0..33), seed in any::<u64>()) {
        let mut index = SuffixIndex::new(LIMITS, 8, seed);
        let mut found = Vec::new();
        for end in 0..=tokens.len() {
            index.append(&tokens[..end]);
            found.clear();
            index.propose(&tokens[..end], 100, &mut found);
            let longest = longest_match(&tokens[..end]).min(16);
            let expected = if longest >= 2 { 2 * longest } else { 0 };
            prop_assert_eq!(found.len(), expected, "after {:?}", &tokens[..end]);
        }
    }

    #[test]
    fn a_period_goes_on(period in prop::collection::vec(0..50, 1..12), length in 40usize..90) {
        let tokens: Vec<i32> = period.iter().copied().cycle().take(length + 20).collect();
        let limits = SuffixLimits { max_factor: 100.0, ..LIMITS };
        prop_assert_eq!(drafts(&tokens[..length], limits, 20), &tokens[length..]);
    }
}

#[test]
fn the_majority_of_the_longest_matches_decides() {
    let tokens = [1, 2, 3, 10, 11, 1, 2, 3, 20, 21, 1, 2, 3, 10, 12, 1, 2, 3];
    assert_eq!(drafts(&tokens, LIMITS, 1), [10], "two of three");
    let picky = SuffixLimits { min_share: 0.5, ..LIMITS };
    assert_eq!(drafts(&tokens, picky, 4), [10], "one of three follows 12, one 11");
    assert_eq!(drafts(&tokens, SuffixLimits { min_share: 0.9, ..LIMITS }, 4), []);
}

#[test]
fn drafts_grow_with_the_match() {
    let tokens: Vec<i32> = (0..40).chain(0..4).collect();
    let longer: Vec<i32> = (0..40).chain(0..8).collect();
    let once = SuffixLimits { max_factor: 1.0, ..LIMITS };
    assert_eq!(drafts(&tokens, once, 100), [4, 5, 6, 7]);
    assert_eq!(drafts(&longer, once, 100), [8, 9, 10, 11, 12, 13, 14, 15]);
    assert_eq!(drafts(&longer, once, 3), [8, 9, 10]);
    assert_eq!(drafts(&longer, SuffixLimits { max_factor: 0.0, ..LIMITS }, 100), []);
}

#[test]
fn one_token_repeated_is_searched_in_few_links() {
    let tokens = vec![7; 100_000];
    let mut index = SuffixIndex::new(LIMITS, tokens.len(), 3);
    let mut found = Vec::new();
    for end in 1..=tokens.len() {
        index.append(&tokens[..end]);
        found.clear();
        index.propose(&tokens[..end], 4, &mut found);
        assert_eq!(found.len(), if end > 2 { 4 } else { 0 }, "after {end} tokens");
    }
}

/// What an index proposes that sees the tokens a few at a time, after each of these.
fn followed(tokens: &[i32], steps: &[usize], limits: SuffixLimits) -> Vec<(usize, Vec<i32>)> {
    let mut index = SuffixIndex::new(limits, tokens.len(), 5);
    let (mut end, mut all) = (0, Vec::new());
    for step in steps.iter().cycle() {
        end = (end + step).min(tokens.len());
        let mut found = Vec::new();
        index.append(&tokens[..end]);
        index.propose(&tokens[..end], 12, &mut found);
        all.push((end, found));
        if end == tokens.len() {
            return all;
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// A text that goes on with pieces of itself: what is guessed stood behind the same tokens, and nearly always
    /// behind the longest match, also where a path was left.
    #[test]
    fn a_path_that_is_followed_says_what_stood_there(
        base in Just((0..80).collect::<Vec<i32>>()).prop_shuffle(),
        pieces in prop::collection::vec((0usize..40, 60usize..300, 400i32..500), 1..6),
        steps in prop::collection::vec(1usize..18, 1..6),
    ) {
        let (mut tokens, num_breaks) = (base, pieces.len());
        for (start, length, other) in pieces {
            for place in start..start + length {
                tokens.push(tokens[place]);
            }
            tokens.push(other);
        }
        let limits = SuffixLimits { min_share: 0.1, ..LIMITS };
        let (mut num_long, mut num_found) = (0, 0);
        for (end, found) in followed(&tokens, &steps, limits) {
            let longer = [&tokens[..end], &found[..]].concat();
            let stood = (2..end).any(|at| {
                tokens[at - 2..at] == tokens[end - 2..end] && longer[at..at + found.len()] == found[..]
            });
            prop_assert!(found.is_empty() || stood, "what is guessed stood elsewhere, after {} tokens", end);
            if longest_match(&tokens[..end]) >= 16 {
                num_long += 1;
                num_found += usize::from(found.len() == 12 && found[..1] == [*longer_than_any(&tokens, end)]);
            }
        }
        // Where a piece broke off, the followed path may be the one that goes on there otherwise, until it is left.
        let enough = 10 * (num_found + num_breaks) >= 9 * num_long;
        prop_assert!(num_long > 0 && enough, "{} of {}, {} breaks", num_found, num_long, num_breaks);
    }
}

/// What stood behind the longest match of the first `end` tokens.
fn longer_than_any(tokens: &[i32], end: usize) -> &i32 {
    let length = |at: usize| {
        tokens[..at]
            .iter()
            .rev()
            .zip(tokens[..end].iter().rev())
            .take_while(|(one, other)| one == other)
            .count()
    };
    let at = (1..end).max_by_key(|&at| length(at)).expect("there are tokens");
    &tokens[at]
}
