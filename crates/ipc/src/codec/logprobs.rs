//! `Logprobs`: log-probabilities of tokens of one client's requests. It comes before the `Outputs` that hold the tokens.
//!
//! ```text
//! body:    records
//! record:  u64 the request's counter, u32 rank, u32 count, count × (i32 token_id, f32 logprob)
//! ```

use scheduler::TokenLogprobs;

use crate::{
    error::DecodeError,
    key::{counter_of, read_key},
    wire::{Reader, Writer},
};

const ENTRY_BYTES: usize = 8;

/// Append one record.
pub(crate) fn encode_record(logprobs: &TokenLogprobs, body: &mut Vec<u8>) {
    let mut body = Writer(body);
    body.u64(counter_of(logprobs.key));
    body.u32(logprobs.rank);
    body.u32(logprobs.entries.len() as u32);
    for &(token_id, logprob) in &logprobs.entries {
        body.i32(token_id);
        body.f32(logprob);
    }
}

/// Read the records of one frame for client `client_index`.
pub(crate) fn decode(body: &[u8], client_index: u32) -> Result<Vec<TokenLogprobs>, DecodeError> {
    let mut body = Reader::new(body);
    let mut all = Vec::new();
    while !body.is_empty() {
        let key = read_key(&mut body, client_index)?;
        let rank = body.u32()?;
        let count = body.count(ENTRY_BYTES)?;
        let entries =
            (0..count).map(|_| Ok((body.i32()?, body.f32()?))).collect::<Result<_, DecodeError>>()?;
        all.push(TokenLogprobs { key, rank, entries });
    }
    Ok(all)
}
