//! Which instruction sets the kernels use: those that the processor has, up to a level that the environment may lower.
//!
//! Each check is made once: a virtual machine may take microseconds to say what its processor has.

use std::sync::LazyLock;

/// The variable that lowers the level. Python refuses other values.
const VARIABLE: &str = "RUSTVLLM_CPU_INSTRUCTIONS";

/// Levels, each with all that come before it.
const LEVELS: [&str; 7] = ["portable", "avx2", "avx-vnni", "avx512", "avx512-vnni", "avx512-bf16", "amx"];

/// Whether the environment allows a level.
fn allows(level: &str) -> bool {
    static MOST: LazyLock<usize> = LazyLock::new(|| {
        let name = std::env::var(VARIABLE).unwrap_or_default().trim().to_ascii_lowercase();
        LEVELS.iter().position(|level| *level == name).unwrap_or(LEVELS.len() - 1)
    });
    LEVELS.iter().position(|name| *name == level).is_some_and(|level| level <= *MOST)
}

macro_rules! checks {
    ($($(#[doc = $doc:literal])+ $name:ident: $level:literal, [$($feature:tt)+];)*) => {
        $(
            $(#[doc = $doc])+
            #[cfg(target_arch = "x86_64")]
            pub(crate) fn $name() -> bool {
                static FOUND: LazyLock<bool> =
                    LazyLock::new(|| allows($level) $(&& is_x86_feature_detected!($feature))+);
                *FOUND
            }
        )*
    };
}

checks! {
    /// AVX2, and with it FMA and the widening of numbers of 16 bits.
    have_avx2: "avx2", ["avx2" "fma" "f16c"];
    /// The products of whole numbers of processors without AVX-512.
    have_avx_vnni: "avx-vnni", ["avx2" "fma" "f16c" "avxvnni"];
    /// The foundation of AVX-512.
    have_avx512: "avx512", ["avx512f" "avx2" "fma"];
    /// Products of whole numbers with AVX-512.
    have_avx512_vnni: "avx512-vnni", ["avx512f" "avx512bw" "avx512vl" "avx512vnni" "avx2" "fma"];
    /// Products of numbers of 16 bits with AVX-512.
    have_avx512_bf16: "avx512-bf16", ["avx512f" "avx512bw" "avx512bf16" "avx2" "fma"];
}

/// The matrix unit for `bf16`; the system must permit its registers, too.
#[cfg(target_arch = "x86_64")]
pub(crate) fn have_amx() -> bool {
    /// CPUID leaf 7, EDX: `amx-bf16` and `amx-tile`.
    const FEATURES: u32 = 1 << 22 | 1 << 24;
    allows("amx") && have_avx512() && std::arch::x86_64::__cpuid_count(7, 0).edx & FEATURES == FEATURES
}

/// The matrix unit for whole numbers of 8 bits, where there is one for `bf16`.
#[cfg(target_arch = "x86_64")]
pub(crate) fn have_amx_int8() -> bool {
    /// CPUID leaf 7, EDX: `amx-int8`.
    const FEATURE: u32 = 1 << 25;
    static FOUND: LazyLock<bool> =
        LazyLock::new(|| have_amx() && std::arch::x86_64::__cpuid_count(7, 0).edx & FEATURE != 0);
    *FOUND
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_is_allowed_by_default() {
        if std::env::var(VARIABLE).is_err() {
            assert!(LEVELS.iter().all(|level| allows(level)));
        }
        assert!(allows("portable"));
        assert!(!allows("avx1024"));
    }
}
