//! What other requests were answered, against a plain search through all of it.

use drafting::{Archive, Beliefs, Drafter, DrafterConfig, DraftingMethod, History, Round, SuffixLimits};

const LIMITS: SuffixLimits = SuffixLimits { max_match: 24, max_factor: 1.0, min_share: 0.1 };

fn proposed(archive: &Archive, seed: u64, tokens: &[i32], limit: usize) -> Vec<i32> {
    let mut drafts = Vec::new();
    archive.propose(seed, &LIMITS, tokens, limit, &mut drafts);
    drafts
}

fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ (mixed >> 29)
}

fn add_all(archive: &mut Archive, seed: u64, answer: &[i32]) {
    for first in (0..answer.len()).step_by(48) {
        archive.add(seed, answer, first);
    }
}

#[test]
fn an_answer_is_found_by_another_request_from_its_first_tokens_on() {
    let answer: Vec<i32> = (100..400).collect();
    let mut archive = Archive::new(1 << 16);
    assert_eq!(proposed(&archive, 1, &answer[..8], 4), [], "nothing yet");
    add_all(&mut archive, 1, &answer);
    for end in 3..answer.len() - 1 {
        let found = proposed(&archive, 1, &answer[..end], 8);
        assert!(!found.is_empty(), "at {end}");
        assert_eq!(found, answer[end..end + found.len()], "at {end}");
    }
}

#[test]
fn no_request_with_another_seed_finds_it() {
    let mut random = 7;
    let mut archive = Archive::new(1 << 12);
    let answers: Vec<Vec<i32>> = (0..50)
        .map(|seed| {
            let answer: Vec<i32> = (0..200).map(|_| (mix(&mut random) % 5) as i32).collect();
            add_all(&mut archive, seed % 2, &answer);
            answer
        })
        .collect();
    let with_marker: Vec<i32> = answers[0].iter().map(|token_id| token_id + 1000).collect();
    add_all(&mut archive, 0, &with_marker);
    let mut num_found = 0;
    for end in 3..150 {
        num_found += proposed(&archive, 0, &with_marker[..end], 8).len();
        assert_eq!(proposed(&archive, 1, &with_marker[..end], 8), [], "under another seed, at {end}");
    }
    assert!(num_found > 300, "{num_found}");
}

/// With many answers over few tokens, and a ring that is written over and over: what is proposed stood somewhere, in
/// an answer with this seed, behind the tokens that it follows.
#[test]
fn what_is_proposed_stood_behind_the_same_tokens() {
    let mut num_checked = 0;
    for world in 0..20 {
        let mut random = world;
        let mut archive = Archive::new(64 * (1 + mix(&mut random) as usize % 40));
        let mut answers: Vec<(u64, Vec<i32>)> = Vec::new();
        for _ in 0..60 {
            let (seed, length) = (mix(&mut random) % 3, mix(&mut random) as usize % 120);
            let num_ids = 2 + mix(&mut random) % 20;
            let answer: Vec<i32> = (0..length).map(|_| (mix(&mut random) % num_ids) as i32).collect();
            add_all(&mut archive, seed, &answer);
            answers.push((seed, answer));
            let (seed, (_, asked)) =
                (mix(&mut random) % 3, &answers[mix(&mut random) as usize % answers.len()]);
            let tokens = &asked[..asked.len() / 2];
            let found = proposed(&archive, seed, tokens, 6);
            if let Some(&first) = found.first() {
                let mut wanted = tokens[tokens.len() - 3..].to_vec();
                wanted.push(first);
                let stands = |(other, answer): &(u64, Vec<i32>)| {
                    *other == seed && answer.windows(4).any(|window| window == wanted)
                };
                assert!(answers.iter().any(stands), "world {world}: {found:?} behind {tokens:?}");
                num_checked += 1;
            }
        }
    }
    assert!(num_checked > 200, "{num_checked}");
}

#[test]
fn what_was_overwritten_is_gone_and_the_newest_is_there() {
    let mut archive = Archive::new(64 * 4);
    for base in 0..100 {
        let answer: Vec<i32> = (base * 1000..base * 1000 + 48).collect();
        add_all(&mut archive, 0, &answer);
        // Of a small ring a triple may have lost its place to another.
        assert!((3..40).any(|end| !proposed(&archive, 0, &answer[..end], 4).is_empty()), "{base}");
        if base >= 4 {
            let old: Vec<i32> = ((base - 4) * 1000..(base - 4) * 1000 + 48).collect();
            assert!((3..48).all(|end| proposed(&archive, 0, &old[..end], 4).is_empty()), "{base}");
        }
    }
}

