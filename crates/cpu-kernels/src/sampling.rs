//! Drawing an id from a row of logits: temperature, top-n-sigma, min-p, top-k, top-p, and one uniform number; nothing is sorted but
//! what may be at the cut.
//!
//! The largest logit of each block of 64 is kept; logits are divided by the temperature whenever they are read. The `k` largest logits
//! lie in blocks whose largest is among the `k` largest of these: so few blocks are looked into again. Where top-p stands
//! alone, candidates found in this way are tried first; they are not enough only where a distribution is flat ([`flat`]).
//!
//! What equals the smallest logit that is kept is kept too. A row's id depends on the row and its parameters alone.

mod flat;
pub(crate) mod greedy;
mod mask;
mod passes;
mod penalties;
mod row;
mod scores;

use std::sync::{Mutex, PoisonError};

pub use self::{
    mask::mask,
    passes::Passes,
    penalties::{RowPenalties, penalize},
    row::RowOptions,
    scores::{Scores, score},
};
use self::{
    passes::BLOCK,
    row::{Cut, Row},
};
use crate::threads::Threads;

/// Logits from which on threads share the rows.
const MIN_SHARED_LOGITS: usize = 1 << 16;

/// Draw an id from each of some rows of `logits`, which are of `vocab_size`.
///
/// `out[i]` becomes the id drawn from `rows[i]`, or −1 when its logits have no finite distribution.
///
/// # Panics
/// When a row lies outside of `logits`, or the lengths differ.
pub fn draw(
    logits: &[f32],
    vocab_size: usize,
    rows: &[usize],
    options: &[RowOptions],
    threads: &Threads,
    out: &mut [i64],
) {
    assert!(rows.len() == options.len() && rows.len() == out.len(), "as many options and places as rows");
    let places: Vec<_> = out.iter_mut().map(Mutex::new).collect();
    let passes = Passes::best();
    threads.for_each(places.len(), rows.len() * vocab_size >= MIN_SHARED_LOGITS, |index| {
        let row = row_of(logits, vocab_size, rows[index]);
        let id = passes.draw(row, options[index]).map_or(-1, |id| id as i64);
        // Each part is taken once: the lock is never waited for.
        **places[index].lock().unwrap_or_else(PoisonError::into_inner) = id;
    });
}

impl Passes {
    /// An id of a row; `None` when the row has no finite distribution.
    #[must_use]
    pub fn draw(&self, logits: &[f32], options: RowOptions) -> Option<usize> {
        let mut largest = vec![0.0; logits.len().div_ceil(BLOCK)];
        let all_numbers = self.survey(logits, &mut largest);
        let row = Row::new(logits, options.temperature, &mut largest);
        if !all_numbers || !row.max.is_finite() {
            return None;
        }
        let floor = row.floor(&options);
        let mut sums = vec![0.0; row.largest.len()];
        let k = usize::try_from(options.top_k).unwrap_or(0);
        let found = if (1..row.logits.len()).contains(&k) {
            Some(row.cut_by_count(k, f64::from(options.top_p), floor))
        } else if options.top_p < 1.0 {
            self.sum_blocks(row.logits, row.cutoff(floor), &mut sums);
            let total: f64 = sums.iter().sum();
            let target = f64::from(options.top_p) * total;
            Some(row.cut_by_mass(target, floor).unwrap_or_else(|| Cut {
                value: flat::least_kept(row, self, target, floor),
                candidates: None,
            }))
        } else {
            None
        };
        match found {
            Some(Cut { candidates: Some(candidates), value }) => {
                Some(row.draw_from(&candidates, value, options.uniform))
            }
            found => {
                let cut = found.map_or(floor, |cut| cut.value);
                self.sum_blocks(row.logits, row.cutoff(cut), &mut sums);
                row.draw_from_blocks(&sums, cut, options.uniform)
            }
        }
    }
}

/// A row of `logits`.
fn row_of(logits: &[f32], vocab_size: usize, row: usize) -> &[f32] {
    &logits[row * vocab_size..][..vocab_size]
}

/// Some rows of `logits` to be written, each once, in the order asked for.
fn own_rows<'a>(logits: &'a mut [f32], vocab_size: usize, rows: &[usize]) -> Vec<&'a mut [f32]> {
    assert!(vocab_size > 0 || rows.is_empty(), "rows have logits");
    let mut all: Vec<Option<&mut [f32]>> = logits.chunks_exact_mut(vocab_size.max(1)).map(Some).collect();
    rows.iter().map(|&row| all.get_mut(row).and_then(Option::take).expect("a row of its own")).collect()
}
