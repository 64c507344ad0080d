//! How packed weights are called in Python, and what those names stand for.

use ::cpu_kernels::{LinearError, Quantized, ScaleForm, WeightKind, ZeroForm};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::errors::linear_error;

/// What Python calls a kind.
pub(crate) fn kind_name(kind: WeightKind) -> &'static str {
    match kind {
        WeightKind::F32 => "f32",
        WeightKind::Bf16 => "bf16",
        WeightKind::F16 => "f16",
        WeightKind::Int8 { .. } => "int8",
        WeightKind::W8A8 { .. } => "w8a8",
        WeightKind::Quantized(form) => match (form.bits, form.rounds_activations) {
            (4, true) => "w4a8",
            (4, false) => "int4",
            (6, true) => "w6a8",
            (6, false) => "int6",
            (_, true) => "w8a8",
            (_, false) => "int8",
        },
    }
}

/// What Python's names stand for.
pub(crate) fn weight_kind(
    kind: &str,
    in_features: usize,
    group_size: Option<usize>,
    scales: Option<&str>,
    zeros: &str,
) -> PyResult<WeightKind> {
    let refused = |message: String| Err(PyValueError::new_err(message));
    let (bits, rounds_activations) = match kind {
        "f32" | "bf16" | "f16" => {
            if let Some(group_size) = group_size {
                return Err(linear_error(LinearError::Group { group_size }));
            }
            return Ok(match kind {
                "f32" => WeightKind::F32,
                "bf16" => WeightKind::Bf16,
                _ => WeightKind::F16,
            });
        }
        "int8" => (8, false),
        "w8a8" => (8, true),
        "int4" => (4, false),
        "w4a8" => (4, true),
        "int6" => (6, false),
        "w6a8" => (6, true),
        _ => {
            return refused(format!(
                "kind is {kind:?}, but it must be f32, bf16, f16, int8, w8a8, int6, w6a8, int4 or w4a8"
            ));
        }
    };
    let group_size = group_size.unwrap_or(in_features);
    let scales = match scales.unwrap_or(if bits == 4 { "f16" } else { "f32" }) {
        "f32" => ScaleForm::F32,
        "f16" => ScaleForm::F16,
        "bf16" => ScaleForm::Bf16,
        "two-level" => ScaleForm::TwoLevel,
        name => {
            return refused(format!("scales is {name:?}, but it must be f32, f16, bf16 or two-level"));
        }
    };
    let zeros = match zeros {
        "middle" => ZeroForm::Middle,
        "point" => ZeroForm::Point,
        "minimum" => ZeroForm::Minimum,
        "codes" => ZeroForm::Codes,
        _ => return refused(format!("zeros is {zeros:?}, but it must be middle, point, minimum or codes")),
    };
    Ok(match (bits, scales, zeros, rounds_activations) {
        (8, ScaleForm::F32, ZeroForm::Middle, false) => WeightKind::Int8 { group_size },
        (8, ScaleForm::F32, ZeroForm::Middle, true) => WeightKind::W8A8 { group_size },
        _ => WeightKind::Quantized(Quantized { bits, group_size, scales, zeros, rounds_activations }),
    })
}
