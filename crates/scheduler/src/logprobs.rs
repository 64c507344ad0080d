//! Log-probabilities of sampled tokens, on their way next to the records: few requests ask for them, and a record has
//! no room for them.

pub(crate) mod prompt;

use crate::{
    error::SchedulerError,
    output::{RequestKey, SchedulerOutput},
    step::token_rows::TokenRows,
};

/// Of a token of one request: its own log-probability and those of the likeliest ones at its place.
///
/// Exactly one goes with each token of a request that asked for them, in the order of its tokens, and it is there
/// before the token's record is.
#[derive(Clone, PartialEq, Debug)]
pub struct TokenLogprobs {
    /// Whose token it is.
    pub key: RequestKey,
    /// How many tokens of the vocabulary were likelier, plus one.
    pub rank: u32,
    /// Token id and natural logarithm of its probability: first the sampled one, then the likeliest in their order.
    pub entries: Box<[(i32, f32)]>,
}

/// What a step's sampler says of those sampled tokens whose requests asked for log-probabilities.
#[derive(Clone, Copy, Debug)]
pub struct LogprobRows<'a> {
    /// Whose they are: places among the step's sampled ids, counted row after row; ascending.
    pub places: &'a [i32],
    /// `num_columns` ids for each: the sampled one, then the likeliest; −1 ends a row.
    pub token_ids: &'a [i32],
    /// The log-probability of each of these.
    pub logprobs: &'a [f32],
    /// Rank of each sampled token, from 1.
    pub ranks: &'a [i32],
    /// Ids per row.
    pub num_columns: usize,
}

impl LogprobRows<'_> {
    /// No rows.
    pub const NONE: LogprobRows<'static> =
        LogprobRows { places: &[], token_ids: &[], logprobs: &[], ranks: &[], num_columns: 0 };

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    pub(crate) fn check(
        &self,
        output: &SchedulerOutput,
        sampled: TokenRows<'_>,
    ) -> Result<(), SchedulerError> {
        let wrong = |what| Err(SchedulerError::WrongLogprobs { step: output.step, what });
        let num_entries = self.places.len().checked_mul(self.num_columns);
        if self.ranks.len() != self.places.len()
            || num_entries != Some(self.token_ids.len())
            || num_entries != Some(self.logprobs.len())
            || (self.num_columns == 0 && !self.is_empty())
        {
            return wrong("the arrays have different numbers of rows or columns");
        }
        if !self.places.is_sorted_by(|a, b| a < b) {
            return wrong("the places do not ascend");
        }
        for (index, &place) in self.places.iter().enumerate() {
            let token_id = usize::try_from(place).ok().and_then(|place| sampled.token_ids.get(place));
            if token_id != Some(&self.token_ids[index * self.num_columns]) {
                return wrong("the first id of a row is not the one that was sampled at its place");
            }
        }
        Ok(())
    }

    /// What is said of the sampled id at a place.
    pub(crate) fn find(&self, key: RequestKey, place: usize) -> Option<TokenLogprobs> {
        let index = self.places.binary_search(&i32::try_from(place).ok()?).ok()?;
        let range = index * self.num_columns..(index + 1) * self.num_columns;
        let entries = self.token_ids[range.clone()].iter().zip(&self.logprobs[range]);
        Some(TokenLogprobs {
            key,
            rank: u32::try_from(self.ranks[index]).unwrap_or(0),
            entries: entries
                .take_while(|&(&token_id, _)| token_id >= 0)
                .map(|(&token_id, &logprob)| (token_id, logprob))
                .collect(),
        })
    }
}
