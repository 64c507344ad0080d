//! Weights of a linear layer, packed once into the order in which products read them.
//!
//! The outputs are cut into panels of twice the lanes of the kernel (32 with AVX-512, 16 with AVX2); a panel holds, for one
//! input after the other, the weights of its outputs side by side, so that a product reads it from its first byte to its
//! last. What the last panel lacks is zeros. In a panel of `bf16` outputs `i` and `i + lanes` are neighbours: one vector of
//! memory becomes two of numbers without moving any across lanes; on a processor that multiplies such numbers two inputs of an
//! output are ([`PackedLinear::pairs`]). Where activations are rounded, too ([`WeightKind::W8A8`]), four inputs of an output
//! are neighbours, which one instruction sums, and the inputs are padded to whole blocks.

mod error;
mod filling;
mod layout;
mod matrix;
mod narrow;
mod quads;
mod quantized;
pub(crate) mod ready;
mod rounding;
mod whole;

use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};

pub use self::{
    error::LinearError,
    filling::{Filling, fill_together},
    matrix::{Matrix, WeightElement},
    quantized::{Quantized, QuantizedRow, ScaleForm, ZeroForm},
};
pub(crate) use self::{error::check_rows, layout::Layout};
#[cfg(target_arch = "x86_64")]
use crate::linear::pairs::{self, Pairs};
use crate::{
    kernel::Kernel,
    linear::product::{ProductFn, WidenFn},
    lines::{Lines, Plain},
    threads::Threads,
    w8a8::dot::QUAD,
};

/// The most inputs or outputs of a layer.
pub const MAX_FEATURES: usize = 1 << 24;
/// Weights below which no helper is woken to pack.
const MIN_SHARED_WEIGHTS: usize = 1 << 16;

/// How weights are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightKind {
    /// 32 bits.
    F32,
    /// The upper 16 bits of those.
    Bf16,
    /// 16 bits of IEEE's: five of exponent, ten of the number.
    F16,
    /// Whole numbers of 8 bits, times a scale per output and group of inputs.
    Int8 {
        /// Inputs that share a scale; the last group may have fewer.
        group_size: usize,
    },
    /// As `Int8`, for activations that are rounded to 8 bits, too: a scale per row and block of [`Self::block`] inputs.
    W8A8 {
        /// Inputs that share a scale of the weight: 16, a multiple of 32, or at least as many as there are.
        group_size: usize,
    },
    /// Whole numbers of 4, 6 or 8 bits with what files have besides: see [`Quantized`].
    Quantized(Quantized),
}

impl WeightKind {
    /// Inputs that lie together; where activations are rounded they share a scale.
    #[must_use]
    pub fn block(self) -> usize {
        match self {
            Self::W8A8 { group_size: 16 }
            | Self::Quantized(Quantized { group_size: 16, bits: 6 | 8, .. }) => 16,
            Self::W8A8 { .. } | Self::Quantized(_) => 32,
            _ => 1,
        }
    }

    /// Whether activations are rounded to 8 bits.
    #[must_use]
    pub fn rounds_activations(self) -> bool {
        matches!(self, Self::W8A8 { .. } | Self::Quantized(Quantized { rounds_activations: true, .. }))
    }

    /// Inputs that share a scale of the weight, where weights have scales.
    #[must_use]
    pub fn group_size(self) -> Option<usize> {
        match self {
            Self::Int8 { group_size } | Self::W8A8 { group_size } => Some(group_size),
            Self::Quantized(form) => Some(form.group_size),
            Self::F32 | Self::Bf16 | Self::F16 => None,
        }
    }

    fn weight_bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::Bf16 | Self::F16 => 16,
            Self::Int8 { .. } | Self::W8A8 { .. } => 8,
            Self::Quantized(form) => usize::from(form.bits),
        }
    }

    /// Bytes of an output's scales.
    fn scale_bytes(self, num_groups: usize) -> usize {
        match self {
            Self::Quantized(form) => form.bytes_of_scales(num_groups),
            _ => num_groups * 4,
        }
    }
}

