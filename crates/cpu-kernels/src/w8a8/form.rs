//! The compiled forms of the product, and the check without which none is used: on the processor that it runs on, before its
//! first use, its sums of a small product must be those of plain code, bit for bit.

use std::{sync::OnceLock, time::Instant};

use half::f16;

#[cfg(target_arch = "x86_64")]
use super::{
    dot::{Avx2Dot, Vnni256Dot, Vnni512Dot},
    unit,
};
use super::{
    dot::{Dot, PortableDot, QUAD},
    product::{LINE, Product, ProductFn, VECTORS, product},
};
use crate::simd::Simd;
#[cfg(target_arch = "x86_64")]
use crate::simd::{amx, instructions};

/// What a product's weights are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Variant {
    /// Inputs of a block, 16 or 32; of 4 bits 32.
    pub(crate) block: usize,
    /// Of a weight: 4, 6 or 8.
    pub(crate) bits: u8,
    /// What groups have.
    pub(crate) groups: Groups,
    /// Whether weights of 4 bits are codes; their groups have scales alone.
    pub(crate) is_coded: bool,
}

/// What the groups of a weight have as the product reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Groups {
    /// A scale of 32 bits.
    Scales,
    /// A scale of 32 bits and a minimum; not of 6 bits.
    Minima,
    /// A scale of 16 bits; not of 6 bits.
    NarrowScales,
}

impl Variant {
    fn index(self) -> usize {
        if self.is_coded {
            return NUM_VARIANTS - 1;
        }
        let first = match (self.bits, self.block) {
            (6, _) => return 9,
            (4, _) => 6,
            (_, 16) => 0,
            _ => 3,
        };
        self.groups as usize + first
    }

    fn all() -> impl Iterator<Item = Self> {
        let blocks = [(16, 8), (32, 8), (32, 4)];
        let each = |(block, bits)| {
            let all = [Groups::Scales, Groups::Minima, Groups::NarrowScales];
            all.map(|groups| Self { block, bits, groups, is_coded: false })
        };
        let sixes = Self { block: 16, bits: 6, groups: Groups::Scales, is_coded: false };
        let coded = Self { block: 32, bits: 4, is_coded: true, ..sixes };
        blocks.into_iter().flat_map(each).chain([sixes, coded])
    }
}

