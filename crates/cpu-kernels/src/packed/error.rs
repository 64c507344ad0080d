//! What packing and products refuse.

use thiserror::Error;

use super::WeightKind;

/// What is wrong with a layer, its weights or the arrays of a product.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum LinearError {
    /// Rows of an adapter that are not named in order.
    #[error("the rows of an adapter must ascend, but {row} follows {before}")]
    Unsorted {
        /// The first that does not.
        row: u32,
        /// The one before it.
        before: u32,
    },
    /// A size that is 0 or too large.
    #[error("{name} is {value}, but it must lie between 1 and {most}")]
    Size {
        /// What.
        name: &'static str,
        /// How large.
        value: usize,
        /// The limit.
        most: usize,
    },
    /// A group size for weights that have no scales.
    #[error("group_size is {group_size}, but only int8 weights have groups")]
    Group {
        /// As given.
        group_size: usize,
    },
    /// No memory for the weights.
    #[error(
        "{num_bytes} bytes for {out_features} x {in_features} weights cannot be had; fewer bits per weight take fewer"
    )]
    Memory {
        /// What they need.
        num_bytes: usize,
        /// Outputs.
        out_features: usize,
        /// Inputs.
        in_features: usize,
    },
    /// Bytes of numbers of 16 bits for weights of another kind.
    #[error("weights are packed as {kind:?}, which are not numbers of 16 bits")]
    NotNarrow {
        /// Of the weights.
        kind: WeightKind,
    },
    /// An array with too few or too many elements.
    #[error("{name} has {found} elements, but {expected} are needed")]
    Length {
        /// The array.
        name: &'static str,
        /// Its elements.
        found: usize,
        /// What it should have.
        expected: usize,
    },
    /// Rows that lie closer together than they are long.
    #[error("rows of {name} lie {stride} elements apart, but each has {row}")]
    Stride {
        /// The array.
        name: &'static str,
        /// Elements from one row to the next.
        stride: usize,
        /// Elements of a row.
        row: usize,
    },
    /// Rows of weights that the layer does not have.
    #[error("rows {first} to {end} (excluded) of the weight are given, but it has {out_features}")]
    Rows {
        /// The first.
        first: usize,
        /// The one after the last.
        end: usize,
        /// What there is.
        out_features: usize,
    },
    /// A product before all rows are packed.
    #[error("{missing} of the weight's {out_features} rows have not been packed")]
    NotPacked {
        /// How many.
        missing: usize,
        /// What there is.
        out_features: usize,
    },
    /// A group that is not made of whole blocks of rounded activations.
    #[error(
        "group_size is {group_size}, but where activations are rounded to 8 bits, and for weights of 4 bits, it must be a \
         multiple of 32, or all {in_features} inputs; of 8 bits also 16"
    )]
    RoundedGroup {
        /// As given.
        group_size: usize,
        /// Inputs.
        in_features: usize,
    },
    /// Rounded activations, whose products choose the matrix unit themselves, since it changes no bit.
    #[error(
        "the weights are packed for activations of 8 bits, whose products choose the matrix unit themselves"
    )]
    RoundedOnMatrixUnit,
    /// No matrix unit.
    #[error("this machine has no matrix unit that the kernel {kernel} can use")]
    NoMatrixUnit {
        /// What the weights are packed for.
        kernel: &'static str,
    },
    /// A form that no product takes.
    #[error(
        "weights of {} bits in groups of {} with scales {:?} and zeros {:?} are asked for, but weights have 4 or 8 bits, zero \
         points and codes only those of 4, and scales of two levels go with minima, groups of 32 and a multiple of 256 inputs, of \
         which there are {in_features}",
        form.bits, form.group_size, form.scales, form.zeros
    )]
    Form {
        /// As given.
        form: super::Quantized,
        /// Inputs.
        in_features: usize,
    },
    /// A number, scale or offset that the form cannot hold.
    #[error(
        "row {row} of the weight has a number, scale or zero that {} bits with scales {:?} cannot hold",
        form.bits,
        form.scales
    )]
    NotHeld {
        /// Which.
        row: usize,
        /// How weights are kept.
        form: super::Quantized,
    },
    /// Whole numbers for weights that are kept otherwise.
    #[error("whole numbers with scales are given, but the weights are kept as {kind:?} and not as int8")]
    NotWhole {
        /// How.
        kind: WeightKind,
    },
    /// An order of inputs that is none.
    #[error(
        "the order of the inputs names input {input} at place {place}, but each of {in_features} must occur once"
    )]
    Order {
        /// Where.
        place: usize,
        /// Which.
        input: u32,
        /// How many there are.
        in_features: usize,
    },
    /// Plain rows for inputs that have another order.
    #[error(
        "the inputs of this layer have an order of their own, in which only whole numbers with scales are packed"
    )]
    Ordered,
    /// A weight that cannot be rounded, or a scale that is none.
    #[error(
        "row {row} of the weight has an element that is not finite, which whole numbers with scales cannot hold"
    )]
    NotFinite {
        /// Which.
        row: usize,
    },
}

/// Whether an array has room for rows.
pub(crate) fn check_rows(
    name: &'static str,
    found: usize,
    stride: usize,
    num_rows: usize,
    row: usize,
) -> Result<(), LinearError> {
    if num_rows > 1 && stride < row {
        return Err(LinearError::Stride { name, stride, row });
    }
    let expected = num_rows.checked_sub(1).map_or(Some(0), |last| last.checked_mul(stride)?.checked_add(row));
    let expected = expected.unwrap_or(usize::MAX);
    if found < expected {
        return Err(LinearError::Length { name, found, expected });
    }
    Ok(())
}