/// The weights of a linear layer, and its bias.
#[derive(Debug)]
pub struct PackedLinear {
    pub(crate) kernel: &'static Kernel,
    pub(crate) out_features: usize,
    pub(crate) in_features: usize,
    pub(crate) kind: WeightKind,
    pub(crate) layout: Layout,
    pub(crate) weights: Lines,
    /// `[panel][group][output]`; empty where weights have no scales.
    pub(crate) scales: Lines,
    /// Padded to whole panels.
    pub(crate) bias: Option<Lines>,
    /// Which input of the layer the weights at each place belong to; None: the one of that place.
    pub(crate) input_order: Option<Box<[u32]>>,
    /// Whether two inputs of an output lie side by side.
    has_pairs: bool,
    is_packed: Vec<bool>,
    num_packed: usize,
    /// From so many rows on the matrix unit computes.
    matrix_rows: AtomicUsize,
}

impl PackedLinear {
    /// Room for a weight `[out_features, in_features]`, for the best kernel of this machine.
    ///
    /// # Errors
    ///
    /// Sizes outside 1 to [`MAX_FEATURES`], or not as much memory.
    pub fn new(out_features: usize, in_features: usize, kind: WeightKind) -> Result<Self, LinearError> {
        Self::for_kernel(Kernel::best_for_products(), out_features, in_features, kind)
    }

    /// Room for a weight `[out_features, in_features]`, for one of [`Kernel::available`].
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    pub fn for_kernel(
        kernel: &'static Kernel,
        out_features: usize,
        in_features: usize,
        kind: WeightKind,
    ) -> Result<Self, LinearError> {
        for (name, value) in [("out_features", out_features), ("in_features", in_features)] {
            if value == 0 || value > MAX_FEATURES {
                return Err(LinearError::Size { name, value, most: MAX_FEATURES });
            }
        }
        if let Some(group_size) = kind.group_size() {
            if group_size == 0 || group_size > MAX_FEATURES {
                let name = "group_size";
                return Err(LinearError::Size { name, value: group_size, most: MAX_FEATURES });
            }
            if group_size < in_features && !group_size.is_multiple_of(kind.block()) {
                return Err(LinearError::RoundedGroup { group_size, in_features });
            }
        }
        if let WeightKind::Quantized(form) = kind {
            form.check(in_features)?;
        }
        let layout = Layout::new(out_features, in_features, kind, kernel.panel());
        let (weight_bytes, scale_bytes) =
            (layout.num_panels * layout.panel_bytes, layout.num_panels * layout.scale_bytes);
        let num_bytes = weight_bytes + scale_bytes;
        let memory = || LinearError::Memory { num_bytes, out_features, in_features };
        let weights = Lines::of_weights(weight_bytes).ok_or_else(memory)?;
        let scales = Lines::of_weights(scale_bytes).ok_or_else(memory)?;
        let has_pairs = kind == WeightKind::Bf16 && kernel.has_pairs() && in_features.is_multiple_of(2);
        Ok(Self {
            kernel,
            out_features,
            in_features,
            kind,
            layout,
            weights,
            scales,
            bias: None,
            input_order: None,
            has_pairs,
            is_packed: vec![false; out_features],
            num_packed: 0,
            matrix_rows: AtomicUsize::new(usize::MAX),
        })
    }

    /// Outputs.
    #[must_use]
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Inputs.
    #[must_use]
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// How weights are kept.
    #[must_use]
    pub fn kind(&self) -> WeightKind {
        self.kind
    }

