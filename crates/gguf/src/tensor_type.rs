//! How the numbers of a tensor are written down.

use thiserror::Error;

use crate::blocks;

/// A type of tensor, known by its size; whether its numbers can be had is another question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorType {
    id: u32,
    name: &'static str,
    block: usize,
    block_bytes: usize,
}

/// Blocks that cannot be unpacked.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BlockError {
    /// A type whose numbers are not read, or not read so.
    #[error("blocks of {0} are not unpacked here")]
    Type(&'static str),
    /// Bytes that are not whole blocks.
    #[error(
        "{bytes} bytes of {type_name} are given for {numbers} numbers, but as many take {expected} bytes"
    )]
    Length {
        /// Of the blocks.
        type_name: &'static str,
        /// As given.
        bytes: usize,
        /// As asked for.
        numbers: usize,
        /// What these take.
        expected: usize,
    },
    /// Scales for other groups than the blocks have.
    #[error("groups of {group_size} with {scales} scales are asked for of {numbers} numbers of {type_name}")]
    Groups {
        /// Of the blocks.
        type_name: &'static str,
        /// As asked for.
        group_size: usize,
        /// Room for so many.
        scales: usize,
        /// As asked for.
        numbers: usize,
    },
}

const fn known(id: u32, name: &'static str, block: usize, block_bytes: usize) -> TensorType {
    TensorType { id, name, block, block_bytes }
}

/// All that the format has had, with the numbers and the bytes of a block.
const TYPES: [TensorType; 32] = [
    known(0, "F32", 1, 4),
    known(1, "F16", 1, 2),
    known(2, "Q4_0", 32, 18),
    known(3, "Q4_1", 32, 20),
    known(6, "Q5_0", 32, 22),
    known(7, "Q5_1", 32, 24),
    known(8, "Q8_0", 32, 34),
    known(9, "Q8_1", 32, 40),
    known(10, "Q2_K", 256, 84),
    known(11, "Q3_K", 256, 110),
    known(12, "Q4_K", 256, 144),
    known(13, "Q5_K", 256, 176),
    known(14, "Q6_K", 256, 210),
    known(15, "Q8_K", 256, 292),
    known(16, "IQ2_XXS", 256, 66),
    known(17, "IQ2_XS", 256, 74),
    known(18, "IQ3_XXS", 256, 98),
    known(19, "IQ1_S", 256, 50),
    known(20, "IQ4_NL", 32, 18),
    known(21, "IQ3_S", 256, 110),
    known(22, "IQ2_S", 256, 82),
    known(23, "IQ4_XS", 256, 136),
    known(24, "I8", 1, 1),
    known(25, "I16", 1, 2),
    known(26, "I32", 1, 4),
    known(27, "I64", 1, 8),
    known(28, "F64", 1, 8),
    known(29, "IQ1_M", 256, 56),
    known(30, "BF16", 1, 2),
    known(34, "TQ1_0", 256, 54),
    known(35, "TQ2_0", 256, 66),
    known(39, "MXFP4", 32, 17),
];

impl TensorType {
    /// By the number that files have for it.
    #[must_use]
    pub fn from_id(id: u32) -> Option<Self> {
        TYPES.into_iter().find(|known| known.id == id)
    }

