//! What several adapters add to a layer's outputs, in the same pass as the layer's own product: each thread begins with some
//! of the products down to the ranks, goes on with panels of the layer's outputs, and adds the products up to these while they
//! are near. What it needs for that is asked for while it multiplies the panel.
//!
//! So there is no moment in which threads wait for each other between the two, and memory has an answer ready.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use super::{LayerDelta, Place};
use crate::{
    attention::TokenRows,
    element::Element,
    lines::ask_for,
    lora::rows::{Expand, Shrink},
    packed::{LinearError, check_rows},
};

/// Parts that each thread should have, so that none waits long for another.
const PARTS_PER_THREAD: usize = 3;
/// Rows from which on a part has some rows of all ranks; fewer are computed a panel of ranks at a time.
const MANY_ROWS: usize = 8;
/// Looks at what other threads have done before the processor is left to them.
const LOOKS: u32 = 1 << 12;

/// Some ranks of some rows of an adapter: what a thread computes at once.
struct Part {
    run: usize,
    /// Of the adapter's rows.
    rows: Range<usize>,
    panels: Range<usize>,
}

/// What several adapters add to a layer's outputs.
///
/// Threads that compute the outputs compute the ranks first, each as many parts as it gets ([`Self::help`]), and wait for those
/// of the others before they use any ([`Self::wait`]). A thread that comes late finds nothing left to do.
pub(crate) struct Addition<'a> {
    runs: &'a [(&'a LayerDelta, &'a [u32])],
    /// Where the ranks of each run begin.
    firsts: Vec<usize>,
    ranks: Place<f32>,
    parts: Vec<Part>,
    /// Row 0 of the layer's inputs, and elements from one row to the next.
    x: Place<u8>,
    x_stride: usize,
    /// Computes a part, of inputs of the type that there are.
    compute: unsafe fn(&Addition<'_>, &Part),
    /// The part that is taken next, or beyond the last.
    next: AtomicUsize,
    num_done: AtomicUsize,
}

impl<'a> Addition<'a> {
    /// Share out what is computed first.
    ///
    /// # Arguments
    ///
    /// * `runs`: adapters, each with its rows in ascending order.
    /// * `x`: the layer's inputs of all rows, which must not change while this lives.
    /// * `num_threads`: that will help.
    /// * `ranks`: room, used again by every layer.
    ///
    /// # Errors
    ///
    /// Rows that do not lie in `x`.
    pub(crate) fn new<E: Element>(
        runs: &'a [(&'a LayerDelta, &'a [u32])],
        x: &TokenRows<'a, E>,
        num_threads: usize,
        ranks: &'a mut Vec<f32>,
    ) -> Result<Self, LinearError> {
        let (mut num_ranks, mut firsts) = (0, Vec::with_capacity(runs.len()));
        for (delta, rows) in runs {
            let num_rows = rows.iter().max().map_or(0, |&last| last as usize + 1);
            check_rows("x", x.data.len(), x.stride, num_rows, delta.num_inputs)?;
            firsts.push(num_ranks);
            num_ranks += rows.len() * delta.ranks_stride();
        }
        if ranks.len() < num_ranks {
            ranks.resize(num_ranks, 0.0);
        }
        Ok(Self {
            runs,
            firsts,
            ranks: Place(ranks.as_mut_ptr()),
            parts: down_parts(runs, (PARTS_PER_THREAD * num_threads).div_ceil(runs.len().max(1))),
            x: Place(x.data.as_ptr().cast_mut().cast()),
            x_stride: x.stride,
            compute: compute::<E>,
            next: AtomicUsize::new(0),
            num_done: AtomicUsize::new(0),
        })
    }

    /// Compute parts until none is left.
    pub(crate) fn help(&self) {
        // Relaxed: a number that is too small is only looked at once more, by what follows.
        while self.next.load(Ordering::Relaxed) < self.parts.len() {
            // Relaxed: the number is all that is taken; what is computed is published below.
            let Some(part) = self.parts.get(self.next.fetch_add(1, Ordering::Relaxed)) else { return };
            let _done = Done(&self.num_done);
            // SAFETY: `compute` is of the type of `x`; no two threads take the same part.
            unsafe { (self.compute)(self, part) };
        }
    }

