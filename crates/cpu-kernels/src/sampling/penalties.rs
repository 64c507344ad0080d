//! Repetition, frequency and presence penalties of rows of logits.
//!
//! A request holds few of the ids there are: counts are looked through a block at a time, and logits are touched only where a
//! block has some.

use super::{MIN_SHARED_LOGITS, own_rows};
use crate::threads::Threads;

/// Ids whose counts are looked at together.
const BLOCK: usize = 64;

/// What a row is penalised by, and what its request holds so far.
#[derive(Clone, Copy, Debug)]
pub struct RowPenalties<'a> {
    /// Taken away once where an id was generated.
    pub presence: f32,
    /// Taken away for each time that it was.
    pub frequency: f32,
    /// Where an id was generated or is in the prompt, a logit above 0 is divided by it, and another one multiplied.
    pub repetition: f32,
    /// `[vocab_size]`, how often each id was generated.
    pub output_counts: &'a [i32],
    /// `[vocab_size]`, 1 for ids of the prompt, else 0.
    pub prompt_mask: &'a [u8],
}

/// Change some rows of `logits`, which are of `vocab_size`: by repetition, then by frequency, then by presence.
///
/// # Panics
/// When a row lies outside of `logits`, occurs twice, or the lengths differ.
pub fn penalize(
    logits: &mut [f32],
    vocab_size: usize,
    rows: &[usize],
    penalties: &[RowPenalties<'_>],
    threads: &Threads,
) {
    assert_eq!(rows.len(), penalties.len(), "as many penalties as rows");
    let parts = own_rows(logits, vocab_size, rows).into_iter().zip(penalties);
    let work: Vec<_> = parts.map(std::sync::Mutex::new).collect();
    threads.for_each(work.len(), rows.len() * vocab_size >= MIN_SHARED_LOGITS, |index| {
        // Each part is taken once: the lock is never waited for.
        let mut part = work[index].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (row, penalties) = &mut *part;
        penalize_row(row, penalties);
    });
}

fn penalize_row(row: &mut [f32], penalties: &RowPenalties<'_>) {
    let RowPenalties { presence, frequency, repetition, output_counts, prompt_mask } = *penalties;
    assert!(
        row.len() == output_counts.len() && row.len() == prompt_mask.len(),
        "a count and a mark for each logit"
    );
    let blocks = row.chunks_mut(BLOCK).zip(output_counts.chunks(BLOCK)).zip(prompt_mask.chunks(BLOCK));
    for ((logits, counts), marks) in blocks {
        let any_count = counts.iter().fold(0, |any, count| any | count);
        let any_mark = marks.iter().fold(0, |any, mark| any | mark);
        if any_count == 0 && any_mark == 0 {
            continue;
        }
        for ((logit, &count), &mark) in logits.iter_mut().zip(counts).zip(marks) {
            if count > 0 || mark != 0 {
                *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            }
            if count > 0 {
                *logit -= frequency * count as f32;
                *logit -= presence;
            }
        }
    }
}
