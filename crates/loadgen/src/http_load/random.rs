//! `Random`: reproducible random numbers for arrivals and prompts.
//!
//! `SplitMix64` (Steele, Lea and Flood, 2014): the same seed gives the same load on every machine.

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// The stream of a seed and a purpose (the number of a request, for instance), unlike those of other pairs.
    #[must_use]
    pub fn new(seed: u64, purpose: u64) -> Self {
        Self { state: mix(mix(seed.wrapping_add(GOLDEN)) ^ purpose.wrapping_mul(GOLDEN)) }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN);
        mix(self.state)
    }

    /// A number in `low..=high`; `low` when the range is empty.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        let width = u64::from(high.saturating_sub(low)) + 1;
        low + ((u128::from(self.bits()) * u128::from(width)) >> 64) as u32
    }

    /// A number in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// An exponential number of mean 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.uniform()).ln()
    }

    /// A gamma-distributed number of mean 1 and this shape (1: exponential; less: burstier), after Marsaglia and Tsang
    /// (2000).
    pub fn gamma(&mut self, shape: f64) -> f64 {
        if (shape - 1.0).abs() < f64::EPSILON {
            return self.exponential();
        }
        let boosted = if shape < 1.0 { shape + 1.0 } else { shape };
        let d = boosted - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        let sample = loop {
            let normal = self.normal();
            let v = (1.0 + c * normal).powi(3);
            if v > 0.0 && (1.0 - self.uniform()).ln() < 0.5 * normal * normal + d - d * v + d * v.ln() {
                break d * v;
            }
        };
        let sample = if shape < 1.0 { sample * (1.0 - self.uniform()).powf(1.0 / shape) } else { sample };
        sample / shape
    }

    /// A standard normal number (Box and Muller).
    fn normal(&mut self) -> f64 {
        let radius = (2.0 * self.exponential()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
