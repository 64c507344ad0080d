//! Incremental detokenisation: one token in, the text that is now certain out.
//!
//! The promise: with `context` the prompt and `output` the generated tokens, the texts emitted add up to
//! `decode(context + output)` without `decode(context)`. So the first token keeps or loses its leading space as the
//! prompt demands, and a streamed answer equals one decoded at the end. Work per token does not depend on how
//! many came before: only what later tokens can still change is kept back:
//!
//! * the bytes of an incomplete UTF-8 character, at the end emitted as U+FFFD;
//! * for tokenizers with byte fallback the run of byte tokens at the end, because the decoder's rule for such a run is
//!   all or nothing: one invalid byte turns each of its bytes into U+FFFD. Once a run is invalid nothing more is held.
//!
//! Where the prompt ends inside a character, the output's text begins with the whole character, or with nothing for it
//! when it stays incomplete (the prompt's own U+FFFD is not repeated).
//!
//! ```text
//! id ──▶ TokenPieces ──▶ pending bytes ──▶ leading strip ──▶ text
//! ```

use std::collections::VecDeque;
use std::sync::Arc;

use crate::token_pieces::{Chain, Piece, TokenPieces};
use crate::tokenizer::Tokenizer;

/// How special tokens appear in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DetokenizeOptions {
    /// Omit special tokens from the text.
    pub skip_special_tokens: bool,
    /// Keep the space that some decoders put between two added tokens.
    pub spaces_between_special_tokens: bool,
}

impl Default for DetokenizeOptions {
    fn default() -> Self {
        Self { skip_special_tokens: true, spaces_between_special_tokens: true }
    }
}

/// The detokenizer of one request.
#[derive(Debug)]
pub struct IncrementalDetokenizer {
    tokenizer: Arc<Tokenizer>,
    options: DetokenizeOptions,
    state: TextState,
    /// Used only for unknown decoder chains: the library decodes a short window of tokens.
    window: Window,
    last_was_added: bool,
}

impl IncrementalDetokenizer {
    /// Start after a prompt. Reads only as much of the prompt's end as can matter.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, prompt_token_ids: &[u32], options: DetokenizeOptions) -> Self {
        let mut detokenizer = Self {
            state: TextState::new(tokenizer.pieces()),
            window: Window::default(),
            last_was_added: false,
            options,
            tokenizer,
        };
        detokenizer.read_context(prompt_token_ids);
        detokenizer
    }

    /// Take one token and append to `text` what has become certain. Unknown ids add nothing.
    pub fn push(&mut self, token_id: u32, text: &mut String) {
        let Self { tokenizer, options, state, window, last_was_added } = self;
        let pieces = tokenizer.pieces();
        if pieces.is_skipped(token_id, options.skip_special_tokens) {
            return;
        }
        let start = text.len();
        match pieces.chain() {
            Chain::Opaque => window.push(tokenizer, token_id, options.skip_special_tokens, text),
            Chain::Text { first_differs: true } if state.is_first => {
                state.is_first = false;
                // Only the library knows the first token's own form. If its decoder fails, there is no text.
                text.push_str(&tokenizer.decode(&[token_id], false).unwrap_or_default());
            }
            chain => {
                state.is_first = false;
                state.push(chain, pieces.piece(token_id), text);
            }
        }
        if !options.skip_special_tokens && !options.spaces_between_special_tokens {
            let is_added = pieces.is_added(token_id);
            if is_added && *last_was_added && text[start..].starts_with(' ') {
                text.remove(start);
            }
            *last_was_added = is_added;
        }
    }

    /// End the request: append what was held back, with invalid bytes as U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        match self.tokenizer.pieces().chain() {
            Chain::Bytes if !self.state.pending.is_empty() => {
                self.state.pending.clear();
                self.state.emit("\u{FFFD}", text);
            }
            Chain::ByteFallback => self.state.close_run(text),
            Chain::Opaque => self.window.flush(&self.tokenizer, self.options.skip_special_tokens, text),
            _ => {}
        }
    }

    fn read_context(&mut self, prompt: &[u32]) {
        // Text before the last four certain bytes cannot change what comes after them.
        const ENOUGH_BYTES: usize = 4;
        let Self { tokenizer, options, state, window, last_was_added } = self;
        let pieces = tokenizer.pieces();
        let skip_special = options.skip_special_tokens;
        let chain = pieces.chain();
        *last_was_added = prompt.last().is_some_and(|&id| pieces.is_added(id));
        let mut start = prompt.len();
        let mut num_bytes = 0;
        let mut num_tokens = 0;
        while start > 0 && num_bytes < ENOUGH_BYTES {
            start -= 1;
            if pieces.is_skipped(prompt[start], skip_special) {
                continue;
            }
            num_tokens += 1;
            num_bytes += match (chain, pieces.piece(prompt[start])) {
                (Chain::Opaque, _) => usize::from(num_tokens % Window::CONTEXT == 0) * ENOUGH_BYTES,
                (_, Piece::Text(piece)) => piece.len(),
                (Chain::Bytes, Piece::Bytes(piece)) => piece.len(),
                // A run of byte tokens is one unit, however long.
                (_, Piece::Bytes(_)) => 0,
            };
        }
        if start > 0 {
            // The beginning was stripped before, even if the part that is read here is too short to show it.
            state.is_first = false;
            state.strip_left = 0;
        }
        let seen = prompt[start..].iter().copied().filter(|&id| !pieces.is_skipped(id, skip_special));
        if chain == Chain::Opaque {
            window.prime(tokenizer, seen.collect(), skip_special);
            return;
        }
        let mut context = String::new();
        for token_id in seen {
            state.is_first = false;
            state.push(chain, pieces.piece(token_id), &mut context);
        }
        state.close_context(chain, &mut context);
    }
}

