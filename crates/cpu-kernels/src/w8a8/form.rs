//! The compiled forms of the product, and the check without which none is used: on the processor that it runs on, before its
//! first use, its sums of a small product must be those of plain code, bit for bit.

use std::sync::OnceLock;

use super::{
    dot::PortableDot,
    product::{Product, ProductFn, product},
};
#[cfg(target_arch = "x86_64")]
use super::{
    dot::{Avx2Dot, Vnni256Dot, Vnni512Dot},
    unit,
};
#[cfg(target_arch = "x86_64")]
use crate::{amx, instructions};

/// A form of the product for one instruction set.
#[derive(Debug)]
pub(crate) struct Form {
    pub(crate) name: &'static str,
    is_detected: fn() -> bool,
    /// Rows below which another form is faster.
    least_rows: usize,
    /// Entry `r − 1` takes `r` rows; in blocks of 16 inputs, and of 32.
    by_16: &'static [ProductFn],
    by_32: &'static [ProductFn],
    is_right: OnceLock<bool>,
}

impl Form {
    /// For blocks of 16 or 32 inputs.
    pub(crate) fn products(&self, block: usize) -> &'static [ProductFn] {
        if block == 16 { self.by_16 } else { self.by_32 }
    }

    /// Whether it computes what plain code computes; tried once.
    fn is_right(&self) -> bool {
        *self.is_right.get_or_init(|| {
            [16, 32].into_iter().all(|block| {
                let products = self.products(block);
                (1..=products.len()).all(|num_rows| {
                    let found = trial(products[num_rows - 1], num_rows, block);
                    let expected: Vec<u32> = (0..num_rows)
                        .flat_map(|row| trial_row(SCALAR.products(block)[0], row, num_rows, block))
                        .collect();
                    found == expected
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
pub(crate) fn chosen(forms: &'static [&'static Form], num_rows: usize) -> &'static Form {
    let last = forms[forms.len() - 1];
    let fits = |form: &&Form| num_rows >= form.least_rows && (form.is_detected)() && form.is_right();
    forms.iter().copied().find(fits).unwrap_or(last)
}

/// Names of the forms that the machine should have but that compute something else there.
pub(crate) fn refused(forms: &'static [&'static Form]) -> Vec<&'static str> {
    forms.iter().filter(|form| (form.is_detected)() && !form.is_right()).map(|form| form.name).collect()
}

/// Outputs of the product that is tried: a panel for AVX-512, and a multiple of two vectors of any form.
const TRIAL_PANEL: usize = 32;
const TRIAL_BLOCKS: usize = 5;
const TRIAL_BLOCKS_PER_GROUP: usize = 2;

/// Bits of a small product's sums, whose numbers are the largest and the smallest ones, and others between.
fn trial(product: ProductFn, num_rows: usize, block: usize) -> Vec<u32> {
    trial_rows(product, 0, num_rows, num_rows, block)
}

/// One row of the same product.
fn trial_row(product: ProductFn, row: usize, num_rows: usize, block: usize) -> Vec<u32> {
    trial_rows(product, row, 1, num_rows, block)
}

fn trial_rows(product: ProductFn, first: usize, count: usize, num_rows: usize, block: usize) -> Vec<u32> {
    const EXTREMES: [i8; 6] = [-128, 127, -127, -1, 0, 1];
    let mut state = 1_u32;
    let mut byte = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        if state >> 30 == 0 { EXTREMES[(state >> 16) as usize % EXTREMES.len()] } else { (state >> 20) as i8 }
    };
    let weights: Vec<i8> = (0..TRIAL_BLOCKS * block * TRIAL_PANEL).map(|_| byte()).collect();
    let numbers: Vec<i8> = (0..TRIAL_BLOCKS * num_rows * block).map(|_| byte().max(-127)).collect();
    let scales: Vec<f32> = (0..TRIAL_BLOCKS * num_rows).map(|_| f32::from(byte()) / 37.0).collect();
    let sum = |block: &[i8]| block.iter().map(|&number| i32::from(number)).sum::<i32>();
    let starts: Vec<i32> = numbers.chunks(block).map(|block| -128 * sum(block)).collect();
    let groups = TRIAL_BLOCKS.div_ceil(TRIAL_BLOCKS_PER_GROUP);
    let weight_scales: Vec<f32> = (0..groups * TRIAL_PANEL).map(|_| f32::from(byte()) / 91.0).collect();
    let mut sums = vec![0.0_f32; count * TRIAL_PANEL];
    let what = Product {
        numbers: numbers[first * block..].as_ptr(),
        scales: scales[first..].as_ptr(),
        starts: starts[first..].as_ptr(),
        row_stride: num_rows,
        num_blocks: TRIAL_BLOCKS,
        blocks_per_group: TRIAL_BLOCKS_PER_GROUP,
        weights: weights.as_ptr(),
        panel: TRIAL_PANEL,
        weight_scales: weight_scales.as_ptr(),
        sums: sums.as_mut_ptr(),
        ahead: weights.as_ptr().cast(),
        ahead_step: 0,
    };
    // SAFETY: the arrays have as many blocks, rows and groups as `what` says; a form is tried only where its instructions
    // were found.
    unsafe { product(&what) };
    sums.iter().map(|sum| sum.to_bits()).collect()
}

/// Entry points: the one place where a product gets its instruction set.
macro_rules! forms {
    ($static:ident, $module:ident, $name:literal, $dot:ty, [$($rows:literal)*], $is_detected:expr $(, $features:literal)?) => {
        mod $module {
            use super::*;
            /// # Safety
            ///
            /// See [`product`].
            $(#[target_feature(enable = $features)])?
            unsafe fn rows<const ROWS: usize, const BLOCK: usize>(what: &Product) {
                // SAFETY: the caller gives arrays as `Product` says; a form is used only where its instructions were found.
                unsafe { product::<$dot, ROWS, BLOCK>(what) }
            }
            pub(super) static BY_16: &[ProductFn] = &[$(rows::<$rows, 16>),*];
            pub(super) static BY_32: &[ProductFn] = &[$(rows::<$rows, 32>),*];
        }
        static $static: Form = Form {
            name: $name,
            is_detected: $is_detected,
            least_rows: 1,
            by_16: $module::BY_16,
            by_32: $module::BY_32,
            is_right: OnceLock::new(),
        };
    };
}

#[cfg(target_arch = "x86_64")]
macro_rules! unit_products {
    ($block:literal: $($rows:literal)*) => { &[$(unit::product::<$rows, $block>),*] };
}

#[cfg(target_arch = "x86_64")]
static UNIT: Form = Form {
    name: "amx-int8",
    is_detected: amx::multiplies_whole_numbers,
    least_rows: 10,
    by_16: unit_products!(16: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16),
    by_32: unit_products!(32: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16),
    is_right: OnceLock::new(),
};
#[cfg(target_arch = "x86_64")]
forms!(
    VNNI_512,
    vnni_512,
    "avx512-vnni",
    Vnni512Dot,
    [1 2 3 4 5 6],
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
    "avxvnni,avx2,fma"
);
#[cfg(target_arch = "x86_64")]
forms!(AVX2, avx2, "avx2", Avx2Dot, [1 2 3 4], instructions::have_avx2, "avx2,fma");
forms!(PORTABLE, portable, "portable", PortableDot<8>, [1 2], || true);
forms!(SCALAR, scalar, "scalar", PortableDot<1>, [1], || true);

#[cfg(test)]
mod tests {
    use super::*;

    /// A product that is right but for one sum of the last row.
    unsafe fn off_by_one<const ROWS: usize, const BLOCK: usize>(what: &Product) {
        // SAFETY: the caller gives arrays as `Product` says, and the sums have `ROWS` rows.
        unsafe {
            product::<PortableDot<8>, ROWS, BLOCK>(what);
            if ROWS == 2 {
                *what.sums.add(what.panel + 3) += 1.0;
            }
        }
    }

    static WRONG: Form = Form {
        name: "wrong",
        is_detected: || true,
        least_rows: 1,
        by_16: &[off_by_one::<1, 16>, off_by_one::<2, 16>],
        by_32: &[off_by_one::<1, 32>, off_by_one::<2, 32>],
        is_right: OnceLock::new(),
    };
    static ABSENT: Form = Form {
        name: "absent",
        is_detected: || false,
        least_rows: 1,
        by_16: &[],
        by_32: &[],
        is_right: OnceLock::new(),
    };

    #[test]
    fn a_form_that_computes_something_else_is_not_used() {
        static FORMS: &[&Form] = &[&ABSENT, &WRONG, &PORTABLE];
        assert_eq!(chosen(FORMS, 1).name, "portable");
        assert_eq!(refused(FORMS), ["wrong"]);
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
            assert_eq!(Some(chosen(forms, usize::MAX).name), best);
        }
    }
}
