//! `History`: what one request's drafts are made of.

use crate::{
    archive::{Archive, PIECE},
    beliefs::{Beliefs, Kind, NUM_FIRST, NUM_KINDS},
    config::{DrafterConfig, DraftingMethod},
    credit::Credit,
    estimate::{Belief, Estimate},
    matches::SuffixLimits,
    ngram::NgramIndex,
    prediction::Prediction,
    suffix::{MatchedBy, SuffixIndex},
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
    /// How right guesses of each kind were.
    estimates: [Estimate; NUM_KINDS],
    /// How many of them have counted for other requests.
    num_counted: [u8; NUM_KINDS],
    prediction: Option<Prediction>,
    /// What was guessed last, whether it ran or not, and how many tokens there were then.
    guessed: Vec<i32>,
    guessed_at: usize,
    kind: Kind,
    /// The share of that kind that was believed to be right of a request of which nothing is known.
    prior: f32,
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
        Self {
            index,
            estimates: [Estimate::default(); NUM_KINDS],
            num_counted: [0; NUM_KINDS],
            prediction: Prediction::new(prediction, prompt.len(), seed),
            guessed: Vec::new(),
            guessed_at: 0,
            kind: Kind::default(),
            prior: 0.0,
            seed,
            num_prompt_tokens: prompt.len(),
            num_archived: prompt.len(),
            num_misses: 0,
            verified_at: prompt.len(),
            credit: Credit::default(),
        }
    }

    /// How likely the last guesses are.
    #[must_use]
    pub fn belief(&self) -> Belief {
        self.estimates[self.kind as usize].belief(self.prior)
    }

    /// Whether the last guesses are what the caller predicts.
    #[must_use]
    pub fn is_predicted(&self) -> bool {
        self.kind == Kind::Prediction
    }

    /// Append at most `limit` guesses of what follows `tokens` to `drafts`: what the caller predicts, while the answer
    /// follows that, else what stood behind the same tokens before, else what stood behind them in other answers. With
    /// `is_choosy`, no more than are likely to be reached. `beliefs` says what is believed of new requests, and learns
    /// from this one.
    pub fn propose(
        &mut self,
        tokens: &[i32],
        limit: usize,
        is_choosy: bool,
        archive: Option<&Archive>,
        beliefs: &mut Beliefs,
        drafts: &mut Vec<i32>,
    ) {
        self.learn(tokens, beliefs);
        self.index.append(tokens);
        let first = drafts.len();
        let may_search = self.may_search(tokens.len());
        if let Some(prediction) = &mut self.prediction {
            drafts.extend(prediction.following(tokens).iter().take(limit));
            self.take_for(Kind::Prediction, beliefs);
            drafts.truncate(first + self.within(limit, is_choosy));
        }
        if drafts.len() == first && may_search {
            let kind = match &mut self.index {
                Index::Ngram(ngram) => {
                    drafts.extend(ngram.following(tokens).iter().take(limit));
                    Kind::Some
                }
                Index::Suffix(suffix) => match suffix.propose(tokens, limit, drafts) {
                    MatchedBy::Few => Kind::Few,
                    MatchedBy::Some => Kind::Some,
                    MatchedBy::Many => Kind::Many,
                },
                Index::Model => {
                    if tokens.len() >= self.verified_at + FORGOTTEN_AFTER {
                        self.estimates[Kind::Model as usize] = Estimate::default();
                        self.verified_at = tokens.len();
                    }
                    drafts.resize(first + limit, UNKNOWN_GUESS);
                    Kind::Model
                }
            };
            self.take_for(kind, beliefs);
            drafts.truncate(first + self.within(limit, is_choosy));
        }
        // What three tokens say of other answers counts more than what two say of this one.
        let num_weak = drafts.len() - first;
        if (num_weak == 0 || self.kind == Kind::Few)
            && may_search
            && let (Some(archive), Some(limits)) = (archive, self.limits())
        {
            let before = std::mem::replace(&mut self.kind, Kind::Archive);
            self.take_for(Kind::Archive, beliefs);
            archive.propose(self.seed, &limits, tokens, self.within(limit, is_choosy), drafts);
            if num_weak == 0 || drafts.len() > first + num_weak {
                drafts.drain(first..first + num_weak);
            } else {
                self.take_for(before, beliefs);
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
        if self.kind == Kind::Model {
            self.estimates[self.kind as usize].observe(num_right, missed);
            self.verified_at = self.guessed_at;
        }
    }

    /// Guesses are of this kind. What a longer match says was seen to be right as often as what shorter ones of the same
    /// text said, at least.
    fn take_for(&mut self, kind: Kind, beliefs: &Beliefs) {
        self.kind = kind;
        self.prior = beliefs.share(kind);
        if let Kind::Some | Kind::Many = kind
            && let shorter = &self.estimates[..kind as usize]
            && let Some(known) = shorter.iter().rfind(|estimate| !estimate.is_new())
        {
            self.prior = self.prior.max(known.belief(beliefs.share(Kind::Few)).acceptance());
        }
    }

    /// Of `limit` guesses, those that are likely to be reached.
    fn within(&self, limit: usize, is_choosy: bool) -> usize {
        if is_choosy { limit.min(self.belief().reach()) } else { limit }
    }

    /// Compare what was guessed last with what came, also where the guess was not run.
    fn learn(&mut self, tokens: &[i32], beliefs: &mut Beliefs) {
        if self.kind == Kind::Model {
            return; // They were not known here.
        }
        let came = tokens.get(self.guessed_at..).unwrap_or_default();
        let known = came.len().min(self.guessed.len());
        let right =
            self.guessed[..known].iter().zip(came).take_while(|(guess, token_id)| guess == token_id).count();
        if known > 0 {
            let kind = self.kind as usize;
            self.estimates[kind].observe(right as u32, right < known);
            if self.num_counted[kind] < NUM_FIRST {
                self.num_counted[kind] += 1;
                beliefs.observe(self.kind, right > 0);
            }
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