/// Of each [`Variant`]: entry `r − 1` takes `r` rows; none where the form has no such product.
type Products = [&'static [ProductFn]; NUM_VARIANTS];
const NUM_VARIANTS: usize = 11;
/// Rows whose sums and totals both fit the registers of AVX-512, of [`VECTORS`] vectors of outputs; a divisor of the most.
const NARROW_ROWS: usize = 6;

/// A form of the product for one instruction set.
#[derive(Debug)]
pub(crate) struct Form {
    pub(crate) name: &'static str,
    is_detected: fn() -> bool,
    /// Rows below which another form is faster.
    least_rows: usize,
    /// Whether one product takes any number of rows.
    pub(super) takes_any_rows: bool,
    products: Products,
    /// Outputs that are computed at once.
    outputs: usize,
    is_right: OnceLock<bool>,
    /// Of each [`Variant`]: whether many rows are computed faster as many at once as there are products for.
    wide: [OnceLock<bool>; NUM_VARIANTS],
}

impl Form {
    /// Whether a vector of weights of 8 bits is a line, so that few instructions go with each.
    pub(crate) fn reads_lines(&self) -> bool {
        self.outputs * QUAD == VECTORS * LINE
    }

    /// The most rows of so many that are computed at once. A row's bits do not depend on it.
    pub(crate) fn tile_rows(&self, variant: Variant, num_rows: usize) -> usize {
        if self.takes_any_rows {
            return usize::MAX;
        }
        let most = self.products(variant).len();
        // Weights of 8 bits come from memory more slowly than few rows are multiplied: those are better read once.
        let reads_once = num_rows <= most && variant.bits > 4;
        if num_rows <= NARROW_ROWS || most <= NARROW_ROWS || reads_once || self.is_wide_faster(variant) {
            most
        } else {
            NARROW_ROWS
        }
    }

    /// Whether the most rows at once take less time than [`NARROW_ROWS`] after each other; measured once, in 0.2 ms, over
    /// weights in the first cache.
    fn is_wide_faster(&self, variant: Variant) -> bool {
        const TRIES: usize = 16;
        const REPEATS: usize = 16;
        *self.wide[variant.index()].get_or_init(|| {
            let products = self.products(variant);
            let most = products.len();
            let mut trial = Trial::new(most, variant, 1);
            let mut time = |rows: usize| {
                let begin = Instant::now();
                for _ in 0..REPEATS {
                    for first in (0..most).step_by(rows) {
                        trial.sums(products[rows - 1], first, rows);
                    }
                }
                begin.elapsed()
            };
            // Other work only adds to a time, so the least says most.
            let times: Vec<_> = (0..TRIES).map(|_| [most, NARROW_ROWS].map(&mut time)).collect();
            let least = |which: usize| times.iter().map(|pair| pair[which]).min();
            least(0) <= least(1)
        })
    }

    /// The product for a number of rows, up to [`Self::tile_rows`].
    pub(crate) fn product(&self, variant: Variant, num_rows: usize) -> ProductFn {
        self.products(variant)[if self.takes_any_rows { 0 } else { num_rows - 1 }]
    }

    /// How often the product goes through a panel.
    pub(crate) fn passes(&self, panel: usize) -> usize {
        // Without a division where it is once.
        if panel == self.outputs { 1 } else { panel / self.outputs }
    }

    /// Whether it has a product for some weights.
    pub(crate) fn takes(&self, variant: Variant) -> bool {
        !self.products(variant).is_empty()
    }

    /// For some weights.
    fn products(&self, variant: Variant) -> &'static [ProductFn] {
        self.products[variant.index()]
    }

    /// Whether it computes what plain code computes; tried once.
    fn is_right(&self) -> bool {
        *self.is_right.get_or_init(|| {
            Variant::all().filter(|variant| self.takes(*variant)).all(|variant| {
                let each: Vec<usize> = (1..=self.products(variant).len()).collect();
                let rows = if self.takes_any_rows { &[1, 16, 19] } else { each.as_slice() };
                let plain = SCALAR.products(variant)[0];
                // Where each block is a group sums take another way than where several are.
                let each = rows.iter().flat_map(|&num_rows| [(num_rows, 1), (num_rows, 3)]);
                // So do those of a row that asks for later weights, and of one that does not.
                let each = each.flat_map(|(num_rows, blocks)| [0, LINE].map(|step| (num_rows, blocks, step)));
                each.into_iter().all(|(num_rows, blocks_per_group, near_step)| {
                    let mut trial = Trial::new(num_rows, variant, blocks_per_group);
                    trial.near_step = near_step;
                    let found = trial.sums(self.product(variant, num_rows), 0, num_rows).to_vec();
                    let is_same = |(found, expected): (&f32, &f32)| found.to_bits() == expected.to_bits();
                    (0..num_rows).all(|row| {
                        found[row * TRIAL_PANEL..].iter().zip(trial.sums(plain, row, 1)).all(is_same)
                    })
                })
            })
        })
    }
}

/// Forms for panels of each kernel, best first; the last one needs no instructions that a machine may lack.
#[cfg(target_arch = "x86_64")]
pub(crate) static FOR_AVX512: &[&Form] = &[&UNIT, &VNNI_512, &VNNI_256, &AVX2, &PORTABLE];
#[cfg(target_arch = "x86_64")]
pub(crate) static FOR_AVX2: &[&Form] = &[&VNNI_256, &AVX2, &PORTABLE];
pub(crate) static FOR_PORTABLE: &[&Form] = &[&PORTABLE];
pub(crate) static FOR_SCALAR: &[&Form] = &[&SCALAR];

