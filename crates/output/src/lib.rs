//! The text side of the core: tokens in, text out.
//!
//! * [`Tokenizer`]: text to token ids and back, from a `tokenizer.json`.
//! * [`TokenizerPool`]: the same for long texts, in threads of its own.
//! * [`IncrementalDetokenizer`]: takes a token and returns the text that has become certain; constant work per token.
//! * [`StopChecker`]: looks for stop strings in new text only, and holds back the longest possible partial match.
//! * [`TurnParser`]: splits text into content, reasoning and tool calls; [`TurnEvents`] renders them as the events of a
//!   chat stream, [`ResponseEvents`] as those of a response; [`CallGrammar`]: a grammar that tool calls obey.
//! * [`count_body_values`]: what a request's fields hold, before it is parsed.
//! * [`OutputProcessor`]: detokenizer and stop strings for all requests of a front end; reads the scheduler's records.
//!
//! Nothing here knows Python or touches the network, and no input makes it panic.

#![forbid(unsafe_code)]

mod answer_ids;
mod body_values;
mod char_boundary;
mod custom_input;
mod delivery;
mod detokenizer;
mod error;
mod event_template;
mod guarded;
mod logprobs;
mod outbox;
mod output_processor;
mod response_events;
mod shared_bytes;
mod stop_checker;
mod token_pieces;
mod tokenizer;
mod tokenizer_pool;
mod turn;
mod turn_events;

pub use body_values::{FieldValues, MAX_COUNTED_FIELDS, count_body_values};
pub use char_boundary::floor_char_boundary;
pub use custom_input::custom_input;
pub use delivery::{Delivery, EventBatch};
pub use detokenizer::{DetokenizeOptions, IncrementalDetokenizer};
pub use error::OutputError;
pub use event_template::EventTemplate;
pub use logprobs::{CandidateLogprob, PositionLogprobs};
pub use output_processor::{
    News, OutputOptions, OutputProcessor, REPETITION_DETECTED, RequestDelta, RequestFailure, StopReason,
    Verdict,
};
pub use response_events::ResponseEvents;
pub use shared_bytes::SharedBytes;
pub use stop_checker::{MAX_STOP_BYTES, StopChecker, StopStrings};
pub use tokenizer::{MAX_TOKEN_ID, MAX_TOKENIZER_BYTES, Tokenizer};
pub use tokenizer_pool::{
    EncodedText, LONG_TEXT_BYTES, MAX_TOKENIZER_THREADS, MAX_WAITING_TEXT_BYTES, TokenizerPool,
};
pub use turn::{
    CallGrammar, CallIds, GrammarRefusal, ReasoningFormat, Thinking, Tool, TurnEvent, TurnFormat, TurnParser,
    TurnReading, messages_around,
};
pub use turn_events::TurnEvents;
