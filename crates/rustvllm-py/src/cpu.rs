//! The kernels of the CPU for Python: arrays in, checked, and computed on in place.

pub(crate) mod arrays;
pub(crate) mod attention;
mod block_parts;
mod block_rows;
pub(crate) mod caches;
pub(crate) mod decoder;
mod file_rows;
pub(crate) mod filling;
pub(crate) mod linear;
pub(crate) mod lora;
pub(crate) mod norms;
mod positions;
pub(crate) mod sampling;
mod step_memory;
pub(crate) mod threads;
mod weight_kind;
mod word_rows;
