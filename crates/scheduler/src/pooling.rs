//! Pooling: requests that end with a vector of their prompt in place of a token.
//!
//! Such a request is planned like any other up to the step that would sample its first token. In that step the worker
//! gives [`POOLED`] for the token, and the vector next to it. Vectors travel next to the records, as log-probabilities
//! do, because a record has no room for them.

use crate::{
    error::SchedulerError,
    output::{RequestKey, SchedulerOutput},
    step::token_rows::TokenRows,
};

/// In a row of sampled ids: the request ends with the vector of its row.
pub const POOLED: i32 = -9;

/// The vector of a request's prompt. It is there before the request's last record.
#[derive(Clone, PartialEq, Debug)]
pub struct PooledVector {
    /// Whose prompt it is.
    pub key: RequestKey,
    /// Its numbers.
    pub values: Box<[f32]>,
}

/// The vectors that a step gives, one for each of its samples.
#[derive(Clone, Copy, Debug)]
pub struct PooledRows<'a> {
    /// `width` numbers for each sample, in their order; those of a sample that is not pooled mean nothing.
    pub values: &'a [f32],
    /// Numbers per sample.
    pub width: usize,
}

impl PooledRows<'_> {
    /// No vectors.
    pub const NONE: PooledRows<'static> = PooledRows { values: &[], width: 0 };

    pub(crate) fn check(
        &self,
        output: &SchedulerOutput,
        sampled: TokenRows<'_>,
    ) -> Result<(), SchedulerError> {
        let wrong = |what| Err(SchedulerError::WrongPooledRows { step: output.step, what });
        let num_sampled = output.num_sampled as usize;
        if num_sampled.checked_mul(self.width) != Some(self.values.len()) {
            return wrong("there is not one row for each sample");
        }
        if self.width == 0 && (0..num_sampled).any(|sample| sampled.first(sample) == POOLED) {
            return wrong("a sample is pooled, but there are no rows");
        }
        Ok(())
    }

    /// The vector of a sample.
    pub(crate) fn vector(&self, key: RequestKey, sample: usize) -> PooledVector {
        PooledVector { key, values: self.values[sample * self.width..][..self.width].into() }
    }
}
