//! `PromptLogprobs`: log-probabilities of places of the prompts of one client's requests. It comes before the `Outputs`
//! that hold the requests' first tokens.
//!
//! ```text
//! body:    records
//! record:  u64 the request's counter, u32 first_position, u32 num_columns, u32 num_rows, rows
//! row:     u32 rank, num_columns × (i32 token_id, f32 logprob)
//! ```
//!
//! What a step says of a long prompt is cut into several records, between rows.

use std::ops::Range;

use scheduler::PromptLogprobs;

use crate::{
    codec::outputs::FULL_BYTES,
    error::DecodeError,
    key::{counter_of, read_key},
    wire::{Reader, Writer},
};

const RANK_BYTES: usize = 4;
const ENTRY_BYTES: usize = 8;

/// The rows from `start` on that go into a frame which has `num_bytes` already; at least one.
pub(crate) fn rows_that_fit(all: &PromptLogprobs, start: usize, num_bytes: usize) -> Range<usize> {
    let row_bytes = RANK_BYTES + ENTRY_BYTES * all.num_columns as usize;
    let room = FULL_BYTES.saturating_sub(num_bytes) / row_bytes;
    start..all.ranks.len().min(start + room.max(1))
}

/// Append some of the rows as one record.
pub(crate) fn encode_record(all: &PromptLogprobs, rows: Range<usize>, body: &mut Vec<u8>) {
    let width = all.num_columns as usize;
    let mut body = Writer(body);
    body.u64(counter_of(all.key));
    body.u32(all.first_position + rows.start as u32);
    body.u32(all.num_columns);
    body.u32(rows.len() as u32);
    for row in rows {
        body.u32(all.ranks[row]);
        let range = row * width..(row + 1) * width;
        for (&token_id, &logprob) in all.token_ids[range.clone()].iter().zip(&all.logprobs[range]) {
            body.i32(token_id);
            body.f32(logprob);
        }
    }
}

/// Read the records of one frame for client `client_index`.
pub(crate) fn decode(body: &[u8], client_index: u32) -> Result<Vec<PromptLogprobs>, DecodeError> {
    let mut body = Reader::new(body);
    let mut all = Vec::new();
    while !body.is_empty() {
        let key = read_key(&mut body, client_index)?;
        let (first_position, num_columns) = (body.u32()?, body.u32()?);
        if num_columns == 0 || first_position == 0 {
            return Err(DecodeError::BadValue { what: "a place of a prompt with candidates", value: 0 });
        }
        let num_rows =
            body.count(RANK_BYTES.saturating_add(ENTRY_BYTES.saturating_mul(num_columns as usize)))?;
        let num_entries = num_rows * num_columns as usize;
        let mut ranks = Vec::with_capacity(num_rows);
        let (mut token_ids, mut logprobs) =
            (Vec::with_capacity(num_entries), Vec::with_capacity(num_entries));
        for _ in 0..num_rows {
            ranks.push(body.u32()?);
            for _ in 0..num_columns {
                token_ids.push(body.i32()?);
                logprobs.push(body.f32()?);
            }
        }
        all.push(PromptLogprobs {
            key,
            first_position,
            num_columns,
            ranks: ranks.into(),
            token_ids: token_ids.into(),
            logprobs: logprobs.into(),
        });
    }
    Ok(all)
}
