//! `History`: what one request's drafts are made of.

use crate::{
    archive::{Archive, PIECE},
    config::{DrafterConfig, DraftingMethod},
    credit::Credit,
    estimate::Estimate,
    matches::SuffixLimits,
    ngram::NgramIndex,
    prediction::Prediction,
    suffix::{MatchedBy, NUM_KINDS, SuffixIndex},
};

/// After so many tokens for which nothing was found, one in so many is looked for.
const PATIENCE: u32 = 8;
const STRIDE: usize = 4;

#[derive(Clone, Debug)]
enum Index {
    Ngram(NgramIndex),
    Suffix(SuffixIndex),
    /// A second model guesses.
    Model,
}

/// Stands for a guess that a second model makes when the step runs.
pub const UNKNOWN_GUESS: i32 = -1;

/// Tokens after which a second model whose guesses are not run is believed as little known as at first: it may have
/// got better since.
const FORGOTTEN_AFTER: usize = 512;

/// Where guesses come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Source {
    Own,
    Archive,
    Prediction,
    Model,
}

impl Index {
    fn append(&mut self, tokens: &[i32]) {
        match self {
            Self::Ngram(ngram) => ngram.append(tokens),
            Self::Suffix(suffix) => suffix.append(tokens),
            Self::Model => {}
        }
    }
}

/// The tokens of a request, indexed, and how right its drafts were. The tokens themselves stay with the request.
#[derive(Clone, Debug)]
pub struct History {
    index: Index,
    /// Of what the index says, by how many tokens it was found, and of what the archive does.
    estimates: [Estimate; NUM_KINDS],
    matched_by: MatchedBy,
    archive_estimate: Estimate,
    prediction: Option<Prediction>,
    /// What was guessed last, whether it ran or not, and how many tokens there were then.
    guessed: Vec<i32>,
    guessed_at: usize,
    source: Source,
    /// What tells requests apart that may not learn of each other.
    seed: u64,
    num_prompt_tokens: usize,
    /// Tokens of the prompt, and of the answer as far as the archive has it.
    num_archived: usize,
    /// Times in a row that nothing was found.
    num_misses: u32,
    /// Tokens when guesses of a second model were last verified.
    verified_at: usize,
    pub(crate) credit: Credit,
}

impl History {
    /// The history of a request that holds its prompt. `num_tokens` is how many it will about have, `prediction` what
    /// its caller expects as the answer (empty: nothing).
    #[must_use]
    pub fn new(
        config: &DrafterConfig,
        prompt: &[i32],
        prediction: &[i32],
        num_tokens: usize,
        seed: u64,
    ) -> Self {
        let mut index = match config.method {
            DraftingMethod::Ngram { min, max } => Index::Ngram(NgramIndex::new(min, max, seed)),
            DraftingMethod::Suffix(limits) => Index::Suffix(SuffixIndex::new(limits, num_tokens, seed)),
            DraftingMethod::Model => Index::Model,
        };
        index.append(prompt);
        let estimate = match index {
            Index::Model => Estimate::of_model(),
            Index::Ngram(_) | Index::Suffix(_) => Estimate::default(),
        };
        Self {
            index,
            estimates: [estimate; NUM_KINDS],
            matched_by: MatchedBy::default(),
            archive_estimate: Estimate::default(),
            prediction: Prediction::new(prediction, prompt.len(), seed),
            guessed: Vec::new(),
            guessed_at: 0,
            source: Source::Own,
            seed,
            num_prompt_tokens: prompt.len(),
            num_archived: prompt.len(),
            num_misses: 0,
            verified_at: prompt.len(),
            credit: Credit::default(),
        }
    }

    /// How often guesses were right lately that came from where the last one did.
    #[must_use]
    pub fn estimate(&self) -> Estimate {
        match (self.source, &self.prediction) {
            (Source::Prediction, Some(prediction)) => prediction.estimate,
            (Source::Archive, _) => self.archive_estimate,
            _ => self.estimates[self.matched_by as usize],
        }
    }

    /// Whether the last guesses are what the caller predicts.
    #[must_use]
    pub fn is_predicted(&self) -> bool {
        self.source == Source::Prediction
    }