    /// The kernel that they are packed for.
    #[must_use]
    pub fn kernel(&self) -> &'static Kernel {
        self.kernel
    }

    /// Let the processor's matrix unit compute products of `num_rows` rows and more; None, and at first: of none.
    ///
    /// It is many times as fast where there is much to multiply. Its sums are as exact, but not the same to the last bit: a
    /// row's result then depends on whether there are so many rows, though on nothing else about the others.
    ///
    /// # Errors
    ///
    /// There is none, or the weights are packed for a kernel that cannot use it: see [`Kernel::has_matrix_unit`]; or they
    /// are packed for rounded activations.
    pub fn set_matrix_rows(&self, num_rows: Option<usize>) -> Result<(), LinearError> {
        if num_rows.is_some() && matches!(self.kind, WeightKind::W8A8 { .. } | WeightKind::Quantized(_)) {
            return Err(LinearError::RoundedOnMatrixUnit);
        }
        if num_rows.is_some() && !self.kernel.has_matrix_unit() {
            return Err(LinearError::NoMatrixUnit { kernel: self.kernel.name() });
        }
        // Relaxed: a thread that computes sees the one or the other, and either gives a product.
        self.matrix_rows.store(num_rows.unwrap_or(usize::MAX), Ordering::Relaxed);
        Ok(())
    }

    /// Whether the matrix unit computes so many rows.
    pub(crate) fn uses_matrix_unit(&self, num_rows: usize) -> bool {
        // Relaxed: see `set_matrix_rows`.
        num_rows >= self.matrix_rows.load(Ordering::Relaxed)
    }

    /// Memory of weights, scales and bias.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.weights.num_bytes()
            + self.scales.num_bytes()
            + self.bias.as_ref().map_or(0, Lines::num_bytes)
            + self.input_order.as_ref().map_or(0, |order| size_of_val(&**order))
            + self.is_packed.len()
    }

    /// What multiplies weights of which two inputs of an output lie side by side; None: these do not lie so.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn pairs(&self) -> Option<&'static Pairs> {
        if self.has_pairs { pairs::available() } else { None }
    }

    /// The products of weights of 16 bits with rows of 32, by the number of rows, and what widens such weights.
    pub(crate) fn bf16_products(&self) -> (&'static [ProductFn], WidenFn) {
        #[cfg(target_arch = "x86_64")]
        if let Some(pairs) = self.pairs() {
            return (pairs.f32, pairs.widen);
        }
        (self.kernel.products.bf16, self.kernel.products.widen_bf16)
    }

    /// Whether products take rows of 16 bits as they are.
    pub(crate) fn multiplies_narrow(&self) -> bool {
        !self.narrow_products().is_empty()
    }

    /// The products of such rows, by their number; none: rows are widened.
    pub(crate) fn narrow_products(&self) -> &'static [ProductFn<bf16>] {
        #[cfg(target_arch = "x86_64")]
        return self.pairs().map_or(&[], |pairs| pairs.bf16);
        #[cfg(not(target_arch = "x86_64"))]
        return &[];
    }

    fn order(&self) -> PanelOrder {
        PanelOrder { kind: self.kind, has_pairs: self.has_pairs, panel: self.kernel.panel() }
    }

    /// Bytes of one input's weights in a panel, or about that where they have 6 bits.
    pub(crate) fn step(&self) -> usize {
        self.kernel.panel() * self.kind.weight_bits() / 8
    }

    /// Bytes of a panel's weights.
    pub(crate) fn panel_bytes(&self) -> usize {
        self.layout.panel_bytes
    }

    /// Inputs that a panel has room for.
    pub(crate) fn padded_inputs(&self) -> usize {
        self.layout.padded_inputs
    }

    pub(crate) fn group_size(&self) -> usize {
        self.kind.group_size().unwrap_or(self.in_features)
    }

    pub(crate) fn num_groups(&self) -> usize {
        self.layout.num_groups
    }

    pub(crate) fn num_panels(&self) -> usize {
        self.layout.num_panels
    }

    /// First byte of a panel.
    pub(crate) fn panel_weights(&self, panel: usize) -> *const u8 {
        debug_assert!(panel < self.num_panels());
        self.weights.as_ptr().wrapping_add(panel * self.panel_bytes())
    }

    /// The scales of a panel as 32 bits; where there are none, anything.
    pub(crate) fn panel_scales(&self, panel: usize) -> *const f32 {
        let scales = self.scales.as_slice::<f32>().as_ptr();
        scales.wrapping_add(panel * self.num_groups() * self.kernel.panel())
    }

    /// Bytes of a panel's scales, with what groups have besides.
    pub(crate) fn panel_scale_bytes(&self) -> usize {
        self.layout.scale_bytes
    }

    /// First byte of a panel's scales.
    pub(crate) fn scales_at(&self, panel: usize) -> *const u8 {
        self.scales.as_ptr().wrapping_add(panel * self.layout.scale_bytes)
    }

    /// Which input of the layer the weights at a place belong to.
    fn input_of(&self, k: usize) -> usize {
        self.input_order.as_ref().map_or(k, |order| order[k] as usize)
    }

    pub(crate) fn check_packed(&self) -> Result<(), LinearError> {
        match self.out_features - self.num_packed {
            0 => Ok(()),
            missing => Err(LinearError::NotPacked { missing, out_features: self.out_features }),
        }
    }

    /// The bias, one number per output, or none.
    ///
    /// # Errors
    ///
    /// Not as many numbers, or no memory.
    pub fn set_bias(&mut self, bias: Option<&[f32]>) -> Result<(), LinearError> {
        let Some(bias) = bias else {
            self.bias = None;
            return Ok(());
        };
        let (found, expected) = (bias.len(), self.out_features);
        if found != expected {
            return Err(LinearError::Length { name: "bias", found, expected });
        }
        let num_bytes = self.num_panels() * self.kernel.panel() * 4;
        let memory = LinearError::Memory { num_bytes, out_features: expected, in_features: 1 };
        let mut padded = Lines::new(num_bytes).ok_or(memory)?;
        padded.as_mut_slice::<f32>()[..found].copy_from_slice(bias);
        self.bias = Some(padded);
        Ok(())
    }

    /// Pack the rows `first_row..` of the weight, as many as `rows` has; a row that was packed before is replaced.
    ///
    /// Takes no memory in addition to the layer's own.
    ///
    /// # Errors
    ///
    /// Rows that the layer does not have or of another length, numbers that are not finite for `int8`, or inputs that have
    /// an order ([`Self::set_input_order`]). Rows that were given count as not packed then.
    pub fn pack_rows<T: WeightElement>(
        &mut self,
        first_row: usize,
        rows: Matrix<'_, T>,
        threads: &Threads,
    ) -> Result<(), LinearError> {
        if rows.num_columns != self.in_features {
            let (found, expected) = (rows.num_columns, self.in_features);
            return Err(LinearError::Length { name: "a row of the weight", found, expected });
        }
        if self.input_order.is_some() {
            return Err(LinearError::Ordered);
        }
        let given = self.give_rows(first_row, rows.num_rows)?;
        match self.kind {
            WeightKind::F32 => self.pack_each(first_row, &rows, threads, T::widen),
            WeightKind::Bf16 => self.pack_each(first_row, &rows, threads, T::narrow),
            WeightKind::F16 => self.pack_each(first_row, &rows, threads, T::half),
            WeightKind::Int8 { group_size } | WeightKind::W8A8 { group_size } => {
                return self.round_whole(group_size, first_row, &rows, threads);
            }
            WeightKind::Quantized(form) => return self.round_quantized(form, first_row, &rows, threads),
        }
        self.is_packed[given.rows].fill(true);
        self.num_packed += rows.num_rows;
        Ok(())
    }

    /// Weights without scales: each turned by `keep` into what is kept.
    fn pack_each<T: WeightElement, W: Plain>(
        &mut self,
        first_row: usize,
        rows: &Matrix<'_, T>,
        threads: &Threads,
        keep: impl Fn(T) -> W + Sync,
    ) {
        /// Inputs that are moved together: their lines stay near while they fill.
        const TOGETHER: usize = 32;
        let (panel, in_features, order) = (self.kernel.panel(), self.in_features, self.order());
        let first_panel = first_row / panel;
        let num_panels =
            if rows.num_rows == 0 { 0 } else { (first_row + rows.num_rows).div_ceil(panel) - first_panel };
        let weights = Shared(self.weights.as_mut_slice::<W>());
        let is_shared = rows.num_rows * in_features >= MIN_SHARED_WEIGHTS;
        threads.for_each(num_panels, is_shared, |index| {
            let start = (first_panel + index) * panel;
            let given = start.max(first_row)..(start + panel).min(first_row + rows.num_rows);
            // SAFETY: each panel is written by one thread.
            let weights = unsafe { weights.range(start * in_features, panel * in_features) };
            for k in (0..in_features).step_by(TOGETHER) {
                let inputs = k..in_features.min(k + TOGETHER);
                for row in given.clone() {
                    let output = row - start;
                    if order.has_pairs {
                        for k in inputs.clone() {
                            weights[order.place(k, output)] = keep(rows.get(row - first_row, k));
                        }
                        continue;
                    }
                    // An output's weights of neighbouring inputs lie a panel apart, in either kind.
                    let places = weights[order.place(k, output)..].iter_mut().step_by(panel);
                    match rows.run(row - first_row, inputs.clone()) {
                        Some(run) => places.zip(run).for_each(|(place, &x)| *place = keep(x)),
                        None => places
                            .zip(inputs.clone())
                            .for_each(|(place, k)| *place = keep(rows.get(row - first_row, k))),
                    }
                }
            }
        });
    }

    /// A row of the weight as products see it: rounded to what is kept.
    ///
    /// # Errors
    ///
    /// A row that there is not, or `out` of another length than the row.
    pub fn unpack_row(&self, row: usize, out: &mut [f32]) -> Result<(), LinearError> {
        if row >= self.out_features {
            return Err(LinearError::Rows { first: row, end: row + 1, out_features: self.out_features });
        }
        if out.len() != self.in_features {
            let (found, expected) = (out.len(), self.in_features);
            return Err(LinearError::Length { name: "out", found, expected });
        }
        let panel = self.kernel.panel();
        let start = row / panel * panel;
        if let WeightKind::Quantized(form) = self.kind {
            self.unpack_quantized(form, row, |k, weight| out[self.input_of(k)] = weight);
            return Ok(());
        }
        for k in 0..self.in_features {
            let x = &mut out[self.input_of(k)];
            let at = start * self.padded_inputs() + self.order().place(k, row - start);
            *x = match self.kind {
                WeightKind::F32 => self.weights.as_slice::<f32>()[at],
                WeightKind::Bf16 => f32::from_bits(u32::from(self.weights.as_slice::<u16>()[at]) << 16),
                WeightKind::F16 => f16::from_bits(self.weights.as_slice::<u16>()[at]).to_f32(),
                WeightKind::Int8 { group_size } | WeightKind::W8A8 { group_size } => {
                    let scale = start * self.num_groups() + k / group_size * panel + row - start;
                    f32::from(self.weights.as_slice::<i8>()[at]) * self.scales.as_slice::<f32>()[scale]
                }
                WeightKind::Quantized(_) => unreachable!("returned above"),
            };
        }
        Ok(())
    }
}

