//! What an adapter adds to a layer on the CPU for Python: arrays in, checked, and the kernels called on their memory in place.

use std::sync::Arc;

use ::cpu_kernels::{DeltaError, Element, LayerDelta, Threads, Up, bf16};
use pyo3::{
    buffer::{self, PyBuffer},
    exceptions::{PyMemoryError, PyValueError},
    prelude::*,
};

use crate::{
    cpu::{
        arrays::{Rows, Vector},
        threads::CpuThreads,
    },
    errors::linear_error,
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CpuLayerDelta>()
}

fn delta_error(error: DeltaError) -> PyErr {
    match error {
        DeltaError::Memory { .. } => PyMemoryError::new_err(error.to_string()),
        _ => PyValueError::new_err(error.to_string()),
    }
}

/// A contiguous matrix of float32.
fn matrix(name: &'static str, array: &Bound<'_, PyAny>) -> PyResult<Rows<f32>> {
    let rows = Rows::<f32>::new(name, array)?;
    rows.expect_contiguous()?;
    Ok(rows)
}

/// What an adapter adds to a layer, `up (down x)` for stretches of its outputs.
#[pyclass(name = "CpuLayerDelta", frozen, module = "rustvllm._core")]
pub(crate) struct CpuLayerDelta {
    /// Shared with the adapters of decoders that it is a part of.
    pub(crate) delta: Arc<LayerDelta>,
    threads: Arc<Threads>,
}

#[pymethods]
impl CpuLayerDelta {
    #[new]
    #[pyo3(signature = (threads, down, ups, rounds=false))]
    #[expect(clippy::needless_pass_by_value, reason = "what Python's arguments are taken as")]
    fn new(
        py: Python<'_>,
        threads: &CpuThreads,
        down: &Bound<'_, PyAny>,
        ups: Vec<(usize, Bound<'_, PyAny>, Option<Bound<'_, PyAny>>)>,
        rounds: bool,
    ) -> PyResult<Self> {
        let down = matrix("down", down)?;
        let of_stretch = |(first, up, gains): &(usize, Bound<'_, PyAny>, Option<Bound<'_, PyAny>>)| {
            let gains = gains.as_ref().map(|gains| Vector::new("gains", gains)).transpose()?;
            Ok((*first, matrix("up", up)?, gains))
        };
        let matrices = ups.iter().map(of_stretch).collect::<PyResult<Vec<_>>>()?;
        let ups: Vec<_> = matrices
            .iter()
            .map(|(first, up, gains)| Up {
                first: *first,
                num_outputs: up.len,
                weight: up.token_rows::<f32>().data,
                gains: gains.as_ref().map(Vector::as_slice),
            })
            .collect();
        let (down, num_inputs) = (down.token_rows::<f32>().data, down.width());
        // The engine's thread wants the interpreter while another one packs.
        let delta = py.detach(|| LayerDelta::new(down, num_inputs, &ups, rounds)).map_err(delta_error)?;
        Ok(Self { delta: Arc::new(delta), threads: Arc::clone(&threads.threads) })
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.delta.num_bytes()
    }

    #[expect(clippy::needless_pass_by_value, reason = "what Python's arguments are taken as")]
    fn add(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        rows: Vec<u32>,
    ) -> PyResult<()> {
        if PyBuffer::<f32>::get(x).is_ok() {
            self.add_as::<f32, f32>(py, x, out, &rows)
        } else {
            self.add_as::<u16, bf16>(py, x, out, &rows)
        }
    }
}

impl CpuLayerDelta {
    /// `T` is what the buffers say they hold, `E` what that means.
    fn add_as<T: buffer::Element + Sync, E: Element>(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        rows: &[u32],
    ) -> PyResult<()> {
        let (x, out) = (Rows::<T>::new("x", x)?, Rows::<T>::new("out", out)?);
        x.expect_columns(self.delta.num_inputs())?;
        out.expect_writable()?;
        let (width, needed) = (out.width(), self.delta.num_outputs());
        if width < needed || out.len != x.len {
            return Err(PyValueError::new_err(format!(
                "out has {} rows of {width} outputs, but x has {} rows and the adapter adds to {needed} outputs",
                out.len, x.len
            )));
        }
        x.expect_apart(&out)?;
        let stride = out.stride;
        // SAFETY: it is writable, shares no byte with `x`, and stays where it is while the view lives. That no other thread of
        // Python touches it meanwhile is the caller's part, as with every call of numpy.
        let data = unsafe { out.as_mut_slice::<E>() };
        let x = x.token_rows::<E>();
        py.detach(|| self.delta.add(x, rows, &self.threads, data, stride)).map_err(linear_error)
    }
}
