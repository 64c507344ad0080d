//! `StepFrame`: a step as a frame: its numbers, how much of each array is used, and that part of each array.

use std::ptr::NonNull;

use scheduler::{SchedulerOutput, step_buffers::SAMPLING_INT_COLUMNS};

use crate::frame::{Filling, FrameError};

/// The arrays that a rank without sampling needs, in the order of the frame.
pub(crate) const ARRAYS: [&str; 26] = [
    "idx_mapping",
    "num_scheduled_tokens",
    "num_computed_tokens",
    "seq_lens",
    "query_start_loc",
    "input_ids",
    "positions",
    "slot_mapping",
    "num_draft_tokens",
    "logits_indices",
    "sampled_rows",
    "new_rows",
    "sampling_int",
    "prompt_logprobs_rows",
    "prompt_logprobs_indptr",
    "prompt_logprobs_indices",
    "prompt_logprobs_targets",
    "bt_rows",
    "bt_starts",
    "bt_indptr",
    "bt_block_ids",
    "finished_rows",
    "preempted_rows",
    "blocks_to_swap_out",
    "blocks_to_swap_in",
    "blocks_to_copy",
];
const BLOCK_TABLE_INDPTR: usize = 19;
const NUM_NUMBERS: usize = 19;
const EXTENT_WORDS: usize = ARRAYS.len().div_ceil(2);
/// Bytes of a step before its arrays.
pub(crate) const STEP_HEAD_BYTES: usize = (NUM_NUMBERS + EXTENT_WORDS) * 8;

/// One array of a set.
#[derive(Clone, Copy, Debug)]
struct Place {
    start: NonNull<u8>,
    element_bytes: usize,
    num_elements: usize,
}

/// The arrays of one set of step buffers, as addresses.
#[derive(Debug)]
pub struct StepArrays {
    places: [Place; ARRAYS.len()],
}

// SAFETY: addresses of memory that the constructor's caller keeps alive; its contract says who may touch it when.
unsafe impl Send for StepArrays {}

impl StepArrays {
    /// Names of the arrays, for `new`.
    pub const NAMES: [&'static str; ARRAYS.len()] = ARRAYS;

    /// Make a set. `place_of` returns start, bytes per element and number of elements for each name.
    ///
    /// # Errors
    /// The error of `place_of`.
    ///
    /// # Safety
    /// Each place must be valid for reads and writes of its elements, which are plain numbers, while this lives.
    /// Nothing else may write it during a call with it, nor read it while a frame is copied into it.
    pub unsafe fn new<E>(
        mut place_of: impl FnMut(&'static str) -> Result<(NonNull<u8>, usize, usize), E>,
    ) -> Result<Self, E> {
        let nowhere = Place { start: NonNull::dangling(), element_bytes: 1, num_elements: 0 };
        let mut places = [nowhere; ARRAYS.len()];
        for (place, name) in places.iter_mut().zip(ARRAYS) {
            let (start, element_bytes, num_elements) = place_of(name)?;
            *place = Place { start, element_bytes, num_elements };
        }
        Ok(Self { places })
    }

    /// Bytes of all arrays in a frame, each rounded up to a whole word.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.places.iter().map(|place| (place.num_elements * place.element_bytes).next_multiple_of(8)).sum()
    }

    fn block_table_end(&self, num_updates: usize) -> Result<usize, FrameError> {
        let place = self.places[BLOCK_TABLE_INDPTR];
        let name = ARRAYS[BLOCK_TABLE_INDPTR];
        if num_updates >= place.num_elements || place.element_bytes != 4 {
            return Err(FrameError::Extent { name, got: num_updates + 1, room: place.num_elements });
        }
        // SAFETY: in bounds, and int32 by its size.
        let end = unsafe { place.start.cast::<i32>().add(num_updates).read() };
        Ok(usize::try_from(end).unwrap_or(0))
    }
}

/// A step: the scheduler's numbers, and what rank 0 decided for all ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StepFrame {
    /// The scheduler's numbers.
    pub output: SchedulerOutput,
    /// Number of requests of the captured graph in which the step runs; 0: without a graph.
    pub graph_size: u32,
}

impl StepFrame {
    pub(crate) fn write(&self, arrays: &StepArrays, slot: &mut Filling) -> Result<(), FrameError> {
        let extents = self.extents(arrays)?;
        slot.words(&self.numbers())?;
        let packed: [u64; EXTENT_WORDS] = std::array::from_fn(|index| {
            let at = |place: usize| extents.get(place).map_or(0, |extent| *extent as u64);
            at(2 * index) | at(2 * index + 1) << 32
        });
        slot.words(&packed)?;
        for (place, extent) in arrays.places.iter().zip(extents) {
            // SAFETY: as many elements as the array has, at most, by `extents`; it lies in no slot.
            unsafe { slot.bytes(place.start.as_ptr(), extent * place.element_bytes)? };
        }
        Ok(())
    }