/// The order of a panel's weights.
#[derive(Clone, Copy)]
struct PanelOrder {
    kind: WeightKind,
    has_pairs: bool,
    panel: usize,
}

impl PanelOrder {
    /// Where the weight of input `k` and output `i` lies; not of [`Quantized`].
    fn place(self, k: usize, i: usize) -> usize {
        let panel = self.panel;
        let neighbours = |count: usize| k / count * count * panel + i * count + k % count;
        match self.kind {
            WeightKind::F32 | WeightKind::F16 | WeightKind::Int8 { .. } => k * panel + i,
            WeightKind::Bf16 if self.has_pairs => neighbours(2),
            WeightKind::Bf16 => k * panel + i % (panel / 2) * 2 + i / (panel / 2),
            WeightKind::W8A8 { .. } | WeightKind::Quantized(_) => neighbours(QUAD),
        }
    }
}

/// A slice of which threads write different places.
struct Shared<'a, T>(&'a mut [T]);

// SAFETY: see its functions: no place is written by two threads.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<T> Shared<'_, T> {
    /// # Safety
    ///
    /// No other thread touches these elements meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that ranges do not overlap")]
    unsafe fn range(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start + len <= self.0.len());
        // SAFETY: the range was checked to lie within the slice; the caller lets no other thread touch these elements
        // meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr().cast_mut().add(start), len) }
    }
}
