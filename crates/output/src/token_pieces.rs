//! What each token id adds to the text, worked out once per tokenizer.
//!
//! A tokenizer's decoder is a chain of steps over a list of token strings. Nearly every tokenizer in use has one of a few
//! chains, in which the text of a token depends on its neighbours only in ways that a few bytes of state can follow:
//!
//! | chain (steps that change one token at a time may stand in front) | text | state |
//! |---|---|---|
//! | `ByteLevel` (GPT-2, Llama 3, Qwen, `ChatML` models) | bytes, read as UTF-8 | an incomplete character |
//! | `ByteFallback`, `Fuse`, `Strip` (Llama 2, Mistral, Phi-3, Gemma) | strings; `<0xE2>` tokens are bytes | the run of byte tokens |
//! | `Fuse`, `Metaspace`, `WordPiece`, none | strings | whether a token came before |
//!
//! For these the piece of every id is kept in one arena. Any other chain is [`Chain::Opaque`]: the detokeniser then calls
//! the library for a short window of tokens.

use tokenizers::decoders::DecoderWrapper;
use tokenizers::{Decoder, Model};

/// How pieces become text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Chain {
    /// Pieces are bytes; each maximal invalid part of the sequence becomes one U+FFFD.
    Bytes,
    /// Pieces are text, but some are single bytes; a run of bytes that is not UTF-8 becomes one U+FFFD per byte.
    ByteFallback,
    /// Pieces are text. `first_differs`: as the first token of a sequence, a token has another piece.
    Text {
        /// Whether the first token must be decoded on its own.
        first_differs: bool,
    },
    /// An unknown chain.
    Opaque,
}

/// One token's piece.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Piece<'a> {
    /// Whole characters.
    Text(&'a str),
    /// Bytes that are not whole characters by themselves; under [`Chain::ByteFallback`] always one.
    Bytes(&'a [u8]),
}

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    start: u32,
    end: u32,
    flags: u8,
}

const KNOWN: u8 = 1;
const SPECIAL: u8 = 2;
const ADDED: u8 = 4;
const RAW: u8 = 8;

/// Leading characters that the chain's `Strip` step removes from the whole text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeadingStrip {
    pub(crate) content: char,
    pub(crate) count: usize,
}

/// A `Strip` of more characters than this is left to the library. This limits how much of a prompt must be read.
const MAX_LEADING_STRIP: usize = 4;

/// The table from ids to pieces and flags.
#[derive(Debug)]
pub(crate) struct TokenPieces {
    chain: Chain,
    strip: Option<LeadingStrip>,
    text: String,
    raw: Vec<u8>,
    entries: Vec<Entry>,
}

impl TokenPieces {
    /// Build the table, in one pass over the vocabulary.
    pub(crate) fn build(tokenizer: &tokenizers::Tokenizer, max_token_id: Option<u32>) -> Self {
        let plan = Plan::of(tokenizer.get_decoder());
        let tokens = all_tokens(tokenizer, max_token_id);
        let mut pieces = Self::with_flags(tokenizer, max_token_id, &tokens);

        // A token in front makes every other one a later token; its own text is dropped.
        let mut strings = vec!["x".to_owned()];
        strings.extend(tokens.iter().map(|(_, token)| token.clone()));
        for step in &plan.per_token {
            let num_tokens = strings.len();
            match step.decode_chain(strings) {
                Ok(mapped) if mapped.len() == num_tokens => strings = mapped,
                _ => return pieces,
            }
        }
        pieces.chain = plan.chain;
        pieces.strip = plan.strip;
        for ((id, _), string) in tokens.iter().zip(strings.drain(1..)) {
            match plan.chain {
                Chain::Bytes => match String::from_utf8(byte_level_bytes(string)) {
                    Ok(text) => pieces.set_text(*id, &text),
                    Err(error) => pieces.set_raw(*id, error.as_bytes()),
                },
                Chain::ByteFallback => match fallback_byte(&string) {
                    Some(byte) => pieces.set_raw(*id, &[byte]),
                    None => pieces.set_text(*id, &string),
                },
                Chain::Text { .. } if plan.space_between => pieces.set_text(*id, &format!(" {string}")),
                Chain::Text { .. } => pieces.set_text(*id, &string),
                Chain::Opaque => {}
            }
        }
        pieces
    }

