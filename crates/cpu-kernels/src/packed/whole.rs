//! Packs weights that are whole numbers with scales already: nothing is rounded.

use std::sync::{Mutex, PoisonError};

use super::{LinearError, MIN_SHARED_WEIGHTS, PackedLinear, Shared, place};
use crate::threads::Threads;

impl PackedLinear {
    /// Pack the rows `first_row..` of the weight from whole numbers of 8 bits and their scales; a row that was packed
    /// before is replaced.
    ///
    /// Takes memory for a row in each thread, in addition to the layer's own.
    ///
    /// # Arguments
    ///
    /// * `fill` – writes row `i` of those given: a whole number per input, in their order, and a scale per group.
    ///
    /// # Errors
    ///
    /// Weights without scales, rows that the layer does not have, or scales that are not finite. Rows that were
    /// given count as not packed then.
    pub fn pack_whole_rows(
        &mut self,
        first_row: usize,
        num_rows: usize,
        threads: &Threads,
        fill: impl Fn(usize, &mut [i8], &mut [f32]) + Sync,
    ) -> Result<(), LinearError> {
        if self.kind.group_size().is_none() {
            return Err(LinearError::NotWhole { kind: self.kind });
        }
        let end = first_row.saturating_add(num_rows);
        if end > self.out_features {
            return Err(LinearError::Rows { first: first_row, end, out_features: self.out_features });
        }
        for is_packed in &mut self.is_packed[first_row..end] {
            self.num_packed -= usize::from(std::mem::replace(is_packed, false));
        }
        let (panel, in_features, num_groups) = (self.kernel.panel(), self.in_features, self.num_groups());
        let (kind, padded_inputs) = (self.kind, self.padded_inputs());
        let weights = Shared(self.weights.as_mut_slice::<i8>());
        let all_scales = Shared(self.scales.as_mut_slice::<f32>());
        let refused = Mutex::new(None);
        let first_panel = first_row / panel;
        let num_panels = if num_rows == 0 { 0 } else { end.div_ceil(panel) - first_panel };
        let is_shared = num_rows * in_features >= MIN_SHARED_WEIGHTS;
        threads.for_each(num_panels, is_shared, |index| {
            let start = (first_panel + index) * panel;
            // SAFETY: `for_each` gives each index to one thread, and the ranges of two panels do not overlap.
            let weights = unsafe { weights.range(start * padded_inputs, panel * padded_inputs) };
            // SAFETY: the scales of a panel are written by the thread that writes its numbers, and by no other.
            let panel_scales = unsafe { all_scales.range(start * num_groups, panel * num_groups) };
            let (mut numbers, mut scales) = (vec![0_i8; in_features], vec![0.0_f32; num_groups]);
            for row in start.max(first_row)..(start + panel).min(end) {
                fill(row - first_row, &mut numbers, &mut scales);
                if scales.iter().any(|scale| !scale.is_finite()) {
                    *refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(row);
                    return;
                }
                for (k, number) in numbers.iter().enumerate() {
                    weights[place(kind, k, row - start, panel)] = *number;
                }
                for (places, scale) in panel_scales.chunks_exact_mut(panel).zip(&scales) {
                    places[row - start] = *scale;
                }
            }
        });
        if let Some(row) = refused.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(LinearError::NotFinite { row });
        }
        self.is_packed[first_row..end].fill(true);
        self.num_packed += num_rows;
        Ok(())
    }
    /// Have groups whose inputs lie apart: place `k` of every row is that of input `order[k]`. Products then gather the
    /// activations into this order first.
    ///
    /// # Errors
    ///
    /// Weights without scales, or an order that does not have each input once.
    pub fn set_input_order(&mut self, order: Vec<u32>) -> Result<(), LinearError> {
        if self.kind.group_size().is_none() {
            return Err(LinearError::NotWhole { kind: self.kind });
        }
        let (found, expected) = (order.len(), self.in_features);
        if found != expected {
            return Err(LinearError::Length { name: "the order of the inputs", found, expected });
        }
        let mut seen = vec![false; expected];
        for (place, &input) in order.iter().enumerate() {
            match seen.get_mut(input as usize) {
                Some(seen) if !*seen => *seen = true,
                _ => return Err(LinearError::Order { place, input, in_features: expected }),
            }
        }
        self.input_order = Some(order.into_boxed_slice());
        Ok(())
    }
}
