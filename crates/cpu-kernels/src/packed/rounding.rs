//! Rounds weights to 4 and 8 bits group by group, and packs them.

use half::{bf16, f16};

use super::{LinearError, Matrix, PackedLinear, Quantized, ScaleForm, WeightElement, ZeroForm};
use crate::threads::Threads;

impl PackedLinear {
    /// Round rows to 8 bits with scales of 32: see [`round_bytes`].
    pub(super) fn round_whole<T: WeightElement>(
        &mut self,
        group_size: usize,
        first_row: usize,
        rows: &Matrix<'_, T>,
        threads: &Threads,
    ) -> Result<(), LinearError> {
        self.pack_whole_rows(first_row, rows.num_rows, threads, |index, numbers, scales| {
            round_row(rows, index, group_size, numbers, scales, |group, numbers| {
                round_bytes(ScaleForm::F32, group, numbers)
            });
        })
    }

    /// Round rows to a form without levels, zero points or minima: see [`round_group`] and [`round_bytes`].
    pub(super) fn round_quantized<T: WeightElement>(
        &mut self,
        form: Quantized,
        first_row: usize,
        rows: &Matrix<'_, T>,
        threads: &Threads,
    ) -> Result<(), LinearError> {
        if form.scales == ScaleForm::TwoLevel || form.bits == 6 || form.zeros != ZeroForm::Middle {
            return Err(LinearError::Form { form, in_features: self.in_features });
        }
        let round = if form.bits == 4 { round_group } else { round_bytes };
        let packed = self.pack_quantized_rows(first_row, rows.num_rows, threads, |index, row| {
            let (numbers, scales) = (&mut row.numbers, &mut row.scales);
            round_row(rows, index, form.group_size, numbers, scales, |group, numbers| {
                round(form.scales, group, numbers)
            });
        });
        let is_finite =
            |row: usize| (0..rows.num_columns).all(|k| rows.get(row - first_row, k).widen().is_finite());
        packed.map_err(|error| match error {
            // Its scale is NaN, which no form holds.
            LinearError::NotHeld { row, .. } if !is_finite(row) => LinearError::NotFinite { row },
            error => error,
        })
    }
}

/// Round a row group by group; the scale of a group with a number that is not finite becomes NaN.
fn round_row<T: WeightElement>(
    rows: &Matrix<'_, T>,
    index: usize,
    group_size: usize,
    numbers: &mut [i8],
    scales: &mut [f32],
    round: impl Fn(&[f32], &mut [i8]) -> f32,
) {
    let in_features = rows.num_columns;
    let mut group = Vec::with_capacity(group_size.min(in_features));
    for (at, scale) in scales.iter_mut().enumerate() {
        let inputs = at * group_size..in_features.min((at + 1) * group_size);
        group.clear();
        group.extend(inputs.clone().map(|k| rows.get(index, k).widen()));
        let is_finite = group.iter().all(|x| x.is_finite());
        *scale = if is_finite { round(&group, &mut numbers[inputs]) } else { f32::NAN };
    }
}

/// The nearest whole number, ties to even, of one whose size is below 2²²; others stay at least as large.
///
/// Adding 1.5 · 2²³ leaves no room for a fraction. `round_ties_even` would be a call for each number, since the instruction for
/// it is not one that every processor has.
fn nearest(x: f32) -> f32 {
    const NO_FRACTION: f32 = 12_582_912.0;
    (x + NO_FRACTION) - NO_FRACTION
}

/// Round a group to whole numbers from −127 to 127; gives their scale, as it is kept: the least with which the number of
/// the largest size needs no more.
fn round_bytes(form: ScaleForm, group: &[f32], numbers: &mut [i8]) -> f32 {
    let wanted = group.iter().fold(0.0_f32, |largest, x| largest.max(x.abs())) / 127.0;
    // Numbers of 16 bits above 0 have the order of their bits, and the next after the largest is infinite, which is refused.
    let scale = match form {
        ScaleForm::F16 | ScaleForm::TwoLevel => {
            let near = f16::from_f32(wanted);
            if near.to_f32() < wanted { f16::from_bits(near.to_bits() + 1) } else { near }.to_f32()
        }
        ScaleForm::Bf16 => {
            let near = bf16::from_f32(wanted);
            if near.to_f32() < wanted { bf16::from_bits(near.to_bits() + 1) } else { near }.to_f32()
        }
        ScaleForm::F32 => wanted,
    };
    for (number, x) in numbers.iter_mut().zip(group) {
        // A group of zeros stays one; so does one whose scale is too small for a number.
        let rounded = if scale > 0.0 { nearest(x / scale) } else { 0.0 };
        *number = rounded.clamp(-127.0, 127.0) as i8;
    }
    scale
}

