//! The experts of a block: which of them compute a token, their products, and the sum of these.
//!
//! The rows of an expert lie side by side, and the products of all experts are one call of the threads, so that a step of few
//! tokens reads the weights of the chosen ones as if they were those of one layer. A token's results are added in the order of
//! its experts' numbers, so its bits do not depend on the other tokens.

use super::{DecoderError, mlp::ExpertMlp};
use crate::{
    attention::TokenRows,
    element::Element,
    gates::apply_gates,
    kernel::Kernel,
    linear::{
        OutRows,
        grouped::{Group, grouped_linear},
    },
    lines::Lines,
    threads::{Threads, ahead::Ahead},
};

/// Rows of experts that are computed at once, at most: a token has one for each of its experts.
const MOST_ROWS: usize = 2048;
/// As many rows may always be computed at once; more of them have at most so many numbers in all.
const LEAST_ROWS: usize = 256;
const MOST_NUMBERS: usize = 1 << 24;
/// Logits below which no helper is woken to choose.
const MIN_SHARED_LOGITS: usize = 1 << 13;
/// Numbers below which no helper is woken to move or to add them.
const MIN_SHARED_NUMBERS: usize = 1 << 16;

/// Memory for a step's experts, used again by every block.
#[derive(Debug, Default)]
pub(super) struct ExpertRoom {
    /// `[token][chosen]`, the experts of each token, ascending, with their weights.
    choices: Vec<Choice>,
    /// Of each expert its first row; one more: all rows.
    starts: Vec<usize>,
    /// The token of each row.
    tokens: Vec<u32>,
    /// Inputs, inner features and results of the rows that are computed.
    rows: Option<Lines>,
    /// `[token][hidden_size]`, the sums.
    totals: Vec<f32>,
}

/// An expert of a token.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Choice {
    expert: u32,
    weight: f32,
    /// Among the rows of all experts.
    row: u32,
}

impl ExpertMlp {
    /// Adds the experts' results to the stream, or (`adds` off) puts them in its place.
    ///
    /// # Arguments
    ///
    /// * `logits`: `[num_tokens, experts]`, what the router gives.
    /// * `normed`: `[num_tokens, hidden_size]`, what the experts read.
    /// * `after`: what the product after these reads.
    /// * `hidden`: as `normed`, the stream.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a block")]
    pub(super) fn add<E: Element>(
        &self,
        logits: &[E],
        normed: &[E],
        adds: bool,
        after: Option<Ahead>,
        room: &mut ExpertRoom,
        threads: &Threads,
        hidden: &mut [E],
    ) -> Result<(), DecoderError> {
        let num_tokens = logits.len() / self.experts.len();
        let width = self.router.in_features();
        self.choose(logits, threads, &mut room.choices);
        self.place(room);
        room.totals.clear();
        room.totals.resize(num_tokens * width, 0.0);
        let num_rows = num_tokens * self.num_chosen;
        let row = 2 * width + self.experts[0].up.out_features();
        let most_rows = (MOST_NUMBERS / row).clamp(LEAST_ROWS, MOST_ROWS);
        for start in (0..num_rows).step_by(most_rows) {
            let end = num_rows.min(start + most_rows);
            let after = after.filter(|_| end == num_rows);
            self.compute(start..end, normed, after, room, threads)?;
        }
        let totals = &room.totals;
        let stream = Places(hidden.as_mut_ptr());
        threads.for_each(num_tokens, num_tokens * width >= MIN_SHARED_NUMBERS, |token| {
            // SAFETY: the stream has `width` numbers of each token, and each part writes its own token's.
            let stream = unsafe { stream.slice(token * width, width) };
            for (x, total) in stream.iter_mut().zip(&totals[token * width..][..width]) {
                *x = E::narrow(if adds { x.widen() + total } else { *total });
            }
        });
        Ok(())
    }

    /// The experts of each token and their weights.
    fn choose<E: Element>(&self, logits: &[E], threads: &Threads, choices: &mut Vec<Choice>) {
        let (num_experts, num_chosen) = (self.experts.len(), self.num_chosen);
        choices.clear();
        choices.resize(logits.len() / num_experts * num_chosen, Choice::default());
        let places = Places(choices.as_mut_ptr());
        threads.for_each(logits.len() / num_experts, logits.len() >= MIN_SHARED_LOGITS, |token| {
            // SAFETY: there are `num_chosen` choices of each token, and each part writes its own token's.
            let choices = unsafe { places.slice(token * num_chosen, num_chosen) };
            choose_of(&logits[token * num_experts..][..num_experts], self.is_normed, choices);
        });
    }

