//! `Standing`: where one request stands under the policy FAIR.

/// A tenant's tag, and the place in the order of arrival of the request that brought the turn: unique.
pub(crate) type Turn = (u64, u64);

/// Where a request stands under the policy FAIR.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Standing {
    /// The turn that it brought, or, once it was admitted, the one that it took.
    pub(crate) turn: Turn,
    /// Its tag among the requests of its tenant.
    pub(crate) user_tag: u64,
    /// Tokens that it was charged when it came.
    pub(crate) guessed: u32,
}