/// The whole number from −8 to 7 that is kept of `x`, with the inverse of its scale.
fn whole(x: f32, inverse: f32) -> f32 {
    nearest(x * inverse).clamp(-8.0, 7.0)
}

/// What each scale leaves of a group, squared and summed in the group's order. All scales meet a number at once: side by side
/// they fill vectors, and no sum is in another order than it is alone.
fn squared_errors<const N: usize>(group: &[f32], scales: [f32; N]) -> [f32; N] {
    let inverses = scales.map(|scale| 1.0 / scale);
    let mut sums = [0.0; N];
    for &x in group {
        for ((sum, scale), inverse) in sums.iter_mut().zip(scales).zip(inverses) {
            let error = whole(x, inverse) * scale - x;
            *sum += error * error;
        }
    }
    sums
}

/// Round a group to whole numbers from −8 to 7; gives their scale, as it is kept.
///
/// Of nine scales that let the number of the largest size become between 5.5 and 8.5, each with the sign that it then
/// needs, the one that leaves the least error, squared; and then the scale that is best for those whole numbers, twice,
/// where that leaves less.
fn round_group(form: ScaleForm, group: &[f32], numbers: &mut [i8]) -> f32 {
    /// Sixteenths that are tried of the largest number.
    const TRIED: [i32; 9] = [88, 94, 100, 106, 112, 118, 124, 130, 136];
    const REFITS: usize = 2;
    let largest = group.iter().fold(0.0_f32, |largest, x| if x.abs() > largest.abs() { *x } else { largest });
    let kept = |scale: f32| match form {
        ScaleForm::F16 | ScaleForm::TwoLevel => f16::from_f32(scale).to_f32(),
        ScaleForm::Bf16 => bf16::from_f32(scale).to_f32(),
        ScaleForm::F32 => scale,
    };
    if !kept(largest / 8.0).is_finite() {
        return f32::INFINITY; // which is refused
    }
    let (mut best, mut least) = (0.0, f32::INFINITY);
    let mut attempt = |scale: f32, error: f32| {
        if scale.is_finite() && (1.0 / scale).is_finite() && error < least {
            (best, least) = (scale, error);
        }
        best
    };
    let scales = TRIED.map(|sixteenths| kept(largest / (-(sixteenths as f32) / 16.0)));
    let tried = scales.into_iter().zip(squared_errors(group, scales));
    let mut best = tried.fold(0.0, |_, (scale, error)| attempt(scale, error));
    for _ in 0..REFITS {
        let inverse = if best == 0.0 { 0.0 } else { 1.0 / best };
        let (product, square) = group.iter().fold((0.0, 0.0), |(product, square), x| {
            let number = whole(*x, inverse);
            (product + number * x, square + number * number)
        });
        let scale = kept(product / square);
        let [error] = squared_errors(group, [scale]);
        best = attempt(scale, error);
    }
    let inverse = if best == 0.0 { 0.0 } else { 1.0 / best };
    for (number, x) in numbers.iter_mut().zip(group) {
        *number = whole(*x, inverse) as i8;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::{nearest, squared_errors, whole};

    #[test]
    fn the_nearest_whole_number_is_that_of_the_standard_library() {
        let mut num_ties = 0;
        for eighths in -40_000_i32..=40_000 {
            for offset in [-1e-4_f32, 0.0, 1e-4] {
                let x = eighths as f32 / 8.0 + offset;
                assert!((nearest(x) - x.round_ties_even()).abs() < 1e-9, "{x}");
                num_ties += i32::from(x.fract().abs().to_bits() == 0.5_f32.to_bits());
            }
        }
        assert!(num_ties > 10_000);
        assert!(nearest(f32::NAN).is_nan());
        let large = [1e30, f32::INFINITY, -1e30];
        assert_eq!(large.map(nearest).map(f32::to_bits), large.map(f32::to_bits));
    }

    /// Bit for bit, or other weights would be packed.
    #[test]
    fn errors_of_scales_together_are_those_of_each_alone() {
        let group: Vec<f32> = (0..128).map(|i| ((i * 37 % 101) as f32 - 50.0) / 13.0).collect();
        let scales = [0.3, -0.41, 0.55, -0.7, 1e-3, -2.5, 0.125, 0.6, 0.017];
        let alone = scales.map(|scale: f32| {
            let error = |x: &f32| (whole(*x, 1.0 / scale) * scale - x).powi(2);
            group.iter().map(error).sum::<f32>()
        });
        assert_eq!(squared_errors(&group, scales).map(f32::to_bits), alone.map(f32::to_bits));
    }
}
