//! One block of each type: bytes in, numbers out. Each sum and product is rounded once, in the order in which the format
//! is described, so that the bits are those of every other careful reader.

use half::f16;

/// Numbers of a small block.
pub(crate) const SMALL: usize = 32;

/// Writes the whole numbers of a block, and gives scale and minimum of each of its groups of 32.
pub(crate) type MinimumBlock = fn(&[u8], &mut [i8], &mut dyn FnMut(usize, f32, f32));
/// Writes the whole numbers of a block and the factors of its groups, and gives the block's scale and minimum.
pub(crate) type LevelBlock = fn(&[u8], &mut [i8], &mut [[u8; 2]; 8]) -> (f32, f32);

/// The number of 16 bits that lies at `at`.
pub(crate) fn f16_at(bytes: &[u8], at: usize) -> f32 {
    /// What the exponent of a number of 32 bits has in addition.
    const BIAS: u32 = (127 - 15) << 23;
    let bits = u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    if !matches!(bits & 0x7c00, 0 | 0x7c00) {
        // Nearly all are such; looking for the machine's instruction, as `half` does each time, takes longer than this.
        return f32::from_bits(u32::from(bits & 0x8000) << 16 | ((u32::from(bits & 0x7fff) << 13) + BIAS));
    }
    f16::from_bits(bits).to_f32()
}

/// The halves of 16 bytes, which begin at `at`: the low ones, then the high ones.
fn nibbles(bytes: &[u8], at: usize) -> [u8; 32] {
    let mut out = [0; 32];
    let (low, high) = out.split_at_mut(16);
    // An array: of a slice of any length the loops would take one byte at a time.
    let bytes = bytes[at..].as_chunks::<16>().0[0];
    low.iter_mut().zip(bytes).for_each(|(low, byte)| *low = byte & 15);
    high.iter_mut().zip(bytes).for_each(|(high, byte)| *high = byte >> 4);
    out
}

/// The 32 numbers of a small block.
fn thirty_two(numbers: &mut [i8]) -> &mut [i8; 32] {
    &mut numbers.as_chunks_mut().0[0]
}

/// The halves of 16 bytes, each with a fifth bit from the four bytes at `high_at`.
fn fives(bytes: &[u8], high_at: usize) -> [u8; 32] {
    let high = &bytes[high_at..high_at + 4];
    let mut out = nibbles(bytes, high_at + 4);
    for (eight, high) in out.as_chunks_mut::<8>().0.iter_mut().zip(high) {
        *eight = (u64::from_le_bytes(*eight) | fifth_bits(*high)).to_le_bytes();
    }
    out
}

/// Of eight bits, the lowest first, a byte each: 16 where it is set.
fn fifth_bits(bits: u8) -> u64 {
    /// In each byte another bit of the eight.
    const ONE_EACH: u64 = 0x8040_2010_0804_0201;
    let set = (u64::from(bits) * 0x0101_0101_0101_0101) & ONE_EACH;
    // What is not 0 reaches the highest bit of its byte, and none goes beyond.
    ((set + 0x7f7f_7f7f_7f7f_7f7f) & 0x8080_8080_8080_8080) >> 3
}

/// `d`, then the halves: d · (q − 8).
pub(crate) fn q4_0_whole(bytes: &[u8], numbers: &mut [i8; SMALL]) -> f32 {
    *numbers = nibbles(bytes, 2).map(|q| q as i8 - 8);
    f16_at(bytes, 0)
}

/// `d`, fifth bits, halves: d · (q − 16).
pub(crate) fn q5_0_whole(bytes: &[u8], numbers: &mut [i8; SMALL]) -> f32 {
    *numbers = fives(bytes, 2).map(|q| q as i8 - 16);
    f16_at(bytes, 0)
}

/// `d`, then bytes: d · q.
pub(crate) fn q8_0_whole(bytes: &[u8], numbers: &mut [i8; SMALL]) -> f32 {
    *numbers = bytes[2..].as_chunks::<32>().0[0].map(u8::cast_signed);
    f16_at(bytes, 0)
}

/// What the halves of `IQ4_NL` stand for.
const IQ4_NL_CODE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice what those of `MXFP4` do: sign, two bits of exponent, one of mantissa.
const MXFP4_CODE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `d`, then halves: d · code.
pub(crate) fn iq4_nl_whole(bytes: &[u8], numbers: &mut [i8; SMALL]) -> f32 {
    *numbers = nibbles(bytes, 2).map(|q| IQ4_NL_CODE[usize::from(q)]);
    f16_at(bytes, 0)
}

/// A byte of exponent, then halves: half of 2^(e − 127) · code.
pub(crate) fn mxfp4_whole(bytes: &[u8], numbers: &mut [i8; SMALL]) -> f32 {
    *numbers = nibbles(bytes, 1).map(|q| MXFP4_CODE[usize::from(q)]);
    let exponent = u32::from(bytes[0]);
    // The least two are below the smallest normal number.
    f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 })
}

