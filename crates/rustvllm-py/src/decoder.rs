//! All blocks of a decoder on the CPU for Python, in one call: see `cpu_kernels::decoder`.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use ::cpu_kernels::{
    AdapterTokens, Decoder, DecoderAdapter, DecoderBlock, DecoderError, DecoderNorm, DecoderTimes, Element,
    Heads, NormKind, Rotary, bf16,
};
use pyo3::{
    buffer::{self, PyBuffer},
    exceptions::{PyMemoryError, PyValueError},
    prelude::*,
};

use crate::{
    arrays::{Rows, Vector},
    attention::{Array, CpuAttentionPlan},
    errors::linear_error,
    linear::{CpuLinear, activation_of},
    lora::CpuLayerDelta,
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

/// Weight, bias (None: an RMS norm), eps.
type NormParts<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, f32);

/// A block, as a dictionary: see `cpu_kernels::DecoderBlock`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct BlockParts<'py> {
    attention_norm: NormParts<'py>,
    qkv: PyRef<'py, CpuLinear>,
    is_by_head: bool,
    head_norms: Option<(NormParts<'py>, NormParts<'py>)>,
    rotary: Option<usize>,
    scale: f32,
    sliding_window: Option<NonZeroU32>,
    soft_cap: Option<f32>,
    out: PyRef<'py, CpuLinear>,
    mlp_norm: NormParts<'py>,
    is_parallel: bool,
    up: PyRef<'py, CpuLinear>,
    is_gated: bool,
    activation: String,
    down: PyRef<'py, CpuLinear>,
    post_norms: Option<(NormParts<'py>, NormParts<'py>)>,
}

impl BlockParts<'_> {
    fn block(&self) -> PyResult<DecoderBlock> {
        Ok(DecoderBlock {
            attention_norm: norm_of(&self.attention_norm)?,
            qkv: Arc::clone(&self.qkv.layer),
            is_by_head: self.is_by_head,
            head_norms: both_norms(self.head_norms.as_ref())?,
            rotary: self.rotary,
            scale: self.scale,
            sliding_window: self.sliding_window,
            soft_cap: self.soft_cap,
            out: Arc::clone(&self.out.layer),
            mlp_norm: norm_of(&self.mlp_norm)?,
            is_parallel: self.is_parallel,
            up: Arc::clone(&self.up.layer),
            is_gated: self.is_gated,
            activation: activation_of(&self.activation)?,
            down: Arc::clone(&self.down.layer),
            post_norms: both_norms(self.post_norms.as_ref())?,
        })
    }
}

fn both_norms(norms: Option<&(NormParts<'_>, NormParts<'_>)>) -> PyResult<Option<[DecoderNorm; 2]>> {
    norms.map(|(first, second)| Ok([norm_of(first)?, norm_of(second)?])).transpose()
}

fn norm_of((weight, bias, eps): &NormParts<'_>) -> PyResult<DecoderNorm> {
    let weight = Vector::new("the weight of a norm", weight)?.as_slice().to_vec();
    let Some(bias) = bias else {
        return Ok(DecoderNorm { kind: NormKind::Rms, weight, bias: None, eps: *eps });
    };
    let bias = Vector::new("the bias of a norm", bias)?.as_slice().to_vec();
    Ok(DecoderNorm { kind: NormKind::Layer, weight, bias: Some(bias), eps: *eps })
}

type CosSin<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

