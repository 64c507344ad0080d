//! A GGUF file: what it says of a model, where its tensors lie, and the numbers in its blocks.
//!
//! [`GgufFile::open`] reads the headers of a file, or of all files that a model was split into, and checks every count,
//! length, offset and type before it takes memory for what they announce: a hostile file is refused in little time and
//! little memory. Weights are not read here: [`Tensor`] says where they lie, and [`TensorType`] turns blocks that
//! were read into numbers ([`TensorType::unpack`]) or into whole numbers with scales ([`TensorType::whole_numbers`]).
//!
//! Files are read and not mapped. A mapped file that becomes shorter ends the process that looks at it; one that is read
//! gives an error.

#![forbid(unsafe_code)]

mod blocks;
mod error;
mod file;
mod header;
mod source;
mod tensor_type;
mod value;

pub use error::GgufError;
pub use file::{GgufFile, Tensor};
pub use header::{Header, MAX_HEADER_BYTES, MAX_TENSORS, TensorInfo, parse};
pub use tensor_type::{BlockError, TensorType};
pub use value::{Array, MAX_ELEMENTS, Value};
