//! The threads that compute on the CPU, for Python: one set of them for attention and products.

use std::{sync::Arc, time::Duration};

use ::cpu_kernels::{PeakKind, Threads, peak, threads::DEFAULT_SPIN};
use pyo3::{
    exceptions::{PyOSError, PyValueError},
    prelude::*,
};

const MAX_THREADS: usize = 1024;
/// A second: longer than any step's work on the host.
const MAX_SPIN_US: u64 = 1_000_000;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CpuThreads>()
}

/// The caller and its helpers, who sleep while there is nothing to do.
#[pyclass(frozen, module = "rustvllm._core")]
pub(crate) struct CpuThreads {
    pub(crate) threads: Arc<Threads>,
}

#[pymethods]
impl CpuThreads {
    #[new]
    #[pyo3(signature = (num_threads, *, spin_us=None))]
    fn new(num_threads: usize, spin_us: Option<u64>) -> PyResult<Self> {
        if num_threads == 0 || num_threads > MAX_THREADS {
            let message =
                format!("num_threads is {num_threads}, but it must lie between 1 and {MAX_THREADS}");
            return Err(PyValueError::new_err(message));
        }
        let spin = spin_us.map_or(DEFAULT_SPIN, Duration::from_micros);
        if spin > Duration::from_micros(MAX_SPIN_US) {
            let message = format!("spin_us is {}, but it must be at most {MAX_SPIN_US}", spin.as_micros());
            return Err(PyValueError::new_err(message));
        }
        let threads = Threads::with_spin(num_threads, spin)
            .map_err(|error| PyOSError::new_err(format!("cannot start {num_threads} threads: {error}")))?;
        Ok(Self { threads: Arc::new(threads) })
    }

    #[getter]
    fn num_threads(&self) -> usize {
        self.threads.num_threads()
    }

    /// Operations per second that all threads reach from registers, for measurements.
    fn peak(&self, py: Python<'_>, kind: &str) -> PyResult<Option<f64>> {
        let kind = match kind {
            "f32" => PeakKind::F32,
            "bf16" => PeakKind::Bf16,
            "int8" => PeakKind::Int8,
            _ => {
                let message = format!("kind is {kind:?}, but it must be f32, bf16 or int8");
                return Err(PyValueError::new_err(message));
            }
        };
        Ok(py.detach(|| peak(kind, &self.threads)))
    }
}

/// Threads that there are, or how many to start.
#[derive(FromPyObject)]
pub(crate) enum ThreadsOrNumber<'py> {
    Threads(PyRef<'py, CpuThreads>),
    Number(usize),
}

impl ThreadsOrNumber<'_> {
    pub(crate) fn threads(self) -> PyResult<Arc<Threads>> {
        match self {
            Self::Threads(threads) => Ok(Arc::clone(&threads.threads)),
            Self::Number(num_threads) => Ok(CpuThreads::new(num_threads, None)?.threads),
        }
    }
}
