//! Text and tokens, and what is read from a model's text, for Python.

pub(crate) mod body_values;
pub(crate) mod output_processor;
pub(crate) mod response_events;
pub(crate) mod stop_strings;
pub(crate) mod tokenizer;
pub(crate) mod tokenizer_pool;
pub(crate) mod turn;
