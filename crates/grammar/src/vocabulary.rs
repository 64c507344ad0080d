//! The model's vocabulary as the library wants it: the bytes of each id.

use std::sync::{Arc, OnceLock};

use llguidance::{ParserFactory, api::ParserLimits, earley::SlicedBiasComputer};
use output::Tokenizer;
use toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::{error::GrammarError, limits::limits};

/// Reads the tokenizer and the ids that end an answer, or says why it cannot.
pub type LoadTokenizer = Box<dyn Fn() -> Result<(Arc<Tokenizer>, Vec<u32>), String> + Send + Sync>;

/// A vocabulary, read when the first grammar is compiled: an engine that sees none does not pay for it.
pub struct Vocabulary {
    load: LoadTokenizer,
    /// Ids that have a logit.
    num_ids: u32,
    read: OnceLock<Result<Read, GrammarError>>,
}

/// What reading it gave.
struct Read {
    factory: ParserFactory,
    eos_token_ids: Vec<u32>,
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("num_ids", &self.num_ids).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// The vocabulary of a model.
    ///
    /// `load` is called in a compile thread. `num_ids` is the width of its logits, which may be more than the tokenizer
    /// knows.
    #[must_use]
    pub fn new(load: LoadTokenizer, num_ids: u32) -> Self {
        Self { load, num_ids, read: OnceLock::new() }
    }

    /// Words of 32 bits that a mask has.
    #[must_use]
    pub fn num_mask_words(&self) -> usize {
        self.num_ids.div_ceil(32) as usize
    }

    /// Ids that end an answer; none before a grammar was compiled.
    pub(crate) fn eos_token_ids(&self) -> &[u32] {
        self.read.get().and_then(|read| read.as_ref().ok()).map_or(&[], |read| &read.eos_token_ids)
    }

    /// What compiles grammars for this vocabulary; the first call takes some hundred milliseconds.
    pub(crate) fn factory(&self) -> Result<&ParserFactory, GrammarError> {
        self.read.get_or_init(|| self.build()).as_ref().map(|read| &read.factory).map_err(Clone::clone)
    }

    /// The bytes that the grammars see of some ids.
    pub(crate) fn bytes_of(&self, ids: &[u32]) -> Result<Vec<u8>, GrammarError> {
        Ok(self.factory()?.tok_env().tok_trie().decode_raw(ids))
    }

    fn build(&self) -> Result<Read, GrammarError> {
        let (tokenizer, mut eos_token_ids) = (self.load)().map_err(GrammarError::UnreadableTokenizer)?;
        if !tokenizer.has_token_bytes() {
            return Err(GrammarError::OpaqueTokenizer);
        }
        eos_token_ids.retain(|&token_id| token_id < self.num_ids);
        let word = |token_id| word(&tokenizer, &eos_token_ids, token_id);
        let words: Vec<Vec<u8>> = (0..self.num_ids).map(word).collect();
        let eos = eos_token_ids.first().copied().unwrap_or(toktrie::INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(self.num_ids, eos), &words);
        if !eos_token_ids.is_empty() {
            trie = trie.with_eos_tokens(&eos_token_ids);
        }
        let round_trips = PROBES.iter().all(|text| canonical(&tokenizer, &trie, text).is_some());
        let env: TokEnv = Arc::new(Text { trie, tokenizer, round_trips });
        let factory = quiet_factory(&env, &SlicedBiasComputer::json_slices(), limits())?;
        Ok(Read { factory, eos_token_ids })
    }
}

/// The bytes of an id. One that is not text is marked, so that it is never taken for the text that it is written as.
fn word(tokenizer: &Tokenizer, eos_token_ids: &[u32], token_id: u32) -> Vec<u8> {
    let marker = TokTrie::SPECIAL_TOKEN_MARKER;
    let bytes = tokenizer.token_bytes(token_id);
    let is_special = tokenizer.special_token_ids().binary_search(&token_id).is_ok();
    if bytes.is_empty() {
        return [&[marker], format!("[{token_id}]").as_bytes()].concat();
    }
    if is_special || eos_token_ids.contains(&token_id) { [&[marker], &*bytes].concat() } else { bytes }
}

/// Texts as they stand within others: a tokenizer that adds something to one of them, a space in front, gives no tokens
/// that could be appended to an output.
const PROBES: [&str; 6] = ["name", " name", "\": \"", "{\"a\": 1}", "\n", "é"];

/// The trie, and the tokenizer: where a grammar leaves one text, its tokens are those that the tokenizer makes of it.
struct Text {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
    round_trips: bool,
}

impl TokenizerEnv for Text {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, text: &[u8]) -> Vec<TokenId> {
        let own = |text: &str| {
            canonical(&self.tokenizer, &self.trie, text)
                .unwrap_or_else(|| self.trie.greedy_tokenize(text.as_bytes()))
        };
        self.trie.tokenize_with_greedy_fallback(text, own)
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.round_trips
    }
}

/// The tokenizer's ids of a text, unless their bytes are not those of the text: a special token is not the text that it
/// is written as.
fn canonical(tokenizer: &Tokenizer, trie: &TokTrie, text: &str) -> Option<Vec<TokenId>> {
    let ids = tokenizer.encode(text, false).ok()?;
    let is_known = |&id: &TokenId| (id as usize) < trie.vocab_size();
    (ids.iter().all(is_known) && trie.decode_raw(&ids) == text.as_bytes()).then_some(ids)
}

/// The trie alone: no text is tokenised, so no tokens are forced.
pub(crate) struct Pieces(pub(crate) TokTrie);

impl TokenizerEnv for Pieces {
    fn tok_trie(&self) -> &TokTrie {
        &self.0
    }

    fn tokenize_bytes(&self, text: &[u8]) -> Vec<TokenId> {
        self.0.greedy_tokenize(text)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// A factory that does not write to stderr.
pub(crate) fn quiet_factory(
    env: &TokEnv,
    slices: &[String],
    limits: ParserLimits,
) -> Result<ParserFactory, GrammarError> {
    let factory = ParserFactory::new(env, InferenceCapabilities::default(), slices);
    let mut factory = factory.map_err(|error| GrammarError::refused(&error.to_string()))?;
    factory.quiet();
    *factory.limits_mut() = limits;
    Ok(factory)
}
