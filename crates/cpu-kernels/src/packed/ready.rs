//! What a product makes of a panel's scales and minima before it reads them: numbers of 32 bits; and of weights, where it reads
//! those as such.

#![allow(clippy::inline_always, reason = "what is inlined takes the instructions of the form that calls it")]

use super::{
    PackedLinear,
    quantized::{Quantized, ScaleForm, ZeroForm},
};
use crate::w8a8::dot::{CODES, QUAD};

/// Groups whose scales are made ready together.
pub(crate) const GROUPS_TOGETHER: usize = 64;
/// The most outputs of a panel.
const MAX_OUTPUTS: usize = 32;

/// Scales and minima of a panel's groups as 32 bits, `[group][output]`.
#[repr(C, align(64))]
pub(crate) struct ReadyScales {
    pub(crate) scales: [f32; GROUPS_TOGETHER * MAX_OUTPUTS],
    /// What is added to a group's product with 1: less than nothing for most.
    pub(crate) mins: [f32; GROUPS_TOGETHER * MAX_OUTPUTS],
}

impl ReadyScales {
    pub(crate) const ZERO: Self =
        Self { scales: [0.0; GROUPS_TOGETHER * MAX_OUTPUTS], mins: [0.0; GROUPS_TOGETHER * MAX_OUTPUTS] };
}

/// A number of 16 bits as 32; not for what is infinite or no number.
#[inline(always)]
fn widen_f16(bits: u16) -> f32 {
    /// What the exponents differ by: 2¹¹².
    const SHIFT: f32 = f32::from_bits((112 + 127) << 23);
    let size = f32::from_bits(u32::from(bits & 0x7fff) << 13) * SHIFT;
    f32::from_bits(size.to_bits() | u32::from(bits & 0x8000) << 16)
}

/// Numbers of 16 bits as 32: by the instruction for it, with so many `LANES`, where the code is compiled for machines that have
/// it; 1: without.
#[inline(always)]
fn widen_f16_all<const LANES: usize, const NEGATED: bool>(mut from: &[u8], mut to: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{
            _mm_loadu_si128, _mm256_castps_si256, _mm256_cvtph_ps, _mm256_loadu_si256, _mm256_set1_epi32,
            _mm256_storeu_si256, _mm256_xor_si256, _mm512_castps_si512, _mm512_cvtph_ps, _mm512_set1_epi32,
            _mm512_storeu_si512, _mm512_xor_si512,
        };
        let sign = if NEGATED { i32::MIN } else { 0 };
        while LANES > 1 && from.len() >= 2 * LANES && to.len() >= LANES {
            // SAFETY: 16 lanes are said where AVX-512 was found alone, and 8 where AVX2 with F16C was; both slices are long enough
            // for so many bytes to be read and numbers written.
            unsafe {
                if LANES == 16 {
                    let wide = _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast()));
                    let bits = _mm512_xor_si512(_mm512_castps_si512(wide), _mm512_set1_epi32(sign));
                    _mm512_storeu_si512(to.as_mut_ptr().cast(), bits);
                } else {
                    let wide = _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast()));
                    let bits = _mm256_xor_si256(_mm256_castps_si256(wide), _mm256_set1_epi32(sign));
                    _mm256_storeu_si256(to.as_mut_ptr().cast(), bits);
                }
            }
            (from, to) = (&from[2 * LANES..], &mut to[LANES..]);
        }
    }
    for (to, from) in to.iter_mut().zip(from.as_chunks::<2>().0) {
        let wide = widen_f16(u16::from_le_bytes(*from));
        *to = if NEGATED { -wide } else { wide };
    }
}

/// Numbers of one form as 32 bits; with a negative sign for `NEGATED`.
#[inline(always)]
fn widen_all<const LANES: usize, const NEGATED: bool>(form: ScaleForm, from: &[u8], to: &mut [f32]) {
    let signed = |x: f32| if NEGATED { -x } else { x };
    match form {
        ScaleForm::F32 => {
            for (to, from) in to.iter_mut().zip(from.as_chunks::<4>().0) {
                *to = signed(f32::from_le_bytes(*from));
            }
        }
        ScaleForm::Bf16 => {
            for (to, from) in to.iter_mut().zip(from.as_chunks::<2>().0) {
                *to = signed(f32::from_bits(u32::from(u16::from_le_bytes(*from)) << 16));
            }
        }
        ScaleForm::F16 | ScaleForm::TwoLevel => {
            widen_f16_all::<LANES, NEGATED>(from, to);
        }
    }
}

