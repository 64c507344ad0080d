//! Which kernels there are and which of them this machine runs.

use std::sync::OnceLock;

use half::bf16;

#[cfg(target_arch = "x86_64")]
use crate::simd::instructions;
use crate::{
    attention::{
        keeping::{self, Keeping},
        tile::{self, TileForms},
    },
    finish::{self, FinishFn},
    gates::row::{self as gate_row, GateFn},
    linear::{
        panel::PANEL_VECTORS,
        product::{self, Products},
    },
    lora::rows::{self as lora_rows, ExpandFn, ShrinkFn},
    norm::row::{self as norm_row, NormFn},
    rotary::{self, TurnFn},
    w8a8::form::{self, Form, Groups, Variant},
};

/// A compiled form of the kernels.
#[derive(Debug)]
pub struct Kernel {
    name: &'static str,
    lanes: usize,
    is_detected: fn() -> bool,
    pub(crate) tiles: TileForms,
    pub(crate) keeping: Keeping,
    pub(crate) products: &'static Products,
    pub(crate) finish_f32: FinishFn<f32>,
    pub(crate) finish_bf16: FinishFn<bf16>,
    pub(crate) norm_f32: NormFn<f32>,
    pub(crate) norm_bf16: NormFn<bf16>,
    pub(crate) turn_f32: TurnFn<f32>,
    pub(crate) turn_bf16: TurnFn<bf16>,
    pub(crate) gate_f32: GateFn<f32>,
    pub(crate) gate_bf16: GateFn<bf16>,
    pub(crate) shrink_f32: ShrinkFn<f32>,
    pub(crate) shrink_bf16: ShrinkFn<bf16>,
    pub(crate) expand_f32: ExpandFn<f32>,
    pub(crate) expand_bf16: ExpandFn<bf16>,
    /// Products with rounded activations, best first.
    pub(crate) w8a8: &'static [&'static Form],
}

/// All forms, best first.
static KERNELS: &[Kernel] = &[
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: "avx512",
        lanes: 16,
        is_detected: instructions::have_avx512,
        tiles: tile::avx512::FORMS,
        keeping: keeping::AVX512,
        products: product::AVX512,
        finish_f32: finish::avx512_f32,
        finish_bf16: finish::avx512_bf16,
        norm_f32: norm_row::avx512_f32,
        norm_bf16: norm_row::avx512_bf16,
        turn_f32: rotary::avx512_f32,
        turn_bf16: rotary::avx512_bf16,
        gate_f32: gate_row::avx512_f32,
        gate_bf16: gate_row::avx512_bf16,
        shrink_f32: lora_rows::shrink_avx512_f32,
        shrink_bf16: lora_rows::shrink_avx512_bf16,
        expand_f32: lora_rows::expand_avx512_f32,
        expand_bf16: lora_rows::expand_avx512_bf16,
        w8a8: form::FOR_AVX512,
    },
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: "avx2",
        lanes: 8,
        is_detected: instructions::have_avx2,
        tiles: tile::avx2::FORMS,
        keeping: keeping::AVX2,
        products: product::AVX2,
        finish_f32: finish::avx2_f32,
        finish_bf16: finish::avx2_bf16,
        norm_f32: norm_row::avx2_f32,
        norm_bf16: norm_row::avx2_bf16,
        turn_f32: rotary::avx2_f32,
        turn_bf16: rotary::avx2_bf16,
        gate_f32: gate_row::avx2_f32,
        gate_bf16: gate_row::avx2_bf16,
        shrink_f32: lora_rows::shrink_avx2_f32,
        shrink_bf16: lora_rows::shrink_avx2_bf16,
        expand_f32: lora_rows::expand_avx2_f32,
        expand_bf16: lora_rows::expand_avx2_bf16,
        w8a8: form::FOR_AVX2,
    },
    Kernel {
        name: "portable",
        lanes: 8,
        is_detected: || true,
        tiles: tile::portable::FORMS,
        keeping: keeping::PORTABLE,
        products: product::PORTABLE,
        finish_f32: finish::portable_f32,
        finish_bf16: finish::portable_bf16,
        norm_f32: norm_row::portable_f32,
        norm_bf16: norm_row::portable_bf16,
        turn_f32: rotary::portable_f32,
        turn_bf16: rotary::portable_bf16,
        gate_f32: gate_row::portable_f32,
        gate_bf16: gate_row::portable_bf16,
        shrink_f32: lora_rows::shrink_portable_f32,
        shrink_bf16: lora_rows::shrink_portable_bf16,
        expand_f32: lora_rows::expand_portable_f32,
        expand_bf16: lora_rows::expand_portable_bf16,
        w8a8: form::FOR_PORTABLE,
    },
    Kernel {
        name: "scalar",
        lanes: 1,
        is_detected: || true,
        tiles: tile::scalar::FORMS,
        keeping: keeping::SCALAR,
        products: product::SCALAR,
        finish_f32: finish::scalar_f32,
        finish_bf16: finish::scalar_bf16,
        norm_f32: norm_row::scalar_f32,
        norm_bf16: norm_row::scalar_bf16,
        turn_f32: rotary::scalar_f32,
        turn_bf16: rotary::scalar_bf16,
        gate_f32: gate_row::scalar_f32,
        gate_bf16: gate_row::scalar_bf16,
        shrink_f32: lora_rows::shrink_scalar_f32,
        shrink_bf16: lora_rows::shrink_scalar_bf16,
        expand_f32: lora_rows::expand_scalar_f32,
        expand_bf16: lora_rows::expand_scalar_bf16,
        w8a8: form::FOR_SCALAR,
    },
];

