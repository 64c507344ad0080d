//! Moves a row of whole numbers into its panel, four neighbouring inputs at a time: so they lie side by side there.

use crate::w8a8::dot::QUAD;

/// The halves of four bytes.
const HALVES: u64 = 0x0f0f_0f0f;
/// In each of eight bytes the bits that differ from the one above them in a number outside −8 to 7.
const SIGNS: u64 = 0x7878_7878_7878_7878;
/// In each of eight bytes the bits that a number above 15 has.
const ABOVE: u64 = 0xf0f0_f0f0_f0f0_f0f0;
/// Turns four numbers from −8 to 7 into the same above −8.
const LIFT: u32 = 0x0808_0808;

/// Numbers of 8 bits of one output of a panel.
pub(super) fn place_bytes(numbers: &[i8], output: usize, outputs: usize, panel: &mut [u8]) {
    let mut lines = panel.chunks_exact_mut(QUAD * outputs);
    let (quads, rest) = numbers.as_chunks::<QUAD>();
    for (quad, line) in quads.iter().zip(&mut lines) {
        line[output * QUAD..][..QUAD].copy_from_slice(&quad.map(i8::cast_unsigned));
    }
    if let Some(line) = lines.next() {
        let places = line[output * QUAD..].iter_mut().zip(rest);
        places.for_each(|(place, number)| *place = number.cast_unsigned());
    }
}

/// Numbers of 4 bits of one output of a panel, four inputs in the low halves of four bytes and the next four in the high
/// ones; false if one is not from −8 to 7, or, where they are not counted from the middle, from 0 to 15.
pub(super) fn place_halves(
    numbers: &[i8],
    is_middle: bool,
    output: usize,
    outputs: usize,
    panel: &mut [u8],
) -> bool {
    let mut outside = 0;
    let mut place = |eight: [i8; 2 * QUAD], line: &mut [u8]| {
        let bits = u64::from_le_bytes(eight.map(i8::cast_unsigned));
        outside |= if is_middle { (bits ^ (bits >> 1)) & SIGNS } else { bits & ABOVE };
        let lift = if is_middle { LIFT } else { 0 };
        let (low, high) = ((bits & HALVES) as u32 ^ lift, (bits >> 32 & HALVES) as u32 ^ lift);
        line[output * QUAD..][..QUAD].copy_from_slice(&(low | high << 4).to_le_bytes());
    };
    let mut lines = panel.chunks_exact_mut(QUAD * outputs);
    let (eights, rest) = numbers.as_chunks::<{ 2 * QUAD }>();
    for (eight, line) in eights.iter().zip(&mut lines) {
        place(*eight, line);
    }
    if let (Some(line), false) = (lines.next(), rest.is_empty()) {
        let mut eight = [0; 2 * QUAD];
        eight[..rest.len()].copy_from_slice(rest);
        place(eight, line);
    }
    outside == 0
}

/// Numbers of 6 bits of one output of a panel, of each four quads three in the lower bits of four bytes, and two bits of the
/// fourth above each of those; false if one is not from −32 to 31.
pub(super) fn place_sixes(numbers: &[i8], output: usize, outputs: usize, panel: &mut [u8]) -> bool {
    /// A byte, four times.
    const fn each(byte: u8) -> u32 {
        u32::from_le_bytes([byte; QUAD])
    }
    let mut outside = 0;
    let mut place = |sixteen: &[i8; QUAD * QUAD], block: &mut [u8]| {
        let quads = sixteen.as_chunks::<QUAD>().0;
        let [a, b, c, last] = [quads[0], quads[1], quads[2], quads[3]].map(|quad| {
            let bits = u32::from_le_bytes(quad.map(i8::cast_unsigned));
            // The upper three bits are alike in a number that fits; without two of them, and turned, it is 32 more.
            outside |= (bits ^ (bits >> 1)) & each(0x60);
            bits & each(0x3f) ^ each(0x20)
        });
        let lines =
            [a | (last & each(0x03)) << 6, b | (last & each(0x0c)) << 4, c | (last & each(0x30)) << 2];
        for (line, bytes) in block.chunks_exact_mut(QUAD * outputs).zip(lines) {
            line[output * QUAD..][..QUAD].copy_from_slice(&bytes.to_le_bytes());
        }
    };
    let mut blocks = panel.chunks_exact_mut(3 * QUAD * outputs);
    let (sixteens, rest) = numbers.as_chunks::<{ QUAD * QUAD }>();
    for (sixteen, block) in sixteens.iter().zip(&mut blocks) {
        place(sixteen, block);
    }
    if let (Some(block), false) = (blocks.next(), rest.is_empty()) {
        let mut sixteen = [0; QUAD * QUAD];
        sixteen[..rest.len()].copy_from_slice(rest);
        place(&sixteen, block);
    }
    outside == 0
}