/// [`make_all_ready`], compiled for the panels of AVX-512 and of AVX2 as well: loops whose length is known take less time.
#[inline(always)]
fn make_ready<const LANES: usize>(
    form: Quantized,
    outputs: usize,
    from: &[u8],
    groups: std::ops::Range<usize>,
    to: &mut ReadyScales,
) {
    match outputs {
        32 => make_all_ready::<LANES>(form, 32, from, groups, to),
        16 => make_all_ready::<LANES>(form, 16, from, groups, to),
        _ => make_all_ready::<LANES>(form, outputs, from, groups, to),
    }
}

/// Make the scales of some groups ready, for `outputs` outputs of a panel.
///
/// # Arguments
///
/// * `from` – the bytes of all of the panel's scales, whose groups lie one after the other.
#[inline(always)]
fn make_all_ready<const LANES: usize>(
    form: Quantized,
    outputs: usize,
    from: &[u8],
    groups: std::ops::Range<usize>,
    to: &mut ReadyScales,
) {
    if form.scales == ScaleForm::TwoLevel {
        let level_groups = form.level_groups();
        let (level_bytes, first) = (form.bytes_of_scales(level_groups) * outputs, groups.start);
        let levels = from.chunks_exact(level_bytes).skip(first / level_groups);
        let scales = to.scales.chunks_exact_mut(level_groups * outputs);
        let mins = to.mins.chunks_exact_mut(level_groups * outputs);
        let mut large = [0.0_f32; 2 * MAX_OUTPUTS];
        for ((level, scales), mins) in levels.zip(scales).zip(mins).take(groups.len() / level_groups) {
            if form.zeros == ZeroForm::Middle {
                let (upper, factors) = level.split_at(2 * outputs);
                widen_all::<LANES, false>(form.scales, upper, &mut large[..outputs]);
                for (factors, scales) in factors.chunks_exact(outputs).zip(scales.chunks_exact_mut(outputs)) {
                    for ((scale, large), factor) in scales.iter_mut().zip(&large).zip(factors) {
                        *scale = large * f32::from(factor.cast_signed());
                    }
                }
                continue;
            }
            let (upper, factors) = level.split_at(4 * outputs);
            let (large_scales, large_mins) = large[..2 * outputs].split_at_mut(outputs);
            widen_all::<LANES, false>(form.scales, &upper[..2 * outputs], large_scales);
            widen_all::<LANES, true>(form.scales, &upper[2 * outputs..], large_mins);
            let parts = scales.chunks_exact_mut(outputs).zip(mins.chunks_exact_mut(outputs));
            for (factors, (scales, mins)) in factors.chunks_exact(2 * outputs).zip(parts) {
                let (of_scales, of_mins) = factors.split_at(outputs);
                for ((scale, large), factor) in scales.iter_mut().zip(&*large_scales).zip(of_scales) {
                    *scale = large * f32::from(factor.cast_signed());
                }
                for ((min, large), factor) in mins.iter_mut().zip(&*large_mins).zip(of_mins) {
                    *min = large * f32::from(*factor);
                }
            }
        }
        return;
    }
    let (size, group_bytes) = (form.scale_bytes(), form.bytes_of_scales(1) * outputs);
    let parts = to.scales.chunks_exact_mut(outputs).zip(to.mins.chunks_exact_mut(outputs));
    for (group, (scales, mins)) in
        from.chunks_exact(group_bytes).skip(groups.start).zip(parts).take(groups.len())
    {
        let (of_scales, offsets) = group.split_at(outputs * size);
        widen_all::<LANES, false>(form.scales, of_scales, scales);
        match form.zeros {
            ZeroForm::Middle | ZeroForm::Codes => {}
            ZeroForm::Point => {
                for ((min, scale), zero) in mins.iter_mut().zip(&*scales).zip(offsets) {
                    *min = -(*scale * f32::from(*zero));
                }
            }
            ZeroForm::Minimum => widen_all::<LANES, true>(form.scales, offsets, mins),
        }
    }
}

