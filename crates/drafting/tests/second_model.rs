//! Guesses that a second model makes where the step runs: how many are asked for, and what is learned of them.

use drafting::{Beliefs, DrafterConfig, DraftingMethod, History, UNKNOWN_GUESS};

fn history(prediction: &[i32]) -> History {
    let config = DrafterConfig {
        method: DraftingMethod::Model,
        caps: Vec::new(),
        num_archived_requests: 0,
        adaptive: true,
    };
    History::new(&config, &[1, 2, 3], prediction, 100, 5)
}

fn asked(history: &mut History, tokens: &[i32]) -> usize {
    let mut drafts = Vec::new();
    history.propose(tokens, 16, true, None, &mut Beliefs::default(), &mut drafts);
    assert!(drafts.iter().all(|&draft| draft == UNKNOWN_GUESS), "none of them is known here");
    drafts.len()
}

#[test]
fn as_many_are_asked_for_as_were_right() {
    let mut history = history(&[]);
    let mut tokens = vec![1, 2, 3, 4];
    let first = asked(&mut history, &tokens);
    assert!((1..16).contains(&first), "fewer than there may be: {first}");
    for _ in 0..20 {
        history.verify(4, false);
        tokens.push(5);
        asked(&mut history, &tokens);
    }
    assert_eq!(asked(&mut history, &tokens), 16);
    for _ in 0..200 {
        history.verify(0, true);
    }
    assert_eq!(asked(&mut history, &tokens), 1);
    assert!(history.belief().acceptance() < 0.05);
}

#[test]
fn after_a_while_without_guesses_it_is_tried_again() {
    let mut history = history(&[]);
    let mut tokens = vec![1, 2, 3, 4];
    let first = asked(&mut history, &tokens);
    for _ in 0..200 {
        history.verify(0, true);
    }
    for _ in 0..511 {
        tokens.push(6);
        assert_eq!(asked(&mut history, &tokens), 1, "after {} tokens", tokens.len());
    }
    tokens.push(6);
    assert_eq!(asked(&mut history, &tokens), first);
}

#[test]
fn a_prediction_comes_first_and_is_judged_apart() {
    let mut history = history(&[7, 8, 9, 10]);
    let mut drafts = Vec::new();
    history.propose(&[1, 2, 3, 7], 16, true, None, &mut Beliefs::default(), &mut drafts);
    assert_eq!(drafts[0], 8);
    let before = history.belief().acceptance();
    history.verify(0, true);
    assert!((history.belief().acceptance() - before).abs() < 1e-6, "what is known here is compared here");
    assert_eq!(asked(&mut history, &[1, 2, 3, 7, 50]), asked(&mut self::history(&[]), &[1, 2, 3, 7, 50]));
}
