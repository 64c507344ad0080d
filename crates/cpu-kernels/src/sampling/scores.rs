//! Log-probabilities: of a row's token, and of the likeliest ones; and the token's rank.
//!
//! A row is read twice, for the largest logits of its blocks and for the sum of its exponentials. What is larger than the
//! token's logit, or among the largest, is looked for in blocks whose largest says that they have some.

use std::sync::{Mutex, PoisonError};

use super::{
    MIN_SHARED_LOGITS,
    passes::{BLOCK, Passes},
    row::{Candidate, Row},
    row_of,
};
use crate::threads::Threads;

/// What is said of each of some rows.
#[derive(Debug)]
pub struct Scores<'a> {
    /// `[m, width]`: the row's token, then the ids of its `width − 1` largest logits, largest first, and of equal ones the
    /// first id first.
    pub ids: &'a mut [i32],
    /// `[m, width]`: log-probabilities (natural) or logits of these.
    pub values: &'a mut [f32],
    /// `[m]`: 1 + the number of logits that are larger than the token's.
    pub ranks: &'a mut [i32],
    /// `[m]`: what to subtract from any logit of the row for its value: the logarithm of the sum of all exponentials, or 0
    /// for logits.
    pub log_totals: &'a mut [f64],
}

/// Say how likely the tokens of some rows are, and which are the likeliest.
///
/// `logits` are rows of `vocab_size`; `token_ids[i]` is the token of `rows[i]`. Values are log-probabilities if
/// `is_normalized`, and otherwise logits. Log-probabilities of a row are all NaN where one of its logits is, where one is
/// infinite, and where all are minus infinity.
///
/// # Panics
/// When a row lies outside of `logits`, an id outside of its row, a row has fewer than `width − 1` ids, or the lengths differ.
pub fn score(
    logits: &[f32],
    vocab_size: usize,
    rows: &[usize],
    token_ids: &[usize],
    is_normalized: bool,
    threads: &Threads,
    scores: Scores<'_>,
) {
    let Scores { ids, values, ranks, log_totals } = scores;
    let of_rows = [token_ids.len(), ranks.len(), log_totals.len()];
    assert!(of_rows == [rows.len(); 3], "a token, a rank and a total for each row");
    assert!(ids.len() == values.len(), "a value for each id");
    let Some(width) = ids.len().checked_div(rows.len()) else { return };
    assert!(
        ids.len() == rows.len() * width && (1..=vocab_size + 1).contains(&width),
        "as many ids for each row, no more than it has"
    );
    let parts =
        ids.chunks_exact_mut(width).zip(values.chunks_exact_mut(width)).zip(ranks.iter_mut().zip(log_totals));
    let work: Vec<_> = parts.map(Mutex::new).collect();
    let passes = Passes::best();
    threads.for_each(work.len(), rows.len() * vocab_size >= MIN_SHARED_LOGITS, |index| {
        let row = row_of(logits, vocab_size, rows[index]);
        // Each part is taken once: the lock is never waited for.
        let mut part = work[index].lock().unwrap_or_else(PoisonError::into_inner);
        let ((ids, values), (rank, log_total)) = &mut *part;
        (**rank, **log_total) = passes.score(row, token_ids[index], is_normalized, ids, values);
    });
}

impl Passes {
    /// Write ids and values of a row's token and of its largest logits, as in [`Scores`].
    ///
    /// Returns the token's rank, and what is subtracted from a logit for its value.
    pub fn score(
        &self,
        logits: &[f32],
        token_id: usize,
        is_normalized: bool,
        ids: &mut [i32],
        values: &mut [f32],
    ) -> (i32, f64) {
        let mut largest = vec![0.0; logits.len().div_ceil(BLOCK)];
        let all_numbers = self.survey(logits, &mut largest);
        let row = Row::new(logits, 1.0, &mut largest);
        let own = logits[token_id];
        let likeliest = row.likeliest(ids.len() - 1);
        let found = std::iter::once((token_id, own)).chain(likeliest);
        let log_total = if is_normalized { self.log_total(row, all_numbers) } else { 0.0 };
        for ((id, value), (found_id, logit)) in ids.iter_mut().zip(values.iter_mut()).zip(found) {
            *id = found_id as i32;
            *value = (f64::from(logit) - log_total) as f32;
        }
        (1 + row.num_above(own), log_total)
    }

    /// Logarithm of the sum of all exponentials of a row; NaN if it has no distribution.
    fn log_total(&self, row: Row<'_>, all_numbers: bool) -> f64 {
        if !all_numbers || !row.max.is_finite() {
            return f64::NAN;
        }
        let mut sums = vec![0.0; row.largest.len()];
        self.sum_blocks(row.logits, row.cutoff(f32::NEG_INFINITY), &mut sums);
        f64::from(row.max) + sums.iter().sum::<f64>().ln()
    }
}

impl Row<'_> {
    /// The `k` largest logits, largest first, and of equal ones the first id first.
    fn likeliest(self, k: usize) -> Vec<Candidate> {
        let mut found = if k == 0 { Vec::new() } else { self.candidates(self.bound(k)) };
        if found.len() < k {
            // Some are no numbers: any will do that are not there yet, as nothing is asked of such a row.
            found = self.logits.iter().copied().enumerate().collect();
        }
        // Both zeros are one number.
        let order = |a: &Candidate, b: &Candidate| (b.1 + 0.0).total_cmp(&(a.1 + 0.0)).then(a.0.cmp(&b.0));
        if found.len() > k && k > 0 {
            found.select_nth_unstable_by(k - 1, order);
            found.truncate(k);
        }
        found.sort_unstable_by(order);
        found
    }

    /// How many logits are larger than this one.
    fn num_above(self, logit: f32) -> i32 {
        let blocks = self.logits.chunks(BLOCK).zip(self.largest);
        let above = blocks.filter(|(_, largest)| **largest > logit);
        above.map(|(block, _)| block.iter().map(|x| i32::from(*x > logit)).sum::<i32>()).sum()
    }
}
