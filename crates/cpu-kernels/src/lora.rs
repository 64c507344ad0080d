//! Adapters: low-rank products that are added to the outputs of a layer, each adapter's to its own rows of a step.
//!
//! All adapters of a step are computed together ([`addition`]). Rows need not lie side by side. A row's bits depend neither on
//! the others nor on their adapters.
//!
//! Weights whose every number 16 bits hold are kept in 16: of an adapter that was saved so they take half the memory and
//! half the time of reading them. Others are rounded to 16 bits where the caller asks for it.
//!
//! A stretch may have gains (`DoRA`): factors on the layer's own product, which are applied to its sums before anything is
//! added to these, so that neither bias nor residual has to be taken out again.

mod addition;
pub(crate) mod rows;

use std::ops::Range;

use half::bf16;
use thiserror::Error;

pub(crate) use self::addition::Addition;
use crate::{
    attention::TokenRows,
    element::Element,
    kernel::Kernel,
    lines::Lines,
    packed::{LinearError, check_rows},
    threads::Threads,
};

/// Multiplications below which no helper is woken: reading as many weights takes longer than a helper that looks out needs.
const MIN_SHARED_WORK: usize = 1 << 13;

/// Bits of a float of 32 that one of 16 lacks.
const BELOW_BF16: u32 = 0xffff;
/// Lanes of the widest vectors.
const FULL_PANEL: usize = 16;
/// Numbers that are turned at once while a panel is written.
const SQUARE: usize = 4;

/// What is wrong with an adapter's matrices.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DeltaError {
    /// A matrix of another size.
    #[error("{name} of an adapter has {found} numbers, but {expected} are needed")]
    Length {
        /// Which.
        name: &'static str,
        /// Its size.
        found: usize,
        /// What it should be.
        expected: usize,
    },
    /// Outputs that two stretches have.
    #[error("two stretches of an adapter have output {output}")]
    Overlap {
        /// The first of them.
        output: usize,
    },
    /// No memory for the weights.
    #[error("{num_bytes} bytes for an adapter's matrices cannot be had")]
    Memory {
        /// What they need.
        num_bytes: usize,
    },
}

/// The second matrix of an adapter, for a stretch of a layer's outputs.
#[derive(Debug, Clone, Copy)]
pub struct Up<'a> {
    /// The stretch begins with this output.
    pub first: usize,
    /// Outputs of the stretch.
    pub num_outputs: usize,
    /// `[num_outputs, rank]`, with the scale in it.
    pub weight: &'a [f32],
    /// What the layer's own product is multiplied by first, for each of the outputs.
    pub gains: Option<&'a [f32]>,
}

/// Numbers in the order in which they are read, for the lanes of a kernel.
#[derive(Debug)]
struct Weights {
    lines: Lines,
    is_bf16: bool,
}

impl Weights {
    /// Outputs `[num_outputs, num_inputs]`, of which the first has place `first`, as `[panel][input][lane]`, where panels begin
    /// with places that are multiples of `lanes`; lanes without an output are 0.
    fn pack(
        matrix: &[f32],
        num_inputs: usize,
        first: usize,
        lanes: usize,
        rounds: bool,
    ) -> Result<Self, DeltaError> {
        let skipped = first % lanes;
        let num_panels = (skipped + matrix.len() / num_inputs.max(1)).div_ceil(lanes);
        let is_bf16 = if rounds {
            matrix.iter().all(|x| x.abs() <= bf16::MAX.to_f32())
        } else {
            matrix.iter().all(|x| x.to_bits() & BELOW_BF16 == 0)
        };
        let num_bytes = num_panels * lanes * num_inputs * if is_bf16 { 2 } else { 4 };
        let mut lines = Lines::new(num_bytes).ok_or(DeltaError::Memory { num_bytes })?;
        if is_bf16 {
            place(matrix, num_inputs, skipped, lanes, lines.as_mut_slice::<bf16>(), nearest);
        } else {
            place(matrix, num_inputs, skipped, lanes, lines.as_mut_slice::<f32>(), |x| x);
        }
        Ok(Self { lines, is_bf16 })
    }

    /// Bytes of some panels of so many inputs.
    fn panel_bytes(&self, num_panels: usize, num_inputs: usize, lanes: usize) -> usize {
        num_panels * num_inputs * lanes * if self.is_bf16 { 2 } else { 4 }
    }

    /// The first byte of a panel of so many inputs.
    fn panel(&self, panel: usize, num_inputs: usize, lanes: usize) -> *const u8 {
        debug_assert!(self.panel_bytes(panel + 1, num_inputs, lanes) <= self.lines.num_bytes());
        self.lines.as_ptr().wrapping_add(self.panel_bytes(panel, num_inputs, lanes))
    }
}

/// A finite number of 16 bits: to the nearest, ties to even, without a branch.
fn nearest(x: f32) -> bf16 {
    let bits = x.to_bits();
    bf16::from_bits(((bits + (BELOW_BF16 >> 1) + (bits >> 16 & 1)) >> 16) as u16)
}

