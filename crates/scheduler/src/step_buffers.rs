//! `StepBuffers`: the arrays of one step, registered once and written in place.
//!
//! `R` = `max_num_seqs`, `T` = `max_num_batched_tokens`, `D` = `num_speculative_tokens`, `S` = `num_cpu_blocks`, `F`
//! and `I` = the numbers of columns; what each array means is in `docs/boundary.md`. The memory is Python's (pinned
//! torch memory behind numpy views) or our own; either way it is reached through raw pointers made by one `unsafe`
//! constructor, never through slices that live across calls.

use std::ptr::NonNull;

use thiserror::Error;

use crate::{
    config::SchedulerConfig,
    sampling_params::{FLOAT_NAMES, INT_NAMES, NUM_FLOATS, NUM_INTS},
};

/// Names of the columns of `sampling_float`.
pub const SAMPLING_FLOAT_COLUMNS: [&str; NUM_FLOATS] = FLOAT_NAMES;
/// Names of the columns of `sampling_int`: integers of the table of sampling parameters, then facts of the row.
pub const SAMPLING_INT_COLUMNS: [&str; NUM_INTS + RowFacts::NAMES.len()] = {
    let mut columns = [""; NUM_INTS + RowFacts::NAMES.len()];
    columns.split_at_mut(NUM_INTS).0.copy_from_slice(&INT_NAMES);
    columns.split_at_mut(NUM_INTS).1.copy_from_slice(&RowFacts::NAMES);
    columns
};

macro_rules! row_facts {
    ($($(#[$doc:meta])* $name:ident;)+) => {
        /// What the worker gets for a new row in addition to the numbers of the table.
        pub(crate) struct RowFacts {
            $($(#[$doc])* pub(crate) $name: i64,)+
        }

        impl RowFacts {
            const NAMES: [&str; [$(stringify!($name)),+].len()] = [$(stringify!($name)),+];

            /// The values in the order of the columns.
            pub(crate) fn columns(&self) -> [i64; Self::NAMES.len()] {
                [$(self.$name),+]
            }
        }
    };
}

row_facts! {
    /// Output tokens before EOS and stop ids may be sampled.
    min_tokens;
    /// Where its output begins.
    num_prompt_tokens;
    /// 1 if it has list parameters.
    has_extras;
    /// How many multimodal inputs its prompt has.
    num_multimodal;
}

/// Most stop ids that one request may mask.
pub const MAX_STOP_TOKEN_IDS: usize = 1024;

/// Element type of an array.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DType {
    /// 32-bit signed.
    Int32,
    /// 64-bit signed.
    Int64,
    /// 32-bit float.
    Float32,
}

impl DType {
    /// Its name in numpy.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Int32 => "int32",
            Self::Int64 => "int64",
            Self::Float32 => "float32",
        }
    }

    /// Bytes per element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::Int32 | Self::Float32 => 4,
            Self::Int64 => 8,
        }
    }
}

/// The specification of one array.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ArraySpec {
    /// Name, the same in both languages.
    pub name: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Shape, C order.
    pub shape: Vec<usize>,
}

impl ArraySpec {
    /// Elements in all.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// An array that is shorter than its specification.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("step buffer {name} needs {expected} elements, got {got}")]
pub struct BufferError {
    /// Which array.
    pub name: &'static str,
    /// Elements needed.
    pub expected: usize,
    /// Elements given.
    pub got: usize,
}

/// A typed array in registered memory.
#[derive(Debug)]
pub struct Column<T> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: a column is a pointer into memory that its builder keeps alive and hands to one thread
// at a time (the generation protocol of `Scheduler`); the values are plain numbers.
unsafe impl<T: Send> Send for Column<T> {}

impl<T: Copy> Column<T> {
    /// Write one element.
    ///
    /// # Panics
    /// `index` is outside the array: a bug in the scheduler, whose budgets bound every index.
    #[inline]
    pub(crate) fn write(&mut self, index: usize, value: T) {
        assert!(index < self.len, "step buffer overrun");
        // SAFETY: in bounds; the memory is valid and ours by the constructor's contract.
        unsafe { self.start.add(index).write(value) };
    }

