//! Rows of whole numbers on their way into a panel: each row becomes words of neighbouring inputs, four of 8 bits, eight of 4,
//! sixteen of 6 bits in three words; then the words of all outputs are laid side by side.

#![cfg_attr(
    target_arch = "x86_64",
    allow(clippy::wildcard_imports, reason = "the intrinsics carry their origin in their names")
)]

use std::{cell::RefCell, ops::Range};

use crate::{
    lines::Lines,
    w8a8::dot::{CODES, QUAD},
};

/// The halves of four bytes.
const HALVES: u64 = 0x0f0f_0f0f;
/// In each of eight bytes the bits that differ from the one above them in a number outside −8 to 7.
const SIGNS: u64 = 0x7878_7878_7878_7878;
/// In each of eight bytes the bits that a number above 15 has.
const ABOVE: u64 = 0xf0f0_f0f0_f0f0_f0f0;
/// Turns four numbers from −8 to 7 into the same above −8.
const LIFT: u32 = 0x0808_0808;
/// Rows and words that are turned together.
#[cfg(target_arch = "x86_64")]
const TOGETHER: usize = 8;

/// Rows of a panel as words, `[output][word]`: memory that a thread uses for one panel after the other.
#[derive(Default)]
pub(super) struct Rows {
    numbers: Option<Lines>,
    scales: Option<Lines>,
}

thread_local! {
    static ROWS: RefCell<Rows> = const { RefCell::new(Rows { numbers: None, scales: None }) };
}

impl Rows {
    /// Call `fill` with room for as many words of numbers and of scales; None: there is not as much memory.
    pub(super) fn with_room<R>(
        numbers: usize,
        scales: usize,
        fill: impl FnOnce(&mut Lines, &mut Lines) -> R,
    ) -> Option<R> {
        ROWS.with_borrow_mut(|rows| {
            let numbers = Lines::at_least(4 * numbers, &mut rows.numbers)?;
            let scales = Lines::at_least(4 * scales, &mut rows.scales)?;
            Some(fill(numbers, scales))
        })
    }
}

/// Words of a row of numbers of 8 bits.
#[inline]
pub(super) fn bytes(numbers: &[i8], words: &mut [u32]) -> bool {
    let (quads, rest) = numbers.as_chunks::<QUAD>();
    let (whole, more) = words.split_at_mut(quads.len());
    for (quad, to) in quads.iter().zip(whole) {
        *to = u32::from_le_bytes(quad.map(i8::cast_unsigned));
    }
    more.fill(0);
    if let (Some(to), false) = (more.first_mut(), rest.is_empty()) {
        let mut quad = [0; QUAD];
        quad[..rest.len()].copy_from_slice(rest);
        *to = u32::from_le_bytes(quad.map(i8::cast_unsigned));
    }
    true
}

/// Words of a row of numbers of 4 bits, four inputs in the low halves of four bytes and the next four in the high ones;
/// false if one is not from −8 to 7, or, where they are not counted from the middle, from 0 to 15.
#[inline]
pub(super) fn halves(numbers: &[i8], is_middle: bool, words: &mut [u32]) -> bool {
    let mut outside = 0;
    let lift = if is_middle { LIFT } else { 0 };
    let mut word = |eight: &[i8; 2 * QUAD]| {
        let bits = u64::from_le_bytes(eight.map(i8::cast_unsigned));
        outside |= if is_middle { (bits ^ (bits >> 1)) & SIGNS } else { bits & ABOVE };
        ((bits & HALVES) as u32 ^ lift) | ((bits >> 32 & HALVES) as u32 ^ lift) << 4
    };
    let (eights, rest) = numbers.as_chunks::<{ 2 * QUAD }>();
    let (whole, more) = words.split_at_mut(eights.len());
    for (eight, to) in eights.iter().zip(whole) {
        *to = word(eight);
    }
    more.fill(0);
    if let (Some(to), false) = (more.first_mut(), rest.is_empty()) {
        let mut eight = [0; 2 * QUAD];
        eight[..rest.len()].copy_from_slice(rest);
        *to = word(&eight);
    }
    outside == 0
}

/// Words of a row of codes of 4 bits, as [`halves`]; false if no code stands for a number.
#[inline]
pub(super) fn codes(numbers: &[i8], words: &mut [u32]) -> bool {
    /// Of each number the code; 16: it has none.
    const CODE_OF: [u8; 256] = {
        let mut codes = [16; 256];
        let mut code = CODES.len();
        // The first of two codes of 0 is left.
        while code > 0 {
            code -= 1;
            codes[CODES[code].cast_unsigned() as usize] = code as u8;
        }
        codes
    };
    let mut outside = 0;
    words.fill(0);
    for (eight, word) in numbers.chunks(2 * QUAD).zip(words) {
        for (k, number) in eight.iter().enumerate() {
            let code = u32::from(CODE_OF[usize::from(number.cast_unsigned())]);
            outside |= code;
            *word |= (code & 15) << (8 * (k % QUAD) + 4 * (k / QUAD));
        }
    }
    outside & 16 == 0
}

