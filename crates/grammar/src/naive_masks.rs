//! Masks against the naive way to them: each token is tried, byte by byte, on a copy of a matcher of bytes, for random
//! grammars of every kind. What has to follow is held against the bytes that may follow one after the other.
//! `RUSTVLLM_TEST_GRAMMARS` says how many grammars.

use std::{collections::BTreeSet, sync::Arc};

use llguidance::api::TopLevelGrammar;
use output::Tokenizer;
use scheduler::{GrammarKind, GrammarSpec};
use serde_json::{Map, Value, json};

use crate::{
    check::matcher_of_bytes,
    compile::compile,
    limits::limits,
    matcher::Matcher,
    sample::{Ahead, Matching, Verdict},
    vocabulary::Vocabulary,
};

pub(crate) const NUM_IDS: u32 = 300;
pub(crate) const EOS: u32 = NUM_IDS - 1;
/// Letters of the grammars, of which the longer tokens are made.
const LETTERS: &[u8] = b"abc01 {}\":,";
const MOST_STEPS: usize = 6;
/// Grammars along which tokens are guessed.
const NUM_WALKED: u64 = 60;

/// A small generator (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) >> 17
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// As byte-level vocabularies write a byte.
fn spelt(byte: u8) -> char {
    match byte {
        b' ' => 'Ġ',
        b'\n' => 'Ċ',
        0xC3 => 'Ã',
        0xA9 => '©',
        other => char::from(other),
    }
}

/// Single characters, pairs of letters, some longer ones, and an end.
pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    let single = (b'!'..=b'~').chain([b' ', b'\n', 0xC3, 0xA9]);
    let mut tokens: Vec<String> = single.map(|byte| spelt(byte).to_string()).collect();
    let mut merges = Vec::new();
    let mut merge = |tokens: &mut Vec<String>, left: &str, right: &str| {
        tokens.push(format!("{left}{right}"));
        merges.push([left.to_owned(), right.to_owned()]);
    };
    for &left in LETTERS {
        for &right in LETTERS {
            merge(&mut tokens, &spelt(left).to_string(), &spelt(right).to_string());
        }
    }
    let mut random = Random(3);
    while tokens.len() < EOS as usize {
        let pair =
            |random: &mut Random| format!("{}{}", spelt(random.pick(LETTERS)), spelt(random.pick(LETTERS)));
        let (left, right) = (pair(&mut random), pair(&mut random));
        if !tokens.contains(&format!("{left}{right}")) {
            merge(&mut tokens, &left, &right);
        }
    }
    let vocab: Map<String, Value> =
        tokens.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [{"id": EOS, "content": "<eos>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": merges},
    });
    Arc::new(Tokenizer::from_bytes(file.to_string().as_bytes()).expect("a tokenizer"))
}

fn word(random: &mut Random) -> String {
    (0..=random.below(5)).map(|_| char::from(random.pick(b"abc01"))).collect()
}

fn expression(random: &mut Random, depth: usize) -> String {
    match random.below(if depth == 0 { 2 } else { 6 }) {
        0 => word(random),
        1 => random.pick(&["[ab]", "[0-1]", "a?", "c{1,3}", "[^a]", "."]).to_owned(),
        2 => format!("({}|{})", expression(random, depth - 1), expression(random, depth - 1)),
        3 => format!("({})*", expression(random, depth - 1)),
        4 => format!("({}){{1,2}}", expression(random, depth - 1)),
        _ => format!("{}{}", expression(random, depth - 1), expression(random, depth - 1)),
    }
}

