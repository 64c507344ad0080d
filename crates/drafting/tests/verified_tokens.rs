//! Tokens that a verified step gives, on texts as they are: against a suffix search without any shortcut, and against
//! n-grams.
//!
//! The search looks at every place where any suffix of the newest tokens stood before, follows from each length of
//! suffix the commonest path, and takes the path of which the most tokens may be expected.

use std::collections::HashMap;

use drafting::{Beliefs, DrafterConfig, DraftingMethod, History, SuffixLimits};

const LIMITS: SuffixLimits = SuffixLimits { max_match: 24, max_factor: 1.0, min_share: 0.1 };
/// Of `--speculative-config '{"method": "auto"}'`.
const AUTO: SuffixLimits = SuffixLimits { max_factor: 4.0, ..LIMITS };
const NUM_DRAFTS: usize = 16;

/// A prompt and what is answered.
struct Stream {
    name: &'static str,
    prompt: Vec<i32>,
    answer: Vec<i32>,
}

/// Words, numbers, marks and indents, numbered as they come.
struct Vocabulary(HashMap<String, i32>);

impl Vocabulary {
    fn encode(&mut self, text: &str) -> Vec<i32> {
        let mut ids = Vec::new();
        let mut word = String::new();
        for character in text.chars().chain(std::iter::once('\n')) {
            let goes_on = match word.chars().last() {
                Some(' ') => character == ' ',
                Some(last) => {
                    (last.is_alphanumeric() || last == '_')
                        && (character.is_alphanumeric() || character == '_')
                }
                None => true,
            };
            if !goes_on {
                let next = self.0.len() as i32;
                ids.push(*self.0.entry(std::mem::take(&mut word)).or_insert(next));
            }
            word.push(character);
        }
        ids
    }
}

fn streams() -> Vec<Stream> {
    let mut words = Vocabulary(HashMap::new());
    let drafter = include_str!("data/drafter.txt");
    let without_comments: String = drafter
        .lines()
        .filter(|line| !line.contains("///"))
        .fold(String::new(), |text, line| text + line + "\n");
    let renamed = drafter
        .replace("candidates", "rows")
        .replace("num_withheld", "num_kept_back")
        .replace("u32", "usize");
    let rows: Vec<String> = (0..120)
        .map(|row| format!("{{\"id\": {row}, \"name\": \"n{}\", \"is_open\": {}}}\n", row % 7, row % 3 == 0))
        .collect();
    let table = rows.concat();
    let history = include_str!("data/history.txt");
    let (first, second) = history.split_at(history.len() / 2);
    [
        ("a file without its comments", drafter, without_comments.as_str()),
        ("a file with names changed", drafter, renamed.as_str()),
        ("the rest of a file", first, second),
        ("rows of a table", "Ten rows, please.\n", table.as_str()),
    ]
    .map(|(name, prompt, answer)| Stream { name, prompt: words.encode(prompt), answer: words.encode(answer) })
    .into()
}

/// Tokens per step when each step runs what `propose` says.
fn tokens_per_step(stream: &Stream, mut propose: impl FnMut(&[i32], usize) -> Vec<i32>) -> f64 {
    let (mut tokens, mut done, mut num_steps) = (stream.prompt.clone(), 0, 0);
    while done < stream.answer.len() {
        let drafts = propose(&tokens, NUM_DRAFTS);
        let rest = &stream.answer[done..];
        let num_right = drafts.iter().zip(rest).take_while(|(draft, token_id)| draft == token_id).count();
        let num_given = (num_right + 1).min(rest.len());
        tokens.extend_from_slice(&rest[..num_given]);
        done += num_given;
        num_steps += 1;
    }
    stream.answer.len() as f64 / f64::from(num_steps)
}

fn history_of(stream: &Stream, method: DraftingMethod) -> impl FnMut(&[i32], usize) -> Vec<i32> {
    let config = DrafterConfig { method, caps: Vec::new(), num_archived_requests: 0, adaptive: false };
    let num_tokens = stream.prompt.len() + stream.answer.len();
    let mut history = History::new(&config, &stream.prompt, &[], num_tokens, 3);
    move |tokens, limit| {
        let mut drafts = Vec::new();
        history.propose(tokens, limit, false, None, &mut Beliefs::default(), &mut drafts);
        drafts
    }
}

fn search(tokens: &[i32], limit: usize) -> Vec<i32> {
    // Ends of the places where the last tokens stood before, by how many: each list is part of the one before it.
    let mut ends: Vec<usize> = (1..tokens.len()).collect();
    let (mut best, mut best_score) = (Vec::new(), 0.0);
    for length in 1..=(LIMITS.max_match as usize).min(tokens.len() - 1) {
        ends.retain(|&end| end >= length && tokens[end - length] == tokens[tokens.len() - length]);
        if ends.is_empty() {
            break;
        }
        let most = limit.min((LIMITS.max_factor * length as f64) as usize);
        let (mut path, mut score, mut followed) = (Vec::new(), 0.0, ends.clone());
        while path.len() < most {
            let mut counts: HashMap<i32, usize> = HashMap::new();
            followed.retain(|&end| end + path.len() < tokens.len());
            for &end in &followed {
                *counts.entry(tokens[end + path.len()]).or_default() += 1;
            }
            let Some((&token_id, &count)) =
                counts.iter().max_by_key(|&(&token_id, &count)| (count, -token_id))
            else {
                break;
            };
            let share = count as f64 / ends.len() as f64;
            if share < LIMITS.min_share {
                break;
            }
            followed.retain(|&end| tokens[end + path.len()] == token_id);
            path.push(token_id);
            score += share;
        }
        if score >= best_score {
            (best, best_score) = (path, score);
        }
    }
    best
}

#[test]
fn a_step_gives_as_many_tokens_as_with_a_search_of_everything_and_as_with_n_grams() {
    let (mut all, mut all_searched) = (0.0, 0.0);
    for stream in streams() {
        let ours = tokens_per_step(&stream, history_of(&stream, DraftingMethod::Suffix(LIMITS)));
        let auto = tokens_per_step(&stream, history_of(&stream, DraftingMethod::Suffix(AUTO)));
        let ngram = tokens_per_step(&stream, history_of(&stream, DraftingMethod::Ngram { min: 3, max: 5 }));
        let searched = tokens_per_step(&stream, search);
        println!(
            "{}: {ours:.2} tokens per step, searched {searched:.2}, auto {auto:.2}, n-grams {ngram:.2}",
            stream.name
        );
        assert!(ours > 1.2, "{}: drafts were right", stream.name);
        assert!(ours >= 0.95 * searched, "{}: {ours} and {searched}", stream.name);
        assert!(auto >= 0.98 * ngram, "{}: {auto} and {ngram}", stream.name);
        all += ours;
        all_searched += searched;
    }
    assert!(all >= 0.97 * all_searched);
}
