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
//! | `pause.rs` | who may run while the scheduler is paused |
//! | `grammar.rs` | what those ask who compile grammars and mask logits |
//! | `inspect.rs`, `summary.rs`, `invariants.rs`, `events.rs` | what people and tests look at |
//! | `beams.rs`, `beam_search.rs` | the requests and blocks of a search of several beams; which of them go on |
//! | and below these, each knowing nothing of a scheduler: | |
//! | `requests.rs`, `requests/rows.rs` | all requests by slot, id and key; the worker's rows |
//! | `request.rs`; in `request/`: | a request; |
//! | `limits.rs`, `forced.rs`, `sample_group.rs` | what it must keep to; its tokens that no step gave; its samples, counted together |
//! | `repetition.rs` | whether its output repeats itself |
//! | `payer.rs`, `standing.rs` | under FAIR: who is charged, and where it stands |
//! | `request_queue.rs`; in it `fair.rs`, `fair_clock.rs` | who waits; who waits under FAIR, whose turn it is |
//! | `steps.rs`, `step.rs`, `step_buffers.rs` | the buffer sets and the steps in flight; the plan of one and its arrays |
//! | `step/rows.rs`, `step/token_rows.rs` | what a step gave |
//! | `logprobs.rs`, `logprobs/prompt.rs` | log-probabilities of tokens that were drawn; of prompts |
//! | `pooling.rs` | requests that end with a vector of their prompt |
//! | `kv_cache_manager.rs`; in it `extra_keys.rs` | a request's blocks; what their content depends on but tokens |
//! | `sampling_params.rs`; in it `extras.rs`, `repetition_detection.rs` | the tables of sampling parameters: numbers; lists; which repetitions end an output |
//! | `grammar.rs` | what a request asks of its grammar, as plain data |
//! | `config.rs`, `output.rs` | the numbers that fix a scheduler; what leaves it |
//! | `handle.rs`, `handle/inbox.rs` | what other threads touch, and how they hand in |
//! | `egress.rs`, `egress/outgoing.rs` | how outputs leave; those that wait for room |
//! | `metrics.rs`; in it `stats.rs`, `histogram.rs` | what is counted of requests and steps; of the scheduler; distributions |
//! | `clock.rs`, `sync.rs` | the time; the door to atomics, for loom |

mod clock;
mod config;
pub mod egress;
mod error;
mod grammar;
mod handle;
mod kv_cache_manager;
mod logprobs;
mod metrics;
mod output;
mod pooling;
mod request;
mod request_queue;
mod requests;
pub mod sampling_params;
mod scheduler;
mod step;
pub mod step_buffers;
mod steps;
mod sync;

pub use clock::monotonic_ns;
pub use config::{
    ConfigError, MAX_QUEUE_TIMEOUT, MAX_SPECULATIVE_TOKENS, PreemptionMode, SchedulerConfig, SchedulingPolicy,
};
pub use drafting::{DrafterConfig, DraftingMethod, SuffixLimits, TokenCap};
pub use error::SchedulerError;
pub use grammar::{
    ConstrainedSample, GrammarCompiler, GrammarKind, GrammarNews, GrammarProgress, GrammarSpec, GrammarWork,
    ThinkingGate,
};
pub use handle::inbox::Inbox;
pub use handle::{EngineHandle, NotTheWaiter};
pub use kv_cache_manager::extra_keys::{ExtraKeys, MultimodalSpan};
pub use logprobs::prompt::{PromptLogprobRows, PromptLogprobs};
pub use logprobs::{LogprobRows, TokenLogprobs};
pub use metrics::histogram::HistogramSnapshot;
pub use metrics::stats::SchedulerStats;
pub use metrics::{MetricsSnapshot, STEP_PHASES};
pub use output::{
    EngineCoreOutput, FinishReason, PredictedDrafts, RequestError, RequestKey, SchedulerOutput,
};
pub use pooling::{POOLED, PooledRows, PooledVector};
pub use request::limits::{AddRequestError, RequestLimits};
pub use request::payer::{MAX_WEIGHT, Payer};
pub use request::{NewRequest, RequestStatus, UNKNOWN_TOKEN};
pub use sampling_params::SamplingParams;
pub use sampling_params::extras::{
    Attachment, ListKind, MAX_SAMPLING_EXTRAS_BYTES, MAX_WORD_TOKENS, NUM_LISTS, PromptTokens,
    SAMPLING_LISTS, SamplingExtras, SamplingExtrasError, SamplingList, TokenList,
};
pub use sampling_params::repetition_detection::{
    MAX_PATTERN_SIZE, RepetitionDetection, RepetitionDetectionError,
};
pub use scheduler::{
    BlockMap, COMPLETED_BY_GRAMMAR, CROWDED_OUT_OF_GRAMMARS, MAX_EVENTS, NOTHING_LEFT, PauseState,
    REFUSED_BY_PROCESSOR, REJECTED_BY_GRAMMAR, REJECTED_BY_PROCESSOR, RequestEvent, RequestEventKind,
    RequestState, RequestSummary, ScheduledRequest, Scheduler, StepView, WITHHELD_SAMPLE,
};
pub use step::rows::StepRows;
pub use step::token_rows::TokenRows;
pub use step_buffers::StepBuffers;
