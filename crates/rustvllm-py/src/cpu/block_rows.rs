//! Rows of a GGUF file's blocks, or of 16 bits, on their way into the form of a layer.

use ::cpu_kernels::{
    Filling, LinearError, PackedLinear, Quantized, QuantizedRow, ScaleForm, WeightKind, ZeroForm,
};
use ::gguf::{BlockError, TensorType};
use pyo3::PyResult;

use crate::{errors::linear_error, gguf::block_error};

/// Bytes of a row of blocks.
pub(crate) fn row_bytes(layer: &PackedLinear, tensor_type: TensorType) -> usize {
    layer.in_features() / tensor_type.block() * tensor_type.block_bytes()
}

/// Whether a layer takes blocks of a type: what is wrong with one row's lengths is wrong with every row's.
pub(crate) fn check_blocks(layer: &PackedLinear, tensor_type: TensorType) -> PyResult<()> {
    let kind = layer.kind();
    if is_as_stored(kind, tensor_type) {
        return Ok(());
    }
    let group_size = kind.group_size().ok_or_else(|| linear_error(LinearError::NotWhole { kind }))?;
    let (inputs, bytes) = (layer.in_features(), vec![0; row_bytes(layer, tensor_type)]);
    let groups = inputs.div_ceil(group_size);
    let tried = if let WeightKind::Quantized(form) = kind {
        let slots = if form.scales == ScaleForm::TwoLevel { groups / form.level_groups() } else { groups };
        let mut row = QuantizedRow {
            numbers: vec![0; inputs],
            scales: vec![0.0; slots],
            offsets: vec![
                0.0;
                if matches!(form.zeros, ZeroForm::Middle | ZeroForm::Codes) { 0 } else { slots }
            ],
            factors: vec![[0; 2]; groups],
        };
        unpack_quantized(tensor_type, form, &bytes, &mut row)
    } else {
        tensor_type.whole_numbers(&bytes, group_size, &mut vec![0; inputs], &mut vec![0.0; groups])
    };
    tried.map_err(block_error)
}

/// Rows whose bytes `row_of` gives to what it is called with, in a type that [`check_blocks`] has let pass.
pub(crate) fn blocks_filling<'a>(
    layer: &'a mut PackedLinear,
    first_row: usize,
    num_rows: usize,
    tensor_type: TensorType,
    row_of: impl Fn(usize, &mut dyn FnMut(&[u8])) + Send + Sync + 'a,
) -> Result<Filling<'a>, LinearError> {
    match layer.kind() {
        WeightKind::Quantized(form) => layer.quantized_filling(first_row, num_rows, move |row, to| {
            row_of(row, &mut |bytes| {
                let done = unpack_quantized(tensor_type, form, bytes, to);
                debug_assert!(done.is_ok(), "the lengths were tried before");
            });
        }),
        WeightKind::Int8 { group_size } | WeightKind::W8A8 { group_size } => {
            layer.whole_filling(first_row, num_rows, move |row, numbers, scales| {
                row_of(row, &mut |bytes| {
                    let done = tensor_type.whole_numbers(bytes, group_size, numbers, scales);
                    debug_assert!(done.is_ok(), "the lengths were tried before");
                });
            })
        }
        WeightKind::F32 | WeightKind::F16 | WeightKind::Bf16 => {
            layer.narrow_filling(first_row, num_rows, move |row, to| {
                row_of(row, &mut |bytes| to.copy_from_slice(bytes));
            })
        }
    }
}

/// Whether weights are kept in the 16 bits that a type has.
fn is_as_stored(kind: WeightKind, tensor_type: TensorType) -> bool {
    matches!((kind, tensor_type.name()), (WeightKind::F16, "F16") | (WeightKind::Bf16, "BF16"))
}

/// A row of blocks in the form of a layer.
fn unpack_quantized(
    tensor_type: TensorType,
    form: Quantized,
    bytes: &[u8],
    to: &mut QuantizedRow,
) -> Result<(), BlockError> {
    let QuantizedRow { numbers, scales, offsets, factors } = to;
    match (form.scales, form.zeros) {
        (ScaleForm::TwoLevel, _) => tensor_type.two_levels(bytes, numbers, scales, offsets, factors),
        (_, ZeroForm::Middle | ZeroForm::Codes) => {
            tensor_type.whole_numbers(bytes, form.group_size, numbers, scales)
        }
        (_, ZeroForm::Point | ZeroForm::Minimum) => {
            tensor_type.with_minima(bytes, form.group_size, numbers, scales, offsets)
        }
    }
}
