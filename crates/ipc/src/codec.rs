//! How the parts of messages are encoded and decoded, one module per kind of message.

pub(crate) mod grammar;
pub(crate) mod logprobs;
pub(crate) mod metrics;
pub(crate) mod outputs;
pub(crate) mod pooled;
pub(crate) mod prompt_logprobs;
pub(crate) mod request;
