//! What a model computes on the CPU: attention over the paged KV cache, products with packed weights, norms.
//!
//! # Attention
//!
//! A step's ragged batch is checked once ([`RaggedBatch`]); then, per layer, [`write_kv`] puts the new keys and values of
//! all rows into the cache and [`attend`] reads the cache where it lies, decode and prefill alike. Nothing is gathered and
//! nothing of the size of a context squared exists: softmax runs online over chunks of the context.
//!
//! The result for a token depends on its query and its context alone. Chunks begin at multiples of [`CHUNK`] positions,
//! and each sum runs in one order within them, so who else is in the batch, how the work is split over threads and in
//! which pieces a prompt is computed change no bit of it.
//!
//! # Products
//!
//! [`PackedLinear`] holds the weights of a layer in the order in which they are read; [`linear()`] multiplies any number of
//! rows with them and finishes bias, activation and residual. Each sum has one order ([`linear`](mod@linear)), so the bits
//! of a row do not depend on the others. Weights of 8 bits may meet activations that are rounded to 8 bits, too
//! ([`WeightKind::W8A8`]). [`norm()`] norms rows.
//!
//! # Adapters
//!
//! [`LayerDelta`] is what an adapter adds to a layer's outputs, for some rows of a step.
//!
//! # Decoders
//!
//! [`Decoder`] runs all blocks of a model in one call: the functions above, one after the other, and nothing between them.
//!
//! # Kernels
//!
//! Each kernel is written over a vector of lanes ([`simd`]) and compiled for AVX-512, for AVX2 with FMA and for whatever
//! the compiler makes of arrays; [`Kernel::available`] says which of them this machine runs. [`reference`](mod@reference)
//! is what attention is compared with; products and norms are compared with sums in 64 bits. [`Threads`] share the work.

pub mod attention;
pub mod decoder;
pub mod element;
pub mod finish;
pub mod gates;
pub mod kernel;
pub mod linear;
mod lines;
pub mod lora;
pub mod norm;
mod number;
pub mod packed;
pub mod roofline;
pub mod rotary;
pub mod sampling;
mod simd;
pub mod threads;
mod w8a8;

pub use attention::batch::{BatchError, RaggedBatch};
pub use attention::heads::{Heads, prepare_heads};
pub use attention::options::AttentionOptions;
pub use attention::products::CHUNK;
pub use attention::{
    AttentionError, CacheLayout, TokenRows, attend,
    cache_element::CacheElement,
    cached::{Cached, Int8Head},
    reference, write_kv,
};
pub use decoder::{
    AdapterTokens, Decoder, DecoderAdapter, DecoderBlock, DecoderError, DecoderNorm, DecoderOut,
    DecoderTimes, DenseMlp, ExpertMlp, Logits, Mlp, Routing, Scores, SharedMlp,
};
pub use element::Element;
pub use finish::Activation;
pub use gates::apply_gates;
pub use half::{bf16, f16};
pub use kernel::Kernel;
pub use linear::{Epilogue, OutRows, Residual, linear};
pub use lora::{DeltaError, LayerDelta, Up};
pub use norm::row::{Norm, NormKind};
pub use norm::{Sum, add_norm, norm};
pub use packed::{
    Filling, LinearError, Matrix, PackedLinear, Quantized, QuantizedRow, ScaleForm, WeightElement,
    WeightKind, ZeroForm, fill_together,
};
pub use roofline::peak::{PeakKind, peak};
pub use roofline::reading::read_once;
pub use rotary::{Angles, Rotary, RotaryError, Turn};
pub use simd::memory::num_streams;
pub use threads::Threads;
