//! Packs weights of 16 bits from rows of bytes, as files have them: nothing is rounded, and no other form of them is made.

use super::{
    LinearError, PackedLinear, Shared, WeightKind,
    filling::{Filling, fill_alone},
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
        fill: impl Fn(usize, &mut [u8]) + Send + Sync,
    ) -> Result<(), LinearError> {
        fill_alone(self.narrow_filling(first_row, num_rows, fill)?, threads)
    }

    /// [`Self::pack_narrow_rows`] for [`super::fill_together`].
    ///
    /// # Errors
    ///
    /// Weights of another kind, or rows that the layer does not have.
    pub fn narrow_filling<'a>(
        &'a mut self,
        first_row: usize,
        num_rows: usize,
        fill: impl Fn(usize, &mut [u8]) + Send + Sync + 'a,
    ) -> Result<Filling<'a>, LinearError> {
        if !matches!(self.kind, WeightKind::Bf16 | WeightKind::F16) {
            return Err(LinearError::NotNarrow { kind: self.kind });
        }
        let given = self.give_rows(first_row, num_rows)?;
        let (panel, in_features, order, has_pairs) =
            (self.kernel.panel(), self.in_features, self.order(), self.has_pairs);
        let per_row = in_features.div_ceil(2);
        let memory =
            move || LinearError::Memory { num_bytes: 8 * panel * per_row, out_features: panel, in_features };
        let weights = Shared(self.weights.as_mut_slice::<u16>());
        let packed = (&mut *self.is_packed, &mut self.num_packed);
        Ok(Filling::of_rows(&given.clone(), in_features, packed, move |index| {
            let (start, given) = given.of_panel(index);
            // SAFETY: each panel is given to one thread, and the ranges of two panels do not overlap.
            let weights = unsafe { weights.range(start * in_features, panel * in_features) };
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
            Rows::with_room(panel * per_row, panel * per_row, fill_panel).ok_or_else(memory)
        }))
    }
}
