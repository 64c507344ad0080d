//! The n-gram index against a search through all tokens, and what adversarial tokens cost.

use drafting::NgramIndex;
use proptest::prelude::*;

/// What vLLM's `ngram` says: the longest suffix of `min..=max` tokens that occurred before, its earliest occurrence, and
/// all tokens behind that.
fn searched(tokens: &[i32], min: usize, max: usize) -> Vec<i32> {
    for length in (min..=max.min(tokens.len().saturating_sub(1))).rev() {
        let suffix = &tokens[tokens.len() - length..];
        let first = tokens.windows(length).position(|window| window == suffix).expect("it is there itself");
        if first + length < tokens.len() {
            return tokens[first + length..].to_vec();
        }
    }
    Vec::new()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn it_finds_what_a_search_finds(
        tokens in prop::collection::vec(0..3, 0..200),
        min in 1u32..5,
        more in 0u32..4,
        chunk in 1usize..9,
        seed in any::<u64>(),
    ) {
        let mut index = NgramIndex::new(min, min + more, seed);
        for end in (0..=tokens.len()).step_by(chunk) {
            let known = &tokens[..end];
            index.append(known);
            let expected = searched(known, min as usize, (min + more) as usize);
            prop_assert_eq!(index.following(known), &expected[..]);
        }
    }
}

/// The worked examples of vLLM's own tests.
#[test]
fn the_earliest_occurrence_of_the_longest_suffix_counts() {
    let following = |tokens: &[i32], min, max| {
        let mut index = NgramIndex::new(min, max, 1);
        index.append(tokens);
        index.following(tokens).to_vec()
    };
    assert_eq!(following(&[1, 2, 3, 4, 5], 2, 2), []);
    assert_eq!(following(&[1, 2, 3, 4, 1, 2, 3], 2, 2), [4, 1, 2, 3]);
    assert_eq!(
        following(&[1, 2, 3, 9, 1, 2, 4, 9, 5, 1, 2, 4], 2, 3),
        [9, 5, 1, 2, 4],
        "three tokens, not two"
    );
    assert_eq!(following(&[7, 1, 2, 8, 1, 2, 9, 1, 2], 2, 2), [8, 1, 2, 9, 1, 2], "the earliest of two");
    assert_eq!(following(&[5, 5, 5], 1, 2), [5], "occurrences may overlap");
    assert_eq!(following(&[], 1, 2), []);
}

/// One token repeated: each append and each search looks at as many tokens as the longest suffix has, not at all.
#[test]
fn one_token_repeated_stays_one_gram() {
    let tokens = vec![7; 100_000];
    let mut index = NgramIndex::new(1, 5, 3);
    for end in 1..=tokens.len() {
        index.append(&tokens[..end]);
        let expected = if end == 1 { 0 } else { end - 5.min(end - 1) };
        assert_eq!(index.following(&tokens[..end]).len(), expected, "after {end} tokens");
    }
}