/// Words of a row of numbers of 6 bits, of each four quads three in the lower bits of four bytes, and two bits of the fourth
/// above each of those; false if one is not from −32 to 31.
#[inline]
pub(super) fn sixes(numbers: &[i8], words: &mut [u32]) -> bool {
    /// A byte, four times.
    const fn each(byte: u8) -> u32 {
        u32::from_le_bytes([byte; QUAD])
    }
    let mut outside = 0;
    let mut three = |sixteen: &[i8; QUAD * QUAD]| {
        let quads = sixteen.as_chunks::<QUAD>().0;
        let [a, b, c, last] = [quads[0], quads[1], quads[2], quads[3]].map(|quad| {
            let bits = u32::from_le_bytes(quad.map(i8::cast_unsigned));
            // The upper three bits are alike in a number that fits; without two of them, and turned, it is 32 more.
            outside |= (bits ^ (bits >> 1)) & each(0x60);
            bits & each(0x3f) ^ each(0x20)
        });
        [a | (last & each(0x03)) << 6, b | (last & each(0x0c)) << 4, c | (last & each(0x30)) << 2]
    };
    let (sixteens, rest) = numbers.as_chunks::<{ QUAD * QUAD }>();
    let (whole, more) = words.as_chunks_mut::<3>().0.split_at_mut(sixteens.len());
    for (sixteen, to) in sixteens.iter().zip(whole) {
        *to = three(sixteen);
    }
    more.fill([0; 3]);
    if let (Some(to), false) = (more.first_mut(), rest.is_empty()) {
        let mut sixteen = [0; QUAD * QUAD];
        sixteen[..rest.len()].copy_from_slice(rest);
        *to = three(&sixteen);
    }
    outside == 0
}

/// Lay the words of some outputs of a panel side by side.
///
/// # Arguments
///
/// * `rows` – `[output][word]`, `per_row` words of each output of the panel.
/// * `given` – the outputs that are meant; the others' places stay as they are.
/// * `to` – `[word][output]`.
pub(super) fn turn(rows: &[u32], per_row: usize, outputs: usize, given: Range<usize>, to: &mut [u8]) {
    assert!(given.end <= outputs && rows.len() >= given.end * per_row && to.len() >= 4 * per_row * outputs);
    let scatter = |some: Range<usize>, words: Range<usize>, to: &mut [u8]| {
        for output in some {
            let row = &rows[output * per_row..][..per_row];
            for word in words.clone() {
                to[4 * (word * outputs + output)..][..4].copy_from_slice(&row[word].to_le_bytes());
            }
        }
    };
    #[cfg(target_arch = "x86_64")]
    if crate::simd::instructions::have_avx2() {
        let whole = given.start.next_multiple_of(TOGETHER)..given.end / TOGETHER * TOGETHER;
        if !whole.is_empty() {
            // SAFETY: the instructions were found; rows and places of these outputs lie in their arrays, as was seen above.
            unsafe { turn_eights(rows.as_ptr(), per_row, outputs, whole.clone(), to.as_mut_ptr()) };
            scatter(whole.clone(), per_row / TOGETHER * TOGETHER..per_row, to);
            scatter(given.start..whole.start, 0..per_row, to);
            scatter(whole.end..given.end, 0..per_row, to);
            return;
        }
    }
    scatter(given, 0..per_row, to);
}

/// [`turn`] of eights of words and of outputs: what is left of the words is not written.
///
/// # Safety
///
/// The machine has AVX2; `outputs` are multiples of eight, of which `per_row` words each may be read from `rows` on; as many
/// places as the whole panel has may be written from `to` on.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn turn_eights(rows: *const u32, per_row: usize, panel: usize, outputs: Range<usize>, to: *mut u8) {
    use std::arch::x86_64::*;
    for word in (0..per_row / TOGETHER * TOGETHER).step_by(TOGETHER) {
        for output in outputs.clone().step_by(TOGETHER) {
            // SAFETY: the caller lets the rows of these outputs be read, and the places of these words be written.
            unsafe {
                let from = rows.add(output * per_row + word);
                let row = |i: usize| _mm256_loadu_si256(from.add(i * per_row).cast());
                // Of each two rows the words by turns, then of each four, then of all: instructions keep to halves of 128
                // bits until then.
                let low = |i: usize| _mm256_unpacklo_epi32(row(i), row(i + 1));
                let high = |i: usize| _mm256_unpackhi_epi32(row(i), row(i + 1));
                let (low, high) = ([low(0), low(2), low(4), low(6)], [high(0), high(2), high(4), high(6)]);
                for (i, [first, second, third, fourth]) in [low, high].into_iter().enumerate() {
                    let fours = [
                        (_mm256_unpacklo_epi64(first, second), _mm256_unpacklo_epi64(third, fourth)),
                        (_mm256_unpackhi_epi64(first, second), _mm256_unpackhi_epi64(third, fourth)),
                    ];
                    for (j, (upper, lower)) in fours.into_iter().enumerate() {
                        let place = |i: usize| to.add(4 * ((word + i) * panel + output)).cast();
                        let word = 2 * i + j;
                        _mm256_storeu_si256(place(word), _mm256_permute2x128_si256::<0x20>(upper, lower));
                        _mm256_storeu_si256(place(word + 4), _mm256_permute2x128_si256::<0x31>(upper, lower));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::turn;

    #[test]
    fn words_of_some_outputs_go_to_their_places_and_no_others_are_touched() {
        for (outputs, per_row) in [(2, 3), (16, 8), (16, 13), (32, 1), (32, 24), (32, 35)] {
            let rows: Vec<u32> = (0..outputs * per_row).map(|i| i as u32 + 1).collect();
            for given in [0..outputs, 0..1, 1..outputs, outputs / 3..outputs - 1, 0..0] {
                let mut to = vec![0xff; 4 * outputs * per_row];
                turn(&rows, per_row, outputs, given.clone(), &mut to);
                for word in 0..per_row {
                    for output in 0..outputs {
                        let found = u32::from_le_bytes(to.as_chunks::<4>().0[word * outputs + output]);
                        let written = rows[output * per_row + word];
                        let expected = if given.contains(&output) { written } else { u32::MAX };
                        assert_eq!(found, expected, "word {word}, output {output}, {given:?} of {outputs}");
                    }
                }
            }
        }
    }
}
