//! What follows a product while its sums are near: bias, activation, residual, and the step to the output's type.

#![allow(clippy::inline_always, reason = "see `simd`")]

use half::bf16;

use crate::{
    linear::panel::PANEL_VECTORS,
    number::Number,
    simd::{Simd, exp},
};

/// A function applied to each output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Activation {
    /// As it is.
    #[default]
    None,
    /// `max(x, 0)`.
    Relu,
    /// `x · σ(x)`.
    Silu,
    /// `x · Φ(x)` with the normal distribution, to within 3·10⁻⁷ of |x|.
    GeluErf,
    /// Its approximation through tanh, to within 3·10⁻⁷ of |x|.
    GeluTanh,
    /// Of gpt-oss's gates: `min(x, 7) · σ(1.702 · min(x, 7))`; the features that they multiply are changed, too, see
    /// [`Self::features`].
    ClampedSilu,
}

/// Beyond, gates and features of [`Activation::ClampedSilu`] are cut.
const LIMIT: f32 = 7.0;
/// What a gate of [`Activation::ClampedSilu`] is multiplied by before σ.
const ALPHA: f32 = 1.702;

impl Activation {
    /// All, with the names that Python calls them by.
    pub const NAMES: [(&'static str, Self); 6] = [
        ("none", Self::None),
        ("relu", Self::Relu),
        ("silu", Self::Silu),
        ("gelu_erf", Self::GeluErf),
        ("gelu_tanh", Self::GeluTanh),
        ("clamped_silu", Self::ClampedSilu),
    ];

    /// # Safety
    ///
    /// See [`Simd`].
    #[inline(always)]
    pub(crate) unsafe fn apply<S: Simd>(self, x: S::V) -> S::V {
        // SAFETY: the caller found the machine to have the instructions of `S`; no memory is touched.
        unsafe {
            match self {
                Self::None => x,
                // `max` gives its second operand when that is NaN.
                Self::Relu => S::max(S::splat(0.0), x),
                Self::Silu => silu::<S>(x, x),
                Self::GeluErf => S::mul(x, normal::<S>(x)),
                Self::GeluTanh => {
                    // ½ (1 + tanh u) = σ(2u)
                    let cubic = S::mul(S::mul(x, x), x);
                    let u = S::fma(cubic, S::splat(0.044_715), x);
                    silu::<S>(x, S::mul(u, S::splat(2.0 * SQRT_2_OVER_PI)))
                }
                Self::ClampedSilu => {
                    let x = S::min(S::splat(LIMIT), x);
                    silu::<S>(x, S::mul(x, S::splat(ALPHA)))
                }
            }
        }
    }

    /// What a gate with this activation multiplies, made of the feature: with [`Self::ClampedSilu`]
    /// `min(max(x, −7), 7) + 1`, otherwise the feature itself.
    ///
    /// # Safety
    ///
    /// See [`Simd`].
    #[inline(always)]
    pub(crate) unsafe fn features<S: Simd>(self, x: S::V) -> S::V {
        if self != Self::ClampedSilu {
            return x;
        }
        // SAFETY: the caller found the machine to have the instructions of `S`; no memory is touched.
        unsafe {
            // Both give their second operand when that is NaN.
            let cut = S::min(S::splat(LIMIT), S::max(S::splat(-LIMIT), x));
            S::add(cut, S::splat(1.0))
        }
    }
}

/// √(2/π)
const SQRT_2_OVER_PI: f32 = 0.797_884_6;

/// `x · σ(y)`
///
/// # Safety
///
/// See [`Simd`].
#[inline(always)]
unsafe fn silu<S: Simd>(x: S::V, y: S::V) -> S::V {
    // SAFETY: the caller found the machine to have the instructions of `S`; no memory is touched.
    unsafe {
        let e = exp::<S>(S::mul(y, S::splat(-1.0)));
        S::div(x, S::add(S::splat(1.0), e))
    }
}

/// Up to here Φ is summed as an odd polynomial about 0, beyond as an exponential: ln Φ(−t) + t²/2 is nearly straight.
const TAIL: f32 = 1.0;
/// Beyond, Φ(−t) is as good as 0 compared with the 10⁻⁷ that is promised.
const END: f32 = 6.0;
/// (Φ(t) − ½) / t in t² on [0, 1], highest power first: a weighted minimax fit, off by 7·10⁻¹⁰ of itself.
const BODY: [f32; 6] =
    [-7.654_207e-6, 1.134_863_7e-4, -1.186_33e-3, 9.973_323e-3, -6.649_036e-2, 3.989_423e-1];
/// ln Φ(−t) + t²/2 in t on [1, 6], highest power first: a minimax fit, off by 4.5·10⁻⁸.
const TAIL_LOGARITHM: [f32; 9] = [
    9.265_209e-8,
    -3.801_869_3e-6,
    7.141_726_4e-5,
    -8.205_345e-4,
    6.522_785_4e-3,
    -3.871_78e-2,
    1.837_914_7e-1,
    -7.989_579e-1,
    -6.929_073_3e-1,
];

/// Φ(x), the normal distribution.
///
/// # Safety
///
/// See [`Simd`].
#[inline(always)]
unsafe fn normal<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller found the machine to have the instructions of `S`; no memory is touched.
    unsafe {
        let zero = S::splat(0.0);
        let t = S::min(S::splat(END), S::max(x, S::mul(x, S::splat(-1.0))));
        let squared = S::mul(t, t);
        let body = S::mul(t, polynomial::<S, 6>(squared, &BODY));
        let logarithm = S::fma(squared, S::splat(-0.5), polynomial::<S, 9>(t, &TAIL_LOGARITHM));
        let tail = exp::<S>(logarithm);
        // Φ(−t), from one of the two; what is kept or left is whole, so the sums are exact.
        let half = S::splat(0.5);
        let limit = S::splat(TAIL);
        let near = S::fma(body, S::splat(-1.0), half);
        let minus = |a: S::V, b: S::V| S::fma(b, S::splat(-1.0), a);
        let near = minus(near, S::zero_below(t, limit, near));
        let lower = S::add(near, S::zero_below(t, limit, tail));
        // Φ(t) where x is not negative.
        let upper = minus(S::splat(1.0), lower);
        let kept = S::zero_below(x, zero, upper);
        let left = minus(lower, S::zero_below(x, zero, lower));
        S::add(kept, left)
    }
}

