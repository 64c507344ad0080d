//! A tokenizer read from `tokenizer.json`: text to token ids and back.
//!
//! A thin wrapper around the `tokenizers` library, which does the work. It adds what a server needs. Sizes are limited
//! before memory is taken. Truncation and padding that are stored in the file are switched off, because they belong to
//! training and would silently cut prompts here. A panic in the library becomes an error. The table of [`TokenPieces`],
//! which makes incremental detokenisation cheap, is built once and shared.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::OnceLock;

use tokenizers::parallelism::MaybeParallelIterator;

use crate::error::OutputError;
use crate::guarded::guarded;
use crate::token_pieces::{Chain, Piece, TokenPieces};

/// Largest `tokenizer.json` that is read. The largest in use have about 40 MB.
pub const MAX_TOKENIZER_BYTES: u64 = 512 << 20;
/// Largest token id. The largest vocabularies in use have about 300,000 entries.
pub const MAX_TOKEN_ID: u32 = (1 << 24) - 1;

/// A Hugging Face fast tokenizer. Immutable and shared between threads.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocab_size: usize,
    max_token_id: Option<u32>,
    special_token_ids: Vec<u32>,
    pieces: OnceLock<TokenPieces>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// The file cannot be read, is too large, or is not a tokenizer.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, OutputError> {
        let path = path.as_ref();
        let read = || -> std::io::Result<Vec<u8>> {
            let mut data = Vec::new();
            // One byte more than allowed, so that a file that is too large is noticed whatever its metadata says.
            File::open(path)?.take(MAX_TOKENIZER_BYTES + 1).read_to_end(&mut data)?;
            Ok(data)
        };
        let data = read().map_err(|source| OutputError::ReadTokenizer { path: path.to_owned(), source })?;
        Self::parse(&data, &path.display().to_string())
    }

    /// Reads the content of a `tokenizer.json`.
    ///
    /// # Errors
    /// The content is too large or is not a tokenizer.
    pub fn from_bytes(data: &[u8]) -> Result<Self, OutputError> {
        Self::parse(data, "<bytes>")
    }

    fn parse(data: &[u8], origin: &str) -> Result<Self, OutputError> {
        let num_bytes = data.len() as u64;
        if num_bytes > MAX_TOKENIZER_BYTES {
            let origin = origin.to_owned();
            return Err(OutputError::TokenizerTooLarge { origin, num_bytes, limit: MAX_TOKENIZER_BYTES });
        }
        let parse_error = |message| OutputError::ParseTokenizer { origin: origin.to_owned(), message };
        let mut inner = guarded(|| tokenizers::Tokenizer::from_bytes(data)).map_err(parse_error)?;
        guarded(|| inner.with_truncation(None).map(|_| ())).map_err(parse_error)?;
        inner.with_padding(None);

        let vocab = inner.get_vocab(true);
        let last = vocab.iter().max_by_key(|(_, id)| **id);
        if let Some((token, &token_id)) = last
            && token_id > MAX_TOKEN_ID
        {
            let (origin, token) = (origin.to_owned(), token.clone());
            return Err(OutputError::TokenIdTooLarge { origin, token, token_id, limit: MAX_TOKEN_ID });
        }
        let mut special_token_ids: Vec<u32> = inner
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .iter()
            .filter_map(|(&id, token)| token.special.then_some(id))
            .collect();
        special_token_ids.sort_unstable();
        Ok(Self {
            vocab_size: vocab.len(),
            max_token_id: last.map(|(_, &id)| id),
            special_token_ids,
            inner,
            pieces: OnceLock::new(),
        })
    }

    /// Token ids of a text. `add_special_tokens` adds what the file's post-processor adds, usually a BOS token.
    ///
    /// # Errors
    /// The library cannot encode the text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, OutputError> {
        guarded(|| self.inner.encode_fast(text, add_special_tokens))
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|message| OutputError::Encode { num_bytes: text.len(), message })
    }

    /// Token ids of several texts, in their order, encoded in parallel.
    ///
    /// # Errors
    /// The library cannot encode one of the texts.
    pub fn encode_batch(
        &self,
        texts: &[&str],
        add_special_tokens: bool,
    ) -> Result<Vec<Vec<u32>>, OutputError> {
        texts.to_vec().into_maybe_par_iter().map(|text| self.encode(text, add_special_tokens)).collect()
    }

    /// Text of token ids. Unknown ids add nothing.
    ///
    /// # Errors
    /// The library's decoder fails.
    pub fn decode(&self, token_ids: &[u32], skip_special_tokens: bool) -> Result<String, OutputError> {
        // Some decoders of the library fail on an empty list.
        if token_ids.iter().all(|&token_id| self.pieces().is_skipped(token_id, skip_special_tokens)) {
            return Ok(String::new());
        }
        guarded(|| self.inner.decode(token_ids, skip_special_tokens))
            .map_err(|message| OutputError::Decode { num_tokens: token_ids.len(), message })
    }

    /// The vocabulary entry of an id: the token's own spelling, not its text (`Ġthe`, `▁the`, `<0x0A>`).
    #[must_use]
    pub fn id_to_token(&self, token_id: u32) -> Option<String> {
        self.inner.id_to_token(token_id)
    }

    /// The bytes that a token adds to a text after other tokens, perhaps only part of a character; a special token
    /// gives its own text. Empty for an unknown id.
    #[must_use]
    pub fn token_bytes(&self, token_id: u32) -> Vec<u8> {
        if self.pieces().chain() == Chain::Opaque {
            // If the decoder fails, there is no text.
            return self.decode(&[token_id], false).unwrap_or_default().into_bytes();
        }
        match self.pieces().piece(token_id) {
            Piece::Text(text) => text.as_bytes().to_vec(),
            Piece::Bytes(bytes) => bytes.to_vec(),
        }
    }

    /// Whether [`token_bytes`](Self::token_bytes) is really what each token adds to a text. It is not if the decoder
    /// rewrites tokens depending on their neighbours.
    #[must_use]
    pub fn has_token_bytes(&self) -> bool {
        self.pieces().chain() != Chain::Opaque
    }

    /// The id of a vocabulary entry.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Number of vocabulary entries, including added tokens.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The largest id in the vocabulary; `None` if it is empty. Ids may have gaps.
    #[must_use]
    pub fn max_token_id(&self) -> Option<u32> {
        self.max_token_id
    }

    /// Ids of the special tokens (those that `skip_special_tokens` leaves out), ascending.
    #[must_use]
    pub fn special_token_ids(&self) -> &[u32] {
        &self.special_token_ids
    }

    /// The table of what each id adds to the text; built by the first call.
    pub(crate) fn pieces(&self) -> &TokenPieces {
        self.pieces.get_or_init(|| {
            guarded(|| Ok::<_, tokenizers::Error>(TokenPieces::build(&self.inner, self.max_token_id)))
                .unwrap_or_else(|_| TokenPieces::opaque(&self.inner, self.max_token_id))
        })
    }
}