    /// Make a table with flags but without pieces.
    pub(crate) fn opaque(tokenizer: &tokenizers::Tokenizer, max_token_id: Option<u32>) -> Self {
        Self::with_flags(tokenizer, max_token_id, &all_tokens(tokenizer, max_token_id))
    }

    fn with_flags(
        tokenizer: &tokenizers::Tokenizer,
        max_token_id: Option<u32>,
        tokens: &[(u32, String)],
    ) -> Self {
        let added = tokenizer.get_added_vocabulary();
        let mut entries = vec![Entry::default(); max_token_id.map_or(0, |id| id as usize + 1)];
        for (id, token) in tokens {
            let flags = &mut entries[*id as usize].flags;
            *flags |= KNOWN;
            if added.is_special_token(token) {
                *flags |= SPECIAL;
            }
            if added.get_added_tokens_decoder().contains_key(id) {
                *flags |= ADDED;
            }
        }
        Self { chain: Chain::Opaque, strip: None, text: String::new(), raw: Vec::new(), entries }
    }

    pub(crate) fn chain(&self) -> Chain {
        self.chain
    }

    pub(crate) fn strip(&self) -> Option<LeadingStrip> {
        self.strip
    }

    /// Whether decoding skips this id: it is not in the vocabulary, or it is special and special tokens are skipped.
    pub(crate) fn is_skipped(&self, token_id: u32, skip_special_tokens: bool) -> bool {
        let flags = self.entries.get(token_id as usize).map_or(0, |entry| entry.flags);
        flags & KNOWN == 0 || (skip_special_tokens && flags & SPECIAL != 0)
    }

    /// Whether the token was added to the model's vocabulary, as special tokens and some others are.
    pub(crate) fn is_added(&self, token_id: u32) -> bool {
        self.entries.get(token_id as usize).is_some_and(|entry| entry.flags & ADDED != 0)
    }

    /// The piece of an id; empty for an unknown one.
    pub(crate) fn piece(&self, token_id: u32) -> Piece<'_> {
        let Some(entry) = self.entries.get(token_id as usize) else { return Piece::Text("") };
        let range = entry.start as usize..entry.end as usize;
        if entry.flags & RAW != 0 { Piece::Bytes(&self.raw[range]) } else { Piece::Text(&self.text[range]) }
    }

    fn set_text(&mut self, id: u32, piece: &str) {
        let entry = &mut self.entries[id as usize];
        entry.start = self.text.len() as u32;
        self.text.push_str(piece);
        entry.end = self.text.len() as u32;
    }

    fn set_raw(&mut self, id: u32, piece: &[u8]) {
        let entry = &mut self.entries[id as usize];
        entry.flags |= RAW;
        entry.start = self.raw.len() as u32;
        self.raw.extend_from_slice(piece);
        entry.end = self.raw.len() as u32;
    }
}

/// Every id with the string that the library's `decode` starts from.
fn all_tokens(tokenizer: &tokenizers::Tokenizer, max_token_id: Option<u32>) -> Vec<(u32, String)> {
    let token_string = |id| {
        let added = tokenizer.get_added_vocabulary().simple_id_to_token(id);
        Some((id, added.or_else(|| tokenizer.get_model().id_to_token(id))?))
    };
    max_token_id.map_or_else(Vec::new, |last| (0..=last).filter_map(token_string).collect())
}

/// What a decoder chain amounts to.
struct Plan<'a> {
    chain: Chain,
    per_token: Vec<&'a DecoderWrapper>,
    strip: Option<LeadingStrip>,
    space_between: bool,
}