/// # Safety
///
/// See [`Simd`].
#[inline(always)]
unsafe fn polynomial<S: Simd, const N: usize>(x: S::V, coefficients: &[f32; N]) -> S::V {
    // SAFETY: the caller found the machine to have the instructions of `S`; no memory is touched.
    unsafe {
        let mut sum = S::splat(coefficients[0]);
        let mut i = 1;
        while i < N {
            sum = S::fma(sum, x, S::splat(coefficients[i]));
            i += 1;
        }
        sum
    }
}

/// Sums of one panel, and where they go.
pub(crate) struct Finish<O> {
    /// `[row][output]`, as the product left them.
    pub(crate) sums: *const f32,
    pub(crate) num_rows: usize,
    /// Outputs of the panel that there are: the last panel may have fewer than it has room for.
    pub(crate) num_outputs: usize,
    /// Room for all outputs of the panel; null: none.
    pub(crate) bias: *const f32,
    pub(crate) activation: Activation,
    /// First row's first output of this panel, and elements from row to row; null: none. May be `out` itself.
    pub(crate) residual: *const O,
    pub(crate) residual_stride: usize,
    pub(crate) out: *mut O,
    pub(crate) out_stride: usize,
}

/// One compiled form of [`finish`].
pub(crate) type FinishFn<O> = unsafe fn(&Finish<O>);

/// # Safety
///
/// The arrays are as [`Finish`] says; the machine has the instructions of `S`.
#[inline(always)]
unsafe fn finish<S: Simd, O: Number>(what: &Finish<O>) {
    let outputs = PANEL_VECTORS * S::LANES;
    for row in 0..what.num_rows {
        for first in (0..what.num_outputs).step_by(S::LANES) {
            // SAFETY: the caller gives arrays as `Finish` says and has found the instructions of `S`; a vector that is
            // not full goes through a place with room for all lanes.
            unsafe {
                let mut x = S::load(what.sums.add(row * outputs + first));
                if !what.bias.is_null() {
                    x = S::add(x, S::load(what.bias.add(first)));
                }
                x = what.activation.apply::<S>(x);
                let out = what.out.add(row * what.out_stride + first);
                let count = what.num_outputs - first;
                if count >= S::LANES {
                    if !what.residual.is_null() {
                        let residual = O::load::<S>(what.residual.add(row * what.residual_stride + first));
                        x = S::add(x, residual);
                    }
                    O::store::<S>(out, x);
                    continue;
                }
                let mut room = [O::narrow(0.0); MAX_LANES];
                if !what.residual.is_null() {
                    let residual = what.residual.add(row * what.residual_stride + first);
                    room.as_mut_ptr().copy_from_nonoverlapping(residual, count);
                    x = S::add(x, O::load::<S>(room.as_ptr()));
                }
                O::store::<S>(room.as_mut_ptr(), x);
                out.copy_from_nonoverlapping(room.as_ptr(), count);
            }
        }
    }
}

/// The most lanes that any instruction set has.
const MAX_LANES: usize = 16;

/// Entry points: the one place where it gets its instruction set.
macro_rules! entry_points {
    ($f32:ident, $bf16:ident, $simd:ty $(, $features:literal)?) => {
        /// # Safety
        ///
        /// See [`finish`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $f32(what: &Finish<f32>) {
            const { assert!(<$simd>::LANES <= MAX_LANES) };
            // SAFETY: the caller gives arrays as `Finish` says; `Kernel::available` lists this form only where its
            // instructions were found.
            unsafe { finish::<$simd, f32>(what) }
        }
        /// # Safety
        ///
        /// See [`finish`].
        $(#[target_feature(enable = $features)])?
        pub(crate) unsafe fn $bf16(what: &Finish<bf16>) {
            // SAFETY: the caller gives arrays as `Finish` says; `Kernel::available` lists this form only where its
            // instructions were found.
            unsafe { finish::<$simd, bf16>(what) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
entry_points!(avx512_f32, avx512_bf16, crate::simd::avx512::Avx512, "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
entry_points!(avx2_f32, avx2_bf16, crate::simd::avx2::Avx2, "avx2,fma");
entry_points!(portable_f32, portable_bf16, crate::simd::portable::Portable<8>);
entry_points!(scalar_f32, scalar_bf16, crate::simd::portable::Portable<1>);
