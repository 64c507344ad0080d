//! What a request's drafts are believed to be worth after those of others.

use drafting::{Beliefs, DrafterConfig, DraftingMethod, History, SuffixLimits};

const LIMITS: SuffixLimits = SuffixLimits { max_match: 24, max_factor: 1.0, min_share: 0.1 };

/// How likely a request's first drafts are held to be, and its later ones, where it goes on as its prompt did or not.
fn first_and_last(beliefs: &mut Beliefs, repeats: bool) -> (f32, f32) {
    let config = DrafterConfig {
        method: DraftingMethod::Suffix(LIMITS),
        caps: Vec::new(),
        num_archived_requests: 0,
        adaptive: true,
    };
    let mut tokens: Vec<i32> = (0..40).map(|place| place % 10).collect();
    let mut history = History::new(&config, &tokens, &[], 400, 1);
    let (mut first, mut drafts) = (None, Vec::new());
    for place in 0..40_i32 {
        drafts.clear();
        history.propose(&tokens, 4, true, None, beliefs, &mut drafts);
        if !drafts.is_empty() {
            first.get_or_insert(history.belief().acceptance());
        }
        tokens.push(if repeats { place % 10 } else { 1000 + place });
    }
    (first.expect("what the prompt repeats is found"), history.belief().acceptance())
}

#[test]
fn a_new_request_is_believed_by_what_others_first_drafts_were_worth() {
    let mut beliefs = Beliefs::default();
    let (first, last) = first_and_last(&mut beliefs, true);
    assert!((first - 0.25).abs() < 1e-6, "{first}");
    assert!(last > 0.9, "{last}");
    for _ in 0..8 {
        first_and_last(&mut beliefs, true);
    }
    let (believed, _) = first_and_last(&mut beliefs, true);
    assert!(believed > 0.8, "{believed}");
    for _ in 0..64 {
        first_and_last(&mut beliefs, false);
    }
    let (doubted, last) = first_and_last(&mut beliefs, true);
    assert!(doubted < 0.25, "{doubted}");
    assert!(last > 0.9, "its own drafts say more than those of others: {last}");
}