    /// Gives the rows their places: those of an expert side by side, in the order of the tokens.
    fn place(&self, room: &mut ExpertRoom) {
        let ExpertRoom { choices, starts, tokens, .. } = room;
        starts.clear();
        starts.resize(self.experts.len() + 1, 0);
        for choice in choices.iter() {
            starts[choice.expert as usize + 1] += 1;
        }
        for expert in 0..self.experts.len() {
            starts[expert + 1] += starts[expert];
        }
        let mut next = starts.clone();
        tokens.clear();
        tokens.resize(choices.len(), 0);
        for (index, choice) in choices.iter_mut().enumerate() {
            let row = next[choice.expert as usize];
            next[choice.expert as usize] += 1;
            choice.row = row as u32;
            tokens[row] = (index / self.num_chosen) as u32;
        }
    }

    /// Some rows' products, added to the totals of their tokens.
    fn compute<E: Element>(
        &self,
        rows: std::ops::Range<usize>,
        normed: &[E],
        after: Option<Ahead>,
        room: &mut ExpertRoom,
        threads: &Threads,
    ) -> Result<(), DecoderError> {
        let (first, num_chosen) = (&self.experts[0], self.num_chosen);
        let (width, inner_row) = (first.up.in_features(), first.up.out_features());
        let (num_rows, num_tokens) = (rows.len(), normed.len() / width);
        let num_bytes = num_rows * (2 * width + inner_row) * size_of::<E>();
        let memory = DecoderError::Memory { num_bytes, num_tokens };
        let all = Lines::at_least(num_bytes, &mut room.rows).ok_or(memory)?.as_mut_slice::<E>();
        let (inner, rest) = all.split_at_mut(num_rows * inner_row);
        let (results, inputs) = rest.split_at_mut(num_rows * width);

        let is_one = num_tokens == 1;
        if !is_one {
            let (tokens, places) = (&room.tokens[rows.clone()], Places(inputs.as_mut_ptr()));
            threads.for_each(num_rows, num_rows * width >= MIN_SHARED_NUMBERS, |row| {
                // SAFETY: there is room for an input of each row, and each part writes its own row's.
                let input = unsafe { places.slice(row * width, width) };
                input.copy_from_slice(&normed[tokens[row] as usize * width..][..width]);
            });
        }
        let x = TokenRows { data: if is_one { normed } else { &*inputs }, stride: width };
        let groups = |layer: fn(&super::DenseMlp) -> &crate::packed::PackedLinear| -> Vec<Group<'_>> {
            let own = room.starts.windows(2).map(|pair| pair[0].max(rows.start)..pair[1].min(rows.end));
            let own = own.zip(&self.experts).filter(|(own, _)| own.start < own.end);
            own.map(|(own, expert)| Group {
                layer: layer(expert),
                rows: own.start - rows.start..own.end - rows.start,
            })
            .collect()
        };
        let out = OutRows { data: &mut *inner, stride: inner_row };
        grouped_linear(&groups(|expert| &expert.up), x, if is_one { 1 } else { num_rows }, threads, out)?;
        apply_gates(inner, inner_row, first.activation, Kernel::best_for_products(), threads);
        let x = TokenRows { data: &*inner, stride: inner_row };
        let out = OutRows { data: &mut *results, stride: width };
        threads.announce(after);
        grouped_linear(&groups(|expert| &expert.down), x, num_rows, threads, out)?;

        let (results, choices) = (&*results, &room.choices);
        let totals = Places(room.totals.as_mut_ptr());
        threads.for_each(num_tokens, num_rows * width >= MIN_SHARED_NUMBERS, |token| {
            // SAFETY: there is a total of each token, and each part writes its own token's.
            let total = unsafe { totals.slice(token * width, width) };
            for choice in &choices[token * num_chosen..][..num_chosen] {
                let row = choice.row as usize;
                if rows.contains(&row) {
                    let result = &results[(row - rows.start) * width..][..width];
                    total.iter_mut().zip(result).for_each(|(sum, x)| *sum += choice.weight * x.widen());
                }
            }
        });
        Ok(())
    }
}

