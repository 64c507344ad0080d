//! One block of each type: bytes in, numbers out. Each sum and product is rounded once, in the order in which the format
//! is described, so that the bits are those of every other careful reader.

use half::f16;

/// Writes the whole numbers of a block, and gives the scale of each of its groups.
pub(crate) type WholeBlock = fn(&[u8], &mut [i8], &mut dyn FnMut(usize, f32));

/// Writes the whole numbers of a block, and gives scale and minimum of each of its groups of 32.
pub(crate) type MinimumBlock = fn(&[u8], &mut [i8], &mut dyn FnMut(usize, f32, f32));
/// Writes the whole numbers of a block and the factors of its groups, and gives the block's scale and minimum.
pub(crate) type LevelBlock = fn(&[u8], &mut [i8], &mut [[u8; 2]; 8]) -> (f32, f32);

/// The number of 16 bits that lies at `at`.
pub(crate) fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// The halves of 16 bytes: the low ones, then the high ones.
fn nibbles(bytes: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    let (low, high) = out.split_at_mut(16);
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
    out
}

/// The halves of 16 bytes, each with a fifth bit from the four bytes at `high_at`.
fn fives(bytes: &[u8], high_at: usize) -> [u8; 32] {
    let high = &bytes[high_at..high_at + 4];
    let high = u32::from_le_bytes([high[0], high[1], high[2], high[3]]);
    let mut out = nibbles(&bytes[high_at + 4..]);
    for (i, q) in out.iter_mut().enumerate() {
        *q |= ((high >> i & 1) as u8) << 4;
    }
    out
}

/// `d`, then the halves: d · (q − 8).
pub(crate) fn q4_0_whole(bytes: &[u8], numbers: &mut [i8], scale: &mut dyn FnMut(usize, f32)) {
    scale(0, f16_at(bytes, 0));
    for (x, q) in numbers.iter_mut().zip(nibbles(&bytes[2..])) {
        *x = q as i8 - 8;
    }
}

/// `d`, fifth bits, halves: d · (q − 16).
pub(crate) fn q5_0_whole(bytes: &[u8], numbers: &mut [i8], scale: &mut dyn FnMut(usize, f32)) {
    scale(0, f16_at(bytes, 0));
    for (x, q) in numbers.iter_mut().zip(fives(bytes, 2)) {
        *x = q as i8 - 16;
    }
}

/// `d`, then bytes: d · q.
pub(crate) fn q8_0_whole(bytes: &[u8], numbers: &mut [i8], scale: &mut dyn FnMut(usize, f32)) {
    scale(0, f16_at(bytes, 0));
    for (x, byte) in numbers.iter_mut().zip(&bytes[2..]) {
        *x = *byte as i8;
    }
}

/// 128 bytes of low halves, 64 of upper pairs of bits, 16 scales, `d`: d · scale · (q − 32), a scale for each 16.
pub(crate) fn q6_k_whole(bytes: &[u8], numbers: &mut [i8], scale: &mut dyn FnMut(usize, f32)) {
    let (low, high, scales, d) = (&bytes[..128], &bytes[128..192], &bytes[192..208], f16_at(bytes, 208));
    for (group, byte) in scales.iter().enumerate() {
        scale(group, d * f32::from(*byte as i8));
    }
    for ((low, high), out) in
        low.chunks_exact(64).zip(high.chunks_exact(32)).zip(numbers.chunks_exact_mut(128))
    {
        for (i, high) in high.iter().enumerate() {
            let quarters = [low[i] & 15, low[i + 32] & 15, low[i] >> 4, low[i + 32] >> 4];
            for (quarter, low) in quarters.into_iter().enumerate() {
                out[quarter * 32 + i] = (low | (high >> (2 * quarter) & 3) << 4) as i8 - 32;
            }
        }
    }
}

fn scaled<const N: usize, const GROUPS: usize>(bytes: &[u8], out: &mut [f32], whole: WholeBlock) {
    let (mut numbers, mut scales) = ([0_i8; N], [0.0_f32; GROUPS]);
    whole(bytes, &mut numbers, &mut |group, scale| scales[group] = scale);
    for ((out, numbers), scale) in
        out.chunks_exact_mut(N / GROUPS).zip(numbers.chunks_exact(N / GROUPS)).zip(scales)
    {
        for (x, q) in out.iter_mut().zip(numbers) {
            *x = scale * f32::from(*q);
        }
    }
}

pub(crate) fn q4_0(bytes: &[u8], out: &mut [f32]) {
    scaled::<32, 1>(bytes, out, q4_0_whole);
}

pub(crate) fn q5_0(bytes: &[u8], out: &mut [f32]) {
    scaled::<32, 1>(bytes, out, q5_0_whole);
}

pub(crate) fn q8_0(bytes: &[u8], out: &mut [f32]) {
    scaled::<32, 1>(bytes, out, q8_0_whole);
}

pub(crate) fn q6_k(bytes: &[u8], out: &mut [f32]) {
    scaled::<256, 16>(bytes, out, q6_k_whole);
}

/// `d`, `m`, halves: d · q + m.
pub(crate) fn q4_1(bytes: &[u8], out: &mut [f32]) {
    let (d, m) = (f16_at(bytes, 0), f16_at(bytes, 2));
    for (x, q) in out.iter_mut().zip(nibbles(&bytes[4..])) {
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
    numbers.iter_mut().zip(nibbles(&bytes[4..])).for_each(|(x, q)| *x = q as i8);
}

pub(crate) fn q5_1_whole(bytes: &[u8], numbers: &mut [i8], group: &mut dyn FnMut(usize, f32, f32)) {
    group(0, f16_at(bytes, 0), -f16_at(bytes, 2));
    numbers.iter_mut().zip(fives(bytes, 4)).for_each(|(x, q)| *x = q as i8);
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
    for ((group, numbers), factors) in numbers.chunks_exact_mut(32).enumerate().zip(factors) {
        *factors = scale_and_min(&bytes[4..16], group);
        for (i, x) in numbers.iter_mut().enumerate() {
            *x = k_number(halves, group, i, high(group, i)) as i8;
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