/// 128 bytes of low halves, 64 of upper pairs of bits, 16 scales, `d`: d · scale · (q − 32), a scale for each 16.
pub(crate) fn q6_k_whole(bytes: &[u8], numbers: &mut [i8; 256]) -> [f32; 16] {
    let mut factors = [[0; 2]; 16];
    let d = q6_k_levels(bytes, numbers, &mut factors);
    factors.map(|[factor, _]| d * f32::from(factor.cast_signed()))
}

/// Its numbers, what `d` is multiplied by in each group (the first of two bytes, with a sign), and `d`.
pub(crate) fn q6_k_levels(bytes: &[u8], numbers: &mut [i8; 256], factors: &mut [[u8; 2]; 16]) -> f32 {
    let (low, high, scales) = (&bytes[..128], &bytes[128..192], &bytes[192..208]);
    for (factor, byte) in factors.iter_mut().zip(scales) {
        *factor = [*byte, 0];
    }
    // Arrays, of which the compiler takes many numbers at once.
    let halves = low.as_chunks::<64>().0.iter().zip(high.as_chunks::<32>().0);
    for ((low, high), out) in halves.zip(numbers.as_chunks_mut::<128>().0) {
        let (low, quarters) = (low.as_chunks::<32>().0, out.as_chunks_mut::<32>().0);
        for (quarter, out) in quarters.iter_mut().enumerate() {
            for ((x, low), high) in out.iter_mut().zip(&low[quarter % 2]).zip(high) {
                let low = if quarter < 2 { low & 15 } else { low >> 4 };
                *x = (low | (high >> (2 * quarter) & 3) << 4) as i8 - 32;
            }
        }
    }
    f16_at(bytes, 208)
}

fn scaled(bytes: &[u8], out: &mut [f32], whole: impl Fn(&[u8], &mut [i8; SMALL]) -> f32) {
    let mut numbers = [0; SMALL];
    let scale = whole(bytes, &mut numbers);
    for (x, q) in out.iter_mut().zip(numbers) {
        *x = scale * f32::from(q);
    }
}

pub(crate) fn q4_0(bytes: &[u8], out: &mut [f32]) {
    scaled(bytes, out, q4_0_whole);
}

pub(crate) fn q5_0(bytes: &[u8], out: &mut [f32]) {
    scaled(bytes, out, q5_0_whole);
}

pub(crate) fn q8_0(bytes: &[u8], out: &mut [f32]) {
    scaled(bytes, out, q8_0_whole);
}

pub(crate) fn iq4_nl(bytes: &[u8], out: &mut [f32]) {
    scaled(bytes, out, iq4_nl_whole);
}

pub(crate) fn mxfp4(bytes: &[u8], out: &mut [f32]) {
    scaled(bytes, out, mxfp4_whole);
}

pub(crate) fn q6_k(bytes: &[u8], out: &mut [f32]) {
    let mut numbers = [0; 256];
    let scales = q6_k_whole(bytes, &mut numbers);
    for ((out, numbers), scale) in out.chunks_exact_mut(16).zip(numbers.as_chunks::<16>().0).zip(scales) {
        for (x, q) in out.iter_mut().zip(numbers) {
            *x = scale * f32::from(*q);
        }
    }
}

/// `d`, `m`, halves: d · q + m.
pub(crate) fn q4_1(bytes: &[u8], out: &mut [f32]) {
    let (d, m) = (f16_at(bytes, 0), f16_at(bytes, 2));
    for (x, q) in out.iter_mut().zip(nibbles(bytes, 4)) {
        *x = d * f32::from(q) + m;
    }
}

/// `d`, `m`, fifth bits, halves: d · q + m.
pub(crate) fn q5_1(bytes: &[u8], out: &mut [f32]) {
    let (d, m) = (f16_at(bytes, 0), f16_at(bytes, 2));
    for (x, q) in out.iter_mut().zip(fives(bytes, 4)) {
        *x = d * f32::from(q) + m;
    }
}

pub(crate) fn q4_1_whole(bytes: &[u8], numbers: &mut [i8], group: &mut dyn FnMut(usize, f32, f32)) {
    group(0, f16_at(bytes, 0), -f16_at(bytes, 2));
    *thirty_two(numbers) = nibbles(bytes, 4).map(u8::cast_signed);
}

pub(crate) fn q5_1_whole(bytes: &[u8], numbers: &mut [i8], group: &mut dyn FnMut(usize, f32, f32)) {
    group(0, f16_at(bytes, 0), -f16_at(bytes, 2));
    *thirty_two(numbers) = fives(bytes, 4).map(u8::cast_signed);
}

