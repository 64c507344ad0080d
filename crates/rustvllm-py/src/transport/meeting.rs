//! Where the ranks of one machine add and gather numbers, for Python.

use std::{
    os::fd::{AsRawFd, BorrowedFd},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ::cpu_kernels::bf16;
use ::step_channel::{Meeting, MeetingEnd, MeetingError, Summand};
use pyo3::{
    buffer::{self, PyBuffer},
    exceptions::{PyOSError, PyTimeoutError, PyTypeError, PyValueError},
    prelude::*,
};

use crate::{
    errors::SchedulerStateError, scheduler::buffers::native_buffer, transport::step_channel::seconds,
};

/// A second: longer than any collective of a step.
const MAX_SPIN_US: u64 = 1_000_000;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<RankMeeting>()
}

/// One rank's end. Every rank makes the same calls in the same order, each in one thread; `give_up` may be called from
/// any.
#[pyclass(frozen, module = "rustvllm._core")]
pub(crate) struct RankMeeting {
    inner: Mutex<Meeting>,
    end: MeetingEnd,
    fd: i32,
}

impl RankMeeting {
    fn of(meeting: Meeting) -> Self {
        let (end, fd) = (meeting.end(), meeting.fd().as_raw_fd());
        Self { inner: Mutex::new(meeting), end, fd }
    }

    fn lock(&self) -> MutexGuard<'_, Meeting> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add<T: buffer::Element, E: Summand + Send>(
        &self,
        py: Python<'_>,
        view: &PyBuffer<T>,
        limit: Duration,
    ) -> PyResult<()> {
        expect_contiguous("data", view)?;
        expect_writable("data", view)?;
        const { assert!(size_of::<E>() == size_of::<T>() && align_of::<E>() <= size_of::<T>()) };
        let (start, count) = (view.buf_ptr().cast::<E>(), view.item_count());
        if !start.is_aligned() {
            return Err(PyValueError::new_err("data is not aligned to its elements"));
        }
        if count == 0 {
            return Ok(());
        }
        // SAFETY: the view keeps as many writable elements in place; `E` is as large as `T` and takes all bits. That no
        // other thread of Python touches them meanwhile is the caller's part, as with every call of numpy.
        let data = unsafe { std::slice::from_raw_parts_mut(start, count) };
        py.detach(|| self.lock().all_reduce(data, limit)).map_err(|error| meeting_error(&error))
    }
}

#[pymethods]
impl RankMeeting {
    #[new]
    #[pyo3(signature = (num_ranks, *, spin_us=50))]
    fn new(num_ranks: usize, spin_us: u64) -> PyResult<Self> {
        if !(2..=Meeting::MAX_RANKS).contains(&num_ranks) {
            let most = Meeting::MAX_RANKS;
            let message = format!("num_ranks is {num_ranks}, but it must lie between 2 and {most}");
            return Err(PyValueError::new_err(message));
        }
        Meeting::new(num_ranks, spin(spin_us)?).map(Self::of).map_err(|error| meeting_error(&error))
    }

    /// The same meeting as another rank sees it.
    #[staticmethod]
    #[pyo3(signature = (fd, rank, *, spin_us=50))]
    fn join(fd: i32, rank: usize, spin_us: u64) -> PyResult<Self> {
        if fd < 0 {
            return Err(PyOSError::new_err(format!("{fd} is not a descriptor")));
        }
        // SAFETY: the kernel refuses a number without an open descriptor; this one is borrowed for the call alone.
        let owned = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?;
        Meeting::join(owned, rank, spin(spin_us)?).map(Self::of).map_err(|error| meeting_error(&error))
    }

    /// The descriptor that the other ranks inherit.
    fn fileno(&self) -> i32 {
        self.fd
    }

    /// Let an array be its sum over all ranks.
    fn all_reduce(&self, py: Python<'_>, data: &Bound<'_, PyAny>, limit: f64) -> PyResult<()> {
        let limit = seconds(limit)?;
        if let Ok(view) = native_buffer::<f32>(data) {
            return self.add::<f32, f32>(py, &view, limit);
        }
        let view = native_buffer::<u16>(data).map_err(|error| {
            PyTypeError::new_err(format!(
                "data must be an array of float32, or of bfloat16 seen as uint16: {error}"
            ))
        })?;
        self.add::<u16, bf16>(py, &view, limit)
    }

    /// Let `out` be what each rank has, in the order of ranks; without `out`, only give.
    #[pyo3(signature = (own, out, limit, *, to_first=false))]
    fn gather(
        &self,
        py: Python<'_>,
        own: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        limit: f64,
        to_first: bool,
    ) -> PyResult<()> {
        let limit = seconds(limit)?;
        let own = bytes("own", own)?;
        let out = out.map(|out| bytes("out", out)).transpose()?;
        if let Some(out) = &out {
            expect_writable("out", out)?;
            let (start, other) = (out.buf_ptr() as usize, own.buf_ptr() as usize);
            if start < other + own.item_count() && other < start + out.item_count() {
                return Err(PyValueError::new_err("own and out share memory, but out is written"));
            }
        } else if !to_first {
            return Err(PyValueError::new_err("out is None, which only a gather to the first rank has"));
        }
        if own.item_count() == 0 {
            return Ok(());
        }
        // SAFETY: the view keeps as many bytes in place; as in `add` for other threads.
        let own = unsafe { std::slice::from_raw_parts(own.buf_ptr().cast::<u8>(), own.item_count()) };
        // SAFETY: likewise; they are writable, and none of `own`'s.
        let out = out.as_ref().map(|out| unsafe {
            std::slice::from_raw_parts_mut(out.buf_ptr().cast::<u8>(), out.item_count())
        });
        py.detach(|| match out {
            Some(out) if !to_first => self.lock().all_gather(own, out, limit),
            out => self.lock().gather(own, out, limit),
        })
        .map_err(|error| meeting_error(&error))
    }

    /// End every wait of every rank with an error, now and later.
    fn give_up(&self) {
        self.end.give_up();
    }
}

fn bytes(name: &str, array: &Bound<'_, PyAny>) -> PyResult<PyBuffer<u8>> {
    let view = native_buffer::<u8>(array)
        .map_err(|error| PyTypeError::new_err(format!("{name} must be an array of uint8: {error}")))?;
    expect_contiguous(name, &view)?;
    Ok(view)
}

fn expect_contiguous<T: buffer::Element>(name: &str, view: &PyBuffer<T>) -> PyResult<()> {
    if view.is_c_contiguous() {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("{name} must be contiguous")))
}

fn expect_writable<T: buffer::Element>(name: &str, view: &PyBuffer<T>) -> PyResult<()> {
    if view.readonly() {
        return Err(PyValueError::new_err(format!("{name} must be writable")));
    }
    Ok(())
}

fn spin(spin_us: u64) -> PyResult<Duration> {
    if spin_us > MAX_SPIN_US {
        let message = format!("spin_us is {spin_us}, but it must be at most {MAX_SPIN_US}");
        return Err(PyValueError::new_err(message));
    }
    Ok(Duration::from_micros(spin_us))
}

fn meeting_error(error: &MeetingError) -> PyErr {
    match error {
        MeetingError::Late { .. } => PyTimeoutError::new_err(error.to_string()),
        MeetingError::GivenUp | MeetingError::Unlike { .. } => {
            SchedulerStateError::new_err(error.to_string())
        }
        MeetingError::Memory(_) => PyOSError::new_err(error.to_string()),
        MeetingError::NoMeeting | MeetingError::NoSeat { .. } | MeetingError::Room { .. } => {
            PyValueError::new_err(error.to_string())
        }
    }
}
