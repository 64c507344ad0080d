//! Log-probabilities of a request's tokens, matched to the tokens, with the text that clients look for.

use std::collections::VecDeque;

use scheduler::TokenLogprobs;

use crate::tokenizer::Tokenizer;

/// One candidate for a position of the output.
#[derive(Debug, Clone, PartialEq)]
pub struct CandidateLogprob {
    /// The token.
    pub token_id: i32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// Rank; 1 is the likeliest.
    pub rank: u32,
    /// The bytes that it adds to a text, perhaps only part of a character; `None` without a tokenizer.
    pub bytes: Option<Box<[u8]>>,
}

/// The log-probabilities of one position of the output.
#[derive(Debug, Clone, PartialEq)]
pub struct PositionLogprobs {
    /// The sampled token, then the likeliest tokens in order; the sampled one is repeated if it is among them. Empty if
    /// nothing is known about the token.
    pub candidates: Vec<CandidateLogprob>,
    /// Number of characters of the output's text that were certain before the token.
    pub text_offset: u32,
}

/// Keeps the log-probabilities of one request until their tokens arrive.
#[derive(Debug, Default)]
pub(crate) struct LogprobsTracker {
    waiting: VecDeque<TokenLogprobs>,
    num_chars: u32,
}

impl LogprobsTracker {
    /// Add log-probabilities; they arrive before their token.
    pub(crate) fn push(&mut self, logprobs: TokenLogprobs) {
        self.waiting.push_back(logprobs);
    }

    /// Take the log-probabilities of a token that has arrived.
    pub(crate) fn take(&mut self, token_id: i32, tokenizer: Option<&Tokenizer>) -> PositionLogprobs {
        let text_offset = self.num_chars;
        let is_next =
            |logprobs: &TokenLogprobs| logprobs.entries.first().is_some_and(|first| first.0 == token_id);
        let logprobs =
            if self.waiting.front().is_some_and(is_next) { self.waiting.pop_front() } else { None };
        let Some(logprobs) = logprobs else {
            return PositionLogprobs { candidates: Vec::new(), text_offset };
        };
        let candidates = logprobs.entries.iter().enumerate().map(|(index, &(token_id, logprob))| {
            let bytes = tokenizer
                .zip(u32::try_from(token_id).ok())
                .map(|(tokenizer, token_id)| tokenizer.token_bytes(token_id).into());
            let rank = if index == 0 { logprobs.rank } else { index as u32 };
            CandidateLogprob { token_id, logprob, rank, bytes }
        });
        PositionLogprobs { candidates: candidates.collect(), text_offset }
    }

    /// Record that this text has become certain.
    pub(crate) fn advance(&mut self, text: &str) {
        self.num_chars = self.num_chars.saturating_add(text.chars().count() as u32);
    }
}
