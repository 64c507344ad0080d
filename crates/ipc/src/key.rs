//! Request keys. The upper bits of a key name the client, so that outputs find their way.

use std::sync::atomic::{AtomicU64, Ordering};

use scheduler::RequestKey;

use crate::{error::DecodeError, wire::Reader};

/// Lower bits, which count a client's requests; the bits above name the client.
pub const COUNTER_BITS: u32 = 40;

/// The highest client index. Index 0 is the engine's own process.
pub const MAX_CLIENT_INDEX: u32 = (1 << (64 - COUNTER_BITS)) - 1;

const COUNTER_MASK: u64 = (1 << COUNTER_BITS) - 1;

/// The index of the client that a key belongs to.
#[must_use]
pub fn client_of(key: RequestKey) -> u32 {
    (key.0 >> COUNTER_BITS) as u32
}

/// The counter of a key: which of its client's requests it names.
#[must_use]
pub fn counter_of(key: RequestKey) -> u64 {
    key.0 & COUNTER_MASK
}

/// The key of a client's request.
#[must_use]
pub fn key_of(client_index: u32, counter: u64) -> RequestKey {
    RequestKey(u64::from(client_index) << COUNTER_BITS | counter & COUNTER_MASK)
}

/// Read the key of a request of client `client_index`; a frame holds only the counter.
pub(crate) fn read_key(body: &mut Reader<'_>, client_index: u32) -> Result<RequestKey, DecodeError> {
    let counter = body.u64()?;
    if counter >> COUNTER_BITS != 0 {
        return Err(DecodeError::BadValue { what: "a request's counter", value: counter });
    }
    Ok(key_of(client_index, counter))
}

/// Makes new keys for one client's requests.
#[derive(Debug)]
pub(crate) struct NewKeys {
    pub(crate) client_index: u32,
    next_counter: AtomicU64,
}

impl NewKeys {
    pub(crate) fn of(client_index: u32) -> Self {
        Self { client_index, next_counter: AtomicU64::new(1) }
    }

    pub(crate) fn next(&self) -> RequestKey {
        // Relaxed: keys only have to be unique.
        key_of(self.client_index, self.next_counter.fetch_add(1, Ordering::Relaxed))
    }
}
