//! `rustvllm._core`: the Rust core for Python. Converts, calls, converts; no logic lives here.
//!
//! | module | is the face of |
//! |---|---|
//! | `scheduler`, `handle` | the owner's side of a scheduler, its arrays and outputs; the side that any thread may use |
//! | `request` | what `add_request` takes: ids, parameters, grammars |
//! | `transport` | engines in other processes, ranks and nodes of one model |
//! | `text`, `grammar` | tokenizers, outputs as text, calls of tools; the masks of structured output |
//! | `cpu`, `gguf` | kernels, products and decoders of the CPU; GGUF files |
//! | `bench` | measurements without a model, and load for a server |
//! | `errors`, `keyword`, `metrics` | what these have in common |

#![allow(clippy::needless_pass_by_value, reason = "pyo3 hands extracted arguments over by value")]
#![allow(clippy::doc_markdown, reason = "these comments become Python docstrings")]

mod bench;
mod cpu;
mod errors;
mod gguf;
mod grammar;
mod handle;
mod keyword;
mod metrics;
#[cfg(links_older_glibc)]
mod older_glibc;
mod request;
mod scheduler;
mod spare_memory;
mod text;
mod transport;

use pyo3::prelude::*;

#[pymodule(gil_used = true)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("build_profile", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    scheduler::config::register(module)?;
    scheduler::drafter::register(module)?;
    handle::register(module)?;
    cpu::sampling::register(module)?;
    request::sampling_extras::register(module)?;
    request::sampling_table::register(module)?;
    scheduler::register(module)?;
    scheduler::output::register(module)?;
    transport::meeting::register(module)?;
    transport::step_channel::register(module)?;
    transport::node_link::register(module)?;
    scheduler::inspection::register(module)?;
    grammar::register(module)?;
    spare_memory::register();
    request::grammar_spec::register(module)?;
    request::token_ids::register(module)?;
    text::body_values::register(module)?;
    text::tokenizer::register(module)?;
    text::tokenizer_pool::register(module)?;
    text::stop_strings::register(module)?;
    text::output_processor::register(module)?;
    text::turn::register(module)?;
    text::response_events::register(module)?;
    transport::client::register(module)?;
    transport::server::register(module)?;
    cpu::threads::register(module)?;
    cpu::attention::register(module)?;
    cpu::filling::register(module)?;
    cpu::linear::register(module)?;
    cpu::lora::register(module)?;
    cpu::norms::register(module)?;
    gguf::register(module)?;
    cpu::caches::register(module)?;
    cpu::decoder::register(module)?;
    bench::register(module)?;
    bench::serve::register(module)
}
