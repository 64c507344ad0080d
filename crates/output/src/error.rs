//! Errors in the conversion between text and tokens.

use std::path::PathBuf;

/// Errors of this crate. Each concerns one input or one request, never the engine.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// The tokenizer file cannot be read.
    #[error("cannot read the tokenizer {}: {source}", path.display())]
    ReadTokenizer {
        /// The file asked for.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The file is too large to be a tokenizer.
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
        /// The parser's message.
        message: String,
    },
    /// A token's id is so large that a table over all ids would not fit into memory.
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
        /// The library's message.
        message: String,
    },
    /// Too much text waits for the threads that tokenise.
    #[error(
        "{num_waiting} bytes of prompts wait for the tokenizer, and {num_bytes} more would exceed the limit of {limit}; send the request again later"
    )]
    TokenizerBusy {
        /// Size of the text that was refused.
        num_bytes: usize,
        /// Size of the texts that wait.
        num_waiting: usize,
        /// Most bytes that may wait.
        limit: usize,
    },
    /// No thread could be started to tokenise.
    #[error("no thread can be started to tokenise in: {source}")]
    NoTokenizerThread {
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The tokenizer could not decode token ids.
    #[error("the tokenizer cannot decode {num_tokens} token ids: {message}")]
    Decode {
        /// Number of ids.
        num_tokens: usize,
        /// The library's message.
        message: String,
    },
    /// A stop string is empty: it would stop every text at once.
    #[error("stop string {index} is empty; every stop string needs at least one character")]
    EmptyStopString {
        /// Its index in the list.
        index: usize,
    },
    /// The stop strings of one request are too large in total.
    #[error("the stop strings have {num_bytes} bytes together, more than the limit of {limit}")]
    StopStringsTooLong {
        /// Their total size.
        num_bytes: usize,
        /// The largest total size.
        limit: usize,
    },
    /// A request has stop strings, but its output is not turned into text.
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