fn rotary_rows(rotary: &[CosSin<'_>]) -> PyResult<Vec<[Rows<f32>; 2]>> {
    rotary.iter().map(|(cos, sin)| Ok([Rows::new("cos", cos)?, Rows::new("sin", sin)?])).collect()
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
}

#[pymethods]
impl CpuDecoder {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "what Python's arguments are taken as")]
    fn new(
        blocks: Vec<BlockParts<'_>>,
        last_norm: Option<NormParts<'_>>,
        num_heads: usize,
        num_kv_heads: usize,
        head_dim: usize,
    ) -> PyResult<Self> {
        let blocks = blocks.iter().map(BlockParts::block).collect::<PyResult<_>>()?;
        let heads = Heads { num_heads, num_kv_heads, head_dim };
        let last_norm = last_norm.as_ref().map(norm_of).transpose()?;
        let decoder = Decoder::new(blocks, last_norm, heads).map_err(decoder_error)?;
        Ok(Self { decoder })
    }

    #[pyo3(signature = (plan, hidden, kv_caches, out, rotary=Vec::new(), adapters=None))]
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    fn forward(
        &self,
        py: Python<'_>,
        plan: &CpuAttentionPlan,
        hidden: &Bound<'_, PyAny>,
        kv_caches: Vec<Bound<'_, PyAny>>,
        out: &Bound<'_, PyAny>,
        rotary: Vec<CosSin<'_>>,
        adapters: Option<Vec<AdapterArgument<'_>>>,
    ) -> PyResult<(u64, u64, u64)> {
        let rotary = rotary_rows(&rotary)?;
        let adapters = adapters.unwrap_or_default();
        let adapters: Vec<_> = adapters
            .iter()
            .map(|(adapter, tokens)| AdapterTokens { adapter: &adapter.adapter, tokens: tokens.clone() })
            .collect();
        if PyBuffer::<f32>::get(hidden).is_ok() {
            self.forward_as::<f32, f32>(py, plan, hidden, &kv_caches, out, &rotary, &adapters)
        } else {
            self.forward_as::<u16, bf16>(py, plan, hidden, &kv_caches, out, &rotary, &adapters)
        }
    }

    #[pyo3(signature = (plan, block, hidden, kv_cache, rotary=Vec::new(), *, adds=true))]
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    fn attend(
        &self,
        py: Python<'_>,
        plan: &CpuAttentionPlan,
        block: usize,
        hidden: &Bound<'_, PyAny>,
        kv_cache: &Bound<'_, PyAny>,
        rotary: Vec<CosSin<'_>>,
        adds: bool,
    ) -> PyResult<(u64, u64, u64)> {
        let rotary = rotary_rows(&rotary)?;
        if PyBuffer::<f32>::get(hidden).is_ok() {
            self.attend_as::<f32, f32>(py, plan, block, adds, hidden, kv_cache, &rotary)
        } else {
            self.attend_as::<u16, bf16>(py, plan, block, adds, hidden, kv_cache, &rotary)
        }
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
        if PyBuffer::<f32>::get(hidden).is_ok() {
            self.multiply_as::<f32, f32>(py, plan, block, adds, hidden)
        } else {
            self.multiply_as::<u16, bf16>(py, plan, block, adds, hidden)
        }
    }
}