impl<'a> Plan<'a> {
    fn of(decoder: Option<&'a DecoderWrapper>) -> Self {
        let mut plan =
            Self { chain: Chain::Opaque, per_token: Vec::new(), strip: None, space_between: false };
        let Some(decoder) = decoder else {
            // Without a decoder the library joins tokens with spaces.
            plan.chain = Chain::Text { first_differs: true };
            plan.space_between = true;
            return plan;
        };
        let mut steps = Vec::new();
        flatten(decoder, &mut steps);
        let num_mapping = steps
            .iter()
            .take_while(|step| matches!(step, DecoderWrapper::Replace(_) | DecoderWrapper::Strip(_)))
            .count();
        let rest = steps.split_off(num_mapping);
        plan.per_token = steps;
        let chain;
        let mut tail = &rest[..];
        match rest.first() {
            Some(DecoderWrapper::ByteLevel(_)) => (chain, tail) = (Chain::Bytes, &rest[1..]),
            Some(DecoderWrapper::ByteFallback(_)) => (chain, tail) = (Chain::ByteFallback, &rest[1..]),
            Some(DecoderWrapper::Metaspace(_) | DecoderWrapper::WordPiece(_)) => {
                plan.per_token.push(rest[0]);
                (chain, tail) = (Chain::Text { first_differs: true }, &rest[1..]);
            }
            _ => chain = Chain::Text { first_differs: false },
        }
        // `ByteLevel` already gives one string, so a `Fuse` after it changes nothing.
        let fused = matches!(tail.first(), Some(DecoderWrapper::Fuse(_))) || chain == Chain::Bytes;
        if matches!(tail.first(), Some(DecoderWrapper::Fuse(_))) {
            tail = &tail[1..];
        }
        plan.chain = match tail {
            [] => chain,
            [DecoderWrapper::Strip(strip)]
                if fused
                    && strip.stop == 0
                    && strip.start <= MAX_LEADING_STRIP
                    && chain != (Chain::Text { first_differs: true }) =>
            {
                plan.strip = Some(LeadingStrip { content: strip.content, count: strip.start });
                chain
            }
            _ => Chain::Opaque,
        };
        plan
    }
}

fn flatten<'a>(decoder: &'a DecoderWrapper, steps: &mut Vec<&'a DecoderWrapper>) {
    if let DecoderWrapper::Sequence(sequence) = decoder {
        for step in sequence.get_decoders() {
            flatten(step, steps);
        }
    } else {
        steps.push(decoder);
    }
}

/// The byte that a byte-fallback token such as `<0xE2>` stands for, by the library's own rule.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The bytes of a byte-level token: each character stands for one byte. A token with any other character is an added one
/// and stands for itself.
fn byte_level_bytes(token: String) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = token.chars().map(byte_level_byte).collect();
    bytes.unwrap_or_else(|| token.into_bytes())
}

/// GPT-2's alphabet: printable Latin-1 characters are themselves, the other 68 bytes follow from U+0100 in byte order.
fn byte_level_byte(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_the_librarys() {
        let decoder = tokenizers::decoders::byte_level::ByteLevel::default();
        let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        assert_eq!(alphabet.len(), 256);
        for code in 0..0x400 {
            let Some(character) = char::from_u32(code) else { continue };
            assert_eq!(byte_level_byte(character).is_some(), alphabet.contains(&character), "{character:?}");
        }
        for &character in &alphabet {
            let token = character.to_string();
            let text = decoder.decode(vec![token.clone()]).expect("decodes");
            assert_eq!(String::from_utf8_lossy(&byte_level_bytes(token)), text, "{character:?}");
        }
    }

    #[test]
    fn byte_fallback_tokens() {
        assert_eq!(fallback_byte("<0x0A>"), Some(10));
        assert_eq!(fallback_byte("<0xfF>"), Some(255));
        for token in ["<0x0>", "<0x000>", "0x0A", "<0xGG>", "<0xé>", "<0x0A> ", ""] {
            assert_eq!(fallback_byte(token), None, "{token}");
        }
    }
}
