//! The step channel for Python: `StepWriter` for rank 0, `StepReader` for the others.

use std::{
    os::fd::{AsRawFd, BorrowedFd},
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ::step_channel::{
    LineView, MAX_READERS, NodeLink, ReadError, Reader, StepArrays, StepFrame, Watch, WriteError, Writer,
};
use pyo3::{
    exceptions::{PyKeyError, PyOSError, PyTimeoutError, PyTypeError, PyValueError},
    prelude::*,
    types::{PyDict, PyList},
};

use crate::{
    errors::SchedulerStateError,
    scheduler::{buffers::native_buffer, output::PySchedulerOutput},
};

/// A limit that is longer than any start or step.
const MAX_SECONDS: f64 = 1e6;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<StepWriter>()?;
    module.add_class::<StepReader>()?;
    module.add_class::<FollowedStep>()
}

/// Sets of step buffers, kept alive and in place.
#[derive(Default)]
struct Sets {
    arrays: Vec<StepArrays>,
    _views: Vec<Box<dyn std::any::Any + Send + Sync>>,
}

impl Sets {
    fn register(sets: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut views: Vec<Box<dyn std::any::Any + Send + Sync>> = Vec::new();
        let mut arrays = Vec::new();
        for set in sets.try_iter()? {
            let set = set?;
            // SAFETY: the views are kept with the addresses, so the memory stays valid and unmoved; the writer reads a
            // set between `schedule` and the step's update, the reader writes one that only its runner reads, after.
            let places = unsafe { StepArrays::new(|name| place_of(&set, name, &mut views)) };
            arrays.push(places?);
        }
        Ok(Self { arrays, _views: views })
    }
}

fn place_of(
    set: &Bound<'_, PyAny>,
    name: &'static str,
    views: &mut Vec<Box<dyn std::any::Any + Send + Sync>>,
) -> PyResult<(NonNull<u8>, usize, usize)> {
    let array = set.get_item(name).map_err(|_| {
        PyKeyError::new_err(format!("step buffers lack the array {name:?}; see step_buffer_spec"))
    })?;
    if name == "sampling_int" { place::<i64>(&array, name, views) } else { place::<i32>(&array, name, views) }
}

fn place<T: pyo3::buffer::Element + Send + Sync + 'static>(
    array: &Bound<'_, PyAny>,
    name: &str,
    views: &mut Vec<Box<dyn std::any::Any + Send + Sync>>,
) -> PyResult<(NonNull<u8>, usize, usize)> {
    let view = native_buffer::<T>(array)
        .map_err(|_| PyTypeError::new_err(format!("step buffer {name} is of another dtype")))?;
    if view.readonly() || !view.is_c_contiguous() {
        return Err(PyValueError::new_err(format!("step buffer {name} must be writable and C-contiguous")));
    }
    let start = NonNull::new(view.buf_ptr().cast::<u8>())
        .ok_or_else(|| PyValueError::new_err(format!("step buffer {name} has no memory")))?;
    let found = (start, size_of::<T>(), view.item_count());
    views.push(Box::new(view));
    Ok(found)
}

/// Rank 0's end: publishes commands and steps to the other ranks. One thread publishes; `lines`, `give_up` and `close`
/// may be called from any.
#[pyclass(frozen, module = "rustvllm._core")]
pub(crate) struct StepWriter {
    inner: Mutex<(Writer, Sets)>,
    watch: Arc<Watch>,
    fd: i32,
}

