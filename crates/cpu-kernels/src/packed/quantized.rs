//! Weights of 4, 6 or 8 bits with what their groups have besides a scale, kept as files have them: scales of 16 bits or in two
//! levels, zero points, minima. What becomes of them when a product comes to them is in [`super::ready`].

use half::{bf16, f16};

use super::{LinearError, PackedLinear, quads};
use crate::w8a8::dot::CODES;

/// Inputs of a block of two levels.
const LEVEL_INPUTS: usize = 256;

/// How the scales of groups are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleForm {
    /// 32 bits.
    F32,
    /// 16 bits, as most files have them.
    F16,
    /// The upper 16 bits of a number of 32.
    Bf16,
    /// A number of 16 bits for 256 inputs, times one of 8 bits with a sign for each group; minima likewise, without a sign.
    TwoLevel,
}

/// What a number is counted from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZeroForm {
    /// From 0; of 4 and 6 bits, which have no sign, from 8 and 32: w = scale · (number − 8).
    Middle,
    /// From a zero point of 8 bits for each group: w = scale · (number − zero).
    Point,
    /// From 0, and a minimum for each group, kept as scales are, is taken away: w = scale · number − minimum.
    Minimum,
    /// From 0; of 4 bits that are codes of 0, 1, 2, 3, 4, 6, 8 and 12, and of the same with a minus, as MXFP4 has them (it
    /// counts in halves): w = scale · what the code stands for.
    Codes,
}

impl ZeroForm {
    /// What the codes of [`Self::Codes`] stand for.
    pub const CODES: [i8; 16] = CODES;
}

/// How weights of a quantised layer are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantized {
    /// 4, 6 or 8 of a number; 4 and 6 have no sign.
    pub bits: u8,
    /// Inputs that share a scale: 16 (of 6 and 8 bits; of 6 always), a multiple of 32, or at least as many as there are.
    pub group_size: usize,
    /// What is kept of scales.
    pub scales: ScaleForm,
    /// What numbers are counted from.
    pub zeros: ZeroForm,
    /// Whether the activations are rounded to 8 bits.
    pub rounds_activations: bool,
}

/// One row of a quantised weight, for [`PackedLinear::pack_quantized_rows`] to be filled.
#[derive(Debug)]
pub struct QuantizedRow {
    /// One for each input: 8 bits with a sign; of 6 bits −32 to 31; of 4 bits −8 to 7 where they are counted from the middle, what
    /// their codes stand for where they are such, else 0 to 15.
    pub numbers: Vec<i8>,
    /// For each group; in two levels for 256 inputs.
    pub scales: Vec<f32>,
    /// Zero points or minima, as many; none for [`ZeroForm::Middle`] and [`ZeroForm::Codes`].
    pub offsets: Vec<f32>,
    /// Only in two levels: what each group's scale is multiplied by, the bits of a number with a sign, and its minimum.
    pub factors: Vec<[u8; 2]>,
}

impl Quantized {
    /// The groups that some inputs are of.
    pub(super) fn groups_of(&self, inputs: &std::ops::Range<usize>) -> std::ops::Range<usize> {
        inputs.start / self.group_size..inputs.end.div_ceil(self.group_size)
    }

    /// What is wrong with it.
    pub(super) fn check(self, in_features: usize) -> Result<(), LinearError> {
        let is_known = match self.bits {
            4 => true,
            6 => self.zeros == ZeroForm::Middle && self.group_size == 16,
            8 => matches!(self.zeros, ZeroForm::Middle | ZeroForm::Minimum),
            _ => false,
        };
        let is_level = self.scales == ScaleForm::TwoLevel;
        let fits_levels = in_features.is_multiple_of(LEVEL_INPUTS)
            && match (self.group_size, self.zeros) {
                (32, ZeroForm::Minimum) => true,
                (16, ZeroForm::Minimum) => self.bits == 8,
                (16, ZeroForm::Middle) => self.bits == 6,
                _ => false,
            };
        if !is_known || (is_level && !fits_levels) {
            return Err(LinearError::Form { form: self, in_features });
        }
        Ok(())
    }

    /// Groups of a block of two levels.
    #[must_use]
    pub fn level_groups(self) -> usize {
        LEVEL_INPUTS / self.group_size
    }

    /// Whether groups add something to their products.
    pub(crate) fn has_offsets(self) -> bool {
        matches!(self.zeros, ZeroForm::Point | ZeroForm::Minimum)
    }

    /// Whether numbers of 4 bits are codes.
    pub(crate) fn has_codes(self) -> bool {
        self.zeros == ZeroForm::Codes
    }

    /// Whether groups have a scale of 16 bits and nothing else, which a product widens as it reads it.
    pub(crate) fn has_narrow_scales(self) -> bool {
        self.bits != 6 && self.scales == ScaleForm::F16 && self.zeros == ZeroForm::Middle
    }

    pub(super) fn scale_bytes(self) -> usize {
        if self.scales == ScaleForm::F32 { 4 } else { 2 }
    }

    /// Bytes of an output's scales, with its zero points or minima.
    pub(super) fn bytes_of_scales(self, num_groups: usize) -> usize {
        match (self.scales, self.zeros) {
            (ScaleForm::TwoLevel, zeros) => {
                let each = if zeros == ZeroForm::Middle { 1 } else { 2 };
                num_groups / self.level_groups() * (2 + self.level_groups()) * each
            }
            (_, ZeroForm::Middle | ZeroForm::Codes) => num_groups * self.scale_bytes(),
            (_, ZeroForm::Point) => num_groups * (self.scale_bytes() + 1),
            (_, ZeroForm::Minimum) => num_groups * 2 * self.scale_bytes(),
        }
    }

