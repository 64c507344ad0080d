//! A compiled grammar that follows an output: the library's parser, with its panics caught and its size known.

use std::{fmt::Display, sync::Arc};

use llguidance::TokenParser;
use toktrie::SimpleVob;

use crate::{error::GrammarError, guarded::guarded};

/// What a matcher has found out about its grammar.
pub(crate) struct Size {
    /// Of its tables, nearly.
    pub(crate) num_bytes: usize,
    /// Of its lexer.
    pub(crate) num_states: usize,
}

/// Follows one output.
pub(crate) struct Matcher {
    parser: TokenParser,
    /// Some rules of grammars (`stop=`, `max_tokens=`) cannot be taken back.
    can_roll_back: bool,
}

impl Matcher {
    /// A matcher that has seen nothing.
    pub(crate) fn new(mut parser: TokenParser) -> Self {
        if parser.is_fresh() {
            parser.start_without_prompt();
        }
        // The library bounds its lexer from the first mask on. Without one, half a million letters that have to follow took
        // 250 MiB and two seconds before that.
        let computer = Arc::clone(&parser.bias_computer);
        parser.parser.compute_bias(&*computer, &[]);
        let can_roll_back = guarded(|| parser.parser.rollback(0).map_err(refused)).is_ok();
        Self { parser, can_roll_back }
    }

    /// One that shares nothing with this one, but knows what this one has found out about the grammar.
    pub(crate) fn deep_clone(&self) -> Self {
        Self { parser: self.parser.deep_clone(), can_roll_back: self.can_roll_back }
    }

    /// Take a token.
    ///
    /// # Errors
    /// The grammar does not take it, or has become too complex to follow.
    pub(crate) fn take(&mut self, token: u32) -> Result<(), GrammarError> {
        guarded(|| {
            let num_undone = self.parser.consume_token(token).map_err(refused)?;
            if num_undone > 0 {
                return Err(GrammarError::refused("the grammar takes tokens back"));
            }
            self.parser.check_stop().map_err(refused).map(|_| ())
        })
    }

    /// Whether a token can be taken, and taken back: ids of which grammars speak by their number cannot.
    pub(crate) fn can_roll_back(&self, token: u32) -> bool {
        self.can_roll_back && !self.parser.token_env.tok_trie().is_special_token(token)
    }

    /// Forget the last tokens that were taken, so many.
    ///
    /// # Errors
    /// It was stopped by an error.
    pub(crate) fn roll_back(&mut self, num_tokens: usize) -> Result<(), GrammarError> {
        guarded(|| self.parser.rollback(num_tokens).map_err(refused))
    }

    /// How many of some tokens could be taken one after the other.
    ///
    /// # Errors
    /// The grammar has become too complex to follow.
    pub(crate) fn num_taken(&mut self, tokens: &[u32]) -> Result<usize, GrammarError> {
        guarded(|| self.parser.validate_tokens_raw(tokens).map_err(refused))
    }

    /// Whether a token could be taken.
    ///
    /// # Errors
    /// The grammar has become too complex to follow.
    pub(crate) fn takes(&mut self, token: u32) -> Result<bool, GrammarError> {
        guarded(|| self.parser.validate_token(token).map_err(refused))
    }

    /// The ids that may follow; those that end an output, where nothing else may.
    ///
    /// # Errors
    /// The grammar has become too complex to follow.
    pub(crate) fn mask(&mut self) -> Result<SimpleVob, GrammarError> {
        guarded(|| {
            if self.parser.stopped() {
                return Ok(self.parser.token_env.tok_trie().eos_token_set());
            }
            self.parser.compute_mask().map_err(refused)
        })
    }

    /// The tokens that have to follow, as the tokenizer writes their text; none where there is a choice, or where the
    /// tokenizer does not write texts as they are.
    ///
    /// # Errors
    /// The grammar has become too complex to follow.
    pub(crate) fn forced_tokens(&mut self) -> Result<Vec<u32>, GrammarError> {
        guarded(|| {
            let is_over = self.parser.stopped() || !self.parser.token_env.tokenize_is_canonical();
            Ok(if is_over { Vec::new() } else { self.parser.compute_ff_tokens() })
        })
    }

    /// Whether the output may end here.
    ///
    /// # Errors
    /// The grammar has become too complex to follow.
    pub(crate) fn is_accepting(&mut self) -> Result<bool, GrammarError> {
        guarded(|| Ok(self.parser.is_accepting()))
    }

    /// Whether nothing can follow: the grammar is complete, or an error has stopped it.
    pub(crate) fn is_stopped(&self) -> bool {
        self.parser.stopped()
    }

    /// Whether it was stopped because the grammar is complete.
    pub(crate) fn is_complete(&self) -> bool {
        self.parser.stopped() && self.parser.stop_reason().is_ok()
    }

    /// Whether the grammar has become too complex to follow.
    pub(crate) fn has_failed(&self) -> bool {
        self.parser.parser.get_error().is_some()
    }

    /// Forget the tokens, but not what was found out about the grammar.
    ///
    /// # Errors
    /// It was stopped by an error.
    pub(crate) fn reset(&mut self) -> Result<(), GrammarError> {
        guarded(|| self.parser.reset().map_err(refused))
    }

    /// How much was found out about the grammar.
    ///
    /// # Errors
    /// A panic has left the parser half done.
    pub(crate) fn size(&self) -> Result<Size, GrammarError> {
        guarded(|| {
            let stats = self.parser.parser.lexer_stats();
            Ok(Size { num_bytes: stats.num_bytes, num_states: stats.num_states })
        })
    }
}

fn refused(error: impl Display) -> GrammarError {
    GrammarError::refused(&error.to_string())
}