/// Of eight groups of 32 the scale and the minimum, 6 bits each, out of 12 bytes.
fn scale_and_min(packed: &[u8], group: usize) -> [u8; 2] {
    if group < 4 {
        [packed[group] & 63, packed[group + 4] & 63]
    } else {
        let low = packed[group + 4];
        [low & 15 | packed[group - 4] >> 6 << 4, low >> 4 | packed[group] >> 6 << 4]
    }
}

pub(crate) fn q4_k_levels(bytes: &[u8], numbers: &mut [i8], factors: &mut [[u8; 2]; 8]) -> (f32, f32) {
    k_levels(bytes, &bytes[16..144], |_, _| 0, numbers, factors)
}

pub(crate) fn q5_k_levels(bytes: &[u8], numbers: &mut [i8], factors: &mut [[u8; 2]; 8]) -> (f32, f32) {
    let high = &bytes[16..48];
    k_levels(bytes, &bytes[48..176], |group, i| (high[i] >> group & 1) << 4, numbers, factors)
}

pub(crate) fn q4_k_whole(bytes: &[u8], numbers: &mut [i8], group: &mut dyn FnMut(usize, f32, f32)) {
    one_level(q4_k_levels, bytes, numbers, group);
}

pub(crate) fn q5_k_whole(bytes: &[u8], numbers: &mut [i8], group: &mut dyn FnMut(usize, f32, f32)) {
    one_level(q5_k_levels, bytes, numbers, group);
}

fn one_level(levels: LevelBlock, bytes: &[u8], numbers: &mut [i8], group: &mut dyn FnMut(usize, f32, f32)) {
    let mut factors = [[0; 2]; 8];
    let (d, dmin) = levels(bytes, numbers, &mut factors);
    for (index, [scale, min]) in factors.into_iter().enumerate() {
        group(index, d * f32::from(scale), dmin * f32::from(min));
    }
}

/// `d`, `dmin`, scales and minima, halves: d · scale · q − dmin · min.
pub(crate) fn q4_k(bytes: &[u8], out: &mut [f32]) {
    k_block(bytes, &bytes[16..144], |_, _| 0, out);
}

/// As `q4_k`, with fifth bits before the halves: bit `group` of byte `i` belongs to number `i` of the group.
pub(crate) fn q5_k(bytes: &[u8], out: &mut [f32]) {
    let high = &bytes[16..48];
    k_block(bytes, &bytes[48..176], |group, i| (high[i] >> group & 1) << 4, out);
}

/// A half of a group, with what is above it.
fn k_number(halves: &[u8], group: usize, i: usize, high: u8) -> u8 {
    let byte = halves[group / 2 * 32 + i];
    high | if group.is_multiple_of(2) { byte & 15 } else { byte >> 4 }
}

fn k_levels(
    bytes: &[u8],
    halves: &[u8],
    high: impl Fn(usize, usize) -> u8,
    numbers: &mut [i8],
    factors: &mut [[u8; 2]; 8],
) -> (f32, f32) {
    for (group, factors) in factors.iter_mut().enumerate() {
        *factors = scale_and_min(&bytes[4..16], group);
    }
    // 32 bytes have the low halves of one group and the high ones of the next.
    let (pairs, _) = numbers.as_chunks_mut::<64>();
    let (halves, _) = halves.as_chunks::<32>();
    for (pair, (numbers, halves)) in pairs.iter_mut().zip(halves).enumerate() {
        let (first, second) = numbers.split_at_mut(32);
        for (i, (x, byte)) in first.iter_mut().zip(halves).enumerate() {
            *x = (high(2 * pair, i) | byte & 15) as i8;
        }
        for (i, (x, byte)) in second.iter_mut().zip(halves).enumerate() {
            *x = (high(2 * pair + 1, i) | byte >> 4) as i8;
        }
    }
    (f16_at(bytes, 0), f16_at(bytes, 2))
}

fn k_block(bytes: &[u8], halves: &[u8], high: impl Fn(usize, usize) -> u8, out: &mut [f32]) {
    let (d, dmin) = (f16_at(bytes, 0), f16_at(bytes, 2));
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let [scale, min] = scale_and_min(&bytes[4..16], group).map(f32::from);
        let (scale, min) = (d * scale, dmin * min);
        for (i, x) in out.iter_mut().enumerate() {
            *x = scale * f32::from(k_number(halves, group, i, high(group, i))) - min;
        }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::{f16_at, fifth_bits};

    #[test]
    fn every_number_of_16_bits_is_widened_as_it_is() {
        for bits in 0..=u16::MAX {
            let expected = f16::from_bits(bits).to_f32();
            let found = f16_at(&bits.to_le_bytes(), 0);
            assert!(
                found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(),
                "{bits:#06x}"
            );
        }
    }

    #[test]
    fn every_eight_bits_become_eight_bytes() {
        for bits in 0..=u8::MAX {
            let expected: Vec<_> = (0..8).map(|i| (bits >> i & 1) << 4).collect();
            assert_eq!(fifth_bits(bits).to_le_bytes()[..], expected, "{bits:#04x}");
        }
    }
}
