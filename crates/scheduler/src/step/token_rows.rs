//! `TokenRows`: token ids of a step, row by row.

use crate::{error::SchedulerError, output::SchedulerOutput};

/// Rows of `num_columns` ids, one for each sampled request; −1 ends a row.
#[derive(Clone, Copy, Debug)]
pub struct TokenRows<'a> {
    /// The ids, row after row.
    pub token_ids: &'a [i32],
    /// Ids per row.
    pub num_columns: usize,
}

impl<'a> TokenRows<'a> {
    /// No rows.
    pub const NONE: TokenRows<'static> = TokenRows { token_ids: &[], num_columns: 0 };

    /// One id per row.
    #[must_use]
    pub fn column(token_ids: &'a [i32]) -> Self {
        Self { token_ids, num_columns: 1 }
    }

    /// The ids of a row before its end.
    pub(crate) fn row(&self, index: usize) -> &'a [i32] {
        let start = index * self.num_columns;
        let row = &self.token_ids[start..start + self.num_columns];
        let length = row.iter().position(|&token_id| token_id < 0).unwrap_or(row.len());
        &row[..length]
    }

    /// The first id of a row, which may be one of the negative codes.
    pub(crate) fn first(&self, index: usize) -> i32 {
        self.token_ids[index * self.num_columns]
    }

    pub(crate) fn check(&self, output: &SchedulerOutput) -> Result<(), SchedulerError> {
        let expected = output.num_sampled;
        let num_ids = (expected as usize).checked_mul(self.num_columns);
        if num_ids == Some(self.token_ids.len()) && (self.num_columns > 0 || expected == 0) {
            return Ok(());
        }
        let got = self.token_ids.len() / self.num_columns.max(1);
        Err(SchedulerError::WrongRows { step: output.step, expected, got })
    }
}
