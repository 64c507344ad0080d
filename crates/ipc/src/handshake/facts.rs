//! `EngineFacts`: how an engine describes itself in its `Welcome`.

use scheduler::RequestLimits;

use crate::{
    error::DecodeError,
    wire::{Reader, Writer},
};

/// What a front end needs to know about an engine. It does not change while the engine lives.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EngineFacts {
    /// The limits that a request must respect.
    pub limits: RequestLimits,
    /// Most requests that run at once.
    pub max_num_seqs: u32,
    /// Most requests that wait.
    pub max_num_queued_reqs: u32,
    /// Size limit of a frame to the engine.
    pub max_frame_bytes: u32,
    /// The engine's process id.
    pub pid: u32,
    /// Further facts for front ends, in its owner's format.
    pub info: Box<[u8]>,
}

/// Append the facts.
pub(crate) fn write_facts(facts: &EngineFacts, body: &mut Writer<'_>) {
    let limits = &facts.limits;
    for value in [limits.max_model_len, limits.max_num_batched_tokens, limits.block_size, limits.num_blocks] {
        body.u32(value);
    }
    body.bool(limits.enable_chunked_prefill);
    body.u32(facts.max_num_seqs);
    body.u32(facts.max_num_queued_reqs);
    body.u32(facts.max_frame_bytes);
    body.u32(facts.pid);
    body.bytes(&facts.info);
}

/// Read the facts; refuses numbers that no engine can have.
pub(crate) fn read_facts(body: &mut Reader<'_>) -> Result<EngineFacts, DecodeError> {
    let mut facts = EngineFacts {
        limits: RequestLimits {
            max_model_len: body.u32()?,
            max_num_batched_tokens: body.u32()?,
            block_size: body.u32()?,
            num_blocks: body.u32()?,
            enable_chunked_prefill: body.bool()?,
            max_num_seqs: 0, // it follows
        },
        max_num_seqs: body.u32()?,
        max_num_queued_reqs: body.u32()?,
        max_frame_bytes: body.u32()?,
        pid: body.u32()?,
        info: body.bytes()?.into(),
    };
    facts.limits.max_num_seqs = facts.max_num_seqs;
    let RequestLimits { max_model_len, block_size, num_blocks, .. } = facts.limits;
    if max_model_len == 0 || block_size == 0 || num_blocks == 0 {
        return Err(DecodeError::BadValue { what: "a number of tokens or blocks", value: 0 });
    }
    Ok(facts)
}