fn place<W: Copy>(
    matrix: &[f32],
    num_inputs: usize,
    skipped: usize,
    lanes: usize,
    to: &mut [W],
    keep: impl Fn(f32) -> W,
) {
    if num_inputs == 0 {
        return;
    }
    let mut rows = matrix.chunks_exact(num_inputs);
    let mut lane = skipped;
    for panel in to.chunks_exact_mut(lanes * num_inputs) {
        let of_panel: Vec<&[f32]> = rows.by_ref().take(lanes - lane).collect();
        if let (0, Ok(full)) = (lane, <[&[f32]; FULL_PANEL]>::try_from(of_panel.as_slice()))
            && lanes == FULL_PANEL
        {
            place_full(&full, panel, &keep);
        } else {
            for (row, lane) in of_panel.iter().zip(lane..) {
                for (&x, vector) in row.iter().zip(panel.chunks_exact_mut(lanes)) {
                    vector[lane] = keep(x);
                }
            }
        }
        lane = 0;
    }
}

/// As [`place`], for a panel that has all of the most lanes: a square of numbers at a time, whose rows are read whole.
fn place_full<W: Copy>(rows: &[&[f32]; FULL_PANEL], panel: &mut [W], keep: impl Fn(f32) -> W) {
    let num_inputs = rows[0].len();
    let whole = num_inputs / SQUARE * SQUARE;
    for input in (0..whole).step_by(SQUARE) {
        for first in (0..FULL_PANEL).step_by(SQUARE) {
            let square: [[f32; SQUARE]; SQUARE] = std::array::from_fn(|r| {
                let row = &rows[first + r][input..input + SQUARE];
                std::array::from_fn(|i| row[i])
            });
            let turned: [[f32; SQUARE]; SQUARE] =
                std::array::from_fn(|i| std::array::from_fn(|r| square[r][i]));
            for (numbers, at) in turned.into_iter().zip((input * FULL_PANEL + first..).step_by(FULL_PANEL)) {
                for (x, to) in numbers.into_iter().zip(&mut panel[at..at + SQUARE]) {
                    *to = keep(x);
                }
            }
        }
    }
    for input in whole..num_inputs {
        for (row, to) in rows.iter().zip(&mut panel[input * FULL_PANEL..(input + 1) * FULL_PANEL]) {
            *to = keep(row[input]);
        }
    }
}

#[derive(Debug)]
struct Stretch {
    first: usize,
    /// The first output that its first panel has room for.
    begin: usize,
    num_outputs: usize,
    /// Where its ranks begin in a row of all.
    first_rank: usize,
    rank: usize,
    weights: Weights,
    gains: Option<Box<[f32]>>,
}

/// What an adapter adds to a layer: `up (down x)`, for some stretches of its outputs.
#[derive(Debug)]
pub struct LayerDelta {
    kernel: &'static Kernel,
    num_inputs: usize,
    num_ranks: usize,
    down: Weights,
    stretches: Vec<Stretch>,
}

