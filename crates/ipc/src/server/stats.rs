//! The counters of a server.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters that any thread may read. Relaxed: each is exact by itself, and none orders another.
#[derive(Debug, Default)]
#[expect(clippy::struct_field_names, reason = "named as in ServerStats")]
pub(crate) struct ServerCounters {
    pub(crate) num_clients: AtomicU64,
    pub(crate) num_connections: AtomicU64,
    pub(crate) num_refused: AtomicU64,
    pub(crate) num_failed: AtomicU64,
    pub(crate) num_requests: AtomicU64,
    pub(crate) num_dropped_outputs: AtomicU64,
    pub(crate) num_bytes_sent: AtomicU64,
}

/// A copy of the counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServerStats {
    /// Clients that are connected.
    pub num_clients: u64,
    /// Connections that were accepted in all.
    pub num_connections: u64,
    /// Connections that were rejected: another user, version or secret, or too many clients.
    pub num_refused: u64,
    /// Connections that were closed because of invalid input.
    pub num_failed: u64,
    /// Requests handed to the scheduler.
    pub num_requests: u64,
    /// Outputs whose client was gone.
    pub num_dropped_outputs: u64,
    /// Bytes written to clients.
    pub num_bytes_sent: u64,
}

impl ServerCounters {
    pub(crate) fn read(&self) -> ServerStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ServerStats {
            num_clients: read(&self.num_clients),
            num_connections: read(&self.num_connections),
            num_refused: read(&self.num_refused),
            num_failed: read(&self.num_failed),
            num_requests: read(&self.num_requests),
            num_dropped_outputs: read(&self.num_dropped_outputs),
            num_bytes_sent: read(&self.num_bytes_sent),
        }
    }
}