/// Runs a request whose answer is `answer`; returns how many steps it took. All steps cost the same.
fn steps_of(
    drafter: &mut Drafter,
    config: &DrafterConfig,
    prompt: &[i32],
    answer: &[i32],
    step: &mut u64,
) -> u64 {
    let mut history = History::new(config, prompt, &[], 64, 5);
    let mut tokens = prompt.to_vec();
    let begun = *step;
    while tokens.len() < prompt.len() + answer.len() {
        *step += 1;
        let round =
            Round { step: *step, num_running: 1, num_rows: 1, num_tokens: 1, overlaps: false, now_ns: *step };
        drafter.begin_round(round);
        drafter.propose(0, &mut history, &tokens, 100);
        let drafts: Vec<i32> = drafter.end_round().flat_map(|(_, drafts)| drafts.to_vec()).collect();
        let rest = &answer[tokens.len() - prompt.len()..];
        let num_right = drafts.iter().zip(rest).take_while(|(draft, token_id)| draft == token_id).count();
        let num_new = (num_right + 1).min(rest.len());
        tokens.extend(&rest[..num_new]);
        drafter.end_step(*step, 1 + drafts.len() as u32, 1, num_new as u32, *step + 1);
    }
    drafter.retire(&mut history, &tokens);
    *step - begun
}

#[test]
fn the_second_request_for_a_text_takes_fewer_steps() {
    let answer: Vec<i32> = (500..600).collect();
    for (num_archived_requests, at_most) in [(0, 100), (10, 20)] {
        let method = DraftingMethod::Suffix(LIMITS);
        let config = DrafterConfig { method, caps: Vec::new(), num_archived_requests, adaptive: false };
        let mut drafter = Drafter::new(config.clone(), 16);
        let mut step = 0;
        assert_eq!(steps_of(&mut drafter, &config, &[1, 2, 3], &answer, &mut step), 100, "nothing repeats");
        let second = steps_of(&mut drafter, &config, &[4, 5, 6], &answer, &mut step);
        assert!(second <= at_most && (second == 100) == (num_archived_requests == 0), "{second}");
    }
}

#[test]
fn ngram_keeps_to_a_requests_own_tokens() {
    let method = DraftingMethod::Ngram { min: 2, max: 4 };
    let config = DrafterConfig { method, caps: Vec::new(), num_archived_requests: 100, adaptive: false };
    let mut drafter = Drafter::new(config.clone(), 16);
    let answer: Vec<i32> = (500..600).collect();
    let mut step = 0;
    for _ in 0..2 {
        assert_eq!(steps_of(&mut drafter, &config, &[1, 2, 3], &answer, &mut step), 100);
    }
}

/// A request that is answered `answer` a few tokens at a time, and what it leaves to others.
fn answered(archive: &mut Archive, prompt: &[i32], answer: &[i32]) {
    let config = DrafterConfig {
        method: DraftingMethod::Suffix(LIMITS),
        caps: Vec::new(),
        num_archived_requests: 1,
        adaptive: false,
    };
    let mut history = History::new(&config, prompt, &[], prompt.len() + answer.len(), 1);
    let mut tokens = prompt.to_vec();
    for piece in answer.chunks(7) {
        history.propose(&tokens, 8, false, None, &mut Beliefs::default(), &mut Vec::new());
        history.archive(archive, &tokens, false);
        tokens.extend(piece);
    }
    history.archive(archive, &tokens, true);
}

#[test]
fn what_repeats_the_prompt_is_there_for_others() {
    let text: Vec<i32> = (100..400).collect();
    let mut archive = Archive::new(1 << 16);
    answered(&mut archive, &text, &text);
    for end in 3..text.len() - 1 {
        let found = proposed(&archive, 1, &text[..end], 8);
        assert!(!found.is_empty(), "at {end}");
        assert_eq!(found, text[end..end + found.len()], "at {end}");
    }
}

#[test]
fn what_an_answer_repeats_of_itself_drives_no_other_out() {
    let other: Vec<i32> = (100..190).collect();
    let mut archive = Archive::new(64 * 5);
    add_all(&mut archive, 1, &other);
    let answer: Vec<i32> = (200..250).cycle().take(2000).collect();
    answered(&mut archive, &[7, 8, 9], &answer);
    assert_eq!(proposed(&archive, 1, &other[..5], 3), [105, 106, 107]);
    assert_eq!(proposed(&archive, 1, &answer[..5], 3), [205, 206, 207]);
    // What it goes on with when it leaves its path is there as well.
    let mut archive = Archive::new(64 * 8);
    let other_end: Vec<i32> = answer[..300].iter().copied().chain(500..560).collect();
    answered(&mut archive, &[7, 8, 9], &other_end);
    assert_eq!(proposed(&archive, 1, &(500..510).collect::<Vec<i32>>(), 3), [510, 511, 512]);
}