    /// By its name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        TYPES.into_iter().find(|known| known.name == name)
    }

    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        TYPES.into_iter()
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Numbers of a block.
    #[must_use]
    pub fn block(self) -> usize {
        self.block
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        self.block_bytes
    }

    /// Numbers that share a scale, if a number is a whole one of 8 bits times a scale and nothing else.
    #[must_use]
    pub fn group_size(self) -> Option<usize> {
        match self.name {
            "Q8_0" | "Q4_0" | "Q5_0" | "IQ4_NL" | "MXFP4" => Some(32),
            "Q6_K" => Some(16),
            _ => None,
        }
    }

    /// The numbers of some blocks, each as 32 bits.
    ///
    /// # Errors
    ///
    /// A type that is not read, or as many bytes as `out` does not have numbers.
    pub fn unpack(self, bytes: &[u8], out: &mut [f32]) -> Result<(), BlockError> {
        let block: fn(&[u8], &mut [f32]) = match self.name {
            "Q4_0" => blocks::q4_0,
            "Q4_1" => blocks::q4_1,
            "Q5_0" => blocks::q5_0,
            "Q5_1" => blocks::q5_1,
            "Q8_0" => blocks::q8_0,
            "Q4_K" => blocks::q4_k,
            "Q5_K" => blocks::q5_k,
            "Q6_K" => blocks::q6_k,
            "IQ4_NL" => blocks::iq4_nl,
            "MXFP4" => blocks::mxfp4,
            "F32" => |bytes, out| out[0] = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            "F16" => |bytes, out| out[0] = blocks::f16_at(bytes, 0),
            "BF16" => |bytes, out| out[0] = half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            name => return Err(BlockError::Type(name)),
        };
        self.expect(bytes.len(), out.len())?;
        let blocks = bytes.chunks_exact(self.block_bytes).zip(out.chunks_exact_mut(self.block));
        for (bytes, out) in blocks {
            block(bytes, out);
        }
        Ok(())
    }

    /// The whole numbers of some blocks, and the scale of each `group_size` of them: a number is their product, exactly.
    ///
    /// # Errors
    ///
    /// A type without [`Self::group_size`], groups that cut its own, or other lengths than these.
    pub fn whole_numbers(
        self,
        bytes: &[u8],
        group_size: usize,
        numbers: &mut [i8],
        scales: &mut [f32],
    ) -> Result<(), BlockError> {
        let (Some(own), type_name) = (self.group_size(), self.name) else {
            return Err(BlockError::Type(self.name));
        };
        self.expect(bytes.len(), numbers.len())?;
        if group_size == 0 || !own.is_multiple_of(group_size) || scales.len() * group_size != numbers.len() {
            let (scales, numbers) = (scales.len(), numbers.len());
            return Err(BlockError::Groups { type_name, group_size, scales, numbers });
        }
        match type_name {
            "Q4_0" => self.small(bytes, numbers, scales, blocks::q4_0_whole),
            "Q5_0" => self.small(bytes, numbers, scales, blocks::q5_0_whole),
            "Q8_0" => self.small(bytes, numbers, scales, blocks::q8_0_whole),
            "IQ4_NL" => self.small(bytes, numbers, scales, blocks::iq4_nl_whole),
            "MXFP4" => self.small(bytes, numbers, scales, blocks::mxfp4_whole),
            _ => {
                let per_group = own / group_size;
                let parts = bytes.chunks_exact(self.block_bytes).zip(numbers.as_chunks_mut().0);
                for ((bytes, numbers), scales) in parts.zip(scales.chunks_exact_mut(16 * per_group)) {
                    let of_groups = blocks::q6_k_whole(bytes, numbers);
                    for (scales, scale) in scales.chunks_exact_mut(per_group).zip(of_groups) {
                        scales.fill(scale);
                    }
                }
            }
        }
        Ok(())
    }

    /// Each small block's numbers, and its scale to as many places as groups of it are asked for.
    fn small(
        self,
        bytes: &[u8],
        numbers: &mut [i8],
        scales: &mut [f32],
        block: impl Fn(&[u8], &mut [i8; blocks::SMALL]) -> f32,
    ) {
        let (numbers, _) = numbers.as_chunks_mut();
        let per_block = scales.len() / numbers.len().max(1);
        let parts = bytes.chunks_exact(self.block_bytes).zip(numbers);
        if per_block == 1 {
            parts.zip(scales).for_each(|((bytes, numbers), scale)| *scale = block(bytes, numbers));
            return;
        }
        for ((bytes, numbers), scales) in parts.zip(scales.chunks_exact_mut(per_block.max(1))) {
            scales.fill(block(bytes, numbers));
        }
    }

    /// The whole numbers of some blocks, and scale and minimum of each `group_size` of them: a number is
    /// scale · number − minimum.
    ///
    /// # Errors
    ///
    /// A type without scales, groups that cut its own, or other lengths than these.
    pub fn with_minima(
        self,
        bytes: &[u8],
        group_size: usize,
        numbers: &mut [i8],
        scales: &mut [f32],
        mins: &mut [f32],
    ) -> Result<(), BlockError> {
        let (type_name, own) = (self.name, 32);
        let block: blocks::MinimumBlock = match type_name {
            "Q4_1" => blocks::q4_1_whole,
            "Q5_1" => blocks::q5_1_whole,
            "Q4_K" => blocks::q4_k_whole,
            "Q5_K" => blocks::q5_k_whole,
            _ => {
                mins.fill(0.0);
                return self.whole_numbers(bytes, group_size, numbers, scales);
            }
        };
        self.expect(bytes.len(), numbers.len())?;
        let fits = group_size > 0 && own % group_size == 0 && scales.len() * group_size == numbers.len();
        if !fits || mins.len() != scales.len() {
            let (scales, numbers) = (scales.len(), numbers.len());
            return Err(BlockError::Groups { type_name, group_size, scales, numbers });
        }
        let (per_group, per_block) = (own / group_size, self.block / group_size);
        let parts = bytes.chunks_exact(self.block_bytes).zip(numbers.chunks_exact_mut(self.block));
        let of_groups = scales.chunks_exact_mut(per_block).zip(mins.chunks_exact_mut(per_block));
        for ((bytes, numbers), (scales, mins)) in parts.zip(of_groups) {
            block(bytes, numbers, &mut |group, scale, min| {
                scales[group * per_group..(group + 1) * per_group].fill(scale);
                mins[group * per_group..(group + 1) * per_group].fill(min);
            });
        }
        Ok(())
    }

    /// The whole numbers of blocks with scales in two levels, as they lie there: scale and minimum of each block, and what they
    /// are multiplied by for each 32 numbers, or for each 16 where there is room for so many factors. Those of scales have a
    /// sign. `Q6_K` has none but groups of 16, and no minima: `mins` is empty then, or filled with zeros.
    ///
    /// # Errors
    ///
    /// Another type than `Q4_K`, `Q5_K` and `Q6_K`, or other lengths than these.
    pub fn two_levels(
        self,
        bytes: &[u8],
        numbers: &mut [i8],
        scales: &mut [f32],
        mins: &mut [f32],
        factors: &mut [[u8; 2]],
    ) -> Result<(), BlockError> {
        /// Groups of a block, the large ones and the small ones.
        const LARGE: usize = 8;
        const SMALL: usize = 16;
        let block: Option<blocks::LevelBlock> = match self.name {
            "Q4_K" => Some(blocks::q4_k_levels),
            "Q5_K" => Some(blocks::q5_k_levels),
            "Q6_K" => None,
            name => return Err(BlockError::Type(name)),
        };
        self.expect(bytes.len(), numbers.len())?;
        let num_blocks = numbers.len() / self.block;
        let has_minima = mins.len() == num_blocks || (mins.is_empty() && block.is_none());
        let is_large = factors.len() == LARGE * num_blocks && block.is_some();
        if scales.len() != num_blocks || !has_minima || !(is_large || factors.len() == SMALL * num_blocks) {
            let (type_name, group_size) = (self.name, self.block * num_blocks / factors.len().max(1));
            let (scales, numbers) = (scales.len(), numbers.len());
            return Err(BlockError::Groups { type_name, group_size, scales, numbers });
        }
        mins.fill(0.0);
        let per_block = if is_large { LARGE } else { SMALL };
        let parts = bytes.chunks_exact(self.block_bytes).zip(numbers.as_chunks_mut::<256>().0);
        let levels = scales.iter_mut().zip(factors.chunks_exact_mut(per_block));
        for (index, ((bytes, numbers), (scale, factors))) in parts.zip(levels).enumerate() {
            let Some(block) = block else {
                let mut small = [[0; 2]; SMALL];
                *scale = blocks::q6_k_levels(bytes, numbers, &mut small);
                factors.copy_from_slice(&small);
                continue;
            };
            let mut large = [[0; 2]; LARGE];
            (*scale, mins[index]) = block(bytes, numbers, &mut large);
            for (factors, of_group) in factors.chunks_exact_mut(per_block / LARGE).zip(large) {
                factors.fill(of_group);
            }
        }
        Ok(())
    }

    fn expect(self, bytes: usize, numbers: usize) -> Result<(), BlockError> {
        let expected = numbers / self.block * self.block_bytes;
        if bytes != expected || !numbers.is_multiple_of(self.block) {
            return Err(BlockError::Length { type_name: self.name, bytes, numbers, expected });
        }
        Ok(())
    }
}
