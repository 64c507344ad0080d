//! Predicted answers against answers that are known: what is proposed, and where the prediction is found again.

use drafting::{Beliefs, DrafterConfig, DraftingMethod, History, Prediction, SuffixLimits};
use proptest::prelude::*;

const PROMPT: [i32; 4] = [900, 901, 902, 903];

/// What a prediction says after each token of an answer.
fn said(predicted: &[i32], answer: &[i32]) -> Vec<Option<i32>> {
    let mut prediction = Prediction::new(predicted, PROMPT.len(), 7).expect("it is not empty");
    let tokens: Vec<i32> = PROMPT.iter().chain(answer).copied().collect();
    (0..answer.len())
        .map(|end| prediction.following(&tokens[..PROMPT.len() + end]).first().copied())
        .collect()
}

fn num_right(predicted: &[i32], answer: &[i32]) -> usize {
    said(predicted, answer).iter().zip(answer).filter(|(said, came)| **said == Some(**came)).count()
}

#[test]
fn an_answer_as_predicted_is_followed_from_its_first_token() {
    let answer: Vec<i32> = (0..50).collect();
    assert_eq!(num_right(&answer, &answer), 50);
    let mut prediction = Prediction::new(&answer, 4, 7).expect("it is not empty");
    assert_eq!(prediction.following(&PROMPT), answer);
    let tokens: Vec<i32> = PROMPT.iter().chain(&answer).copied().collect();
    assert_eq!(prediction.following(&tokens[..24]), &answer[20..], "twenty tokens came at once");
    assert_eq!(prediction.following(&tokens), []);
    assert_eq!(prediction.following(&[]), [], "a request that holds less than its prompt must not fail");
}

#[test]
fn nothing_is_predicted_by_nothing() {
    assert!(Prediction::new(&[], 0, 7).is_none());
}

#[test]
fn an_edited_answer_is_found_again() {
    let predicted: Vec<i32> = (0..60).collect();
    let others = [100, 101, 102];
    let changed: Vec<i32> = (0..20).chain(others).chain(23..60).collect();
    let inserted: Vec<i32> = (0..20).chain(others).chain(20..60).collect();
    let left_out: Vec<i32> = (0..20).chain(30..60).collect();
    let opened: Vec<i32> = others.into_iter().chain(0..60).collect();
    // The first token that differs, the others that came instead, and the two that it takes to find the place again.
    for (name, answer, num_new) in
        [("changed", changed, 3), ("inserted", inserted, 3), ("left out", left_out, 0), ("opened", opened, 3)]
    {
        assert!(
            num_right(&predicted, &answer) >= answer.len() - num_new - 2,
            "{name}: {:?}",
            said(&predicted, &answer)
        );
    }
}

#[test]
fn of_equal_places_the_nearest_counts() {
    // Lines that begin alike: 1 2 3, then the line's own number.
    let predicted: Vec<i32> = (0..20).flat_map(|line| [1, 2, 3, 100 + line, 200 + line]).collect();
    let mut answer = predicted.clone();
    answer[52] = 77; // within the eleventh line
    let wrong = answer.len() - num_right(&predicted, &answer);
    assert!(wrong <= 4, "{wrong} tokens were not foreseen");
}

#[test]
fn a_prediction_that_is_left_says_nothing() {
    let predicted: Vec<i32> = (0..30).collect();
    let answer: Vec<i32> = (500..530).collect();
    let said = said(&predicted, &answer);
    assert_eq!(said[0], Some(0));
    assert_eq!(said[1..], [None; 29]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Few tokens, so that there are many places to be wrong about: whatever is said is a rest of the prediction, and
    /// one that follows the newest two tokens, if the answer did not go on from there.
    #[test]
    fn what_is_said_stands_behind_what_came(
        predicted in prop::collection::vec(0..4, 1..40),
        answer in prop::collection::vec(0..4, 1..60),
        steps in prop::collection::vec(1usize..5, 60),
        seed in any::<u64>(),
    ) {
        let mut prediction = Prediction::new(&predicted, 0, seed).expect("it is not empty");
        let mut end = 0;
        for step in steps {
            end = (end + step).min(answer.len());
            let rest = prediction.following(&answer[..end]).to_vec();
            let place = predicted.len() - rest.len();
            prop_assert_eq!(&predicted[place..], &rest[..]);
            let is_start = end <= place && answer[..end] == predicted[..place];
            prop_assert!(rest.is_empty() || is_start || (place > 0 && predicted[place - 1] == answer[end - 1]));
        }
    }
}

#[test]
fn a_history_learns_of_its_prediction_apart_from_the_rest() {
    let limits = SuffixLimits { max_match: 16, max_factor: 2.0, min_share: 0.0 };
    let config = DrafterConfig {
        method: DraftingMethod::Suffix(limits),
        caps: Vec::new(),
        num_archived_requests: 0,
        adaptive: true,
    };
    // The prompt repeats 1 2 3 4; the prediction begins otherwise, and is right.
    let prompt = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4];
    let predicted: Vec<i32> = (50..90).collect();
    let mut history = History::new(&config, &prompt, &predicted, 100, 7);
    let mut tokens = prompt.to_vec();
    let mut drafts = Vec::new();
    for &token_id in &predicted {
        drafts.clear();
        history.propose(&tokens, 4, false, None, &mut Beliefs::default(), &mut drafts);
        assert_eq!(drafts.first(), Some(&token_id));
        tokens.push(token_id);
    }
    let of_prediction = history.belief().acceptance();
    assert!(of_prediction > 0.9, "{of_prediction}");
    // The answer goes on beyond its prediction, with what the prompt repeats.
    tokens.extend([1, 2, 3]);
    drafts.clear();
    history.propose(&tokens, 4, false, None, &mut Beliefs::default(), &mut drafts);
    assert_eq!(drafts, [4, 1, 2, 3]);
    assert!(history.belief().acceptance() < of_prediction, "the index was not asked before");
}
