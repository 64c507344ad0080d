//! Top-p of a flat row, in which very many ids are kept: the least logit that is.
//!
//! Logits are counted by their distance from the largest, in bins of which each is 1/128 of its distance wide, by what they
//! weigh. Of the bin in which the weights reach what is wanted, the logits are looked at once more: that part is halved as
//! quickselect does, with masses in the place of counts.

use super::{
    passes::{BLOCK, Passes, padded},
    row::Row,
};

/// Bits of a distance that are not looked at: 7 of its fraction are.
const SHIFT: u32 = 16;
/// Distances below 2⁻²⁰ are one bin.
const FIRST: u32 = (1.0_f32 / (1 << 20) as f32).to_bits() >> SHIFT;
/// Those from 128 on are another; nothing there weighs anything.
const NUM_BINS: usize = ((128.0_f32.to_bits() >> SHIFT) - FIRST) as usize + 1;

/// The bin of a logit that is no larger than the largest.
fn bin_of(value: f32, max: f32) -> usize {
    let bits = (max - value).to_bits() >> SHIFT;
    (bits.max(FIRST) - FIRST).min(NUM_BINS as u32 - 1) as usize
}

/// The last value, from the largest on, before which the weights do not reach `target` yet, of what is not below `floor`.
pub(super) fn least_kept(row: Row<'_>, passes: &Passes, target: f64, floor: f32) -> f32 {
    let mut bins = vec![0.0_f64; NUM_BINS];
    each_weighed(row, passes, floor, |value, weight| bins[bin_of(value, row.max)] += f64::from(weight));
    let mut above = 0.0;
    let reached = bins.iter().position(|mass| {
        let reaches = above + mass >= target;
        above += if reaches { 0.0 } else { *mass };
        reaches
    });
    // Rounding: a share of nearly 1 of what all weigh.
    let last = || bins.iter().rposition(|&mass| mass > 0.0).unwrap_or(0);
    let (bin, rest) = reached.map_or_else(|| (last(), f64::INFINITY), |bin| (bin, target - above));
    let mut weighted = Vec::new();
    each_weighed(row, passes, floor, |value, weight| {
        if bin_of(value, row.max) == bin && weight > 0.0 {
            weighted.push((value, f64::from(weight)));
        }
    });
    select_by_mass(&mut weighted, rest)
}

/// Call `use_one` with each logit of the row, and with what it weighs: nothing below `floor`.
fn each_weighed(row: Row<'_>, passes: &Passes, floor: f32, mut use_one: impl FnMut(f32, f32)) {
    let [mut room, mut tempered, mut weights] = [[0.0; BLOCK]; 3];
    for block in row.logits.chunks(BLOCK) {
        passes.weigh(padded(block, &mut room), row.cutoff(floor), &mut tempered, &mut weights);
        let weighed = tempered.iter().zip(&weights).take(block.len());
        weighed.for_each(|(&value, &weight)| use_one(value, weight));
    }
}

/// The last value, from the largest on, before which the weights do not reach `target` yet.
fn select_by_mass(weighted: &mut [(f32, f64)], target: f64) -> f32 {
    let mut rest = weighted;
    let mut above = 0.0;
    let mut smallest = f32::INFINITY;
    while !rest.is_empty() {
        let pivot = median([rest[0].0, rest[rest.len() / 2].0, rest[rest.len() - 1].0]);
        let (num_larger, larger, equal) = partition(rest, pivot);
        if above + larger >= target && num_larger > 0 {
            rest = &mut rest[..num_larger];
            continue;
        }
        smallest = pivot;
        above += larger + equal.1;
        if above >= target {
            break;
        }
        rest = &mut rest[num_larger + equal.0..];
    }
    smallest
}

fn median([a, b, c]: [f32; 3]) -> f32 {
    a.min(b).max(a.max(b).min(c))
}

/// Put what is larger than the pivot first, then what equals it. Returns how many are larger and what they weigh, and how
/// many are equal and what these weigh.
#[expect(
    clippy::float_cmp,
    reason = "the pivot is one of the values: what equals it does so bit for bit, or is the other zero"
)]
fn partition(weighted: &mut [(f32, f64)], pivot: f32) -> (usize, f64, (usize, f64)) {
    let (mut num_larger, mut larger) = (0, 0.0);
    let (mut num_equal, mut equal) = (0, 0.0);
    for index in 0..weighted.len() {
        let (value, weight) = weighted[index];
        if value > pivot {
            weighted.swap(index, num_larger + num_equal);
            weighted.swap(num_larger + num_equal, num_larger);
            num_larger += 1;
            larger += weight;
        } else if value == pivot {
            weighted.swap(index, num_larger + num_equal);
            num_equal += 1;
            equal += weight;
        }
    }
    (num_larger, larger, (num_equal, equal))
}
