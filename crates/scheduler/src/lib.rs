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
//! | `scheduler.rs` | a step, from its parts in `scheduler/`: |
//! | `running.rs`, `preemption.rs`, `admission.rs`, `adapters.rs` | who runs on, who gives way, who comes in, with which adapter |
//! | `drafts.rs` | what a step runs beyond that, guessed |
//! | `update.rs`, `departure.rs` | what a step's tokens change; how a request leaves |
//! | `intake.rs`, `deadlines.rs` | what comes in from other threads; how long it may wait for its first step |
//! | `grammar.rs` | what those ask who compile grammars and mask logits |
//! | `inspect.rs`, `summary.rs`, `invariants.rs`, `events.rs` | what people and tests look at |
//! | and below these, each knowing nothing of a scheduler: | |
//! | `requests.rs`, `rows.rs` | all requests by slot, id and key; the worker's rows |
//! | `steps.rs`, `step.rs`, `step_buffers.rs` | the buffer sets and the steps in flight; the plan of one and its arrays |
//! | `step_rows.rs`, `token_rows.rs`, `logprobs.rs`, `prompt_logprobs.rs` | what a step gave |
//! | `outgoing.rs` | what is on its way to the output side |
//! | `kv_cache_manager.rs`, `extra_keys.rs` | which blocks a request has, gets and shares |
//! | `request.rs`, `forced.rs`, `request_limits.rs`, `request_queue.rs` | a request; its tokens that no step gave; what it must keep to; who waits |
//! | `fair_queue.rs`, `fair_clock.rs`, `standing.rs`, `payer.rs` | who waits under FAIR; whose turn it is; where a request stands; who is charged |
//! | `sampling_params.rs`, `sampling_extras.rs` | the tables of sampling parameters: numbers; lists |
//! | `beam_search.rs` | a search of several beams: which go on (`scheduler/beams.rs`: their requests and blocks) |
//! | `config.rs`, `output.rs` | the numbers that fix a scheduler; what leaves it |
//! | `handle.rs`, `inbox.rs`, `egress.rs`, `stats.rs` | what other threads touch |
//! | `metrics.rs`, `histogram.rs`, `sample_group.rs` | what is counted of requests and steps |
//! | `clock.rs`, `sync.rs` | the time; the door to atomics, for loom |

mod beam_search;
mod clock;
mod config;
pub mod egress;
mod error;
mod extra_keys;
mod fair_clock;
mod fair_queue;
mod forced;
mod grammar;
mod handle;
mod histogram;
mod inbox;
mod kv_cache_manager;
mod logprobs;
mod metrics;
mod outgoing;
mod output;
mod payer;
mod prompt_logprobs;
mod request;
mod request_limits;
mod request_queue;
mod requests;
mod rows;
mod sample_group;
mod sampling_extras;
pub mod sampling_params;
mod scheduler;
mod standing;
mod stats;
mod step;
pub mod step_buffers;
mod step_rows;
mod steps;
mod sync;
mod token_rows;

pub use clock::monotonic_ns;
pub use config::{
    ConfigError, MAX_QUEUE_TIMEOUT, MAX_SPECULATIVE_TOKENS, PreemptionMode, SchedulerConfig, SchedulingPolicy,
};
pub use drafting::{DrafterConfig, DraftingMethod, SuffixLimits, TokenCap};
pub use error::SchedulerError;
pub use extra_keys::{ExtraKeys, MultimodalSpan};
pub use grammar::{
    ConstrainedSample, GrammarCompiler, GrammarKind, GrammarNews, GrammarProgress, GrammarSpec, GrammarWork,
    ThinkingGate,
};
pub use handle::{EngineHandle, NotTheWaiter};
pub use histogram::HistogramSnapshot;
pub use inbox::Inbox;
pub use logprobs::{LogprobRows, TokenLogprobs};
pub use metrics::{MetricsSnapshot, STEP_PHASES};
pub use output::{
    EngineCoreOutput, FinishReason, PredictedDrafts, RequestError, RequestKey, SchedulerOutput,
};
pub use payer::{MAX_WEIGHT, Payer};
pub use prompt_logprobs::{PromptLogprobRows, PromptLogprobs};
pub use request::{NewRequest, RequestStatus, UNKNOWN_TOKEN};
pub use request_limits::{AddRequestError, RequestLimits};
pub use sampling_extras::{
    Attachment, ListKind, MAX_SAMPLING_EXTRAS_BYTES, MAX_WORD_TOKENS, NUM_LISTS, SAMPLING_LISTS,
    SamplingExtras, SamplingExtrasError, SamplingList, TokenList,
};
pub use sampling_params::SamplingParams;
pub use scheduler::{
    BlockMap, COMPLETED_BY_GRAMMAR, CROWDED_OUT_OF_GRAMMARS, MAX_EVENTS, REFUSED_BY_PROCESSOR,
    REJECTED_BY_GRAMMAR, REJECTED_BY_PROCESSOR, RequestEvent, RequestEventKind, RequestState, RequestSummary,
    ScheduledRequest, Scheduler, StepView, WITHHELD_SAMPLE,
};
pub use stats::SchedulerStats;
pub use step_buffers::StepBuffers;
pub use step_rows::StepRows;
pub use token_rows::TokenRows;
