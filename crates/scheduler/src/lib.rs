//! The scheduler of rustvllm: continuous batching over a paged KV cache.
//!
//! ```text
//!  any thread                       one thread, the owner
//!  EngineHandle ── Inbox ──▶ RequestQueue ──▶ Scheduler::schedule ──▶ SchedulerOutput + StepBuffers
//!   add, abort   (lock-free)    waiting           │    ▲                        │ the model runs
//!                                        KVCacheManager│                        ▼
//!  output thread ◀── Egress ◀───── Scheduler::update_from_output ◀─── sampled token ids
//!   (wait-free)
//! ```
//!
//! A step is `schedule` → (the model) → `update_from_output`. `schedule` decides how many tokens of which
//! requests run and writes everything the worker needs into arrays that were registered once; `update`
//! appends the sampled tokens, applies the stop rules, frees, and emits one record per token. Neither
//! allocates in steady state. Nothing here knows of Python, tokio or text.
//!
//! | file | noun |
//! |---|---|
//! | `scheduler.rs` | a step, from its parts: |
//! | `running.rs`, `preemption.rs`, `admission.rs` | who runs on, who gives way, who comes in |
//! | `drafts.rs` | what a step runs beyond that, guessed |
//! | `update.rs`, `departure.rs` | what a step's tokens change; how a request leaves |
//! | `intake.rs`, `deadlines.rs` | what comes in from other threads; how long it may wait for its first step |
//! | `requests.rs`, `rows.rs` | all requests by slot, id and key; the worker's rows |
//! | `steps.rs`, `step.rs`, `step_buffers.rs` | the buffer sets and the steps in flight; the plan of one and its arrays |
//! | `step_rows.rs`, `outgoing.rs` | what a step gave; what is on its way to the output side |
//! | `kv_cache_manager.rs`, `extra_keys.rs` | which blocks a request has, gets and shares |
//! | `request.rs`, `request_limits.rs`, `request_queue.rs` | a request; what it must keep to; who waits |
//! | `fair_queue.rs`, `fair_clock.rs`, `payer.rs` | who waits under FAIR; whose turn it is; who is charged |
//! | `sampling_params.rs`, `sampling_extras.rs` | the table of sampling parameters; those that are lists |
//! | `config.rs`, `output.rs` | the numbers that fix a scheduler; what leaves it |
//! | `handle.rs`, `inbox.rs`, `egress.rs`, `stats.rs` | what other threads touch |
//! | `metrics.rs`, `histogram.rs` | what is counted of requests and steps |
//! | `inspect.rs`, `invariants.rs`, `events.rs` | what people and tests look at |
//! | `clock.rs`, `sync.rs` | the time; the door to atomics, for loom |

mod adapters;
mod admission;
mod clock;
mod config;
mod deadlines;
mod departure;
mod drafts;
pub mod egress;
mod error;
mod events;
mod extra_keys;
mod fair_clock;
mod fair_queue;
mod grammar;
mod handle;
mod histogram;
mod inbox;
mod inspect;
mod intake;
mod invariants;
mod kv_cache_manager;
mod logprobs;
mod metrics;
mod outgoing;
mod output;
mod payer;
mod preemption;
mod prompt_logprobs;
mod request;
mod request_limits;
mod request_queue;
mod requests;
mod rows;
mod running;
mod sampling_extras;
pub mod sampling_params;
mod scheduler;
mod stats;
mod step;
pub mod step_buffers;
mod step_rows;
mod steps;
mod summary;
mod sync;
mod update;

pub use clock::monotonic_ns;
pub use config::{
    ConfigError, MAX_QUEUE_TIMEOUT, MAX_SPECULATIVE_TOKENS, PreemptionMode, SchedulerConfig, SchedulingPolicy,
};
pub use drafting::{DrafterConfig, DraftingMethod, SuffixLimits, TokenCap};
pub use error::SchedulerError;
pub use events::{MAX_EVENTS, RequestEvent, RequestEventKind};
pub use extra_keys::{ExtraKeys, MultimodalSpan};
pub use grammar::{ConstrainedSample, GrammarKind, GrammarNews, GrammarSpec};
pub use handle::{EngineHandle, NotTheWaiter};
pub use histogram::HistogramSnapshot;
pub use inbox::Inbox;
pub use inspect::{RequestState, ScheduledRequest, StepView};
pub use logprobs::{LogprobRows, TokenLogprobs};
pub use metrics::{MetricsSnapshot, STEP_PHASES};
pub use output::{EngineCoreOutput, FinishReason, RequestError, RequestKey, SchedulerOutput};
pub use payer::{MAX_WEIGHT, Payer};
pub use prompt_logprobs::{PromptLogprobRows, PromptLogprobs};
pub use request::{NewRequest, RequestStatus, UNKNOWN_TOKEN};
pub use request_limits::{AddRequestError, RequestLimits};
pub use sampling_extras::{
    Attachment, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_SAMPLING_EXTRAS_BYTES, SamplingExtras,
    SamplingExtrasError,
};
pub use sampling_params::SamplingParams;
pub use scheduler::Scheduler;
pub use stats::SchedulerStats;
pub use step_buffers::StepBuffers;
pub use step_rows::{StepRows, TokenRows};
pub use summary::{BlockMap, RequestSummary};
pub use update::{COMPLETED_BY_GRAMMAR, REFUSED_BY_PROCESSOR, REJECTED_BY_GRAMMAR, REJECTED_BY_PROCESSOR};
