//! Numbers for the tests that a seed gives again.
#![allow(dead_code, reason = "each test uses some of them")]
#![allow(unreachable_pub, reason = "a module of tests; each test that names it sees all of it")]

use cpu_kernels::Element;

/// Numbers from −1 to 1 (splitmix64).
pub struct Numbers(pub u64);

impl Numbers {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn next<E: Element>(&mut self) -> E {
        E::narrow((self.bits() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0)
    }

    pub fn many<E: Element>(&mut self, n: usize) -> Vec<E> {
        (0..n).map(|_| self.next()).collect()
    }
}

/// The first `len` numbers of a seed.
pub fn numbers(seed: u64, len: usize) -> Vec<f32> {
    narrowed(seed, len)
}

/// The first `len` numbers of a seed, as another type has them.
pub fn narrowed<E: Element>(seed: u64, len: usize) -> Vec<E> {
    Numbers(seed).many(len)
}
