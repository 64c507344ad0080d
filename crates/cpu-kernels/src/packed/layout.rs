//! Sizes of a layer's panels, worked out once: a division takes as long as twenty multiplications, and a product of one row
//! asks for a dozen of them with every panel.

use super::WeightKind;

/// What lies in a panel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) num_panels: usize,
    /// Inputs that a panel has room for: whole blocks.
    pub(crate) padded_inputs: usize,
    /// Blocks of inputs ([`WeightKind::block`]).
    pub(crate) num_blocks: usize,
    /// Bytes of a panel's weights.
    pub(crate) panel_bytes: usize,
    /// Groups of inputs that share a scale; 0 where weights have none.
    pub(crate) num_groups: usize,
    /// Blocks of a group.
    pub(crate) blocks_per_group: usize,
    /// Bytes of a panel's scales, with what groups have besides.
    pub(crate) scale_bytes: usize,
    /// Of a group's and a block's, or about that: in two levels a group's own are not all it has.
    pub(crate) group_scale_bytes: usize,
    pub(crate) block_scale_bytes: usize,
}

impl Layout {
    /// Of a layer in panels of so many outputs. With at most 2²⁴ inputs and outputs no product here leaves 64 bits.
    pub(super) fn new(out_features: usize, in_features: usize, kind: WeightKind, panel: usize) -> Self {
        let padded_inputs = in_features.next_multiple_of(kind.block());
        let num_groups = kind.group_size().map_or(0, |group_size| in_features.div_ceil(group_size));
        // A group may be larger than the layer, and not end with a block then.
        let group_inputs = kind.group_size().map_or(padded_inputs, |size| size.min(padded_inputs));
        let scale_bytes = panel * kind.scale_bytes(num_groups);
        let num_blocks = padded_inputs / kind.block();
        Self {
            num_panels: out_features.div_ceil(panel),
            padded_inputs,
            num_blocks,
            // Of 6 bits the weights of one input may not be whole bytes; those of a block are.
            panel_bytes: panel * padded_inputs * kind.weight_bits() / 8,
            num_groups,
            blocks_per_group: group_inputs.div_ceil(kind.block()),
            scale_bytes,
            group_scale_bytes: scale_bytes.checked_div(num_groups).unwrap_or(0),
            block_scale_bytes: scale_bytes.div_ceil(num_blocks),
        }
    }
}
