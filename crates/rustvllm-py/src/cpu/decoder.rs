//! All blocks of a decoder on the CPU for Python, in one call: see `cpu_kernels::decoder`.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use ::cpu_kernels::{
    AdapterTokens, Angles, CacheElement, Decoder, DecoderAdapter, DecoderError, DecoderOut, DecoderTimes,
    Element, Heads, Int8Head, Logits, bf16,
};
use pyo3::{
    buffer::{self, PyBuffer},
    exceptions::{PyMemoryError, PyValueError},
    prelude::*,
};

use crate::{
    cpu::{
        arrays::Rows,
        attention::{CpuAttentionPlan, int32_array, int32_slice},
        block_parts::{BlockParts, NormParts, norm_of},
        caches::{Caches, CachesOf, CpuCaches},
        linear::CpuLinear,
        lora::CpuLayerDelta,
        positions::{TurnParts, positions_of, turn_of},
        step_memory::{StepArrays, StepMemory},
    },
    errors::linear_error,
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CpuAdapter>()?;
    module.add_class::<CpuDecoder>()
}

fn decoder_error(error: DecoderError) -> PyErr {
    match error {
        DecoderError::Memory { .. } => PyMemoryError::new_err(error.to_string()),
        DecoderError::Linear(error) => linear_error(error),
        _ => PyValueError::new_err(error.to_string()),
    }
}

/// Calls a method with the types of a step's caches and stream; see `CpuDecoder::forward_as` for what these are.
macro_rules! call_as {
    ($decoder:ident.$method:ident($caches:expr, $hidden:expr, $($argument:expr),*)) => {
        match &$caches.caches {
            Caches::Wide(caches) => {
                $decoder.$method::<f32, f32, f32, f32>(caches, $hidden, $($argument),*)
            }
            Caches::Narrow(caches) if is_wide($hidden) => {
                $decoder.$method::<f32, f32, u16, bf16>(caches, $hidden, $($argument),*)
            }
            Caches::Narrow(caches) => {
                $decoder.$method::<u16, bf16, u16, bf16>(caches, $hidden, $($argument),*)
            }
            Caches::Bytes(caches) if is_wide($hidden) => {
                $decoder.$method::<f32, f32, i8, Int8Head>(caches, $hidden, $($argument),*)
            }
            Caches::Bytes(caches) => {
                $decoder.$method::<u16, bf16, i8, Int8Head>(caches, $hidden, $($argument),*)
            }
        }
    };
}

/// Where a step's result goes.
enum End<'a, 'py> {
    /// The stream, normed if there is a norm.
    Stream(&'a Bound<'py, PyAny>),
    /// The logits of some tokens, and perhaps the likeliest ids.
    Logits {
        places: Option<&'a Bound<'py, PyAny>>,
        logits: &'a Bound<'py, PyAny>,
        ids: Option<&'a Bound<'py, PyAny>>,
    },
}

/// An adapter of a decoder.
#[pyclass(frozen, module = "rustvllm._core")]
struct CpuAdapter {
    adapter: DecoderAdapter,
}

#[pymethods]
impl CpuAdapter {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "what Python's arguments are taken as")]
    fn new(
        decoder: PyRef<'_, CpuDecoder>,
        blocks: Vec<[Option<PyRef<'_, CpuLayerDelta>>; 4]>,
    ) -> PyResult<Self> {
        let delta = |delta: &PyRef<'_, CpuLayerDelta>| Arc::clone(&delta.delta);
        let blocks =
            blocks.iter().map(|parts| parts.each_ref().map(|part| part.as_ref().map(delta))).collect();
        Ok(Self { adapter: DecoderAdapter::new(&decoder.decoder, blocks).map_err(decoder_error)? })
    }
}

/// An adapter, and its tokens of a step in ascending order.
type AdapterArgument<'py> = (PyRef<'py, CpuAdapter>, Vec<u32>);

/// Blocks of a model, and the norm at its end if they are the last; `forward` runs a step's tokens through them.
#[pyclass(frozen, module = "rustvllm._core")]
struct CpuDecoder {
    decoder: Decoder,
    angles: Mutex<Angles>,
}

#[pymethods]
impl CpuDecoder {
    #[new]
    #[pyo3(signature = (blocks, last_norm, num_heads, num_kv_heads, head_dim, *, turns=Vec::new(), head=None))]
    #[expect(clippy::needless_pass_by_value, reason = "what Python's arguments are taken as")]
    fn new(
        blocks: Vec<BlockParts<'_>>,
        last_norm: Option<NormParts<'_>>,
        num_heads: usize,
        num_kv_heads: usize,
        head_dim: usize,
        turns: Vec<TurnParts<'_>>,
        head: Option<PyRef<'_, CpuLinear>>,
    ) -> PyResult<Self> {
        let blocks = blocks.iter().map(BlockParts::block).collect::<PyResult<_>>()?;
        let heads = Heads { num_heads, num_kv_heads, head_dim };
        let last_norm = last_norm.as_ref().map(norm_of).transpose()?;
        let mut decoder = Decoder::new(blocks, last_norm, heads).map_err(decoder_error)?;
        if let Some(head) = head {
            decoder = decoder.with_head(Arc::clone(&head.layer)).map_err(decoder_error)?;
        }
        let turns = turns.iter().map(turn_of).collect::<PyResult<_>>()?;
        Ok(Self { decoder, angles: Mutex::new(Angles::new(turns)) })
    }