impl CpuDecoder {
    /// As `forward_as`, of the attention of a block.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    fn attend_as<T: buffer::Element + Sync, E: Element>(
        &self,
        py: Python<'_>,
        plan: &CpuAttentionPlan,
        block: usize,
        adds: bool,
        hidden: &Bound<'_, PyAny>,
        kv_cache: &Bound<'_, PyAny>,
        rotary: &[[Rows<f32>; 2]],
    ) -> PyResult<(u64, u64, u64)> {
        let hidden = self.stream::<T>(plan, hidden)?;
        let cache = Array::<T>::new("a KV cache", kv_cache, 5)?;
        let layout = cache.layout()?;
        cache.expect_contiguous()?;
        cache.expect_writable()?;
        for rows in rotary.iter().flatten() {
            rows.expect_contiguous()?;
        }
        let mut places = vec![hidden.place(), cache.place()?];
        places.extend(rotary.iter().flatten().map(Rows::place));
        expect_apart(
            places,
            "hidden, the KV cache, cosines and sines overlap, but the first two are written",
        )?;
        let rotary: Vec<_> = rotary.iter().map(rotary_of).collect();
        // SAFETY: both are writable and contiguous, share no byte with each other, and stay where they are while the views
        // live. That no other thread of Python touches them meanwhile is the caller's part, as with every call of numpy.
        let (hidden, cache) = unsafe { (hidden.as_mut_slice::<E>(), cache.as_mut_slice::<E>()) };
        let (batch, threads) = (&plan.batch, &plan.threads);
        py.detach(|| self.decoder.attend(block, adds, batch, hidden, cache, layout, &rotary, threads))
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
        // SAFETY: it is writable and contiguous, and stays where it is while the view lives; as above for other threads.
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
        rows.expect_contiguous()?;
        rows.expect_writable()?;
        Ok(rows)
    }

    /// `T` is what the buffers say they hold, `E` what that means.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a step")]
    fn forward_as<T: buffer::Element + Sync, E: Element>(
        &self,
        py: Python<'_>,
        plan: &CpuAttentionPlan,
        hidden: &Bound<'_, PyAny>,
        kv_caches: &[Bound<'_, PyAny>],
        out: &Bound<'_, PyAny>,
        rotary: &[[Rows<f32>; 2]],
        adapters: &[AdapterTokens<'_>],
    ) -> PyResult<(u64, u64, u64)> {
        let hidden = Rows::<T>::new("hidden", hidden)?;
        let out = Rows::<T>::new("out", out)?;
        let caches = kv_caches
            .iter()
            .map(|cache| Array::<T>::new("a KV cache", cache, 5))
            .collect::<PyResult<Vec<_>>>()?;
        let Some(first) = caches.first() else {
            return Err(PyValueError::new_err("kv_caches is empty, but each block has a cache"));
        };
        let layout = first.layout()?;
        let num_tokens = plan.batch.num_tokens();
        for rows in [&hidden, &out] {
            rows.expect_shape(num_tokens, self.decoder.hidden_size())?;
            rows.expect_contiguous()?;
            rows.expect_writable()?;
        }
        for rows in rotary.iter().flatten() {
            rows.expect_contiguous()?;
        }
        let mut places = vec![hidden.place(), out.place()];
        // A trial run may have one cache for all blocks, which take turns.
        let mut cache_of_block = Vec::with_capacity(caches.len());
        let mut own: Vec<&Array<T>> = Vec::with_capacity(caches.len());
        for cache in &caches {
            if cache.layout()? != layout {
                return Err(PyValueError::new_err("the KV caches of the blocks differ in their shapes"));
            }
            cache.expect_contiguous()?;
            cache.expect_writable()?;
            let place = cache.place()?;
            let known = places[2..].iter().position(|known| *known == place);
            cache_of_block.push(known.unwrap_or(own.len()));
            if known.is_none() {
                own.push(cache);
                places.push(place);
            }
        }
        places.extend(rotary.iter().flatten().map(Rows::place));
        expect_apart(
            places,
            "hidden, out, the KV caches, cosines and sines overlap, but the first three are written",
        )?;
        let rotary: Vec<_> = rotary.iter().map(rotary_of).collect();
        // SAFETY: all are writable and contiguous, share no byte with each other, and stay where they are while the views live.
        // That no other thread of Python touches them meanwhile is the caller's part, as with every call of numpy and torch.
        let (hidden, out) = unsafe { (hidden.as_mut_slice::<E>(), out.as_mut_slice::<E>()) };
        // SAFETY: the caches are writable and contiguous and overlap nothing, as was checked for all arrays of the call
        // above.
        let mut caches: Vec<&mut [E]> =
            own.iter().map(|cache| unsafe { cache.as_mut_slice::<E>() }).collect();
        let (batch, threads) = (&plan.batch, &plan.threads);
        let times = py
            .detach(|| {
                self.decoder.run_adapted(
                    batch,
                    hidden,
                    &mut caches,
                    &cache_of_block,
                    layout,
                    &rotary,
                    adapters,
                    threads,
                    out,
                )
            })
            .map_err(decoder_error)?;
        Ok(nanoseconds(times))
    }
}

/// Refuses arrays that share memory.
fn expect_apart(mut places: Vec<(usize, usize)>, message: &'static str) -> PyResult<()> {
    places.retain(|(start, end)| start < end);
    places.sort_unstable();
    if places.windows(2).any(|pair| pair[0].1 > pair[1].0) {
        return Err(PyValueError::new_err(message));
    }
    Ok(())
}

fn rotary_of([cos, sin]: &[Rows<f32>; 2]) -> Rotary<'_> {
    Rotary { cos: cos.token_rows().data, sin: sin.token_rows().data, width: cos.width() }
}

/// In norms, in products and in attention.
fn nanoseconds(times: DecoderTimes) -> (u64, u64, u64) {
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    (ns(times.norms), ns(times.products), ns(times.attention))
}
