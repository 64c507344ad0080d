//! The parts of a decoder's blocks as Python gives them, in dictionaries.

use std::{num::NonZeroU32, sync::Arc};

use ::cpu_kernels::{
    DecoderBlock, DecoderNorm, DenseMlp, ExpertMlp, Mlp, NormKind, Routing, Scores, SharedMlp,
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::cpu::{
    arrays::Vector,
    linear::{CpuLinear, activation_of},
};

/// Weight, bias (None: an RMS norm), eps.
pub(super) type NormParts<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, f32);

/// A block, as a dictionary: see `cpu_kernels::DecoderBlock`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(super) struct BlockParts<'py> {
    attention_norm: Option<NormParts<'py>>,
    qkv: PyRef<'py, CpuLinear>,
    is_by_head: bool,
    head_norms: Option<(NormParts<'py>, NormParts<'py>)>,
    rotary: Option<usize>,
    scale: f32,
    sliding_window: Option<NonZeroU32>,
    soft_cap: Option<f32>,
    sinks: Option<Bound<'py, PyAny>>,
    out: PyRef<'py, CpuLinear>,
    mlp_norm: Option<NormParts<'py>>,
    is_parallel: bool,
    dense: Option<MlpParts<'py>>,
    experts: Option<ExpertParts<'py>>,
    post_norms: Option<(NormParts<'py>, NormParts<'py>)>,
}

impl BlockParts<'_> {
    pub(super) fn block(&self) -> PyResult<DecoderBlock> {
        Ok(DecoderBlock {
            attention_norm: self.attention_norm.as_ref().map(norm_of).transpose()?,
            qkv: Arc::clone(&self.qkv.layer),
            is_by_head: self.is_by_head,
            head_norms: both_norms(self.head_norms.as_ref())?,
            rotary: self.rotary,
            scale: self.scale,
            sliding_window: self.sliding_window,
            soft_cap: self.soft_cap,
            sinks: numbers_of("the sinks of a block", self.sinks.as_ref())?,
            out: Arc::clone(&self.out.layer),
            mlp_norm: self.mlp_norm.as_ref().map(norm_of).transpose()?,
            is_parallel: self.is_parallel,
            mlp: match (&self.dense, &self.experts) {
                (Some(mlp), None) => Mlp::Dense(mlp.mlp()?),
                (None, Some(mlp)) => Mlp::Experts(mlp.mlp()?),
                _ => return Err(PyValueError::new_err("a block must have either dense or experts")),
            },
            post_norms: both_norms(self.post_norms.as_ref())?,
        })
    }
}

/// An MLP, or an expert: see `cpu_kernels::DenseMlp`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct MlpParts<'py> {
    up: PyRef<'py, CpuLinear>,
    is_gated: bool,
    activation: String,
    down: PyRef<'py, CpuLinear>,
}

impl MlpParts<'_> {
    fn mlp(&self) -> PyResult<DenseMlp> {
        Ok(DenseMlp {
            up: Arc::clone(&self.up.layer),
            is_gated: self.is_gated,
            activation: activation_of(&self.activation)?,
            down: Arc::clone(&self.down.layer),
        })
    }
}

/// See `cpu_kernels::ExpertMlp`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct ExpertParts<'py> {
    router: PyRef<'py, CpuLinear>,
    routing: RoutingParts<'py>,
    experts: Vec<MlpParts<'py>>,
    shared: Option<SharedParts<'py>>,
}

impl ExpertParts<'_> {
    fn mlp(&self) -> PyResult<ExpertMlp> {
        Ok(ExpertMlp {
            router: Arc::clone(&self.router.layer),
            routing: self.routing.routing()?,
            experts: self.experts.iter().map(MlpParts::mlp).collect::<PyResult<_>>()?,
            shared: self.shared.as_ref().map(SharedParts::shared).transpose()?,
        })
    }
}

/// See `cpu_kernels::Routing`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct RoutingParts<'py> {
    scores: String,
    num_chosen: usize,
    bias: Option<Bound<'py, PyAny>>,
    num_groups: usize,
    num_chosen_groups: usize,
    is_normed: bool,
    scale: f32,
    is_wide: bool,
}

impl RoutingParts<'_> {
    fn routing(&self) -> PyResult<Routing> {
        let scores = match self.scores.as_str() {
            "softmax" => Scores::Softmax,
            "sigmoid" => Scores::Sigmoid,
            other => {
                let message = format!("scores must be softmax or sigmoid, got {other:?}");
                return Err(PyValueError::new_err(message));
            }
        };
        Ok(Routing {
            scores,
            num_chosen: self.num_chosen,
            bias: numbers_of("the bias of a router's choice", self.bias.as_ref())?,
            num_groups: self.num_groups,
            num_chosen_groups: self.num_chosen_groups,
            is_normed: self.is_normed,
            scale: self.scale,
            is_wide: self.is_wide,
        })
    }
}

/// See `cpu_kernels::SharedMlp`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct SharedParts<'py> {
    mlp: MlpParts<'py>,
    gate: Option<PyRef<'py, CpuLinear>>,
}

impl SharedParts<'_> {
    fn shared(&self) -> PyResult<SharedMlp> {
        let gate = self.gate.as_ref().map(|gate| Arc::clone(&gate.layer));
        Ok(SharedMlp { mlp: self.mlp.mlp()?, gate })
    }
}

fn numbers_of(name: &'static str, numbers: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<f32>> {
    numbers.map_or(Ok(Vec::new()), |numbers| Ok(Vector::new(name, numbers)?.as_slice().to_vec()))
}

fn both_norms(norms: Option<&(NormParts<'_>, NormParts<'_>)>) -> PyResult<Option<[DecoderNorm; 2]>> {
    norms.map(|(first, second)| Ok([norm_of(first)?, norm_of(second)?])).transpose()
}

pub(super) fn norm_of((weight, bias, eps): &NormParts<'_>) -> PyResult<DecoderNorm> {
    let weight = Vector::new("the weight of a norm", weight)?.as_slice().to_vec();
    let Some(bias) = bias else {
        return Ok(DecoderNorm { kind: NormKind::Rms, weight, bias: None, eps: *eps });
    };
    let bias = Vector::new("the bias of a norm", bias)?.as_slice().to_vec();
    Ok(DecoderNorm { kind: NormKind::Layer, weight, bias: Some(bias), eps: *eps })
}