    #[pyo3(signature = (plan, hidden, positions, kv_caches, out, adapters=None))]
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    fn forward(
        &self,
        py: Python<'_>,
        plan: &CpuAttentionPlan,
        hidden: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        kv_caches: &CpuCaches,
        out: &Bound<'_, PyAny>,
        adapters: Option<Vec<AdapterArgument<'_>>>,
    ) -> PyResult<(u64, u64, u64)> {
        self.run(py, plan, hidden, positions, kv_caches, adapters, &End::Stream(out))
    }

    #[pyo3(signature = (plan, hidden, positions, kv_caches, places, logits, ids=None, adapters=None))]
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    fn forward_logits(
        &self,
        py: Python<'_>,
        plan: &CpuAttentionPlan,
        hidden: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        kv_caches: &CpuCaches,
        places: Option<&Bound<'_, PyAny>>,
        logits: &Bound<'_, PyAny>,
        ids: Option<&Bound<'_, PyAny>>,
        adapters: Option<Vec<AdapterArgument<'_>>>,
    ) -> PyResult<(u64, u64, u64)> {
        self.run(py, plan, hidden, positions, kv_caches, adapters, &End::Logits { places, logits, ids })
    }

    #[pyo3(signature = (plan, block, hidden, positions, kv_caches, *, adds=true))]
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    fn attend(
        &self,
        py: Python<'_>,
        plan: &CpuAttentionPlan,
        block: usize,
        hidden: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        kv_caches: &CpuCaches,
        adds: bool,
    ) -> PyResult<(u64, u64, u64)> {
        call_as!(self.attend_as(kv_caches, hidden, py, plan, block, adds, positions))
    }

    #[pyo3(signature = (plan, block, hidden, *, adds=true))]
    fn multiply(
        &self,
        py: Python<'_>,
        plan: &CpuAttentionPlan,
        block: usize,
        hidden: &Bound<'_, PyAny>,
        adds: bool,
    ) -> PyResult<(u64, u64, u64)> {
        if is_wide(hidden) {
            self.multiply_as::<f32, f32>(py, plan, block, adds, hidden)
        } else {
            self.multiply_as::<u16, bf16>(py, plan, block, adds, hidden)
        }
    }
}

impl CpuDecoder {
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    fn run(
        &self,
        py: Python<'_>,
        plan: &CpuAttentionPlan,
        hidden: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        kv_caches: &CpuCaches,
        adapters: Option<Vec<AdapterArgument<'_>>>,
        end: &End<'_, '_>,
    ) -> PyResult<(u64, u64, u64)> {
        let adapters = adapters.unwrap_or_default();
        let adapters: Vec<_> = adapters
            .iter()
            .map(|(adapter, tokens)| AdapterTokens { adapter: &adapter.adapter, tokens: tokens.clone() })
            .collect();
        call_as!(self.forward_as(kv_caches, hidden, py, plan, positions, &adapters, end))
    }

