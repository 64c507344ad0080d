//! Packs weights that are whole numbers with scales already: nothing is rounded.

use super::{
    LinearError, PackedLinear, QuantizedRow, Shared, WeightKind,
    filling::{Filling, fill_alone},
    quads::{self, Rows},
};
use crate::{lines::Lines, threads::Threads, w8a8::dot::QUAD};

impl PackedLinear {
    /// Pack the rows `first_row..` of the weight from whole numbers of 8 bits and their scales; a row that was packed
    /// before is replaced.
    ///
    /// Takes memory for a panel's rows in each thread, in addition to the layer's own.
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
        fill: impl Fn(usize, &mut [i8], &mut [f32]) + Send + Sync,
    ) -> Result<(), LinearError> {
        fill_alone(self.whole_filling(first_row, num_rows, fill)?, threads)
    }

    /// [`Self::pack_whole_rows`] for [`super::fill_together`].
    ///
    /// # Errors
    ///
    /// Weights without scales, or rows that the layer does not have.
    pub fn whole_filling<'a>(
        &'a mut self,
        first_row: usize,
        num_rows: usize,
        fill: impl Fn(usize, &mut [i8], &mut [f32]) + Send + Sync + 'a,
    ) -> Result<Filling<'a>, LinearError> {
        if !matches!(self.kind, WeightKind::Int8 { .. } | WeightKind::W8A8 { .. }) {
            return Err(LinearError::NotWhole { kind: self.kind });
        }
        let given = self.give_rows(first_row, num_rows)?;
        let (panel, in_features, num_groups) = (self.kernel.panel(), self.in_features, self.num_groups());
        let (order, padded_inputs) = (self.order(), self.padded_inputs());
        let is_by_quads = matches!(self.kind, WeightKind::W8A8 { .. });
        let weights = Shared(self.weights.as_mut_slice::<u8>());
        let all_scales = Shared(self.scales.as_mut_slice::<u8>());
        let (room_words, scale_bytes) = ((panel * padded_inputs).div_ceil(QUAD), panel * num_groups * 4);
        let memory =
            move || LinearError::Memory { num_bytes: QUAD * room_words, out_features: panel, in_features };
        let packed = (&mut *self.is_packed, &mut self.num_packed);
        Ok(Filling::of_rows(&given.clone(), in_features, packed, move |index| {
            let (start, given) = given.of_panel(index);
            // SAFETY: each panel is given to one thread, and the ranges of two panels do not overlap.
            let weights = unsafe { weights.range(start * padded_inputs, panel * padded_inputs) };
            // SAFETY: the scales of a panel are written by the thread that writes its numbers, and by no other.
            let panel_scales = unsafe { all_scales.range(start * num_groups * 4, scale_bytes) };
            let fill_panel = |rows: &mut Lines, of_scales: &mut Lines| {
                for row in given.clone() {
                    let output = row - start;
                    let place = output * padded_inputs..output * padded_inputs + in_features;
                    let numbers = &mut rows.as_mut_slice::<i8>()[place];
                    let scales = &mut of_scales.as_mut_slice::<f32>()[output * num_groups..][..num_groups];
                    fill(row - first_row, numbers, scales);
                    if scales.iter().any(|scale| !scale.is_finite()) {
                        return Err(LinearError::NotFinite { row });
                    }
                    if is_by_quads {
                        rows.as_mut_slice::<u8>()[output * padded_inputs..][in_features..padded_inputs]
                            .fill(0);
                    } else {
                        for (k, number) in numbers.iter().enumerate() {
                            weights[order.place(k, output)] = number.cast_unsigned();
                        }
                    }
                }
                let outputs = given.start - start..given.end - start;
                if is_by_quads {
                    quads::turn(rows.as_slice(), padded_inputs / QUAD, panel, outputs.clone(), weights);
                }
                quads::turn(of_scales.as_slice(), num_groups, panel, outputs, panel_scales);
                Ok(())
            };
            Rows::with_room(room_words, panel * num_groups, fill_panel).unwrap_or_else(|| Err(memory()))
        }))
    }

    /// Pack the rows `first_row..` of a quantised weight; a row that was packed before is replaced.
    ///
    /// Takes memory for a panel's rows in each thread, in addition to the layer's own.
    ///
    /// # Arguments
    ///
    /// * `fill` – writes row `i` of those given, in the layer's form.
    ///
    /// # Errors
    ///
    /// Weights of another kind, rows that the layer does not have, or numbers, scales and zeros that the form cannot hold.
    /// Rows that were given count as not packed then.
    pub fn pack_quantized_rows(
        &mut self,
        first_row: usize,
        num_rows: usize,
        threads: &Threads,
        fill: impl Fn(usize, &mut QuantizedRow) + Send + Sync,
    ) -> Result<(), LinearError> {
        fill_alone(self.quantized_filling(first_row, num_rows, fill)?, threads)
    }

    /// [`Self::pack_quantized_rows`] for [`super::fill_together`].
    ///
    /// # Errors
    ///
    /// Weights of another kind, or rows that the layer does not have.
    pub fn quantized_filling<'a>(
        &'a mut self,
        first_row: usize,
        num_rows: usize,
        fill: impl Fn(usize, &mut QuantizedRow) + Send + Sync + 'a,
    ) -> Result<Filling<'a>, LinearError> {
        let WeightKind::Quantized(form) = self.kind else {
            return Err(LinearError::NotWhole { kind: self.kind });
        };
        let given = self.give_rows(first_row, num_rows)?;
        let room = self.row_of(form);
        let (outputs, panel_bytes) = (self.kernel.panel(), self.panel_bytes());
        let scale_bytes = self.panel_scale_bytes();
        let per_row = self.padded_inputs() * usize::from(form.bits) / 32;
        let in_features = self.in_features;
        let memory = move || LinearError::Memory {
            num_bytes: QUAD * outputs * per_row,
            out_features: outputs,
            in_features,
        };
        let weights = Shared(self.weights.as_mut_slice::<u8>());
        let all_scales = Shared(self.scales.as_mut_slice::<u8>());
        let packed = (&mut *self.is_packed, &mut self.num_packed);
        Ok(Filling::of_rows(&given.clone(), in_features, packed, move |index| {
            let (start, given) = given.of_panel(index);
            let panel = start / outputs;
            // SAFETY: each panel is given to one thread, and the ranges of two panels do not overlap.
            let weights = unsafe { weights.range(panel * panel_bytes, panel_bytes) };
            // SAFETY: the scales of a panel are written by the thread that writes its numbers, and by no other.
            let scales = unsafe { all_scales.range(panel * scale_bytes, scale_bytes) };
            let mut filled = QuantizedRow {
                numbers: room.numbers.clone(),
                scales: room.scales.clone(),
                offsets: room.offsets.clone(),
                factors: room.factors.clone(),
            };
            let fill_panel = |rows: &mut Lines, _: &mut Lines| {
                for row in given.clone() {
                    let output = row - start;
                    fill(row - first_row, &mut filled);
                    let words = &mut rows.as_mut_slice::<u32>()[output * per_row..][..per_row];
                    if !form.words(&filled.numbers, words)
                        || !form.place_scales(outputs, output, &filled, scales)
                    {
                        return Err(LinearError::NotHeld { row, form });
                    }
                }
                let given = given.start - start..given.end - start;
                quads::turn(rows.as_slice(), per_row, outputs, given, weights);
                Ok(())
            };
            Rows::with_room(outputs * per_row, 0, fill_panel).unwrap_or_else(|| Err(memory()))
        }))
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
