//! A block of a decoder that has nothing but its norms and layers.

use std::sync::Arc;

use cpu_kernels::{DecoderBlock, DecoderNorm, Mlp, PackedLinear};

pub(crate) fn plain_block(
    [attention_norm, mlp_norm]: [DecoderNorm; 2],
    [qkv, out]: [Arc<PackedLinear>; 2],
    mlp: Mlp,
) -> DecoderBlock {
    DecoderBlock {
        attention_norm: Some(attention_norm),
        qkv,
        is_by_head: false,
        head_norms: None,
        rotary: None,
        scale: 0.25,
        sliding_window: None,
        soft_cap: None,
        sinks: Vec::new(),
        out,
        mlp_norm: Some(mlp_norm),
        is_parallel: false,
        mlp,
        post_norms: None,
    }
}