impl Kernel {
    /// Every kernel that this machine runs, best first; the last one takes any head size.
    pub fn available() -> &'static [&'static Self] {
        static AVAILABLE: OnceLock<Vec<&'static Kernel>> = OnceLock::new();
        AVAILABLE.get_or_init(|| KERNELS.iter().filter(|kernel| (kernel.is_detected)()).collect())
    }

    /// The best kernel for heads of `head_dim` features.
    #[must_use]
    pub fn best(head_dim: usize) -> &'static Self {
        let fitting = Self::available().iter().find(|kernel| kernel.takes(head_dim));
        fitting.unwrap_or(&&KERNELS[KERNELS.len() - 1])
    }

    /// The best kernel for products, which take any size.
    #[must_use]
    pub fn best_for_products() -> &'static Self {
        Self::available()[0]
    }

    /// Numbers that are computed at once.
    pub(crate) fn lanes(&self) -> usize {
        self.lanes
    }

    /// Outputs of a panel of packed weights.
    pub(crate) fn panel(&self) -> usize {
        PANEL_VECTORS * self.lanes
    }

    /// Whether this machine has a matrix unit that multiplies weights packed for this kernel.
    #[must_use]
    pub fn has_matrix_unit(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.name == "avx512" && crate::simd::amx::is_available();
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }

    /// Whether this machine multiplies pairs of numbers of 16 bits, in the order in which this kernel packs them then.
    pub(crate) fn has_pairs(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.name == "avx512" && crate::linear::pairs::available().is_some();
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }

    /// What multiplies rows of 16 bits by weights of `bf16` where the matrix unit does not: `avx512-bf16`, or this kernel,
    /// which widens both.
    #[must_use]
    pub fn bf16_name(&self) -> &'static str {
        if self.has_pairs() { "avx512-bf16" } else { self.name }
    }

    /// Whether the machine has `avx512-bf16` products that are wrong, and so are not used.
    #[must_use]
    pub fn is_bf16_refused(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.name == "avx512" && crate::linear::pairs::is_refused();
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }

    /// What computes products of 8-bit weights with rounded activations, of few rows and of many: `avx512-vnni` and `amx-int8`,
    /// for example. Weights of 4 bits are computed as few rows are.
    #[must_use]
    pub fn w8a8_names(&self) -> [&'static str; 2] {
        let variant = Variant { block: 32, bits: 8, groups: Groups::Scales, is_coded: false };
        [1, usize::MAX].map(|num_rows| form::chosen(self.w8a8, num_rows, variant).name)
    }

    /// What the machine has for that but computes something else than plain code does, and so is not used.
    #[must_use]
    pub fn w8a8_refused(&self) -> Vec<&'static str> {
        form::refused(self.w8a8)
    }

    /// `avx512`, `avx2`, `portable` or `scalar`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Whether heads of `head_dim` features fill its lanes.
    #[must_use]
    pub fn takes(&self, head_dim: usize) -> bool {
        head_dim > 0 && head_dim.is_multiple_of(self.lanes)
    }
}
