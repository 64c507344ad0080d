//! `Payer`: whose share of the engine a request is charged to, under the policy FAIR.

/// Largest weight of a tenant.
pub const MAX_WEIGHT: u32 = 1000;

/// Digests that front ends make: what they are digests of is nothing to the scheduler. All zero: one bucket, of all
/// requests that say nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Payer {
    /// Who shares the engine with others.
    pub tenant: u64,
    /// Who shares what the tenant gets; another tenant's user of this number is another one.
    pub user: u64,
    /// The tenant's share against those of others: 1 to [`MAX_WEIGHT`]. Of requests that disagree the newest counts.
    pub weight: u32,
}

impl Default for Payer {
    fn default() -> Self {
        Self { tenant: 0, user: 0, weight: 1 }
    }
}

impl Payer {
    /// This payer with a weight that can be divided by.
    pub(crate) fn checked(self) -> Self {
        Self { weight: self.weight.clamp(1, MAX_WEIGHT), ..self }
    }
}
