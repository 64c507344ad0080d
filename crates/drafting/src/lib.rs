//! Drafts without a model: guesses of the tokens that follow, out of the tokens that a request holds already, and how
//! many of them a step should run.
//!
//! ```text
//!  prompt ──▶ History ◀── each new token          one per request
//!               │ propose: what stood behind the same tokens before
//!               ▼
//!            Drafter ── Controller: how many pay  ──▶ drafts of the step
//!               ▲                                     one per scheduler
//!               └── what the steps took and gave
//! ```
//!
//! A draft is verified by sampling: it is kept while it equals what the sampler draws. So a wrong one costs time and
//! changes nothing, and the only question here is what pays.
//!
//! | file | noun |
//! |---|---|
//! | `config.rs` | which drafter, and its limits |
//! | `ngram.rs` | the earliest place of each n-gram |
//! | `suffix.rs` | the newest places of each triple of tokens, and their longest matches |
//! | `archive.rs`, `matches.rs` | what other requests were answered; the longest matches of either, and their vote |
//! | `prediction.rs` | an answer that the caller expects, and how far the real one follows it |
//! | `history.rs`, `estimate.rs` | what a request's drafts are made of; how often they are right |
//! | `beliefs.rs` | what is believed of a request before it was seen, from what others' first drafts were worth |
//! | `drafter.rs` | all requests of a step together |
//! | `costs.rs`, `choice.rs`, `likeliest.rs`, `brake.rs` | what a step takes; which drafts pay, the likeliest first; when to stop for a while |
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