    /// Write consecutive elements.
    #[inline]
    pub(crate) fn write_from(&mut self, index: usize, values: &[T]) {
        assert!(index + values.len() <= self.len, "step buffer overrun");
        // SAFETY: in bounds; `values` is a Rust slice and cannot overlap memory that is registered as raw.
        unsafe { self.start.add(index).as_ptr().copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    }

    /// `len` elements from `index` on, to be written in a loop within one call of the scheduler.
    #[inline]
    pub(crate) fn window(&mut self, index: usize, len: usize) -> &mut [T] {
        assert!(index + len <= self.len, "step buffer overrun");
        // SAFETY: in bounds and initialised; `&mut self` is the only door to this memory while Rust owns the
        // set, and the slice ends with the call, before Python looks at the array.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(index).as_ptr(), len) }
    }

    /// Read one element, for tests and the debug view.
    ///
    /// # Panics
    /// `index` is outside the array.
    #[must_use]
    pub fn read(&self, index: usize) -> T {
        assert!(index < self.len, "step buffer overrun");
        // SAFETY: in bounds; initialised by the constructor's contract.
        unsafe { self.start.add(index).read() }
    }

    /// Copy the first `len` elements.
    #[must_use]
    pub fn to_vec(&self, len: usize) -> Vec<T> {
        (0..len).map(|i| self.read(i)).collect()
    }
}

macro_rules! step_buffers {
    ($($(#[$doc:meta])* $name:ident: $type:ty, $dtype:ident, |$c:ident| $shape:expr;)*) => {
        /// One set of arrays; see the module docs and `docs/boundary.md`.
        #[derive(Debug)]
        pub struct StepBuffers {
            $($(#[$doc])* pub $name: Column<$type>,)*
            /// Our own memory, if it is not Python's.
            _owned: Vec<Vec<u64>>,
        }

        impl StepBuffers {
            /// Name, dtype and shape of every array for `config`.
            #[must_use]
            pub fn spec(config: &SchedulerConfig) -> Vec<ArraySpec> {
                vec![$({
                    let $c = Sizes::new(config);
                    ArraySpec { name: stringify!($name), dtype: DType::$dtype, shape: $shape }
                },)*]
            }

            /// A set over registered memory. `pointer_of` gives start and number of elements for each spec.
            ///
            /// # Errors
            /// What `pointer_of` says, or a `BufferError` for an array that is too short.
            ///
            /// # Safety
            /// The arrays must not overlap, nor those of different sets. Each pointer must be aligned for its dtype
            /// and valid for reads and writes of the given number of initialised elements for as long as the set
            /// lives, and nothing else may touch the memory between the entry of `schedule` and its return, nor the
            /// scheduler's owner while Python reads it until `update_from_output`: the generation check enforces that
            /// order.
            pub unsafe fn from_raw<E: From<BufferError>>(
                config: &SchedulerConfig,
                mut pointer_of: impl FnMut(&ArraySpec) -> Result<(NonNull<u8>, usize), E>,
            ) -> Result<Self, E> {
                Ok(Self {
                    $($name: {
                        let $c = Sizes::new(config);
                        let spec = ArraySpec { name: stringify!($name), dtype: DType::$dtype, shape: $shape };
                        let (start, got) = pointer_of(&spec)?;
                        let expected = spec.num_elements();
                        if got < expected {
                            return Err(BufferError { name: spec.name, expected, got }.into());
                        }
                        Column { start: start.cast(), len: expected }
                    },)*
                    _owned: Vec::new(),
                })
            }
        }
    };
}

/// The sizes in the shapes.
struct Sizes {
    reqs: usize,
    tokens: usize,
    block_ids: usize,
    stop_ids: usize,
    /// Most rows of logits of one request.
    logits: usize,
    /// Most pairs of a swap list; an array has at least one element.
    swaps: usize,
}

impl Sizes {
    fn new(config: &SchedulerConfig) -> Self {
        let reqs = config.max_num_seqs as usize;
        let per_request = config.blocks_per_request() as usize;
        Self {
            reqs,
            tokens: config.max_num_batched_tokens as usize,
            block_ids: reqs + per_request.max((reqs * per_request).min(2 * config.num_blocks as usize)),
            stop_ids: MAX_STOP_TOKEN_IDS + 16 * reqs,
            logits: 1 + config.num_speculative_tokens as usize,
            swaps: config.num_cpu_blocks.max(1) as usize,
        }
    }
}

step_buffers! {
    /// `[R]` batch position → persistent row.
    idx_mapping: i32, Int32, |c| vec![c.reqs];
    /// `[R]` tokens to run.
    num_scheduled_tokens: i32, Int32, |c| vec![c.reqs];
    /// `[R]` tokens whose KV exists before this step.
    num_computed_tokens: i32, Int32, |c| vec![c.reqs];
    /// `[R]` computed + scheduled.
    seq_lens: i32, Int32, |c| vec![c.reqs];
    /// `[R + 1]` start of each request's tokens; the padding repeats the total.
    query_start_loc: i32, Int32, |c| vec![c.reqs + 1];
    /// `[T]` token ids.
    input_ids: i32, Int32, |c| vec![c.tokens];
    /// `[T]` positions.
    positions: i32, Int32, |c| vec![c.tokens];
    /// `[T]` `block_id * block_size + offset`.
    slot_mapping: i32, Int32, |c| vec![c.tokens];
    /// `[R]` how many of a request's tokens, the last ones, are drafts.
    num_draft_tokens: i32, Int32, |c| vec![c.reqs];
    /// `[R * (1 + D)]` flattened token index of each row of logits: one per sampled request and one per draft.
    logits_indices: i32, Int32, |c| vec![c.reqs * c.logits];
    /// `[R]` persistent row of each sampled row.
    sampled_rows: i32, Int32, |c| vec![c.reqs];
    /// `[R]` rows of new and resumed requests.
    new_rows: i32, Int32, |c| vec![c.reqs];
    /// `[R, F]` their parameters, `SAMPLING_FLOAT_COLUMNS`.
    sampling_float: f32, Float32, |c| vec![c.reqs, SAMPLING_FLOAT_COLUMNS.len()];
    /// `[R, I]` their parameters, `SAMPLING_INT_COLUMNS`.
    sampling_int: i64, Int64, |c| vec![c.reqs, SAMPLING_INT_COLUMNS.len()];
    /// `[R + 1]` start of each new request's masked stop ids.
    stop_indptr: i32, Int32, |c| vec![c.reqs + 1];
    /// Ids masked while fewer than `min_tokens` outputs exist.
    stop_token_ids: i32, Int32, |c| vec![c.stop_ids];
    /// `[R]` rows of requests that need log-probabilities of prompt tokens in this step.
    prompt_logprobs_rows: i32, Int32, |c| vec![c.reqs];
    /// `[R + 1]` start of each such row's tokens in the next two arrays.
    prompt_logprobs_indptr: i32, Int32, |c| vec![c.reqs + 1];
    /// `[T]` flattened index of each token whose logits are needed: they judge the next token.
    prompt_logprobs_indices: i32, Int32, |c| vec![c.tokens];
    /// `[T]` id of that next token.
    prompt_logprobs_targets: i32, Int32, |c| vec![c.tokens];
    /// `[R]` rows whose block table changes.
    bt_rows: i32, Int32, |c| vec![c.reqs];
    /// `[R]` where in the table the new blocks begin.
    bt_starts: i32, Int32, |c| vec![c.reqs];
    /// `[R + 1]` start of each difference in `bt_block_ids`.
    bt_indptr: i32, Int32, |c| vec![c.reqs + 1];
    /// Block ids of all differences.
    bt_block_ids: i32, Int32, |c| vec![c.block_ids];
    /// `[R]` rows given up by finished requests.
    finished_rows: i32, Int32, |c| vec![c.reqs];
    /// `[R]` rows given up by preempted requests.
    preempted_rows: i32, Int32, |c| vec![c.reqs];
    /// `[S, 2]` (GPU block, CPU block): copied first.
    blocks_to_swap_out: i32, Int32, |c| vec![c.swaps, 2];
    /// `[S, 2]` (CPU block, GPU block): copied second.
    blocks_to_swap_in: i32, Int32, |c| vec![c.swaps, 2];
    /// `[R, 2]` (from, to): copied last, before the model runs.
    blocks_to_copy: i32, Int32, |c| vec![c.reqs, 2];
}

impl StepBuffers {
    /// Make a set over memory of its own, for benches, tests and a scheduler without a model.
    ///
    /// # Panics
    /// Never in practice: the memory is made to fit the specification.
    #[must_use]
    pub fn owned(config: &SchedulerConfig) -> Self {
        let mut memory: Vec<Vec<u64>> = Vec::new();
        // SAFETY: each pointer is into a fresh zeroed Vec<u64> (aligned for every dtype) whose heap
        // buffer does not move when the outer Vec grows; the Vecs are kept in the set below.
        let built = unsafe {
            Self::from_raw::<BufferError>(config, |spec| {
                let mut words = vec![0u64; (spec.num_elements() * spec.dtype.size()).div_ceil(8).max(1)];
                let start = NonNull::new(words.as_mut_ptr().cast::<u8>()).unwrap_or(NonNull::dangling());
                memory.push(words);
                Ok((start, spec.num_elements()))
            })
        };
        let mut buffers = built.expect("owned memory fits its own specification");
        buffers._owned = memory;
        buffers
    }
}
