//! Rows of whole numbers that lie in words of 32 bits, as AWQ, GPTQ, compressed-tensors and MXFP4 have them: taken out by the
//! threads that pack them, a panel's at a time, into memory that stays near the processor.

use std::{
    cell::RefCell,
    sync::atomic::{AtomicU64, Ordering},
};

use ::cpu_kernels::ZeroForm;
use pyo3::{exceptions::PyValueError, prelude::*};

/// Rows that are taken out at once: a panel's.
const ROWS_TOGETHER: usize = 32;
/// Which of eight neighbouring outputs each nibble of AWQ's words is, from the lowest on.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
const WORD_BITS: usize = 32;

/// How numbers lie in words.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// `[input][word]`, the outputs of a word in AWQ's order.
    Awq,
    /// `[word][output]`, neighbouring inputs in a word.
    Gptq,
    /// `[output][word]`, neighbouring inputs in a word.
    Packed,
}

/// Rows of one tensor.
pub(crate) struct WordRows<'a> {
    words: &'a [u32],
    /// Words from one row of words to the next.
    stride: usize,
    layout: Layout,
    bits: usize,
    /// What every number is less.
    less: u8,
    /// Whether numbers of 4 bits are codes, as MXFP4 has them; rows get what they stand for.
    is_coded: bool,
    pub(crate) num_rows: usize,
    num_inputs: usize,
    /// Which input each place of a row is; None: the one of that place.
    order: Option<Vec<u32>>,
    /// Tells these rows from those of other tensors.
    number: u64,
}

/// What a thread has taken out last: `[row][input]`.
struct Window {
    number: u64,
    first: usize,
    numbers: Vec<i8>,
}

thread_local! {
    static WINDOW: RefCell<Window> = const { RefCell::new(Window { number: 0, first: 0, numbers: Vec::new() }) };
}

impl<'a> WordRows<'a> {
    /// # Errors
    ///
    /// A layout or a number of bits that is not known, words that do not hold rows of so many inputs, or an order that does
    /// not name inputs.
    pub(crate) fn new(
        words: &'a [u32],
        (height, width): (usize, usize),
        (layout, bits, less): (&str, usize, u8),
        num_inputs: usize,
        order: Option<Vec<u32>>,
    ) -> PyResult<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let is_coded = layout == "mxfp4";
        let layout = match (layout, bits) {
            ("awq", 4) => Layout::Awq,
            ("gptq", 4 | 8) => Layout::Gptq,
            ("mxfp4", 4) | ("packed", 4 | 8) => Layout::Packed,
            _ => {
                let message = format!("there is no layout {layout:?} of words with numbers of {bits} bits");
                return Err(PyValueError::new_err(message));
            }
        };
        let in_words = (num_inputs * bits).div_ceil(WORD_BITS);
        let (num_rows, found, expected) = match layout {
            Layout::Awq => (width * (WORD_BITS / bits), height, num_inputs),
            Layout::Gptq => (width, height, in_words),
            Layout::Packed => (height, width, in_words),
        };
        if found != expected || words.len() != height * width {
            let message = format!("words ({height}, {width}) do not hold rows of {num_inputs} inputs");
            return Err(PyValueError::new_err(message));
        }
        if let Some(order) = &order
            && (order.len() != num_inputs || order.iter().any(|&input| input as usize >= num_inputs))
        {
            let message = format!("the order of inputs does not name {num_inputs} of them");
            return Err(PyValueError::new_err(message));
        }
        // Relaxed: numbers have to differ, and nothing else depends on them.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self { words, stride: width, layout, bits, less, is_coded, num_rows, num_inputs, order, number })
    }

    /// Write a row's numbers.
    pub(crate) fn write_row(&self, row: usize, to: &mut [i8]) {
        WINDOW.with_borrow_mut(|window| {
            let first = row / ROWS_TOGETHER * ROWS_TOGETHER;
            if window.number != self.number || window.first != first {
                self.fill(first, &mut window.numbers);
                (window.number, window.first) = (self.number, first);
            }
            let from = &window.numbers[(row - first) * self.row_len()..][..self.num_inputs];
            match &self.order {
                None => to.copy_from_slice(from),
                Some(order) => to.iter_mut().zip(order).for_each(|(to, &input)| *to = from[input as usize]),
            }
        });
    }

    /// Room for a row: whole words.
    fn row_len(&self) -> usize {
        self.num_inputs.next_multiple_of(WORD_BITS / self.bits)
    }

    fn fill(&self, first: usize, numbers: &mut Vec<i8>) {
        let (count, len) = (ROWS_TOGETHER.min(self.num_rows - first), self.row_len());
        numbers.resize(count * len, 0);
        let signed = |number: u8| number.wrapping_sub(self.less).cast_signed();
        let place = |word: u32, to: &mut [i8]| {
            if self.is_coded {
                let stand_for = halves(word).map(|code| ZeroForm::CODES[usize::from(code)]);
                to.copy_from_slice(&stand_for);
            } else if self.bits == 4 {
                to.iter_mut().zip(halves(word)).for_each(|(to, number)| *to = signed(number));
            } else {
                to.iter_mut().zip(word.to_le_bytes()).for_each(|(to, number)| *to = signed(number));
            }
        };
        let per_word = WORD_BITS / self.bits;
        match self.layout {
            Layout::Awq => {
                for (column, rows) in numbers.chunks_exact_mut(per_word * len).enumerate() {
                    let column = first / per_word + column;
                    for (input, words) in self.words.chunks_exact(self.stride).enumerate() {
                        for (number, output) in halves(words[column]).into_iter().zip(AWQ_ORDER) {
                            rows[output * len + input] = signed(number);
                        }
                    }
                }
            }
            Layout::Gptq => {
                for (index, words) in self.words.chunks_exact(self.stride).enumerate() {
                    for (row, &word) in numbers.chunks_exact_mut(len).zip(&words[first..first + count]) {
                        place(word, &mut row[index * per_word..][..per_word]);
                    }
                }
            }
            Layout::Packed => {
                let rows = numbers
                    .chunks_exact_mut(len)
                    .zip(self.words[first * self.stride..].chunks_exact(self.stride));
                for (row, words) in rows {
                    for (to, &word) in row.chunks_exact_mut(per_word).zip(words) {
                        place(word, to);
                    }
                }
            }
        }
    }
}

/// The eight halves of four bytes, the lowest first.
fn halves(word: u32) -> [u8; 8] {
    let bits = u64::from(word);
    let bits = (bits | bits << 16) & 0x0000_ffff_0000_ffff;
    let bits = (bits | bits << 8) & 0x00ff_00ff_00ff_00ff;
    ((bits | bits << 4) & 0x0f0f_0f0f_0f0f_0f0f).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::halves;

    #[test]
    fn halves_come_the_lowest_first() {
        assert_eq!(halves(0x8765_4321), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(halves(0xf0e1_d2c3), [3, 12, 2, 13, 1, 14, 0, 15]);
    }
}