    /// As `forward_as`, of the attention of a block.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    fn attend_as<T, E, K, C>(
        &self,
        caches: &CachesOf<K>,
        hidden: &Bound<'_, PyAny>,
        py: Python<'_>,
        plan: &CpuAttentionPlan,
        block: usize,
        adds: bool,
        positions: &Bound<'_, PyAny>,
    ) -> PyResult<(u64, u64, u64)>
    where
        T: buffer::Element + Sync,
        E: Element,
        K: buffer::Element + Sync,
        C: CacheElement<E>,
    {
        let mut hidden = self.stream::<T>(plan, hidden)?;
        let (positions, parts) = positions_of(positions)?;
        let positions = int32_slice(&positions)?;
        let index = caches.index_of(block)?;
        let mut memory = StepArrays { hidden: &mut hidden, out: None, ids: None, caches }.borrow::<E, C>(
            &[positions],
            "hidden, positions and the KV caches overlap, but some are written",
        )?;
        let (batch, threads, layout) = (&plan.batch, &plan.threads, caches.layout);
        py.detach(|| {
            let mut angles = self.angles.lock().unwrap_or_else(PoisonError::into_inner);
            let rotary = angles.of(positions, parts, threads);
            let (hidden, cache) = (memory.hidden, &mut *memory.caches[index]);
            self.decoder.attend(block, adds, batch, hidden, cache, layout, &rotary, threads)
        })
        .map(nanoseconds)
        .map_err(decoder_error)
    }

    /// As `forward_as`, of the MLP of a block.
    fn multiply_as<T: buffer::Element + Sync, E: Element>(
        &self,
        py: Python<'_>,
        plan: &CpuAttentionPlan,
        block: usize,
        adds: bool,
        hidden: &Bound<'_, PyAny>,
    ) -> PyResult<(u64, u64, u64)> {
        let hidden = self.stream::<T>(plan, hidden)?;
        hidden.expect_contiguous()?;
        hidden.expect_writable()?;
        // SAFETY: it is writable and contiguous, and stays where it is while the view lives; as in `StepArrays::borrow` for other
        // threads.
        let hidden = unsafe { hidden.as_mut_slice::<E>() };
        let (num_tokens, threads) = (plan.batch.num_tokens(), &plan.threads);
        py.detach(|| self.decoder.multiply(block, adds, num_tokens, hidden, threads))
            .map(nanoseconds)
            .map_err(decoder_error)
    }

    /// The stream of a step, which is written.
    fn stream<T: buffer::Element + Sync>(
        &self,
        plan: &CpuAttentionPlan,
        hidden: &Bound<'_, PyAny>,
    ) -> PyResult<Rows<T>> {
        let rows = Rows::<T>::new("hidden", hidden)?;
        rows.expect_shape(plan.batch.num_tokens(), self.decoder.hidden_size())?;
        Ok(rows)
    }

    /// `T` is what the buffers say they hold, `E` what that means; `K` and `C` of the caches.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    fn forward_as<T, E, K, C>(
        &self,
        caches: &CachesOf<K>,
        hidden: &Bound<'_, PyAny>,
        py: Python<'_>,
        plan: &CpuAttentionPlan,
        positions: &Bound<'_, PyAny>,
        adapters: &[AdapterTokens<'_>],
        end: &End<'_, '_>,
    ) -> PyResult<(u64, u64, u64)>
    where
        T: buffer::Element + Sync,
        E: Element,
        K: buffer::Element + Sync,
        C: CacheElement<E>,
    {
        let mut hidden = self.stream::<T>(plan, hidden)?;
        let (positions, parts) = positions_of(positions)?;
        let positions = int32_slice(&positions)?;
        let num_tokens = plan.batch.num_tokens();
        let (name, out) = match end {
            End::Stream(out) => ("out", *out),
            End::Logits { logits, .. } => ("logits", *logits),
        };
        let mut out = Rows::<T>::new(name, out)?;
        let (rows, mut ids) = match end {
            End::Stream(_) => (None, None),
            End::Logits { places, ids, .. } => (
                places.map(|places| int32_array("places", places, 1)).transpose()?,
                ids.map(|ids| int32_array("ids", ids, 1)).transpose()?,
            ),
        };
        let rows = rows.as_ref().map(int32_slice).transpose()?;
        match end {
            End::Stream(_) => out.expect_shape(num_tokens, self.decoder.hidden_size())?,
            End::Logits { .. } => {
                let num_rows = rows.map_or(num_tokens, <[i32]>::len);
                out.expect_shape(num_rows, self.decoder.vocab_size().unwrap_or_default())?;
            }
        }
        let read: Vec<_> = [Some(positions), rows].into_iter().flatten().collect();
        let overlap =
            format!("hidden, {name}, the KV caches, ids, positions and places overlap, but some are written");
        let StepMemory { hidden, out, ids, caches: mut own } =
            StepArrays { hidden: &mut hidden, out: Some(&mut out), ids: ids.as_mut(), caches }
                .borrow::<E, C>(&read, &overlap)?;
        let (batch, threads, of_block, layout) =
            (&plan.batch, &plan.threads, &caches.of_block, caches.layout);
        let out = match end {
            End::Stream(_) => DecoderOut::Stream(out),
            End::Logits { .. } => DecoderOut::Logits(Logits { places: rows, logits: out, ids }),
        };
        let times = py
            .detach(|| {
                let mut angles = self.angles.lock().unwrap_or_else(PoisonError::into_inner);
                let rotary = angles.of(positions, parts, threads);
                self.decoder
                    .run_adapted(batch, hidden, &mut own, of_block, layout, &rotary, adapters, threads, out)
            })
            .map_err(decoder_error)?;
        Ok(nanoseconds(times))
    }
}

/// Whether a stream has 32 bits: its caches may have fewer then.
fn is_wide(hidden: &Bound<'_, PyAny>) -> bool {
    PyBuffer::<f32>::get(hidden).is_ok()
}

/// In norms, in products and in attention.
fn nanoseconds(times: DecoderTimes) -> (u64, u64, u64) {
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    (ns(times.norms), ns(times.products), ns(times.attention))
}