impl StepWriter {
    /// Send every frame to a node as well; see `NodeLink.lead`.
    pub(crate) fn add_node(&self, link: &NodeLink, first: usize, count: usize) -> PyResult<()> {
        let writer = &mut self.lock().0;
        let num_readers = self.watch.lines().len();
        if first < 1 || count < 1 || first + count > num_readers + 1 || writer.number() != 0 {
            return Err(PyValueError::new_err(format!(
                "{count} ranks from {first} on do not lie within 1 to {num_readers}, or a frame was published"
            )));
        }
        link.lead(writer, first, count);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, (Writer, Sets)> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl StepWriter {
    #[new]
    fn new(num_readers: usize) -> PyResult<Self> {
        if !(1..=MAX_READERS).contains(&num_readers) {
            let message =
                format!("num_readers is {num_readers}, but it must lie between 1 and {MAX_READERS}");
            return Err(PyValueError::new_err(message));
        }
        let writer = Writer::new(num_readers).map_err(|error| write_error(&error))?;
        let (watch, fd) = (writer.watch(), writer.fd().as_raw_fd());
        Ok(Self { inner: Mutex::new((writer, Sets::default())), watch, fd })
    }

    /// The descriptor that the other ranks inherit.
    fn fileno(&self) -> i32 {
        self.fd
    }

    /// Take the sets of step buffers that steps lie in; every command before must be done.
    fn register(&self, sets: &Bound<'_, PyAny>) -> PyResult<()> {
        let sets = Sets::register(sets)?;
        let mut inner = self.lock();
        for arrays in &sets.arrays {
            inner.0.make_room(arrays).map_err(|error| write_error(&error))?;
        }
        inner.1 = sets;
        Ok(())
    }

    /// Publish a command with its numbers; returns the frame's number.
    fn publish(&self, py: Python<'_>, command: u32, words: Vec<u64>, limit: f64) -> PyResult<u32> {
        let limit = seconds(limit)?;
        py.detach(|| self.lock().0.publish(command, &words, limit)).map_err(|error| write_error(&error))
    }

    /// Publish a step that the scheduler planned; returns the frame's number.
    fn publish_step(
        &self,
        py: Python<'_>,
        command: u32,
        output: &PySchedulerOutput,
        graph_size: u32,
        limit: f64,
    ) -> PyResult<u32> {
        let limit = seconds(limit)?;
        let step = StepFrame { output: output.inner, graph_size };
        let index = step.output.buffer_index as usize;
        py.detach(|| {
            let (writer, sets) = &mut *self.lock();
            let arrays = sets.arrays.get(index)?;
            Some(writer.publish_step(command, &step, arrays, limit))
        })
        .ok_or_else(|| SchedulerStateError::new_err(format!("buffer set {index} was not registered")))?
        .map_err(|error| write_error(&error))
    }

    /// Wait until every rank did what a frame says.
    fn wait_done(&self, py: Python<'_>, number: u32, limit: f64) -> PyResult<()> {
        let limit = seconds(limit)?;
        py.detach(|| self.lock().0.wait_done(number, limit)).map_err(|error| write_error(&error))
    }

    /// End every wait of this side with an error, now and later.
    fn give_up(&self) {
        self.watch.give_up();
    }

    /// Tell the other ranks that nothing more comes.
    fn close(&self) {
        self.watch.close();
    }

    /// What each rank says of itself, from rank 1: a dict of `taken`, `done`, `failed`, `activity`, `since_ns`,
    /// `activity_ns`, `activities` and `value`.
    fn lines<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let lines: PyResult<Vec<_>> = self.watch.lines().iter().map(|line| line_dict(py, line)).collect();
        PyList::new(py, lines?)
    }

    /// The last frame that was published.
    #[getter]
    fn published(&self) -> u32 {
        self.watch.published()
    }

    /// For how many seconds this side has waited for slots; not while one is waited for.
    #[getter]
    fn blocked_seconds(&self, py: Python<'_>) -> f64 {
        py.detach(|| self.lock().0.blocked().as_secs_f64())
    }
}

/// The end of a rank that follows.
#[pyclass(frozen, module = "rustvllm._core")]
pub(crate) struct StepReader {
    inner: Mutex<(Reader, Sets)>,
}

impl StepReader {
    fn lock(&self) -> MutexGuard<'_, (Reader, Sets)> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl StepReader {
    #[new]
    fn new(fd: i32, rank: usize) -> PyResult<Self> {
        if fd < 0 {
            return Err(PyOSError::new_err(format!("{fd} is not a descriptor")));
        }
        // SAFETY: the kernel refuses a number without an open descriptor; this one is borrowed for the call alone.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let owned = borrowed.try_clone_to_owned()?;
        let reader = Reader::new(owned, rank).map_err(|error| read_error(&error))?;
        Ok(Self { inner: Mutex::new((reader, Sets::default())) })
    }

    /// Take the sets of step buffers that steps are copied into.
    fn register(&self, sets: &Bound<'_, PyAny>) -> PyResult<()> {
        self.lock().1 = Sets::register(sets)?;
        Ok(())
    }

    /// Wait so many seconds for the next frame; its command, or None.
    fn wait(&self, py: Python<'_>, limit: f64) -> PyResult<Option<u32>> {
        let limit = seconds(limit)?;
        let frame = py.detach(|| {
            let reader = &mut self.lock().0;
            reader.wait(Some(limit)).map(|_| reader.frame().map(|frame| frame.command))
        });
        frame.transpose().map_err(|error| read_error(&error))
    }

