//! `Prediction`: an answer that the caller expects, and how far the real one follows it.

use std::sync::Arc;

use crate::{matches::KEY_TOKENS, suffix::Places};

/// Longest suffix of the answer that is compared with the text before a place in the prediction.
const MAX_MATCH_TOKENS: usize = 64;

/// Most places that one search looks at.
const MAX_LINKS: usize = 32;

/// Within this many tokens of the place where the answer left the prediction, a match shorter than a key is enough.
const NEAR: usize = 32;

/// Tokens that must agree there.
const NEAR_TOKENS: usize = 2;

/// The prediction, indexed once for all samples of a request.
#[derive(Debug)]
struct Expected {
    tokens: Box<[i32]>,
    places: Places,
}

/// The prediction of one request, compared token by token with its answer. After a difference, it looks for the place
/// from which the answer continues.
#[derive(Clone, Debug)]
pub struct Prediction {
    expected: Arc<Expected>,
    num_prompt_tokens: usize,
    /// Number of the answer's tokens that were compared.
    num_seen: usize,
    /// The next place in the prediction, while the answer follows it.
    next: Option<usize>,
    /// The last place where the answer followed it.
    last: usize,
}

impl Prediction {
    /// Make the prediction of a request whose prompt has `num_prompt_tokens`; `None` if nothing is predicted.
    #[must_use]
    pub fn new(tokens: &[i32], num_prompt_tokens: usize, seed: u64) -> Option<Self> {
        if tokens.is_empty() {
            return None;
        }
        let mut places = Places::new(KEY_TOKENS, tokens.len(), seed);
        places.append(tokens);
        let expected = Arc::new(Expected { tokens: tokens.into(), places });
        Some(Self { expected, num_prompt_tokens, num_seen: 0, next: Some(0), last: 0 })
    }

    /// The predicted continuation of `tokens`, the prompt and the answer so far; empty if the answer has left the
    /// prediction.
    pub fn following(&mut self, tokens: &[i32]) -> &[i32] {
        let answer = tokens.get(self.num_prompt_tokens..).unwrap_or_default();
        let new = answer.get(self.num_seen..).unwrap_or_default();
        if !new.is_empty() {
            self.num_seen = answer.len();
            self.next = self.go_on(new).or_else(|| self.search(answer));
            self.last = self.next.unwrap_or(self.last);
        }
        let next = self.next.unwrap_or(self.expected.tokens.len());
        &self.expected.tokens[next..]
    }

    /// The place after `new`, if the prediction continues with it from where the answer was.
    fn go_on(&mut self, new: &[i32]) -> Option<usize> {
        let rest = &self.expected.tokens[self.next?..];
        let num_right = rest.iter().zip(new).take_while(|(expected, came)| expected == came).count();
        self.last = self.next? + num_right;
        (num_right == new.len()).then_some(self.last)
    }

    /// The place in the prediction that the end of the answer leads to: the longest match, and among equals the nearest
    /// to where the answer left it; or a short match close to that.
    fn search(&self, answer: &[i32]) -> Option<usize> {
        let Expected { tokens, places } = &*self.expected;
        let distance = |end: usize| end.abs_diff(self.last);
        let whole = places
            .ends(answer)
            .take(MAX_LINKS)
            .map(|end| (match_length(tokens, end, answer), end))
            .filter(|&(length, _)| length >= KEY_TOKENS)
            .max_by_key(|&(length, end)| (length, std::cmp::Reverse(distance(end))));
        if let Some((_, end)) = whole {
            return Some(end);
        }
        let near = self.last.saturating_sub(NEAR).max(NEAR_TOKENS)..(self.last + NEAR).min(tokens.len());
        near.filter(|&end| match_length(tokens, end, answer) >= NEAR_TOKENS).min_by_key(|&end| distance(end))
    }
}

/// How many tokens before `end` equal the last tokens of the answer.
fn match_length(tokens: &[i32], end: usize, answer: &[i32]) -> usize {
    let pairs = tokens[..end].iter().rev().zip(answer.iter().rev()).take(MAX_MATCH_TOKENS);
    pairs.take_while(|(expected, came)| expected == came).count()
}
