//! What can go wrong on the way between text and tokens.

use std::path::PathBuf;

/// Errors of this crate. All of them are about one input or one request; none is about the engine.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// The tokenizer file cannot be read.
    #[error("cannot read the tokenizer {}: {source}", path.display())]
    ReadTokenizer {
        /// The file asked for.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The tokenizer file is too large to be one.
    #[error("the tokenizer {origin} has {num_bytes} bytes, more than the limit of {limit}")]
    TokenizerTooLarge {
        /// The file, or `<bytes>`.
        origin: String,
        /// Its size.
        num_bytes: u64,
        /// The largest size that is read.
        limit: u64,
    },
    /// The content is not a tokenizer that the `tokenizers` library understands.
    #[error("{origin} is not a valid tokenizer.json: {message}")]
    ParseTokenizer {
        /// The file, or `<bytes>`.
        origin: String,
        /// What the parser said.
        message: String,
    },
    /// A token has an id so large that a table over all ids would not fit.
    #[error("token {token:?} of {origin} has id {token_id}, above the limit of {limit}")]
    TokenIdTooLarge {
        /// The file, or `<bytes>`.
        origin: String,
        /// The token's text.
        token: String,
        /// Its id.
        token_id: u32,
        /// The largest id allowed.
        limit: u32,
    },
    /// The tokenizer could not encode a text.
    #[error("the tokenizer cannot encode a text of {num_bytes} bytes: {message}")]
    Encode {
        /// Size of the text (of all texts, for a batch).
        num_bytes: usize,
        /// What the library said.
        message: String,
    },
    /// The threads that tokenise have more to do than may wait.
    #[error(
        "{num_waiting} bytes of prompts wait for the tokenizer, and {num_bytes} more would exceed the limit of {limit}; send the request again later"
    )]
    TokenizerBusy {
        /// Size of the text that was not taken.
        num_bytes: usize,
        /// Size of those that wait.
        num_waiting: usize,
        /// Most that may wait.
        limit: usize,
    },
    /// There is no thread to tokenise in.
    #[error("no thread can be started to tokenise in: {source}")]
    NoTokenizerThread {
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The tokenizer could not decode token ids.
    #[error("the tokenizer cannot decode {num_tokens} token ids: {message}")]
    Decode {
        /// How many ids were given.
        num_tokens: usize,
        /// What the library said.
        message: String,
    },
    /// A stop string is empty: it would stop everything at once.
    #[error("stop string {index} is empty; every stop string needs at least one character")]
    EmptyStopString {
        /// Its place in the list.
        index: usize,
    },
    /// The stop strings of one request are too large together.
    #[error("the stop strings have {num_bytes} bytes together, more than the limit of {limit}")]
    StopStringsTooLong {
        /// Their size.
        num_bytes: usize,
        /// The largest size allowed.
        limit: usize,
    },
    /// Stop strings were given for a request whose output is not turned into text.
    #[error(
        "stop strings need text to search: they cannot be used with detokenize=False or without a tokenizer"
    )]
    StopNeedsText,
    /// A key is already in use.
    #[error("request key {key} is already in use")]
    DuplicateKey {
        /// The key.
        key: u64,
    },
}