    /// The numbers of the frame that was waited for; it is taken.
    fn words(&self) -> PyResult<Vec<u64>> {
        let reader = &mut self.lock().0;
        let words = reader.frame().map_err(|error| read_error(&error))?.words.to_vec();
        reader.take();
        Ok(words)
    }

    /// The step of the frame that was waited for, its arrays copied into the set that it names; it is taken.
    fn step(&self) -> PyResult<FollowedStep> {
        let (reader, sets) = &mut *self.lock();
        let frame = reader.frame().map_err(|error| read_error(&error))?;
        let inner = StepFrame::read(frame.words, |index| sets.arrays.get_mut(index as usize))
            .map_err(|error| read_error(&error.into()))?;
        reader.take();
        Ok(FollowedStep { inner })
    }

    /// What the last taken frame says is done, with this answer.
    #[pyo3(signature = (value=0))]
    fn finish(&self, value: u64) {
        self.lock().0.finish(value);
    }

    /// This rank cannot follow any more.
    fn fail(&self) {
        self.lock().0.fail();
    }

    /// Say what this rank waits in from now on; 0: in nothing.
    fn note_activity(&self, activity: u32) {
        self.lock().0.note_activity(activity);
    }

    /// Whether the writer said that nothing more comes.
    #[getter]
    fn is_closed(&self) -> bool {
        self.lock().0.is_closed()
    }
}

/// A step as a rank that follows sees it: the numbers of a `SchedulerOutput`, and what was decided for all ranks.
#[pyclass(frozen, module = "rustvllm._core")]
pub(crate) struct FollowedStep {
    inner: StepFrame,
}

macro_rules! numbers {
    ($($name:ident),+ $(,)?) => {
        #[pymethods]
        impl FollowedStep {
            #[getter]
            fn step(&self) -> u64 {
                self.inner.output.step
            }

            /// Requests of the captured graph that it runs in; 0: it runs without.
            #[getter]
            fn graph_size(&self) -> u32 {
                self.inner.graph_size
            }

            $(#[getter]
            fn $name(&self) -> u32 {
                self.inner.output.$name
            })+
        }
    };
}

numbers!(
    buffer_index,
    num_reqs,
    total_num_scheduled_tokens,
    max_num_scheduled_tokens,
    max_seq_len,
    num_sampled,
    num_logits,
    num_prompt_logprobs_reqs,
    num_prompt_logprobs,
    num_new_reqs,
    num_block_table_updates,
    num_finished,
    num_preempted,
    num_structured_output_reqs,
    num_swap_out,
    num_swap_in,
    num_copies,
);

fn line_dict<'py>(py: Python<'py>, line: &LineView) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("taken", line.taken)?;
    dict.set_item("done", line.done)?;
    dict.set_item("failed", line.failed)?;
    dict.set_item("activity", line.activity)?;
    dict.set_item("since_ns", line.since_ns)?;
    dict.set_item("activity_ns", line.activity_ns)?;
    dict.set_item("activities", line.activities)?;
    dict.set_item("value", line.value)?;
    Ok(dict)
}

pub(crate) fn seconds(limit: f64) -> PyResult<Duration> {
    if (0.0..=MAX_SECONDS).contains(&limit) {
        return Ok(Duration::from_secs_f64(limit));
    }
    let message = format!("limit is {limit}, but it must lie between 0 and {MAX_SECONDS:.0} seconds");
    Err(PyValueError::new_err(message))
}

pub(crate) fn write_error(error: &WriteError) -> PyErr {
    match error {
        WriteError::Late { .. } => PyTimeoutError::new_err(error.to_string()),
        WriteError::GivenUp | WriteError::OutOfTurn { .. } | WriteError::Node { .. } => {
            SchedulerStateError::new_err(error.to_string())
        }
        WriteError::Frame(_) => PyValueError::new_err(error.to_string()),
        WriteError::Memory(_) => PyOSError::new_err(error.to_string()),
    }
}

fn read_error(error: &ReadError) -> PyErr {
    match error {
        ReadError::Memory(_) => PyOSError::new_err(error.to_string()),
        ReadError::NoChannel | ReadError::NoLine { .. } | ReadError::Frame(_) => {
            PyValueError::new_err(error.to_string())
        }
    }
}
