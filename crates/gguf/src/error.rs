//! What is wrong with a file.

use std::path::PathBuf;

use thiserror::Error;

/// What is wrong with a GGUF file.
#[derive(Debug, Error)]
pub enum GgufError {
    /// The system refuses to read.
    #[error("cannot be read: {0}")]
    Read(#[from] std::io::Error),
    /// Another kind of file.
    #[error("is not a GGUF file: it begins with {0:02x?} and not with the bytes of GGUF")]
    Magic([u8; 4]),
    /// Numbers with the most significant byte first.
    #[error(
        "is big endian (its version reads as {0:#010x}); only little endian files are read: convert it again"
    )]
    BigEndian(u32),
    /// A layout that is not read.
    #[error("has GGUF version {0}; versions 2 and 3 are read: convert it again with a newer converter")]
    Version(u32),
    /// More than there is, or more than is read.
    #[error("{what} announces {count}, but the limit is {most}")]
    Count {
        /// Whose count.
        what: String,
        /// As the file says.
        count: u64,
        /// The limit.
        most: u64,
    },
    /// Something that is longer than the rest of the header.
    #[error("{what} takes {length} bytes, but {left} are left")]
    Length {
        /// What.
        what: String,
        /// As the file says.
        length: u64,
        /// What the file, or the longest header that is read, still has.
        left: u64,
    },
    /// A string of other bytes than text.
    #[error("{0} is not valid UTF-8")]
    Text(String),
    /// A type of value that the format does not have, or an array of arrays.
    #[error("the value of {key:?} has type {id}, which is not read")]
    ValueType {
        /// Whose value.
        key: String,
        /// As the file says.
        id: u32,
    },
    /// A boolean that is neither 0 nor 1.
    #[error("the value of {key:?} is the boolean {byte}; it must be 0 or 1")]
    Boolean {
        /// Whose value.
        key: String,
        /// As the file says.
        byte: u8,
    },
    /// One name for two things.
    #[error("the {kind} {name:?} is there twice")]
    Duplicate {
        /// A key or a tensor.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// An alignment that is none.
    #[error("general.alignment is {0}; it must be a power of two up to 65536")]
    Alignment(String),
    /// A tensor without dimensions, with too many, or with one that is 0 or too large.
    #[error("the tensor {tensor:?} has the shape {shape:?}; it must have 1 to 4 dimensions of 1 to 2^40")]
    Shape {
        /// Its name.
        tensor: String,
        /// As the file says, the fastest dimension first.
        shape: Vec<u64>,
    },
    /// Rows that are not whole blocks.
    #[error("the tensor {tensor:?} has rows of {row}, but blocks of {type_name} hold {block}")]
    Blocks {
        /// Its name.
        tensor: String,
        /// Numbers of a row.
        row: u64,
        /// Its type.
        type_name: &'static str,
        /// Numbers of a block.
        block: u64,
    },
    /// A tensor type that is not known, so that its size is not either.
    #[error("the tensor {tensor:?} has type {id}, which is not known")]
    TensorType {
        /// Its name.
        tensor: String,
        /// As the file says.
        id: u32,
    },
    /// An offset that the alignment forbids.
    #[error(
        "the tensor {tensor:?} lies at offset {offset}, which is not a multiple of the alignment {alignment}"
    )]
    Offset {
        /// Its name.
        tensor: String,
        /// As the file says.
        offset: u64,
        /// As the file says.
        alignment: u64,
    },
    /// A tensor that the file ends before.
    #[error(
        "the tensor {tensor:?} ends at byte {end}, but the file has {size}: it is truncated or damaged, fetch it again"
    )]
    Outside {
        /// Its name.
        tensor: String,
        /// The byte after its last.
        end: u64,
        /// Of the file.
        size: u64,
    },
    /// Two tensors in one place.
    #[error("the tensors {first:?} and {second:?} overlap")]
    Overlap {
        /// The one that begins first.
        first: String,
        /// The other.
        second: String,
    },
    /// One of several files, and not the first.
    #[error("is part {part} of a model in {count} files; give the first of them, {first}")]
    NotTheFirst {
        /// Counted from 1.
        part: u64,
        /// How many there are.
        count: u64,
        /// Name of the first file.
        first: String,
    },
    /// A name that does not say where the other files are.
    #[error(
        "is one of {count} files, but its name does not end in -00001-of-{count:05}.gguf, as the first's does"
    )]
    PartName {
        /// How many there are.
        count: u64,
    },
    /// A file that is not there.
    #[error("is in {count} files, and {} is missing: fetch it again", path.display())]
    PartMissing {
        /// Which.
        path: PathBuf,
        /// How many there are.
        count: u64,
    },
    /// A file of another model, or of another cut.
    #[error("{}: says that it is part {part} of {count}, but part {expected_part} of {expected_count} is looked for", path.display())]
    PartMixed {
        /// Which.
        path: PathBuf,
        /// As it says, counted from 1.
        part: u64,
        /// As it says.
        count: u64,
        /// As its name says.
        expected_part: u64,
        /// As the first file says.
        expected_count: u64,
    },
    /// Tensors that are missing.
    #[error("split.tensors.count announces {expected} tensors, but all files together have {found}")]
    PartTensors {
        /// As the first file says.
        expected: u64,
        /// How many there are.
        found: u64,
    },
    /// What is wrong with one of several files.
    #[error("{}: {source}", path.display())]
    Part {
        /// Which.
        path: PathBuf,
        /// What.
        source: Box<GgufError>,
    },
}