/// The first of some forms for so many rows that the machine has and that is right; the last one, of plain code, in any case.
pub(crate) fn chosen(forms: &'static [&'static Form], num_rows: usize, variant: Variant) -> &'static Form {
    let last = forms[forms.len() - 1];
    let fits = |form: &&Form| {
        num_rows >= form.least_rows && form.takes(variant) && (form.is_detected)() && form.is_right()
    };
    forms.iter().copied().find(fits).unwrap_or(last)
}

/// Names of the forms that the machine should have but that compute something else there.
pub(crate) fn refused(forms: &'static [&'static Form]) -> Vec<&'static str> {
    forms.iter().filter(|form| (form.is_detected)() && !form.is_right()).map(|form| form.name).collect()
}

/// Outputs of the product that is tried: a panel for AVX-512, and a multiple of two vectors of any form.
const TRIAL_PANEL: usize = 32;
const TRIAL_BLOCKS: usize = 11;

/// A small product, whose numbers are the largest and the smallest ones, and others between.
struct Trial {
    num_rows: usize,
    variant: Variant,
    blocks_per_group: usize,
    /// See [`Product`].
    near_step: usize,
    weights: Vec<i8>,
    weight_scales: Vec<u8>,
    weight_mins: Vec<f32>,
    numbers: Vec<i8>,
    scales: Vec<f32>,
    starts: Vec<i32>,
    group_sums: Vec<f32>,
    sums: Vec<f32>,
}

impl Trial {
    fn new(num_rows: usize, variant: Variant, blocks_per_group: usize) -> Self {
        const EXTREMES: [i8; 6] = [-128, 127, -127, -1, 0, 1];
        let Variant { block, groups: kind, .. } = variant;
        let mut state = 1_u32;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            if state >> 30 == 0 {
                EXTREMES[(state >> 16) as usize % EXTREMES.len()]
            } else {
                (state >> 20) as i8
            }
        };
        let weights = (0..TRIAL_BLOCKS * block * TRIAL_PANEL).map(|_| byte()).collect();
        let numbers: Vec<i8> = (0..TRIAL_BLOCKS * num_rows * block).map(|_| byte().max(-127)).collect();
        let scales = (0..TRIAL_BLOCKS * num_rows).map(|_| f32::from(byte()) / 37.0).collect();
        let sum = |block: &[i8]| block.iter().map(|&number| i32::from(number)).sum::<i32>();
        let starts = numbers.chunks(block).map(|block| -128 * sum(block)).collect();
        let groups = TRIAL_BLOCKS.div_ceil(blocks_per_group);
        let weight_scales = (0..groups * TRIAL_PANEL)
            .flat_map(|_| {
                let scale = f32::from(byte()) / 91.0;
                let narrow = f16::from_f32(scale).to_le_bytes().to_vec();
                if kind == Groups::NarrowScales { narrow } else { scale.to_le_bytes().to_vec() }
            })
            .collect();
        let weight_mins = (0..groups * TRIAL_PANEL).map(|_| f32::from(byte()) / 17.0).collect();
        let group_sums = (0..groups * num_rows).map(|_| f32::from(byte()) / 3.0).collect();
        let sums = vec![0.0; num_rows * TRIAL_PANEL];
        Self {
            num_rows,
            variant,
            blocks_per_group,
            near_step: LINE,
            weights,
            weight_scales,
            weight_mins,
            numbers,
            scales,
            starts,
            group_sums,
            sums,
        }
    }

    /// The sums of some rows.
    fn sums(&mut self, product: ProductFn, first: usize, count: usize) -> &[f32] {
        assert!(first + count <= self.num_rows, "rows that there are");
        let block = self.variant.block;
        let what = Product {
            numbers: self.numbers[first * block..].as_ptr(),
            scales: self.scales[first..].as_ptr(),
            starts: self.starts[first..].as_ptr(),
            group_sums: self.group_sums[first..].as_ptr(),
            num_rows: count,
            row_stride: self.num_rows,
            num_blocks: TRIAL_BLOCKS,
            blocks_per_group: self.blocks_per_group,
            weights: self.weights.as_ptr().cast(),
            panel: TRIAL_PANEL,
            weight_scales: self.weight_scales.as_ptr(),
            weight_mins: self.weight_mins.as_ptr(),
            sums: self.sums.as_mut_ptr(),
            is_first: true,
            ahead: self.weights.as_ptr().cast(),
            ahead_step: 0,
            ahead_pass: 0,
            near: 0,
            near_step: self.near_step,
            scales_ahead: self.weights.as_ptr().cast(),
            scales_ahead_step: 0,
        };
        // SAFETY: the arrays have as many blocks and groups as `what` says, and the rows, as was checked; a form is tried only
        // where its instructions were found.
        unsafe { product(&what) };
        &self.sums[..count * TRIAL_PANEL]
    }
}

