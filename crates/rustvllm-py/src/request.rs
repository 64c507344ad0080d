//! What a request is made of, as Python hands it in.

pub(crate) mod arguments;
pub(crate) mod grammar_spec;
pub(crate) mod sampling_extras;
pub(crate) mod sampling_table;
pub(crate) mod token_ids;