    /// Back when all parts are done: those that this thread has not taken others are computing.
    pub(crate) fn wait(&self) {
        let mut looks = 0;
        // Acquire: the ranks that other threads wrote, released by `Done`.
        while self.num_done.load(Ordering::Acquire) < self.parts.len() {
            looks += 1;
            if looks < LOOKS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Ask for a share of the weights that [`Self::add`] will read, so that memory answers while something is multiplied.
    ///
    /// # Arguments
    ///
    /// * `outputs`, `rows`: as for `add`.
    /// * `share`: which, of `num_shares`: of some of the adapters all that is read.
    pub(crate) fn fetch(&self, outputs: &Range<usize>, rows: &Range<usize>, share: usize, num_shares: usize) {
        let end_of = |shares: usize| (self.runs.len() * shares).div_ceil(num_shares);
        for (delta, tokens) in &self.runs[end_of(share)..end_of(share + 1)] {
            if within(tokens, rows).1.is_empty() {
                continue;
            }
            let lanes = delta.kernel.lanes();
            for (stretch, outputs) in delta.stretches_at(outputs) {
                let panel = (outputs.start - stretch.begin) / lanes;
                let num_panels = outputs.len().div_ceil(lanes);
                let from = stretch.weights.panel(panel, stretch.rank, lanes);
                ask_for(from, stretch.weights.panel_bytes(num_panels, stretch.rank, lanes));
            }
        }
    }

    /// Multiply sums of the layer's own product by the gains of those rows that have some.
    ///
    /// # Arguments
    ///
    /// * `outputs`: which sums a row has; the last may be of outputs that the layer does not have.
    /// * `rows`: of the step.
    /// * `sums`: of these rows, one row after the other.
    pub(crate) fn scale(&self, outputs: Range<usize>, rows: Range<usize>, sums: &mut [f32]) {
        for (delta, tokens) in self.runs {
            for stretch in &delta.stretches {
                let Some(gains) = &stretch.gains else { continue };
                let begin = outputs.start.max(stretch.first);
                let end = outputs.end.min(stretch.first + stretch.num_outputs);
                if begin >= end {
                    continue;
                }
                let gains = &gains[begin - stretch.first..end - stretch.first];
                let from = tokens.partition_point(|&token| (token as usize) < rows.start);
                for &token in tokens[from..].iter().take_while(|&&token| (token as usize) < rows.end) {
                    let row = (token as usize - rows.start) * outputs.len();
                    let sums = &mut sums[row + begin - outputs.start..row + end - outputs.start];
                    sums.iter_mut().zip(gains).for_each(|(sum, gain)| *sum *= gain);
                }
            }
        }
    }

    /// Add to some outputs of some rows.
    ///
    /// # Arguments
    ///
    /// * `outputs`: begins with a whole panel of packed weights, and ends with one or with the last output.
    /// * `rows`: of the step.
    /// * `out`: the first output of the step's first row.
    /// * `stride`: elements from one row to the next.
    ///
    /// # Safety
    ///
    /// The ranks are there ([`Self::wait`]). The layer has all outputs of the adapters; the rows lie in memory at `out`, of which
    /// no other thread touches these outputs.
    pub(crate) unsafe fn add<E: Element>(
        &self,
        outputs: Range<usize>,
        rows: Range<usize>,
        out: *mut E,
        stride: usize,
    ) {
        for ((delta, tokens), first) in self.runs.iter().zip(&self.firsts) {
            let (from, tokens) = within(tokens, &rows);
            if tokens.is_empty() {
                continue;
            }
            let (lanes, ranks_stride) = (delta.kernel.lanes(), delta.ranks_stride());
            for (stretch, outputs) in delta.stretches_at(&outputs) {
                let panel = (outputs.start - stretch.begin) / lanes;
                let ranks = self.ranks.at(first + from * ranks_stride + stretch.first_rank).cast_const();
                let what = Expand {
                    weights: stretch.weights.panel(panel, stretch.rank, lanes),
                    is_bf16: stretch.weights.is_bf16,
                    num_outputs: outputs.len(),
                    num_ranks: stretch.rank,
                    ranks,
                    ranks_stride,
                    tokens: tokens.as_ptr(),
                    num_rows: tokens.len(),
                    out: out.wrapping_add(outputs.start),
                    out_stride: stride,
                };
                // SAFETY: the caller lets these outputs of these rows be written, and has all of the layer's; lanes before the
                // stretch are of the same panel and get 0; as above for kernel, weights and ranks.
                unsafe { E::expand_of(delta.kernel)(&what) };
            }
        }
    }
}

/// Compute a part.
///
/// # Safety
///
/// The inputs are of `E`, and no other thread has this part.
unsafe fn compute<E: Element>(addition: &Addition<'_>, part: &Part) {
    let (delta, rows) = addition.runs[part.run];
    let (lanes, stride) = (delta.kernel.lanes(), delta.ranks_stride());
    let first = addition.firsts[part.run] + part.rows.start * stride + part.panels.start * lanes;
    let what = Shrink::<E> {
        weights: delta.down.panel(part.panels.start, delta.num_inputs, lanes),
        is_bf16: delta.down.is_bf16,
        num_panels: part.panels.len(),
        num_inputs: delta.num_inputs,
        x: addition.x.at(0).cast_const().cast(),
        x_stride: addition.x_stride,
        tokens: rows[part.rows.clone()].as_ptr(),
        num_rows: part.rows.len(),
        ranks: addition.ranks.at(first),
        ranks_stride: stride,
    };
    // SAFETY: `check_rows` saw that the rows lie in `x`; `ranks` has room for all runs, of which each part writes its own;
    // a kernel is only reachable where it was detected, and the weights were packed for its lanes.
    unsafe { E::shrink_of(delta.kernel)(&what) };
}

/// Those of ascending tokens that are among the rows, and how many come before them.
fn within<'a>(tokens: &'a [u32], rows: &Range<usize>) -> (usize, &'a [u32]) {
    let (Some(&first), Some(&last)) = (tokens.first(), tokens.last()) else { return (0, tokens) };
    if first as usize >= rows.start && (last as usize) < rows.end {
        return (0, tokens); // nearly always: the rows are all of the step's
    }
    let from = tokens.partition_point(|&token| (token as usize) < rows.start);
    let tokens = &tokens[from..];
    (from, &tokens[..tokens.partition_point(|&token| (token as usize) < rows.end)])
}

/// Of many rows some with all ranks, of few all with some ranks.
fn down_parts(runs: &[(&LayerDelta, &[u32])], parts_per_run: usize) -> Vec<Part> {
    let mut parts = Vec::with_capacity(runs.len() * parts_per_run);
    for (run, (delta, rows)) in runs.iter().enumerate() {
        let (num_rows, num_panels) = (rows.len(), delta.num_panels());
        if num_rows >= MANY_ROWS {
            let size = num_rows.div_ceil(parts_per_run).next_multiple_of(MANY_ROWS);
            let starts = (0..num_rows).step_by(size);
            parts.extend(starts.map(|first| Part {
                run,
                rows: first..num_rows.min(first + size),
                panels: 0..num_panels,
            }));
        } else if parts_per_run > 1 {
            parts.extend((0..num_panels).map(|panel| Part {
                run,
                rows: 0..num_rows,
                panels: panel..panel + 1,
            }));
        } else {
            parts.push(Part { run, rows: 0..num_rows, panels: 0..num_panels });
        }
    }
    parts
}

/// A part is done when this goes.
struct Done<'a>(&'a AtomicUsize);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        // Release: publishes the ranks to `Addition::wait`.
        self.0.fetch_add(1, Ordering::Release);
    }
}