/// The experts of a token, ascending: those with the largest logits, the first of equals. Their weights are a softmax over all
/// logits, perhaps divided by their sum.
fn choose_of<E: Element>(logits: &[E], is_normed: bool, choices: &mut [Choice]) {
    // While they are chosen, logits are in the place of weights, the largest first.
    let is_larger = |logit: f32, choice: &Choice| logit > choice.weight;
    let mut count = 0;
    for (expert, logit) in logits.iter().enumerate() {
        let logit = logit.widen();
        if count == choices.len() && !is_larger(logit, &choices[count - 1]) {
            continue;
        }
        let place = choices[..count].iter().take_while(|choice| !is_larger(logit, choice)).count();
        count = choices.len().min(count + 1);
        choices[place..count].rotate_right(1);
        choices[place] = Choice { expert: expert as u32, weight: logit, row: 0 };
    }
    let largest = choices[0].weight;
    let all: f32 = logits.iter().map(|logit| (logit.widen() - largest).exp()).sum();
    for choice in choices.iter_mut() {
        choice.weight = (choice.weight - largest).exp() / all;
    }
    if is_normed {
        let sum: f32 = choices.iter().map(|choice| choice.weight).sum();
        for choice in choices.iter_mut() {
            choice.weight /= sum;
        }
    }
    choices.sort_unstable_by_key(|choice| choice.expert);
}

/// Memory of which parts write different places.
struct Places<T>(*mut T);

// SAFETY: see `slice`: no place is written by two parts.
unsafe impl<T: Send> Sync for Places<T> {}

impl<T> Places<T> {
    /// # Safety
    ///
    /// They lie in the memory, and no other part touches them meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that slices do not overlap")]
    unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        // SAFETY: the caller gives places that lie in the memory and are this part's alone.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(logits: &[f32], num_chosen: usize, is_normed: bool) -> Vec<(u32, f32)> {
        let mut choices = vec![Choice::default(); num_chosen];
        choose_of(logits, is_normed, &mut choices);
        choices.iter().map(|choice| (choice.expert, choice.weight)).collect()
    }

    #[test]
    fn the_largest_logits_choose_and_weigh() {
        let logits = [0.0, 3.0, 1.0, 2.0];
        let all: f32 = logits.iter().map(|x: &f32| (x - 3.0).exp()).sum();
        let found = chosen(&logits, 2, false);
        assert_eq!(found, [(1, 1.0 / all), (3, (-1.0_f32).exp() / all)]);
        let normed = chosen(&logits, 2, true);
        assert!((normed[0].1 + normed[1].1 - 1.0).abs() < 1e-6);
        assert!((normed[0].1 / normed[1].1 - found[0].1 / found[1].1).abs() < 1e-5);
        let of_all: f32 = chosen(&logits, 4, false).iter().map(|(_, weight)| weight).sum();
        assert!((of_all - 1.0).abs() < 1e-6);
    }

    #[test]
    fn of_equal_logits_the_first_are_chosen() {
        let experts = |logits: &[f32], count| -> Vec<u32> {
            chosen(logits, count, true).iter().map(|(expert, _)| *expert).collect()
        };
        assert_eq!(experts(&[1.0, 1.0, 1.0, 1.0], 2), [0, 1]);
        assert_eq!(experts(&[0.0, 1.0, 2.0, 1.0, 1.0], 3), [1, 2, 3]);
        assert_eq!(experts(&[-0.0, 0.0, -1.0], 1), [0]);
        assert_eq!(experts(&[f32::NEG_INFINITY; 3], 2), [0, 1]);
    }

    #[test]
    fn what_is_no_number_gives_none_and_chooses_as_many() {
        for logits in [[f32::NAN, 1.0, 2.0], [1.0, f32::NAN, 2.0], [f32::NAN; 3], [1.0, f32::INFINITY, 2.0]] {
            let found = chosen(&logits, 2, true);
            assert_eq!(found.len(), 2);
            assert!(found[0].0 < found[1].0 && found.iter().any(|(_, weight)| weight.is_nan()), "{found:?}");
        }
    }
}
