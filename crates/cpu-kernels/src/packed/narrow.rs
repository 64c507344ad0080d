//! Packs weights of 16 bits from rows of bytes, as files have them: nothing is rounded, and no other form of them is made.

use std::sync::{Mutex, PoisonError};

use super::{
    LinearError, MIN_SHARED_WEIGHTS, PackedLinear, Shared, WeightKind,
    quads::{self, Rows},
};
use crate::{lines::Lines, threads::Threads};

impl PackedLinear {
    /// Pack the rows `first_row..` of a weight of 16 bits; a row that was packed before is replaced.
    ///
    /// Takes memory for a panel's rows in each thread, in addition to the layer's own.
    ///
    /// # Arguments
    ///
    /// * `fill` – writes row `i` of those given: of each input two bytes, the lower one first.
    ///
    /// # Errors
    ///
    /// Weights of another kind, rows that the layer does not have, or no memory.
    pub fn pack_narrow_rows(
        &mut self,
        first_row: usize,
        num_rows: usize,
        threads: &Threads,
        fill: impl Fn(usize, &mut [u8]) + Sync,
    ) -> Result<(), LinearError> {
        if !matches!(self.kind, WeightKind::Bf16 | WeightKind::F16) {
            return Err(LinearError::NotNarrow { kind: self.kind });
        }
        let end = first_row.saturating_add(num_rows);
        if end > self.out_features {
            return Err(LinearError::Rows { first: first_row, end, out_features: self.out_features });
        }
        for is_packed in &mut self.is_packed[first_row..end] {
            self.num_packed -= usize::from(std::mem::replace(is_packed, false));
        }
        let (panel, in_features, order, has_pairs) =
            (self.kernel.panel(), self.in_features, self.order(), self.has_pairs);
        let per_row = in_features.div_ceil(2);
        let memory =
            || LinearError::Memory { num_bytes: 8 * panel * per_row, out_features: panel, in_features };
        let weights = Shared(self.weights.as_mut_slice::<u16>());
        let refused = Mutex::new(None);
        let first_panel = first_row / panel;
        let num_panels = if num_rows == 0 { 0 } else { end.div_ceil(panel) - first_panel };
        let is_shared = num_rows * in_features >= MIN_SHARED_WEIGHTS;
        threads.for_each(num_panels, is_shared, |index| {
            let start = (first_panel + index) * panel;
            // SAFETY: `for_each` gives each index to one thread, and the ranges of two panels do not overlap.
            let weights = unsafe { weights.range(start * in_features, panel * in_features) };
            let given = start.max(first_row)..(start + panel).min(end);
            let fill_panel = |rows: &mut Lines, turned: &mut Lines| {
                for row in given.clone() {
                    let place = (row - start) * 4 * per_row;
                    fill(row - first_row, &mut rows.as_mut_slice::<u8>()[place..][..2 * in_features]);
                }
                let outputs = given.start - start..given.end - start;
                let is_whole = outputs.len() == panel && in_features.is_multiple_of(2);
                // Those of AVX2 and bfloat16 lie in another order.
                if !is_whole || !(has_pairs || order.kind == WeightKind::F16) {
                    let rows = rows.as_slice::<u16>();
                    for k in 0..in_features {
                        for output in outputs.clone() {
                            weights[order.place(k, output)] = rows[output * 2 * per_row + k];
                        }
                    }
                    return;
                }
                // Two inputs of an output are a word, which stays whole where two lie side by side.
                let words = turned.as_mut_slice::<u8>();
                quads::turn(rows.as_slice(), per_row, panel, outputs, words);
                let words = &turned.as_slice::<u32>()[..per_row * panel];
                if has_pairs {
                    for (pair, word) in weights.as_chunks_mut::<2>().0.iter_mut().zip(words) {
                        *pair = [*word as u16, (word >> 16) as u16];
                    }
                    return;
                }
                for (inputs, words) in weights.chunks_exact_mut(2 * panel).zip(words.chunks_exact(panel)) {
                    let (first, second) = inputs.split_at_mut(panel);
                    for ((first, second), word) in first.iter_mut().zip(second).zip(words) {
                        (*first, *second) = (*word as u16, (word >> 16) as u16);
                    }
                }
            };
            if Rows::with_room(panel * per_row, panel * per_row, fill_panel).is_none() {
                *refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(memory());
            }
        });
        if let Some(error) = refused.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        self.is_packed[first_row..end].fill(true);
        self.num_packed += num_rows;
        Ok(())
    }
}