/// Weights of some inputs as numbers of 32 bits, `[input][output]`.
///
/// # Arguments
///
/// * `quads` – the panel's, from the first of these inputs on.
/// * `scales` – of those groups, made ready.
#[inline(always)]
fn widen_inputs<const LANES: usize>(
    form: Quantized,
    outputs: usize,
    quads: &[u8],
    inputs: std::ops::Range<usize>,
    scales: &ReadyScales,
    to: &mut [f32],
) {
    let middle = match (form.bits, form.zeros) {
        (4, ZeroForm::Middle) => 8.0,
        (6, _) => 32.0,
        _ => 0.0,
    };
    let first_group = inputs.start / form.group_size;
    for (at, to) in to.chunks_exact_mut(outputs).take(inputs.len()).enumerate() {
        let group = ((inputs.start + at) / form.group_size - first_group) * outputs;
        let (scales, mins) = (&scales.scales[group..][..outputs], &scales.mins[group..][..outputs]);
        if form.bits == 6 {
            let block = &quads[at / (QUAD * QUAD) * 3 * QUAD * outputs..][..3 * QUAD * outputs];
            for (i, x) in to.iter_mut().enumerate() {
                *x = (f32::from(six_of(block, outputs, i, at)) - middle) * scales[i];
            }
            continue;
        }
        let (quad, shift) =
            if form.bits == 4 { (at / (2 * QUAD), at / QUAD % 2 * 4) } else { (at / QUAD, 0) };
        let bytes = &quads[quad * QUAD * outputs..][..QUAD * outputs];
        for (i, (x, lane)) in to.iter_mut().zip(bytes.as_chunks::<QUAD>().0).enumerate() {
            // The quad of an output is a lane, from which its number is shifted.
            let lane = u32::from_le_bytes(*lane);
            let number = if form.bits == 4 {
                let half = lane >> (8 * (at % QUAD) + shift) & 15;
                if form.has_codes() { of_code(half) } else { half as f32 - middle }
            } else {
                ((lane << (24 - 8 * (at % QUAD))) as i32 >> 24) as f32
            };
            *x = number * scales[i];
            if form.has_offsets() {
                *x += mins[i];
            }
        }
    }
}

/// What a code stands for, see [`ZeroForm::Codes`]: a sign, two bits of exponent and one of digits. Without a look into a table,
/// which the compiler does not vectorise.
#[inline(always)]
fn of_code(code: u32) -> f32 {
    /// What the exponents differ by, twice: 2¹²⁷.
    const SHIFT: f32 = f32::from_bits((127 + 127) << 23);
    let size = f32::from_bits((code & 7) << 22) * SHIFT;
    f32::from_bits(size.to_bits() | (code & 8) << 28)
}

/// The number of an output and an input in a block of weights of 6 bits.
#[inline(always)]
fn six_of(block: &[u8], outputs: usize, output: usize, input: usize) -> u8 {
    let line = |quad: usize| block[quad * QUAD * outputs + output * QUAD + input % QUAD];
    match input / QUAD % QUAD {
        3 => line(0) >> 6 | line(1) >> 6 << 2 | line(2) >> 6 << 4,
        quad => line(quad) & 63,
    }
}

