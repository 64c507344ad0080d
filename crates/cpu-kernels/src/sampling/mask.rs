//! Ids that rows of logits may not take.

use super::{MIN_SHARED_LOGITS, own_rows};
use crate::threads::Threads;

/// Make ids impossible that rows may not take: `masks` has `ceil(vocab_size / 32)` words for each of `rows`, of which bit
/// `i % 32` of word `i / 32` is for id `i`.
///
/// # Panics
/// When a row lies outside of `logits`, occurs twice, or the lengths differ.
pub fn mask(logits: &mut [f32], vocab_size: usize, rows: &[usize], masks: &[i32], threads: &Threads) {
    let num_words = vocab_size.div_ceil(32);
    assert_eq!(masks.len(), rows.len() * num_words, "as many masks as rows");
    let parts = own_rows(logits, vocab_size, rows).into_iter().zip(masks.chunks_exact(num_words.max(1)));
    let work: Vec<_> = parts.map(std::sync::Mutex::new).collect();
    threads.for_each(work.len(), rows.len() * vocab_size >= MIN_SHARED_LOGITS, |index| {
        // Each part is taken once: the lock is never waited for.
        let mut part = work[index].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (row, mask) = &mut *part;
        mask_row(row, mask);
    });
}

/// Most words of a mask allow all of their ids or none: neither looks at the logits.
fn mask_row(row: &mut [f32], mask: &[i32]) {
    for (logits, &word) in row.chunks_mut(32).zip(mask) {
        match word {
            0 => logits.fill(f32::NEG_INFINITY),
            -1 => {}
            _ => {
                for (place, logit) in logits.iter_mut().enumerate() {
                    *logit = if word >> place & 1 == 0 { f32::NEG_INFINITY } else { *logit };
                }
            }
        }
    }
}
