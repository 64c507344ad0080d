//! The experts of a block: which of them compute a token, their products, and the sum of these.
//!
//! The rows of an expert lie side by side, and the products of all experts are one call of the threads, so that a step of few
//! tokens reads the weights of the chosen ones as if they were those of one layer. A token's results are added in the order of
//! its experts' numbers, so its bits do not depend on the other tokens.

use super::{
    DecoderError,
    mlp::ExpertMlp,
    routing::{Choice, sigmoid},
};
use crate::{
    attention::TokenRows,
    element::Element,
    finish::Activation,
    gates::apply_gates,
    kernel::Kernel,
    linear::{
        Epilogue, OutRows, Residual,
        grouped::{Group, grouped_linear},
        linear,
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
    /// What a token's choice needs room for.
    scores: Vec<f32>,
    /// `[token][hidden_size]` and `[token][expert]`: what the router reads and gives in 32 bits, if the stream has 16.
    wide: (Vec<f32>, Vec<f32>),
    /// `[token][hidden_size]` and `[token]`: what the shared MLP gives, and the logits of its gate.
    shared: Option<Lines>,
    /// Of each expert its first row; one more: all rows.
    starts: Vec<usize>,
    /// The token of each row.
    tokens: Vec<u32>,
    /// Inputs, inner features and results of the rows that are computed.
    rows: Option<Lines>,
    /// `[token][hidden_size]`, the sums.
    totals: Vec<f32>,
}

impl ExpertMlp {
    /// Adds the results of the experts that `choose` chose to the stream, or (`adds` off) puts them in its place.
    ///
    /// # Arguments
    ///
    /// * `normed`: `[num_tokens, hidden_size]`, what the experts read.
    /// * `after`: what the product after these reads.
    /// * `hidden`: as `normed`, the stream.
    pub(super) fn add<E: Element>(
        &self,
        normed: &[E],
        adds: bool,
        after: Option<Ahead>,
        room: &mut ExpertRoom,
        threads: &Threads,
        hidden: &mut [E],
    ) -> Result<(), DecoderError> {
        let width = self.router.in_features();
        let num_tokens = normed.len() / width;
        self.place(room);
        self.begin_totals::<E>(num_tokens, room, threads);
        let num_rows = num_tokens * self.routing.num_chosen;
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
    ///
    /// # Arguments
    ///
    /// * `logits`: `[num_tokens, experts]`, what the router gives.
    pub(super) fn choose<E: Element>(&self, logits: &[E], room: &mut ExpertRoom, threads: &Threads) {
        self.choose_of(logits, &mut room.choices, &mut room.scores, threads);
    }

    /// As `choose`, by the router's product in 32 bits.
    pub(super) fn choose_widely<E: Element>(
        &self,
        normed: &[E],
        room: &mut ExpertRoom,
        threads: &Threads,
    ) -> Result<(), DecoderError> {
        let width = self.router.in_features();
        let num_tokens = normed.len() / width;
        let (inputs, logits) = &mut room.wide;
        inputs.clear();
        inputs.extend(normed.iter().map(|x| x.widen()));
        logits.clear();
        logits.resize(num_tokens * self.experts.len(), 0.0);
        let x = TokenRows { data: &*inputs, stride: width };
        let to = OutRows { data: &mut *logits, stride: self.experts.len() };
        let plain = Epilogue { activation: Activation::None, residual: Residual::None };
        linear(&self.router, x, num_tokens, &plain, threads, to)?;
        self.choose_of(logits, &mut room.choices, &mut room.scores, threads);
        Ok(())
    }

    fn choose_of<E: Element>(
        &self,
        logits: &[E],
        choices: &mut Vec<Choice>,
        scores: &mut Vec<f32>,
        threads: &Threads,
    ) {
        let (num_experts, num_chosen) = (self.experts.len(), self.routing.num_chosen);
        let (num_tokens, needed) = (logits.len() / num_experts, self.routing.room(num_experts));
        choices.clear();
        choices.resize(num_tokens * num_chosen, Choice::default());
        scores.clear();
        scores.resize(num_tokens * needed, 0.0);
        let (places, scores) = (Places(choices.as_mut_ptr()), Places(scores.as_mut_ptr()));
        threads.for_each(num_tokens, logits.len() >= MIN_SHARED_LOGITS, |token| {
            // SAFETY: there are `num_chosen` choices of each token, and each part writes its own token's.
            let choices = unsafe { places.slice(token * num_chosen, num_chosen) };
            // SAFETY: likewise, of the numbers that a choice needs.
            let room = unsafe { scores.slice(token * needed, needed) };
            let own = &logits[token * num_experts..][..num_experts];
            self.routing.choose(num_experts, |expert| own[expert].widen(), room, choices);
        });
    }

    /// Room for what the shared MLP gives, `[num_tokens, hidden_size]`, and for the logits of its gate, `[num_tokens]`.
    pub(super) fn shared_rows<'a, E: Element>(
        &self,
        num_tokens: usize,
        room: &'a mut ExpertRoom,
    ) -> Result<(&'a mut [E], &'a mut [E]), DecoderError> {
        let width = self.router.in_features();
        let num_bytes = num_tokens * (width + 1) * size_of::<E>();
        let memory = DecoderError::Memory { num_bytes, num_tokens };
        let rows = Lines::at_least(num_bytes, &mut room.shared).ok_or(memory)?.as_mut_slice::<E>();
        let (rows, gates) = rows.split_at_mut(num_tokens * width);
        Ok((rows, &mut gates[..num_tokens]))
    }

    /// The totals before the experts: what the shared MLP gives, times its gate, or nothing.
    fn begin_totals<E: Element>(&self, num_tokens: usize, room: &mut ExpertRoom, threads: &Threads) {
        let width = self.router.in_features();
        room.totals.clear();
        room.totals.resize(num_tokens * width, 0.0);
        let (Some(shared), Some(rows)) = (&self.shared, &mut room.shared) else { return };
        let (rows, gates) = rows.as_mut_slice::<E>().split_at(num_tokens * width);
        let totals = Places(room.totals.as_mut_ptr());
        threads.for_each(num_tokens, num_tokens * width >= MIN_SHARED_NUMBERS, |token| {
            let weight = shared.gate.as_ref().map_or(1.0, |_| sigmoid(gates[token].widen()));
            // SAFETY: there is a total of each token, and each part writes its own token's.
            let total = unsafe { totals.slice(token * width, width) };
            for (sum, x) in total.iter_mut().zip(&rows[token * width..][..width]) {
                *sum = weight * x.widen();
            }
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
            tokens[row] = (index / self.routing.num_chosen) as u32;
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
        let (first, num_chosen) = (&self.experts[0], self.routing.num_chosen);
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