/// Text that is not certain yet, and what must still be stripped from the beginning.
#[derive(Debug)]
struct TextState {
    /// An incomplete character ([`Chain::Bytes`]), or the run of byte tokens ([`Chain::ByteFallback`]).
    pending: Vec<u8>,
    /// In a run: the number of leading bytes that are whole characters.
    num_whole: usize,
    /// Whether the run is invalid: each of its bytes, and each further one, becomes U+FFFD.
    is_run_broken: bool,
    is_first: bool,
    strip_content: char,
    strip_left: usize,
    /// Number of U+FFFD that belong to the prompt's text, not to the output's.
    prompt_replacements: usize,
}

impl TextState {
    fn new(pieces: &TokenPieces) -> Self {
        let strip = pieces.strip();
        Self {
            pending: Vec::new(),
            num_whole: 0,
            is_run_broken: false,
            is_first: true,
            strip_content: strip.map_or(' ', |strip| strip.content),
            strip_left: strip.map_or(0, |strip| strip.count),
            prompt_replacements: 0,
        }
    }

    fn push(&mut self, chain: Chain, piece: Piece<'_>, text: &mut String) {
        match (chain, piece) {
            (Chain::Bytes, Piece::Text(piece)) if self.pending.is_empty() => self.emit(piece, text),
            (Chain::Bytes, Piece::Text(piece)) => self.push_bytes(piece.as_bytes(), text),
            (Chain::Bytes, Piece::Bytes(piece)) => self.push_bytes(piece, text),
            (_, Piece::Bytes(piece)) => {
                for &byte in piece {
                    self.push_run_byte(byte, text);
                }
            }
            (_, Piece::Text(piece)) => {
                self.close_run(text);
                self.emit(piece, text);
            }
        }
    }

    /// Byte-level: emit whole characters and one U+FFFD per maximal invalid part; keep an incomplete character.
    fn push_bytes(&mut self, bytes: &[u8], text: &mut String) {
        let mut pending = std::mem::take(&mut self.pending);
        pending.extend_from_slice(bytes);
        let mut done = 0;
        while let Err(error) = std::str::from_utf8(&pending[done..]) {
            self.emit_valid(&pending[done..done + error.valid_up_to()], text);
            done += error.valid_up_to();
            let Some(num_invalid) = error.error_len() else { break };
            self.emit("\u{FFFD}", text);
            done += num_invalid;
        }
        if std::str::from_utf8(&pending[done..]).is_ok() {
            self.emit_valid(&pending[done..], text);
            done = pending.len();
        }
        pending.drain(..done);
        self.pending = pending;
    }

    /// Byte fallback: append a byte to the run.
    fn push_run_byte(&mut self, byte: u8, text: &mut String) {
        if self.is_run_broken {
            self.emit("\u{FFFD}", text);
            return;
        }
        self.pending.push(byte);
        // A character has at most four bytes, so this looks at four bytes at most.
        match std::str::from_utf8(&self.pending[self.num_whole..]) {
            Ok(_) => self.num_whole = self.pending.len(),
            Err(error) if error.error_len().is_none() => {}
            Err(_) => {
                self.is_run_broken = true;
                self.emit_replacements(text);
            }
        }
    }