    /// Read the step of a frame; copies its arrays to the set in `arrays_of` that the frame names.
    ///
    /// # Errors
    /// The frame or an array is too short.
    pub fn read<'a>(
        words: &[u64],
        arrays_of: impl FnOnce(u32) -> Option<&'a mut StepArrays>,
    ) -> Result<Self, FrameError> {
        let short = |wanted: usize| FrameError::Short { wanted: wanted * 8, got: size_of_val(words) };
        let (numbers, rest) = words.split_at_checked(NUM_NUMBERS).ok_or_else(|| short(NUM_NUMBERS))?;
        let (packed, mut rest) =
            rest.split_at_checked(EXTENT_WORDS).ok_or_else(|| short(NUM_NUMBERS + EXTENT_WORDS))?;
        let step = Self::from_numbers(numbers);
        let index = step.output.buffer_index;
        let Some(arrays) = arrays_of(index) else {
            return Err(FrameError::Extent { name: "buffer_index", got: index as usize, room: 0 });
        };
        for (which, place) in arrays.places.iter().enumerate() {
            let extent = (packed[which / 2] >> (32 * (which % 2))) as u32 as usize;
            if extent > place.num_elements {
                let (name, room) = (ARRAYS[which], place.num_elements);
                return Err(FrameError::Extent { name, got: extent, room });
            }
            let num_bytes = extent * place.element_bytes;
            let (array, after) =
                rest.split_at_checked(num_bytes.div_ceil(8)).ok_or_else(|| short(num_bytes / 8))?;
            // SAFETY: both have that many bytes by the checks above; the array is ours while the set is borrowed.
            unsafe { place.start.as_ptr().copy_from_nonoverlapping(array.as_ptr().cast(), num_bytes) };
            rest = after;
        }
        Ok(step)
    }

    fn numbers(&self) -> [u64; NUM_NUMBERS] {
        let output = &self.output;
        [
            output.step,
            u64::from(output.buffer_index),
            u64::from(output.num_reqs),
            u64::from(output.total_num_scheduled_tokens),
            u64::from(output.max_num_scheduled_tokens),
            u64::from(output.max_seq_len),
            u64::from(output.num_sampled),
            u64::from(output.num_logits),
            u64::from(output.num_prompt_logprobs_reqs),
            u64::from(output.num_prompt_logprobs),
            u64::from(output.num_new_reqs),
            u64::from(output.num_block_table_updates),
            u64::from(output.num_finished),
            u64::from(output.num_preempted),
            u64::from(output.num_structured_output_reqs),
            u64::from(output.num_swap_out),
            u64::from(output.num_swap_in),
            u64::from(output.num_copies),
            u64::from(self.graph_size),
        ]
    }

    fn from_numbers(numbers: &[u64]) -> Self {
        let at = |index: usize| numbers[index] as u32;
        Self {
            output: SchedulerOutput {
                step: numbers[0],
                buffer_index: at(1),
                num_reqs: at(2),
                total_num_scheduled_tokens: at(3),
                max_num_scheduled_tokens: at(4),
                max_seq_len: at(5),
                num_sampled: at(6),
                num_logits: at(7),
                num_prompt_logprobs_reqs: at(8),
                num_prompt_logprobs: at(9),
                num_new_reqs: at(10),
                num_block_table_updates: at(11),
                num_finished: at(12),
                num_preempted: at(13),
                num_structured_output_reqs: at(14),
                num_swap_out: at(15),
                num_swap_in: at(16),
                num_copies: at(17),
            },
            graph_size: at(18),
        }
    }

    /// Number of used elements of each array.
    fn extents(&self, arrays: &StepArrays) -> Result<[usize; ARRAYS.len()], FrameError> {
        let output = &self.output;
        let count = |number: u32| number as usize;
        // The starts of `n` items have one more element, unless there are no items.
        let starts = |number: u32| if number == 0 { 0 } else { number as usize + 1 };
        let (reqs, tokens) = (count(output.num_reqs), count(output.total_num_scheduled_tokens));
        let updates = count(output.num_block_table_updates);
        let block_ids = if updates == 0 { 0 } else { arrays.block_table_end(updates)? };
        let extents = [
            reqs,
            reqs,
            reqs,
            reqs,
            starts(output.num_reqs),
            tokens,
            tokens,
            tokens,
            reqs,
            count(output.num_logits),
            count(output.num_sampled),
            count(output.num_new_reqs),
            count(output.num_new_reqs) * SAMPLING_INT_COLUMNS.len(),
            count(output.num_prompt_logprobs_reqs),
            starts(output.num_prompt_logprobs_reqs),
            count(output.num_prompt_logprobs),
            count(output.num_prompt_logprobs),
            updates,
            updates,
            starts(output.num_block_table_updates),
            block_ids,
            count(output.num_finished),
            count(output.num_preempted),
            2 * count(output.num_swap_out),
            2 * count(output.num_swap_in),
            2 * count(output.num_copies),
        ];
        for ((got, place), name) in extents.into_iter().zip(&arrays.places).zip(ARRAYS) {
            if got > place.num_elements {
                return Err(FrameError::Extent { name, got, room: place.num_elements });
            }
        }
        Ok(extents)
    }
}
