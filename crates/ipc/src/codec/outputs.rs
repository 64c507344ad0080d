//! `Outputs`: the outputs of one step for one client: the time once, then a record per output.
//!
//! ```text
//! body:    u64 timestamp_ns, records
//! record:  u64 word, i32 new_token_id [, u64 first_scheduled_ns, u32 num_cached_tokens] [, u8 reason, u8 error, i32 stop_reason] [, u16 accepted, u16 rejected]
//! word:    bits 0..40 the request's counter; bit 40: FIRST, the first bracket follows; bit 41: END, the second does; bit 42: PREDICTED, the third does
//! ```
//!
//! The token of a decode takes 12 bytes.

use scheduler::{EngineCoreOutput, FinishReason, PredictedDrafts, RequestError};

use crate::{
    error::DecodeError,
    key::{COUNTER_BITS, counter_of, key_of},
    wire::{Reader, Writer},
};

const FIRST: u64 = 1;
const END: u64 = 2;
const PREDICTED: u64 = 4;

/// A frame ends when it has reached this size.
pub(crate) const FULL_BYTES: usize = 128 << 10;

/// Append one record.
#[inline]
pub(crate) fn encode_record(output: &EngineCoreOutput, body: &mut Vec<u8>) {
    let mut flags = 0;
    if output.first_scheduled_ns != 0 || output.num_cached_tokens != 0 {
        flags |= FIRST;
    }
    if output.finish_reason.is_some() || output.stop_reason != -1 || output.error != RequestError::None {
        flags |= END;
    }
    if output.predicted != PredictedDrafts::NONE {
        flags |= PREDICTED;
    }
    let mut record = [0; 12];
    record[..8].copy_from_slice(&(flags << COUNTER_BITS | counter_of(output.key)).to_le_bytes());
    record[8..].copy_from_slice(&output.new_token_id.to_le_bytes());
    body.extend_from_slice(&record);
    let mut body = Writer(body);
    if flags & FIRST != 0 {
        body.u64(output.first_scheduled_ns);
        body.u32(output.num_cached_tokens);
    }
    if flags & END != 0 {
        body.u8(output.finish_reason.map_or(0, |reason| reason as u8 + 1));
        body.u8(output.error as u8);
        body.i32(output.stop_reason);
    }
    if flags & PREDICTED != 0 {
        body.u16(output.predicted.num_accepted);
        body.u16(output.predicted.num_rejected);
    }
}

/// Read the records of one frame for client `client_index`.
pub(crate) fn decode(
    body: &[u8],
    client_index: u32,
    mut receive: impl FnMut(EngineCoreOutput),
) -> Result<(), DecodeError> {
    let mut body = Reader::new(body);
    let timestamp_ns = body.u64()?;
    while !body.is_empty() {
        let word = body.u64()?;
        let flags = word >> COUNTER_BITS;
        if flags > (FIRST | END | PREDICTED) {
            return Err(DecodeError::BadValue { what: "a set of record flags", value: flags });
        }
        let mut output = EngineCoreOutput {
            key: key_of(client_index, word),
            new_token_id: body.i32()?,
            finish_reason: None,
            stop_reason: -1,
            num_cached_tokens: 0,
            first_scheduled_ns: 0,
            timestamp_ns,
            error: RequestError::None,
            predicted: PredictedDrafts::NONE,
        };
        if flags & FIRST != 0 {
            output.first_scheduled_ns = body.u64()?;
            output.num_cached_tokens = body.u32()?;
        }
        if flags & END != 0 {
            output.finish_reason = finish_reason(body.u8()?)?;
            output.error = request_error(body.u8()?)?;
            output.stop_reason = body.i32()?;
        }
        if flags & PREDICTED != 0 {
            output.predicted = PredictedDrafts { num_accepted: body.u16()?, num_rejected: body.u16()? };
        }
        receive(output);
    }
    Ok(())
}

fn finish_reason(byte: u8) -> Result<Option<FinishReason>, DecodeError> {
    const ALL: [FinishReason; 5] = [
        FinishReason::Stop,
        FinishReason::Length,
        FinishReason::Abort,
        FinishReason::Error,
        FinishReason::Repetition,
    ];
    match byte {
        0 => Ok(None),
        _ => ALL
            .into_iter()
            .find(|reason| *reason as u8 + 1 == byte)
            .map(Some)
            .ok_or(DecodeError::BadValue { what: "a finish reason", value: byte.into() }),
    }
}

fn request_error(byte: u8) -> Result<RequestError, DecodeError> {
    const ALL: [RequestError; 13] = [
        RequestError::None,
        RequestError::DuplicateRequestId,
        RequestError::StepFailed,
        RequestError::NoToken,
        RequestError::GrammarRejected,
        RequestError::GrammarFailed,
        RequestError::QueueTimeout,
        RequestError::ProcessorFailed,
        RequestError::ProcessorRefused,
        RequestError::AdapterMissing,
        RequestError::GrammarsFull,
        RequestError::NothingAllowed,
        RequestError::TokenizerUnreadable,
    ];
    ALL.into_iter()
        .find(|error| *error as u8 == byte)
        .ok_or(DecodeError::BadValue { what: "a request error", value: byte.into() })
}
