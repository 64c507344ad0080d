//! `Summand`: number types that ranks can add.

use half::bf16;

/// Numbers that are added at once, in the cache.
const TILE: usize = 1024;

mod sealed {
    /// Plain numbers: no padding, and every bit pattern is valid.
    pub trait Plain: Copy {}
    impl Plain for f32 {}
    impl Plain for half::bf16 {}
}

/// A number type whose sums are computed in float32.
pub trait Summand: sealed::Plain {
    /// Convert to float32, exactly.
    fn widen(self) -> f32;
    /// Round to the nearest value, ties to even.
    fn round(sum: f32) -> Self;
    /// View numbers as bytes.
    fn as_bytes(numbers: &[Self]) -> &[u8] {
        // SAFETY: `Plain`: every byte is written; a byte needs no alignment.
        unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
    }
}

impl Summand for f32 {
    fn widen(self) -> f32 {
        self
    }
    fn round(sum: f32) -> Self {
        sum
    }
}

impl Summand for bf16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn round(sum: f32) -> Self {
        Self::from_f32(sum)
    }
}

/// Fill `out` with the sum of parts of its length, added in their order.
pub(crate) fn add_in_order<'a, T: Summand + 'a>(
    out: &mut [T],
    parts: &(impl Iterator<Item = &'a [T]> + Clone),
) {
    let mut sums = [0_f32; TILE];
    for (index, out) in out.chunks_mut(TILE).enumerate() {
        let sums = &mut sums[..out.len()];
        for (rank, part) in parts.clone().enumerate() {
            let part = &part[index * TILE..][..sums.len()];
            if rank == 0 {
                sums.iter_mut().zip(part).for_each(|(sum, number)| *sum = number.widen());
            } else {
                sums.iter_mut().zip(part).for_each(|(sum, number)| *sum += number.widen());
            }
        }
        out.iter_mut().zip(&*sums).for_each(|(out, sum)| *out = T::round(*sum));
    }
}