    /// Byte fallback: end the run, at a token that is not a byte or at the end of the text.
    fn close_run(&mut self, text: &mut String) {
        self.is_run_broken = false;
        if self.pending.is_empty() {
            return;
        }
        if self.num_whole == self.pending.len() {
            let run = std::mem::take(&mut self.pending);
            self.emit_valid(&run, text);
            self.num_whole = 0;
        } else {
            self.emit_replacements(text);
        }
    }

    fn emit_replacements(&mut self, text: &mut String) {
        for _ in 0..std::mem::take(&mut self.pending).len() {
            self.emit("\u{FFFD}", text);
        }
        self.num_whole = 0;
    }

    /// End the prompt: its whole characters belong to it; an incomplete one may become the output's.
    fn close_context(&mut self, chain: Chain, context: &mut String) {
        let whole: Vec<u8> = self.pending.drain(..self.num_whole).collect();
        self.num_whole = 0;
        self.emit_valid(&whole, context);
        self.prompt_replacements = match chain {
            Chain::Bytes => usize::from(!self.pending.is_empty()),
            _ => self.pending.len(),
        };
    }

    fn emit_valid(&mut self, bytes: &[u8], text: &mut String) {
        // The callers have checked the bytes. If they had not, text would be lost, but the string would stay valid.
        self.emit(std::str::from_utf8(bytes).unwrap_or_default(), text);
    }

    /// Append certain text, without what must be stripped from the beginning.
    fn emit(&mut self, mut piece: &str, text: &mut String) {
        if self.strip_left > 0 {
            piece = Self::trim(piece, self.strip_content, &mut self.strip_left);
        }
        if self.prompt_replacements > 0 {
            piece = Self::trim(piece, '\u{FFFD}', &mut self.prompt_replacements);
        }
        text.push_str(piece);
    }

    /// Strip up to `left` leading `content` characters; any other character ends the stripping for good.
    fn trim<'a>(mut piece: &'a str, content: char, left: &mut usize) -> &'a str {
        while *left > 0 && !piece.is_empty() {
            if let Some(rest) = piece.strip_prefix(content) {
                piece = rest;
                *left -= 1;
            } else {
                *left = 0;
            }
        }
        piece
    }
}

/// Decoding by the library, for unknown decoders: a token's text is the difference between decoding a short window with
/// it and without it. Text that ends in U+FFFD is held back, for at most [`Window::MAX_HELD`] tokens.
#[derive(Debug, Default)]
struct Window {
    ids: VecDeque<u32>,
    /// How many of `ids` were emitted; the others are held back.
    num_emitted: usize,
}

impl Window {
    /// Emitted tokens kept as context.
    const CONTEXT: usize = 6;
    /// Most tokens that are held back; limits the work per token.
    const MAX_HELD: usize = 16;

    fn prime(&mut self, tokenizer: &Tokenizer, prompt: Vec<u32>, skip_special_tokens: bool) {
        for token_id in prompt {
            self.push(tokenizer, token_id, skip_special_tokens, &mut String::new());
        }
    }

    fn push(&mut self, tokenizer: &Tokenizer, token_id: u32, skip_special_tokens: bool, text: &mut String) {
        self.ids.push_back(token_id);
        self.emit(tokenizer, skip_special_tokens, self.ids.len() - self.num_emitted > Self::MAX_HELD, text);
    }

    fn flush(&mut self, tokenizer: &Tokenizer, skip_special_tokens: bool, text: &mut String) {
        self.emit(tokenizer, skip_special_tokens, true, text);
    }

    fn emit(
        &mut self,
        tokenizer: &Tokenizer,
        skip_special_tokens: bool,
        even_if_incomplete: bool,
        text: &mut String,
    ) {
        let ids = self.ids.make_contiguous();
        if self.num_emitted == ids.len() {
            return;
        }
        // If the decoder fails, these tokens have no text.
        let before = tokenizer.decode(&ids[..self.num_emitted], skip_special_tokens).unwrap_or_default();
        let after = tokenizer.decode(ids, skip_special_tokens).unwrap_or_default();
        if after.ends_with('\u{FFFD}') && !even_if_incomplete {
            return;
        }
        // If the decoder has changed earlier text, that text stays as it was emitted.
        let common: usize =
            before.chars().zip(after.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
        text.push_str(&after[common..]);
        self.num_emitted = ids.len();
        while self.num_emitted > Self::CONTEXT {
            self.ids.pop_front();
            self.num_emitted -= 1;
        }
    }
}