fn schema(random: &mut Random, depth: usize) -> Value {
    match random.below(if depth == 0 { 4 } else { 7 }) {
        0 => json!({"enum": [word(random), word(random), random.below(12)]}),
        1 => json!({"type": "integer", "minimum": 0, "maximum": random.below(200)}),
        2 => json!({"type": ["boolean", "null"]}),
        3 => json!({"type": "string", "maxLength": random.below(3)}),
        4 => json!({"type": "array", "items": schema(random, depth - 1), "maxItems": random.below(3)}),
        5 => json!({"anyOf": [schema(random, depth - 1), schema(random, depth - 1)]}),
        _ => {
            let names: BTreeSet<String> = (0..=random.below(3)).map(|_| word(random)).collect();
            let required: Vec<&String> = names.iter().filter(|name| name.len() > 1).collect();
            let properties: Map<String, Value> =
                names.iter().map(|name| (name.clone(), schema(random, depth - 1))).collect();
            json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
        }
    }
}

pub(crate) fn spec(random: &mut Random) -> GrammarSpec {
    let (kind, text) = match random.below(4) {
        0 => (GrammarKind::Regex, expression(random, 3)),
        1 => {
            let words: Vec<String> = (0..=random.below(4)).map(|_| word(random)).collect();
            (GrammarKind::Choice, json!(words).to_string())
        }
        2 => {
            let (first, middle, last) = (word(random), word(random), word(random));
            let rule = format!(
                "start: \"{first}\" inner \"{last}\"\ninner: \"{middle}\" inner | \"{last}{first}\" | /[ab]+/"
            );
            (GrammarKind::Grammar, rule)
        }
        _ => (GrammarKind::JsonSchema, schema(random, 2).to_string()),
    };
    let mut spec = GrammarSpec::new(kind, &text);
    spec.disable_any_whitespace = random.below(2) == 0;
    spec
}

/// Whether a matcher of bytes takes some bytes, tried on a copy.
fn takes(matcher: &mut Matcher, bytes: &[u8]) -> bool {
    let Some((&first, rest)) = bytes.split_first() else { return false };
    if !matcher.takes(u32::from(first)).expect("simple enough") {
        return false;
    }
    let mut copy = matcher.deep_clone();
    let mut last = first;
    rest.iter().all(|&byte| {
        copy.take(u32::from(last)).expect("it was tried");
        last = byte;
        copy.takes(u32::from(byte)).expect("simple enough")
    })
}

/// The bytes that have to follow, as long as there is but one and the text may not end.
fn forced_bytes(matcher: &Matcher) -> Vec<u8> {
    let mut copy = matcher.deep_clone();
    let mut found = Vec::new();
    while !copy.is_accepting().expect("simple enough") {
        let next: Vec<u8> =
            (0..=254).filter(|&byte| copy.takes(u32::from(byte)).expect("simple enough")).collect();
        let [byte] = next[..] else { break };
        copy.take(u32::from(byte)).expect("it was tried");
        found.push(byte);
    }
    found
}