    /// Append at most `limit` guesses of what follows `tokens` to `drafts`: what the caller predicts, while the answer
    /// follows that, else what stood behind the same tokens before, else what stood behind them in other answers. With
    /// `is_choosy`, no more than are likely to be reached.
    pub fn propose(
        &mut self,
        tokens: &[i32],
        limit: usize,
        is_choosy: bool,
        archive: Option<&Archive>,
        drafts: &mut Vec<i32>,
    ) {
        self.learn(tokens);
        let within = |estimate: Estimate| if is_choosy { limit.min(estimate.reach()) } else { limit };
        self.index.append(tokens);
        let first = drafts.len();
        if let Some(prediction) = &mut self.prediction {
            let limit = within(prediction.estimate);
            drafts.extend(prediction.following(tokens).iter().take(limit));
        }
        self.source = Source::Prediction;
        if drafts.len() == first && self.may_search(tokens.len()) {
            self.source = Source::Own;
            if matches!(self.index, Index::Model) {
                self.source = Source::Model;
                if tokens.len() >= self.verified_at + FORGOTTEN_AFTER {
                    self.estimates[self.matched_by as usize] = Estimate::of_model();
                    self.verified_at = tokens.len();
                }
            }
            match &mut self.index {
                Index::Ngram(ngram) => drafts.extend(ngram.following(tokens).iter().take(limit)),
                Index::Suffix(suffix) => {
                    self.matched_by = suffix.propose(tokens, limit, drafts);
                    self.believe_longer();
                }
                Index::Model => drafts.resize(first + limit, UNKNOWN_GUESS),
            }
            drafts.truncate(first + within(self.estimates[self.matched_by as usize]));
        }
        // What three tokens say of other answers counts more than what two say of this one.
        let num_weak = drafts.len() - first;
        let is_weak = self.source == Source::Own && self.matched_by == MatchedBy::Few;
        if (num_weak == 0 || is_weak)
            && self.may_search(tokens.len())
            && let (Some(archive), Some(limits)) = (archive, self.limits())
        {
            archive.propose(self.seed, &limits, tokens, within(self.archive_estimate), drafts);
            if num_weak == 0 || drafts.len() > first + num_weak {
                self.source = Source::Archive;
                drafts.drain(first..first + num_weak);
            }
        }
        self.num_misses = if drafts.len() == first { self.num_misses.saturating_add(1) } else { 0 };
        self.guessed.clear();
        self.guessed.extend_from_slice(&drafts[first..]);
        self.guessed_at = tokens.len();
    }

    /// A step has run the first guesses: so many were right, and the one behind them was wrong if `missed`. Of guesses
    /// that are known here nothing new.
    pub fn verify(&mut self, num_right: u32, missed: bool) {
        if self.source == Source::Model {
            self.estimates[self.matched_by as usize].observe(num_right, missed);
            self.verified_at = self.guessed_at;
        }
    }

    /// Until a match of this kind was seen to be right or wrong, it says as much as shorter ones of the same text.
    fn believe_longer(&mut self) {
        let (shorter, rest) = self.estimates.split_at_mut(self.matched_by as usize);
        if rest[0].is_new()
            && let Some(known) = shorter.iter().rfind(|estimate| !estimate.is_new())
        {
            rest[0].believe(known.acceptance());
        }
    }

    /// Compare what was guessed last with what came, also where the guess was not run.
    fn learn(&mut self, tokens: &[i32]) {
        if self.source == Source::Model {
            return; // They were not known here.
        }
        let came = tokens.get(self.guessed_at..).unwrap_or_default();
        let known = came.len().min(self.guessed.len());
        let right =
            self.guessed[..known].iter().zip(came).take_while(|(guess, token_id)| guess == token_id).count();
        if known > 0 {
            let estimate = match (self.source, &mut self.prediction) {
                (Source::Prediction, Some(prediction)) => &mut prediction.estimate,
                (Source::Archive, _) => &mut self.archive_estimate,
                _ => &mut self.estimates[self.matched_by as usize],
            };
            estimate.observe(right as u32, right < known);
        }
    }

    /// Put what was answered since the last time into the archive: whole pieces, and with `is_over` the rest. What was
    /// answered before by the same request is there already.
    pub fn archive(&mut self, archive: &mut Archive, tokens: &[i32], is_over: bool) {
        while tokens.len() >= self.num_archived + if is_over { 1 } else { PIECE } {
            let (first, end) = (self.num_archived, tokens.len().min(self.num_archived + PIECE));
            let is_there = match &self.index {
                Index::Suffix(suffix) => suffix.repeats(first, end, self.num_prompt_tokens),
                Index::Ngram(_) | Index::Model => false,
            };
            if !is_there {
                archive.add(self.seed, tokens, first);
            }
            self.num_archived += PIECE;
        }
    }

    /// Whether to look for the newest of so many tokens: after a while in which nothing was found, now and then.
    fn may_search(&self, num_tokens: usize) -> bool {
        self.num_misses < PATIENCE || num_tokens.is_multiple_of(STRIDE)
    }

    fn limits(&self) -> Option<SuffixLimits> {
        match &self.index {
            Index::Suffix(suffix) => Some(suffix.limits()),
            Index::Ngram(_) | Index::Model => None,
        }
    }
}