macro_rules! for_instructions {
    ($name:ident, $body:ident, $as_avx512:ident, $as_avx2:ident, ($($argument:ident: $type:ty),*)) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
        fn $as_avx512($($argument: $type),*) {
            $body::<16>($($argument),*);
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $as_avx2($($argument: $type),*) {
            $body::<8>($($argument),*);
        }
        fn $name($($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            if crate::simd::instructions::have_avx512_vnni() {
                // SAFETY: a machine with VNNI for AVX-512 was found to have what this form is compiled for.
                return unsafe { $as_avx512($($argument),*) };
            } else if crate::simd::instructions::have_avx2() {
                // SAFETY: the instructions were found.
                return unsafe { $as_avx2($($argument),*) };
            }
            $body::<1>($($argument),*);
        }
    };
}

for_instructions!(ready_scales, make_ready, ready_avx512, ready_avx2, (
    form: Quantized, outputs: usize, from: &[u8], groups: std::ops::Range<usize>, to: &mut ReadyScales
));
for_instructions!(widened, widen_inputs, widened_avx512, widened_avx2, (
    form: Quantized, outputs: usize, quads: &[u8], inputs: std::ops::Range<usize>, scales: &ReadyScales, to: &mut [f32]
));

impl PackedLinear {
    /// Scales and minima of some groups of a panel, at most [`GROUPS_TOGETHER`]; in two levels from a block's first on.
    pub(crate) fn ready_scales(
        &self,
        form: Quantized,
        panel: usize,
        groups: std::ops::Range<usize>,
        to: &mut ReadyScales,
    ) {
        let outputs = self.kernel.panel();
        let bytes = self.panel_scale_bytes();
        ready_scales(form, outputs, &self.scales.as_slice::<u8>()[panel * bytes..][..bytes], groups, to);
    }

    /// Weights of a panel as 32 bits, from input `first` on, which begins a chunk.
    pub(crate) fn widen_quantized(
        &self,
        form: Quantized,
        panel: usize,
        inputs: std::ops::Range<usize>,
        ready: &mut ReadyScales,
        to: &mut [f32],
    ) {
        let groups = form.groups_of(&inputs);
        // Of groups in two levels those of the whole level are made ready.
        let skipped = if form.scales == ScaleForm::TwoLevel { groups.start % form.level_groups() } else { 0 };
        let end = if form.scales == ScaleForm::TwoLevel {
            groups.end.next_multiple_of(form.level_groups())
        } else {
            groups.end
        };
        self.ready_scales(form, panel, groups.start - skipped..end, ready);
        let outputs = self.kernel.panel();
        if skipped > 0 {
            ready.scales.copy_within(skipped * outputs.., 0);
            ready.mins.copy_within(skipped * outputs.., 0);
        }
        let bytes = self.panel_bytes();
        let panel_weights = &self.weights.as_slice::<u8>()[panel * bytes..][..bytes];
        let first = inputs.start * outputs * usize::from(form.bits) / 8;
        widened(form, outputs, &panel_weights[first..], inputs, ready, to);
    }

    /// A row as products see it: `put` is called for each of its places.
    pub(super) fn unpack_quantized(&self, form: Quantized, row: usize, mut put: impl FnMut(usize, f32)) {
        let outputs = self.kernel.panel();
        let (panel, output) = (row / outputs, row % outputs);
        let weights = &self.weights.as_slice::<u8>()[panel * self.panel_bytes()..][..self.panel_bytes()];
        let bytes = self.panel_scale_bytes();
        let scales = &self.scales.as_slice::<u8>()[panel * bytes..][..bytes];
        for group in 0..self.num_groups() {
            let (scale, min) = scale_and_minimum(form, scales, outputs, output, group);
            let first = group * form.group_size;
            for k in first..self.in_features.min(first.saturating_add(form.group_size)) {
                put(k, number_of(form, weights, outputs, output, k) * scale - min);
            }
        }
    }
}

/// The scale of an output's group and what is taken away from its weights, of a panel's scales.
fn scale_and_minimum(
    form: Quantized,
    scales: &[u8],
    outputs: usize,
    output: usize,
    group: usize,
) -> (f32, f32) {
    let two = |at: usize| widen_f16(u16::from_le_bytes([scales[at], scales[at + 1]]));
    if form.scales == ScaleForm::TwoLevel {
        let level_groups = form.level_groups();
        let level = group / level_groups * form.bytes_of_scales(level_groups) * outputs;
        if form.zeros == ZeroForm::Middle {
            let factor = scales[level + (2 + group % level_groups) * outputs + output];
            return (two(level + 2 * output) * f32::from(factor.cast_signed()), 0.0);
        }
        let factors = level + 4 * outputs + group % level_groups * 2 * outputs;
        return (
            two(level + 2 * output) * f32::from(scales[factors + output].cast_signed()),
            two(level + 2 * (outputs + output)) * f32::from(scales[factors + outputs + output]),
        );
    }
    let (start, size) = (group * form.bytes_of_scales(1) * outputs, form.scale_bytes());
    let number = |at: usize| match form.scales {
        ScaleForm::F32 => f32::from_le_bytes([scales[at], scales[at + 1], scales[at + 2], scales[at + 3]]),
        ScaleForm::Bf16 => f32::from_bits(u32::from(u16::from_le_bytes([scales[at], scales[at + 1]])) << 16),
        ScaleForm::F16 | ScaleForm::TwoLevel => two(at),
    };
    let (scale, offsets) = (number(start + size * output), start + size * outputs);
    match form.zeros {
        ZeroForm::Middle | ZeroForm::Codes => (scale, 0.0),
        ZeroForm::Point => (scale, scale * f32::from(scales[offsets + output])),
        ZeroForm::Minimum => (scale, number(offsets + size * output)),
    }
}

/// The whole number of an output and an input, of a panel's weights.
fn number_of(form: Quantized, weights: &[u8], outputs: usize, output: usize, k: usize) -> f32 {
    if form.bits == 6 {
        return f32::from(six_of(&weights[k / 16 * 3 * QUAD * outputs..], outputs, output, k)) - 32.0;
    }
    let byte = weights[byte_of(form, k, output, outputs)];
    match (form.bits, form.zeros) {
        (4, zeros) => {
            let half = byte >> (k / QUAD % 2 * 4) & 15;
            if zeros == ZeroForm::Codes {
                return f32::from(CODES[usize::from(half)]);
            }
            f32::from(half) - if zeros == ZeroForm::Middle { 8.0 } else { 0.0 }
        }
        _ => f32::from(byte.cast_signed()),
    }
}

/// Where in a panel the byte with the weight of input `k` and output `i` lies.
fn byte_of(form: Quantized, k: usize, i: usize, outputs: usize) -> usize {
    let quad = if form.bits == 4 { k / (2 * QUAD) } else { k / QUAD };
    quad * QUAD * outputs + i * QUAD + k % QUAD
}
