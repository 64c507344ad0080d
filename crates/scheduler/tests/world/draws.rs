//! What requests and worlds have that no draw of the operations decides: these stay the ones of their seeds.

use std::sync::Arc;

use scheduler::{DrafterConfig, DraftingMethod, Payer, SuffixLimits};

use crate::common;

/// One whose drafts depend on the tokens alone: a run can be repeated.
pub(super) fn drafter_of(counts_votes: bool) -> DrafterConfig {
    let method = if counts_votes {
        DraftingMethod::Suffix(SuffixLimits { max_match: 8, max_factor: 2.0, min_share: 0.3 })
    } else {
        DraftingMethod::Ngram { min: 1, max: 2 }
    };
    DrafterConfig { method, caps: Vec::new(), num_archived_requests: 100, adaptive: false }
}

/// Few tenants with few users: they meet.
pub(super) fn payer_of(number: u32) -> Payer {
    let draw = common::mix(u64::from(number));
    let tenant = draw % 3;
    Payer { tenant, user: draw >> 8 & 3, weight: [1, 3, 1000][tenant as usize] }
}

/// What some of the callers expect: as right as chance makes it, with two tokens.
pub(super) fn predicted(number: u32) -> Option<Arc<[i32]>> {
    let draw = common::mix(u64::from(number) + 1);
    let num_tokens = draw >> 32 & 31;
    draw.is_multiple_of(3).then(|| (0..num_tokens).map(|bit| (draw >> bit & 1) as i32).collect())
}
