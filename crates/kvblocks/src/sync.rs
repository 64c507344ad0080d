//! The one place where atomics come from: std's, or loom's in the model-checking run.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64};

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::Ordering;

/// A statistic. It publishes nothing but itself and is always accessed `Relaxed`, so the model checker need not
/// interleave it: std's atomic in every build.
pub(crate) use std::sync::atomic::AtomicU64 as Gauge;
