//! Load: what `rustvllm bench step`, `rustvllm bench trace`, `rustvllm bench serve` and the criterion benches run.
//!
//! | file | noun |
//! |---|---|
//! | `decoding.rs` | a scheduler kept in steady state by N running decodes, with or without a prompt in each step |
//! | `step_cost.rs` | what one of its steps costs |
//! | `trace.rs`, `trace/` | requests of a recorded trace, in Mooncake's or Azure's format |
//! | `replay.rs` | a trace run through a scheduler under a virtual clock |
//! | `replay_target.rs` | what a replay drives: the real scheduler on a stopwatch, or anything that behaves like it |
//! | `step_time.rs` | how long a model would take for a step |
//! | `http_load.rs`, `http_load/` | requests to an OpenAI-compatible server, their streams timed |

pub mod decoding;
pub mod http_load;
pub mod replay;
pub mod replay_target;
pub mod step_cost;
pub mod step_time;
pub mod trace;

pub use decoding::{Decoding, DecodingOptions};
pub use http_load::{HttpLoadError, HttpLoadOptions, HttpLoadReport, http_load};
pub use replay::{ReplayError, ReplayOptions, ReplayReport, replay, replay_requests};
pub use replay_target::{ReplayTarget, StepLoad, TimedScheduler};
pub use step_cost::{StepCost, StepCostError, step_cost};
pub use step_time::StepTimeModel;
pub use trace::{Trace, TraceError, TraceFormat, TraceReader, TraceRequest, TraceSummary};

/// Asked now and then during a long run; `false` ends it.
pub type KeepGoing<'a> = dyn FnMut() -> bool + 'a;
