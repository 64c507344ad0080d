//! `Pooled`: vectors of one client's requests that end with one. It comes before the `Outputs` that end them.
//!
//! ```text
//! body:    records
//! record:  u64 the request's counter, u32 count, count × f32
//! ```

use scheduler::PooledVector;

use crate::{
    error::DecodeError,
    key::{counter_of, read_key},
    wire::{Reader, Writer},
};

const VALUE_BYTES: usize = 4;

/// Append one record.
pub(crate) fn encode_record(vector: &PooledVector, body: &mut Vec<u8>) {
    let mut body = Writer(body);
    body.u64(counter_of(vector.key));
    body.u32(vector.values.len() as u32);
    for &value in &vector.values {
        body.f32(value);
    }
}

/// Read the records of one frame for client `client_index`.
pub(crate) fn decode(body: &[u8], client_index: u32) -> Result<Vec<PooledVector>, DecodeError> {
    let mut body = Reader::new(body);
    let mut all = Vec::new();
    while !body.is_empty() {
        let key = read_key(&mut body, client_index)?;
        let count = body.count(VALUE_BYTES)?;
        let values = (0..count).map(|_| body.f32()).collect::<Result<_, DecodeError>>()?;
        all.push(PooledVector { key, values });
    }
    Ok(all)
}