    /// A row's numbers as words of neighbouring inputs; false if one does not fit the form.
    #[inline]
    pub(super) fn words(self, numbers: &[i8], words: &mut [u32]) -> bool {
        match self.bits {
            4 if self.has_codes() => quads::codes(numbers, words),
            4 => quads::halves(numbers, self.zeros == ZeroForm::Middle, words),
            6 => quads::sixes(numbers, words),
            _ => quads::bytes(numbers, words),
        }
    }

    /// Write a row's scales to their places among a panel's; false if one does not fit the form.
    pub(super) fn place_scales(
        self,
        outputs: usize,
        output: usize,
        row: &QuantizedRow,
        scales: &mut [u8],
    ) -> bool {
        let mut fits = true;
        let mut write = |scales: &mut [u8], i: usize, number: f32| match self.scales {
            ScaleForm::F32 => {
                fits &= number.is_finite();
                scales[4 * i..4 * i + 4].copy_from_slice(&number.to_le_bytes());
            }
            ScaleForm::F16 | ScaleForm::TwoLevel => {
                let narrow = exactly_f16(number);
                fits &= narrow.is_some();
                scales[2 * i..2 * i + 2].copy_from_slice(&narrow.unwrap_or(0).to_le_bytes());
            }
            ScaleForm::Bf16 => {
                let narrow = bf16::from_f32(number);
                fits &= narrow.is_finite() && narrow.to_f32().to_bits() == number.to_bits();
                scales[2 * i..2 * i + 2].copy_from_slice(&narrow.to_le_bytes());
            }
        };
        if self.scales == ScaleForm::TwoLevel {
            let level_groups = self.level_groups();
            let levels = scales.chunks_exact_mut(self.bytes_of_scales(level_groups) * outputs);
            for (index, level) in levels.enumerate() {
                write(level, output, row.scales[index]);
                if self.zeros == ZeroForm::Middle {
                    let factors = &row.factors[index * level_groups..][..level_groups];
                    for (places, factors) in level[2 * outputs..].chunks_exact_mut(outputs).zip(factors) {
                        places[output] = factors[0];
                    }
                    continue;
                }
                write(level, outputs + output, row.offsets[index]);
                let factors = &row.factors[index * level_groups..][..level_groups];
                for (places, factors) in level[4 * outputs..].chunks_exact_mut(2 * outputs).zip(factors) {
                    (places[output], places[outputs + output]) = (factors[0], factors[1]);
                }
            }
            return fits;
        }
        let size = self.scale_bytes();
        for (index, group) in scales.chunks_exact_mut(self.bytes_of_scales(1) * outputs).enumerate() {
            write(group, output, row.scales[index]);
            match self.zeros {
                ZeroForm::Middle | ZeroForm::Codes => {}
                ZeroForm::Point => {
                    let zero = row.offsets[index];
                    if !(0.0..=255.0).contains(&zero) || zero.fract() != 0.0 {
                        return false;
                    }
                    group[size * outputs + output] = zero as u8;
                }
                ZeroForm::Minimum => write(&mut group[size * outputs..], output, row.offsets[index]),
            }
        }
        fits
    }
}

impl PackedLinear {
    /// A row of memory for [`Self::pack_quantized_rows`].
    pub(super) fn row_of(&self, form: Quantized) -> QuantizedRow {
        let groups = self.num_groups();
        let slots = if form.scales == ScaleForm::TwoLevel { groups / form.level_groups() } else { groups };
        QuantizedRow {
            numbers: vec![0; self.in_features],
            scales: vec![0.0; slots],
            offsets: vec![0.0; if form.has_offsets() { slots } else { 0 }],
            factors: vec![[0; 2]; if form.scales == ScaleForm::TwoLevel { groups } else { 0 }],
        }
    }
}

/// The bits of a number in 16 bits, if they are enough for it.
fn exactly_f16(number: f32) -> Option<u16> {
    let (bits, exponent) = (number.to_bits(), number.to_bits() >> 23 & 255);
    if bits.trailing_zeros() >= 13 && (113..=142).contains(&exponent) {
        // Neither 0 nor small: the same digits. Looking for the machine's instruction, as `half` does, takes longer.
        return Some((bits >> 16 & 0x8000 | (bits >> 13 & 0x3ff) | (exponent - 112) << 10) as u16);
    }
    let narrow = f16::from_f32(number);
    (narrow.is_finite() && narrow.to_f32().to_bits() == bits).then(|| narrow.to_bits())
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::exactly_f16;

    #[test]
    fn numbers_of_16_bits_have_these_bits_and_no_others_have_any() {
        for bits in 0..=u16::MAX {
            let number = f16::from_bits(bits);
            let expected = number.is_finite().then_some(bits);
            assert_eq!(exactly_f16(number.to_f32()), expected, "{bits:#06x}");
            // Between two neighbours there is none.
            let between = f32::from_bits(number.to_f32().to_bits() ^ 1);
            assert_eq!(exactly_f16(between), None, "{bits:#06x}");
        }
        assert_eq!(exactly_f16(1e9), None);
    }
}
