//! Drafts: guesses of the tokens that follow, taken from tokens that are known already, and the decision how many of
//! them a step should run. A second model may guess instead; then this crate only decides how many.
//!
//! ```text
//!  prompt ──▶ History ◀── each new token          one per request
//!               │ propose: what followed the same tokens before
//!               ▼
//!            Drafter ── Chooser: which pay  ──▶ drafts of the step
//!               ▲                               one per scheduler
//!               └── what the steps took and gave
//! ```
//!
//! Sampling verifies a draft: it is kept while it equals what the sampler draws. So a wrong draft costs time but
//! changes nothing, and the only question here is which drafts pay.
//!
//! | file | noun |
//! |---|---|
//! | `config.rs` | which method, and its limits |
//! | `ngram.rs` | the earliest place of each n-gram |
//! | `suffix.rs` | the newest places of each few tokens, and their longest matches |
//! | `archive.rs`, `matches.rs` | what other requests were answered; the longest matches in either, and their vote |
//! | `prediction.rs` | an answer that the caller expects, and how far the real one follows it |
//! | `history.rs`, `estimate.rs` | the sources of a request's drafts; how often they are right |
//! | `beliefs.rs` | what is assumed about a new request, from what others' first drafts were worth |
//! | `drafter.rs` | all requests of a step together |
//! | `costs.rs`, `choice.rs`, `likeliest.rs`, `brake.rs` | what a step takes; which drafts pay, the likeliest first; when to pause |
//! | `credit.rs` | how long a row may wait for its neighbours' drafts, after what its own saved it |

#![forbid(unsafe_code)]

mod archive;
mod beliefs;
mod brake;
mod choice;
mod config;
mod costs;
mod credit;
mod drafter;
mod estimate;
mod history;
mod likeliest;
mod matches;
mod ngram;
mod prediction;
mod suffix;

pub use archive::Archive;
pub use beliefs::Beliefs;
pub use brake::Brake;
pub use choice::{Chooser, PlainStep};
pub use config::{DrafterConfig, DrafterConfigError, DraftingMethod, MAX_NGRAM_LENGTHS, TokenCap};
pub use costs::StepCosts;
pub use drafter::{Drafter, DrafterStats, Round};
pub use estimate::{Belief, Estimate};
pub use history::{History, UNKNOWN_GUESS};
pub use likeliest::Candidate;
pub use matches::{MAX_MATCH_TOKENS, SuffixLimits};
pub use ngram::NgramIndex;
pub use prediction::Prediction;
pub use suffix::{MatchedBy, SuffixIndex};