impl LayerDelta {
    /// Pack the matrices for this machine.
    ///
    /// # Arguments
    ///
    /// * `down`: `[ranks, num_inputs]`, the ranks of all stretches one after the other.
    /// * `ups`: of each stretch.
    /// * `rounds`: whether matrices are rounded to 16 bits; without, those are kept in 16 whose every number has no more.
    ///
    /// # Errors
    ///
    /// Sizes that do not fit each other, stretches that overlap, or no memory.
    pub fn new(down: &[f32], num_inputs: usize, ups: &[Up<'_>], rounds: bool) -> Result<Self, DeltaError> {
        Self::with_kernel(down, num_inputs, ups, rounds, Kernel::best_for_products())
    }

    /// As `new`, for one of this machine's kernels.
    ///
    /// # Errors
    ///
    /// As `new`.
    pub fn with_kernel(
        down: &[f32],
        num_inputs: usize,
        ups: &[Up<'_>],
        rounds: bool,
        kernel: &'static Kernel,
    ) -> Result<Self, DeltaError> {
        let lanes = kernel.lanes();
        let num_ranks = down.len().checked_div(num_inputs).unwrap_or(0);
        let (mut stretches, mut first_rank) = (Vec::with_capacity(ups.len()), 0);
        for up in ups {
            let rank = up.weight.len().checked_div(up.num_outputs).unwrap_or(0);
            let (found, expected) = (up.weight.len(), rank * up.num_outputs);
            if found != expected {
                return Err(DeltaError::Length { name: "up", found, expected });
            }
            if let Some(found) = up.gains.map(<[f32]>::len).filter(|&found| found != up.num_outputs) {
                return Err(DeltaError::Length { name: "gains", found, expected: up.num_outputs });
            }
            let weights = Weights::pack(up.weight, rank, up.first, lanes, rounds)?;
            let (first, num_outputs, gains) = (up.first, up.num_outputs, up.gains.map(Box::from));
            let begin = first / lanes * lanes;
            stretches.push(Stretch { first, begin, num_outputs, first_rank, rank, weights, gains });
            first_rank += rank;
        }
        let (found, expected) = (down.len(), first_rank * num_inputs);
        if found != expected {
            return Err(DeltaError::Length { name: "down", found, expected });
        }
        let mut spans: Vec<_> =
            stretches.iter().map(|each| (each.first, each.first.saturating_add(each.num_outputs))).collect();
        spans.sort_unstable();
        if let Some(pair) = spans.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            return Err(DeltaError::Overlap { output: pair[1].0 });
        }
        let down = Weights::pack(down, num_inputs, 0, lanes, rounds)?;
        Ok(Self { kernel, num_inputs, num_ranks, down, stretches })
    }

    /// Inputs of the layer.
    #[must_use]
    pub fn num_inputs(&self) -> usize {
        self.num_inputs
    }

    /// The layer has at least so many outputs.
    #[must_use]
    pub fn num_outputs(&self) -> usize {
        self.stretches.iter().map(|each| each.first.saturating_add(each.num_outputs)).max().unwrap_or(0)
    }

    /// Bytes of the weights.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        let ups = self.stretches.iter().map(|each| {
            each.weights.lines.num_bytes() + each.gains.as_ref().map_or(0, |gains| 4 * gains.len())
        });
        self.down.lines.num_bytes() + ups.sum::<usize>()
    }

    /// Add to some rows of a layer's outputs, which have the gains already, because bias and residual have none.
    ///
    /// # Arguments
    ///
    /// * `x`: the layer's inputs of all rows.
    /// * `rows`: which rows, ascending.
    /// * `out`: its outputs, with `stride` elements from one row to the next.
    ///
    /// # Errors
    ///
    /// Rows that do not ascend or do not lie in the arrays; nothing is written then.
    pub fn add<E: Element>(
        &self,
        x: TokenRows<'_, E>,
        rows: &[u32],
        threads: &Threads,
        out: &mut [E],
        stride: usize,
    ) -> Result<(), LinearError> {
        check_ascending(rows)?;
        let num_rows = rows.last().map_or(0, |&last| last as usize + 1);
        let mut ranks = Vec::new();
        let runs = [(self, rows)];
        let addition = Addition::new(&runs, &x, threads.num_threads(), &mut ranks)?;
        check_rows("out", out.len(), stride, num_rows, self.num_outputs())?;
        let panel = self.kernel.panel();
        let start = Place(out.as_mut_ptr());
        let num_panels = self.num_outputs().div_ceil(panel);
        threads.for_each(num_panels, rows.len() * self.work() >= MIN_SHARED_WORK, |index| {
            addition.help();
            addition.wait();
            // SAFETY: `check_rows` saw that the rows lie in `out`; parts have outputs of their own.
            unsafe { addition.add(index * panel..(index + 1) * panel, 0..num_rows, start.at(0), stride) };
        });
        Ok(())
    }

    /// Panels of a layer must be whole panels here.
    pub(crate) fn expect_kernel(&self, of_layer: &Kernel) {
        let (panel, lanes) = (of_layer.panel(), self.kernel.lanes());
        assert!(panel.is_multiple_of(lanes), "an adapter of {lanes} lanes does not fit panels of {panel}");
    }

    /// Panels of a row of ranks.
    fn num_panels(&self) -> usize {
        self.num_ranks.div_ceil(self.kernel.lanes())
    }

    /// Elements of a row of ranks, whole panels.
    fn ranks_stride(&self) -> usize {
        self.num_panels() * self.kernel.lanes()
    }

    /// Stretches that have some of these outputs, each with those that it has, from a whole panel of its weights on.
    fn stretches_at(&self, outputs: &Range<usize>) -> impl Iterator<Item = (&Stretch, Range<usize>)> {
        let outputs = outputs.clone();
        self.stretches.iter().filter_map(move |stretch| {
            let begin = outputs.start.max(stretch.begin);
            let end = outputs.end.min(stretch.first + stretch.num_outputs);
            (begin < end).then_some((stretch, begin..end))
        })
    }

    fn work(&self) -> usize {
        self.num_ranks * self.num_inputs
            + self.stretches.iter().map(|each| each.num_outputs * each.rank).sum::<usize>()
    }
}

/// Whether rows are named in order, so that none is named twice.
pub(crate) fn check_ascending(rows: &[u32]) -> Result<(), LinearError> {
    match rows.windows(2).find(|pair| pair[0] >= pair[1]) {
        Some(pair) => Err(LinearError::Unsorted { row: pair[1], before: pair[0] }),
        None => Ok(()),
    }
}

/// Memory that parts read, or write at different places.
struct Place<T>(*mut T);

// SAFETY: the parts see to it, see `LayerDelta::add` and `Addition`.
unsafe impl<T: Send> Sync for Place<T> {}

impl<T> Place<T> {
    fn at(&self, offset: usize) -> *mut T {
        self.0.wrapping_add(offset)
    }
}
