//! The KV caches of all blocks of a decoder as Python gives them, checked once for all steps.

use ::cpu_kernels::{CacheLayout, Cached, Int8Head, bf16};
use pyo3::{
    buffer::{self, PyBuffer},
    exceptions::PyValueError,
    prelude::*,
};

use crate::cpu::{
    arrays::{Place, expect_all_apart},
    attention::Array,
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CpuCaches>()
}

/// See the module.
#[pyclass(frozen, module = "rustvllm._core")]
pub(super) struct CpuCaches {
    pub(super) caches: Caches,
}

pub(super) enum Caches {
    Wide(CachesOf<f32>),
    Narrow(CachesOf<u16>),
    /// Heads of whole numbers, each with its scale.
    Bytes(CachesOf<i8>),
}

pub(super) struct CachesOf<T: buffer::Element> {
    /// Each once; writable, contiguous, and apart from each other.
    pub(super) own: Vec<Array<T>>,
    /// Which of them a block has. A trial run may have one for all blocks, which take turns.
    pub(super) of_block: Vec<usize>,
    pub(super) layout: CacheLayout,
    pub(super) places: Vec<Place>,
}

#[pymethods]
impl CpuCaches {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "what Python's arguments are taken as")]
    fn new(kv_caches: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        let Some(first) = kv_caches.first() else {
            return Err(PyValueError::new_err("kv_caches is empty, but each block has a cache"));
        };
        let caches = if PyBuffer::<u16>::get(first).is_ok() {
            Caches::Narrow(CachesOf::new::<bf16>(&kv_caches)?)
        } else if PyBuffer::<i8>::get(first).is_ok() {
            Caches::Bytes(CachesOf::new::<Int8Head>(&kv_caches)?)
        } else {
            Caches::Wide(CachesOf::new::<f32>(&kv_caches)?)
        };
        Ok(Self { caches })
    }
}

impl<T: buffer::Element> CachesOf<T> {
    /// Of elements that mean `C`.
    fn new<C: Cached>(kv_caches: &[Bound<'_, PyAny>]) -> PyResult<Self> {
        let (mut own, mut of_block, mut places) = (Vec::<Array<T>>::new(), Vec::new(), Vec::new());
        for cache in kv_caches {
            let cache = Array::<T>::new("a KV cache", cache, 5)?;
            if cache.layout::<C>()? != own.first().unwrap_or(&cache).layout::<C>()? {
                return Err(PyValueError::new_err("the KV caches of the blocks differ in their shapes"));
            }
            cache.expect_contiguous()?;
            cache.expect_writable()?;
            let place = cache.place()?;
            let known = places.iter().position(|known| *known == place);
            of_block.push(known.unwrap_or(own.len()));
            if known.is_none() {
                own.push(cache);
                places.push(place);
            }
        }
        expect_all_apart(places.clone(), "the KV caches of the blocks overlap, but they are written")?;
        let layout = own[0].layout::<C>()?;
        Ok(Self { own, of_block, layout, places })
    }

    /// Which of `own` a block has.
    pub(super) fn index_of(&self, block: usize) -> PyResult<usize> {
        self.of_block.get(block).copied().ok_or_else(|| {
            let num_blocks = self.of_block.len();
            PyValueError::new_err(format!(
                "block {block} has no cache: there are those of {num_blocks} blocks"
            ))
        })
    }
}
