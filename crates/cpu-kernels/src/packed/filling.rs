//! Rows on their way into one layer or several: panels of all of them are shared among the threads, so that none waits at the end
//! of a layer.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

use super::{LinearError, MIN_SHARED_WEIGHTS, PackedLinear};
use crate::threads::Threads;

/// Rows of a layer that are about to be packed, or memory that is about to be filled: see [`fill_together`].
///
/// The rows count as not packed until they are.
pub struct Filling<'a> {
    /// Does a part, of which each is given to one thread.
    work: Box<dyn Fn(usize) -> Result<(), LinearError> + Send + Sync + 'a>,
    num_parts: usize,
    num_numbers: usize,
    /// Of the rows, and how many of the layer's are packed; None: there are no rows.
    packed: Option<(&'a mut [bool], &'a mut usize)>,
    refused: Mutex<Option<LinearError>>,
}

impl<'a> Filling<'a> {
    /// Memory to be filled in pieces of `piece_bytes`, the last of which may be shorter.
    ///
    /// # Arguments
    ///
    /// * `fill` – writes a piece, of which it is given the first byte's place.
    ///
    /// # Panics
    ///
    /// `piece_bytes` is 0.
    pub fn of_memory(
        memory: &'a mut [u8],
        piece_bytes: usize,
        fill: impl Fn(usize, &mut [u8]) + Send + Sync + 'a,
    ) -> Self {
        let num_numbers = memory.len();
        let pieces: Vec<Mutex<&mut [u8]>> = memory.chunks_mut(piece_bytes).map(Mutex::new).collect();
        Self {
            num_parts: pieces.len(),
            work: Box::new(move |part| {
                fill(part * piece_bytes, &mut pieces[part].lock().unwrap_or_else(PoisonError::into_inner));
                Ok(())
            }),
            num_numbers,
            packed: None,
            refused: Mutex::new(None),
        }
    }

    /// Rows of a layer, whose panels `work` packs.
    pub(super) fn of_rows(
        given: &Given,
        in_features: usize,
        (is_packed, num_packed): (&'a mut [bool], &'a mut usize),
        work: impl Fn(usize) -> Result<(), LinearError> + Send + Sync + 'a,
    ) -> Self {
        Self {
            work: Box::new(work),
            num_parts: given.num_panels,
            num_numbers: given.rows.len() * in_features,
            packed: Some((&mut is_packed[given.rows.clone()], num_packed)),
            refused: Mutex::new(None),
        }
    }
}

/// Fill layers and memory, each thread one part of them after the other.
///
/// # Errors
///
/// The first that is refused, by its place among those given. Its rows count as not packed then, those of others are packed.
pub fn fill_together(fillings: Vec<Filling<'_>>, threads: &Threads) -> Result<(), (usize, LinearError)> {
    let ends: Vec<usize> = fillings
        .iter()
        .scan(0, |end, filling| {
            *end += filling.num_parts;
            Some(*end)
        })
        .collect();
    let num_numbers: usize = fillings.iter().map(|filling| filling.num_numbers).sum();
    let num_parts = ends.last().copied().unwrap_or(0);
    threads.for_each(num_parts, num_numbers >= MIN_SHARED_WEIGHTS, |part| {
        let index = ends.partition_point(|&end| end <= part);
        let filling = &fillings[index];
        if let Err(error) = (filling.work)(part + filling.num_parts - ends[index]) {
            *filling.refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
    });
    let mut done = Ok(());
    for (index, filling) in fillings.into_iter().enumerate() {
        match (filling.refused.into_inner().unwrap_or_else(PoisonError::into_inner), filling.packed) {
            (Some(error), _) => done = done.and(Err((index, error))),
            (None, Some((is_packed, num_packed))) => {
                is_packed.fill(true);
                *num_packed += is_packed.len();
            }
            (None, None) => {}
        }
    }
    done
}

/// Fill one layer.
pub(super) fn fill_alone(filling: Filling<'_>, threads: &Threads) -> Result<(), LinearError> {
    fill_together(vec![filling], threads).map_err(|(_, error)| error)
}

/// Rows that a layer has, and the panels that they lie in.
#[derive(Clone)]
pub(super) struct Given {
    pub(super) rows: Range<usize>,
    panel: usize,
    pub(super) num_panels: usize,
}

impl Given {
    /// First row of a panel, counted from the first that has such rows, and those of its rows that are given.
    pub(super) fn of_panel(&self, index: usize) -> (usize, Range<usize>) {
        let start = (self.rows.start / self.panel + index) * self.panel;
        (start, start.max(self.rows.start)..(start + self.panel).min(self.rows.end))
    }
}

impl PackedLinear {
    /// Some rows, which count as not packed from now on.
    ///
    /// # Errors
    ///
    /// The layer does not have them.
    pub(super) fn give_rows(&mut self, first: usize, num_rows: usize) -> Result<Given, LinearError> {
        let end = first.saturating_add(num_rows);
        if end > self.out_features {
            return Err(LinearError::Rows { first, end, out_features: self.out_features });
        }
        for is_packed in &mut self.is_packed[first..end] {
            self.num_packed -= usize::from(std::mem::replace(is_packed, false));
        }
        let panel = self.kernel.panel();
        let num_panels = if num_rows == 0 { 0 } else { end.div_ceil(panel) - first / panel };
        Ok(Given { rows: first..end, panel, num_panels })
    }
}
