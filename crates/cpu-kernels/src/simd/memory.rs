//! How the processor likes to be asked for memory that is read once, where processors differ.
//!
//! With two cores of a Zen 4, products of float32 that read two streams per core took 1.1 to 1.4 times as long as with one, while
//! a Cascade Lake and a Zen 5 read two faster. docs/benchmarks/cpu-steps.md has the figures.

use std::sync::LazyLock;

/// The variable that chooses, for comparisons: 1 or 2. Python refuses other values.
const VARIABLE: &str = "RUSTVLLM_CPU_STREAMS";

/// The most rows whose products wait for memory alone where each core reads one stream: their weights are asked for once, into
/// the first cache. Those of more rows are asked for twice, into the second cache and, shortly before their use, the first.
pub(crate) const WAITING_ROWS: usize = 4;
/// How far ahead of their use such weights are asked for the second time.
pub(crate) const SECOND_ASK: usize = 2048;

/// Streams of memory that each core reads weights in where reading them is what takes the time, 1 or 2.
#[must_use]
pub fn num_streams() -> usize {
    if is_one_stream() { 1 } else { 2 }
}

/// Whether a core reads one stream of memory faster than two, and what it asks for comes sooner if it is for the second cache.
pub(crate) fn is_one_stream() -> bool {
    static FOUND: LazyLock<bool> =
        LazyLock::new(|| match std::env::var(VARIABLE).unwrap_or_default().trim() {
            "1" => true,
            "2" => false,
            _ => processor_family() == Family::Amd17To19,
        });
    *FOUND
}

/// What is known of a processor from its maker and its family.
#[derive(Debug, PartialEq, Eq)]
enum Family {
    /// AMD's before Zen 5, from Zen on. Zen 4 was measured, with AVX2, too; the others have the same first cache.
    Amd17To19,
    Other,
}

#[cfg(target_arch = "x86_64")]
fn processor_family() -> Family {
    use std::arch::x86_64::__cpuid;
    let (maker, signature) = (__cpuid(0), __cpuid(1).eax);
    let name = [maker.ebx, maker.edx, maker.ecx].map(u32::to_le_bytes);
    family_of(name.as_flattened(), signature)
}

#[cfg(not(target_arch = "x86_64"))]
fn processor_family() -> Family {
    Family::Other
}

/// The family that a maker's name and the signature of leaf 1 stand for.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "other processors have no such leaf"))]
fn family_of(maker: &[u8], signature: u32) -> Family {
    let (base, extended) = (signature >> 8 & 0xf, signature >> 20 & 0xff);
    // An extended family counts only where the base has no room for it.
    let family = if base == 0xf { base + extended } else { base };
    match (maker, family) {
        (b"AuthenticAMD" | b"HygonGenuine", 0x17..=0x19) => Family::Amd17To19,
        _ => Family::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_told_by_maker_and_signature() {
        // A Zen 2, a Zen 3, a Zen 4, a Zen 5, a Bulldozer, a Cascade Lake.
        let amd = [0x0083_0f10, 0x00a0_0f11, 0x00a1_0f11, 0x00b0_0f21, 0x0060_0f12];
        let found = amd.map(|signature| family_of(b"AuthenticAMD", signature) == Family::Amd17To19);
        assert_eq!(found, [true, true, true, false, false]);
        assert_eq!(family_of(b"GenuineIntel", 0x0005_0657), Family::Other);
        assert_eq!(family_of(b"GenuineIntel", 0x00a1_0f11), Family::Other);
    }
}
