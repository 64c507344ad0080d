//! One sample of a request under a grammar: the tokens that it got, and what the next one may be.

use std::sync::{Mutex, MutexGuard, PoisonError};

use llguidance::Matcher;

/// What the next token of a sample may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// One of the ids in its mask.
    Masked,
    /// None: the grammar is complete and nothing can follow.
    Complete,
    /// None: the grammar does not take what was sampled, or has become too complex to follow.
    Rejected,
}

/// A matcher and the mask behind the tokens that it has seen.
pub struct Matching {
    matcher: Matcher,
    hides_eos: bool,
    mask: Vec<u32>,
    verdict: Verdict,
}

impl std::fmt::Debug for Matching {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matching").field("verdict", &self.verdict).finish_non_exhaustive()
    }
}

impl Matching {
    /// A matcher that has seen nothing. With `hides_eos` an id that ends an answer is allowed only where nothing else is.
    #[must_use]
    pub(crate) fn new(matcher: Matcher, eos_token_ids: &[u32], num_words: usize, hides_eos: bool) -> Self {
        let mut matching = Self { matcher, hides_eos, mask: vec![0; num_words], verdict: Verdict::Masked };
        matching.compute_mask(eos_token_ids);
        matching
    }

    /// Take tokens that were sampled, and compute what may follow.
    pub(crate) fn advance(&mut self, tokens: &[u32], eos_token_ids: &[u32]) {
        for &token in tokens {
            if self.verdict != Verdict::Masked {
                return;
            }
            if self.matcher.is_stopped() || self.matcher.consume_token(token).is_err() {
                self.verdict = Verdict::Rejected;
            } else if self.matcher.is_stopped() {
                self.verdict =
                    if self.matcher.stop_reason().is_ok() { Verdict::Complete } else { Verdict::Rejected };
            }
        }
        self.compute_mask(eos_token_ids);
    }

    /// What may follow.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// The ids that may follow: bit `i % 32` of word `i / 32` is for id `i`.
    #[must_use]
    pub fn mask(&self) -> &[u32] {
        &self.mask
    }

    fn compute_mask(&mut self, eos_token_ids: &[u32]) {
        if self.verdict != Verdict::Masked {
            return;
        }
        let Ok(allowed) = self.matcher.compute_mask_or_eos() else {
            self.verdict = Verdict::Rejected;
            return;
        };
        let words = allowed.as_slice();
        let count = self.mask.len().min(words.len());
        self.mask[..count].copy_from_slice(&words[..count]);
        self.mask[count..].fill(0);
        let with_eos = self.mask.iter().any(|&word| word != 0);
        let mut hidden = Vec::new();
        for &eos in eos_token_ids {
            let (word, bit) = (eos as usize / 32, 1 << (eos % 32));
            if let Some(word) = self.mask.get_mut(word).filter(|word| **word & bit != 0) {
                *word &= !bit;
                hidden.push(eos);
            }
        }
        let without_eos = self.mask.iter().any(|&word| word != 0);
        let is_over = with_eos || self.matcher.is_stopped();
        self.verdict = match (without_eos, is_over) {
            (true, _) => Verdict::Masked,
            (false, true) => Verdict::Complete,
            (false, false) => Verdict::Rejected,
        };
        if !self.hides_eos {
            for eos in hidden {
                self.mask[eos as usize / 32] |= 1 << (eos % 32);
            }
        }
    }
}

/// A sample as the threads share it: the first one that comes does the work, the second finds it done.
#[derive(Debug)]
pub(crate) struct Sample {
    /// Tokens that the matcher has not seen.
    pending: Mutex<Vec<u32>>,
    /// `None` until the grammar is compiled.
    matching: Mutex<Option<Matching>>,
}

impl Sample {
    pub(crate) fn new() -> Self {
        Self { pending: Mutex::default(), matching: Mutex::default() }
    }

    /// The grammar is compiled.
    pub(crate) fn begin(&self, matching: Matching) {
        *lock(&self.matching) = Some(matching);
    }

    /// Tokens that came.
    pub(crate) fn push(&self, tokens: impl Iterator<Item = u32>) {
        lock(&self.pending).extend(tokens);
    }

    /// Do what is to be done and look at the outcome; waits for a thread that is at it.
    pub(crate) fn settle<T>(&self, eos_token_ids: &[u32], look: impl FnOnce(Option<&Matching>) -> T) -> T {
        let mut matching = lock(&self.matching);
        let tokens = std::mem::take(&mut *lock(&self.pending));
        if let Some(matching) = &mut *matching
            && !tokens.is_empty()
        {
            matching.advance(&tokens, eos_token_ids);
        }
        look(matching.as_ref())
    }
}

/// A thread that panicked has left whole values behind.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