#[test]
fn a_mask_has_the_tokens_that_are_taken_one_by_one() {
    let tokenizer = tokenizer();
    let bytes_of: Vec<Vec<u8>> = (0..EOS).map(|id| tokenizer.token_bytes(id)).collect();
    let own = tokenizer.clone();
    let vocabulary = Vocabulary::new(Box::new(move || Ok((own.clone(), vec![EOS]))), NUM_IDS);
    let factory = vocabulary.factory().expect("a vocabulary");
    let (mut num_masks, mut num_forced, mut num_over) = (0, 0, 0);
    let num_grammars = std::env::var("RUSTVLLM_TEST_GRAMMARS").ok().and_then(|number| number.parse().ok());
    let num_grammars: u64 = num_grammars.unwrap_or(200);
    for seed in 0..num_grammars {
        let mut random = Random(seed.wrapping_mul(0x5851_F42D_4C95_7F2D));
        let spec = spec(&mut random);
        let Ok(mut naive) = matcher_of_bytes(&spec) else { continue }; // it has no text
        let matcher = compile(&spec, factory).expect("it compiles over bytes");
        let mut matching = Matching::new(Some(matcher), None, &[EOS], vocabulary.num_mask_words(), false);
        for step in 0..MOST_STEPS {
            let what = || format!("seed {seed}, step {step}, {spec:?}");
            let allowed: Vec<u32> =
                (0..EOS).filter(|&id| takes(&mut naive, &bytes_of[id as usize])).collect();
            let may_end = naive.is_accepting().expect("simple enough");
            if matching.verdict() == Verdict::Complete {
                assert!(allowed.is_empty() && may_end, "{}", what());
                num_over += 1;
                break;
            }
            assert_eq!(matching.verdict(), Verdict::Masked, "{}", what());
            let masked: Vec<u32> =
                (0..NUM_IDS).filter(|id| matching.mask()[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
            let token = if let Some(&first) = matching.forced().first() {
                let text: Vec<u8> =
                    matching.forced().iter().flat_map(|&id| bytes_of[id as usize].clone()).collect();
                assert!(
                    forced_bytes(&naive).starts_with(&text),
                    "{}: {text:?} does not have to follow",
                    what()
                );
                assert_eq!(masked, [first], "{}: it is the one that may be sampled", what());
                num_forced += matching.forced().len();
                first
            } else {
                let end = may_end.then_some(EOS);
                assert_eq!(masked, allowed.iter().copied().chain(end).collect::<Vec<_>>(), "{}", what());
                num_masks += 1;
                random.pick(&allowed)
            };
            for &byte in &bytes_of[token as usize] {
                naive.take(u32::from(byte)).expect("it was tried");
            }
            if step % 2 == 0 {
                matching.advance(&[token], &[EOS]);
            } else {
                look_ahead(&mut matching, token, &what());
            }
        }
    }
    println!("{num_masks} masks, {num_forced} tokens that have to follow, {num_over} ends");
    let least = num_grammars as usize;
    assert!(
        num_masks > least && 2 * num_forced > least && 10 * num_over > least,
        "the walks hardly met a case"
    );
}

/// What is known before there is a mask is what the mask says.
fn look_ahead(matching: &mut Matching, token: u32, what: &str) {
    let ahead = matching.look_ahead(&[token], &[EOS]);
    matching.advance(&[], &[EOS]);
    match ahead {
        Ahead::End => assert_eq!(matching.verdict(), Verdict::Complete, "{what}"),
        Ahead::Tokens(tokens) => assert_eq!(tokens, matching.forced(), "{what}"),
        Ahead::Open => panic!("{what}: it has become too complex"),
    }
}

/// The ids of a mask, the end aside.
fn ids_of(matching: &Matching) -> Vec<u32> {
    (0..EOS).filter(|id| matching.mask()[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

#[test]
fn masks_behind_guesses_are_those_behind_the_tokens_and_leave_nothing_behind() {
    let tokenizer = tokenizer();
    let vocabulary = Vocabulary::new(Box::new(move || Ok((tokenizer.clone(), vec![EOS]))), NUM_IDS);
    let factory = vocabulary.factory().expect("a vocabulary");
    let (mut num_masks, mut num_wrong, mut num_trimmed) = (0, 0, 0);
    for seed in 0..NUM_WALKED {
        let mut random = Random(seed.wrapping_mul(0x5851_F42D_4C95_7F2D));
        let spec = spec(&mut random);
        if matcher_of_bytes(&spec).is_err() {
            continue; // it has no text
        }
        let begin = |tokens: &[u32]| {
            let matcher = compile(&spec, factory).expect("it compiles over bytes");
            let mut matching = Matching::new(Some(matcher), None, &[EOS], vocabulary.num_mask_words(), false);
            matching.advance(tokens, &[EOS]);
            matching
        };
        let (mut walked, mut plain) = (begin(&[]), begin(&[]));
        let mut tokens = Vec::new();
        for step in 0..MOST_STEPS {
            let what = || format!("seed {seed}, step {step}, {spec:?}");
            assert_eq!(
                (walked.verdict(), walked.mask(), walked.forced()),
                (plain.verdict(), plain.mask(), plain.forced()),
                "{}",
                what()
            );
            if plain.verdict() != Verdict::Masked || ids_of(&plain).is_empty() {
                break;
            }
            let mut ahead = begin(&tokens);
            let (mut guesses, mut expected) = (Vec::new(), Vec::new());
            while guesses.len() < 4 && ahead.verdict() == Verdict::Masked && !ids_of(&ahead).is_empty() {
                if random.below(6) == 0 {
                    let allowed = ids_of(&ahead);
                    guesses.extend((0..EOS).find(|id| !allowed.contains(id)));
                    num_wrong += 1;
                    break;
                }
                guesses.push(random.pick(&ids_of(&ahead)));
                ahead.advance(&guesses[guesses.len() - 1..], &[EOS]);
                expected.push((ahead.verdict(), ahead.mask().to_vec()));
            }
            let num_taken = walked.num_taken(&guesses);
            assert!(num_taken >= expected.len(), "{}: {num_taken} of {guesses:?}", what());
            num_trimmed += usize::from(num_taken < guesses.len());
            walked.walk(&guesses, &[EOS]);
            assert_eq!(walked.behind(&guesses), expected, "{}: {guesses:?}", what());
            num_masks += expected.len();
            let token = random.pick(&ids_of(&plain));
            tokens.push(token);
            walked.advance(&[token], &[EOS]);
            plain.advance(&[token], &[EOS]);
            assert!(walked.behind(&guesses).is_empty(), "they are of another place");
        }
    }
    println!("{num_masks} masks, {num_wrong} wrong guesses, {num_trimmed} seen before they run");
    assert!(num_masks > 300 && num_wrong > 50 && 2 * num_trimmed > num_wrong, "the walks hardly met a case");
}

/// The library bounds its lexer where it computes a mask; what has to follow is found before the first one is.
#[test]
fn the_lexer_is_bounded_from_the_first_token_on() {
    let tokenizer = tokenizer();
    let vocabulary = Vocabulary::new(Box::new(move || Ok((tokenizer.clone(), vec![EOS]))), NUM_IDS);
    let factory = vocabulary.factory().expect("a vocabulary");
    let parser = factory.create_parser(TopLevelGrammar::from_regex("(a{1000}){500}")).expect("an expression");
    let mut matcher = Matcher::new(parser);
    let _ = matcher.forced_tokens();
    let (num_states, most) = (matcher.size().expect("no panic").num_states, limits().max_lexer_states);
    assert!(num_states > most / 2, "it does not try: {num_states}");
    assert!(num_states <= most, "{num_states}");
}

#[test]
fn a_text_too_long_to_be_followed_at_once_is_followed_token_by_token() {
    let tokenizer = tokenizer();
    let vocabulary = Vocabulary::new(Box::new(move || Ok((tokenizer.clone(), vec![EOS]))), NUM_IDS);
    let factory = vocabulary.factory().expect("a vocabulary");
    let begin = |num_bytes: usize| {
        let text = json!(["ab01".repeat(num_bytes / 4)]).to_string();
        let matcher = compile(&GrammarSpec::new(GrammarKind::Choice, &text), factory).expect("a text");
        Matching::new(Some(matcher), None, &[EOS], vocabulary.num_mask_words(), false)
    };
    let mut short = begin(400);
    assert_eq!(short.forced().len(), 200);
    let forced = short.forced().to_vec();
    short.advance(&forced, &[EOS]);
    assert_eq!(short.verdict(), Verdict::Complete);
    let mut long = begin(1_000_000);
    assert!(long.forced().is_empty(), "it has more than the lexer may have of states");
    for &byte in b"ab01ab" {
        let letter = u32::from(byte - b'!');
        assert_eq!(
            (long.verdict(), long.mask()[letter as usize / 32] >> (letter % 32) & 1),
            (Verdict::Masked, 1)
        );
        long.advance(&[letter], &[EOS]);
    }
}