/// Entry points: the one place where a product gets its instruction set.
macro_rules! forms {
    (
        $static:ident, $module:ident, $name:literal, $dot:ty, [$($rows:literal)*], $is_detected:expr
        $(, $features:literal)?
    ) => {
        mod $module {
            use super::*;
            /// # Safety
            ///
            /// See [`product`].
            $(#[target_feature(enable = $features)])?
            unsafe fn rows<
                const ROWS: usize,
                const BLOCK: usize,
                const BITS: u8,
                const MINS: bool,
                const NARROW: bool,
                const CODED: bool,
            >(
                what: &Product,
            ) {
                // SAFETY: the caller gives arrays as `Product` says; a form is used only where its instructions were found.
                unsafe { product::<$dot, ROWS, BLOCK, BITS, MINS, NARROW, CODED>(what) }
            }
            pub(super) static PRODUCTS: Products = [
                &[$(rows::<$rows, 16, 8, false, false, false>),*],
                &[$(rows::<$rows, 16, 8, true, false, false>),*],
                &[$(rows::<$rows, 16, 8, false, true, false>),*],
                &[$(rows::<$rows, 32, 8, false, false, false>),*],
                &[$(rows::<$rows, 32, 8, true, false, false>),*],
                &[$(rows::<$rows, 32, 8, false, true, false>),*],
                &[$(rows::<$rows, 32, 4, false, false, false>),*],
                &[$(rows::<$rows, 32, 4, true, false, false>),*],
                &[$(rows::<$rows, 32, 4, false, true, false>),*],
                &[$(rows::<$rows, 16, 6, false, false, false>),*],
                &[$(rows::<$rows, 32, 4, false, false, true>),*],
            ];
        }
        static $static: Form = Form {
            name: $name,
            is_detected: $is_detected,
            least_rows: 1,
            takes_any_rows: false,
            products: $module::PRODUCTS,
            outputs: VECTORS * <<$dot as Dot>::Lanes as Simd>::LANES,
            is_right: OnceLock::new(),
            wide: [const { OnceLock::new() }; NUM_VARIANTS],
        };
    };
}

#[cfg(target_arch = "x86_64")]
static UNIT: Form = Form {
    name: "amx-int8",
    is_detected: amx::multiplies_whole_numbers,
    least_rows: 10,
    takes_any_rows: true,
    products: [
        &[unit::product::<16, 8, false>],
        &[unit::product::<16, 8, true>],
        &[],
        &[unit::product::<32, 8, false>],
        &[unit::product::<32, 8, true>],
        &[],
        &[unit::product::<32, 4, false>],
        &[unit::product::<32, 4, true>],
        &[],
        &[unit::product::<16, 6, false>],
        &[],
    ],
    outputs: unit::PANEL,
    is_right: OnceLock::new(),
    wide: [const { OnceLock::new() }; NUM_VARIANTS],
};
#[cfg(target_arch = "x86_64")]
forms!(
    VNNI_512,
    vnni_512,
    "avx512-vnni",
    Vnni512Dot,
    [1 2 3 4 5 6 7 8 9 10 11 12],
    instructions::have_avx512_vnni,
    "avx512f,avx512bw,avx512vnni,avx2,fma"
);
#[cfg(target_arch = "x86_64")]
forms!(
    VNNI_256,
    vnni_256,
    "avx-vnni",
    Vnni256Dot,
    [1 2 3 4],
    instructions::have_avx_vnni,
    "avxvnni,avx2,fma,f16c"
);
#[cfg(target_arch = "x86_64")]
forms!(AVX2, avx2, "avx2", Avx2Dot, [1 2 3 4], instructions::have_avx2, "avx2,fma,f16c");
forms!(PORTABLE, portable, "portable", PortableDot<8>, [1 2], || true);
forms!(SCALAR, scalar, "scalar", PortableDot<1>, [1], || true);

#[cfg(test)]
mod tests {
    use super::*;

    /// A product that is right but for one sum of the last row.
    unsafe fn off_by_one<const ROWS: usize, const MINS: bool>(what: &Product) {
        // SAFETY: the caller gives arrays as `Product` says, and the sums have `ROWS` rows.
        unsafe {
            product::<PortableDot<8>, ROWS, 32, 4, MINS, false, false>(what);
            if ROWS == 2 {
                *what.sums.add(what.panel + 3) += 1.0;
            }
        }
    }

    /// A product of one row that is right unless it asks for later weights.
    unsafe fn off_where_it_asks(what: &Product) {
        // SAFETY: the caller gives arrays as `Product` says, and the sums have a row.
        unsafe {
            product::<PortableDot<8>, 1, 32, 8, false, false, false>(what);
            if what.near_step > 0 {
                *what.sums += 1.0;
            }
        }
    }

    const fn wrong(name: &'static str, products: Products) -> Form {
        Form {
            name,
            is_detected: || true,
            least_rows: 1,
            takes_any_rows: false,
            products,
            outputs: 16,
            is_right: OnceLock::new(),
            wide: [const { OnceLock::new() }; NUM_VARIANTS],
        }
    }

    static WRONG: Form = wrong("wrong", {
        let mut products: Products = [&[]; NUM_VARIANTS];
        products[6] = &[off_by_one::<1, false>, off_by_one::<2, false>];
        products
    });
    static WRONG_ASKING: Form = wrong("wrong where it asks", {
        let mut products: Products = [&[]; NUM_VARIANTS];
        products[3] = &[off_where_it_asks];
        products
    });
    static ABSENT: Form = Form {
        name: "absent",
        is_detected: || false,
        least_rows: 1,
        takes_any_rows: false,
        products: [&[]; NUM_VARIANTS],
        outputs: 16,
        is_right: OnceLock::new(),
        wide: [const { OnceLock::new() }; NUM_VARIANTS],
    };

    #[test]
    fn a_form_that_computes_something_else_is_not_used() {
        static FORMS: &[&Form] = &[&ABSENT, &WRONG, &PORTABLE];
        static ASKING: &[&Form] = &[&WRONG_ASKING, &PORTABLE];
        let variant = Variant { block: 32, bits: 4, groups: Groups::Scales, is_coded: false };
        assert_eq!(chosen(FORMS, 1, variant).name, "portable");
        assert_eq!(refused(FORMS), ["wrong"]);
        assert_eq!(chosen(ASKING, 1, Variant { bits: 8, ..variant }).name, "portable");
        assert!(ABSENT.is_right.get().is_none(), "instructions that the machine lacks were tried");
    }

    #[test]
    fn every_form_of_this_machine_is_right() {
        for forms in [FOR_PORTABLE, FOR_SCALAR] {
            assert!(refused(forms).is_empty());
        }
        #[cfg(target_arch = "x86_64")]
        for forms in [FOR_AVX512, FOR_AVX2] {
            assert!(refused(forms).is_empty());
            let best = forms.iter().find(|form| (form.is_detected)()).map(|form| form.name);
            let variant = Variant { block: 32, bits: 8, groups: Groups::Scales, is_coded: false };
            assert_eq!(Some(chosen(forms, usize::MAX, variant).name), best);
        }
    }
}
