//! `rustvllm._core`: the Rust core for Python. Converts, calls, converts; no logic lives here.

#![allow(clippy::needless_pass_by_value, reason = "pyo3 hands extracted arguments over by value")]
#![allow(clippy::doc_markdown, reason = "these comments become Python docstrings")]

mod arrays;
mod attention;
mod bench;
mod bench_serve;
mod buffers;
mod client;
mod config;
mod cpu_threads;
mod decoder;
mod drafter;
mod errors;
mod file_rows;
mod gguf;
mod grammar;
mod grammar_spec;
mod handle;
mod inspection;
mod keyword;
mod linear;
mod logprobs;
mod lora;
mod meeting;
mod metrics;
mod node_link;
mod norms;
#[cfg(links_older_glibc)]
mod older_glibc;
mod output_processor;
mod request_arguments;
mod sampling;
mod sampling_extras;
mod sampling_table;
mod scheduler;
mod scheduler_output;
mod server;
mod spare_memory;
mod step_channel;
mod stop_strings;
mod token_ids;
mod tokenizer;
mod tokenizer_pool;
mod turn;
mod weight_kind;
mod word_rows;

use pyo3::prelude::*;

#[pymodule(gil_used = true)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("build_profile", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    config::register(module)?;
    drafter::register(module)?;
    handle::register(module)?;
    sampling::register(module)?;
    sampling_extras::register(module)?;
    sampling_table::register(module)?;
    scheduler::register(module)?;
    scheduler_output::register(module)?;
    meeting::register(module)?;
    step_channel::register(module)?;
    node_link::register(module)?;
    inspection::register(module)?;
    grammar::register(module)?;
    spare_memory::register();
    grammar_spec::register(module)?;
    token_ids::register(module)?;
    tokenizer::register(module)?;
    tokenizer_pool::register(module)?;
    stop_strings::register(module)?;
    output_processor::register(module)?;
    turn::register(module)?;
    client::register(module)?;
    server::register(module)?;
    cpu_threads::register(module)?;
    attention::register(module)?;
    linear::register(module)?;
    lora::register(module)?;
    norms::register(module)?;
    gguf::register(module)?;
    decoder::register(module)?;
    bench::register(module)?;
    bench_serve::register(module)
}
